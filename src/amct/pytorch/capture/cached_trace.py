"""Caches the trace of a model for the functions of a flow that need it.

A trace is cached while the model object lives, and reused while the model has the same fingerprint and the example
input has the same form. The cache holds only a weak reference to the model.

A model is deep-copied before tracing, so a fingerprint takes objects apart as ``copy.deepcopy`` and ``pickle`` do, and
compares the parts by value. Tensors are compared by identity and form because a trace shares them. An object that
cannot be taken apart has no fingerprint.

A trace also serves copies of its model, such as one that was trained: only the form of parameters and buffers is
compared then, because those who use a trace take their values from the model.
"""

from __future__ import annotations

import hashlib
import logging
import pickle
import sys
import threading
import types
import weakref
import zlib
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils import _pytree as pytree

from amct.errors import ModelError
from amct.pytorch.capture.functional_layers import find_functional_layers, functional_layers
from amct.pytorch.capture.trace import Traced, refuse_modules, trace
from amct.pytorch.inputs import IoNames, IoOptions, example_inputs
from amct.pytorch.user_model import (
    as_array,
    is_empty_attribute,
    is_parametrized,
    refuse_operators,
    unwrap,
    with_plain_weights,
)

if TYPE_CHECKING:
    from collections.abc import Collection

    from amct.pytorch.inputs import ExampleInputs

logger = logging.getLogger(__name__)

_PLACEHOLDER = nn.Identity()


@dataclass(frozen=True, kw_only=True, eq=False)
class KnownTrace:
    """A trace that may serve again.

    Attributes:
        key: What is compared; None: nothing is equal to it.
        traced: The trace without the model and its inputs.
        has_layers: Whether the model had its functional layers.
    """

    key: object
    traced: Traced
    has_layers: bool

    @classmethod
    def of(cls, key: object, traced: Traced, *, has_layers: bool) -> KnownTrace:
        """The part of a trace that is kept."""
        kept = replace(traced, model=_PLACEHOLDER, inputs=replace(traced.inputs, args=(), kwargs={}))
        return cls(key=key, traced=kept, has_layers=has_layers)


_cache: WeakKeyDictionary[nn.Module, KnownTrace] = WeakKeyDictionary()
"""The last trace of each living model."""
_lock = threading.Lock()


def for_copies(traced: Traced) -> KnownTrace:
    """The trace for copies of its model with other values; it keeps the tensors of the captured program."""
    return KnownTrace.of(_form(traced), traced, has_layers=bool(functional_layers(traced.model).sources))


def _form(traced: Traced) -> object:
    """What copies of a model have in common; None where a trace depends on values."""
    if traced.program is None or is_parametrized(traced.model):
        return None
    return _key(traced.model, traced.inputs, traced.names, compared="form")


def cached_trace(
    model: nn.Module,
    input_data: object,
    *,
    io: IoOptions | None = None,
    all_layers: bool = False,
    stored_weights: bool = False,
    any_batch: bool = False,
    origin: KnownTrace | None = None,
) -> Traced:
    """As ``trace``, with the same arguments and errors, but cached.

    ``all_layers``: functional calls on parameters and modules called several times are layers too; AMCT's functions
    leave both float. ``stored_weights``: so are layers whose forward computes the weight from parameters; the traced
    model has the computed weights, so it cannot be trained. ``any_batch``: as for ``trace``. ``origin``: of the model
    of which this one is a copy.
    """
    if not isinstance(model, nn.Module):
        return trace(model, input_data)  # raises the error
    model = unwrap(model)
    refuse_operators(model)
    refuse_modules(model)
    inputs = example_inputs(model, input_data)
    io_names = IoNames.checked(io or IoOptions(), inputs.names)
    any_batch = any_batch and (io is None or io.dynamic_axes is None)
    # Found anew at each call, because the values of computed biases are part of the layers.
    plain = with_plain_weights(model)
    with_layers = find_functional_layers(plain, inputs, stored=stored_weights) if all_layers else plain

    def on(known: KnownTrace) -> Traced:
        names = io_names
        if any_batch and known.traced.names.axes:
            names = io_names.with_open_batch(inputs.tensors()) or io_names
        return replace(known.traced, model=with_layers if known.has_layers else plain, inputs=inputs, names=names)

    if origin is not None and origin.key is not None and _form(on(origin)) == origin.key:
        return on(origin)

    def key_of(traced: Traced) -> object | None:
        # Values decide where control flow depends on them, or torch computes weights from others.
        with_values = traced.program is None or is_parametrized(model)
        found = _key(model, inputs, io_names, compared="values" if with_values else "identity")
        options = all_layers, stored_weights, any_batch
        return None if found is None else (found, options, functional_layers(with_layers))

    with _lock:
        cached = _cache.get(model)
    if cached is not None and cached.key == key_of(cached.traced):
        return on(cached)
    traced = _trace_with_layers(with_layers, input_data, io, any_batch) if with_layers is not plain else None
    has_layers = traced is not None
    traced = traced or trace(plain, input_data, io=io, repeated_layers=all_layers, any_batch=any_batch)
    key = key_of(traced)
    with _lock:
        if key is None:
            _cache.pop(model, None)
        else:
            _cache[model] = KnownTrace.of(key, traced, has_layers=has_layers)
    return traced


def _trace_with_layers(model: nn.Module, input_data: object, io: IoOptions | None, any_batch: bool) -> Traced | None:
    """Trace a copy with functional layers; None if its forward calls them as if they were the user's own children.

    That is so in a module that calls all its children and uses its own parameters in functional calls as well.
    """
    layers = functional_layers(model)
    try:
        traced = trace(model, input_data, io=io, repeated_layers=True, any_batch=any_batch)
    except ModelError:
        return None
    found = {name: traced.layers[name].calls for name in layers.sources if name in traced.layers}
    return None if any(calls > layers.sources[name].calls for name, calls in found.items()) else traced


def _key(model: nn.Module, inputs: ExampleInputs, names: IoNames, *, compared: Compared) -> object | None:
    """The cache key of a trace; None if the model cannot be compared."""
    leaves, structure = pytree.tree_flatten((inputs.args, inputs.kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    others = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
    forms = [(tuple(leaf.shape), leaf.dtype, leaf.device) for leaf in tensors]
    try:
        values = [tensor_fingerprint(leaf) for leaf in tensors] if compared == "values" else None
        found = fingerprint_of(model, others, compared=compared)
    except NotComparableError as error:
        logger.debug("%s is traced at every call, because it cannot be compared: %s", type(model).__name__, error)
        return None
    return found, str(structure), forms, values, names.open_axes(inputs.tensors())


# -- fingerprints ------------------------------------------------------------------------------------------------------


Fingerprint = tuple[bytes, tuple[Hashable, ...]]
TensorFingerprint = tuple[tuple[int, ...], torch.dtype, int]
Compared = Literal["identity", "values", "form"]
"""What is compared of a tensor: that it is the same object; its values too; or, of parameters and buffers, its form."""

_MOST_BYTES = 64 << 20
_IRRELEVANT = frozenset({"training", "_compiled_call_impl"})
"""Module attributes that do not affect the trace: a model is traced in eval mode and not compiled."""
_LIBRARIES = frozenset({"torch", "numpy", "builtins"} | sys.stdlib_module_names)


class NotComparableError(Exception):
    """Part of a model can only be compared by identity, although its state may change."""


def fingerprint_of(*values: object, compared: Compared = "identity") -> Fingerprint:
    """The fingerprint of objects.

    Raises:
        NotComparableError: an object in them cannot be compared by value, or they are too large to compare.
    """
    written = _Digest()
    owners = [value for value in values if isinstance(value, nn.Module)]
    stored = {id(tensor) for owner in owners for tensor in (*owner.parameters(), *owner.buffers())}
    parts = _PartsPickler(written, compared, stored)
    try:
        parts.dump(values)
    except NotComparableError:
        raise
    except Exception as error:  # user code takes its objects apart; a RecursionError for deep nesting
        raise NotComparableError(f"{type(error).__name__}: {error}") from error
    return written.hash.digest(), tuple(parts.references)


def tensor_fingerprint(tensor: torch.Tensor) -> TensorFingerprint:
    """Shape, dtype and a checksum of the values."""
    return tuple(tensor.shape), tensor.dtype, zlib.crc32(as_array(tensor).tobytes())


class _Identity:
    """Equal for the same object while it lives; holds only a weak reference to it."""

    def __init__(self, value: object) -> None:
        self._reference = weakref.ref(value)
        self._hash = id(value)

    def __eq__(self, other: object) -> bool:
        value = self._reference()
        return isinstance(other, _Identity) and value is not None and value is other._reference()

    def __hash__(self) -> int:
        return self._hash


class _Digest:
    """A file that keeps the hash of what is written to it."""

    def __init__(self) -> None:
        self.hash = hashlib.sha256()
        self._left = _MOST_BYTES

    def write(self, content: Any) -> int:  # noqa: ANN401  any buffer
        size = memoryview(content).nbytes
        self._left -= size
        if self._left < 0:
            raise NotComparableError(f"the attributes of the model have more than {_MOST_BYTES} bytes")
        self.hash.update(content)
        return size


class _PartsPickler(pickle.Pickler):
    """Writes objects as the parts from which they could be built; what is compared by identity becomes a reference."""

    def __init__(self, file: _Digest, compared: Compared, stored: Collection[int]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.references: list[Hashable] = []
        self._compared = compared
        self._stored = stored
        self._numbers: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:  # noqa: ANN401  any object
        """The number of the reference to an object; None for an object that is taken apart."""
        if isinstance(value, torch.Tensor):
            return self._referred(self._tensor(value))
        if isinstance(value, torch.dtype | torch.device | types.CodeType) or _is_of_library(value):
            return self._referred(value)
        return None

    def _referred(self, value: Hashable) -> int:
        self.references.append(value)
        return len(self.references)

    def _tensor(self, tensor: torch.Tensor) -> Hashable:
        if torch.nn.parameter.is_lazy(tensor):
            return _Identity(tensor)
        form = tuple(tensor.shape), tensor.dtype, tensor.device
        if self._compared == "form":
            if id(tensor) not in self._stored:
                return *form, tensor_fingerprint(tensor)
            return *form, self._numbers.setdefault(id(tensor), len(self._numbers))  # shared ones stay shared
        return _Identity(tensor), *form, tensor_fingerprint(tensor) if self._compared == "values" else None

    def reducer_override(self, value: Any) -> Any:  # noqa: ANN401  the pickle protocol
        """The parts of objects that pickle takes by their name; as a state, since they may contain the object."""
        if isinstance(value, type):
            return tuple, (self._referred(value),), _own_attributes(value)
        if isinstance(value, types.FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            return tuple, (), (value.__code__, value.__defaults__, value.__kwdefaults__, cells, vars(value))
        if isinstance(value, types.MethodType):
            return tuple, (), (value.__func__, value.__self__)
        if isinstance(value, weakref.ref):
            return tuple, (), (value(),)
        if isinstance(value, nn.Module):
            own = sorted(vars(value).items())  # a copy may have another order
            state = [item for item in own if item[0] not in _IRRELEVANT and not is_empty_attribute(*item)]
            return tuple, (type(value),), state
        return NotImplemented


def _is_of_library(value: object) -> bool:
    """Whether this is a class that no user changes."""
    return isinstance(value, type) and value.__module__.partition(".")[0] in _LIBRARIES


def _own_attributes(owner: type) -> list[object]:
    """The attributes of a user's class and its bases, because methods and values can be replaced."""
    bases = [base for base in owner.__mro__ if not _is_of_library(base)]
    own = [item for base in bases for item in vars(base).items() if not item[0].startswith(("__", "_abc_"))]
    return [(name, _class_attribute(value)) for name, value in own]


def _class_attribute(value: Any) -> object:  # noqa: ANN401  any attribute
    if isinstance(value, staticmethod | classmethod):
        return value.__func__
    if isinstance(value, property):
        return value.fget, value.fset
    if hasattr(value, "__get__") and not isinstance(value, types.FunctionType):
        return id(value)  # a slot or another descriptor, kept alive by its class
    return value
