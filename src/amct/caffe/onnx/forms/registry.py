"""The ONNX form of each layer class."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from amct.caffe.engine.layer import Layer

if TYPE_CHECKING:
    from collections.abc import Callable

    from amct.caffe.onnx.forms.place import Place

LayerT = TypeVar("LayerT", bound=Layer)

_COMPUTING = frozenset({"run", "forward", "function", "compute", "convolve", "step", "reduce"})
"""Methods that define what a layer computes."""

_forms: dict[type[Layer], Callable[[Any], None]] = {}


def onnx_form(
    *classes: type[LayerT],
) -> Callable[[Callable[[Place[LayerT]], None]], Callable[[Place[LayerT]], None]]:
    """Register a function as the ONNX form of layer classes and their subclasses."""

    def decorate(form: Callable[[Place[LayerT]], None]) -> Callable[[Place[LayerT]], None]:
        for layer_class in classes:
            if layer_class in _forms:
                raise TypeError(f"{layer_class.__name__} already has an ONNX form")
            _forms[layer_class] = form
        return form

    return decorate


@cache
def _load_all() -> None:
    package = importlib.import_module("amct.caffe.onnx.forms")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")


def form_of(layer_class: type[Layer]) -> Callable[[Place[Any]], None] | None:
    """What writes a layer of a class as ONNX: its own ``to_onnx``, or the form of the nearest base class.

    A subclass that computes something of its own does not have the form of its base.
    """
    own = getattr(layer_class, "to_onnx", None)
    if own is not None:
        return lambda place: own(place.layer, place)
    _load_all()
    for base in layer_class.__mro__:
        if base in _forms:
            return _forms[base]
        if _COMPUTING.intersection(vars(base)):
            return None
    return None
