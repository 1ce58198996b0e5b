"""Commands in several processes, as ``torchrun -m amct …`` starts them: they join, and only the first one prints."""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from amct.calibration import Ranks

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # as torchrun sets them


def is_alone() -> bool:
    """Return whether no other process of torchrun runs this command."""
    return not all(os.environ.get(name) for name in _VARIABLES) or os.environ["WORLD_SIZE"] == "1"


def rank_prefix() -> str:
    """Return what stands before an error of this process, to tell it from those of others; empty in the first one."""
    return "" if is_alone() or os.environ["RANK"] == "0" else f"rank {os.environ['RANK']}: "


def ranks_here() -> Ranks:
    """Return the processes that run this command together."""
    from amct.calibration import all_ranks

    return all_ranks()


@contextmanager
def processes() -> Iterator[bool]:
    """Join the processes that torchrun has started, for the duration of the context.

    Yields:
        Whether this process prints: the only one, or that of rank 0. The others are silent inside.
    """
    if is_alone():
        yield True
        return
    from amct.calibration.ranks import joined_by_torchrun

    with ExitStack() as stack:
        is_first = stack.enter_context(joined_by_torchrun()).is_first
        if not is_first:
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123  a device, not a file
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
        yield is_first
