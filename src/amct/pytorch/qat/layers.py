"""Layers with trained quantizers: each is a subclass of the layer it stands in for, with the same parameters.

``weight`` and ``bias`` keep their names, so the state of the float model loads. A layer of the user's own class (a
convolution that pads first) keeps its forward; only its weight is exchanged while that runs. Functional calls on
parameters (``F.linear``, nn.MultiheadAttention) have a module with quantizers for their operands.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from amct.calibration.session import HIDDEN, INPUT
from amct.model.kinds import KIND_OF_TORCH_TYPE
from amct.pipeline.weights import FloatWeight
from amct.pytorch.capture.functional_layers import named_layers
from amct.pytorch.capture.layer_types import float_weights

if TYPE_CHECKING:
    from collections.abc import Mapping

    from amct.pytorch.capture.functional_layers import LayerSource
    from amct.pytorch.qat.quantizers import ActivationQuantizer, WeightQuantizer

_CHILDREN = ("input_quantizer", "weight_quantizer", "state_quantizer", "state_weight_quantizer")


class QuantizedLayer(nn.Module):
    """A layer that quantizes its input and its weight.

    A layer that reads the same tensor as an earlier one, with the same settings, uses the quantizer of that layer; it
    holds it inside a tuple, so that the quantizer is registered once.
    """

    amct_operator = True
    float_class: ClassVar[type[nn.Module]]
    input_quantizer: ActivationQuantizer
    weight_quantizer: WeightQuantizer
    _leader: tuple[ActivationQuantizer, ...] = ()

    @property
    def activation(self) -> ActivationQuantizer:
        """The quantizer of the input, this layer's own or that of another layer."""
        return self._leader[0] if self._leader else self.input_quantizer

    @property
    def activations(self) -> Mapping[str, ActivationQuantizer]:
        """The quantizers of what the layer reads, by the name of its stream in a calibration."""
        return {INPUT: self.activation}

    @property
    def weight_quantizers(self) -> tuple[WeightQuantizer, ...]:
        """The quantizer of each weight."""
        return (self.weight_quantizer,)

    def quantized_input(self, x: Tensor) -> Tensor:
        """The input on its grid."""
        return self._leader[0].quantize(x) if self._leader else cast("Tensor", self.input_quantizer(x))

    def quantized_weight(self) -> Tensor:
        """The weight on its grid."""
        return cast("Tensor", self.weight_quantizer(cast("Any", self).weight))

    def quantized(self, x: Tensor) -> tuple[Tensor, ...]:
        """The operands of the layer: input and weight on their grids."""
        return self.quantized_input(x), self.quantized_weight()

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *arguments: Any) -> None:  # noqa: ANN401  torch's protocol
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        if f"{prefix}weight" in state_dict and not any(f".{name}." in key for key in state_dict for name in _CHILDREN):
            self.weight_quantizer.restart(cast("Any", self).weight)


class ConvForward:
    """The forward of a convolution whose class quantizes its operands."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  torch's name
        """Convolve the quantized input with the quantized weight."""
        layer = cast("Any", self)
        x, weight = layer.quantized(input)
        return cast("Tensor", layer._conv_forward(x, weight, layer.bias))


class ConvTransposeForward:
    """The forward of a transposed convolution whose class quantizes its operands."""

    dimensions: ClassVar[int]

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:  # noqa: A002  torch's name
        """Convolve the quantized input with the quantized weight."""
        layer = cast("Any", self)
        x, weight = layer.quantized(input)
        settings = (layer.stride, layer.padding, layer.kernel_size, self.dimensions, layer.dilation)
        padding = layer._output_padding(input, output_size, *settings)
        convolve = functional.conv_transpose1d if self.dimensions == 1 else functional.conv_transpose2d
        return convolve(x, weight, layer.bias, layer.stride, layer.padding, padding, layer.groups, layer.dilation)


class LinearForward:
    """The forward of a linear layer whose class quantizes its operands."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  torch's name
        """Multiply the quantized input by the quantized weight."""
        layer = cast("Any", self)
        x, weight = layer.quantized(input)
        return functional.linear(x, weight, layer.bias)


class QuantizedConv1d(ConvForward, QuantizedLayer, nn.Conv1d):
    """An ``nn.Conv1d`` with trained quantizers."""

    float_class = nn.Conv1d


class QuantizedConv2d(ConvForward, QuantizedLayer, nn.Conv2d):
    """An ``nn.Conv2d`` with trained quantizers."""

    float_class = nn.Conv2d


class QuantizedConv3d(ConvForward, QuantizedLayer, nn.Conv3d):
    """An ``nn.Conv3d`` with trained quantizers."""

    float_class = nn.Conv3d


class QuantizedConvTranspose1d(ConvTransposeForward, QuantizedLayer, nn.ConvTranspose1d):
    """An ``nn.ConvTranspose1d`` with trained quantizers."""

    float_class = nn.ConvTranspose1d
    dimensions = 1


class QuantizedConvTranspose2d(ConvTransposeForward, QuantizedLayer, nn.ConvTranspose2d):
    """An ``nn.ConvTranspose2d`` with trained quantizers."""

    float_class = nn.ConvTranspose2d
    dimensions = 2


class QuantizedLinear(LinearForward, QuantizedLayer, nn.Linear):
    """An ``nn.Linear`` with trained quantizers."""

    float_class = nn.Linear


class _QuantizedRecurrent(QuantizedLayer):
    """A recurrent layer: both weights, the input and the initial hidden state are quantized.

    The range of the hidden state is that of all steps of the first batches. It is not trained: the states between the
    steps stay float inside torch's kernel, and an initial state of zeros would give it no gradient.
    """

    state_quantizer: ActivationQuantizer
    state_weight_quantizer: WeightQuantizer

    @property
    def activations(self) -> Mapping[str, ActivationQuantizer]:
        """Those of input and hidden state."""
        return {**super().activations, HIDDEN: self.state_quantizer}

    @property
    def weight_quantizers(self) -> tuple[WeightQuantizer, ...]:
        """Those of the weights of the input and of the hidden state."""
        return self.weight_quantizer, self.state_weight_quantizer

    def forward(self, input: Tensor, hx: Any = None) -> Any:  # noqa: A002, ANN401  torch's name; a tensor, a pair or None
        """Run the recurrent layer on quantized input, state and weights."""
        layer = cast("Any", self)
        x = self.quantized_input(input)
        h, state = self._quantized_state(hx)
        quantizers = dict(zip(("weight_ih_l0", "weight_hh_l0"), self.weight_quantizers, strict=True))
        plain = layer._flat_weights
        layer._flat_weights = [
            quantizers[name](weight) if name in quantizers else weight
            for name, weight in zip(layer._flat_weights_names, plain, strict=True)
        ]
        try:
            output = super().forward(x, state)
        finally:
            layer._flat_weights = plain
        if self.training and not self.state_quantizer.is_ready:
            self._observe_states(h, output[0])
        return output

    def _quantized_state(self, hx: Any) -> tuple[Tensor | None, Any]:  # noqa: ANN401  a tensor, a pair or None
        """The initial hidden state on its grid, and what it is part of."""
        if hx is None:
            return None, None
        is_pair = isinstance(hx, (tuple, list))
        h = self.state_quantizer.quantize(hx[0] if is_pair else hx)
        return h, (h, *hx[1:]) if is_pair else h

    def _observe_states(self, h: Tensor | None, outputs: Tensor) -> None:
        later = outputs[:, :-1] if cast("Any", self).batch_first else outputs[:-1]
        first = outputs.new_zeros(1) if h is None else h.reshape(-1)
        self.state_quantizer(torch.cat([first, later.reshape(-1)]).detach())


class QuantizedLSTM(_QuantizedRecurrent, nn.LSTM):  # type: ignore[misc]
    """An ``nn.LSTM`` with trained quantizers."""

    float_class = nn.LSTM


class QuantizedGRU(_QuantizedRecurrent, nn.GRU):  # type: ignore[misc]
    """An ``nn.GRU`` with trained quantizers."""

    float_class = nn.GRU


class _QuantizedSubclass(QuantizedLayer):
    """A layer of the user's own class, whose forward stays as it is."""

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: A002, ANN401  the user's own forward
        """The user's forward on the quantized input, with the quantized weight in place of the weight."""
        x, parameters, weight = self.quantized_input(input), self._parameters, self.weight
        parameters["weight"] = cast("nn.Parameter", self.quantized_weight())
        try:
            return super().forward(x, *args, **kwargs)
        finally:
            parameters["weight"] = cast("nn.Parameter", weight)

    def __reduce_ex__(self, protocol: Any) -> Any:  # noqa: ANN401  the pickle protocol
        """Pickle the class by its name: classes that are made while a program runs have none of their own."""
        return (_empty_layer, (self.float_class,), *super().__reduce_ex__(protocol)[2:])


QUANTIZED: Mapping[type[nn.Module], type[QuantizedLayer]] = {
    each.float_class: each
    for each in (
        QuantizedConv1d,
        QuantizedConv2d,
        QuantizedConv3d,
        QuantizedConvTranspose1d,
        QuantizedConvTranspose2d,
        QuantizedLinear,
        QuantizedLSTM,
        QuantizedGRU,
    )
}


@functools.cache
def quantized_class(layer_class: type[nn.Module]) -> type[QuantizedLayer]:
    """The class that stands in for a class of layers."""
    if layer_class in QUANTIZED:
        return QUANTIZED[layer_class]
    known = next((each for each in QUANTIZED if issubclass(layer_class, each)), None)
    assert known is not None, f"{layer_class.__name__} is no layer that can be quantized"
    base = QUANTIZED[known] if layer_class.forward is known.forward else _QuantizedSubclass
    if issubclass(known, nn.RNNBase):
        base = QUANTIZED[known]
    members = {"float_class": layer_class, "__reduce_ex__": _QuantizedSubclass.__reduce_ex__}
    return cast("type[QuantizedLayer]", type(f"Quantized{layer_class.__name__}", (base, layer_class), members))


def _empty_layer(layer_class: type[nn.Module]) -> QuantizedLayer:
    made = quantized_class(layer_class)  # type: ignore[arg-type]  # torch's stubs hide that classes have a hash
    return made.__new__(made)


def as_quantized(
    layer: nn.Module, quantizers: Mapping[str, nn.Module], leader: ActivationQuantizer | None = None
) -> None:
    """Make a layer a quantized one, in place: whoever holds the layer keeps it.

    Args:
        layer: The layer, of a class that ``quantized_class`` knows, or a functional call.
        quantizers: Its quantizers by name.
        leader: The input quantizer of another layer, where it has none of its own.
    """
    if not isinstance(layer, QuantizedCall):
        layer.__class__ = quantized_class(type(layer))  # type: ignore[arg-type]  # as above
    assert isinstance(layer, QuantizedLayer)
    for name, quantizer in quantizers.items():
        layer.add_module(name, quantizer.train(layer.training))
    if leader is not None:
        layer._leader = (leader,)


def as_float(layer: QuantizedLayer) -> None:
    """Make a quantized layer a float one again, in place, with its parameters as they are."""
    for name in _CHILDREN:
        layer._modules.pop(name, None)
    vars(layer).pop("_leader", None)
    layer.__class__ = layer.float_class  # type: ignore[assignment]


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLayer]:
    """The quantized layers of a model by name, in model order."""
    return {name: module for name, module in named_layers(model) if isinstance(module, QuantizedLayer)}


# -- functional calls --------------------------------------------------------------------------------------------------


class QuantizedCall(QuantizedLayer):
    """The quantizers of a functional call; the parameter stays where the user has it.

    The module that holds the parameter is kept inside a tuple, so that it is not registered twice.
    """

    def __init__(self, holder: nn.Module, source: LayerSource) -> None:
        """Create it without quantizers."""
        super().__init__()
        self._holder = (holder,)
        self.source = source

    @property
    def weight(self) -> Tensor:
        """The output channels of the parameter that the call uses, in the layout of the torch.nn type."""
        attribute = self.source.parameter.rpartition(".")[2]
        return self.source.channels.of(getattr(self._holder[0], attribute))

    def part(self) -> FloatWeight:
        """The weight as quantizers read it."""
        kind = KIND_OF_TORCH_TYPE[self.source.type]
        groups = dict(self.source.settings).get("groups", 1)
        return FloatWeight(
            name="weight", tensor=self.weight.detach(), kind=kind.weight_kind, groups=groups, gates=kind.gates
        )

    def forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The operands of the call on their grids."""
        return self.quantized_input(x), cast("Tensor", self.weight_quantizer(weight))

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *arguments: Any) -> None:  # noqa: ANN401  torch's protocol
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        if not any(key.startswith(prefix) for key in state_dict):  # the state of a float model, loaded before
            self.weight_quantizer.restart(self.weight)


def trained_parts(layer: nn.Module) -> tuple[FloatWeight, ...]:
    """The weights of a layer in training; a functional call has one."""
    return (layer.part(),) if isinstance(layer, QuantizedCall) else float_weights(layer)
