"""Compares any float model with its quantized one, layer by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from amct.errors import ArgumentTypeError, ModelError
from amct.pytorch.batches import Batches
from amct.pytorch.comparing import compare_layers
from amct.pytorch.model_copy import copy_model, unwrap
from amct.pytorch.quantize import QuantizedModel

if TYPE_CHECKING:
    from amct.pytorch.batches import BatchInputs
    from amct.pytorch.watch.layer_hooks import Arguments
    from amct.report.compare import LayerComparison


def compare(
    float_model: nn.Module,
    quantized_model: QuantizedModel | nn.Module,
    data: object,
    *,
    inputs: BatchInputs | None = None,
) -> list[LayerComparison]:
    """Run both models on data and compare the outputs of their layers, in execution order.

    A layer with a folded batch norm is compared with what the batch norm makes in the float model.

    Args:
        float_model: the original; it stays as it is, and is run in eval mode.
        quantized_model: what ``quantize`` returned, whose quantized layers are compared; or a simulated model, in which
            every module with weights is compared that has the same name in both.
        data: a tensor, an iterable of batches or a DataLoader, as for ``quantize``.
        inputs: as for ``quantize``.

    Raises:
        ArgumentTypeError: one of the models is none.
        ArgumentError: the outputs of a layer have different shapes.
        ModelError: the models have no layer in common.
        CalibrationError: there is no data.
    """
    if not isinstance(float_model, nn.Module):
        raise ArgumentTypeError(f"float_model: expected a torch.nn.Module, got {type(float_model).__name__}")
    if not isinstance(quantized_model, (QuantizedModel, nn.Module)):
        raise ArgumentTypeError(
            "quantized_model: expected what quantize() returned or a torch.nn.Module, "
            f"got {type(quantized_model).__name__}"
        )
    reference = copy_model(unwrap(float_model), share_tensors=True)
    batches = Batches(reference, data, inputs)
    example = batches.first()
    if isinstance(quantized_model, QuantizedModel):
        other, layers = quantized_model.model, quantized_model.float_places
    else:
        other = copy_model(unwrap(quantized_model), share_tensors=True)
        layers = _common_layers(reference, other, example)
    missing = [place for place in layers.values() if not _has(reference, place)]
    if missing or not layers:
        lacking = f'; "{missing[0]}" is not in {type(reference).__name__}' if missing else ""
        raise ModelError(f"float_model and quantized_model must have the same layer names{lacking}")
    return compare_layers(reference, other, layers, batches)


def _has(model: nn.Module, path: str) -> bool:
    try:
        model.get_submodule(path)
    except AttributeError:
        return False
    return True


def _common_layers(reference: nn.Module, other: nn.Module, arguments: Arguments) -> dict[str, str]:
    """The modules with weights of their own that both models have and that mean the same in both."""
    mine = dict(other.named_modules())
    leaves = {
        name: module
        for name, module in reference.named_modules()
        if name in mine and next(module.parameters(recurse=False), None) is not None
    }
    folded = {name for name in leaves if isinstance(mine[name], nn.Identity)}
    changed = _makers(reference, leaves, folded, arguments) if folded else set()
    return {name: name for name in leaves if name not in changed}


def _makers(model: nn.Module, leaves: dict[str, nn.Module], folded: set[str], arguments: Arguments) -> set[str]:
    """The layers that feed the modules folded away: their weights have taken these in, and their outputs differ."""
    made: list[tuple[str, object]] = []
    makers: set[str] = set()

    def remember(name: str) -> Any:  # noqa: ANN401  a hook
        return lambda _, __, output: made.append((name, output))

    def look_up(_: nn.Module, args: tuple[Any, ...]) -> None:
        makers.update(name for name, output in made if args and output is args[0])

    handles = [module.register_forward_hook(remember(name)) for name, module in leaves.items()]
    handles += [leaves[name].register_forward_pre_hook(look_up) for name in folded]
    try:
        with torch.no_grad():
            model(*arguments[0], **arguments[1])
    finally:
        for handle in handles:
            handle.remove()
    return makers
