"""The device on which nets run.

A process-wide setting (``set_mode_cpu``, ``set_mode_gpu``, ``set_device``) in a context variable.
"""

from __future__ import annotations

import logging
from contextvars import ContextVar

import torch

from amct.errors import ArgumentError

logger = logging.getLogger(__name__)


_CPU = torch.device("cpu")
_device: ContextVar[torch.device] = ContextVar("amct_caffe_device", default=_CPU)
_index: ContextVar[int] = ContextVar("amct_caffe_device_index", default=0)


def set_mode_cpu() -> None:
    """Run nets on the CPU."""
    _device.set(_CPU)


def set_mode_gpu() -> None:
    """Run nets on a CUDA device; if there is none, log a warning and stay on the CPU."""
    if torch.cuda.is_available():
        _device.set(torch.device("cuda", _index.get()))
    else:
        logger.warning("set_mode_gpu: this machine has no usable CUDA device, nets keep running on the CPU")
        _device.set(_CPU)


def set_device(index: int) -> None:
    """Choose which CUDA device GPU mode uses.

    Raises:
        ArgumentError: There is no such device.
    """
    count = torch.cuda.device_count()
    if index < 0 or (count and index >= count):
        raise ArgumentError(f"set_device: this machine has {count} CUDA device(s), got index {index}")
    _index.set(index)
    if _device.get().type == "cuda":
        _device.set(torch.device("cuda", index))


def current_device() -> torch.device:
    """The torch device on which nets run."""
    return _device.get()
