"""The fake-quantized model in torch: inputs and weights of its layers are rounded to their grids, arithmetic is float.

It matches the fake-quant file up to float rounding and is an ordinary module for any evaluation loop.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from amct.errors import AmctError
from amct.numerics.affine import dequantize, quantize_bias
from amct.numerics.arq import factors_per_row
from amct.pytorch.capture.operators import MARK
from amct.pytorch.functional.layers import layer_module
from amct.pytorch.layer_weights import put_weights
from amct.pytorch.watch.layer_hooks import Balance, FakeQuantize

if TYPE_CHECKING:
    from torch import Tensor

    from amct.numerics.arq import WeightFactors
    from amct.pipeline.weights import LayerWeights
    from amct.pytorch.preparation import TorchPreparation
    from amct.record import LayerRecord, Record

logger = logging.getLogger(__name__)


def fake_quant_copy(preparation: TorchPreparation, record: Record, *, is_private: bool = False) -> nn.Module:
    """A fake-quantized copy of the folded model; the record must be complete. ``is_private``: no user gets it."""
    model = preparation.quantized_copy(is_private=is_private)
    for name, weights in preparation.weights.items():
        module, entry = layer_module(model, name), record[name]
        setattr(module, MARK, True)
        if weights.balance is not None:
            module.register_forward_pre_hook(Balance(weights.balance, weights.channel_axis), with_kwargs=True)
        module.register_forward_pre_hook(_quantizer(entry), with_kwargs=True)
        try:
            _round_biases(module, weights, entry)
        except AmctError as error:
            logger.warning('layer "%s": the bias stays float in the simulated model: %s', name, error)
    return model


def _quantizer(entry: LayerRecord) -> FakeQuantize:
    bits = int(entry.activation_type.removeprefix("INT"))
    assert entry.scale_d is not None
    assert entry.offset_d is not None
    state = None
    if entry.scale_h is not None and entry.offset_h is not None:
        state = _factors(entry.scale_h, entry.offset_h)
    return FakeQuantize(bits, _factors(entry.scale_d, entry.offset_d), state)


def _factors(scale: float, offset: int) -> tuple[Tensor, Tensor]:
    return torch.tensor(scale, dtype=torch.float32), torch.tensor(offset, dtype=torch.int32)


def _round_biases(module: nn.Module, weights: LayerWeights, entry: LayerRecord) -> None:
    """Round each bias to the scale of its accumulator."""
    if isinstance(module, nn.RNNBase):
        pairs = [("bias_ih_l0", "weight_ih_l0", entry.scale_d), ("bias_hh_l0", "weight_hh_l0", entry.scale_h)]
    else:
        pairs = [("bias", "weight", entry.scale_d)]
    for attribute, weight, scale in pairs:
        bias = getattr(module, attribute, None)
        if isinstance(bias, torch.Tensor) and weight in weights.factors and scale is not None:
            factors = weights.factors[weight]
            if not isinstance(module, nn.RNNBase):  # of a recurrent layer the record has the gates in another order
                recorded = torch.tensor(entry.scale_w, dtype=torch.float32).reshape(factors.scale.shape)
                factors = replace(factors, scale=recorded)
            put_weights(module, {attribute: _rounded_bias(bias.detach(), factors, scale)})


def _rounded_bias(bias: Tensor, factors: WeightFactors, scale: float) -> Tensor:
    step = factors_per_row(factors, bias.numel()).scale.to(bias.device)
    data = torch.tensor(scale, dtype=torch.float32, device=bias.device)
    integers = quantize_bias(bias.float(), step, data)
    product = step * data
    axis = 0 if product.numel() > 1 else None
    zero = torch.zeros_like(product, dtype=torch.int32)
    return dequantize(integers, product, zero, axis=axis).to(bias.dtype)
