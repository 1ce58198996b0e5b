"""``amct compare`` and ``amct report``: run a float model and its quantized model on data, and show what was lost."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from amct import log
from amct.cli.batches import full_batches, named_batches
from amct.cli.model_pair import ModelKind, ModelPair, check_file, parse_models
from amct.cli.options import DataOptions, Models, Top1, takes_data
from amct.cli.own_layers import takes_own_layers
from amct.cli.printing import aligned, comparison_row, decibel, most_harmed, show, show_json
from amct.errors import ArgumentError, CalibrationError
from amct.log import few_lines
from amct.printable import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from onnx import ModelProto

    from amct.onnx_model.reading import AnyModel
    from amct.report.content import ReportContent
    from amct.report.measuring import Measured

    _Found = tuple[Measured, ReportContent | None]
    Batch = tuple[NDArray[np.float32], NDArray[np.int64]]


MISSING = -1
"""The label of a sample that has none."""
PARTED = 40.0
"""SQNR of a tensor in two runtimes below which more differs than the rounding of ties: 8 bits keep about as much."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The arguments of a comparison.

    Attributes:
        models: The command-line arguments FLOAT and QUANT.
        data: The data options.
        report: The HTML report to write; None: no report.
        top1: Whether to measure the top-1 accuracy.
        boxes: Whether outputs in the form of boxes are compared as boxes also where their number is fixed.
        runtime: What runs the quantized file; None: onnxruntime.
    """

    models: list[str]
    data: DataOptions
    report: Path | None = None
    top1: bool = False
    boxes: bool = False
    runtime: str | None = None

    def run(self) -> dict[str, Any]:
        """Compare the models, write the report if requested, and return the results as plain data.

        Raises:
            AmctError: The arguments, files, models or data are invalid.
        """
        from amct import atomic

        one_file = self.runtime is not None and len(self.models) == 1
        pair = parse_models(self.models * 2 if one_file else self.models)
        self._check_runtime(pair, one_file=one_file)
        if self.report is not None:
            check_report(self.report)
            atomic.check_writable(self.report.parent)
        self.data.check()
        if one_file:
            return self._result(pair, _between_runtimes(pair, self, self.runtime or ""))
        measured, content = _RUNS[pair.kind](pair, self)
        if self.boxes:
            measured, content = _as_boxes(measured, content)
        if self.report is not None:
            from amct.report.page import write_page

            assert content is not None
            write_page(self.report, content)
        return self._result(pair, measured)

    def _check_runtime(self, pair: ModelPair, *, one_file: bool) -> None:
        """Check the runtime before any data is read."""
        if self.runtime is None:
            return
        from amct.export.onnx.runtimes import check_runtime

        check_runtime(self.runtime)
        if pair.kind is ModelKind.CAFFE:
            raise ArgumentError(
                "--runtime: Caffe models run in our own engine; give their ONNX files (amct caffe to-onnx)"
            )
        given = [f"--{name}" for name in ("report", "top1", "boxes") if getattr(self, name)]
        if one_file and given:
            raise ArgumentError(f"{given[0]}: it needs a float model; give FLOAT and QUANT with --runtime")

    def batches(self, fixed_size: int | None = None) -> Iterator[Batch]:
        """Yield values and labels; with ``fixed_size``, the fixed batch size of a model, only full batches.

        Raises:
            ArgumentError: ``top1`` is set and a sample has no label.
            CalibrationError: There are fewer samples than ``fixed_size``.
        """
        import numpy as np

        options = self.data if fixed_size is None else replace(self.data, batch_size=fixed_size)
        for values, labels in full_batches(options.labelled(), fixed_size, self.data.data):
            if self.top1 and None in labels:
                raise ArgumentError(
                    f"--top1: {self.data.data} has samples without a label; give folders named by class, a list with "
                    "labels, an .npz with labels, an LMDB or idx files"
                )
            yield values, np.array([MISSING if label is None else label for label in labels], np.int64)

    def fitting(self, model_input: Sequence[int | str | None], pair: ModelPair) -> Request:
        """Return the request with pictures in the size and the channels of the model's input, where not given."""
        data = self.data.fitting(model_input, "bgr" if pair.kind is ModelKind.CAFFE else "rgb")
        data.warn_of_other_preparation(pair.quantized_model[0])
        return replace(self, data=data)

    def data_for(
        self, pair: ModelPair, shapes: Mapping[str, Sequence[int | str | None]], *, plain: bool, size: int | None = None
    ) -> Iterable[Any]:
        """Batches for a model: of one plain input with labels, else arrays by the names of the inputs.

        Args:
            pair: The models.
            shapes: Of the inputs.
            plain: Whether the only input takes all kinds of data.
            size: The fixed batch size of the model that is run.

        Raises:
            ArgumentError: ``top1`` is set, and the data has no labels.
        """
        if plain:
            return self.fitting(next(iter(shapes.values()), ()), pair).batches(size)
        if self.top1:
            raise ArgumentError("--top1: a model with several inputs, or with whole numbers, has no labels beside them")
        return named_batches(list(shapes), self.data, size)

    @property
    def metric(self) -> Any:  # noqa: ANN401  a Metric, whose module needs torch
        """The top-1 accuracy if ``--top1`` is given, otherwise None."""
        return top1 if self.top1 else None

    def _result(self, pair: ModelPair, measured: Measured) -> dict[str, Any]:
        result: dict[str, Any] = {
            "float": list(pair.float_model),
            "quantized": list(pair.quantized_model),
            **self._in_runtime(pair, measured),
            "batches": measured.batches,
            "outputs": [comparison_row(each, "output") for each in measured.outputs],
            "boxes": [{"text": str(each), **asdict(each)} for each in measured.boxes],
            "layers": [comparison_row(each) for each in measured.layers.values()],
        }
        if measured.metric is not None:
            result["top1"] = {"float": measured.metric[0], "quantized": measured.metric[1]}
        if self.report is not None:
            result["report"] = str(self.report)
        return result

    def _in_runtime(self, pair: ModelPair, measured: Measured) -> dict[str, Any]:
        """What a chosen runtime makes of the file, and from which tensor on it computes something else."""
        if self.runtime is None:
            return {}
        from amct.export.onnx.runtimes import count_integer_kernels

        kernels = count_integer_kernels(pair.quantized_model[0], self.runtime)
        found: dict[str, Any] = {"runtime": self.runtime, "integer": kernels.integer, "products": kernels.total}
        if pair.float_model == pair.quantized_model:
            found["parts_at"] = first_parting(measured)
        return found


def first_parting(measured: Measured) -> str | None:
    """The first tensor in which two runtimes differ as much as rounding to 8 bits does."""
    return next((name for name, found in measured.layers.items() if found.sqnr < PARTED), None)


def _as_boxes(measured: Measured, content: ReportContent | None) -> _Found:
    """Outputs in the form of boxes compared as boxes, in the report too."""
    from amct.report.filling import box_figures

    found = measured.as_boxes()
    if content is not None and found.boxes != measured.boxes:
        figures = (*box_figures(found.boxes), *content.figures)
        content = replace(content, verdict=found.verdict(content.outputs_of), figures=figures)
    return found, content


def top1(output: Any, batch: Batch) -> float:  # noqa: ANN401  an array, or a dict of arrays, of which the first is used
    """Return the top-1 accuracy of a batch: the fraction of samples whose largest output is at the label."""
    scores = next(iter(output.values())) if isinstance(output, dict) else output
    labels = batch[1]
    if scores.ndim == 0 or len(scores) != len(labels):
        raise ArgumentError(
            f"--top1: expected scores of {counted(len(labels), 'sample')}, got an output of {list(scores.shape)}"
        )
    return float((scores.reshape(len(labels), -1).argmax(1) == labels).mean())


def _values(batch: Batch | dict[str, NDArray[Any]]) -> NDArray[np.float32] | dict[str, NDArray[Any]]:
    """Return the model inputs of a batch; a dict of arrays by input name has no labels."""
    return batch if isinstance(batch, dict) else batch[0]


def check_report(path: Path) -> None:
    """Check that a report has the name of an HTML file."""
    if path.suffix.lower() not in (".html", ".htm") or path.is_dir():
        raise ArgumentError(f'"{path}": expected the name of an HTML file for the report, such as report.html')


# -- by kind of model --------------------------------------------------------------------------------------------------


def _run_caffe(pair: ModelPair, request: Request) -> _Found:
    from amct.caffe.prototxt import input_shapes

    inputs = input_shapes(pair.float_model[0])
    data = request.data_for(pair, inputs, plain=len(inputs) <= 1)
    metric = request.metric
    if request.report is not None:
        from amct.caffe.reporting import files_report

        found = files_report(
            pair.float_model,
            pair.quantized_model,
            data,
            metric=metric,
            inputs=_values,
        )
        return found.measured, found.content
    from amct.caffe.comparing import both_sides, measure_nets

    sides = both_sides(pair.float_model, pair.quantized_model)
    return measure_nets(*sides, data, metric=metric, inputs=_values), None


def _run_onnx(pair: ModelPair, request: Request) -> _Found:
    from amct.onnx_model.reading import read_model

    (float_model,) = pair.float_model
    proto = read_model(float_model, "FLOAT").model
    size = _fixed_batch_size(pair.quantized_model[0])
    return _run_onnx_files(float_model, pair, request, _data_for_onnx(proto, pair, request, size))


def _data_for_onnx(proto: ModelProto, pair: ModelPair, request: Request, size: int | None) -> Iterable[Any]:
    from amct.cli.batches import is_plain
    from amct.onnx_model.reading import input_shape

    shapes = {value.name: input_shape(proto, value.name) or () for value in proto.graph.input}
    return request.data_for(pair, shapes, plain=is_plain(proto), size=size)


def _run_torch(pair: ModelPair, request: Request) -> _Found:
    from amct.cli.model_layers import load_reference
    from amct.onnx_model.reading import input_shape, read_model
    from amct.pytorch.door import reference_onnx

    (reference,) = pair.float_model
    proto = read_model(pair.quantized_model[0], "QUANT", allow_quantized=True).model
    request = request.fitting(input_shape(proto, proto.graph.input[0].name) or (), pair)
    first = next(request.batches(_fixed_batch_size(pair.quantized_model[0])), None)
    if first is None:
        raise CalibrationError(f"{request.data.data}: there are no samples")
    model = load_reference(reference).eval()
    float_model = reference_onnx(model, first[0])
    return _run_onnx_files(float_model, pair, request, request.batches(len(first[0])), type(model).__name__)


def _run_onnx_files(
    float_model: AnyModel, pair: ModelPair, request: Request, batches: Iterable[Any], name: str | None = None
) -> _Found:
    (quantized,) = pair.quantized_model
    if request.report is None and not request.top1:
        from amct.onnx_model import measure

        return measure(float_model, quantized, batches, inputs=_values, runtime=request.runtime), None
    from amct.onnx_model.file_report import files_report

    files = (*(() if pair.kind is ModelKind.TORCH else pair.float_model), quantized)
    found = files_report(
        float_model,
        quantized,
        batches,
        metric=request.metric,
        inputs=_values,
        files=files,
        name=name,
        runtime=request.runtime,
    )
    return found.measured, found.content


def _between_runtimes(pair: ModelPair, request: Request, runtime: str) -> Measured:
    """One file in a runtime, and in onnxruntime without optimizations."""
    from amct.export.onnx.messages import fixed_batch_size
    from amct.onnx_model.comparing import measure_runtime
    from amct.onnx_model.reading import read_model

    (file,) = pair.quantized_model
    proto = read_model(file, "FILE", allow_quantized=True).model
    batches = _data_for_onnx(proto, pair, request, fixed_batch_size(proto))
    return measure_runtime(file, batches, runtime, inputs=_values)


_RUNS: dict[ModelKind, Any] = {ModelKind.CAFFE: _run_caffe, ModelKind.ONNX: _run_onnx, ModelKind.TORCH: _run_torch}


def _fixed_batch_size(model_file: str) -> int | None:
    """Return the fixed batch size of the quantized model; None if it is dynamic."""
    from amct.export.onnx.messages import fixed_batch_size
    from amct.onnx_model.reading import read_model

    return fixed_batch_size(read_model(model_file, "QUANT", allow_quantized=True).model)


WORST_SHOWN = 10


@takes_own_layers
@takes_data
def compare(  # noqa: PLR0913  one for each option
    models: Models,
    *,
    data: DataOptions,
    top1: Top1 = False,
    boxes: Annotated[
        bool, typer.Option("--boxes", help="A detector: match boxes also where their number is the same in both.")
    ] = False,
    worst: Annotated[int, typer.Option(help="How many of the most harmed layers are shown.", min=0)] = WORST_SHOWN,
    report: Annotated[
        Path | None, typer.Option(help="Also write an HTML report to this file; none unless given.")
    ] = None,
    runtime: Annotated[
        str | None,
        typer.Option(
            help="Run the quantized ONNX file in onnxruntime (the default), onnxruntime-extended, onnxruntime-basic, "
            "onnxruntime-none (fewer optimizations) or openvino. With one FILE: compare what it computes there with "
            "onnxruntime-none."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for other programs, with all layers.")] = False,
) -> None:
    """Compare a float model with its quantized one on data: outputs, and the most harmed layers.

    QUANT is what amct quantize was given with -o, or one of the files that it wrote. The data options are those of
    amct quantize. For PyTorch and ONNX models the quantized file runs in onnxruntime, for Caffe models the fake-quant
    or deploy pair in our own engine.

    Example: amct compare deploy.prototxt net.caffemodel out/net --data images/ --size 227 --mean 104,117,123

    Example: amct compare net.onnx out/net_qdq_model.onnx --data test.npz --top1

    Outputs of a detector have no fixed number of boxes: these are matched, and counted as found again if they overlap
    by half. Known are the rows of Caffe's DetectionOutput and YOLO layers, rows of x1, y1, x2, y2, score, label, and
    boxes beside scores.

    Example: amct compare package.module:factory out/net --data images.npy --report report.html

    Example: amct compare out/net_qdq_model.onnx --runtime openvino --data images.npy
    """
    with few_lines(), log.screen_only():  # warnings by the rules of every command, whatever ran before in this process
        result = Request(models=models, data=data, report=report, top1=top1, boxes=boxes, runtime=runtime).run()
    if as_json:
        show_json(result)
    else:
        show(_as_text(result, worst))


def _as_text(result: dict[str, Any], count: int) -> str:
    between, unit = "parts_at" in result, "tensor" if "parts_at" in result else "layer"
    lines = [f"quantized  {' '.join(result['quantized'])}"]
    lines[:0] = [] if between else [f"float      {' '.join(result['float'])}"]
    lines += _runtime_lines(result) if "runtime" in result else []
    lines.append(f"data       {result['batches']} batch{'es' if result['batches'] > 1 else ''}")
    if "top1" in result:
        lines.append(f"top-1      {result['top1']['float']:.2%} in float, {result['top1']['quantized']:.2%} quantized")
    header = ("output", "SQNR", "cosine")
    if result["outputs"]:
        lines += ["", *aligned([header, *(_cells(row, "output") for row in result["outputs"])])]
    lines += ["", *(f"{found['output']}  {found['text']}" for found in result["boxes"])] if result["boxes"] else []
    if not result["outputs"] and not result["boxes"]:
        lines += ["", "no outputs were compared: they have no common shape"]
    worst = most_harmed(result["layers"], count)
    if worst:
        lines += ["", f"most {'different' if between else 'harmed'} of {counted(len(result['layers']), unit)}"]
        lines += aligned([(unit, "SQNR", "cosine"), *(_cells(row, "layer") for row in worst)])
    elif not result["layers"]:
        lines += ["", "no layers were compared: the two files have no layer under the same name"]
    if "report" in result:
        lines += ["", f"wrote {result['report']}"]
    return "\n".join(lines)


def _runtime_lines(result: dict[str, Any]) -> list[str]:
    """What a runtime makes of the file."""
    lines = [f"runtime    {result['runtime']}"]
    lines += [f"integers   {result['integer']} of {result['products']} convolutions and matrix products"]
    if "parts_at" in result:
        lines[0] += ", compared with onnxruntime-none"
        at = result["parts_at"]
        lines.append(f"parts      {'nowhere' if at is None else f'first at {at}'} ({PARTED:g} dB)")
    return lines


def _cells(row: dict[str, Any], name: str) -> tuple[str, str, str]:
    return row[name], decibel(row["sqnr"]), f"{row['cosine']:.5f}"


@takes_own_layers
@partial(takes_data, optional=True)
def report(
    models: Models,
    *,
    output: Annotated[Path, typer.Option("--output", "-o", help="The HTML file.")],
    data: DataOptions | None,
    top1: Top1 = False,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Compare quantizations: the arguments are two or more quant.json files."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was measured as JSON.")] = False,
) -> None:
    """Write a report of a quantized model: one HTML file that opens offline, with what each layer lost, and why.

    QUANT is what amct quantize was given with -o, or one of the files that it wrote; factors, folded layers and reasons
    come from the files beside it. The data may be other data than that of the calibration: the data options are those
    of amct quantize, which itself writes this report of its calibration data with --report.

    Example: amct report deploy.prototxt net.caffemodel out/net --data images/ --size 227 -o report.html

    Example: amct report net.onnx out/net --data test.npz --top1 -o report.html

    Example: amct report --compare a_quant.json b_quant.json -o diff.html
    """
    if compare:
        _compare(models, output)
        return
    if data is None:
        raise ArgumentError("--data: a report needs data to run the models on, or --compare and quant.json files")
    result = Request(models=models, data=data, report=output, top1=top1).run()
    if as_json:
        show_json(result)
    else:
        show(f"wrote {output}")


def _compare(files: list[str], output: Path) -> None:
    from amct.report.runs import write_runs_page

    for file in files:
        check_file(file)
    check_report(output)
    runs = write_runs_page(output, files)
    if runs.not_judged:
        show(f"not judged: {runs.not_judged}; write both reports on the same data")
    else:
        show(f"layers better in {runs.names[-1]} than in {runs.names[0]}: {runs.gained}; worse: {runs.lost}")
    show(f"wrote {output}")
