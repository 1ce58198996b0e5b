"""Caffe's fillers, which initialize parameters.

A blob is filled on first read, so that loading weights from a file costs no random numbers.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from amct.errors import ModelError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable

    from amct.caffe.engine.blob import Blob, Shape
    from amct.caffe.engine.messages import ProtoMessage


FAN_IN, FAN_OUT = 0, 1
BILINEAR_AXES = 4


def lazy_fill(blob: Blob, filler: ProtoMessage | None, owner: str, default: float = 0.0) -> None:
    """Fill ``blob`` on its first read.

    The seed is drawn from torch's generator now, so that the values do not depend on the order of reads.

    Raises:
        ModelError: The filler's type is unknown, or it does not fit the shape.
    """
    shape = blob.shape
    if filler is None or filler.type == "constant":
        value = default if filler is None else filler.value
        if value != 0.0:
            blob.values.initialize_by(lambda: torch.full(shape, value))
        return
    fill = filler_function(filler, shape, owner)
    seed = int(torch.randint(2**62, ()).item())
    blob.values.initialize_by(lambda: fill(torch.Generator().manual_seed(seed)))


def filler_function(filler: ProtoMessage, shape: Shape, owner: str) -> Callable[[torch.Generator], torch.Tensor]:
    """The function that creates a filled tensor of ``shape`` from a random generator.

    Raises:
        ModelError: The filler's type is unknown, or it does not fit the shape.
    """
    make = _FILLERS.get(filler.type)
    if make is None:
        raise ModelError(
            f'layer "{owner}": Unknown filler name: "{filler.type}".{did_you_mean(filler.type, _FILLERS)}'
            f" Known: {', '.join(sorted(_FILLERS))}"
        )
    if filler.sparse != -1 and filler.type != "gaussian":
        raise ModelError(f'layer "{owner}": sparsity is only supported by the gaussian filler, not by "{filler.type}"')
    if filler.type == "uniform" and filler.min > filler.max:
        raise ModelError(f'layer "{owner}": uniform filler: min {filler.min} must not be above max {filler.max}')
    if filler.type == "bilinear":
        _check_bilinear(shape, owner)
    return lambda generator: make(filler, shape, generator)


def _constant(filler: ProtoMessage, shape: Shape, _: torch.Generator) -> torch.Tensor:
    return torch.full(shape, filler.value)


def _uniform(filler: ProtoMessage, shape: Shape, generator: torch.Generator) -> torch.Tensor:
    return torch.empty(shape).uniform_(filler.min, filler.max, generator=generator)


def _gaussian(filler: ProtoMessage, shape: Shape, generator: torch.Generator) -> torch.Tensor:
    values = torch.empty(shape).normal_(filler.mean, filler.std, generator=generator)
    if filler.sparse >= 0 and shape:
        kept = filler.sparse / shape[0]
        values *= torch.bernoulli(torch.full(shape, min(kept, 1.0)), generator=generator)
    return values


def _positive_unitball(_: ProtoMessage, shape: Shape, generator: torch.Generator) -> torch.Tensor:
    values = torch.empty(shape).uniform_(0, 1, generator=generator)
    rows = values.view(shape[0], -1)
    rows /= rows.sum(1, keepdim=True)
    return values


def _fan(filler: ProtoMessage, shape: Shape) -> float:
    total = math.prod(shape)
    fan_in = total / shape[0] if shape and shape[0] else 1.0
    fan_out = total / shape[1] if len(shape) > 1 and shape[1] else float(total)
    if filler.variance_norm == FAN_IN:
        return fan_in
    return fan_out if filler.variance_norm == FAN_OUT else (fan_in + fan_out) / 2


def _xavier(filler: ProtoMessage, shape: Shape, generator: torch.Generator) -> torch.Tensor:
    limit = math.sqrt(3.0 / _fan(filler, shape))
    return torch.empty(shape).uniform_(-limit, limit, generator=generator)


def _msra(filler: ProtoMessage, shape: Shape, generator: torch.Generator) -> torch.Tensor:
    return torch.empty(shape).normal_(0.0, math.sqrt(2.0 / _fan(filler, shape)), generator=generator)


def _check_bilinear(shape: Shape, owner: str) -> None:
    if len(shape) != BILINEAR_AXES or shape[2] != shape[3]:
        raise ModelError(
            f'layer "{owner}": the bilinear filler needs a blob of 4 axes with square kernels, got {shape}'
        )


def _bilinear(_filler: ProtoMessage, shape: Shape, _: torch.Generator) -> torch.Tensor:
    size = shape[3]
    factor = math.ceil(size / 2)
    centre = (size - 1) / (2.0 * factor)
    line = 1 - (torch.arange(size) / factor - centre).abs()
    return (line[:, None] * line[None, :]).expand(shape).contiguous()


_FILLERS = {
    "constant": _constant,
    "uniform": _uniform,
    "gaussian": _gaussian,
    "positive_unitball": _positive_unitball,
    "xavier": _xavier,
    "msra": _msra,
    "bilinear": _bilinear,
}
