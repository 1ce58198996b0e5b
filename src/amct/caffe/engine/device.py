"""Where nets run.

The one process-wide setting (``set_mode_cpu``, ``set_mode_gpu``, ``set_device``), held in a context variable.
"""

from __future__ import annotations

import logging
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch

from amct.errors import ArgumentError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class DeviceMode:
    """What the caller asked for."""

    gpu: bool = False
    index: int = 0


_CPU = DeviceMode()
_mode: ContextVar[DeviceMode] = ContextVar("amct_caffe_device_mode", default=_CPU)


def set_mode_cpu() -> None:
    """Run nets on the CPU from now on."""
    _mode.set(replace(_mode.get(), gpu=False))


def set_mode_gpu() -> None:
    """Run nets on a CUDA device from now on; where there is none, say so and stay on the CPU."""
    if not torch.cuda.is_available():
        logger.warning("set_mode_gpu: this machine has no usable CUDA device, nets keep running on the CPU")
    _mode.set(replace(_mode.get(), gpu=True))


def set_device(index: int) -> None:
    """Choose which CUDA device GPU mode uses.

    Raises:
        ArgumentError: There is no such device.
    """
    count = torch.cuda.device_count()
    if index < 0 or (count and index >= count):
        raise ArgumentError(f"set_device: this machine has {count} CUDA device(s), got index {index}")
    _mode.set(replace(_mode.get(), index=index))


def current_device() -> torch.device:
    """The torch device nets run on now."""
    mode = _mode.get()
    if mode.gpu and torch.cuda.is_available():
        return torch.device("cuda", mode.index)
    return torch.device("cpu")
