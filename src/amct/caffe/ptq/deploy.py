"""The two results of quantization: the fake-quant model (float arithmetic) and the deploy model (integers).

Both are built from the folded float model, the integer weights of its layers and the parameters of their inputs. In
both an LSTM, RNN or GRU is the same layer with quantized hidden states (``LSTMQuant``).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from amct.caffe.engine.layers.integer import stays_integer
from amct.caffe.engine.messages import new_message
from amct.caffe.model import RECURRENT_TYPES
from amct.caffe.prototxt import free_name
from amct.caffe.ptq.graph import insert_quant, taken_names
from amct.caffe.ptq.quantized_weights import fitted_bias, may_overflow, real_blobs, sum_scale, with_bias
from amct.numerics.integer import dequantized_bias
from amct.numerics.qparams import LayerQParams, QParams
from amct.pipeline.weights import corrected_bias
from amct.record import CaffeRecord
from amct.record.conversion import caffe_layer_record

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    import torch

    from amct.caffe.engine.messages import ProtoMessage
    from amct.caffe.model import CaffeModel
    from amct.caffe.ptq.quantized_weights import IntegerLayer
    from amct.pipeline.weights import QuantizedWeight, QuantizedWeights


STATIC = 2
"""The index of a static input among the bottoms, behind data and continuation marks."""
STATES = {"LSTM": 2, "RNN": 1, "GRU": 1}
"""The number of initial states, the last bottoms of a layer with ``expose_hidden``."""


@dataclass(frozen=True, kw_only=True)
class RecurrentWeights:
    """A quantized recurrent layer.

    Attributes:
        weights: The matrices.
        inputs: The parameters of the operand of each matrix, by the index of the matrix among the blobs.
        biases: int32, by their index among the blobs.
    """

    weights: QuantizedWeights
    inputs: dict[int, QParams]
    biases: dict[int, torch.Tensor]

    @property
    def blobs(self) -> list[torch.Tensor]:
        """The blobs of a deploy model: int8 matrices and int32 biases."""
        found = {weight.source.place: weight.packed() for weight in self.weights.weights} | self.biases
        return [found[place] for place in sorted(found)]

    @property
    def real_blobs(self) -> list[torch.Tensor]:
        """The dequantized blobs."""
        matrices = {weight.source.place: weight for weight in self.weights.weights}
        found = {place: weight.real() for place, weight in matrices.items()}
        for place, bias in self.biases.items():
            found[place] = dequantized_bias(bias, sum_scale(matrices[place - 1], self.inputs[place - 1].step))
        return [found[place] for place in sorted(found)]

    def overflowing(self) -> Iterator[int]:
        """The data bit width of each matrix whose sums may exceed int32."""
        for weight in self.weights.weights:
            place = weight.source.place
            data = self.inputs[place]
            if may_overflow(weight, self.biases.get(place + 1), data.bits, data.zero_point):
                yield data.bits


def integer_recurrent(
    layer: ProtoMessage, weights: QuantizedWeights, blobs: Sequence[torch.Tensor], qparams: LayerQParams
) -> RecurrentWeights:
    """Quantize the biases; each bias follows the matrix whose products it is added to.

    Raises:
        CalibrationError: a bias cannot be quantized; the message names the layer.
    """
    inputs = _inputs(layer, weights, qparams)
    fitted: list[QuantizedWeight] = []
    biases: dict[int, torch.Tensor] = {}
    for given in weights.weights:
        weight, place = given, given.source.place + 1
        if place < len(blobs) and blobs[place].ndim == 1:
            scale = inputs[place - 1].step
            weight, (biases[place],) = fitted_bias(layer.name, given, blobs[place], [scale], may_raise_scale=True)
        fitted.append(weight)
    return RecurrentWeights(weights=replace(weights, weights=tuple(fitted)), inputs=inputs, biases=biases)


def _inputs(layer: ProtoMessage, weights: QuantizedWeights, qparams: LayerQParams) -> dict[int, QParams]:
    """The operand's parameters by matrix: first the data's, then those of a static input (if any), then of states."""
    first = qparams.input
    hidden = QParams.of(1.0 / (2 ** (first.bits - 1) - 1), 0, first.bits)
    places = [weight.source.place for weight in weights.weights]
    found = dict.fromkeys(places, hidden) | {places[0]: first}
    states = STATES[layer.type] if layer.recurrent_param.expose_hidden else 0
    if len(layer.bottom) - states > STATIC:
        found[places[1]] = qparams.inputs[STATIC]
    return found


def fake_recurrent(layer: ProtoMessage, qparams: LayerQParams) -> None:
    """Convert a recurrent layer to one that fake-quantizes its hidden states."""
    layer.lstm_quant_param.object_layer = layer.name
    layer.lstm_quant_param.num_bits_d = qparams.input.bits
    layer.type = f"{layer.type}Quant"


def deploy_recurrent(layer: ProtoMessage, made: RecurrentWeights, qparams: LayerQParams) -> list[torch.Tensor]:
    """Convert a recurrent layer to integer arithmetic and return its blobs."""
    fake_recurrent(layer, qparams)
    layer.lstm_quant_param.scale_w.extend(weight.qparams.step for weight in made.weights.weights)
    return made.blobs


logger = logging.getLogger(__name__)


@dataclass
class QuantizedNet:
    """A quantized model, and the names of the layers inserted for each layer."""

    model: CaffeModel
    inserted: dict[str, list[str]] = field(default_factory=dict)


class Results:
    """Builds the fake-quant and the deploy model; the final parameters are in ``layers``.

    Args:
        model: the folded float model; it is not changed.
        weights: the integer weights, by layer.
        layers: the parameters of the inputs of all quantized layers.
        may_raise_scale: whether a weight scale may be increased so that the bias fits int32.
        config: the config used, as readable text for quant.json.
        equalized: the layers whose output channels were divided by factors, for quant.json.

    Raises:
        CalibrationError: a bias cannot be quantized.
    """

    def __init__(
        self,
        model: CaffeModel,
        weights: Mapping[str, QuantizedWeights],
        layers: Mapping[str, LayerQParams],
        *,
        may_raise_scale: bool = True,
        config: str = "",
        equalized: Sequence[str] = (),
    ) -> None:
        self.config = config
        self.equalized = tuple(equalized)
        self._model = model
        self._weights = dict(weights)
        self._integer: dict[str, IntegerLayer] = {}
        self._recurrent: dict[str, RecurrentWeights] = {}
        self._biases: dict[str, torch.Tensor] = {}
        """The biases that make up for the mean error of rounding the weights."""
        self.layers: dict[str, LayerQParams] = {}
        for layer in model.layers:
            if layer.name not in layers:
                continue
            qparams = layers[layer.name]
            if layer.name in self._weights:
                qparams = self._finish(layer, qparams, may_raise_scale)
            self.layers[layer.name] = qparams

    def record(self) -> CaffeRecord:
        """The final parameters as a record."""
        return CaffeRecord({name: caffe_layer_record(name, qparams) for name, qparams in self.layers.items()})

    def _finish(self, layer: ProtoMessage, qparams: LayerQParams, may_raise_scale: bool) -> LayerQParams:
        weights, blobs = self._weights[layer.name], self._model.weights[layer.name]
        if layer.type in RECURRENT_TYPES:
            recurrent = self._recurrent[layer.name] = integer_recurrent(layer, weights, blobs, qparams)
            weights, overflowing = recurrent.weights, next(recurrent.overflowing(), None)
        else:
            inputs = [qparams.inputs[index] for index in range(len(layer.bottom))]
            bias = blobs[1] if len(blobs) > 1 else None
            if bias is not None:
                bias = self._biases[layer.name] = corrected_bias(qparams, weights, bias)
            scales = [data.step for data in inputs]
            made = self._integer[layer.name] = with_bias(
                layer.name, weights, bias, scales, may_raise_scale=may_raise_scale
            )
            weights = made.weights
            overflowing = next((data.bits for index, data in enumerate(inputs) if _overflows(made, index, data)), None)
        self._weights[layer.name] = weights
        if overflowing is not None:
            logger.warning(
                'layer "%s": with %d-bit data its sums could leave int32 on a chip; they are exact here',
                layer.name,
                overflowing,
            )
        own = weights.qparams()
        return replace(qparams, weights=own.weights, cancels_errors=own.cancels_errors)

    # ------------------------------------------------------------------ fake-quant

    def fake_quant(self) -> QuantizedNet:
        """The model with fake-quantized data and weights, in float arithmetic."""
        result = self._with_quant_layers()
        model = result.model
        for name, recurrent in self._recurrent.items():
            fake_recurrent(model.layer(name), self.layers[name])
            model.weights[name] = recurrent.real_blobs
        for name, integer in self._integer.items():
            blobs = real_blobs(integer.weights, model.weights[name])
            if integer.real_bias is not None:
                blobs[1] = integer.real_bias
            model.weights[name] = blobs
        return result

    def _with_quant_layers(self) -> QuantizedNet:
        """A copy of the model with a Quant layer before each input of the quantized layers."""
        model = self._model.copy()

        def fill(quant: ProtoMessage, layer: ProtoMessage, index: int) -> None:
            fill_quant(quant.quant_param, layer.name, index, self.layers[layer.name].inputs[index])

        return QuantizedNet(model, insert_quant(model, self.layers, fill))

    # ------------------------------------------------------------------ float

    @property
    def folded_model(self) -> CaffeModel:
        """The float model: folded, and equalized if requested."""
        return self._model

    def float_model(self, *, rounded: Collection[str] = ()) -> CaffeModel:
        """The folded float model; weights of the ``rounded`` layer types are quantized and dequantized.

        Clustered weights are always dequantized: their 16 values do not follow from a scale. Where nothing is, it is
        the folded model itself.
        """
        changed = [
            name
            for name, weights in self._weights.items()
            if any(weight.clusters is not None for weight in weights.weights) or self._model.layer(name).type in rounded
        ]
        if not changed:
            return self._model
        model = self._model.copy()
        for name in changed:
            model.weights[name] = real_blobs(self._weights[name], model.weights[name])
            if name in self._biases:  # exporters find no error to correct in weights that are rounded already
                model.weights[name][1] = self._biases[name]
        return model

    # ------------------------------------------------------------------ deploy

    def deploy(self) -> QuantizedNet:
        """The model in integer arithmetic: int8 or int16 data, int8 weights or 4-bit indices, int32 bias."""
        originals = {layer.name: list(layer.top) for layer in self._model.layers}
        result = self._with_quant_layers()
        model = result.model
        taken = taken_names(model)
        layers: list[ProtoMessage] = []
        made: dict[str, list[torch.Tensor]] = {}
        for layer in model.layers:
            layers.append(layer)
            if layer.name not in self.layers:
                continue
            qparams = self.layers[layer.name]
            if layer.name in self._recurrent:
                made[layer.name] = deploy_recurrent(layer, self._recurrent[layer.name], qparams)
                continue
            if layer.name in self._integer:
                behind = self._weighted(layer, made, taken)
            else:
                inputs = [model.layer(name).quant_param for name in result.inserted[layer.name]]
                behind = self._data_only(layer, inputs, taken)
            for position, after in enumerate(behind):
                after.top.append(originals[layer.name][position])
                layer.top[position] = after.bottom[0]
            result.inserted[layer.name] += [after.name for after in behind]
            layers += behind
        model.set_layers(layers)
        model.weights.update(made)
        return result

    def _weighted(
        self, layer: ProtoMessage, made: dict[str, list[torch.Tensor]], taken: set[str]
    ) -> list[ProtoMessage]:
        integer = self._integer[layer.name]
        (weight,) = integer.weights.weights
        blobs = [weight.packed(), *integer.biases]
        if weight.clusters is not None:
            blobs.append(weight.clusters.table)
        made[layer.name] = blobs
        behind = []
        for index, scale in enumerate(integer.sum_scales):
            after = _layer_behind(layer, index, "DeQuant", "int32", taken)
            after.dequant_param.object_layer = layer.name
            after.dequant_param.channel_wise = scale.numel() > 1
            made[after.name] = [scale.reshape(-1)]
            behind.append(after)
        return behind

    def _data_only(self, layer: ProtoMessage, inputs: Sequence[ProtoMessage], taken: set[str]) -> list[ProtoMessage]:
        first = self.layers[layer.name].input
        behind = []
        for index in range(len(layer.top)):
            after = _layer_behind(layer, index, "AntiQuant", "quantized", taken)
            options = after.antiquant_param
            options.object_layer, options.index = layer.name, index
            if stays_integer(layer, inputs):
                options.scale, options.offset, options.num_bits_d = first.step, first.zero_point, first.bits
            behind.append(after)
        return behind


def _layer_behind(layer: ProtoMessage, index: int, kind: str, blob: str, taken: set[str]) -> ProtoMessage:
    """Add a layer behind one top of ``layer``, named after it; its bottom is a new blob."""
    suffix = f"_{index}" if len(layer.top) > 1 else ""
    made = new_message("LayerParameter", name=free_name(f"{layer.name}_{kind.lower()}{suffix}", taken), type=kind)
    made.bottom.append(free_name(f"{layer.name}_{blob}{suffix}", taken))
    return made


def _overflows(layer: IntegerLayer, index: int, data: QParams) -> bool:
    bias = layer.biases[index] if layer.biases else None
    return may_overflow(layer.weights.weights[0], bias, data.bits, data.zero_point)


def fill_quant(options: ProtoMessage, layer: str, index: int, data: QParams) -> None:
    """Write the parameters of one input into a QuantParameter."""
    options.with_offset = bool(data.zero_point)
    options.scale = data.step
    options.offset = data.zero_point
    options.object_layer = layer
    options.index = index
    options.num_bits_d = data.bits
