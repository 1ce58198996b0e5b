"""Extension points: what other packages may add to this one without touching it.

Activation algorithms, layers of Caffe nets and export formats; ``docs/contributing.md`` has a recipe for each.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from amct.caffe.engine import layer, messages
from amct.caffe.engine.layer import Layer as CaffeLayer
from amct.caffe.engine.onnx_place import Place as OnnxPlace
from amct.config.layers import add_data_type, remove_data_type
from amct.config.registry import Activation, ObserverFactory
from amct.config.registry import register_activation as _register_activation
from amct.errors import ArgumentError
from amct.numerics.affine import SymmetricScale
from amct.numerics.observer import Observer
from amct.numerics.qparams import Observed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from amct.export.formats import Exporter

    LayerClass = TypeVar("LayerClass", bound=type[CaffeLayer])

__all__ = [
    "Activation",
    "ActivationFactors",
    "CaffeLayer",
    "Observer",
    "ObserverFactory",
    "OnnxPlace",
    "SymmetricScale",
    "register_activation",
    "register_caffe_layer",
    "register_exporter",
    "registered",
    "unregister_caffe_layer",
]


class ActivationFactors(Observed):
    """What an observer returns, most easily by ``from_range``; ``clip_min`` and ``clip_max`` follow from the others."""

    def __init__(self, **given: Any) -> None:  # noqa: ANN401  the fields of Observed
        super().__init__(**{name: value for name, value in given.items() if name not in ("clip_min", "clip_max")})


def register_activation(*, name: str, settings: type[Any], observer: ObserverFactory) -> Activation:
    """Register an activation algorithm, once, when the module that defines it is imported.

    Registering the same algorithm again changes nothing.

    Args:
        name: ``"toy"`` is chosen by ``toy_quantize { ... }`` in a simple config, ``"act_algo": "toy"`` in a full one.
        settings: A frozen, keyword-only dataclass of bool, int, float, str, Literal and tuple fields, each with a
            default; ``num_bits: int`` and ``asymmetric: bool`` are among them. Ranges are given as
            ``Annotated[float, pydantic.Field(gt=0)]`` and checked for every config, with the line and column of the
            mistake.
        observer: Called as ``observer(settings, channel_axis=..., symmetric_scale=...)`` for every tensor that is
            calibrated; returns an ``Observer``. ``channel_axis`` is None for one scale per tensor.

    Returns:
        The registered algorithm; its ``remove()`` takes it out of the registry.

    Raises:
        ArgumentTypeError: The settings are no such dataclass.
        ArgumentError: Another algorithm has this name or these settings.
    """
    return _register_activation(name, settings, observer)


@contextmanager
def registered(*, name: str, settings: type[Any], observer: ObserverFactory) -> Iterator[Activation]:
    """``register_activation`` for the length of a ``with`` block, as tests need it."""
    algorithm = register_activation(name=name, settings=settings, observer=observer)
    try:
        yield algorithm
    finally:
        algorithm.remove()


def register_caffe_layer(
    name: str, *, parameters: type[Any] | None = None, quantizable: bool = True, on_by_default: bool = True
) -> Callable[[LayerClass], LayerClass]:
    """Add a layer type to Caffe nets: it runs, is exported, quantized and deployed as the types of this package.

    The class says the rest: ``reshape`` and ``forward`` (``amct.caffe.engine.layer`` shows how), ``to_onnx(self,
    place)`` writes its ONNX nodes, and ``moves_values = True`` lets deploy models run it on integers when it only moves
    or selects values. Call it before any model is read::

        @dataclass(frozen=True)
        class ToyParameters:
            factor: float = 1.0

        @register_caffe_layer("Toy", parameters=ToyParameters)
        class Toy(CaffeLayer):
            def reshape(self, bottoms):
                return [bottoms[0]]

            def forward(self, bottoms, parameters):
                return [bottoms[0] * self.parameter.toy_param.factor]

            def to_onnx(self, place):
                place.top("Mul", place.bottom, place.value("factor", self.parameter.toy_param.factor))

    Args:
        name: The type, as a prototxt has it.
        parameters: A dataclass; its fields are read from ``toy_param { ... }`` of the prototxt (the type in lower case
            with underscores).
        quantizable: Whether configs list the layer: its inputs are quantized.
        on_by_default: Whether a generated config quantizes it.

    Raises:
        ArgumentError: the type is registered already, or LayerParameter has a field of that name.
        ArgumentTypeError: ``parameters`` is no dataclass of numbers, texts and tuples of them.
    """

    def decorate(layer_class: LayerClass) -> LayerClass:
        if layer.find_layer_class(name) is not None:
            raise ArgumentError(f'layer type "{name}" is registered already; register the layer under another name')
        if parameters is not None:
            messages.add_layer_parameters(_field_name(name), parameters)
        layer.register(name)(layer_class)
        if quantizable:
            add_data_type(name, on_by_default=on_by_default)
        return layer_class

    return decorate


def unregister_caffe_layer(name: str) -> None:
    """Remove a layer type that ``register_caffe_layer`` added, for tests and for cells of a notebook that run again."""
    layer.unregister(name)
    messages.remove_layer_parameters(_field_name(name))
    remove_data_type(name)


def register_exporter(*, name: str, exporter: Exporter, file_name: str | None = None) -> None:
    """Add an export format that ``save(formats=…)`` of every front door and ``amct quantize --formats`` offer.

    Args:
        name: What users write: letters, digits and "_".
        exporter: Called with an ``ExportRequest``: ``model`` (the float ONNX model, not to be changed), ``bindings``
            (layer, kind, node), ``factors`` (by layer), ``tensors`` (factors of tensors between layers, or None) and
            ``options``. Returns an ONNX ModelProto, an ``ExportedModel`` (a model with a report) or bytes.
        file_name: The file is ``<prefix>_<file_name>``; ``<name>_model.onnx`` unless given.

    Raises:
        ArgumentError: the name is taken or cannot be used.
    """
    from amct.export import formats

    formats.register_exporter(name=name, exporter=exporter, file_name=file_name)


def _field_name(layer_type: str) -> str:
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", layer_type)
    return f"{words.lower()}_param"
