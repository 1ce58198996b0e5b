"""The result of a quantization as a few lines of text."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from markupsafe import Markup

from amct.printable import LONGEST_LAYER_NAME, counted, escaped, printable, shortened

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from amct.model import Skip
    from amct.numerics.qparams import LayerQParams
    from amct.record import AnyRecord


def summary_html(name: str, record: AnyRecord, folded: int, skipped: Sequence[Skip]) -> str:
    """Return the summary as HTML for a notebook, every name escaped; the arguments are those of ``summary_text``."""
    head, *rest = summary_text(name, record, folded, ()).splitlines()
    parts = [Markup("<p><strong>{}</strong></p>").format(head)]
    parts += [Markup("<p>{}</p>").format(line.strip()) for line in rest]
    if skipped:
        row = Markup("<tr><td><code>{}</code></td><td>{}</td></tr>")
        rows = [row.format(_shown(skip), skip.reason) for skip in skipped]
        head = Markup("<thead><tr><th>left as it is</th><th>because</th></tr></thead>")
        parts.append(Markup("<table>{}<tbody>{}</tbody></table>").format(head, Markup("").join(rows)))
    return str(Markup("<div>{}</div>").format(Markup("").join(parts)))


def _shown(skip: Skip) -> str:
    return escaped(shortened(skip.layer, LONGEST_LAYER_NAME))


def rounding_text(layers: Iterable[LayerQParams]) -> str:
    """How weights were rounded and biases corrected, and which file has other integers; "" for AMCT's rounding."""
    weighted = [each for each in layers if each.weights]
    cancelling = sum(each.cancels_errors for each in weighted)
    corrected = sum(each.corrects_bias and each.mean is not None for each in weighted)
    if not cancelling and not corrected:
        return ""
    return (
        f"rounding errors of weights cancel in {cancelling} of {counted(len(weighted), 'layer')}, and the biases of "
        f"{corrected} make up for the mean error\n"
        "  all files hold these integers, but the QDQ file for every CPU (portable) rounds convolutions and linear "
        "layers again,\n"
        "  so that pairs of weights fit 16 bits, and in QDQ files a linear layer has one scale per output"
    )


def summary_text(name: str, record: AnyRecord, folded: int, skipped: Sequence[Skip]) -> str:
    """Return a summary of the quantized layers, the folded batch norms, and the layers that are not quantized.

    Args:
        name: The name of the model.
        record: The factors of the quantized layers.
        folded: The number of folded batch norms.
        skipped: The layers that are not quantized, with the reasons.
    """
    kinds = Counter(
        f"{entry.activation_type.lower()} activations, {entry.weight_type.lower()} weights"
        for entry in record.layers.values()
    )
    lines = [f"{name}: {counted(len(record), 'layer')} quantized, {counted(folded, 'batch norm')} folded"]
    lines += [f"  {count} with {kind}" for kind, count in kinds.most_common()]
    if skipped:
        names = [_shown(skip) for skip in skipped]
        width = max(map(len, names))
        lines.append(f"{counted(len(skipped), 'layer')} left in float:")
        lines += [f"  {name:<{width}}  {skip.reason}" for name, skip in zip(names, skipped, strict=True)]
    return printable("\n".join(lines))
