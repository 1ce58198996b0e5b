"""The base of all layers, and how to write one.

**Adding a layer type** takes one class in one module of ``layers/`` and, if it has parameters, one message in
``schema/caffe.proto``; it is found by itself::

    @register("Power")
    class Power(Layer):
        '''y = (shift + scale * x) ^ power.'''

        def setup(self, bottoms: list[Shape]) -> None:          # once, shapes known: read parameters, make blobs
            self.options = self.parameter.power_param

        def reshape(self, bottoms: list[Shape]) -> list[Shape]:  # whenever a bottom changes shape: the tops' shapes
            return [bottoms[0]]

        def forward(self, bottoms: list[Tensor], parameters: list[Tensor]) -> list[Tensor]:
            return [(self.options.shift + self.options.scale * bottoms[0]) ** self.options.power]

* ``bottom_count`` / ``top_count`` are the numbers of blobs allowed, ``(1, 1)`` unless the class says otherwise;
  ``(2, None)`` means two or more. ``same_count`` demands as many tops as bottoms.
* ``self.top_blobs`` and ``self.bottom_blobs`` are there from ``setup`` on, for layers whose options depend on how
  many they have.
* Parameters are made in ``setup`` by ``self.add_parameter(shape, filler)``; ``forward`` gets them as tensors, in
  that order.
* ``forward`` is a function of its arguments. It must not change a bottom, and its results are new tensors, except:
  results may be views of a bottom when ``returns_views`` is set; when ``self.may_overwrite`` is true the bottom may
  be reused (``torch.relu_``): the engine sets that for in-place layers nobody else looks at.
* **Gradients** come from torch's autograd over ``forward``. Where Caffe's backward differs from the derivative (ties,
  deliberate approximations), use a ``torch.autograd.Function`` inside ``forward``. A layer that works on blobs
  (Python layers; Input, which has nothing to do) overrides ``run``, and ``run_backward`` if there are gradients.
* Randomness: use torch's global generator (``caffe.set_random_seed`` seeds it). ``self.is_training`` tells the phase.
* Errors: ``raise self.error("kernel_size must be > 0, got 0")`` names the layer for you. Check everything in
  ``setup`` or ``reshape``: building a net finds all mistakes and allocates nothing.
* ``channel_affine`` lets the engine fold a layer into the convolution in front of it; ``shares_memory`` is for
  layers whose top *is* the bottom's memory in Caffe (Reshape, Flatten, Split).
* ``moves_values`` is for layers that only move or select values: deploy models run them on integers.
* ONNX: a method ``to_onnx(self, place)`` writes the layer's nodes (``amct.caffe.onnx.forms.place`` says how); the
  types of this project have theirs in ``onnx_forms/``, so that the engine needs no onnx. A layer without one runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar

from amct.caffe.engine.blob import Blob, Shape
from amct.caffe.engine.build.fillers import lazy_fill
from amct.caffe.engine.device import current_device
from amct.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from amct.caffe.engine.messages import ProtoMessage
    from amct.caffe.engine.packed import Activation

TRAIN, TEST = 0, 1
#: What torch hands to ``forward`` and ``backward`` of an autograd Function; anything may be kept on it.
AutogradContext: TypeAlias = Any
Made = TypeVar("Made")


def _allow(shape: Shape, what: str) -> None:
    """Any size is fine: for layers made outside a net."""
    del shape, what


@dataclass(frozen=True, kw_only=True)
class LayerContext:
    """What a layer may know about the net around it."""

    phase: int = TEST
    net_name: str = ""
    allow_python: bool = False
    check_size: Callable[[Shape, str], None] = _allow


def _state(sources: Sequence[Blob], condition: object) -> tuple[object, ...]:
    """What something derived depends on: which buffers (sharing replaces them), their epochs, the device."""
    return [(blob.values, blob.values.epoch) for blob in sources], condition, current_device()


@dataclass(frozen=True, eq=False)
class Folded:
    """Parameters with the layers behind folded in: how to compute them, and the blobs they come from."""

    owner: Layer
    compute: Callable[[], list[torch.Tensor]]
    sources: list[Blob]

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Computed once and kept until a source changes."""
        return self.owner.derived("folded", self.sources, self.compute)


class Layer:
    """One layer of a net; the module docstring says how to write a new one."""

    bottom_count: ClassVar[tuple[int, int | None]] = (1, 1)
    top_count: ClassVar[tuple[int, int | None]] = (1, 1)
    same_count: ClassVar[bool] = False
    allows_in_place: ClassVar[bool] = True
    returns_views: ClassVar[bool] = False
    shares_memory: bool = False
    default_loss_weight: ClassVar[float] = 0.0
    makes_missing_tops: ClassVar[bool] = False
    """A layer that may be written without its top (losses): the net invents one."""
    keeps_integers: ClassVar[bool] = False
    """Whether parameters stored as integers stay integers (layers of deploy models)."""
    fold_axis: ClassVar[int] = -1
    """The axis of the first parameter that counts outputs, for layers others can be folded into; -1: none."""
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

    # ------------------------------------------------------------------ what a layer defines

    def setup(self, bottoms: list[Shape]) -> None:
        """Read and check the options, make the parameters. Called once, after the bottoms' shapes are known."""

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """Return the shapes of the tops for these bottoms; raise ``self.error`` when they do not fit."""
        raise NotImplementedError

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Compute the tops."""
        raise NotImplementedError

    def connect(self, layers: Mapping[str, Layer]) -> None:
        """Get to know the other layers of the net, by name and in order, once all are set up."""

    def allows_forced_backward(self, bottom: int) -> bool:
        """Whether ``force_backward`` reaches this bottom (labels say no)."""
        del bottom
        return True

    def channel_affine(self) -> tuple[torch.Tensor | None, torch.Tensor | None] | None:
        """Scale and shift per channel when the layer is nothing but that at inference, else None."""
        return None

    def activation(self) -> Activation | None:
        """What the layer does to every value by itself, in the terms of ``packed.py``, else None."""
        return None

    def forward_folded(
        self, bottom: torch.Tensor, folded: Folded, activation: Activation | None
    ) -> tuple[torch.Tensor, bool]:
        """Run with folded parameters; say whether the activation was computed too."""
        del activation
        return self.forward([bottom], folded.parameters)[0], False

    def fold_channels(self) -> int:
        """How many output channels a foldable layer has."""
        raise NotImplementedError

    def fold_groups(self) -> int:
        """In how many groups a foldable layer's outputs come."""
        return 1

    @classmethod
    def only_moves_values(cls, parameter: ProtoMessage) -> bool:
        """``moves_values`` of a layer with these parameters, where it depends on them."""
        del parameter
        return cls.moves_values

    # ------------------------------------------------------------------ what the engine calls

    def run(self, bottoms: list[Blob], tops: list[Blob]) -> None:
        """Forward on blobs, without gradients."""
        results = self.forward([blob.tensor for blob in bottoms], [blob.tensor for blob in self.blobs])
        for blob, value in zip(tops, results, strict=True):
            blob.set_tensor(value)

    #: A layer that computes its own gradients on blobs sets this to a method
    #: ``(tops: list[Blob], propagate_down: list[bool], bottoms: list[Blob]) -> None``.
    run_backward: Callable[[list[Blob], list[bool], list[Blob]], None] | None = None

    @property
    def replaces_tops(self) -> bool:
        """Whether every run gives all tops new tensors; a layer that works on blobs (overrides ``run``) need not."""
        return type(self).run is Layer.run

    @property
    def uses_autograd(self) -> bool:
        """Whether gradients come from ``forward``; not so for a layer that works on blobs (overrides ``run``)."""
        return self.replaces_tops and self.run_backward is None

    # ------------------------------------------------------------------ help for those who write layers

    @property
    def is_training(self) -> bool:
        """Whether the layer runs in the TRAIN phase (its own ``phase:`` beats the net's)."""
        phase: int = self.parameter.phase if self.parameter.HasField("phase") else self.context.phase
        return phase == TRAIN

    def add_parameter(self, shape: Sequence[int], filler: ProtoMessage | None = None, *, default: float = 0.0) -> Blob:
        """Append a parameter blob, filled as ``filler`` says (or with ``default``) when first read."""
        full = tuple(int(size) for size in shape)
        self.context.check_size(full, f'parameter {len(self.blobs)} of layer "{self.name}"')
        blob = Blob(*full)
        lazy_fill(blob, filler, self.name, default)
        self.blobs.append(blob)
        return blob

    def derived(self, key: str, sources: Sequence[Blob], make: Callable[[], Made], condition: object = None) -> Made:
        """Keep something computed from parameters (a folded weight) until one of them, or ``condition``, changes."""
        state = _state(sources, condition)
        kept = self._derived.get(key)
        if kept is not None and kept[0] == state and not any(blob.values.is_exposed for blob in sources):
            found: Made = kept[1]
            return found
        made = make()
        self._derived[key] = (_state(sources, condition), made)
        return made

    def error(self, message: str) -> ModelError:
        """An error that names this layer."""
        return ModelError(f'layer "{self.name}" ({self.type}): {message}')

    def __repr__(self) -> str:
        return f"{self.type}({self.name!r})"
