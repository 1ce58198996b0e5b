"""The progress bar of a calibration session."""

from __future__ import annotations

from contextlib import ExitStack
from weakref import finalize

from amct import progress


class ProgressBar:
    """The progress bar of a session: shown from the first batch on, removed after the last one."""

    def __init__(self, total: int | None, *, shown: bool) -> None:
        self._total = total
        self._is_shown = shown
        self._moved_to = 0
        self._stack = ExitStack()
        self._advance: progress.Advance | None = None
        # restores the cursor of the terminal if the loop is aborted
        self._cleanup = finalize(self, self._stack.close)

    def start_at(self, done: int) -> None:
        """Tell what was done before; the rate does not count it."""
        self._moved_to = done

    def move_to(self, done: int) -> None:
        """Show that so much is done."""
        if not self._is_shown:
            return
        if self._advance is None:
            shown = progress.bar("Calibrating", self._total, unit="batches", done=self._moved_to)
            self._advance = self._stack.enter_context(shown)
        if done > self._moved_to:
            self._advance(done - self._moved_to)
            self._moved_to = done

    def close(self) -> None:
        """Remove the bar."""
        self._cleanup()
