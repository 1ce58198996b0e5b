"""Ctrl-C during training: finish the iteration, write a snapshot, stop; as Caffe's command line does."""

from __future__ import annotations

import logging
import signal
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import FrameType

logger = logging.getLogger(__name__)


class Action(Enum):
    """A request to a running solver."""

    NONE = "none"
    STOP = "stop"
    SNAPSHOT = "snapshot"


@contextmanager
def signal_actions(effects: Mapping[signal.Signals, Action]) -> Iterator[Callable[[], Action]]:
    """Convert signals to requests inside the block; yields the function for ``Solver.action_source``.

    A second stop signal is not caught and ends the program at once.
    """
    pending: list[Action] = []
    previous: dict[signal.Signals, object] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        kind = signal.Signals(number)
        action = effects[kind]
        pending.append(action)
        if action is Action.STOP:
            signal.signal(kind, previous[kind])  # type: ignore[arg-type]  # what signal.signal returned
            logger.info("%s: stopping after this iteration; send it again to stop at once", kind.name)

    def next_action() -> Action:
        return pending.pop(0) if pending else Action.NONE

    try:
        for kind, action in effects.items():
            if action is not Action.NONE:
                previous[kind] = signal.signal(kind, handle)
        yield next_action
    finally:
        for kind, handler in previous.items():
            signal.signal(kind, handler)  # type: ignore[arg-type]  # what signal.signal returned
