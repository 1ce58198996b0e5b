"""``amct compare``: compare the outputs and layers of a float model and its quantized model."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads it at run time
from typing import Annotated, Any

import typer

from amct import log
from amct.cli.comparison import Models, Request, Top1
from amct.cli.data_options import DataOptions, takes_data
from amct.cli.model_layers import CustomProtoOption  # noqa: TC001 - typer reads it at run time
from amct.cli.printing import aligned, decibel, most_harmed, show, show_json
from amct.verbosity import few_lines

WORST_SHOWN = 10


@takes_data
def compare(
    models: Models,
    *,
    data: DataOptions,
    top1: Top1 = False,
    worst: Annotated[int, typer.Option(help="How many of the most harmed layers are shown.", min=0)] = WORST_SHOWN,
    report: Annotated[Path | None, typer.Option(help="Also write an HTML report to this file.")] = None,
    custom_proto: CustomProtoOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for other programs, with all layers.")] = False,
) -> None:
    """Compare a float model with its quantized one on data: outputs, and the most harmed layers.

    QUANT is what amct quantize was given with -o, or one of the files that it wrote. The data options are those of
    amct quantize. For PyTorch and ONNX models the quantized file runs in onnxruntime, for Caffe models the fake-quant
    or deploy pair in our own engine.

    Example: amct compare deploy.prototxt net.caffemodel out/net --data images/ --size 227 --mean 104,117,123

    Example: amct compare net.onnx out/net_qdq_model.onnx --data test.npz --top1

    Example: amct compare package.module:factory out/net --data images.npy --report report.html
    """
    with few_lines(), log.screen_only():  # warnings by the rules of every command, whatever ran before in this process
        result = Request(models=models, data=data, report=report, top1=top1, custom_proto=custom_proto).run()
    if as_json:
        show_json(result)
    else:
        show(_as_text(result, worst))


def _as_text(result: dict[str, Any], count: int) -> str:
    lines = [f"float      {' '.join(result['float'])}", f"quantized  {' '.join(result['quantized'])}"]
    lines.append(f"data       {result['batches']} batch{'es' if result['batches'] > 1 else ''}")
    if "top1" in result:
        lines.append(f"top-1      {result['top1']['float']:.2%} in float, {result['top1']['quantized']:.2%} quantized")
    header = ("output", "SQNR", "cosine")
    if result["outputs"]:
        lines += ["", *aligned([header, *(_cells(row, "output") for row in result["outputs"])])]
    else:
        lines += ["", "no outputs were compared: they have no common shape"]
    worst = most_harmed(result["layers"], count)
    if worst:
        header = ("layer", "SQNR", "cosine")
        lines += ["", f"most harmed of {len(result['layers'])} layers"]
        lines += aligned([header, *(_cells(row, "layer") for row in worst)])
    elif not result["layers"]:
        lines += ["", "no layers were compared: the two files have no layer under the same name"]
    if "report" in result:
        lines += ["", f"wrote {result['report']}"]
    return "\n".join(lines)


def _cells(row: dict[str, Any], name: str) -> tuple[str, str, str]:
    return row[name], decibel(row["sqnr"]), f"{row['cosine']:.5f}"
