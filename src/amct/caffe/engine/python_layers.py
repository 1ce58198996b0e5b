"""The base class of Python layers (``caffe.Layer``), and the permission to run them.

A layer of ``type: "Python"`` names a module and a class; creating it imports the module and runs its code. Prototxts
are downloaded data, so this needs permission: ``allow_python=True`` for one net, or ``with allow_python_layers():``
around code that creates nets itself (scripts written for pycaffe).
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from amct.caffe.engine.blob import Blob

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from amct.caffe.engine.messages import ProtoMessage

_allowed: ContextVar[bool] = ContextVar("python_layers_allowed", default=False)


@contextmanager
def allow_python_layers() -> Iterator[None]:
    """Allow Python layers in all nets created inside the ``with`` block."""
    token = _allowed.set(True)
    try:
        yield
    finally:
        _allowed.reset(token)


def python_layers_allowed() -> bool:
    """Whether the code runs inside ``allow_python_layers``."""
    return _allowed.get()


class BlobList(list[Blob]):
    """The parameter blobs of a Python layer; ``setup`` may add some."""

    def add_blob(self, *shape: int) -> Blob:
        """Append a new blob of zeros."""
        blob = Blob(*shape)
        self.append(blob)
        return blob


class PythonLayer:
    """The base class of Python layers: ``caffe.Layer`` of pycaffe.

    A subclass defines ``setup`` (once), ``reshape`` (before every forward), ``forward`` and, for gradients,
    ``backward``. Blobs have ``data``, ``diff``, ``shape`` and ``reshape(*sizes)``.

    Attributes:
        blobs: The layer's parameters; ``self.blobs.add_blob(*shape)`` in ``setup`` creates one.
        param_str: The text of ``python_param { param_str: ... }``; ``param_str_`` is its older name.
        phase: 0 in training, 1 in testing.
        name: The layer's name.
    """

    def __init__(self, parameter: ProtoMessage) -> None:
        self.blobs = BlobList()
        self.name: str = parameter.name
        self.phase: int = parameter.phase
        self.param_str: str = parameter.python_param.param_str
        self.param_str_ = self.param_str

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        """Read ``param_str``, check the number of blobs, create parameters."""

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        """Set the tops' shapes."""

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        """Fill the tops' ``data``."""
        raise NotImplementedError(f"{type(self).__qualname__} defines no forward(bottom, top)")

    def backward(self, top: Sequence[Blob], propagate_down: Sequence[bool], bottom: Sequence[Blob]) -> None:
        """Fill the ``diff`` of the bottoms that ``propagate_down`` names."""
        raise NotImplementedError(f"{type(self).__qualname__} defines no backward(top, propagate_down, bottom)")
