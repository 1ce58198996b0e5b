"""Layers with 2:4 sparsity: their weight is multiplied by a mask, and then quantized if they have a quantizer.

A sparse layer is its torch class with two more buffers, so that its state dict, its checkpoints and
DistributedDataParallel work as ever. The dense weight is trained; gradients of removed weights are zero, because the
mask is a factor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from amct.errors import RecordError, did_you_mean
from amct.numerics.pruning import two_of_four_mask
from amct.pytorch.qat.layers import QuantizedConv2d, QuantizedConvTranspose2d, QuantizedLayer, QuantizedLinear
from amct.pytorch.user_model import as_array, copy_in_its_mode
from amct.record import PruneNode, PruneRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


MASK = "weight_mask"
STEPS = "mask_steps"


class Sparse(nn.Module):
    """What the sparse layers have in common.

    ``amct_operator`` marks a compressed layer, as in all packages.

    Attributes:
        weight_mask: 1 where a weight is kept.
        mask_steps: How many forwards in training were made.
        update_freq: The mask is chosen anew every so many forwards in training; 0: in the first one only.
    """

    amct_operator = True
    plain_class: ClassVar[type[nn.Module]]
    input_axis = 1
    weight: Tensor
    weight_mask: Tensor
    mask_steps: Tensor
    update_freq: int

    def masked_weight(self) -> Tensor:
        """The weight with its mask; in training the mask is chosen anew when it is due."""
        if self.training and not torch.compiler.is_compiling():
            step = int(self.mask_steps)
            if step == 0 or (self.update_freq and step % self.update_freq == 0):
                self.choose_mask()
            self.mask_steps += 1
        masked: Tensor = self.weight * self.weight_mask.to(self.weight.dtype)
        return masked

    @torch.no_grad()
    def choose_mask(self) -> None:
        """Keep the two largest of every four weights."""
        self.weight_mask.copy_(two_of_four_mask(self.weight, self.input_axis))


class SparseConv2d(Sparse, nn.Conv2d):
    """nn.Conv2d with 2:4 sparsity along its input channels."""

    plain_class = nn.Conv2d

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  torch's name
        """Convolve with the masked weight."""
        convolved: Tensor = self._conv_forward(input, self.masked_weight(), self.bias)
        return convolved


class SparseLinear(Sparse, nn.Linear):
    """nn.Linear with 2:4 sparsity along its inputs."""

    plain_class = nn.Linear

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  torch's name
        """Multiply by the masked weight."""
        return functional.linear(input, self.masked_weight(), self.bias)


class SparseConvTranspose2d(Sparse, nn.ConvTranspose2d):
    """nn.ConvTranspose2d with 2:4 sparsity along its input channels."""

    plain_class = nn.ConvTranspose2d
    input_axis = 0

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:  # noqa: A002  torch's name
        """Convolve with the masked weight."""
        layer = cast("Any", self)
        padding = layer._output_padding(
            input, output_size, layer.stride, layer.padding, layer.kernel_size, 2, layer.dilation
        )
        weight = self.masked_weight()
        return functional.conv_transpose2d(
            input, weight, self.bias, layer.stride, layer.padding, padding, layer.groups, layer.dilation
        )


class _SparseQuantized(Sparse):
    def quantized_weight(self) -> Tensor:
        """The masked weight on its grid."""
        return cast("Tensor", cast("QuantizedLayer", self).weight_quantizer(self.masked_weight()))


class SparseQuantizedConv2d(_SparseQuantized, QuantizedConv2d):
    """The quantized Conv2d with 2:4 sparsity; the weight is masked first."""

    plain_class = QuantizedConv2d


class SparseQuantizedLinear(_SparseQuantized, QuantizedLinear):
    """The quantized Linear with 2:4 sparsity; the weight is masked first."""

    plain_class = QuantizedLinear


class SparseQuantizedConvTranspose2d(_SparseQuantized, QuantizedConvTranspose2d):
    """The quantized ConvTranspose2d with 2:4 sparsity; the weight is masked first."""

    plain_class = QuantizedConvTranspose2d
    input_axis = 0


_SPARSE_CLASSES: Mapping[type[nn.Module], type[Sparse]] = {
    each.plain_class: each
    for each in (
        SparseQuantizedConv2d,
        SparseQuantizedLinear,
        SparseQuantizedConvTranspose2d,
        SparseConv2d,
        SparseLinear,
        SparseConvTranspose2d,
    )
}
"""The sparse class of each class of layers; those with quantizers come first, they are layers of torch too."""


def sparse_refusal(module: nn.Module) -> str | None:
    """Why a layer cannot be made sparse; None if it can."""
    plain = next((kind for kind in _SPARSE_CLASSES if isinstance(module, kind)), None)
    if plain is None:
        return f"{type(module).__name__} cannot be made sparse"
    methods = ("forward", "_conv_forward")
    own = [name for name in methods if getattr(type(module), name, None) is not getattr(plain, name, None)]
    return f"{type(module).__name__} has a {own[0]} of its own" if own else None


def make_sparse(model: nn.Module, frequencies: Mapping[str, int]) -> None:
    """Turn layers of a model into sparse ones, in place.

    Args:
        model: The model.
        frequencies: The ``update_freq`` of each layer, by name.
    """
    for name, frequency in frequencies.items():
        module = model.get_submodule(name)
        module.__class__ = next(sparse for plain, sparse in _SPARSE_CLASSES.items() if isinstance(module, plain))
        assert isinstance(module, Sparse)
        module.update_freq = frequency
        weight = module.weight
        module.register_buffer(MASK, torch.ones_like(weight, dtype=torch.uint8, requires_grad=False))
        module.register_buffer(STEPS, torch.zeros((), dtype=torch.int64, device=weight.device))
        module.choose_mask()


def make_plain(model: nn.Module) -> None:
    """Turn sparse layers back into those of torch, in place; removed weights are exactly zero."""
    for module in sparse_layers(model).values():
        with torch.no_grad():
            module.weight.mul_(module.weight_mask)
        del module.weight_mask, module.mask_steps, module.update_freq
        cast("nn.Module", module).__class__ = module.plain_class


def sparse_layers(model: nn.Module) -> dict[str, Sparse]:
    """The sparse layers of a model by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Sparse)}


def mask_records(model: nn.Module) -> list[PruneRecord]:
    """The masks of the sparse layers, as entries of a record."""
    layers = sparse_layers(model).items()
    return [PruneRecord(selective=PruneNode.masked(name, as_array(layer.weight_mask))) for name, layer in layers]


def put_masks(model: nn.Module, records: Iterable[PruneRecord], source: str) -> None:
    """Set the masks of sparse layers from a record.

    Raises:
        RecordError: A layer has no mask in the record, or one that does not fit.
    """
    layers = sparse_layers(model)
    nodes = {record.selective.name: record.selective for record in records if record.selective is not None}
    unknown = [name for name in nodes if name not in layers]
    if unknown:
        hint = did_you_mean(unknown[0], list(layers))
        raise RecordError(f'{source}: it has a mask of "{unknown[0]}", which the config does not make sparse.{hint}')
    for name, layer in layers.items():
        mask = nodes[name].mask() if name in nodes else None
        if mask is None:
            raise RecordError(
                f'{source}: it has no selective_mask of layer "{name}"; give the record that '
                "create_prune_retrain_model or create_compressed_retrain_model wrote"
            )
        if mask.shape != tuple(layer.weight.shape):
            shape = tuple(layer.weight.shape)
            raise RecordError(f'{source}: the mask of layer "{name}" has the shape {mask.shape}, its weight {shape}')
        layer.weight_mask.copy_(torch.from_numpy(mask))


def without_masks(model: nn.Module) -> tuple[nn.Module, dict[str, Sparse]]:
    """A plain copy of a model with masks, and its sparse layers by name; a model without masks itself."""
    layers = sparse_layers(model)
    if not layers:
        return model, {}
    plain = copy_in_its_mode(model)
    make_plain(plain)
    return plain, layers


def put_sparse(model: nn.Module, layers: Mapping[str, Sparse]) -> None:
    """Make layers of a model with quantizers sparse as others are, in place; some may have stayed float."""
    make_sparse(model, {name: layer.update_freq for name, layer in layers.items()})
    for name, layer in layers.items():
        found = model.get_submodule(name)
        assert isinstance(found, Sparse)
        with torch.no_grad():
            found.weight.copy_(layer.weight)
            found.weight_mask.copy_(layer.weight_mask)
            found.mask_steps.copy_(layer.mask_steps)
