"""Where a save goes: folder and prefix from ``dir/prefix``, and the one line that tells of files it replaces."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from amct.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from collections.abc import Iterable

logger = logging.getLogger(__name__)

LONGEST_PREFIX = 241
_NAMES_SHOWN = 3


@dataclass(frozen=True)
class SavePath:
    """A folder and a prefix, from ``dir/prefix``."""

    folder: Path
    prefix: str

    @classmethod
    def parse(cls, save_path: str | os.PathLike[str]) -> SavePath:
        """Read ``dir/prefix``; a trailing "/" or "" means no prefix.

        Raises:
            ArgumentTypeError: it is not a string or path.
            ArgumentError: the prefix is too long or not a file name.
        """
        if not isinstance(save_path, str | os.PathLike):
            raise ArgumentTypeError(f"save_path: expected text or a path, got {type(save_path).__name__}")
        text = os.fspath(save_path)
        folder, prefix = os.path.split(text)
        if prefix in (".", "..") or "\0" in text:
            raise ArgumentError(
                f'save_path: expected "folder/prefix", got "{text}"; end it with "/" to mean the folder'
            )
        if len(prefix) > LONGEST_PREFIX:
            raise ArgumentError(
                f"save_path: the prefix may have {LONGEST_PREFIX} characters, got {len(prefix)}: choose a shorter one"
            )
        return cls(Path(folder), prefix)

    def file(self, name: str) -> Path:
        """``<prefix>_<name>`` in the folder, or just ``<name>``."""
        return self.folder / (f"{self.prefix}_{name}" if self.prefix else name)

    @property
    def quant_json(self) -> Path:
        """The path of quant.json, the report on layers and files."""
        from amct.model.quant_json import QUANT_JSON  # needs pydantic, which a wrong argument should not wait for

        return self.file(QUANT_JSON)


def warn_of_replaced(paths: Iterable[Path]) -> None:
    """Log one line that names the first few of the files that exist already."""
    existing = [path for path in paths if path.exists()]
    if not existing:
        return
    names = ", ".join(path.name for path in existing[:_NAMES_SHOWN])
    more = f" and {len(existing) - _NAMES_SHOWN} more" if len(existing) > _NAMES_SHOWN else ""
    verb = "exists and is replaced" if len(existing) == 1 else "exist and are replaced"
    logger.warning("%s: %s%s %s", existing[0].parent, names, more, verb)
