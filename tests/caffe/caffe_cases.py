"""The recorded cases: where they are and what is in them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent.parent / "golden" / "caffe"


@dataclass(frozen=True)
class Case:
    part: str
    name: str

    @property
    def stem(self) -> Path:
        return FOLDER / self.part / self.name

    def has(self, prefix: str) -> bool:
        return any(key.startswith(prefix) for key in np.load(self.stem.with_suffix(".npz")).files)

    def __str__(self) -> str:
        return self.name


def cases(part: str) -> list[Case]:
    return [Case(part, path.stem) for path in sorted((FOLDER / part).glob("*.npz"))]


LAYER_CASES = cases("layers")
NET_CASES = cases("nets")
