"""LSTM, RNN and GRU in quantized models: the same layer with quantized hidden states (``LSTMQuant``)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from amct.caffe.ptq.quantized_weights import QuantizedWeights, fitted_bias, known, may_overflow, sum_scale
from amct.numerics.weight_grid import dequantized_bias
from amct.record import DataFactors

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from amct.caffe.engine.messages import ProtoMessage
    from amct.caffe.ptq.quantized_weights import QuantizedMatrix
    from amct.record import CaffeLayerRecord

STATIC = 2
"""The index of a static input among the bottoms, behind data and continuation marks."""
STATES = {"LSTM": 2, "RNN": 1, "GRU": 1}
"""The number of initial states, the last bottoms of a layer with ``expose_hidden``."""


@dataclass(frozen=True, kw_only=True)
class IntegerRecurrent:
    """A quantized recurrent layer.

    Attributes:
        weights: The matrices.
        inputs: The factors of the operand of each matrix, by the index of the matrix among the blobs.
        biases: int32, by their index among the blobs.
    """

    weights: QuantizedWeights
    inputs: dict[int, DataFactors]
    biases: dict[int, torch.Tensor]

    @property
    def blobs(self) -> list[torch.Tensor]:
        """The blobs of a deploy model: int8 matrices and int32 biases."""
        found = {matrix.blob: matrix.integers for matrix in self.weights.matrices} | self.biases
        return [found[place] for place in sorted(found)]

    @property
    def real_blobs(self) -> list[torch.Tensor]:
        """The dequantized blobs."""
        matrices = {matrix.blob: matrix for matrix in self.weights.matrices}
        found = {place: matrix.real() for place, matrix in matrices.items()}
        for place, bias in self.biases.items():
            scale = known(self.inputs[place - 1].scale)
            found[place] = dequantized_bias(bias, sum_scale(matrices[place - 1], scale))
        return [found[place] for place in sorted(found)]

    def overflowing(self) -> Iterator[int]:
        """The data bit width of each matrix whose sums may exceed int32."""
        for matrix in self.weights.matrices:
            data = self.inputs[matrix.blob]
            if may_overflow(matrix, self.biases.get(matrix.blob + 1), data.bits, int(known(data.offset))):
                yield data.bits


def integer_recurrent(
    layer: ProtoMessage, weights: QuantizedWeights, blobs: Sequence[torch.Tensor], entry: CaffeLayerRecord
) -> IntegerRecurrent:
    """Quantize the biases; each bias follows the matrix whose products it is added to.

    Raises:
        CalibrationError: a bias cannot be quantized; the message names the layer.
    """
    inputs = _inputs(layer, weights, entry)
    matrices: list[QuantizedMatrix] = []
    biases: dict[int, torch.Tensor] = {}
    for given in weights.matrices:
        matrix, place = given, given.blob + 1
        if place < len(blobs) and blobs[place].ndim == 1:
            scale = known(inputs[given.blob].scale)
            matrix, (biases[place],) = fitted_bias(weights.layer, given, blobs[place], [scale], may_raise_scale=True)
        matrices.append(matrix)
    return IntegerRecurrent(weights=replace(weights, matrices=tuple(matrices)), inputs=inputs, biases=biases)


def _inputs(layer: ProtoMessage, weights: QuantizedWeights, entry: CaffeLayerRecord) -> dict[int, DataFactors]:
    """Data factors by matrix: the first multiplies the data, the next the static input (if any), the others states."""
    first = known(entry.input(0))
    hidden = DataFactors(index=0, scale=1.0 / (2 ** (first.bits - 1) - 1), offset=0, num_bits=first.bits)
    places = [matrix.blob for matrix in weights.matrices]
    found = dict.fromkeys(places, hidden) | {places[0]: first}
    states = STATES[layer.type] if layer.recurrent_param.expose_hidden else 0
    if len(layer.bottom) - states > STATIC:
        found[places[1]] = known(entry.input(STATIC))
    return found


def fake_recurrent(layer: ProtoMessage, entry: CaffeLayerRecord) -> None:
    """Convert a recurrent layer to one that fake-quantizes its hidden states."""
    layer.lstm_quant_param.object_layer = layer.name
    layer.lstm_quant_param.num_bits_d = known(entry.input(0)).bits
    layer.type = f"{layer.type}Quant"


def deploy_recurrent(layer: ProtoMessage, made: IntegerRecurrent, entry: CaffeLayerRecord) -> list[torch.Tensor]:
    """Convert a recurrent layer to integer arithmetic and return its blobs."""
    fake_recurrent(layer, entry)
    layer.lstm_quant_param.scale_w.extend(float(matrix.factors.scale) for matrix in made.weights.matrices)
    return made.blobs
