"""The ``amct`` command: thin; every sub-command is a call into the packages below.

Nothing here imports torch, so that ``amct --help`` answers at once; a command imports what it needs when it runs.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from amct.errors import AmctError

if TYPE_CHECKING:
    from collections.abc import Sequence

USAGE_OR_INPUT_ERROR = 2
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 done, 2 wrong input, 130 interrupted."""
    from amct.cli.app import app

    try:
        result = app(args=None if arguments is None else list(arguments), prog_name="amct", standalone_mode=False)
    except AmctError as error:
        sys.stderr.write(f"error: {error}\n")
        return USAGE_OR_INPUT_ERROR
    except KeyboardInterrupt:
        return _interrupted()
    except Exception as error:
        if type(error).__name__ == "Abort":  # what older releases of typer make of Ctrl-C
            return _interrupted()
        if not _is_usage_error(error):
            raise
        return _show_usage_error(error)
    if result == INTERRUPTED:  # what newer ones make of it
        return _interrupted()
    return result if isinstance(result, int) else 0


def _interrupted() -> int:
    sys.stderr.write("interrupted: nothing was left half-written\n")
    return INTERRUPTED


def _is_usage_error(error: Exception) -> bool:
    """Whether typer's (vendored or separate) click raised this about the command line itself."""
    return hasattr(error, "format_message") and hasattr(error, "exit_code")


def _show_usage_error(error: Exception) -> int:
    context = getattr(error, "ctx", None)
    hint = f" (see {context.command_path} --help)" if context is not None else ""
    sys.stderr.write(f"error: {error.format_message()}{hint}\n")  # type: ignore[attr-defined]  # checked by the caller
    return USAGE_OR_INPUT_ERROR
