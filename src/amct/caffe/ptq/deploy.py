"""The two results of quantization: the fake-quant model (float arithmetic) and the deploy model (integers).

Both are built from the folded float model, the integer weights of its layers and the parameters of their inputs. In
both an LSTM, RNN or GRU is the same layer with quantized hidden states (``LSTMQuant``).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from amct.caffe.engine.layer import stays_integer
from amct.caffe.engine.messages import new_message
from amct.caffe.model import RECURRENT_TYPES
from amct.caffe.prototxt import free_name
from amct.caffe.ptq.graph import input_layer, taken_names
from amct.caffe.ptq.quantized_weights import layer_products, real_blobs
from amct.numerics.qparams import LayerQParams, QParams
from amct.pipeline.weights import corrected_bias

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    import torch

    from amct.caffe.engine.messages import ProtoMessage
    from amct.caffe.model import CaffeModel
    from amct.caffe.ptq.quantized_weights import Product
    from amct.pipeline.weights import QuantizedWeights


STATIC = 2
"""The index of a static input among the bottoms, behind data and continuation marks."""
STATES = {"LSTM": 2, "RNN": 1, "GRU": 1}
"""The number of initial states, the last bottoms of a layer with ``expose_hidden``."""


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


def integer_blobs(products: Iterable[Product]) -> list[torch.Tensor]:
    """The blobs of a deploy model: int8 weights or 4-bit indices, each with its int32 biases, a table of values."""
    blobs: list[torch.Tensor] = []
    weight = None
    for each in products:
        if each.weight is not weight:
            weight = each.weight
            blobs.append(weight.packed())
        if each.bias is not None:
            blobs.append(each.bias)
    if weight is not None and weight.clusters is not None:
        blobs.append(weight.clusters.table)
    return blobs


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
    ) -> None:
        self._model = model
        self._weights = {layer.name: weights[layer.name] for layer in model.layers if layer.name in weights}
        self._products: dict[str, list[Product]] = {}
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

    def _finish(self, layer: ProtoMessage, qparams: LayerQParams, may_raise_scale: bool) -> LayerQParams:
        weights, blobs = self._weights[layer.name], self._model.weights[layer.name]
        found: list[Product] = []
        if layer.type in RECURRENT_TYPES:
            inputs = _inputs(layer, weights, qparams)
            for weight in weights.weights:
                place = weight.source.place
                bias = next((blob for blob in blobs[place + 1 : place + 2] if blob.ndim == 1), None)
                found += layer_products(layer.name, weight, bias, [inputs[place]], may_raise_scale=may_raise_scale)
            weights = replace(weights, weights=tuple(each.weight for each in found))
        else:
            bias = blobs[1] if len(blobs) > 1 else None
            if bias is not None:
                bias = self._biases[layer.name] = corrected_bias(qparams, weights, bias)
            data = [qparams.inputs[index] for index in range(len(layer.bottom))]
            found = layer_products(layer.name, weights.weights[0], bias, data, may_raise_scale=may_raise_scale)
            weights = replace(weights, weights=(found[0].weight,))
        self._products[layer.name], self._weights[layer.name] = found, weights
        overflowing = next((each.data.bits for each in found if each.may_overflow()), None)
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
        for name, found in self._products.items():
            if model.layer(name).type in RECURRENT_TYPES:
                fake_recurrent(model.layer(name), self.layers[name])
            firsts = {each.weight.source.place: each for each in reversed(found)}  # the bias is in steps of these
            real = {place: blob for each in firsts.values() for place, blob in each.real_blobs().items()}
            model.weights[name] = [real[place] for place in sorted(real)]
        return result

    def _with_quant_layers(self) -> QuantizedNet:
        """A copy of the model with a Quant layer before each input of the quantized layers."""
        model = self._model.copy()
        taken = taken_names(model)
        inserted: dict[str, list[str]] = {}
        result: list[ProtoMessage] = []
        for layer in model.layers:
            for index in range(len(layer.bottom)) if layer.name in self.layers else ():
                made = input_layer("Quant", layer, index, taken)
                _fill_quant(made.quant_param, layer.name, index, self.layers[layer.name].inputs[index])
                inserted.setdefault(layer.name, []).append(made.name)
                result.append(made)
            result.append(layer)
        model.set_layers(result)
        return QuantizedNet(model, inserted)

    # ------------------------------------------------------------------ float

    @property
    def folded_model(self) -> CaffeModel:
        """The float model: folded, and equalized if requested."""
        return self._model

    def float_model(self, *, rounded: Collection[str] = ()) -> CaffeModel:
        """The folded float model; weights of the ``rounded`` layer types are quantized and dequantized.

        Clustered weights, and those whose rounding was learned, are always dequantized: they do not follow from a
        scale. Where nothing is, it is the folded model itself.
        """
        changed = [
            name
            for name, weights in self._weights.items()
            if weights.custom_rounding
            or any(weight.clusters is not None for weight in weights.weights)
            or self._model.layer(name).type in rounded
        ]
        if not changed:
            return self._model
        model = self._model.copy()
        for name in changed:
            model.weights[name] = real_blobs(self._weights[name], model.weights[name])
            # Exporters find no error to correct in weights that are rounded already; what is lost, they add themselves.
            if name in self._biases and self.layers[name].lost is None:
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
            found = self._products.get(layer.name, [])
            if found:
                made[layer.name] = integer_blobs(found)
            if found and layer.type in RECURRENT_TYPES:
                fake_recurrent(layer, qparams)
                layer.lstm_quant_param.scale_w.extend(each.weight.qparams.step for each in found)
                continue
            if found:
                behind = _dequantized(layer, found, made, taken)
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


def _dequantized(
    layer: ProtoMessage, products: Iterable[Product], made: dict[str, list[torch.Tensor]], taken: set[str]
) -> list[ProtoMessage]:
    """A DeQuant layer behind each top; their factors are put into ``made``."""
    behind = []
    for index, product in enumerate(products):
        after = _layer_behind(layer, index, "DeQuant", "int32", taken)
        after.dequant_param.object_layer = layer.name
        after.dequant_param.channel_wise = product.step.numel() > 1
        made[after.name] = [product.step.reshape(-1)]
        behind.append(after)
    return behind


def _layer_behind(layer: ProtoMessage, index: int, kind: str, blob: str, taken: set[str]) -> ProtoMessage:
    """Add a layer behind one top of ``layer``, named after it; its bottom is a new blob."""
    suffix = f"_{index}" if len(layer.top) > 1 else ""
    made = new_message("LayerParameter", name=free_name(f"{layer.name}_{kind.lower()}{suffix}", taken), type=kind)
    made.bottom.append(free_name(f"{layer.name}_{blob}{suffix}", taken))
    return made


def _fill_quant(options: ProtoMessage, layer: str, index: int, data: QParams) -> None:
    """Write the parameters of one input into a QuantParameter."""
    options.with_offset = bool(data.zero_point)
    options.scale = data.step
    options.offset = data.zero_point
    options.object_layer = layer
    options.index = index
    options.num_bits_d = data.bits
