"""Fingerprints of what a calibration depends on, to tell whether a kept state belongs to it: SHA-256 of the content."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable


def fingerprint(parts: Iterable[object]) -> str:
    """The fingerprint of texts, bytes, arrays and tensors in their order; of anything else its type alone counts."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, (Tensor, np.ndarray)):
            digest.update(repr((tuple(part.shape), str(part.dtype))).encode())
            digest.update(_content(part))
            continue
        content = part if isinstance(part, bytes) else str(part if isinstance(part, str) else type(part)).encode()
        digest.update(b"%d:" % len(content) + content)
    return digest.hexdigest()


def _content(values: Tensor | np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> memoryview:
    if isinstance(values, Tensor):
        flat = values.detach().cpu().contiguous().reshape(-1)
        return flat.view(torch.uint8).numpy().data  # every type, also those that NumPy does not have
    if values.dtype.hasobject:  # texts
        return memoryview(repr(values.tolist()).encode())
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
