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

from amct.pytorch.capture.example_inputs import example_inputs
from amct.pytorch.capture.fingerprint import NotComparableError, fingerprint, tensor_fingerprint
from amct.pytorch.capture.operators import refuse_operators
from amct.pytorch.capture.trace import Traced, trace
from amct.pytorch.model_copy import unwrap
from amct.pytorch.onnx.io_names import IoNames

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from amct.pytorch.capture.example_inputs import ExampleInputs

logger = logging.getLogger(__name__)

_cache: WeakKeyDictionary[nn.Module, tuple[object, Traced]] = WeakKeyDictionary()
"""Fingerprint and last trace of each living model; the trace is stored without the model and its inputs."""
_lock = threading.Lock()
_PLACEHOLDER = nn.Identity()


def cached_trace(
    model: nn.Module,
    input_data: object,
    *,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    dynamic_axes: Mapping[str, Any] | None = None,
) -> Traced:
    """As ``trace``, with the same arguments and errors, but cached."""
    names = {"input_names": input_names, "output_names": output_names, "dynamic_axes": dynamic_axes}
    if not isinstance(model, nn.Module):
        return trace(model, input_data)  # raises the error
    model = unwrap(model)
    refuse_operators(model)
    inputs = example_inputs(model, input_data)
    io_names = IoNames.checked(input_names, output_names, dynamic_axes, inputs=inputs.names)
    with _lock:
        cached = _cache.get(model)
    if cached is not None and cached[0] == _key(model, inputs, io_names, with_values=cached[1].program is None):
        return replace(cached[1], model=model, inputs=inputs, names=io_names)
    traced = trace(model, input_data, **names)  # type: ignore[arg-type]  # one value type for three arguments
    key = _key(model, inputs, io_names, with_values=traced.program is None)
    with _lock:
        if key is None:
            _cache.pop(model, None)
        else:
            _cache[model] = key, replace(traced, model=_PLACEHOLDER, inputs=replace(inputs, args=(), kwargs={}))
    return traced


def _key(model: nn.Module, inputs: ExampleInputs, names: IoNames, *, with_values: bool) -> object | None:
    """The cache key of a trace; None if the model cannot be compared.

    ``with_values``: include tensor values, for a model whose control flow depends on them.
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
