"""``amct report``: write an HTML report of a quantized model from its files."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads it at run time
from typing import Annotated

import typer

from amct.cli import printing
from amct.cli.comparison import Models, Request, Top1
from amct.cli.data_options import DataOptions, takes_data
from amct.cli.model_layers import CustomProtoOption  # noqa: TC001 - typer reads it at run time


@takes_data
def report(
    models: Models,
    *,
    output: Annotated[Path, typer.Option("--output", "-o", help="The HTML file.")],
    data: DataOptions,
    top1: Top1 = False,
    custom_proto: CustomProtoOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was measured as JSON.")] = False,
) -> None:
    """Write a report of a quantized model: one HTML file that opens offline, with what each layer lost, and why.

    QUANT is what amct quantize was given with -o, or one of the files that it wrote; factors, folded layers and reasons
    come from the files beside it. The data may be other data than that of the calibration: the data options are those
    of amct quantize, which itself writes this report of its calibration data with --report.

    Example: amct report deploy.prototxt net.caffemodel out/net --data images/ --size 227 -o report.html

    Example: amct report net.onnx out/net --data test.npz --top1 -o report.html
    """
    result = Request(models=models, data=data, report=output, top1=top1, custom_proto=custom_proto).run()
    if as_json:
        printing.show_json(result)
    else:
        printing.show(f"wrote {output}")
