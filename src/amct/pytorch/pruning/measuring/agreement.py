"""Processes of ``torch.distributed`` that prune together: each measures on its own data, all use the mean.

Nobody waits forever: a process that fails, or does not prune at all, is named in the error of the others.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import distributed

from amct.calibration.ranks import Meeting, Purpose, all_ranks, fingerprint

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

    from amct.pytorch.layer_hooks import Arguments

_PRUNING = Purpose(
    name="pruning",
    other="prunes another model",
    duty="With torch.distributed every process must call prune, each with batches of its own",
    alone="prune",
)


class Agreement:
    """One measurement that all processes make."""

    def __init__(self, meeting: Meeting | None) -> None:
        """Create it; without a meeting this process is alone."""
        self._meeting = meeting

    def each(self, batches: Iterable[Arguments]) -> Iterator[Arguments]:
        """The batches; the other processes hear how far this one is."""
        for number, batch in enumerate(batches, 1):
            yield batch
            if self._meeting is not None:
                self._meeting.beat(f"measured batch {number}")

    def means(self, values: Iterable[Tensor]) -> list[Tensor]:
        """The mean over all processes of each tensor; to be called once.

        Raises:
            CalibrationError: Another process failed or does not come.
        """
        found = list(values)
        if self._meeting is None:
            return found
        self._meeting.enter()
        for number, value in enumerate(found):
            total = value.clone()
            distributed.all_reduce(total)
            found[number] = total / distributed.get_world_size()
        return found


@contextmanager
def agreement(what: Iterable[str]) -> Iterator[Agreement]:
    """The context of one measurement, with a name of what is measured; if it fails here, it fails in all processes."""
    ranks = all_ranks()
    if ranks.is_alone:
        yield Agreement(None)
        return
    meeting = Meeting(ranks, fingerprint(["prune", *what]), _PRUNING)
    with meeting.together():
        yield Agreement(meeting)
