"""The ways in which an observer can remember its data, forced on little data."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from unittest import mock

LIMITS = {"values": (1 << 20, 4096), "counts": (0, 4096), "histogram": (0, 0), "one after the other": (60, 90)}
"""How many values are kept, and of how many different ones the counts."""

STORAGES = list(LIMITS)


@contextmanager
def storage(kind: str):
    values, different = LIMITS[kind]
    with ExitStack() as stack:
        stack.enter_context(mock.patch("amct.numerics.counts.samples.EXACT_LIMIT", values))
        stack.enter_context(mock.patch("amct.numerics.counts.samples.MAX_DISTINCT_VALUES", different))
        stack.enter_context(mock.patch("amct.numerics.ifmr.MAX_DISTINCT_VALUES", different))
        yield
