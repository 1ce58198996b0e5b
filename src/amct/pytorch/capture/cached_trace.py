"""Caches the trace of a model for the functions of a flow that need it.

A trace is cached while the model object lives, and reused while the model has the same fingerprint and the example
input has the same form. The cache holds only a weak reference to the model.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils import _pytree as pytree

from amct.errors import ModelError
from amct.pytorch.capture.example_inputs import example_inputs
from amct.pytorch.capture.fingerprint import NotComparableError, fingerprint, tensor_fingerprint
from amct.pytorch.capture.operators import refuse_operators
from amct.pytorch.capture.parametrizations import is_parametrized, with_plain_weights
from amct.pytorch.capture.trace import Traced, refuse_modules, trace
from amct.pytorch.functional.finding import find_functional_layers
from amct.pytorch.functional.layers import functional_layers
from amct.pytorch.model_copy import unwrap
from amct.pytorch.onnx.io_names import IoNames

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from amct.pytorch.capture.example_inputs import ExampleInputs

logger = logging.getLogger(__name__)

_cache: WeakKeyDictionary[nn.Module, tuple[object, Traced, bool]] = WeakKeyDictionary()
"""Fingerprint and last trace of each living model, and whether it has functional layers.

The trace is stored without the model and its inputs.
"""
_lock = threading.Lock()
_PLACEHOLDER = nn.Identity()


def cached_trace(
    model: nn.Module,
    input_data: object,
    *,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    dynamic_axes: Mapping[str, Any] | None = None,
    all_layers: bool = False,
    stored_weights: bool = False,
) -> Traced:
    """As ``trace``, with the same arguments and errors, but cached.

    ``all_layers``: functional calls on parameters and modules called several times are layers too; AMCT's functions
    leave both float. ``stored_weights``: so are layers whose forward computes the weight from parameters; the traced
    model has the computed weights, so it cannot be trained.
    """
    names = {"input_names": input_names, "output_names": output_names, "dynamic_axes": dynamic_axes}
    if not isinstance(model, nn.Module):
        return trace(model, input_data)  # raises the error
    model = unwrap(model)
    refuse_operators(model)
    refuse_modules(model)
    inputs = example_inputs(model, input_data)
    io_names = IoNames.checked(input_names, output_names, dynamic_axes, inputs=inputs.names)
    # Found anew at each call, because the values of computed biases are part of the layers.
    plain = with_plain_weights(model)
    with_layers = find_functional_layers(plain, inputs, stored=stored_weights) if all_layers else plain

    def key_of(traced: Traced) -> object | None:
        found = _key(model, inputs, io_names, with_values=_needs_values(model, traced))
        return None if found is None else (found, all_layers, stored_weights, _sources(with_layers))

    with _lock:
        cached = _cache.get(model)
    if cached is not None and cached[0] == key_of(cached[1]):
        return replace(cached[1], model=with_layers if cached[2] else plain, inputs=inputs, names=io_names)
    traced = _trace_with_layers(with_layers, input_data, names) if with_layers is not plain else None
    has_layers = traced is not None
    traced = traced or trace(plain, input_data, repeated_layers=all_layers, **names)  # type: ignore[arg-type]
    key = key_of(traced)
    with _lock:
        if key is None:
            _cache.pop(model, None)
        else:
            kept = replace(traced, model=_PLACEHOLDER, inputs=replace(inputs, args=(), kwargs={}))
            _cache[model] = key, kept, has_layers
    return traced


def _trace_with_layers(model: nn.Module, input_data: object, names: Mapping[str, Any]) -> Traced | None:
    """Trace a copy with functional layers; None if its forward calls them as if they were the user's own children.

    That is so in a module that calls all its children and uses its own parameters in functional calls as well.
    """
    layers = functional_layers(model)
    assert layers is not None
    try:
        traced = trace(model, input_data, repeated_layers=True, **names)
    except ModelError:
        return None
    found = {name: traced.layers[name].calls for name in layers.sources if name in traced.layers}
    return None if any(calls > layers.sources[name].calls for name, calls in found.items()) else traced


def _sources(model: nn.Module) -> object:
    """What the functional layers of a model are made of, without values."""
    layers = functional_layers(model)
    return (layers.sources, layers.problems) if layers is not None else None


def _needs_values(model: nn.Module, traced: Traced) -> bool:
    """Whether the trace depends on values: of control flow, or of weights that torch computes from others."""
    return traced.program is None or is_parametrized(model)


def _key(model: nn.Module, inputs: ExampleInputs, names: IoNames, *, with_values: bool) -> object | None:
    """The cache key of a trace; None if the model cannot be compared.

    ``with_values``: include tensor values, for a model whose trace depends on them.
    """
    leaves, structure = pytree.tree_flatten((inputs.args, inputs.kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    others = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
    forms = [(tuple(leaf.shape), leaf.dtype, leaf.device) for leaf in tensors]
    try:
        values = [tensor_fingerprint(leaf) for leaf in tensors] if with_values else None
        compared = fingerprint(model, others, tensor_values=with_values)
    except NotComparableError as error:
        logger.debug("%s is traced at every call, because it cannot be compared: %s", type(model).__name__, error)
        return None
    return compared, str(structure), forms, values, names.open_axes(inputs.tensors())
