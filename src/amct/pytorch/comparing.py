"""Runs two copies of a model side by side and compares what their layers make."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from amct.report.compare import Comparison

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor, nn

    from amct.pytorch.layer_hooks import Arguments
    from amct.report.compare import LayerComparison


def compare_layers(
    reference: nn.Module, other: nn.Module, layers: Iterable[str], batches: Iterable[Arguments]
) -> list[LayerComparison]:
    """Compare the outputs of some layers on data; the outputs of one batch at a time are held in memory."""
    comparison = Comparison()
    seen: dict[str, Tensor] = {}
    handles = []

    def keep(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: object, output: Any) -> None:  # noqa: ANN401  a tensor, or a tuple of a recurrent layer
            seen[name] = output[0] if isinstance(output, tuple) else output

        return hook

    def compare(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: object, output: Any) -> None:  # noqa: ANN401  as above
            if name in seen:
                comparison.add(name, seen.pop(name), output[0] if isinstance(output, tuple) else output)

        return hook

    for name in layers:
        handles.append(reference.get_submodule(name).register_forward_hook(keep(name)))
        handles.append(other.get_submodule(name).register_forward_hook(compare(name)))
    try:
        with torch.no_grad():
            for arguments in batches:
                seen.clear()
                for model in (reference, other):
                    args, kwargs = _on_device_of(model, arguments)
                    model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return comparison.layers()


def _on_device_of(model: nn.Module, arguments: Arguments) -> Arguments:
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    moved: Arguments = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, copy=True), arguments)
    return moved
