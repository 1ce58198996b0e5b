"""Equalization across the layers of a folded ONNX model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from amct.export.onnx.layer import replace_bias, replace_weight
from amct.export.onnx.layer_lookup import find_layers
from amct.onnx_model.layers import float_weights
from amct.pipeline.equalization import check_alone, equalization

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from onnx import ModelProto

    from amct.config.plan import Plan
    from amct.export.onnx.kept_weights import KeptWeights
    from amct.export.onnx.layer_lookup import LayerBinding
    from amct.onnx_model.batches import Feeds


def equalized(
    model: ModelProto, bindings: Sequence[LayerBinding], plan: Plan, feeds: Iterable[Feeds], kept: KeptWeights
) -> ModelProto:
    """The folded model with channels of more equal size; ``kept`` has its large weights.

    Raises:
        ConfigError: The plan balances layers too.
        CalibrationError: There is no data.
    """
    check_alone(plan)
    graph, layers, _ = find_layers(model, bindings, kept=kept)
    one_scale = [layer.name for layer in plan.layers if layer.has_one_scale]
    found = equalization(model, graph, layers, feeds, one_scale=one_scale)
    for layer in layers:
        if layer.name not in found.layers:
            continue
        (source,) = float_weights(layer)
        replace_weight(graph, layer, found.weight(layer.name, source.tensor, source.kind, source.groups).numpy())
        if layer.bias is not None and layer.name in found.divisors:
            divisor = found.divisors[layer.name].numpy()
            replace_bias(graph, layer, (layer.bias / divisor).astype(np.float32))
    return graph.build()
