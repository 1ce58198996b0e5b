"""The fingerprint of a model: equal fingerprints mean equal traces.

A model is deep-copied before tracing, so a fingerprint decomposes objects as ``copy.deepcopy`` does (by
``__reduce_ex__``) and compares the parts by value. Tensors are compared by identity and form because a trace shares
them. An object that cannot be decomposed has no fingerprint.
"""

from __future__ import annotations

import hashlib
import sys
import types
import weakref
import zlib
from collections.abc import Hashable, Iterable
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import nn

from amct.pytorch.model_copy import as_array, is_empty_attribute

Fingerprint = tuple[Hashable, ...]
TensorFingerprint = tuple[tuple[int, ...], torch.dtype, int]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), torch.dtype, torch.device, torch.Size)
_MOST_PARTS = 1_000_000
_MOST_BYTES = 64 << 20
_IRRELEVANT = frozenset({"training", "_compiled_call_impl"})
"""Module attributes that do not affect the trace: a model is traced in eval mode and not compiled."""
_LIBRARIES = frozenset({"torch", "numpy", "builtins"} | sys.stdlib_module_names)


class NotComparableError(Exception):
    """Part of a model can only be compared by identity, although its state may change."""


def fingerprint(*values: object, tensor_values: bool = False) -> Fingerprint:
    """The fingerprint of objects; ``tensor_values`` includes the content of tensors.

    Raises:
        NotComparableError: an object in them cannot be compared by value, or they are too large to compare.
    """
    reader = _Reader(tensor_values)
    try:
        return tuple(reader.of(value) for value in values)
    except NotComparableError:
        raise
    except Exception as error:  # user code takes its objects apart; a RecursionError for deep nesting
        raise NotComparableError(f"{type(error).__name__}: {error}") from error


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


class _Reader:
    def __init__(self, tensor_values: bool) -> None:
        self._tensor_values = tensor_values
        self._seen: dict[int, tuple[int, object]] = {}  # keeps the objects alive, so that no id is reused
        self._bytes_left = _MOST_BYTES

    def of(self, value: object) -> Hashable:
        """The fingerprint of any object; an object seen before is represented by its number, which ends cycles."""
        if type(value) in _PLAIN:
            return type(value), value
        if id(value) in self._seen:
            return "seen", self._seen[id(value)][0]
        if len(self._seen) >= _MOST_PARTS:
            raise NotComparableError(f"the model has more than {_MOST_PARTS} attributes and items")
        self._seen[id(value)] = (len(self._seen), value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, (type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, weakref.ref)):
            return self._reference(value)
        return self._container(value)

    def _tensor(self, tensor: torch.Tensor) -> Hashable:
        if torch.nn.parameter.is_lazy(tensor):
            return _Identity(tensor)
        content = tensor_fingerprint(tensor) if self._tensor_values else None
        return _Identity(tensor), tuple(tensor.shape), tensor.dtype, tensor.device, content

    def _reference(self, value: Any) -> Hashable:  # noqa: ANN401  any of the types below
        """The fingerprint of objects that a deep copy shares: classes, functions, methods, weak references."""
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, types.FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            state = (value.__defaults__, value.__kwdefaults__, cells, vars(value))
            return value.__code__, self._items(state)
        if isinstance(value, types.MethodType):
            return "method", self.of(value.__func__), self.of(value.__self__)
        if isinstance(value, types.BuiltinFunctionType):
            owner = value.__self__
            return value.__qualname__, owner.__name__ if isinstance(owner, types.ModuleType) else self.of(owner)
        return "weak", self.of(value())

    def _class(self, owner: type) -> Hashable:
        """A class; of a user-defined class also its own attributes, because methods and values can be replaced."""
        own = [
            (name, self._class_attribute(value))
            for base in owner.__mro__
            if base.__module__.partition(".")[0] not in _LIBRARIES
            for name, value in vars(base).items()
            if not name.startswith(("__", "_abc_"))
        ]
        return (owner, *own)

    def _class_attribute(self, value: object) -> Hashable:
        if isinstance(value, (staticmethod, classmethod)):
            return self.of(value.__func__)
        if isinstance(value, property):
            return self._items((value.fget, value.fset))
        if hasattr(value, "__get__") and not isinstance(value, types.FunctionType):
            return id(value)  # a slot or another descriptor, kept alive by its class
        return self.of(value)

    def _container(self, value: object) -> Hashable:
        kind = type(value)
        if isinstance(value, nn.Module):
            state = [
                item for item in vars(value).items() if item[0] not in _IRRELEVANT and not is_empty_attribute(*item)
            ]
            return self.of(kind), self._items(state)
        if kind in (tuple, list):
            return kind, self._items(value)  # type: ignore[arg-type]  # mypy does not follow kind
        if kind is dict:
            return kind, self._items(value.items())  # type: ignore[attr-defined]
        if kind in (set, frozenset):
            return kind, frozenset(self.of(item) for item in value)  # type: ignore[attr-defined]
        if isinstance(value, Enum):
            return kind, value.name
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return kind, value.shape, value.dtype.str, self._digest(value)
        return self._parts(value)

    def _items(self, values: Iterable[object]) -> Hashable:
        return tuple(self.of(value) for value in values)

    def _digest(self, array: np.ndarray[Any, Any]) -> bytes:
        self._bytes_left -= array.nbytes
        if self._bytes_left < 0:
            raise NotComparableError(f"the arrays of the model have more than {_MOST_BYTES} bytes")
        return hashlib.sha256(np.ascontiguousarray(array).data).digest()

    def _parts(self, value: object) -> Hashable:
        """Any other object: the parts from which ``copy.deepcopy`` would rebuild it."""
        parts = value.__reduce_ex__(4)
        if isinstance(parts, str):  # the name of a global object
            return self.of(type(value)), parts
        listed = [list(part) if hasattr(part, "__next__") else part for part in parts]
        return self.of(type(value)), self._items(listed)
