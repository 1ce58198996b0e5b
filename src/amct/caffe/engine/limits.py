"""The largest allowed size of a blob: a wrong number in a prototxt gives an error instead of using all memory."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

from amct.caffe.engine.blob import MAX_ELEMENTS
from amct.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable

    from amct.caffe.engine.blob import Shape

#: Environment variable that raises the limit, in bytes.
LIMIT_VARIABLE = "AMCT_CAFFE_MAX_BLOB_BYTES"
DEFAULT_LIMIT = 2 * 2**30
_BYTES_PER_VALUE = 4


def size_check() -> Callable[[Shape, str], None]:
    """Return a function that rejects shapes above the limit: ``check(shape, 'blob "conv1"')`` raises ModelError."""
    limit = _limit()

    def check(shape: Shape, what: str) -> None:
        if any(size < 0 for size in shape):
            raise ModelError(
                f"{what} would have shape {shape}: a size cannot be negative. Is a kernel larger than its input?"
            )
        count = math.prod(shape)
        if count > MAX_ELEMENTS:
            raise ModelError(f"{what} would have shape {shape}: blob size exceeds INT_MAX ({MAX_ELEMENTS} values)")
        if count * _BYTES_PER_VALUE > limit:
            raise ModelError(
                f"{what} would have shape {shape}, {count * _BYTES_PER_VALUE / 2**30:.1f} GiB; the limit is "
                f"{limit / 2**30:.1f} GiB. If this size is intended, set {LIMIT_VARIABLE} to a larger number of bytes."
            )

    return check


def _limit() -> int:
    text = os.environ.get(LIMIT_VARIABLE, "")
    if not text:
        return DEFAULT_LIMIT
    if not text.isdigit() or int(text) == 0:
        raise ModelError(f"{LIMIT_VARIABLE} must be a number of bytes, got {text!r}")
    return int(text)
