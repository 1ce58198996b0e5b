"""A refusal with its reason: what was not done, to which layer, and why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Skip:
    """A layer that was left as it is, and the reason in a sentence a user can act on."""

    layer: str
    reason: str

    def __str__(self) -> str:
        return f'"{self.layer}": {self.reason}'
