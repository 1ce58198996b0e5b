"""What every kind of plan is built from: settings out of a checked JSON block, reasons for layers that stay float."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amct.config.checks import check_settings
from amct.config.precedence import Level
from amct.config.problems import ProblemList
from amct.config.registry import find_algorithm

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from amct.config.full_config import LayerConfig
    from amct.config.layers import LayerList
    from amct.config.registry import Algorithm


def settings_of(
    data: Mapping[str, Any], algorithms: tuple[Algorithm, ...], name_key: str | None, **defaults: object
) -> Any:  # noqa: ANN401  the settings class is the algorithm's
    """The settings object of a JSON block that was checked before.

    Args:
        data: The block.
        algorithms: The algorithms it may name.
        name_key: The key that names the algorithm, or None when there is only one.
        defaults: Settings, by their field names, for what the block leaves out.
    """
    algorithm = find_algorithm(algorithms, data[name_key]) if name_key else algorithms[0]
    assert algorithm is not None
    values = {algorithm.field_of(key): value for key, value in data.items() if key != name_key}
    problems = ProblemList()
    settings = check_settings(algorithm.settings, {**defaults, **values}, lambda _: None, problems)
    problems.raise_all()
    return settings


def reasons_not_quantized(
    model: LayerList, types: Collection[str], blocks: Mapping[str, LayerConfig], *, switch_key: str = "quant_enable"
) -> dict[str, str]:
    """Why each layer that stays float does so."""
    reasons = {}
    for layer in model:
        if layer.type not in types:
            reasons[layer.name] = f"{layer.type} cannot be quantized"
        elif layer.refusal is not None:
            reasons[layer.name] = layer.refusal
        elif layer.name not in blocks:
            reasons[layer.name] = "not in the config"
        elif not blocks[layer.name].data[switch_key]:
            origin = blocks[layer.name].origin(switch_key)
            by_type = origin.level is Level.RULE and origin.position is None
            off = f"{layer.type} is off by default: switch it on with {switch_key}"
            reasons[layer.name] = off if by_type else f"switched off: {origin}"
    return reasons
