"""Runs two copies of a model side by side and compares what their layers make."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from amct.report.compare import Comparison

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import Tensor, nn

    from amct.pytorch.watch.layer_hooks import Arguments
    from amct.report.compare import LayerComparison


def compare_layers(
    reference: nn.Module, other: nn.Module, layers: Mapping[str, str], batches: Iterable[Arguments]
) -> list[LayerComparison]:
    """Compare the outputs of some layers on data; the outputs of one batch at a time are held in memory.

    Args:
        reference: the float model.
        other: the model compared with it.
        layers: the layers of ``other``, each with the module of ``reference`` that makes the same output.
        batches: the data.
    """
    comparison = Comparison()
    with side_by_side(reference, other, layers, comparison) as run:
        for arguments in batches:
            run(arguments)
    return comparison.layers()


@contextmanager
def side_by_side(
    reference: nn.Module, other: nn.Module, layers: Mapping[str, str], comparison: Comparison
) -> Iterator[Callable[[Arguments], tuple[Any, Any]]]:
    """A function that runs both models on one batch and gives both outputs; the layers go into ``comparison``."""
    seen: dict[str, list[Tensor]] = {}
    handles = []

    def keep(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: object, output: Any) -> None:  # noqa: ANN401  a tensor, or a tuple of a recurrent layer
            # A copy, because a ReLU that works in place would change it before it is compared.
            seen.setdefault(name, []).append(_first_tensor(output).clone())

        return hook

    def compare(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: object, output: Any) -> None:  # noqa: ANN401  as above
            if seen.get(name):
                comparison.add(name, seen[name].pop(0), _first_tensor(output))

        return hook

    def run(arguments: Arguments) -> tuple[Any, Any]:
        seen.clear()
        outputs = []
        with torch.no_grad():
            for model in (reference, other):
                args, kwargs = _on_device_of(model, arguments)
                outputs.append(model(*args, **kwargs))
        return outputs[0], outputs[1]

    for name, place in layers.items():
        handles.append(reference.get_submodule(place).register_forward_hook(keep(name)))
        handles.append(other.get_submodule(name).register_forward_hook(compare(name)))
    try:
        yield run
    finally:
        for handle in handles:
            handle.remove()


def _first_tensor(output: Any) -> Tensor:  # noqa: ANN401  a tensor, or a tuple of a recurrent layer
    found: Tensor = output[0] if isinstance(output, tuple) else output
    return found


def _on_device_of(model: nn.Module, arguments: Arguments) -> Arguments:
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    moved: Arguments = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, copy=True), arguments)
    return moved
