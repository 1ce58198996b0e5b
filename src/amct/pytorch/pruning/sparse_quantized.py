"""Layers with 2:4 sparsity and trained quantizers: the weight is masked first, then quantized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from amct.pytorch.pruning.sparse import Sparse, make_plain, make_sparse, sparse_layers
from amct.pytorch.qat.layers import QuantizedConv2d, QuantizedConvTranspose2d, QuantizedLayer, QuantizedLinear
from amct.pytorch.user_model import copy_model

if TYPE_CHECKING:
    from collections.abc import Mapping


class _SparseQuantized(Sparse):
    def quantized_weight(self) -> Tensor:
        """The masked weight on its grid."""
        return cast("Tensor", cast("QuantizedLayer", self).weight_quantizer(self.masked_weight()))


class SparseQuantizedConv2d(_SparseQuantized, QuantizedConv2d):
    """Conv2d."""

    plain_class = QuantizedConv2d


class SparseQuantizedLinear(_SparseQuantized, QuantizedLinear):
    """Linear."""

    plain_class = QuantizedLinear


class SparseQuantizedConvTranspose2d(_SparseQuantized, QuantizedConvTranspose2d):
    """ConvTranspose2d."""

    plain_class = QuantizedConvTranspose2d
    input_axis = 0


SPARSE_QUANTIZED: Mapping[type[nn.Module], type[Sparse]] = {
    each.plain_class: each for each in (SparseQuantizedConv2d, SparseQuantizedLinear, SparseQuantizedConvTranspose2d)
}


@dataclass(frozen=True, eq=False)
class MaskState:
    """What a sparse layer has beside its plain one: how often the mask is chosen, its buffers, the dense weight."""

    update_freq: int
    mask: Tensor
    steps: Tensor
    weight: Tensor


def without_masks(model: nn.Module) -> tuple[nn.Module, dict[str, MaskState]]:
    """A plain copy of a model with masks, and their state by layer; a model without masks itself."""
    layers = sparse_layers(model)
    if not layers:
        return model, {}
    found = {
        name: MaskState(layer.update_freq, layer.weight_mask, layer.mask_steps, layer.weight.detach())
        for name, layer in layers.items()
    }
    plain = copy_model(model)
    make_plain(plain)
    for original, duplicate in zip(model.modules(), plain.modules(), strict=True):
        duplicate.training = original.training
    return plain, found


def put_sparse(model: nn.Module, masks: Mapping[str, MaskState]) -> None:
    """Add masks to the layers of a model with quantizers, in place; layers that stayed float are sparse too."""
    modules = {name: model.get_submodule(name) for name in masks}
    quantized = {name: masks[name].update_freq for name in masks if isinstance(modules[name], QuantizedLayer)}
    make_sparse(model, quantized, SPARSE_QUANTIZED)
    make_sparse(model, {name: state.update_freq for name, state in masks.items() if name not in quantized})
    with torch.no_grad():
        for name, state in masks.items():
            layer = model.get_submodule(name)
            assert isinstance(layer, Sparse)
            layer.weight.copy_(state.weight)
            layer.weight_mask.copy_(state.mask)
            layer.mask_steps.copy_(state.steps)
