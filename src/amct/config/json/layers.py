"""The names in a full JSON config: which layer a top-level key means, and the list of layers that are not fused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amct.config.text.names import Named, check_layer_names, without_repeats

if TYPE_CHECKING:
    from collections.abc import Collection

    from amct.config.json.reader import JsonNode
    from amct.config.layers import LayerInfo, LayerList
    from amct.config.problems import ProblemList


def find_layer(
    name: str,
    node: JsonNode,
    model: LayerList,
    types: Collection[str],
    global_keys: tuple[str, ...],
    problems: ProblemList,
    *,
    switch_key: str = "quant_enable",
) -> LayerInfo | None:
    """The layer a top-level key names; None, and a report, when the layer cannot be quantized.

    A layer that cannot be quantized may stand in the file as long as it is switched off there.
    """
    layer = model.find(name)
    if layer is None:
        problems.add_unknown("the layer or global field", name, (*global_keys, *model.names), node.key_position)
        return None
    if layer.type in types and layer.refusal is None:
        return layer
    switch = node.value.get(switch_key) if node.is_object else None
    if switch is None or switch.value is not False:
        reason = layer.refusal or f"its type {layer.type} is not supported"
        problems.add(f'the layer "{name}" cannot be quantized: {reason}. Remove it.', node.key_position)
    return None


def check_skip_fusion(
    node: JsonNode | None, model: LayerList, fusible_types: Collection[str], problems: ProblemList
) -> None:
    """Report names in ``skip_fusion_layers`` that are repeated, unknown or of a type that is never fused."""
    if node is None or not node.is_list:
        return
    names = [Named(item.value, item.position) for item in node.value if isinstance(item.value, str)]
    unique = without_repeats(names, "skip_fusion_layers", problems)
    check_layer_names(unique, "skip_fusion_layers", model, fusible_types, problems, verb="fused with BatchNorm")
