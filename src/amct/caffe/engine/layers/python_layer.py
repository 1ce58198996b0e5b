"""The base class of Python layers (``caffe.Layer``), and the permission to run them.

A layer of ``type: "Python"`` names a module and a class; creating it imports the module and runs its code. Prototxts
are downloaded data, so this needs permission: ``allow_python=True`` for one net, or ``with allow_python_layers():``
around code that creates nets itself (scripts written for pycaffe).
"""

from __future__ import annotations

import importlib
import logging
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

import torch

from amct.caffe.engine.blob import Blob
from amct.caffe.engine.layer import Layer, ProtoMessage, Shape, register
from amct.errors import AmctError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


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


logger = logging.getLogger(__name__)


@register("Python")
class Python(Layer):
    """Runs a class derived from ``caffe.Layer``, if the caller allowed it."""

    bottom_count = (0, None)
    top_count = (0, None)

    def setup(self, bottoms: list[Shape]) -> None:
        """Import the module, create the object and call its ``setup``.

        Raises:
            ModelError: Python layers are not allowed, the module or class does not exist, or its ``setup`` fails.
        """
        options = self.parameter.python_param
        self.place = f"{options.module}.{options.layer}"
        if not (self.context.allow_python or python_layers_allowed()):
            raise self.error(
                f"it would execute code (class {options.layer!r} of module {options.module!r}), which is not "
                "allowed by default. If you trust the prototxt, allow it: --allow-python on the command line; in "
                "Python create the net with allow_python=True, or inside `with allow_python_layers():` (from "
                "amct.caffe.pycaffe)"
            )
        self.user = self._make()
        self.blobs = self.user.blobs
        self._is_reshaped = False
        with self._building("setup"):
            self.user.setup(self.bottom_blobs, self.top_blobs)

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """Call the object's ``reshape``, which sets the tops' shapes."""
        before = [blob.shape for blob in self.top_blobs]
        with self._building("reshape"):
            self.user.reshape(self.bottom_blobs, self.top_blobs)
        self._is_reshaped = True
        after = [blob.shape for blob in self.top_blobs]
        for blob, weight, old, new in zip(self.top_blobs, self.loss_weights, before, after, strict=False):
            if weight and old != new:
                blob.set_gradient(torch.full(new, weight))
        return after

    def run(self, bottoms: list[Blob], tops: list[Blob]) -> None:
        """Call ``reshape`` (pycaffe does so before each forward pass), then ``forward``."""
        if not self._is_reshaped:
            self.reshape([blob.shape for blob in bottoms])
        self._is_reshaped = False
        for blob in tops:
            if not blob.values.is_allocated:  # not used yet, or freed because keep_blobs is False
                blob.set_tensor(torch.zeros(blob.shape))
        with self._running("forward"):
            self.user.forward(bottoms, tops)

    def run_backward(self, tops: list[Blob], propagate_down: list[bool], bottoms: list[Blob]) -> None:
        """Call the object's ``backward``, which writes the gradients."""
        with self._running("backward"):
            self.user.backward(tops, propagate_down, bottoms)

    def _make(self) -> PythonLayer:
        options = self.parameter.python_param
        try:
            module = importlib.import_module(options.module)
        except ImportError as error:
            hint = (
                " It imports the module caffe: call amct_caffe.install_as_caffe() first."
                if error.name == "caffe"
                else " Is its folder in PYTHONPATH (sys.path)?"
            )
            raise self.error(f"cannot import module {options.module!r}: {error}.{hint}") from error
        except Exception as error:
            raise self.error(f"importing module {options.module!r} raised {type(error).__name__}: {error}") from error
        found = getattr(module, options.layer, None)
        if found is None:
            raise self.error(
                f"module {options.module!r} ({module.__file__}) has no class {options.layer!r}."
                f"{did_you_mean(options.layer, vars(module))}"
            )
        if not (isinstance(found, type) and issubclass(found, PythonLayer)):
            raise self.error(
                f"{self.place} must be a class derived from caffe.Layer of this package, got {found!r}. If it is "
                "derived from another Caffe's, call amct_caffe.install_as_caffe(force=True) before importing it"
            )
        return found(self.parameter)

    @contextmanager
    def _building(self, method: str) -> Iterator[None]:
        """Turn an exception of the user's code into a ModelError that names this layer."""
        try:
            yield
        except AmctError:
            raise
        except Exception as error:
            raise self.error(f"{self.place}.{method} raised {type(error).__name__}: {error}") from error

    @contextmanager
    def _running(self, method: str) -> Iterator[None]:
        """Let an exception of the user's code pass, as pycaffe does, and log the layer it came from."""
        try:
            yield
        except Exception:
            logger.error('layer "%s" (Python): %s.%s failed', self.name, self.place, method)
            raise
