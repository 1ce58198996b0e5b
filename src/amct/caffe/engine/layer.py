"""The base class of all layers, and how to write one.

**Adding a layer type** takes one class in a module of ``layers/`` and, if it has options, one message in
``schema/caffe.proto``; the registry finds it::

    @register("Power")
    class Power(Layer):
        '''y = (shift + scale * x) ^ power.'''

        def setup(self, bottoms: list[Shape]) -> None:          # called once: read options, create parameters
            self.options = self.parameter.power_param

        def reshape(self, bottoms: list[Shape]) -> list[Shape]:  # when a bottom changes shape: the tops' shapes; this
            return [bottoms[0]]                                  # is the default

        def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
            return [(self.options.shift + self.options.scale * bottoms[0]) ** self.options.power]

* All these names, and ``Place`` and ``ProtoMessage``, are imported from this module.
* ``bottom_count`` / ``top_count`` are the allowed numbers of blobs, ``(1, 1)`` by default; ``(2, None)`` means two or
  more. ``same_count`` requires as many tops as bottoms.
* ``self.top_blobs`` and ``self.bottom_blobs`` are set before ``setup``.
* Parameters are created in ``setup`` by ``self.add_parameter(shape, filler)``; ``forward`` gets them as tensors, in
  that order.
* ``forward`` must not change a bottom and returns new tensors, except: with ``returns_views`` the results may be views
  of a bottom; if ``self.may_overwrite`` is true the bottom's memory may be reused (``torch.relu_``).
* **Gradients** come from torch's autograd over ``forward``. Where Caffe's backward differs from the derivative (ties,
  approximations), use a ``torch.autograd.Function`` inside ``forward``. A layer that works on blobs (Python layers,
  Input) overrides ``run``, and ``run_backward`` if it has gradients. ``no_gradient`` lists the bottoms that hold labels
  or indices.
* Random numbers: use torch's global generator (seeded by ``caffe.set_random_seed``). ``self.is_training`` is the phase.
* Errors: ``raise self.error("kernel_size must be > 0, got 0")`` adds the layer's name. Check everything in ``setup`` or
  ``reshape``: building a net finds all mistakes before memory is allocated.
* ``bind`` may prepare what stays the same from one forward to the next (a kernel, packed weights); by default it calls
  ``forward``.
* ``channel_affine`` lets the engine fold a layer into the convolution before it; ``shares_memory`` marks layers whose
  top has the same memory as the bottom in Caffe (Reshape, Flatten, Split).
* ``moves_values`` marks layers that only move or select values: deploy models run them on integers.
* ONNX: a method ``to_onnx(self, place)`` writes the layer's nodes (see ``onnx_place.py``). Without it the layer runs
  and is quantized, but has no ONNX file.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar

from amct.caffe.engine.blob import Blob, current_device
from amct.caffe.engine.blob import Shape as Shape
from amct.caffe.engine.messages import ProtoMessage as ProtoMessage  # noqa: TC001  modules of layers import it here
from amct.caffe.engine.onnx_place import Place as Place
from amct.caffe.engine.weights import lazy_fill
from amct.errors import AmctError, ModelError, UnsupportedLayerError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import torch

    from amct.caffe.engine.layers.quantization import InputFactors
    from amct.numerics.fold import ChannelAffine
    from amct.numerics.settings import WeightKind

#: The values of several blobs.
Tensors: TypeAlias = "list[torch.Tensor]"
#: Computes the tops from the bottoms.
Call: TypeAlias = "Callable[[Tensors], Sequence[torch.Tensor]]"
TRAIN, TEST = 0, 1
IMAGE_BLOB_AXES = 4
"""Images, channels, rows, columns."""
#: The context that torch passes to ``forward`` and ``backward`` of an autograd Function.
AutogradContext: TypeAlias = Any
Made = TypeVar("Made")
#: An activation that a kernel can apply to its own result: its name in oneDNN, and its arguments.
Activation: TypeAlias = tuple[str, tuple[float, ...]]


@dataclass(frozen=True, kw_only=True)
class LayerContext:
    """The properties of the net that a layer may use."""

    phase: int = TEST
    allow_python: bool = False
    check_size: Callable[[Shape, str], None] = lambda _shape, _what: None
    """Raises ModelError for a shape that is too large; layers created outside a net may have any size."""
    integer_inputs: Mapping[str, Sequence[ProtoMessage]] = field(default_factory=dict)
    """What ``integer_inputs`` finds in the net."""


def _state(sources: Sequence[Blob], condition: object) -> tuple[object, ...]:
    """The state on which a cached value depends: buffers and their epochs, the condition, the device."""
    return [(blob.values, blob.values.epoch) for blob in sources], condition, current_device()


@dataclass(frozen=True, eq=False)
class FoldedParameters:
    """Parameters with the following layers folded in: how to compute them, and the blobs they come from."""

    owner: Layer
    compute: Callable[[], Tensors]
    sources: list[Blob]

    @property
    def parameters(self) -> Tensors:
        """The folded parameters, cached until a source changes."""
        return self.owner.derived("folded", self.sources, self.compute)


class Layer:
    """One layer of a net; the module docstring tells how to write a new one."""

    bottom_count: ClassVar[tuple[int, int | None]] = (1, 1)
    top_count: ClassVar[tuple[int, int | None]] = (1, 1)
    same_count: ClassVar[bool] = False
    allows_in_place: ClassVar[bool] = True
    returns_views: ClassVar[bool] = False
    shares_memory: bool = False
    changes_values: bool = True
    """False for a layer that does nothing in this phase (Dropout in tests)."""
    default_loss_weight: ClassVar[float] = 0.0
    makes_missing_tops: ClassVar[bool] = False
    """Whether the prototxt may omit the top (losses); the net then adds one."""
    is_filled_by_user: ClassVar[bool] = False
    """Whether ``run`` does nothing, because the user sets the tops."""
    keeps_integers: ClassVar[bool] = False
    """Whether parameters stored as integers stay integers (layers of deploy models)."""
    has_gradients: bool = True
    """False for layers that are never trained: observers, layers on integers."""
    no_gradient: tuple[int, ...] = ()
    """The bottoms that get no gradient even with ``force_backward``: labels, indices, boxes."""
    fold_kind: WeightKind | None = None
    """The layout of the weight of a layer that others can be folded into."""
    moves_values: ClassVar[bool] = False
    """Whether the layer only moves or selects values (Concat): rounding before or behind it is then the same."""

    def __init__(self, parameter: ProtoMessage, context: LayerContext) -> None:
        self.parameter = parameter
        self.context = context
        self.name: str = parameter.name
        self.type: str = parameter.type
        self.blobs: list[Blob] = []
        self.bottom_blobs: list[Blob] = []
        self.top_blobs: list[Blob] = []
        self.parameter_needs_gradient: list[bool] = []
        self.loss_weights: list[float] = []
        self.may_overwrite = False
        self._derived: dict[str, tuple[tuple[object, ...], Any]] = {}

    # ------------------------------------------------------------------ defined by a layer type

    def setup(self, bottoms: list[Shape]) -> None:
        """Read and check the options, create the parameters. Called once, after the bottoms' shapes are known."""

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The shapes of the tops, by default that of the first bottom; raise ``self.error`` when bottoms do not fit."""
        return [bottoms[0]]

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Sequence[torch.Tensor]:
        """Compute the tops."""
        raise NotImplementedError

    def operations(self, bottoms: list[Shape], tops: list[Shape]) -> int:
        """About how many multiplications, or steps that take as long as one, a forward takes."""
        return sum(count(shape) for shape in (*bottoms, *tops))

    def forward_on_integers(self, bottoms: Tensors) -> Sequence[torch.Tensor] | None:
        """The tops computed from the integers of fake-quantized bottoms and weights; None to use ``forward``."""
        del bottoms
        return None

    def fit_stored(self, shapes: Sequence[Shape]) -> None:
        """Receive the shapes of the parameters of a file before they are copied; by default nothing depends on them."""

    def connect(self, layers: Mapping[str, Layer]) -> None:
        """Receive the other layers of the net, by name and in order, after all are set up."""

    def check_solver(self, solver: ProtoMessage) -> None:
        """Receive the SolverParameter of the solver that trains the net; raise ConfigError if it does not fit."""

    def take_input_factors(self, index: int, factors: InputFactors) -> None:
        """Receive the factors of a bottom that a Quant layer fake-quantizes for this layer."""

    def channel_affine(self) -> ChannelAffine | None:
        """What the layer does to each channel at inference, if it is only a factor and an addend, else None."""
        return None

    def activation(self) -> Activation | None:
        """The element-wise function of the layer, as a kernel can apply it, else None."""
        return None

    def bind(self, bottoms: Tensors) -> Call:
        """Forward without gradients as a call for bottoms like these, with the parameters as they are now.

        The engine keeps the call until a bottom's shape, a parameter or the device changes. A layer overrides this to
        choose its kernel and prepare its arguments once.
        """
        del bottoms
        parameters = [blob.tensor for blob in self.blobs]
        return lambda given: self.forward(given, parameters)

    def bind_folded(
        self, bottom: torch.Tensor, folded: FoldedParameters, activation: Activation | None
    ) -> tuple[Callable[[torch.Tensor], torch.Tensor], bool]:
        """``bind`` with folded parameters, for one bottom; and whether the call applies the activation too."""
        del bottom, activation
        parameters = folded.parameters
        return lambda given: self.forward([given], parameters)[0], False

    def fold_groups(self) -> int:
        """The number of groups of a foldable layer."""
        return 1

    @classmethod
    def only_moves_values(cls, parameter: ProtoMessage) -> bool:
        """``moves_values`` of a layer with these parameters, where it depends on them."""
        del parameter
        return cls.moves_values

    # ------------------------------------------------------------------ called by the engine

    def run(self, bottoms: list[Blob], tops: list[Blob]) -> None:
        """Run forward on blobs, without gradients."""
        given = [blob.tensor for blob in bottoms]
        for blob, value in zip(tops, self.bind(given)(given), strict=True):
            blob.set_tensor(value)

    #: A layer that computes its own gradients on blobs sets this to a method ``(tops: list[Blob], propagate_down:
    #: list[bool], bottoms: list[Blob]) -> None``.
    run_backward: Callable[[list[Blob], list[bool], list[Blob]], None] | None = None

    @property
    def replaces_tops(self) -> bool:
        """Whether each run sets all tops to new tensors; layers that override ``run`` may not."""
        return type(self).run is Layer.run

    @property
    def uses_autograd(self) -> bool:
        """Whether gradients come from ``forward``; not for layers that override ``run``."""
        return self.has_gradients and self.replaces_tops and self.run_backward is None

    # ------------------------------------------------------------------ helpers for layer types

    @property
    def is_training(self) -> bool:
        """Whether the layer runs in the TRAIN phase (its own ``phase`` overrides the net's)."""
        phase: int = self.parameter.phase if self.parameter.HasField("phase") else self.context.phase
        return phase == TRAIN

    def add_parameter(self, shape: Sequence[int], filler: ProtoMessage | None = None, *, default: float = 0.0) -> Blob:
        """Append a parameter blob, filled by ``filler`` (or with ``default``) on first read."""
        full = tuple(int(size) for size in shape)
        self.context.check_size(full, f'parameter {len(self.blobs)} of layer "{self.name}"')
        blob = Blob(*full)
        lazy_fill(blob, filler, self.name, default)
        self.blobs.append(blob)
        return blob

    def derived(self, key: str, sources: Sequence[Blob], make: Callable[[], Made], condition: object = None) -> Made:
        """Cache a value computed from parameters (a folded weight) until one of them, or ``condition``, changes."""
        state = _state(sources, condition)
        kept = self._derived.get(key)
        if kept is not None and kept[0] == state and not any(blob.values.is_exposed for blob in sources):
            found: Made = kept[1]
            return found
        made = make()
        self._derived[key] = (_state(sources, condition), made)
        return made

    def computes_forward(self, method: str) -> bool:
        """Whether a method that stands in for ``forward`` is as special as it: no subclass overrides forward alone."""
        definers = [next(each for each in type(self).__mro__ if name in vars(each)) for name in (method, "forward")]
        return issubclass(*definers)

    @contextmanager
    def naming_errors(self, bottoms: list[Shape]) -> Iterator[None]:
        """Turn an error of Python or torch in ``setup`` or ``reshape`` into a ModelError that names this layer."""
        try:
            yield
        except AmctError:
            raise
        except (ValueError, IndexError, ArithmeticError, RuntimeError, MemoryError) as error:
            raise self.error(f"does not fit its bottoms {bottoms}: {error}") from error

    def canonical_axis(self, axis: int, axes: int) -> int:
        """Convert an axis that may count from the end to one that counts from the start.

        Raises:
            ModelError: There is no such axis.
        """
        if not -axes <= axis < axes:
            raise self.error(f"axis {axis} is out of range for a blob of {axes} axes")
        return axis % axes if axes else 0

    def require_image(self, shape: Shape) -> None:
        """Require the four axes of images.

        Raises:
            ModelError: The number of axes is different.
        """
        if len(shape) != IMAGE_BLOB_AXES:
            raise self.error(f"expected a blob of {IMAGE_BLOB_AXES} axes, got shape {shape}")

    def require_same_shapes(self, bottoms: Sequence[Shape]) -> None:
        """Require equal shapes.

        Raises:
            ModelError: They differ.
        """
        for index, shape in enumerate(bottoms):
            if shape != bottoms[0]:
                raise self.error(f"bottom {index} has shape {shape}, bottom 0 has {bottoms[0]}: they must be equal")

    def error(self, message: str) -> ModelError:
        """An error that names this layer."""
        return ModelError(f'layer "{self.name}" ({self.type}): {message}')

    def __repr__(self) -> str:
        return f"{self.type}({self.name!r})"


# ------------------------------------------------------------------ shapes

WINDOW_COST = 16
"""The multiplications in whose time a window that does not multiply sees one more value."""


def count(shape: Sequence[int], start: int = 0, end: int | None = None) -> int:
    """The number of values in the axes from ``start`` up to (not including) ``end``."""
    return math.prod(shape[start:end])


# ------------------------------------------------------------------ layer types by name

#: Sub-packages whose modules hold layers; they are imported when the first type is looked up.
LAYER_FOLDERS = ("layers", "data_layers")
#: Types with a class of their own for running on integers ("Convolution on integers").
INTEGER_TYPES = (
    "Convolution", "DepthwiseConv", "Deconvolution", "InnerProduct", "LSTMQuant", "RNNQuant", "GRUQuant",
)  # fmt: skip

_registered: dict[str, type[Layer]] = {}
LayerClass = TypeVar("LayerClass", bound=type[Layer])


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
            f'amct.extend.register_caffe_layer("{type_name}"), in a module that is imported before (--import on the '
            "command line); docs/contributing.md shows how."
        )
    return found


def integer_inputs(layers: Iterable[ProtoMessage]) -> dict[str, list[ProtoMessage]]:
    """By layer that computes on integers, the ``quant_param`` of the Quant layer in front of each bottom, in order.

    Such a layer is in a deploy model: a DeQuant or AntiQuant layer names it, or it is recurrent and has ``scale_w``.
    """
    found: dict[str, list[ProtoMessage]] = {}
    quants = []
    for layer in layers:
        if layer.type == "Quant":
            quants.append(layer.quant_param)
        elif layer.type == "DeQuant":
            found[layer.dequant_param.object_layer] = []
        elif layer.type == "AntiQuant":
            found[layer.antiquant_param.object_layer] = []
        elif layer.lstm_quant_param.scale_w:
            found[layer.name] = []
    for quant in sorted(quants, key=lambda each: each.index):
        if quant.object_layer in found:
            found[quant.object_layer].append(quant)
    return found


def moves_values(parameter: ProtoMessage) -> bool:
    """Whether a layer only moves or selects values; a layer of an unknown type does not."""
    kind = find_layer_class(parameter.type)
    return kind is not None and kind.only_moves_values(parameter)


def stays_integer(parameter: ProtoMessage, inputs: Iterable[ProtoMessage]) -> bool:
    """Whether a layer only moves or selects values, and the ``quant_param`` of all its inputs have the same factors."""
    factors = {(each.scale, each.offset, each.num_bits_d) for each in inputs}
    return len(factors) == 1 and moves_values(parameter)


def implementation_of(parameter: ProtoMessage, context: LayerContext) -> str:
    """The type that runs a layer: its own, or a variant that quantization asks for.

    A layer on integers (deploy models) and a BatchNorm that updates its statistics have their plain type in the file.
    """
    if parameter.name in context.integer_inputs:
        return f"{parameter.type} on integers" if parameter.type in INTEGER_TYPES else "data on integers"
    if parameter.type == "BatchNorm" and parameter.batch_norm_param.HasField("update_iterations"):
        return "BatchNorm with refreshed statistics"
    return str(parameter.type)


def layer_types() -> list[str]:
    """Every layer type that a prototxt can name, sorted; not the variants that ``implementation_of`` chooses."""
    _load_all()
    return sorted(name for name in _registered if " " not in name)
