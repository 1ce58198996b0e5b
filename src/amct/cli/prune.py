"""``amct prune`` removes channels of a PyTorch model, or gives it 2:4 sparsity."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from amct.cli.batches import DataBatches
from amct.cli.model_layers import example_input, load_reference
from amct.cli.options import DataOptions, JsonOption, takes_data
from amct.cli.printing import show, show_json
from amct.errors import ArgumentError
from amct.log import few_lines

if TYPE_CHECKING:
    from torch import Tensor

    from amct.pytorch import PrunedModel

ONE_SAMPLE = 1
"""The batch size of data where none is given."""


@partial(takes_data, optional=True)
def prune(  # noqa: PLR0913  the options of a command
    model: Annotated[str, typer.Argument(help='A Python reference "package.module:factory".')],
    *,
    input_shape: Annotated[str, typer.Option("--input-shape", help="Of an example input, such as 1,3,224,224.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the files go: folder/prefix.")],
    ratio: Annotated[float | None, typer.Option(help="The fraction of channels to remove; 0.3 unless given.")] = None,
    flops: Annotated[
        float | None, typer.Option(help="Instead: the fraction of operations that may be left; no limit unless given.")
    ] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Choose how many channels each layer keeps; needs data and a budget.")
    ] = False,
    latency: Annotated[
        float | None,
        typer.Option(
            help="With --search: the fraction of the time in onnxruntime that may be left; no limit unless given."
        ),
    ] = None,
    params: Annotated[
        float | None, typer.Option(help="With --search: the fraction of parameters; no limit unless given.")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="With --search: a file that an interrupted search goes on from; none unless given."),
    ] = None,
    align: Annotated[int, typer.Option(help="Each layer keeps a multiple of so many channels.")] = 8,
    reach: Annotated[str, typer.Option(help='"full", or "amct": as far as AMCT prunes.')] = "full",
    config: Annotated[
        Path | None,
        typer.Option(help="Instead: a simple config (.cfg) with prune_config; one ratio for all layers unless given."),
    ] = None,
    data: DataOptions | None,
    sparse: Annotated[bool, typer.Option("--sparse", help="2:4 sparsity instead of removing channels.")] = False,
    report: Annotated[bool, typer.Option("--report", help="Also write OUTPUT_report.html.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Prune a PyTorch model, and write it as ONNX with its record and its state.

    With data, channels are chosen that can be done without, and weights and batch norms are fitted to what is left.

    Example: amct prune mynets:resnet --input-shape 1,3,224,224 --ratio 0.3 -o out/resnet

    Example: amct prune mynets:resnet --input-shape 8,3,224,224 --data images/ --mean 124,117,104 -o out/resnet

    Example: amct prune mynets:resnet --input-shape 32,3,224,224 --data images/ --search --flops 0.5 -o out/resnet
    """
    from amct.arguments import output_file
    from amct.atomic import check_writable

    page = output.with_name(f"{output.name}_report.html")
    with few_lines():
        check_writable(output.parent)
        if report:
            output_file(page, "--report")
        if data is not None:
            data.check()
        settings = {"ratio": ratio, "flops": flops, "align": align, "reach": reach, "config": config}
        budget = {"latency": latency, "params": params, "resume": resume}
        if search:
            result = _searched(model, input_shape, data, settings | budget, sparse=sparse)
        else:
            _refuse(budget, "only with --search")
            result = _result(model, input_shape, data, settings, sparse=sparse)
        files = result.save(output)
        if report:
            files = [*files, result.report(page, files=files)]
    if as_json:
        show_json(_as_json(result, files))
    else:
        show("\n".join([result.summary(), *(f"wrote  {file}" for file in files)]))


def _result(
    reference: str, input_shape: str, data: DataOptions | None, settings: dict[str, Any], *, sparse: bool
) -> PrunedModel:
    import amct.pytorch

    model, example = load_reference(reference), example_input(input_shape)
    if sparse:
        if settings["ratio"] is not None or settings["flops"] is not None or data is not None:
            raise ArgumentError("--sparse keeps two of every four weights: leave --ratio, --flops and --data out")
        return amct.pytorch.sparsify(model, example, config=settings["config"])
    batches = None if data is None else _batches(data, example)
    return amct.pytorch.prune(model, example, batches=batches, **settings)


def _searched(
    reference: str, input_shape: str, data: DataOptions | None, settings: dict[str, Any], *, sparse: bool
) -> PrunedModel:
    import amct.pytorch

    if data is None:
        raise ArgumentError("--search measures what is lost: give --data")
    _refuse(
        {name: settings.pop(name) for name in ("ratio", "config")} | {"sparse": sparse or None}, "not with --search"
    )
    if settings.pop("reach") != "full":
        raise ArgumentError(
            "--search follows channels as far as it can: leave --reach out; OUTPUT_prune.cfg is for AMCT"
        )
    model, example = load_reference(reference), example_input(input_shape)
    return amct.pytorch.prune_to(model, _batches(data, example), example=example[:1], **settings)


def _refuse(given: dict[str, Any], why: str) -> None:
    """Refuse options that do not go together."""
    found = next((name for name, value in given.items() if value is not None), None)
    if found is not None:
        raise ArgumentError(f"--{found}: {why}")


def _batches(data: DataOptions, example: Tensor) -> DataBatches:
    """The data in batches like the example input, unless another size is given."""
    import torch

    fitted = data.fitting(example.shape)
    if fitted.batch_size == ONE_SAMPLE:
        fitted = replace(fitted, batch_size=len(example))
    first = next(iter(fitted), None)
    if first is None or first.ndim != example.ndim:
        shape = "no samples" if first is None else f"samples of shape {list(first.shape[1:])}"
        raise ArgumentError(f"{data.data}: {shape}, expected inputs such as {list(example.shape)}")
    return DataBatches.converted(fitted.stored(), torch.from_numpy)


def _as_json(result: PrunedModel, files: list[Path]) -> dict[str, Any]:
    return {
        "channels": {name: list(pair) for name, pair in result.channels.items()},
        "left_as_they_are": {skip.layer: skip.reason for skip in result.skipped},
        "parameters": [result.before.parameters, result.after.parameters],
        "macs": [result.before.macs, result.after.macs],
        **_ladder(result),
        "files": [str(file) for file in files],
    }


def _ladder(result: PrunedModel) -> dict[str, Any]:
    from amct.pytorch import BudgetedModel

    if not isinstance(result, BudgetedModel):
        return {}
    return {"ladder": [{"share": rung.share, "lost": rung.lost, "macs": rung.cost.macs} for rung in result.ladder]}
