"""How much each layer alone harms the outputs of a model: the causes, where a comparison layer by layer shows victims.

One layer at a time is quantized, weights and input, and the float model around it stays as it is. No labels are needed,
and no other calibration than the one that gave the parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from amct import log
from amct.export.check.losses import similarity_over
from amct.export.onnx.runtime import Runner

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from numpy.typing import NDArray

    from amct.export.formats import ExportedModel


@dataclass(frozen=True, kw_only=True)
class LayerSensitivity:
    """What quantizing one layer alone does to the outputs of the model.

    Attributes:
        layer: The layer.
        sqnr: The signal-to-quantization-noise ratio in dB of the output that suffers most; infinite without any error.
        share: The share of this layer in the sum of the noise of all layers.
    """

    layer: str
    sqnr: float
    share: float


def layer_sensitivity(
    layers: Sequence[str],
    quantized: Callable[[Collection[str]], ExportedModel],
    batches: Sequence[Mapping[str, NDArray[Any]]],
) -> list[LayerSensitivity]:
    """Quantize each layer alone and compare the outputs with those of the float model; the worst layer comes first.

    Args:
        layers: The quantized layers.
        quantized: Returns the folded model with just some layers quantized.
        batches: Inputs by name.

    Raises:
        ExportError: A layer has no quantized form.
        CalibrationError: The model does not run on the batches.
    """
    model = quantized(())
    runner = Runner(model.model, lean=True)
    expected = [runner.run(batch) for batch in batches]
    del model, runner
    noise = {}
    for name in log.track(layers, "Quantizing each layer alone"):
        alone = quantized([name])  # it owns the weights of its model
        runner = Runner(alone.model, lean=True)
        found, _ = similarity_over((exact, runner.run(batch)) for exact, batch in zip(expected, batches, strict=True))
        if found is not None:
            noise[name] = math.inf if math.isnan(found.sqnr) else 10 ** (-found.sqnr / 10)
    total = sum(noise.values())
    return [
        LayerSensitivity(
            layer=name,
            sqnr=math.inf if each == 0 else -10 * math.log10(each) if math.isfinite(each) else -math.inf,
            share=_share(each, total),
        )
        for name, each in sorted(noise.items(), key=lambda item: -item[1])
    ]


def _share(noise: float, total: float) -> float:
    if not math.isfinite(total):
        return float(noise == math.inf)
    return noise / total if total else 0.0
