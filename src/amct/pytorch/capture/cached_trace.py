"""Looks at a model once, although several functions of a flow ask for it.

What was learned is remembered as long as the model object lives, and used again as long as the model looks the same:
the same modules with the same settings and tensors, and an example input of the same form. The memory holds the model
only weakly.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils import _pytree as pytree

from amct.pytorch.capture.example_inputs import example_inputs
from amct.pytorch.capture.operators import refuse_operators
from amct.pytorch.capture.trace import Traced, trace
from amct.pytorch.model_copy import unwrap
from amct.pytorch.onnx.io_names import IoNames

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from amct.pytorch.capture.example_inputs import ExampleInputs

_seen: WeakKeyDictionary[nn.Module, tuple[object, Traced]] = WeakKeyDictionary()
"""The last look at each living model, without the model itself. A cache: forgetting it costs time only."""
_lock = threading.Lock()

_PLAIN = (bool, int, float, str, bytes, type(None))


def look(
    model: nn.Module,
    input_data: object,
    *,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    dynamic_axes: Mapping[str, Any] | None = None,
) -> Traced:
    """``trace``, or what it told of this model before; arguments and errors are its own."""
    names = {"input_names": input_names, "output_names": output_names, "dynamic_axes": dynamic_axes}
    if not isinstance(model, nn.Module):
        return trace(model, input_data)  # refuses it
    model = unwrap(model)
    refuse_operators(model)
    inputs = example_inputs(model, input_data)
    io_names = IoNames.checked(input_names, output_names, dynamic_axes, inputs=inputs.names)
    appearance = (tuple(_appearance(model)), _form(inputs), io_names.open_axes(inputs.tensors()))
    with _lock:
        known = _seen.get(model)
    if known is not None and known[0] == appearance:
        return replace(known[1], model=model, inputs=inputs, names=io_names)
    traced = trace(model, input_data, **names)  # type: ignore[arg-type]  # one value type for three arguments
    with _lock:
        # The model and the example must not be kept alive by the memory of them.
        _seen[model] = (appearance, replace(traced, model=_NOBODY, inputs=replace(inputs, args=(), kwargs={})))
    return traced


_NOBODY = nn.Identity()


def _appearance(model: nn.Module) -> Iterator[object]:
    """Everything about a model that its trace depends on and that can be compared."""
    for name, module in model.named_modules(remove_duplicate=False):
        yield name, type(module), id(module)
        for attribute, value in vars(module).items():
            if attribute in ("_parameters", "_buffers"):
                yield from ((attribute, key, _tensor_form(tensor)) for key, tensor in value.items())
            elif attribute.startswith("_forward") and attribute.endswith("hooks"):
                yield attribute, tuple(id(hook) for hook in value.values())
            elif attribute not in ("_modules", "training"):
                yield attribute, _comparable(value)


def _comparable(value: object) -> object:
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, (tuple, list)):
        return type(value), tuple(_comparable(item) for item in value)
    if isinstance(value, dict):
        return type(value), tuple((_comparable(key), _comparable(item)) for key, item in value.items())
    return _tensor_form(value) if isinstance(value, torch.Tensor) else id(value)


def _tensor_form(tensor: object) -> object:
    if not isinstance(tensor, torch.Tensor) or torch.nn.parameter.is_lazy(tensor):
        return id(tensor)
    return id(tensor), tuple(tensor.shape), tensor.dtype, tensor.device


def _form(inputs: ExampleInputs) -> object:
    """Structure, shapes and types of the example; values only of what is no tensor."""
    leaves, structure = pytree.tree_flatten((inputs.args, inputs.kwargs))
    forms = [
        (tuple(leaf.shape), leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else _comparable(leaf)
        for leaf in leaves
    ]
    return str(structure), forms
