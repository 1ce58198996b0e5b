"""``amct inspect`` lists the layers of a model: which of them can be quantized, and why not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from amct.cli.model_layers import is_prototxt
from amct.cli.options import MODEL_HELP, JsonOption, ShapeOption
from amct.cli.own_layers import takes_own_layers
from amct.cli.printing import aligned, show, show_json
from amct.printable import counted

if TYPE_CHECKING:
    from collections.abc import Collection

    from amct.config.layers import LayerInfo


@takes_own_layers
def inspect(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    input_shape: ShapeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the layers of a model, which of them can be quantized, and why not.

    Example: amct inspect deploy.prototxt

    Example: amct inspect net.onnx
    """
    from amct.cli.model_layers import model_layers

    dialect, layers = model_layers(model, input_shape)
    rows = [{"layer": layer.name, "type": layer.type, "verdict": _verdict(layer, dialect.value)} for layer in layers]
    if is_prototxt(model):
        from amct.caffe.prototxt import unbuildable_layer

        name, reason = unbuildable_layer(model) or (None, "")
        for row in rows:
            if row["layer"] == name:
                row["verdict"] = f"cannot be built: {reason}"
    if as_json:
        show_json(rows)
        return
    for line in aligned([list(row.values()) for row in rows]):
        show(line)
    names = {layer.name for layer in layers}
    computing = [row for layer, row in zip(layers, rows, strict=True) if _counts(layer, row["verdict"], names)]
    done = sum(row["verdict"] == "quantized" for row in computing)
    show(f"{done} of {counted(len(computing), 'layer')} quantized by default")


_NO_LAYERS = frozenset(
    {"Dropout", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unflatten", "Unsqueeze"}  # only arrange
    | {"Input", "Data", "ImageData", "HDF5Data", "MemoryData", "WindowData", "DummyData", "AnnotatedData"}  # give data
    | {"Split", "Silence", "BatchNorm"}  # pass on, or fold (of Caffe)
)
"""Types that compute nothing of their own."""


def _counts(layer: LayerInfo, verdict: str, names: Collection[str]) -> bool:
    """Whether a module computes something: it is no container, does not only arrange values, and is not folded."""
    is_container = any(name.startswith(f"{layer.name}.") for name in names)
    return not (is_container or layer.type in _NO_LAYERS or verdict.startswith("folded"))


def _verdict(layer: LayerInfo, dialect: str) -> str:
    from amct.config.layers import CAFFE_TYPES, PTQ_TYPES

    if layer.refusal:
        return f"stays float: {layer.refusal}"
    if dialect == "pytorch" and layer.type.startswith("BatchNorm"):
        return "folded into the layer before it, if only this one reads that layer"
    if dialect == "pytorch":
        return "quantized" if layer.type in PTQ_TYPES else "stays float: this type cannot be quantized"
    if layer.type not in CAFFE_TYPES:
        return _unquantized(layer.type)
    if not CAFFE_TYPES[layer.type].on_by_default:
        return "off by default: switch it on with quant_enable"
    return "quantized"


def _unquantized(caffe_type: str) -> str:
    """What happens to a Caffe layer whose type is not in the table of quantizable types."""
    from amct.caffe.engine.layer import find_layer_class

    if find_layer_class(caffe_type) is None:
        return "cannot be built: unknown layer type; register it (amct.extend.register_caffe_layer, --import)"
    if caffe_type == "Python":
        return "stays float: this type cannot be quantized; it executes code, and runs only with --allow-python"
    return "stays float: this type cannot be quantized"
