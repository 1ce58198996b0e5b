"""Decomposition of a torch model in one call: layers become two smaller ones, fitted to what they compute on data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from amct.errors import ArgumentError, ArgumentTypeError
from amct.model import Skip
from amct.pytorch.capture.cached_trace import cached_trace
from amct.pytorch.decomposition.pairs import RESPONSES, info_text, put_pairs
from amct.pytorch.decomposition.ranks import RankChoice, measure
from amct.pytorch.inputs import IoOptions, torch_batches
from amct.pytorch.pruning.compensation import refresh_batch_norms
from amct.pytorch.pruning.propagation import map_channels
from amct.pytorch.pruning.pruned_model import PrunedModel
from amct.pytorch.pruning.removal import Removal, cost_of
from amct.pytorch.pruning.saving import FloatFiles
from amct.pytorch.user_model import copy_in_its_mode, copy_model
from amct.record import Record


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class DecomposedModel(PrunedModel):
    """A model some of whose layers are pairs of smaller ones.

    ``channels`` has the numbers of outputs of each pair's layer and its rank.

    Attributes:
        structure: What ``amct_pytorch.tensor_decompose.decompose_network`` reads to give another copy of the model the
            same structure.
    """

    structure: str

    _counted: ClassVar[str] = "rank"

    def _what(self, changed: int) -> str:
        return f"{changed} of {changed + len(self.skipped)} layers decomposed"

    def _files(self) -> FloatFiles:
        return FloatFiles(others={"decomposition.json": self.structure.encode()})


def decompose(
    model: nn.Module,
    batches: object,
    *,
    flops: float = 0.5,
    align: int = 8,
    skip_slower: bool = True,
    io: IoOptions | None = None,
) -> DecomposedModel:
    """Replace layers by pairs of smaller ones that compute nearly the same on data; fine-tune the model afterwards.

    Convolutions and linear layers without groups become one with fewer outputs (the rank) and one of size 1. The ranks
    are chosen together: those that change the model's outputs least, at the cost asked for. No labels are needed.

    Args:
        model: Any nn.Module; it is not changed.
        batches: Data as the model gets it: a tensor, an iterable or a DataLoader.
        flops: The fraction of the multiply-accumulate operations that is left, at most.
        align: Ranks are multiples of this: kernels are fast with multiples of 8 or 16.
        skip_slower: Whether layers stay whole whose pair would be slower in onnxruntime on this machine.
        io: Names and dynamic axes of the exported files.

    Raises:
        AmctError: The subclass tells whether arguments, model or data are invalid, or the goal is out of reach.
    """
    _check(model, flops, align)
    data = torch_batches(model, batches, name="batches")
    data.keep()
    args, kwargs = first = data.first()
    traced = cached_trace(model, (*args, kwargs))
    before = cost_of(Removal(map_channels(traced)))
    measured = measure(model, data)
    choice = RankChoice(model, measured, first, align)
    ranks = choice.ranks(flops, before.macs)
    while skip_slower and choice.without_slower(ranks):
        ranks = choice.ranks(flops, before.macs)
    whole = copy_in_its_mode(model)
    pairs = {name: measured[name].pair(whole.get_submodule(name), rank) for name, rank in ranks.items()}
    result = put_pairs(whole, pairs)
    refresh_batch_norms(result, data)
    return DecomposedModel(
        model=result,
        record=Record(),
        skipped=tuple(Skip(name, reason) for name, reason in choice.reasons(ranks).items()),
        channels={name: (measured[name].outputs, rank) for name, rank in ranks.items()},
        before=before,
        after=cost_of(Removal(map_channels(cached_trace(copy_model(result), (*args, kwargs))))),
        original=traced,
        config=f"decomposition, flops {flops:g}, align {align}",
        io=io or IoOptions(),
        structure=info_text({name: (measured[name].layer, RESPONSES, rank) for name, rank in ranks.items()}),
    )


def _check(model: object, flops: object, align: object) -> None:
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if isinstance(flops, bool) or not isinstance(flops, int | float) or not 0 < flops < 1:
        raise ArgumentError(f"flops: expected a number between 0 and 1, got {flops!r}")
    if isinstance(align, bool) or not isinstance(align, int) or align < 1:
        raise ArgumentError(f"align: expected a whole number from 1, got {align!r}")
