"""Chooses the device of a command: the user's choice, else that of the solver prototxt."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from amct.caffe.engine.device import set_device, set_mode_cpu, set_mode_gpu

if TYPE_CHECKING:
    from amct.caffe.engine.messages import ProtoMessage

_GPU = 1


def choose_device(*, gpu: bool, device: int | None, parameter: ProtoMessage | None = None) -> None:
    """Set CPU or GPU mode.

    A missing ``solver_mode`` means GPU in Caffe; here it means a GPU if there is one, without a warning otherwise.

    Args:
        gpu: The user requests a GPU.
        device: The user requests this device.
        parameter: The solver, if there is one.

    Raises:
        ArgumentError: There is no such device.
    """
    asked = gpu or device is not None
    by_solver = parameter is not None and parameter.solver_mode == _GPU
    if by_solver and parameter is not None and not parameter.HasField("solver_mode"):
        by_solver = torch.cuda.is_available()
    if not asked and not by_solver:
        set_mode_cpu()
        return
    if device is None:
        device = 0 if parameter is None else parameter.device_id
    set_device(device)
    set_mode_gpu()
