"""Python: a layer whose class is in a user's module, with pycaffe's interface."""

from __future__ import annotations

import importlib
import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from amct.caffe.engine.layer import Layer
from amct.caffe.engine.python_layers import PythonLayer, python_layers_allowed
from amct.caffe.engine.registry import register
from amct.errors import AmctError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterator

    from amct.caffe.engine.blob import Blob, Shape

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
                "allowed by default. If you trust the prototxt, create the net with allow_python=True, or inside "
                "`with allow_python_layers():` (from amct.caffe.pycaffe)"
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
