"""What a quantization did, as a few lines of text."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amct.model import Skip
    from amct.record import AnyRecord


def summary_text(name: str, record: AnyRecord, folded: int, skipped: Sequence[Skip]) -> str:
    """What was quantized, what was folded, what stays float and why.

    Args:
        name: of the model.
        record: the factors of the quantized layers.
        folded: how many batch norms were folded.
        skipped: what stays float.
    """
    kinds = Counter(
        f"{entry.activation_type.lower()} activations, {entry.weight_type.lower()} weights"
        for entry in record.layers.values()
    )
    lines = [f"{name}: {len(record)} layers quantized, {folded} batch norms folded"]
    lines += [f"  {count} with {kind}" for kind, count in kinds.most_common()]
    if skipped:
        width = max(len(skip.layer) for skip in skipped)
        lines.append(f"{len(skipped)} left as they are:")
        lines += [f"  {skip.layer:<{width}}  {skip.reason}" for skip in skipped]
    return "\n".join(lines)
