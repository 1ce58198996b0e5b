"""The result of pruning to a budget: the pruned model, the ladder that led to it, and a config for AMCT's functions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from amct.pytorch.pruning.pruned_model import PrunedModel
from amct.report.pruning import count_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from amct.pytorch.pruning.removal import Cost
    from amct.pytorch.pruning.saving import FloatFiles

CONFIG_FILE = "prune.cfg"
_WIDTH = 30


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One step of the ladder.

    Attributes:
        share: What is left of what the budget counts, as a share of the whole model's.
        lost: What is lost without training: by how much the loss grows, or the share of the output's power that
            changes.
        cost: Parameters and MACs.
        channels: The output channels that are left of every layer that makes some.
    """

    share: float
    lost: float
    cost: Cost
    channels: Mapping[str, int]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class BudgetedModel(PrunedModel):
    """A model that was pruned to a budget.

    Attributes:
        budget: What was asked for, such as "flops 0.5".
        ladder: The best choices from the whole model down to the budget; the last one is this model.
        cfg: A simple config for ``create_prune_retrain_model`` that gives the same numbers of channels, as far as AMCT
            prunes.
        measured: How many cut models were run.
    """

    budget: str
    ladder: tuple[Rung, ...]
    cfg: str
    measured: int

    def ladder_text(self) -> str:
        """The ladder as text: a bar as long as what is lost."""
        most = max((rung.lost for rung in self.ladder), default=0.0) or 1.0
        lines = [f"{self.budget.split()[0]:>8}  {'MACs':>8}  {'parameters':>10}  lost without training"]
        for rung in self.ladder:
            bar = "█" * round(_WIDTH * max(rung.lost, 0.0) / most)
            macs, parameters = count_text(rung.cost.macs), count_text(rung.cost.parameters)
            lines.append(f"{100 * rung.share:6.1f} %  {macs:>8}  {parameters:>10}  {rung.lost:<9.4f} {bar}".rstrip())
        return "\n".join(lines)

    def _more_lines(self) -> list[str]:
        return [f"  ladder to {self.budget}:", *(f"    {line}" for line in self.ladder_text().splitlines())]

    def _files(self) -> FloatFiles:
        files = super()._files()
        return replace(files, others={**files.others, CONFIG_FILE: self.cfg.encode()})
