"""LSTM, RNN and GRU in the results of quantization: the same layer with a quantized hidden state (``LSTMQuant``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from amct.numerics.affine import quantize_bias

if TYPE_CHECKING:
    from amct.caffe.engine.messages import ProtoMessage
    from amct.caffe.quantized_weights import QuantizedWeights
    from amct.record import CaffeLayerRecord


def fake_recurrent(layer: ProtoMessage, entry: CaffeLayerRecord) -> None:
    """Make a recurrent layer quantize its hidden state, too."""
    data = entry.input(0)
    assert data is not None
    layer.lstm_quant_param.object_layer = layer.name
    layer.lstm_quant_param.num_bits_d = data.bits
    layer.type = f"{layer.type}Quant"


def deploy_recurrent(
    layer: ProtoMessage, blobs: list[torch.Tensor], weights: QuantizedWeights, entry: CaffeLayerRecord
) -> list[torch.Tensor]:
    """The integer blobs of a recurrent layer: int8 matrices, int32 biases."""
    fake_recurrent(layer, entry)
    data = entry.input(0)
    assert data is not None
    matrices = {matrix.blob: matrix for matrix in weights.matrices}
    layer.lstm_quant_param.scale_w.extend(float(matrix.factors.scale) for matrix in weights.matrices)
    hidden = 1.0 / (2 ** (data.bits - 1) - 1)
    result: list[torch.Tensor] = []
    for index, blob in enumerate(blobs):
        if index in matrices:
            result.append(matrices[index].integers)
            continue
        # A bias stands behind the matrix whose products it is added to: the first reads the data, others the state.
        before = max(place for place in matrices if place < index)
        step = torch.tensor(data.scale if before == 0 else hidden)
        result.append(quantize_bias(blob.reshape(-1), matrices[before].factors.scale, step))
    return result
