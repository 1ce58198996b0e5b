"""Reads checkpoints that AMCT itself has written: the names of its wrapped layers become those of ours.

AMCT wraps a layer, ``<layer>.quant_module.replaced_module.weight`` (with 2:4 sparsity alone
``<layer>.replaced_module.weight``), moves the batch norm behind it to ``<layer>.bn_module``, and keeps clips, learned
scales and masks beside them. What follows from these (recorded scales, offsets, flags) is left out.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

from amct.pytorch.qat.layers import quantized_layers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

_WRAPPED = re.compile(r"(?P<layer>.+?)\.(?:quant_module\.)?replaced_module\.(?P<name>\w+)")
_NORM = re.compile(r"(?P<layer>.+?)\.bn_module\.(?P<name>\w+)")
_BESIDE = re.compile(r"(?P<layer>.+?)\.(?:quant_module\.|record_module\.)?(?P<name>\w+)")
_OURS: Mapping[str, tuple[str, ...]] = {
    "acts_clip_max": ("input_quantizer.clip_max",),
    "acts_clip_min": ("input_quantizer.clip_min",),
    "acts_clip_max_pre": ("input_quantizer.valid_max",),
    "acts_clip_min_pre": ("input_quantizer.valid_min",),
    "cur_batch": ("input_quantizer.batches",),
    "wts_scales": ("weight_quantizer.scale", "weight_quantizer.valid_scale"),
    "wts_mask": ("weight_mask",),
    "prune_cur_batch": ("mask_steps",),
    **dict.fromkeys(
        ("acts_offset", "acts_scale", "offset_w", "quant_layer_num", "s_rec_flag", "scale_w", "wts_offsets"), ()
    ),
}
"""What an entry beside a wrapped layer is called here; nothing for what is not needed."""


def is_amct_state(state: Mapping[str, Any]) -> bool:
    """Whether a ``state_dict`` is that of a model of AMCT."""
    return any(_WRAPPED.fullmatch(key) for key in state)


def from_amct_state(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """A ``state_dict`` of AMCT's model by the names of ours; an entry that has no counterpart keeps its name.

    Layers that share one input quantizer take the clips of the first. Where fewer than ``batch_num`` batches have
    determined the clips, they begin anew.
    """
    own = model.state_dict()
    norms = _folded_norms(model)
    wrapped = {found["layer"] for key in state if (found := _WRAPPED.fullmatch(key))}
    result: dict[str, Any] = {}
    for key, value in state.items():
        inner, norm, beside = (pattern.fullmatch(key) for pattern in (_WRAPPED, _NORM, _BESIDE))
        if inner:
            result[f"{inner['layer']}.{inner['name']}"] = value
        elif norm and norm["layer"] in norms:
            result[f"{norms[norm['layer']]}.{norm['name']}"] = value
        elif beside and beside["layer"] in wrapped and beside["name"] in _OURS:
            names = [f"{beside['layer']}.{name}" for name in _OURS[beside["name"]]]
            result.update({name: _like(own[name], value) for name in names if name in own})
        else:
            result[key] = value
    return _with_begun_clips(model, own, result)


def _like(own: Tensor, value: Tensor) -> Tensor:
    """A value in the type of our entry, and in its shape where both hold one number."""
    return value.reshape(own.shape).to(own.dtype) if value.numel() == own.numel() else value


def _folded_norms(model: nn.Module) -> dict[str, str]:
    """The name of the batch norm behind each quantized layer."""
    names = {id(module): name for name, module in model.named_modules()}
    return {
        name: names[id(norm)]
        for name, layer in quantized_layers(model).items()
        if (norm := layer.weight_quantizer.norm) is not None
    }


def _with_begun_clips(model: nn.Module, own: Mapping[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """AMCT counts on after ``batch_num`` batches; before that its clips are those of a single batch."""
    for name, layer in quantized_layers(model).items():
        key = f"{name}.input_quantizer"
        if f"{key}.batches" not in state:
            continue
        if int(state[f"{key}.batches"]) < layer.activation.batch_num:
            state.update({each: own[each] for each in own if each.startswith(f"{key}.")})
        else:
            state[f"{key}.batches"] = torch.full_like(own[f"{key}.batches"], layer.activation.batch_num)
    return state
