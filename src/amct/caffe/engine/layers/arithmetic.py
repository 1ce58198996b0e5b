"""Power, Exp and Log: element-wise functions of shift + scale * x."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from amct.caffe.engine.layers.activations import Elementwise
from amct.caffe.engine.registry import register

if TYPE_CHECKING:
    from amct.caffe.engine.blob import Shape

NATURAL = -1.0


@register("Power")
class Power(Elementwise):
    """y = (shift + scale * x) ^ power; a constant if power or scale is 0."""

    def setup(self, bottoms: list[Shape]) -> None:
        """Read the options."""
        options = self.parameter.power_param
        self.power, self.scale, self.shift = options.power, options.scale, options.shift

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """Powers 1 and 2 are computed by multiplication, which is exact for a zero or negative base."""
        if self.power == 0 or self.scale == 0:
            value = 1.0 if self.power == 0 else _power(self.shift, self.power)
            return bottom.detach() * 0 + value if bottom.isnan().any() else torch.full_like(bottom, value)
        base = bottom if (self.scale, self.shift) == (1.0, 0.0) else bottom * self.scale + self.shift
        if self.power == 1:
            return base.clone() if base is bottom else base
        return base * base if self.power == 2 else base.pow(self.power)

    def channel_affine(self) -> tuple[torch.Tensor | None, torch.Tensor | None] | None:
        """(scale, shift) if power is 1."""
        if self.power != 1:
            return None
        return torch.tensor([self.scale], dtype=torch.float64), torch.tensor([self.shift], dtype=torch.float64)


def _power(base: float, power: float) -> float:
    return float(torch.tensor(base).pow(power))


@register("Exp")
class Exp(Elementwise):
    """y = base ^ (shift + scale * x); base -1 means e."""

    def setup(self, bottoms: list[Shape]) -> None:
        """Read the options."""
        options = self.parameter.exp_param
        if options.base != NATURAL and options.base <= 0:
            raise self.error(f"base must be strictly positive (or -1 for e), got {options.base}")
        log_base = 1.0 if options.base == NATURAL else math.log(options.base)
        self.inner = log_base * options.scale
        self.outer = math.exp(log_base * options.shift)

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """exp(log(base) * scale * x) * base ^ shift."""
        result = torch.exp(bottom if self.inner == 1 else bottom * self.inner)
        return result if self.outer == 1 else result * self.outer


@register("Log")
class Log(Elementwise):
    """y = log_base(shift + scale * x); base -1 means e."""

    def setup(self, bottoms: list[Shape]) -> None:
        """Read the options."""
        options = self.options = self.parameter.log_param
        if options.base != NATURAL and (options.base <= 0 or options.base == 1):
            raise self.error(f"base must be strictly positive and not 1 (or -1 for e), got {options.base}")
        self.factor = 1.0 if options.base == NATURAL else 1.0 / math.log(options.base)

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """log(shift + scale * x) / log(base)."""
        options = self.options
        inner = bottom if (options.scale, options.shift) == (1.0, 0.0) else bottom * options.scale + options.shift
        result = torch.log(inner)
        return result if self.factor == 1 else result * self.factor
