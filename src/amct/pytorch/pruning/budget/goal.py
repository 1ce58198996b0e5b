"""What a pruned model may cost: operations, parameters, or measured time in onnxruntime."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from amct.errors import ArgumentError
from amct.pytorch.pruning.removal import Cost, RemovalCosts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from amct.pytorch.pruning.budget.allocation import Costs
    from amct.pytorch.pruning.channels import ChannelMap
    from amct.pytorch.pruning.selection import ChannelCell

FLOPS, PARAMS, LATENCY = "flops", "params", "latency"
_NOUNS = {FLOPS: "MACs", PARAMS: "parameters", LATENCY: "time"}


@dataclass(frozen=True, kw_only=True)
class Budget:
    """One number to be reached.

    Attributes:
        kind: What is counted.
        share: Of the whole model's, what may be left.
    """

    kind: str
    share: float

    @classmethod
    def of(cls, given: Mapping[str, float | None]) -> Budget:
        """The only budget among those that a user gave.

        Raises:
            ArgumentError: There is none or more than one, or it is no number between 0 and 1.
        """
        found = {kind: share for kind, share in given.items() if share is not None}
        if len(found) != 1:
            names = " and ".join(found) or "none"
            raise ArgumentError(f"expected one budget of {', '.join(given)}, got {names}")
        kind, share = next(iter(found.items()))
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share < 1:
            raise ArgumentError(f"{kind}: expected a number between 0 and 1, the share that is left, got {share!r}")
        return cls(kind=kind, share=float(share))

    @property
    def noun(self) -> str:
        """What is counted, for messages."""
        return _NOUNS[self.kind]

    def __str__(self) -> str:
        return f"{self.kind} {self.share:g}"

    def counted(self, cost: Cost) -> int:
        """The number that counts of a whole cost."""
        return cost.parameters if self.kind == PARAMS else cost.macs

    def costs(self, channel_map: ChannelMap, cells: Sequence[ChannelCell]) -> Costs:
        """The costs of choices; of time the work of kernels, in blocks of channels."""
        counter = RemovalCosts(channel_map, [cell.roots for cell in cells])
        function = {FLOPS: counter.macs, PARAMS: counter.parameters, LATENCY: counter.work}[self.kind]
        sizes = np.array([len(cell.roots) for cell in cells], np.float64)

        def costs(counts: NDArray[np.int64]) -> NDArray[np.float64]:
            return function((counts / sizes).T)

        return costs
