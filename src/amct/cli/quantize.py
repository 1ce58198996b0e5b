"""``amct quantize`` and ``amct inspect``: a model and some data in, the quantized files out; what can be quantized."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from amct.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from amct.config.layers import LayerInfo

WORST_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Where the calibration data is and how it is prepared, as given on the command line."""

    data: Path
    size: str | None
    crop: str | None
    mean: str | None
    scale: float
    color: str
    batch_size: int
    batches: int | None

    def open(self) -> list[NDArray[np.float32]]:
        """The calibration batches."""
        return list(islice(self._batches(), self.batches))

    def _batches(self) -> Iterator[NDArray[np.float32]]:
        import numpy as np

        from amct.data import Preparation, batches, open_samples

        mean = np.zeros(0, np.float32) if self.mean is None else _mean(self.mean)
        preparation = Preparation(
            size=_pair("--size", self.size),
            crop=_pair("--crop", self.crop),
            color=cast("Literal['bgr', 'rgb', 'gray']", self.color),
            mean=mean,
            scale=self.scale,
        )
        for values, _ in batches(open_samples(self.data, preparation), self.batch_size):
            yield values


def _pair(option: str, text: str | None) -> tuple[int, int] | None:
    """``224`` or ``240,320`` as height and width."""
    if text is None:
        return None
    words = text.replace("x", ",").split(",")
    if len(words) > 2 or not all(word.strip().isdecimal() for word in words):
        raise ArgumentError(f'{option}: expected a number, or height,width, got "{text}"')
    return int(words[0]), int(words[-1])


def _mean(text: str) -> NDArray[np.float32]:
    """Numbers, one a channel, or a mean file."""
    import numpy as np

    if Path(text).is_file():
        from amct.data.mean import read_mean

        return read_mean(text)
    try:
        return np.array([float(word) for word in text.split(",")], np.float32)
    except ValueError:
        message = f'--mean: expected numbers such as 104,117,123 or the name of a mean file, got "{text}"'
        raise ArgumentError(message) from None


def quantize(  # noqa: PLR0913  a command has as many options as a user needs
    model: Annotated[str, typer.Argument(help='A prototxt, or a Python reference "package.module:factory".')],
    weights: Annotated[Path | None, typer.Argument(help="The caffemodel of a prototxt.")] = None,
    *,
    data: Annotated[Path, typer.Option(help="Calibration data: a folder of pictures, .npy, .npz, LMDB or idx.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the files go: folder/prefix.")],
    config: Annotated[Path | None, typer.Option(help="An AMCT config, simple (.cfg) or full (.json).")] = None,
    size: Annotated[str | None, typer.Option(help="Resize pictures to this size: 224 or height,width.")] = None,
    crop: Annotated[str | None, typer.Option(help="Then keep the middle of this size.")] = None,
    mean: Annotated[str | None, typer.Option(help="Subtract: 104,117,123 or a mean file.")] = None,
    scale: Annotated[float, typer.Option(help="Then multiply.")] = 1.0,
    color: Annotated[str, typer.Option(help="Channels of pictures: bgr, rgb or gray.")] = "bgr",
    batch_size: Annotated[int, typer.Option(help="Samples a batch.")] = 1,
    batches: Annotated[int | None, typer.Option(help="Use no more batches than this.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for other programs.")] = False,
) -> None:
    """Quantize a model with some calibration data.

    Example: amct quantize deploy.prototxt net.caffemodel --data images/ --size 227 --mean 104,117,123 -o out/net
    """
    options = DataOptions(
        data=data, size=size, crop=crop, mean=mean, scale=scale, color=color, batch_size=batch_size, batches=batches
    )
    if weights is not None:
        result = _quantize_caffe(model, weights, options, config, output)
    elif ":" in model:
        result = _quantize_torch(model, options, config, output)
    else:
        raise ArgumentError(
            f'expected a prototxt and a caffemodel, or a Python reference "package.module:factory", got only "{model}"'
        )
    typer.echo(json.dumps(result, indent=2) if as_json else _as_text(result))


def _quantize_caffe(
    model: str, weights: Path, options: DataOptions, config: Path | None, output: Path
) -> dict[str, Any]:
    import amct.caffe as front_door
    from amct import atomic

    atomic.check_writable(output.parent)
    batches = options.open()
    quantized = front_door.quantize(model, weights, batches, config=config)
    return {
        "quantized": list(quantized.layers),
        "left float": dict(quantized.not_quantized),
        "layers": [_row(layer) for layer in quantized.compare(batches)],
        "files": [str(path) for path in quantized.save(output)],
    }


def _quantize_torch(reference: str, options: DataOptions, config: Path | None, output: Path) -> dict[str, Any]:
    import torch

    import amct.pytorch as front_door
    from amct import atomic
    from amct.cli.model_layers import load_reference

    atomic.check_writable(output.parent)
    batches = [torch.from_numpy(batch) for batch in options.open()]
    quantized = front_door.quantize(load_reference(reference), batches, config=config)
    return {
        "quantized": list(quantized.layers),
        "left float": {skip.layer: skip.reason for skip in quantized.skipped},
        "layers": [_row(layer) for layer in quantized.compare(batches)],
        "files": [str(path) for path in quantized.save(output)],
    }


def _row(layer: Any) -> dict[str, Any]:  # noqa: ANN401  a LayerComparison; its module needs torch
    return {"layer": layer.layer, "sqnr": layer.sqnr, "cosine": layer.cosine}


def _as_text(result: dict[str, Any]) -> str:
    worst = sorted(result["layers"], key=lambda row: row["sqnr"])[:WORST_SHOWN]
    lines = [f"quantized   {len(result['quantized'])} layers; {len(result['left float'])} left as they are:"]
    lines += [f"              {reason}: {', '.join(names)}" for reason, names in _by_reason(result["left float"])]
    lines += ["most harmed " + ", ".join(f"{row['layer']} (SQNR {row['sqnr']:.1f} dB)" for row in worst)]
    lines += [f"wrote       {path}" for path in result["files"]]
    return "\n".join(lines)


def _by_reason(left_float: dict[str, str]) -> list[tuple[str, list[str]]]:
    """Layers that share a reason on one line."""
    groups: dict[str, list[str]] = {}
    for name, reason in left_float.items():
        groups.setdefault(reason, []).append(name)
    return list(groups.items())


def inspect(
    model: Annotated[str, typer.Argument(help='A prototxt, or a Python reference "package.module:factory".')],
    input_shape: Annotated[
        str | None, typer.Option("--input-shape", help="Example input of a PyTorch model, such as 1,3,224,224.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for other programs.")] = False,
) -> None:
    """Show the layers of a model, which of them can be quantized, and why not.

    Example: amct inspect deploy.prototxt
    """
    from amct.cli.model_layers import model_layers

    dialect, layers = model_layers(model, input_shape)
    rows = [{"layer": layer.name, "type": layer.type, "verdict": _verdict(layer, dialect.value)} for layer in layers]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    names, types = (max((len(row[key]) for row in rows), default=0) for key in ("layer", "type"))
    for row in rows:
        typer.echo(f"{row['layer']:<{names}}  {row['type']:<{types}}  {row['verdict']}")
    typer.echo(f"{sum(row['verdict'] == 'quantized' for row in rows)} of {len(rows)} layers are quantized by default")


def _verdict(layer: LayerInfo, dialect: str) -> str:
    from amct.config.caffe_types import CAFFE_TYPES
    from amct.config.pytorch_types import PTQ_TYPES

    if layer.refusal:
        return f"stays float: {layer.refusal}"
    if dialect == "pytorch":
        return "quantized" if layer.type in PTQ_TYPES else "stays float: this type cannot be quantized"
    if layer.type not in CAFFE_TYPES:
        return "stays float: this type cannot be quantized"
    if not CAFFE_TYPES[layer.type].on_by_default:
        return "off by default: switch it on with quant_enable"
    return "quantized"
