"""The ``amct`` command; its subcommands only call the other packages.

No module here imports torch at the top, so that ``amct --help`` is fast; a command imports what it needs when it runs.
"""

from __future__ import annotations

import gc
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from amct import interrupts
from amct.errors import AmctError
from amct.printable import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

USER_CODE_ERROR = 1
USAGE_OR_INPUT_ERROR = 2
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (default: ``sys.argv``).

    Returns:
        The exit code: 0 success, 1 an exception in the user's own code, 2 bad input, 3 a verdict that
        ``--fail-on`` does not accept, 130 interrupted.
    """
    from amct.cli.app import app
    from amct.cli.processes import rank_prefix

    try:
        with interrupts.remembered(), _collecting_seldom():
            result = app(args=None if arguments is None else list(arguments), prog_name="amct", standalone_mode=False)
    except AmctError as error:
        sys.stderr.write(f"{rank_prefix()}error: {printable(str(error))}\n")
        return USAGE_OR_INPUT_ERROR
    except KeyboardInterrupt:
        return _interrupted()
    except Exception as error:  # noqa: BLE001  of the user's code; all others are raised again
        if type(error).__name__ == "Abort":  # older releases of typer raise this on Ctrl-C
            return _interrupted()
        if _is_usage_error(error):
            return _show_usage_error(error)
        return _show_error_of_user_code(error)
    if result == INTERRUPTED:  # newer releases of typer return it
        return _interrupted()
    return result if isinstance(result, int) else 0


@contextmanager
def _collecting_seldom() -> Iterator[None]:
    """A context in which Python searches for unreachable objects after ten times as many new ones as elsewhere.

    Imports and captures make a million objects that stay: the searches would take a twentieth of a short command, whose
    process is its own.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(10 * thresholds[0], *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def _interrupted() -> int:
    sys.stderr.write("interrupted: nothing was left half-written\n")
    return INTERRUPTED


def _is_usage_error(error: Exception) -> bool:
    """Return whether an error is a usage error of click, which typer uses as a dependency or vendored."""
    return hasattr(error, "format_message") and hasattr(error, "exit_code")


def _show_usage_error(error: Exception) -> int:
    context = getattr(error, "ctx", None)
    hint = f" (see {context.command_path} --help)" if context is not None else ""
    sys.stderr.write(f"error: {printable(error.format_message())}{hint}\n")  # type: ignore[attr-defined]  # checked by the caller
    return USAGE_OR_INPUT_ERROR


def _show_error_of_user_code(error: Exception) -> int:
    """Show the user's own line in which an error was raised; an error of other code is raised again."""
    place = _place_in_user_code(error)
    if place is None:
        raise error
    sys.stderr.write(printable(f"error: {type(error).__name__}: {error}\n  {place}\n"))
    return USER_CODE_ERROR


def _place_in_user_code(error: Exception) -> str | None:
    """File, line, function and source of the last frame in the user's files (a model's factory, its forward, …)."""
    import traceback

    if isinstance(error, SyntaxError) and error.filename is not None and _is_users(error.filename):
        return _place(error.filename, error.lineno, None, error.text)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_users(frame.filename):
            return _place(frame.filename, frame.lineno, frame.name, frame.line)
    return None


def _place(file: str, line: int | None, function: str | None, source: str | None) -> str:
    inside = f", in {function}" if function else ""
    return f"{file}:{line}{inside}" + (f"\n    {source.strip()}" if source else "")


def _is_users(file: str) -> bool:
    """Whether a file is neither ours, nor installed, nor made at run time such as ``<string>``."""
    import sysconfig

    installed = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders = (Path(__file__).parent.parent, *installed)
    return Path(file).is_file() and not any(Path(file).is_relative_to(folder) for folder in folders)
