"""The trained quantizers as modules: their clips and scales are parameters, everything else they need is a buffer.

Nothing here keeps state outside of the module, so copies, checkpoints, pickles and replicas are independent of each
other. Clips that have no values yet are NaN.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from amct.errors import AmctError, TrainingError
from amct.numerics.affine import integer_range
from amct.numerics.arq import channels_first
from amct.numerics.ifmr import IfmrObserver
from amct.numerics.observer import finite_range
from amct.numerics.qparams import QParams
from amct.numerics.settings import IfmrSettings
from amct.numerics.training.quantizers import (
    arq_scale,
    arq_step,
    learned_step,
    scale_count,
    ulq,
    ulq_factors,
    valid_clips,
    valid_scale,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from amct.pipeline.weights import FloatWeight

_NAN = float("nan")
_NOT_IN_EVAL = "a forward in eval mode does not initialize the clips, as it does in AMCT"
OBSERVED = "observed_"
"""Begins the names of what the first batches held in a ``state_dict``; these entries exist only between them."""


BITS = "trained_bits"
"""The entry of a ``state_dict`` that tells the number of bits a quantizer was trained with; older ones have none."""


def is_observation(key: str) -> bool:
    """Whether an entry of a ``state_dict`` belongs to the first batches."""
    return key.rpartition(".")[2].startswith(OBSERVED)


class ActivationQuantizer(nn.Module):
    """ULQ of one activation.

    In training, the first ``batch_num`` batches determine the clips: each is quantized to its own range, and after the
    last one the clips are those of a symmetric IFMR search. From then on the optimizer moves them. In eval mode nothing
    changes; a quantizer without clips passes its input on.
    """

    clip_min: Tensor
    clip_max: Tensor
    valid_min: Tensor
    valid_max: Tensor
    batches: Tensor

    def __init__(
        self,
        layer: str,
        bits: int,
        *,
        clips: tuple[float, float] | None = None,
        fixed_min: bool = False,
        batch_num: int = 1,
        fp16_scale: bool = False,
        trained: bool = True,
    ) -> None:
        """Create a quantizer.

        Args:
            layer: The name of the layer, for messages.
            bits: 4, 8 or 16.
            clips: Where the clips start; None: the first batches tell.
            fixed_min: Whether the lower clip stays 0.
            batch_num: How many batches tell the clips.
            fp16_scale: Whether the scale is rounded to float16 (``FORCE_FP16_QUANT``).
            trained: Whether the clips are parameters.
        """
        super().__init__()
        integer_range(bits)
        self.layer, self.bits, self.fixed_min = layer, bits, fixed_min
        self.batch_num, self.fp16_scale = batch_num, fp16_scale
        low, high = clips if clips is not None else (_NAN, _NAN)
        self._add("clip_max", high, is_parameter=trained)
        self._add("clip_min", 0.0 if fixed_min else low, is_parameter=trained and not fixed_min)
        self.register_buffer("valid_max", torch.tensor(high))
        self.register_buffer("valid_min", torch.tensor(0.0 if fixed_min else low))
        self.register_buffer("batches", torch.tensor(0 if clips is None else batch_num))
        self.register_buffer(BITS, torch.tensor(float(bits)))
        self._observer: IfmrObserver | None = None
        self._begins_anew = False
        self._ready = clips is not None

    def _add(self, name: str, value: float, *, is_parameter: bool) -> None:
        if is_parameter:
            self.register_parameter(name, nn.Parameter(torch.tensor(value)))
        else:
            self.register_buffer(name, torch.tensor(value))

    def extra_repr(self) -> str:
        """Bits and clips."""
        fixed = ", fixed_min" if self.fixed_min else ""
        return f"bits={self.bits}, clips=[{self.clip_min.item():.4g}, {self.clip_max.item():.4g}]{fixed}"

    def forward(self, x: Tensor) -> Tensor:
        """Quantize and dequantize; in training also determine the clips, or keep them legal."""
        if self.training:
            if self._ready:
                self._keep_legal()
            else:
                self._begin(x)
        return self.quantize(x)

    def quantize(self, x: Tensor) -> Tensor:
        """Quantize and dequantize with the clips as they are; without clips the input itself."""
        if not self._ready and not self.has_clips():
            return x
        low, high = (self.clip_min, self.clip_max) if self.training else self._legal_clips()
        return ulq(x, low, high, self.bits, fp16_scale=self.fp16_scale)

    def has_clips(self) -> bool:
        """Whether the clips have values."""
        return not math.isnan(self.clip_max.item())

    @property
    def clips(self) -> tuple[float, float]:
        """The lower and the upper clip, as they are deployed."""
        low, high = self._legal_clips()
        return low.item(), high.item()

    @property
    def is_ready(self) -> bool:
        """Whether enough batches determined the clips."""
        return self._ready

    def qparams(self) -> QParams:
        """The parameters of the clips.

        Raises:
            TrainingError: Fewer than ``batch_num`` batches were seen in train mode, or the clips are not finite.
        """
        self._check_finite()
        if not self._find_ready():
            raise TrainingError(
                f'layer "{self.layer}": its clips are known after {self.batch_num} batches in train mode (batch_num of '
                f"the config), but the model has seen {int(self.batches)}; {_NOT_IN_EVAL}; train on, or lower batch_num"
            )
        scale, offset = ulq_factors(*self._legal_clips(), self.bits, fp16_scale=self.fp16_scale)
        return QParams.of(float(scale), int(offset), self.bits)

    @torch.no_grad()
    def set_clips(self, low: Tensor | float, high: Tensor | float) -> None:
        """Set the clips; they count as determined."""
        low = 0.0 if self.fixed_min else low
        for name, value in (("min", low), ("max", high)):
            for tensor in (getattr(self, f"clip_{name}"), getattr(self, f"valid_{name}")):
                tensor.copy_(torch.as_tensor(value))
        self.batches.fill_(self.batch_num)
        self._ready, self._observer = True, None

    def free_min(self) -> None:
        """Let a fixed lower clip be trained, from the value it has; before the optimizer is made."""
        if self.fixed_min:
            start = self._buffers.pop("clip_min")
            assert start is not None
            self.fixed_min = False
            self.register_parameter("clip_min", nn.Parameter(start.detach().clone()))

    # -- first batches -------------------------------------------------------------------------------------------------

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def _begin(self, x: Tensor) -> None:
        """Observe one of the first batches, and set the clips to its range, or after the last to the best ones."""
        if self._find_ready() or is_recomputing() or x.numel() == 0:
            return
        try:
            low, high = self._observe(x)
        except AmctError as error:
            raise TrainingError(f'layer "{self.layer}": {error}') from error
        count = int(self.batches) + 1
        low, high = mean_over_ranks(low), mean_over_ranks(high)
        observer = self._observer
        self.set_clips(low, high)
        self.batches.fill_(count)
        self._ready = count >= self.batch_num
        self._observer = None if self._ready else observer

    def _observe(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self._observer is None:
            self.batches.zero_()  # a checkpoint without the earlier batches: begin anew
            self._begins_anew = False
            self._observer = self._new_observer()
        self._observer.observe(x)
        if int(self.batches) + 1 < self.batch_num:
            low, high = finite_range(x.detach().float().reshape(1, -1))
            return low.clamp(max=0).reshape(()), high.clamp(min=0).reshape(())
        found = self._observer.result()
        return found.clip_min, found.clip_max

    def _new_observer(self) -> IfmrObserver:
        return IfmrObserver(IfmrSettings(num_bits=self.bits, asymmetric=False))

    def _find_ready(self) -> bool:
        """Whether the clips are known: after loading a checkpoint, or because a copy was given averaged clips."""
        self._ready = self._is_average() or int(self.batches) >= self.batch_num
        return self._ready

    def _is_average(self) -> bool:
        """Whether the clips are averages of another quantizer's; torch averages ``batches`` too, rounded down."""
        return self._observer is None and not self._begins_anew and self.has_clips()

    # -- later batches -------------------------------------------------------------------------------------------------

    def _legal_clips(self) -> tuple[Tensor, Tensor]:
        """The clips, with those that the last step of an optimizer made illegal replaced by the last legal ones."""
        return valid_clips(self.clip_min, self.clip_max, self.valid_min, self.valid_max)

    @torch.no_grad()
    def _keep_legal(self) -> None:
        """Write legal clips back, for the optimizer to go on from."""
        on_host = self.clip_max.device.type == "cpu" and not torch.compiler.is_compiling()
        if on_host:
            self._check_finite()
            low, high = self.clip_min.item(), self.clip_max.item()
            if low <= 0 <= high and low < high:
                self.valid_min.fill_(low)
                self.valid_max.fill_(high)
                return
        low_clip, high_clip = self._legal_clips()
        for name, value in (("min", low_clip), ("max", high_clip)):
            getattr(self, f"clip_{name}").copy_(value)
            getattr(self, f"valid_{name}").copy_(value)

    def _check_finite(self) -> None:
        low, high = self.clip_min.item(), self.clip_max.item()
        if math.isfinite(low) and math.isfinite(high):
            return
        if int(self.batches) == 0:
            raise TrainingError(
                f'layer "{self.layer}": the range of its input is not known yet; run at least {self.batch_num} batches '
                f"in train mode before ({_NOT_IN_EVAL})"
            )
        raise TrainingError(
            f'layer "{self.layer}": the trained clips are {low:g} and {high:g}; a loss or gradient before was not '
            "finite. Load the last good checkpoint, and continue with a lower learning rate or clipped gradients"
        )

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *arguments: Any) -> None:  # noqa: ANN401  torch's protocol
        if not any(key.startswith(prefix) for key in state_dict):
            return  # the state of a float model: the clips stay as they are
        before = f"{prefix}{OBSERVED}"
        kept = {key: value for key, value in state_dict.items() if key.startswith(before)}
        arrays = {key.removeprefix(before): value.numpy(force=True) for key, value in kept.items()}
        rest = {key: value for key, value in state_dict.items() if key not in kept}
        rest[f"{prefix}{BITS}"] = self.get_buffer(BITS)
        super()._load_from_state_dict(rest, prefix, *arguments)
        self._observer = None
        if arrays:
            self._observer = self._new_observer()
            try:
                self._observer.restore(arrays)
            except AmctError as error:
                raise TrainingError(f'layer "{self.layer}": {error}; load another checkpoint') from error
        self._begins_anew = 0 < int(self.batches) < self.batch_num and not arrays
        self._find_ready()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Between the first batches also what they held, so that training can go on in the middle of them."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._is_average():
            destination[f"{prefix}batches"] = torch.full_like(self.batches, self.batch_num)
        if self._observer is not None and not self._ready:
            for name, array in self._observer.state().items():
                destination[f"{prefix}{OBSERVED}{name}"] = torch.from_numpy(array)


class WeightQuantizer(nn.Module):
    """Symmetric quantizer of one weight: its scale is learned, or measured in every step.

    ``norm`` is the batch norm that will be folded into the layer. Channels whose gamma is negative must not use the
    lowest integer, because folding turns its sign. The batch norm belongs to the model; here it is only looked at,
    from inside a tuple, so that it is not registered twice.
    """

    scale: Tensor
    valid_scale: Tensor

    def __init__(
        self,
        part: FloatWeight,
        bits: int,
        *,
        channel_wise: bool = True,
        learned: bool = False,
        norm: nn.Module | None = None,
    ) -> None:
        """Create a quantizer for a weight like ``part``."""
        super().__init__()
        self.bits, self.channel_wise, self.learned = bits, channel_wise, learned
        self.kind, self.groups = part.kind, part.gates or part.groups
        self._norm = () if norm is None else (norm,)
        self.register_buffer(BITS, torch.tensor(float(bits)))
        if learned:
            start = self._measured(part.tensor)
            self.register_parameter("scale", nn.Parameter(start))
            self.register_buffer("valid_scale", start.clone())

    def extra_repr(self) -> str:
        """Bits, and how the scale is found."""
        return f"bits={self.bits}, channel_wise={self.channel_wise}, scale={'learned' if self.learned else 'measured'}"

    def forward(self, weight: Tensor) -> Tensor:
        """Quantize and dequantize the weight."""
        layout: dict[str, Any] = {"kind": self.kind, "groups": self.groups, "lowest": self.lowest()}
        if not self.learned:
            return arq_step(weight, self.bits, channel_wise=self.channel_wise, **layout)
        if self.training:
            self._keep_legal()
        return learned_step(weight, self.scale if self.training else self._legal_scale(), self.bits, **layout)

    def rows(self, weight: Tensor) -> Tensor:
        """The weight as rows, one per output channel."""
        return channels_first(weight.detach(), self.kind, self.groups)

    @property
    def norm(self) -> nn.Module | None:
        """The batch norm that will be folded into the layer."""
        return self._norm[0] if self._norm else None

    def lowest(self) -> Tensor | None:
        """The lowest integer by output channel; None where it is the same for all."""
        gamma = None if self.norm is None else self.norm.weight
        if not isinstance(gamma, Tensor):
            return None
        return integer_range(self.bits)[0] + (gamma.detach() < 0)

    def scales(self, weight: Tensor) -> Tensor:
        """The scales: one, one per output channel, or one per gate."""
        return self._legal_scale().detach().clone() if self.learned else self._measured(weight)

    def integers(self, weight: Tensor) -> Tensor:
        """The integers of the weight as rows; float32 numbers."""
        rows = self.rows(weight).float()
        scale = self.scales(weight).reshape(-1)
        step = scale.repeat_interleave(rows.shape[0] // scale.numel()).reshape(-1, 1)
        lowest, highest = integer_range(self.bits)
        limits = self.lowest()
        low = torch.full((rows.shape[0], 1), lowest) if limits is None else limits.reshape(-1, 1)
        steps = (rows * step.reciprocal()).round_()
        return steps.clamp_(min=low.to(steps)).clamp_(max=highest)

    @torch.no_grad()
    def restart(self, weight: Tensor, scale: Tensor | None = None) -> None:
        """Let a learned scale start anew, from another weight or with given values."""
        if self.learned:
            found = self._measured(weight) if scale is None else scale
            self.scale.copy_(found)
            self.valid_scale.copy_(found)

    def _measured(self, weight: Tensor) -> Tensor:
        rows = self.rows(weight)
        count = scale_count(rows.shape[0], self.kind, self.groups, channel_wise=self.channel_wise)
        return arq_scale(rows, self.bits, count)

    def _legal_scale(self) -> Tensor:
        """The scales, with those that the last step of an optimizer made illegal replaced by the last legal ones."""
        return valid_scale(self.scale, self.valid_scale)

    @torch.no_grad()
    def _keep_legal(self) -> None:
        """Write legal scales back, for the optimizer to go on from."""
        legal = self._legal_scale()
        self.scale.copy_(legal)
        self.valid_scale.copy_(legal)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *arguments: Any) -> None:  # noqa: ANN401  torch's protocol
        if any(key.startswith(prefix) for key in state_dict):
            own = {f"{prefix}{BITS}": self.get_buffer(BITS)}
            super()._load_from_state_dict({**state_dict, **own}, prefix, *arguments)


def is_recomputing() -> bool:
    """Whether a backward pass runs this forward again (gradient checkpointing): its batch was observed before."""
    return bool(torch._C._current_graph_task_id() != -1)


def mean_over_ranks(value: Tensor) -> Tensor:
    """The mean over all processes of distributed training, so that every process starts with the same clips."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return value
    total = value.clone()
    torch.distributed.all_reduce(total)
    return total / torch.distributed.get_world_size()
