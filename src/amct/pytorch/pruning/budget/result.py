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
FLOAT_BITS = 32
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


@dataclass(frozen=True, kw_only=True, eq=False)
class Combination:
    """One way to meet a budget.

    Attributes:
        name: Its means, such as "channels + INT8".
        share: What is left of what the budget counts.
        lost: What is lost without training.
        bits: Of weights and activations.
        result: The model to be fine-tuned, in float; with 8 bits by ``prepare_qat``.
    """

    name: str
    share: float
    lost: float
    bits: int
    result: PrunedModel

    @property
    def advice(self) -> str:
        """What to do with it."""
        return "train it with prepare_qat" if self.bits < FLOAT_BITS else "train it"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class BudgetedModel(PrunedModel):
    """A model that was pruned to a budget.

    Attributes:
        budget: What was asked for, such as "flops 0.5".
        ladder: The best choices from the whole model down to the budget; the last one is this model.
        cfg: A simple config for ``create_prune_retrain_model`` that gives the same numbers of channels, as far as AMCT
            prunes.
        measured: How many cut models were run.
        combinations: With ``quantize=True`` all ways to meet the budget, that which loses least first.
    """

    budget: str
    ladder: tuple[Rung, ...]
    cfg: str
    measured: int
    combinations: tuple[Combination, ...] = ()

    def ladder_text(self) -> str:
        """The ladder as text: a bar as long as what is lost."""
        most = max((rung.lost for rung in self.ladder), default=0.0) or 1.0
        lines = [f"{self.budget.split()[0]:>8}  {'MACs':>8}  {'parameters':>10}  lost without training"]
        for rung in self.ladder:
            bar = "█" * round(_WIDTH * max(rung.lost, 0.0) / most)
            macs, parameters = count_text(rung.cost.macs), count_text(rung.cost.parameters)
            lines.append(f"{100 * rung.share:6.1f} %  {macs:>8}  {parameters:>10}  {rung.lost:<9.4f} {bar}".rstrip())
        return "\n".join(lines)

    def combinations_text(self) -> str:
        """The combinations as text, with what to fine-tune first."""
        width = max((len(each.name) for each in self.combinations), default=0)
        lines = [
            f"{each.name:<{width}}  {100 * each.share:5.1f} %  lost without training {each.lost:.4f}"
            for each in self.combinations
        ]
        first = [f"fine-tune first: {each.name} ({each.advice})" for each in self.combinations[:1]]
        return "\n".join([*lines, *first])

    def _more_lines(self) -> list[str]:
        lines = [f"  {line}" for line in self.combinations_text().splitlines()]
        if self.ladder:
            lines += [f"  ladder to {self.budget}:", *(f"    {line}" for line in self.ladder_text().splitlines())]
        return lines

    def _files(self) -> FloatFiles:
        files = super()._files()
        return replace(files, others={**files.others, CONFIG_FILE: self.cfg.encode()})
