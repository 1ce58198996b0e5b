"""The passes over the calibration data: each process reads its share, and an interrupted pass goes on."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from amct.calibration.ranks import ALONE
from amct.interrupts import raise_if_interrupted

if TYPE_CHECKING:
    from amct.calibration import Ranks
    from amct.pipeline.batches import Batches, KeptBatches
    from amct.pipeline.interim import Interim, ObservingSession

BALANCE, CALIBRATION = "balance", "calibration"


class Passes:
    """Starts passes over some data.

    Args:
        batches: The data.
        limit: The batches of a pass, of all processes together; None: all there are.
        ranks: The processes that calibrate together.
        interim: Keeps what is observed, to go on after an interruption; None: nothing is kept.
    """

    def __init__(self, batches: Batches, limit: int | None, ranks: Ranks, interim: Interim | None = None) -> None:
        self._batches = batches
        self._limit = limit
        self._ranks = ranks
        self._interim = interim

    def all(self) -> Iterator[Any]:
        """A pass over all batches, in every process."""
        return self._batches.limited(self._limit, ALONE)

    def observed(self, what: str, session: ObservingSession, kept: KeptBatches | None = None) -> Iterator[Any]:
        """A pass over the share of this process that a session observes, from where an interrupted one was.

        Each batch must have been observed when the next one is asked for.

        Args:
            what: The name of the pass.
            session: Its session, which has observed nothing yet.
            kept: Is shown the batches from the first one on.
        """
        interim = self._interim
        if interim is not None and session.without_state:
            interim.leave_out(what, f"{session.without_state}: its observer has no state that can be kept")
            interim = None
        total = self._batches.length if self._limit is None else self._limit
        share = None if total is None else self._ranks.share(total)
        done = 0 if interim is None else interim.restore(what, session, share)
        batches = self._from(done, kept)
        if kept is not None:
            batches = kept.passing(batches)
        return batches if interim is None else _Noted(batches, interim, what, session, done)

    def _from(self, done: int, kept: KeptBatches | None) -> Iterator[Any]:
        """The batches behind the first ``done``; of those, ``kept`` needs to see the very first."""
        if self._batches.is_read_once:
            stream = self._batches.limited(self._limit, self._ranks)
            for batch in islice(stream, done):
                if kept is not None:
                    kept.notice(batch)
            return stream
        if kept is not None and done:
            for batch in islice(self._batches.limited(self._limit, self._ranks), done):
                kept.notice(batch)
                if kept.is_full:
                    break
            self._batches.close()
        return self._batches.limited(self._limit, self._ranks, skip=done)


class _Noted(Iterator[Any]):
    """Batches of a pass; when the next one is asked for, the state of its session may be written."""

    def __init__(
        self, batches: Iterator[Any], interim: Interim, what: str, session: ObservingSession, done: int
    ) -> None:
        self._batches = batches
        self._interim = interim
        self._what = what
        self._session = session
        self._done = done

    def __next__(self) -> Any:  # noqa: ANN401  the door's arguments
        raise_if_interrupted()
        self._interim.note(self._what, self._session, self._done)
        try:
            batch = next(self._batches)
        except StopIteration:
            self._interim.finish(self._what, self._session, self._done)
            raise
        self._done += 1
        return batch
