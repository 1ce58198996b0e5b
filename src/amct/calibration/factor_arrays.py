"""Quantization factors as arrays, to send them to another process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from amct.numerics.observer import ActivationFactors

if TYPE_CHECKING:
    from amct.calibration.ranks import Arrays

_TENSORS = ("scale", "offset", "clip_min", "clip_max", "near_zero")
_OPTIONAL = ("balance", "mean")


def factors_as_arrays(factors: ActivationFactors) -> Arrays:
    """The arrays of some factors; those that they do not have are left out."""
    arrays: Arrays = {name: getattr(factors, name).detach().cpu().numpy() for name in _TENSORS}
    for name in _OPTIONAL:
        tensor = getattr(factors, name)
        if tensor is not None:
            arrays[name] = tensor.detach().cpu().numpy()
    arrays["bits"] = np.array(factors.bits, np.int64)
    return arrays


def factors_from_arrays(arrays: Arrays) -> ActivationFactors:
    """The factors that were turned into arrays."""
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items() if name in (*_TENSORS, *_OPTIONAL)}
    return ActivationFactors(bits=int(arrays["bits"]), **tensors)
