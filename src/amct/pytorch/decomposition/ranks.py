"""Which rank each layer of a model gets: measured on data, chosen together for a number of operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from amct import log
from amct.errors import ArgumentError, ModelArgumentError
from amct.export.check.running import LoadedModel, median_seconds
from amct.numerics.low_rank import ResponseMoments, response_factors
from amct.printable import counted
from amct.pytorch.decomposition.pairs import RESPONSES, Pairable, PairBuilder, put_pairs, why_not_replaceable
from amct.pytorch.inputs import IoOptions, tensors_in
from amct.pytorch.pruning.saving import float_model, onnx_feeds, traced_plain
from amct.pytorch.user_model import copy_model
from amct.search.ladder import Ladder, Option

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from amct.pytorch.layer_hooks import Arguments

LARGEST_OUTPUTS = 2048
"""Layers with more outputs are not measured: the covariance grows with their square."""
_FASTER = 0.98
"""A pair is put in only if it takes at most this share of its layer's time; smaller differences are noise."""
_TIMING = 0.1
"""CPU seconds for the timing of one pair."""


@dataclass(eq=False)
class Measured:
    """What a layer computes on data.

    Attributes:
        layer: Of the user's model; it is not changed.
        moments: Of its responses.
        positions: At how many positions of the first batch its whole weight is multiplied.
        example: Its first input.
        reason: Why it stays whole, if it does.
    """

    layer: Pairable
    moments: ResponseMoments
    positions: int = 0
    example: Tensor | None = None
    reason: str | None = None

    def add(self, layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Add one call, as a forward hook."""
        axis = -1 if isinstance(layer, nn.Linear) else 1 - self.layer.weight.ndim
        self.moments.add(output.movedim(axis, -1))
        if self.example is None:
            self.example = inputs[0].detach()
            self.positions = output.numel() // output.shape[axis]

    @property
    def outputs(self) -> int:
        """The number of the layer's outputs."""
        return len(self.layer.weight)

    def macs(self, rank: int | None = None) -> int:
        """The multiply-accumulate operations of the layer on the first batch, or those of a pair."""
        weight = self.layer.weight
        return self.positions * (weight.numel() if rank is None else rank * (weight[0].numel() + len(weight)))

    def lost_variance(self) -> Tensor:
        """The share of the responses' variance that a pair of each rank, from 0, loses."""
        variances = self.moments.components()[1]
        lost = torch.cat([variances.flip(0).cumsum(0).flip(0), variances.new_zeros(1)])
        return lost / lost[0].clamp_min(torch.finfo(lost.dtype).tiny)

    def pair(self, layer: nn.Module, rank: int) -> nn.Sequential:
        """The pair of a rank that loses least, for this layer in a copy of the model."""
        assert isinstance(layer, Pairable)
        factors, bias = response_factors(layer.weight, layer.bias, self.moments, rank)
        pair = PairBuilder().pair(layer, RESPONSES, rank, lambda: factors)
        pair[1].bias = nn.Parameter(bias.to(layer.weight.dtype).to(layer.weight.device))
        return pair


def measure(model: nn.Module, batches: Iterable[Arguments]) -> dict[str, Measured]:
    """Run a model on data; returns its convolutions and linear layers by name.

    Raises:
        ModelArgumentError: A layer computes NaN or infinite values.
    """
    watched = copy_model(model, share_tensors=True)
    users: dict[int, int] = {}
    for module in watched.modules():
        for parameter in module._parameters.values():
            users[id(parameter)] = users.get(id(parameter), 0) + 1
    found = {}
    for name, layer in watched.named_modules():
        if isinstance(layer, Pairable):
            reason = _why_whole(layer, users)
            own = model.get_submodule(name)
            assert isinstance(own, Pairable)
            found[name] = each = Measured(own, ResponseMoments(0 if reason else len(layer.weight)), reason=reason)
            if reason is None:
                layer.register_forward_hook(each.add)
    with torch.no_grad():
        for args, kwargs in batches:
            watched(*args, **kwargs)
    for name, each in found.items():
        if each.reason is None and each.example is None:
            each.reason = "the data does not reach it"
        elif each.reason is None and not each.moments.is_finite:
            raise ModelArgumentError(f'batches: what layer "{name}" computes holds NaN or infinite values')
    return found


def _why_whole(layer: Pairable, users: Mapping[int, int]) -> str | None:
    reason = why_not_replaceable(layer)
    if reason is not None:
        return reason
    if getattr(layer, "groups", 1) > 1:
        return "it has groups"
    if users[id(layer.weight)] > 1:
        return "it shares its weight"
    return f"it has more than {LARGEST_OUTPUTS} outputs" if len(layer.weight) > LARGEST_OUTPUTS else None


class RankChoice:
    """The ranks that layers can have, what they cost, and how much they change the outputs of the model.

    Args:
        model: The user's model.
        measured: Its layers.
        batch: A batch on which each layer is tried alone.
        align: Ranks are multiples of this.
    """

    def __init__(self, model: nn.Module, measured: Mapping[str, Measured], batch: Arguments, align: int) -> None:
        self._measured = measured
        self.kept = {name: each.reason for name, each in measured.items() if each.reason is not None}
        """The layers that stay whole, with the reason."""
        ranks = {name: _fewer(each, align) for name, each in measured.items() if name not in self.kept}
        self.kept |= {
            name: f"no pair with a multiple of {align} outputs in between has fewer operations"
            for name, own in ranks.items()
            if not own
        }
        ranks = {name: own for name, own in ranks.items() if own}
        noises = _noise_of_each(model, {name: own[len(own) // 2] for name, own in ranks.items()}, measured, batch)
        self._noise: dict[str, dict[int | None, float]] = {}
        for name, own in ranks.items():
            lost = measured[name].lost_variance().tolist()
            scale = noises[name] / max(lost[own[len(own) // 2]], 1e-12)
            self._noise[name] = {None: 0.0, **{rank: scale * lost[rank] for rank in own}}

    def ranks(self, share: float, macs: int) -> dict[str, int]:
        """The ranks that change the model least and leave at most a share of its operations.

        Raises:
            ArgumentError: So few operations cannot be reached.
        """
        others = macs - sum(self._measured[name].macs() for name in self._noise)
        ladder = Ladder(
            {
                name: [
                    Option(choice=str(rank or ""), cost=self._measured[name].macs(rank), noise=noise)
                    for rank, noise in noises.items()
                ]
                for name, noises in self._noise.items()
            }
        )
        fits = [rung for rung, cost in enumerate(ladder.costs) if cost + others <= share * macs]
        if not fits:
            least = (ladder.costs[0] + others) / macs
            raise ArgumentError(
                f"flops: {share:g} of the operations cannot be reached with pairs of layers, only {least:.2f}; "
                f"{counted(len(self.kept), 'layer')} left whole, such as {', '.join(list(self.kept)[:3]) or 'none'}"
            )
        return {name: int(rank) for name, rank in ladder.choices(fits[-1]).items() if rank}

    def without_slower(self, ranks: Mapping[str, int]) -> bool:
        """Keep the layers whole whose pair is not faster; returns whether there are any."""
        slower = {name: reason for name, rank in ranks.items() if (reason := _why_slower(self._measured[name], rank))}
        for name in slower:
            del self._noise[name]
        self.kept |= slower
        return bool(slower)

    def reasons(self, ranks: Mapping[str, int]) -> dict[str, str]:
        """Why each layer without a rank stays whole."""
        return {name: self.kept.get(name, "the goal is met without it") for name in self._measured if name not in ranks}


def _fewer(measured: Measured, align: int) -> list[int]:
    """The ranks whose pairs have fewer operations than the layer."""
    return [rank for rank in range(align, measured.outputs, align) if measured.macs(rank) < measured.macs()]


def _noise_of_each(
    model: nn.Module, ranks: Mapping[str, int], measured: Mapping[str, Measured], batch: Arguments
) -> dict[str, float]:
    """The noise of the model's outputs, as a share of their power, if one layer alone is a pair."""
    args, kwargs = batch
    found = {}
    with torch.no_grad():
        whole = _values(copy_model(model, share_tensors=True)(*args, **kwargs))
        power = float(whole.square().mean()) or 1.0
        for name, rank in log.track(ranks.items(), "Trying each layer"):
            alone = copy_model(model, share_tensors=True)
            alone = put_pairs(alone, {name: measured[name].pair(alone.get_submodule(name), rank)}).eval()
            found[name] = float((_values(alone(*args, **kwargs)) - whole).square().mean()) / power
    return found


def _values(result: object) -> Tensor:
    """All floating-point outputs in one row."""
    return torch.cat([each.flatten().to(torch.float64) for each in tensors_in(result) if each.is_floating_point()])


def _why_slower(measured: Measured, rank: int) -> str | None:
    """The times of a layer and of its pair in onnxruntime, if the pair is not faster."""
    assert measured.example is not None
    runs = {}
    loaded = []
    for name, module in (("layer", nn.Sequential(measured.layer)), ("pair", measured.pair(measured.layer, rank))):
        traced = traced_plain(module, (measured.example,), IoOptions())
        onnx_model = float_model(traced)[0]
        each, feeds = LoadedModel(onnx_model), onnx_feeds(traced, onnx_model)
        each.run(feeds)
        loaded.append(each)
        runs[name] = lambda each=each, feeds=feeds: each.run(feeds)
    times = median_seconds(runs, budget=_TIMING)
    for each in loaded:
        each.close()
    if times["pair"] <= _FASTER * times["layer"]:
        return None
    return f"it takes {1e3 * times['layer']:.3g} ms, and a pair of rank {rank} {1e3 * times['pair']:.3g} ms"
