"""Layer types by name.

A class in ``layers/`` or ``data_layers/`` registers itself; those folders are imported on first use.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import TYPE_CHECKING, TypeVar

from amct.errors import UnsupportedLayerError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable

    from amct.caffe.engine.layer import Layer
    from amct.caffe.engine.messages import ProtoMessage

    LayerClass = TypeVar("LayerClass", bound=type[Layer])

#: Sub-packages whose modules hold layers.
LAYER_FOLDERS = ("layers", "data_layers")
#: Types with a class of their own for running on integers ("Convolution on integers").
INTEGER_TYPES = (
    "Convolution", "DepthwiseConv", "Deconvolution", "InnerProduct", "LSTMQuant", "RNNQuant", "GRUQuant",
)  # fmt: skip

_registered: dict[str, type[Layer]] = {}


def register(*types: str) -> Callable[[LayerClass], LayerClass]:
    """Make a class known as a layer type (or several names of one): ``@register("ReLU")``.

    A class in a module of ``amct/caffe/engine/layers`` is found without further registration. Other packages use
    ``amct.extend.register_caffe_layer``. ``amct.caffe.engine.layer.Layer`` says what the class must define.
    """

    def decorate(layer_class: LayerClass) -> LayerClass:
        for name in types:
            known = _registered.get(name)
            if known is not None and known is not layer_class:
                raise TypeError(f"layer type {name!r} is already registered by {known.__module__}.{known.__qualname__}")
            _registered[name] = layer_class
        return layer_class

    return decorate


@cache
def _load_all() -> None:
    for folder in LAYER_FOLDERS:
        package = importlib.import_module(f"{__package__}.{folder}")
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package.__name__}.{module.name}")


def unregister(type_name: str) -> None:
    """Remove a layer type that a program registered itself."""
    del _registered[type_name]


def find_layer_class(type_name: str) -> type[Layer] | None:
    """The class registered for a layer type, or None."""
    _load_all()
    return _registered.get(type_name)


def layer_class(type_name: str, layer_name: str = "") -> type[Layer]:
    """The class registered for a layer type.

    Raises:
        UnsupportedLayerError: The type is not registered; the message names the nearest one and how to add it.
    """
    found = find_layer_class(type_name)
    if found is None:
        where = f'layer "{layer_name}" ({type_name}): ' if layer_name else ""
        raise UnsupportedLayerError(
            f'{where}Unknown layer type: "{type_name}".{did_you_mean(type_name, layer_types())} Known types: '
            f"{', '.join(layer_types())}. Write it with one of them, or register a class that computes it: "
            f'amct.extend.register_caffe_layer("{type_name}"); docs/contributing.md shows how.'
        )
    return found


def implementation_of(parameter: ProtoMessage) -> str:
    """The type that runs a layer: its own, or a variant that a field of quantization asks for.

    A layer on integers (deploy models) and a BatchNorm that updates its statistics have their plain type in the file.
    """
    if parameter.HasField("integer_param"):
        return f"{parameter.type} on integers" if parameter.type in INTEGER_TYPES else "data on integers"
    if parameter.type == "BatchNorm" and parameter.batch_norm_param.HasField("update_iterations"):
        return "BatchNorm with refreshed statistics"
    return str(parameter.type)


def layer_types() -> list[str]:
    """Every layer type that a prototxt can name, sorted; not the variants that ``implementation_of`` chooses."""
    _load_all()
    return sorted(name for name in _registered if " " not in name)
