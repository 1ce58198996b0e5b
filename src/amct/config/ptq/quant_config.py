"""Our own config of post-training quantization, for those who write Python and not files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from amct.atomic import read_bytes
from amct.config.plan import OPEN_ENDED
from amct.config.ptq.pytorch import default_config, expand_config
from amct.config.ptq.pytorch_json import make_plan, read_config
from amct.config.settings import AdaRoundSettings, ArqSettings, HfmgSettings, IfmrSettings
from amct.errors import ArgumentTypeError, ConfigError

if TYPE_CHECKING:
    from amct.config.layers import LayerList
    from amct.config.plan import Plan

SOURCE = "config"


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """How layers are quantized: any of it may be left to the defaults.

    Attributes:
        weights: ``ArqSettings`` or ``AdaRoundSettings``.
        activations: ``IfmrSettings`` or ``HfmgSettings``.
        migration_strength: 0.2 to 0.8 balances the layer with DMQ before.
    """

    weights: ArqSettings | AdaRoundSettings | None = None
    activations: IfmrSettings | HfmgSettings | None = None
    migration_strength: float | None = None


@dataclass(frozen=True, kw_only=True)
class QuantConfig:
    """What to quantize and how; the fields of AMCT's simple config under the same names where it has them.

    An entry of ``types`` or ``layers`` replaces ``common`` as a whole, the layer's own entry before that of its type.
    Settings that a layer type cannot have (AdaRound of a Conv3d) are left out there when they come from ``common``.

    Attributes:
        batch_num: Batches of calibration; None: all that there are.
        activation_offset: Whether activations have an offset where their settings do not say.
        common: For every layer.
        types: By layer type, such as "Linear".
        layers: By layer name.
        skip_layers: Layers that stay float.
        skip_layer_types: Types that stay float.
        do_fusion: Whether batch norms are folded.
        skip_fusion_layers: Layers whose batch norm stays.
        force_fp16: Whether activation scales are rounded to half precision.
    """

    batch_num: int | None = None
    activation_offset: bool = True
    common: LayerConfig = field(default_factory=LayerConfig)
    types: Mapping[str, LayerConfig] = field(default_factory=dict)
    layers: Mapping[str, LayerConfig] = field(default_factory=dict)
    skip_layers: tuple[str, ...] = ()
    skip_layer_types: tuple[str, ...] = ()
    do_fusion: bool = True
    skip_fusion_layers: tuple[str, ...] = ()
    force_fp16: bool = False


AnyConfig = QuantConfig | Mapping[str, Any] | str | os.PathLike[str] | None


def plan_of(config: AnyConfig, layers: LayerList, batches: int | None) -> tuple[Plan, bool]:
    """The plan of a model, and whether the config leaves the number of batches open.

    Args:
        config: a simple config or a JSON file, the content of a JSON config as a dict, a ``QuantConfig``, or nothing.
        layers: the model's layers.
        batches: how many batches there are, for a config that leaves it open; None when nobody knows.

    Raises:
        ArgumentTypeError: it is none of these.
        ParseError, ConfigError: as reading config files.
        FileError: the file cannot be read.
    """
    if config is None:
        config = QuantConfig()
    if isinstance(config, QuantConfig):
        return _plan_of_options(config, layers, batches), config.batch_num is None
    if isinstance(config, Mapping):
        full = read_config(json.dumps(config), SOURCE, layers)
    elif isinstance(config, (str, os.PathLike)):
        content, source = read_bytes(config), os.fspath(config)
        reader = read_config if content.lstrip()[:1] == b"{" else expand_config
        full = reader(content, source, layers)
    else:
        raise ArgumentTypeError(
            f"config: expected the path of a .cfg or .json, a dict, a QuantConfig or None, got {type(config).__name__}"
        )
    return make_plan(full, layers), False


def _plan_of_options(options: QuantConfig, layers: LayerList, batches: int | None) -> Plan:
    batch_num = options.batch_num if options.batch_num is not None else batches or OPEN_ENDED
    if options == QuantConfig(batch_num=options.batch_num):
        return make_plan(default_config(layers, batch_num=batch_num), layers)
    config = expand_config(_as_text(options, batch_num), SOURCE, layers).to_dict()
    # The simple config has no field for the bits of AdaRound; the full one has.
    for name, block in config.items():
        weight = block.get("weight_quant_params") if isinstance(block, dict) else None
        layer = layers.find(name)
        if weight is None or layer is None or weight.get("wts_algo") != "ada_quantize":
            continue
        chosen = options.layers.get(name) or options.types.get(layer.type) or options.common
        assert isinstance(chosen.weights, AdaRoundSettings)
        weight["num_bits"] = chosen.weights.num_bits
    return make_plan(read_config(json.dumps(config), SOURCE, layers), layers)


# -- as a simple config ------------------------------------------------------------------------------------------------


def _as_text(options: QuantConfig, batch_num: int) -> str:
    lines = [
        f"batch_num: {batch_num}",
        f"activation_offset: {_word(options.activation_offset)}",
        f"do_fusion: {_word(options.do_fusion)}",
        *(f"skip_layers: {json.dumps(name)}" for name in options.skip_layers),
        *(f"skip_layer_types: {json.dumps(name)}" for name in options.skip_layer_types),
        *(f"skip_fusion_layers: {json.dumps(name)}" for name in options.skip_fusion_layers),
    ]
    if options.force_fp16:
        lines.append("fakequant_precision_mode: FORCE_FP16_QUANT")
    if options.common != LayerConfig():
        lines.append(f"common_config {{ {_block(options.common)} }}")
    for kind, key, entries in (
        ("override_layer_types", "layer_type", options.types),
        ("override_layer_configs", "layer_name", options.layers),
    ):
        for name, entry in entries.items():
            lines.append(f"{kind} {{ {key}: {json.dumps(name)} calibration_config {{ {_block(entry)} }} }}")
    return "\n".join(lines) + "\n"


def _block(entry: LayerConfig) -> str:
    parts = []
    if isinstance(entry.weights, ArqSettings):
        parts.append(f"arq_quantize {{ {_channel_wise(entry.weights)} quant_bits: {entry.weights.num_bits} }}")
    elif isinstance(entry.weights, AdaRoundSettings):
        parts.append(f"ada_quantize {{ {_ada(entry.weights)} }}")
    if isinstance(entry.activations, IfmrSettings):
        parts.append(f"ifmr_quantize {{ {_ifmr(entry.activations)} }}")
    elif isinstance(entry.activations, HfmgSettings):
        hfmg = entry.activations
        parts.append(f"hfmg_quantize {{ num_of_bins: {hfmg.num_of_bins} {_activation(hfmg)} }}")
    if entry.migration_strength is not None:
        parts.append(f"dmq_balancer {{ migration_strength: {entry.migration_strength} }}")
    return " ".join(parts)


def _channel_wise(weights: ArqSettings | AdaRoundSettings) -> str:
    """Only when it is switched off: that it is on goes without saying, where a layer can have it."""
    return "" if weights.channel_wise else "channel_wise: false"


def _ada(weights: AdaRoundSettings) -> str:
    start, end = weights.beta_range
    return (
        f"num_iteration: {weights.num_iteration} reg_param: {weights.reg_param} warm_start: {weights.warm_start} "
        f"beta_range_start: {start} beta_range_end: {end} {_channel_wise(weights)}"
    )


def _ifmr(activations: IfmrSettings) -> str:
    start, end = activations.search_range
    return (
        f"search_range_start: {start} search_range_end: {end} search_step: {activations.search_step} "
        f"max_percentile: {activations.max_percentile} min_percentile: {activations.min_percentile} "
        f"{_activation(activations)}"
    )


def _activation(activations: IfmrSettings | HfmgSettings) -> str:
    if activations.num_bits not in (8, 16):
        raise ConfigError(f"{SOURCE}: activations can have 8 or 16 bits here, got {activations.num_bits}")
    # Symmetry is asked for; its default is what the layer type can have.
    symmetry = "" if activations.asymmetric else "asymmetric: false"
    return f"dst_type: INT{activations.num_bits} {symmetry}"


def _word(value: bool) -> str:
    return "true" if value else "false"
