"""A toy activation algorithm as another package would define it: the range is mean ± k times the standard deviation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field

from amct.extend import ActivationFactors


@dataclass(frozen=True, kw_only=True)
class ToySettings:
    """What ``toy_quantize { ... }`` can set."""

    num_bits: int = 8
    asymmetric: bool = True
    k: Annotated[float, Field(gt=0, le=100)] = 3.0
    mode: Literal["std", "max"] = "std"
    limits: tuple[float, float] = (-1e6, 1e6)


class ToyObserver:
    """Sums up values and squares."""

    def __init__(self, settings, channel_axis, symmetric_scale):
        assert channel_axis is None
        self.settings, self.symmetric_scale = settings, symmetric_scale
        self.batches = self.count = self.sum = self.squares = self.largest = 0

    def observe(self, x):
        x = x.double()
        self.batches += 1
        self.count += x.numel()
        self.sum += float(x.sum())
        self.squares += float((x * x).sum())
        self.largest = max(self.largest, float(x.abs().max()))

    def merge(self, other):
        for name in ("batches", "count", "sum", "squares"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.largest = max(self.largest, other.largest)

    def result(self):
        settings, mean = self.settings, self.sum / self.count
        width = settings.k * (self.squares / self.count - mean**2) ** 0.5
        low, high = (mean - width, mean + width) if settings.mode == "std" else (-self.largest, self.largest)
        low, high = max(low, settings.limits[0]), min(high, settings.limits[1])
        return ActivationFactors.from_range(
            torch.tensor(low),
            torch.tensor(high),
            settings.num_bits,
            asymmetric=settings.asymmetric,
            symmetric_scale=self.symmetric_scale,
        )


TOY = {"name": "toy", "settings": ToySettings, "observer": ToyObserver}
