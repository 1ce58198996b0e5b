"""``amct config``: write a full config for a model, check a config, and show the origin of each effective setting."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from amct.cli.model_pair import check_file
from amct.cli.options import JsonOption, ShapeOption
from amct.cli.own_layers import takes_own_layers
from amct.cli.printing import aligned, show, show_json
from amct.errors import ArgumentError
from amct.printable import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from amct.cli.model_layers import Framework
    from amct.config.layers import LayerList
    from amct.config.simple_config import ExplainedSetting, FullConfig

    _Reader = Callable[[bytes, str, LayerList], FullConfig]

app = typer.Typer(
    name="config",
    help="Write, check and explain configs (.cfg and .json) for a model.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


_SHOWN_SETTINGS = (
    "asymmetric",
    "with_offset",
    "channel_wise",
    "dst_type",
    "prune_ratio",
    "n_out_of_m_type",
)  # in one line
_SWITCH = "_enable"


class ConfigKind(str, Enum):
    """The purpose of a config."""

    ptq = "ptq"
    qat = "qat"
    compress = "compress"
    kv_cache = "kv-cache"


ConfigArgument = Annotated[Path, typer.Argument(help="The config: a simple one (.cfg) or a full one (.json).")]
ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        help='deploy.prototxt, net.onnx, a Python reference "package.module:factory", or a .txt file with "name type" '
        "in each line.",
    ),
]
KindOption = Annotated[
    ConfigKind,
    typer.Option(
        "--kind",
        help="What the config is for: post-training quantization, quantization-aware training, pruning with or without "
        "quantization, or the kv-cache.",
    ),
]


@app.command()
@takes_own_layers
def init(
    model: ModelOption,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the full config.")],
    cfg: Annotated[Path | None, typer.Option("--cfg", help="A simple config to start from.")] = None,
    input_shape: ShapeOption = None,
) -> None:
    """Write the full config of a model: built-in defaults, or what a simple config makes of it.

    Example: amct config init --model deploy.prototxt --cfg quant.cfg -o config.json
    """
    from amct import atomic
    from amct.cli.model_layers import model_layers

    dialect, layers = model_layers(model, input_shape)
    config = _expanded(cfg, dialect, ConfigKind.ptq, layers) if cfg else _default(dialect, layers)
    atomic.write_text(output, config.to_json())
    _show_warnings(config)
    show(f"wrote {output}: {counted(len(config.layers), 'quantizable layer')} of {len(layers)}")
    if cfg is None or "batch_num" not in config.origins:
        show(
            f"batch_num is 1, AMCT's default: calibration takes 1 batch, however many there are; change it in {output}"
        )


@app.command()
@takes_own_layers
def check(
    config: ConfigArgument,
    model: ModelOption,
    input_shape: ShapeOption = None,
    kind: KindOption = ConfigKind.ptq,
) -> None:
    """Check a config against a model: every mistake with its line, exit code 2 when there is one.

    Example: amct config check quant.cfg --model deploy.prototxt
    """
    full, layers = _read(config, model, input_shape, kind)
    _show_warnings(full)
    enabled = sum(1 for layer in full.layers if _is_enabled(layer.data))
    show(f"{config}: fits {model}: {enabled} of {counted(len(layers), 'layer')} compressed")


@app.command()
@takes_own_layers
def explain(
    config: ConfigArgument,
    model: ModelOption,
    input_shape: ShapeOption = None,
    kind: KindOption = ConfigKind.ptq,
    layer: Annotated[str | None, typer.Option("--layer", help="Only this layer, with every setting.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the effective settings of each layer and the file:line they come from.

    Example: amct config explain quant.cfg --model deploy.prototxt --layer conv1
    """
    from amct.config.simple_config import explain as explain_config

    full, layers = _read(config, model, input_shape, kind)
    rows = explain_config(full)
    if layer is not None:
        rows = _only(rows, layer, layers)
    if as_json:
        show_json([_plain(row) for row in rows])
    elif layer is not None:
        show("\n".join(aligned(_setting_lines(rows))))
    else:
        lines = _layer_lines(rows)
        if kind in (ConfigKind.ptq, ConfigKind.qat):
            listed = {row.layer for row in rows}
            unlisted = [each for each in layers if each.name not in listed]
            lines += [(each.name, each.type, "left float", each.refusal) for each in unlisted if each.refusal]
        show("\n".join(aligned(lines)))
    _show_warnings(full)


def _read(config: Path, model: str, input_shape: str | None, kind: ConfigKind) -> tuple[FullConfig, LayerList]:
    from amct.cli.model_layers import model_layers

    check_file(str(config))
    dialect, layers = model_layers(model, input_shape)
    return _expanded(config, dialect, kind, layers), layers


def _expanded(config: Path, dialect: Framework, kind: ConfigKind, layers: LayerList) -> FullConfig:
    """Read a simple or full config as a full one; ``.json`` or a leading ``{`` marks a full config."""
    from amct import atomic

    data = atomic.read_bytes(config)
    is_json = config.suffix == ".json" or data.lstrip().startswith(b"{")
    from_simple, from_full = _readers(dialect, kind)
    if is_json and from_full is None:
        raise ArgumentError(f"{config}: a config of --kind {kind.value} has the simple form only (.cfg)")
    read = from_full if is_json and from_full is not None else from_simple
    return read(data, str(config), layers)


def _readers(dialect: Framework, kind: ConfigKind) -> tuple[_Reader, _Reader | None]:
    """Return the readers of the simple and the full form of a config; the second is None if there is no full form."""
    from amct.cli.model_layers import Framework
    from amct.config.prune.dialect import COMPRESSION
    from amct.config.ptq.caffe import CAFFE
    from amct.config.ptq.kv_cache import KV_CACHE
    from amct.config.ptq.pytorch import PYTORCH
    from amct.config.qat.dialect import CAFFE_QAT, PYTORCH_QAT

    table: dict[tuple[Framework, ConfigKind], tuple[_Reader, _Reader | None]] = {
        (Framework.pytorch, ConfigKind.ptq): (PYTORCH.expand_config, PYTORCH.read_config),
        (Framework.pytorch, ConfigKind.qat): (PYTORCH_QAT.expand_config, PYTORCH_QAT.read_config),
        (Framework.pytorch, ConfigKind.compress): (COMPRESSION.expand_config, None),
        (Framework.pytorch, ConfigKind.kv_cache): (KV_CACHE.expand_config, KV_CACHE.read_config),
        (Framework.caffe, ConfigKind.ptq): (CAFFE.expand_config, CAFFE.read_config),
        (Framework.caffe, ConfigKind.qat): (CAFFE_QAT.expand_config, CAFFE_QAT.read_config),
    }
    if (dialect, kind) not in table:
        raise ArgumentError(f"--kind {kind.value}: there is no such config for Caffe models, only for PyTorch models")
    return table[dialect, kind]


def _default(dialect: Framework, layers: LayerList) -> FullConfig:
    from amct.cli.model_layers import Framework
    from amct.config.ptq.caffe import CAFFE
    from amct.config.ptq.pytorch import PYTORCH

    if dialect is Framework.caffe:
        return CAFFE.default_config(layers)
    return PYTORCH.default_config(layers)


def _only(rows: tuple[ExplainedSetting, ...], layer: str, layers: LayerList) -> tuple[ExplainedSetting, ...]:
    from amct.errors import did_you_mean

    found = tuple(row for row in rows if row.layer == layer)
    if found:
        return found
    info = layers.find(layer)
    if info is None:
        raise ArgumentError(f'--layer: the model has no layer "{layer}".{did_you_mean(layer, layers.names)}')
    reason = info.refusal or f'its type "{info.type}" cannot be quantized'
    raise ArgumentError(f'--layer: "{layer}" is not quantized: {reason}')


def _layer_lines(rows: Iterable[ExplainedSetting]) -> list[tuple[str, ...]]:
    """One row per layer (two where it is both quantized and pruned): name, type, what is done, and what line says so.

    That line is the block that sets the layer, or of a layer that is skipped the entry that skips it.
    """
    lines = []
    for part in _parts(rows):
        switch = next((row for row in part if row.key.endswith(_SWITCH)), None)
        effect, origin = _effect({row.key: row.value for row in part}), part[-1].block
        if switch is not None and not switch.value:
            effect, origin = ("not pruned" if _is_pruning(switch) else "left float"), switch.origin
        lines.append((switch or part[0], effect, str(origin)))
    return [(row.layer, row.type, effect, origin) for row, effect, origin in lines]


def _parts(rows: Iterable[ExplainedSetting]) -> Iterable[list[ExplainedSetting]]:
    """The settings of each layer, those of its quantization and those of its pruning apart."""
    parts: dict[tuple[str, bool], list[ExplainedSetting]] = {}
    for row in rows:
        if row.layer:
            parts.setdefault((row.layer, _is_pruning(row)), []).append(row)
    return parts.values()


def _is_pruning(row: ExplainedSetting) -> bool:
    return row.key.startswith("regular_prune_")


def _setting_lines(rows: Iterable[ExplainedSetting]) -> list[tuple[str, ...]]:
    """One row per setting of a layer that has an effect: of what is switched off only the switch."""
    lines: list[tuple[str, ...]] = []
    for part in _parts(rows):
        off = [row for row in part if row.key.endswith(_SWITCH) and not row.value]
        lines += [(row.key, json.dumps(row.value), str(row.origin)) for row in off or part]
    return lines


def _is_enabled(block: Mapping[str, Any]) -> bool:
    """Return whether any ``*_enable`` setting of a layer is true; a layer without one counts as enabled."""
    switches = [value for key, value in block.items() if key.endswith(_SWITCH)]
    return any(switches) or not switches


def _effect(settings: dict[str, Any]) -> str:
    """Format the most important settings of a layer as a short text."""
    words = [str(value) for key, value in settings.items() if key.endswith("algo")]
    short = {key.rpartition(".")[2]: value for key, value in settings.items() if ".1." not in key}
    words += [f"{key}={json.dumps(short[key])}" for key in _SHOWN_SETTINGS if key in short]
    bits = [str(value) for key, value in settings.items() if key.endswith("num_bits")]
    return " ".join([*words, f"bits={'/'.join(bits)}"] if bits else words)


def _plain(row: ExplainedSetting) -> dict[str, Any]:
    position = row.origin.position
    return {
        "layer": row.layer,
        "type": row.type,
        "key": row.key,
        "value": row.value,
        "from": row.origin.level.name.lower(),
        "file": position.source if position else None,
        "line": position.line if position else None,
        "column": position.column if position else None,
    }


def _show_warnings(config: FullConfig) -> None:
    for warning in config.warnings:
        show(f"warning: {warning}", err=True)
