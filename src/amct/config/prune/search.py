"""The config of the automatic channel-pruning search: the compression ratio, and the layers that are not searched.

``override_prune_cfg`` names a second file, a simple config of retraining that may only skip layers or override their
filter pruning: those layers are fixed, all other prunable layers are searched.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, StrictBool

from amct.config.checks import ProblemList, check_settings
from amct.config.layers import QAT_TYPES, LayerList
from amct.config.plan import PruneLayerPlan, settings_of
from amct.config.prune.dialect import (
    FILTER,
    PRUNE_KEY,
    PRUNE_SWITCH_KEY,
    PRUNE_TYPE_KEY,
    PruneExpander,
    read_pruner,
)
from amct.config.qat.dialect import (
    NAME_KEY,
    PRUNE_BLOCK,
    PYTORCH_QAT,
    QUANT_BLOCKS,
    part,
)
from amct.config.simple_config import (
    LAYER_OVERRIDES,
    TYPE_OVERRIDES,
    SimpleConfig,
    read_simple_config,
    sets,
)
from amct.errors import ParseError
from amct.numerics.settings import CheckedSettings
from amct.schema import descriptor, parse_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from google.protobuf.message import Message

    from amct.config.layers import LayerInfo
    from amct.errors import Problem
    from amct.schema import TextMessage

SEARCH_MESSAGE = "AMCTProto.AutoChannelPruneConfig"
OVERRIDE_FILE = "override_prune_cfg"
ALLOWED_FIELDS = (
    "skip_layers", "skip_layer_types", "regular_prune_skip_layers", "regular_prune_skip_types", LAYER_OVERRIDES,
    TYPE_OVERRIDES,
)  # fmt: skip


class PruneSearchParseError(ParseError, RuntimeError):
    """The config of a search cannot be parsed; AMCT raises RuntimeError here."""


@dataclass(frozen=True, kw_only=True)
class PruneSearchSettings(CheckedSettings):
    """The settings of a search.

    Attributes:
        compress_ratio: The bit operations of the model divided by those of the result.
        ascend_optimized: Whether channels are removed 16 at a time.
        max_prune_ratio: The largest share of channels taken from one layer.
        test_iteration: The number of batches that measure the sensitivity.
    """

    compress_ratio: Annotated[float, Field(strict=True, gt=1.0)]
    ascend_optimized: StrictBool = True
    max_prune_ratio: Annotated[float, Field(strict=True, gt=0.0, le=1.0)] = 1.0
    test_iteration: Annotated[int, Field(strict=True, ge=1)] = 1


@dataclass(frozen=True, kw_only=True)
class PruneSearchConfig:
    """A whole search config, checked against a model.

    Attributes:
        source: The file.
        settings: The settings of the search.
        search_layers: The layers to search, in model order.
        fixed: The layers that ``override_prune_cfg`` fixes: each has its own pruner, enabled unless skipped.
        override: That file as a message, for the config the search writes; None when there is none.
        warnings: What the user should know.
    """

    source: str
    settings: PruneSearchSettings
    search_layers: tuple[str, ...]
    fixed: tuple[PruneLayerPlan, ...] = ()
    override: Message | None = None
    warnings: tuple[Problem, ...] = ()


def read_search_config(
    text: str | bytes,
    source: str,
    layers: Iterable[LayerInfo],
    *,
    read_file: Callable[[str], bytes] = lambda path: Path(path).read_bytes(),
) -> PruneSearchConfig:
    """Read the config of a search, and the file it names, and check both against a model.

    Args:
        text: The content of the config.
        source: Its file name, for positions.
        layers: The layers of the model, in model order.
        read_file: Reads the file that ``override_prune_cfg`` names; OSError when it cannot.

    Raises:
        PruneSearchParseError: The text is not such a config.
        ParseError: The file it names is not a simple config.
        ConfigError: A value is out of range, the second file cannot be read or has fields that it must not have, or no
            layer is left to search; all mistakes are listed.
    """
    problems, model = ProblemList(), LayerList(layers)
    try:
        message = parse_text(text, descriptor(SEARCH_MESSAGE, schema="pytorch"), source)
    except ParseError as error:
        raise PruneSearchParseError(str(error.args[0]), problems=error.problems) from error
    problems.warn_all(message.warnings)
    settings = _settings(message, problems)
    override = _read_override(message, read_file, problems)
    simple = SimpleConfig(source=source)
    if override is not None:
        problems.warn_all(override.warnings)
        simple = read_simple_config(override, message.get(OVERRIDE_FILE), problems, retraining=True)
    expander = PruneExpander(simple, problems)
    if override is not None:
        _check_fields(override, simple, problems)
        simple.check_skips("", model, tuple(QAT_TYPES), problems, verb="compressed")
        expander.check(model)
    problems.raise_all()
    assert settings is not None
    search, fixed = _searched_and_fixed(expander, model)
    _check_something_left(search, message, model, problems)
    problems.raise_all()
    return PruneSearchConfig(
        source=source,
        settings=settings,
        search_layers=search,
        fixed=fixed,
        override=None if override is None else override.to_message(),
        warnings=problems.warnings,
    )


def _settings(message: TextMessage, problems: ProblemList) -> PruneSearchSettings | None:
    values = {item.name: message.get(item.name) for item in fields(PruneSearchSettings) if message.has(item.name)}
    return check_settings(PruneSearchSettings, values, lambda path: message.where(str(path[0])), problems)


def _read_override(
    message: TextMessage, read_file: Callable[[str], bytes], problems: ProblemList
) -> TextMessage | None:
    if not message.has(OVERRIDE_FILE):
        return None
    path = message.get(OVERRIDE_FILE)
    try:
        data = read_file(path)
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        problems.add(f'{OVERRIDE_FILE}: the file "{path}" cannot be read: {error}', message.where(OVERRIDE_FILE))
        return None
    return parse_text(data, descriptor(PYTORCH_QAT.message, schema="pytorch"), path)


def _check_fields(override: TextMessage, simple: SimpleConfig, problems: ProblemList) -> None:
    """Report fields that a file which only fixes some layers must not have."""
    for field in override.fields:
        if field.name not in ALLOWED_FIELDS:
            what = f"{field.name} is not possible in {OVERRIDE_FILE}. It may have: {', '.join(ALLOWED_FIELDS)}."
            problems.add(what, field.position)
    for choice in simple.blocks.overrides():
        block = choice.block
        assert block is not None
        for name in QUANT_BLOCKS:
            if sets(block, name):
                what = f"{name} is not possible in {OVERRIDE_FILE}: its overrides may only have {FILTER.field}"
                problems.add(what, block.where(name))
        pruner = read_pruner(part(choice, PRUNE_BLOCK))
        if pruner is not None and pruner.method is not FILTER:
            what = f"{pruner.method.field} is not possible in {OVERRIDE_FILE}: the search is for {FILTER.field} only"
            problems.add(what, block.where(PRUNE_BLOCK))


def _searched_and_fixed(
    expander: PruneExpander, model: LayerList
) -> tuple[tuple[str, ...], tuple[PruneLayerPlan, ...]]:
    """The layers to search and the layers that are fixed."""
    search, fixed = [], []
    for layer in model:
        if FILTER.refusal(layer) is not None or layer.prune_refusal is not None:
            continue
        expanded = expander.expand(layer)
        if expanded is not None:
            fixed.append(_fixed(layer, expanded[0]))
        elif expander.skips.find(layer) is None:
            search.append(layer.name)
    return tuple(search), tuple(fixed)


def _fixed(layer: LayerInfo, data: dict[str, Any]) -> PruneLayerPlan:
    block = {key: value for key, value in data[PRUNE_KEY].items() if key != PRUNE_TYPE_KEY}
    settings = settings_of(block, FILTER.algorithms, NAME_KEY)
    return PruneLayerPlan(name=layer.name, type=layer.type, enabled=data[PRUNE_SWITCH_KEY], settings=settings)


def _check_something_left(
    search: tuple[str, ...], message: TextMessage, model: LayerList, problems: ProblemList
) -> None:
    if search:
        return
    if any(FILTER.refusal(layer) is None and layer.prune_refusal is None for layer in model):
        what = f"{OVERRIDE_FILE} skips or overrides every layer: there is none left to search"
        problems.add(what, message.where(OVERRIDE_FILE))
    else:
        types = ", ".join(FILTER.types)
        problems.add(f"the model has no layer that can be {FILTER.done}. Types that can: {types}.", message.position)
