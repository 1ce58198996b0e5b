"""The quantizers of a single module. Their state belongs to the module itself, under AMCT's names.

AMCT's checkpoints and optimizers name ``acts_clip_max`` or ``wts_scales`` of a module, so these are parameters and
buffers of the module, not of a quantizer inside it. A quantizer here knows names and settings only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from amct.numerics.arq import channels_first
from amct.numerics.ifmr import IfmrObserver
from amct.numerics.settings import IfmrSettings
from amct.numerics.training.quantizers import (
    arq_scale,
    learned_step,
    scale_count,
    ulq,
    ulq_factors,
    valid_clips,
    valid_scale,
)
from amct.pytorch.qat.quantizers import mean_over_ranks
from amct.pytorch.qat.single_op.onnx_operators import exported_weight, is_exporting, quantize_and_dequantize

if TYPE_CHECKING:
    from amct.config.qat.single_op import SingleOpData, SingleOpWeights
    from amct.numerics.settings import WeightKind

_NAN = float("nan")


@dataclass(eq=False)
class InputQuantizer:
    """ULQ of one input of a module.

    Attributes:
        settings: of the input.
        prefix: of the names of its state: ``acts_clip_max``, ``acts_clip_min``, their last legal values
            ``acts_clip_max_pre``, ``acts_clip_min_pre``, and ``acts_scale``, ``acts_offset_deploy`` that follow from
            them.
        trained: whether the clips have gradients.
        observer: what the first batches were; None before and afterwards.
    """

    settings: SingleOpData
    prefix: str = "acts"
    trained: bool = True
    observer: IfmrObserver | None = None

    def add_state(self, module: nn.Module, device: torch.device | str | None) -> None:
        """Add parameters and buffers to the module."""
        given = self.settings
        high = 1.0 if given.clip_max is None else given.clip_max
        low = -high if given.clip_min is None else given.clip_min
        name = self.prefix
        for key, value in ((f"{name}_clip_max", high), (f"{name}_clip_min", 0.0 if given.fixed_min else low)):
            tensor = torch.tensor(value, device=device)
            module.register_parameter(key, nn.Parameter(tensor, requires_grad=self.trained))
            module.register_buffer(f"{key}_pre", torch.tensor(_NAN, device=device))
        module.register_buffer(f"{name}_scale", torch.tensor([_NAN], device=device))
        integers = torch.int8 if given.num_bits == 8 else torch.int16
        module.register_buffer(f"{name}_offset_deploy", torch.tensor(0, dtype=integers, device=device))

    @torch.no_grad()
    def observe(self, module: nn.Module, x: Tensor, *, last: bool) -> None:
        """Observe one of the first batches; after the last one, the clips are those of a symmetric IFMR search.

        Raises:
            CalibrationError: the input holds NaN or infinity.
        """
        if self.observer is None:
            self.observer = IfmrObserver(IfmrSettings(num_bits=self.settings.num_bits, asymmetric=False))
        self.observer.observe(x)
        if last:
            found = self.observer.result()
            self.observer = None
            for name, value in (("max", found.clip_max), ("min", found.clip_min)):
                getattr(module, f"{self.prefix}_clip_{name}").copy_(mean_over_ranks(value))

    @torch.no_grad()
    def refresh(self, module: nn.Module) -> None:
        """Make the clips legal, and what follows from them current."""
        name = self.prefix
        clip_min, clip_max = getattr(module, f"{name}_clip_min"), getattr(module, f"{name}_clip_max")
        pre_min, pre_max = getattr(module, f"{name}_clip_min_pre"), getattr(module, f"{name}_clip_max_pre")
        if self.settings.fixed_min:
            clip_min.zero_()
        low, high = valid_clips(clip_min, clip_max, pre_min, pre_max)
        for target, value in ((clip_min, low), (pre_min, low), (clip_max, high), (pre_max, high)):
            target.copy_(value)
        scale, offset = ulq_factors(low, high, self.settings.num_bits)
        getattr(module, f"{name}_scale").copy_(scale)
        getattr(module, f"{name}_offset_deploy").copy_(offset)

    def quantize(self, module: nn.Module, x: Tensor) -> Tensor:
        """Quantize and dequantize the input."""
        name = self.prefix
        if is_exporting():
            scale, offset = getattr(module, f"{name}_scale").reshape(()), getattr(module, f"{name}_offset_deploy")
            return quantize_and_dequantize(x, scale, offset)
        clip_min = getattr(module, f"{name}_clip_min")
        if self.settings.fixed_min:
            clip_min = clip_min.detach()
        return ulq(x, clip_min, getattr(module, f"{name}_clip_max"), self.settings.num_bits)


@dataclass(eq=False)
class WeightQuantizer:
    """Symmetric quantizer of one weight of a module; the weight itself stays float.

    Attributes:
        settings: of the weight.
        weight: its name in the module.
        kind: its layout.
        groups: groups of a transposed convolution, gates of a recurrent layer, or 1.
        suffix: of the names of its state: ``wts_scales``, ``wts_offsets``, ``wts_offsets_deploy``.
    """

    settings: SingleOpWeights
    weight: str
    kind: WeightKind
    groups: int = 1
    suffix: str = ""

    def add_state(self, module: nn.Module, device: torch.device | str | None) -> None:
        """Add parameters and buffers to the module."""
        count = self._rows(module).shape[0]
        count = scale_count(count, self.kind, self.groups, channel_wise=self.settings.channel_wise)
        scales, offsets = (torch.full((count,), _NAN, device=device) for _ in range(2))
        learned = self.settings.learned
        module.register_parameter(f"wts_scales{self.suffix}", nn.Parameter(scales, requires_grad=learned))
        module.register_parameter(f"wts_offsets{self.suffix}", nn.Parameter(offsets, requires_grad=False))
        module.register_buffer(f"wts_offsets_deploy{self.suffix}", torch.zeros(count, dtype=torch.int8, device=device))

    @torch.no_grad()
    def refresh(self, module: nn.Module, *, start: bool) -> None:
        """Measure the scales anew, or replace learned ones that are not legal by measured ones.

        Args:
            module: the module.
            start: whether learned scales that have no values yet start here.
        """
        scales = getattr(module, f"wts_scales{self.suffix}")
        if self.settings.learned and not start:
            scales.copy_(valid_scale(scales, self._measured(module)))
            return
        found = self._measured(module)
        scales.copy_(torch.where(torch.isnan(scales), found, scales) if self.settings.learned else found)
        getattr(module, f"wts_offsets{self.suffix}").zero_()

    def quantize(self, module: nn.Module) -> Tensor:
        """The weight, quantized and dequantized."""
        weight, scales = getattr(module, self.weight), getattr(module, f"wts_scales{self.suffix}")
        if is_exporting():
            offsets = getattr(module, f"wts_offsets_deploy{self.suffix}")
            return exported_weight(weight, scales, offsets, self.kind, self.groups)
        # A measured scale has no gradient; that of the weight passes unchanged in both cases.
        return learned_step(weight, scales, self.settings.num_bits, kind=self.kind, groups=self.groups)

    def _rows(self, module: nn.Module) -> Tensor:
        return channels_first(getattr(module, self.weight).detach(), self.kind, self.groups)

    def _measured(self, module: nn.Module) -> Tensor:
        count = getattr(module, f"wts_scales{self.suffix}").numel()
        return arq_scale(self._rows(module), self.settings.num_bits, count)
