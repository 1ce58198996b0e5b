"""``amct quantize`` quantizes a model; ``amct sensitivity`` shows which layers cause the error of the result."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from amct.cli.front_door import front_door
from amct.cli.model_layers import ONNX_ENDING, check_reference
from amct.cli.model_pair import check_file
from amct.cli.options import MODEL_HELP, DataOptions, JsonOption, Learning, takes_data, takes_learning
from amct.cli.own_layers import OwnLayers, takes_own_layers
from amct.cli.printing import aligned, comparison_row, decibel, most_harmed, short_name, show, show_json
from amct.cli.processes import processes, ranks_here
from amct.cli.search import GoalOptions, curve_lines, search_settings, takes_goal
from amct.errors import ArgumentError
from amct.log import few_lines
from amct.model.verdict import LEVELS, NOT_JUDGED
from amct.printable import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from amct.cli.front_door import FrontDoor
    from amct.export.request import SavePath
    from amct.model.quant_json import QuantJson
    from amct.model.verdict import Level
    from amct.numerics.similarity import LayerComparison
    from amct.pipeline.batches import FirstBatches
    from amct.pipeline.flow import CalibrationFile
    from amct.pipeline.quantized_model import QuantizedModel

WORST_SHOWN = 3
NAMES_SHOWN = 6
FAILED = 3
"""The exit code of a verdict that ``--fail-on`` does not accept."""


@takes_own_layers
@takes_learning
@takes_goal
@takes_data
def quantize(  # noqa: PLR0913  the options of a command
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    weights: Annotated[Path | None, typer.Argument(help="The caffemodel of a prototxt.")] = None,
    *,
    output: Annotated[
        str, typer.Option("--output", "-o", help='Where the files go: folder/prefix, or "folder/" without a prefix.')
    ],
    config: Annotated[
        Path | None,
        typer.Option(help="An AMCT config, simple (.cfg) or full (.json); every layer by its defaults unless given."),
    ] = None,
    data: DataOptions,
    equalize: Annotated[
        bool, typer.Option("--equalize", help="First make channels equal in size; 8 bits lose less then.")
    ] = False,
    report: Annotated[
        bool, typer.Option("--report", help="Also write OUTPUT_report.html: what each layer lost.")
    ] = False,
    formats: Annotated[
        str | None, typer.Option(help='Which files, such as "qdq,record"; all that the model can have unless given.')
    ] = None,
    own: OwnLayers,
    part: Annotated[
        str | None,
        typer.Option(
            help='Of a Python reference: quantize and write only this module of the model, such as "backbone"; the '
            "whole model unless given."
        ),
    ] = None,
    placement: Annotated[
        str,
        typer.Option(
            help='Of the QDQ file: "fast" also quantizes tensors between layers, "exact" only what the record says, '
            '"auto" times both and float for each part of the model.'
        ),
    ] = "fast",
    target: Annotated[
        str,
        typer.Option(
            help='Of the QDQ file: "portable" is right on every CPU, "vnni" for those with VNNI, "exact8" has the '
            "record's own integers."
        ),
    ] = "portable",
    opset: Annotated[
        int | None, typer.Option(help="Of the ONNX files, 16 to 21; that of the ONNX model, else 18, unless given.")
    ] = None,
    fixed_batch_size: Annotated[
        int | None,
        typer.Option(
            help="The only batch size that the ONNX files take; any that the model can take unless given.", min=1
        ),
    ] = None,
    no_check: Annotated[
        bool, typer.Option("--no-check", help="Do not run the written files and compare them with the float model.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a calibration that was killed: OUTPUT.calibration.npz.")
    ] = False,
    fail_on: Annotated[
        str | None,
        typer.Option(
            help="End with exit code 3 if the verdict is this or worse: acceptable, poor or broken; never unless given."
        ),
    ] = None,
    learning: Learning,
    goal: GoalOptions,
    as_json: JsonOption = False,
) -> None:
    """Quantize a model with some calibration data.

    Example: amct quantize deploy.prototxt net.caffemodel --data images/ --size 227 --mean 104,117,123 -o out/net

    Example: amct quantize net.onnx --data images.npy --batch-size 8 --config quant.cfg -o out/net

    Example: amct quantize net.onnx --data images/ --labels labels.tsv --max-drop 0.5 -o out/net
    """
    files = _Files(_prefix(output), report, formats, placement, target, opset, fixed_batch_size, run_files=not no_check)
    with few_lines():
        own.refuse_unless_caffe(weights is not None)
        _check_options(model, weights, config, part)
        learning.check(has_modes=not _is_onnx(model, weights) and not goal.is_given)
        _check_level(fail_on, run_files=files.run_files)
        goal.check()
        files.check()
        data.check()
        state = files.calibration(resume=resume)
        with processes() as prints, _telling_of(state):
            if goal.is_given:
                where, save = files.where, files.save_unchecked
                quantized, batches = search_settings(
                    model, weights, data, config, goal, where, save, resume=resume, equalize=equalize, part=part
                )
            else:
                door = front_door(model, weights, data, part=part)
                options = learning.arguments()
                quantized, batches = _quantized(door, config, files, state, equalize=equalize, **options)
            ranks = ranks_here()
        if prints:
            result = _result(quantized, batches, files)
        state.remove(ranks)
        if not prints:
            return
    verdict = quantized.verdict if files.run_files else None
    if as_json:
        show_json({**result, "verdict": None if verdict is None else asdict(verdict)})
    else:
        show(_as_text(result))
        verdicts = [f"verdict     {verdict or NOT_JUDGED}"] if files.run_files else []
        for line in (*curve_lines(quantized), *verdicts):
            show(line)
    if fail_on is not None and (verdict is None or verdict.is_at_best(cast("Level", fail_on))):
        raise typer.Exit(FAILED)


def _check_options(model: str, weights: Path | None, config: Path | None, part: str | None) -> None:
    if part is not None and not _is_torch(model, weights):
        raise ArgumentError("--part is for PyTorch models, a Python reference to a factory; leave it out")
    _check_model(model, weights)
    if config is not None:
        check_file(str(config))


def _is_torch(model: str, weights: Path | None) -> bool:
    return weights is None and not model.endswith(ONNX_ENDING)


def _is_onnx(model: str, weights: Path | None) -> bool:
    return weights is None and model.endswith(ONNX_ENDING)


def _prefix(output: str) -> str:
    """The prefix that ``--output`` means; of the name of an ONNX file, what stands before its ending."""
    if not output.endswith(ONNX_ENDING) or Path(output).name == ONNX_ENDING:
        return output
    prefix = output.removesuffix(ONNX_ENDING)
    show(f"output      {prefix}_qdq_model.onnx and so on: there are several files, and -o is their prefix", err=True)
    return prefix


@contextmanager
def _telling_of(state: CalibrationFile) -> Iterator[None]:
    """On Ctrl-C, tell what is left of a calibration and how to go on with it."""
    try:
        yield
    except KeyboardInterrupt:
        left = state.of_process(ranks_here())
        if left.is_file():
            show(f"{left} has the calibration so far; the same command with --resume goes on with it", err=True)
        raise


def _check_level(fail_on: str | None, *, run_files: bool) -> None:
    if fail_on is None:
        return
    if fail_on not in LEVELS[1:]:
        raise ArgumentError(f"--fail-on: expected {', '.join(LEVELS[1:])}, got {fail_on!r}")
    if not run_files:
        raise ArgumentError("--fail-on: with --no-check there is no verdict; leave one of them out")


def _check_model(model: str, weights: Path | None) -> None:
    """Check that the model's files exist; without importing torch, so that a wrong name is answered at once."""
    if weights is not None:
        check_file(model)
        check_file(str(weights))
    elif model.endswith(ONNX_ENDING):
        check_file(model)
    elif ":" in model:
        check_reference(model)
    else:
        raise ArgumentError(
            'expected a prototxt and a caffemodel, an .onnx file, or a Python reference "package.module:factory", '
            f'got only "{model}"'
        )


@dataclass(frozen=True)
class _Files:
    """The files to write: prefix, whether there is a report, what ``save`` takes, and whether they are run."""

    output: str
    report: bool
    formats: str | None
    placement: str
    target: str
    opset: int | None
    batch_size: int | None
    run_files: bool

    def check(self) -> None:
        """Check the output folder, the report and what ``save`` takes before quantization starts."""
        from amct.arguments import output_file
        from amct.export.request import ExportOptions, SaveRequest

        options = ExportOptions(placement=self.placement, target=self.target)
        SaveRequest.checked(self.output, self._names(), options=options, opset=self.opset)
        if self.page is not None:
            output_file(self.page, "--report")

    @property
    def where(self) -> SavePath:
        """Folder and prefix."""
        from amct.export.request import SavePath

        return SavePath.parse(self.output)

    def _names(self) -> tuple[str, ...]:
        return () if self.formats is None else tuple(name.strip() for name in self.formats.split(","))

    def calibration(self, *, resume: bool) -> CalibrationFile:
        """Return where the state of a calibration that is killed is kept; it is removed when all is written."""
        from amct.pipeline.flow import CalibrationFile

        name = f"{self.where.prefix}.calibration.npz".removeprefix(".")
        return CalibrationFile(path=self.where.folder / name, read=resume, removed_by_caller=True)

    def check_sizes(self, data: DataOptions, batches: Iterable[Any], declared: Mapping[str, tuple[int, ...]]) -> None:
        """Check that the first batch has the sizes that the prototxt declares, as the QDQ file takes no others.

        Raises:
            ArgumentError: It has others.
        """
        if not declared or (self.formats is not None and "qdq" not in self._names()):
            return
        first: Any = next(iter(batches), {})
        arrays = first if isinstance(first, dict) else dict.fromkeys(declared, first)
        for name, shape in declared.items():
            given = arrays[name].shape[1:] if name in arrays else shape[1:]
            if shape and given != shape[1:]:
                raise ArgumentError(
                    f'{data.data}: a sample would be {list(given)}, but the model\'s input "{name}" is '
                    f"{list(shape[1:])}, and the QDQ file takes only that. Change --size, --crop and --color, or the "
                    "prototxt, or write other --formats"
                )

    def save_unchecked(self, quantized: QuantizedModel) -> None:
        """Write a model that may not be the last word."""
        from amct.export.request import DEFAULT_FORMATS

        quantized.save(self.output, self._names() or DEFAULT_FORMATS, check=False)

    def fitting(self, batches: Sequence[Any]) -> Sequence[Any]:
        """The batches as the files take them."""
        from amct.export.check.batch import of_size

        return batches if self.batch_size is None else list(of_size(batches, self.batch_size))

    @property
    def page(self) -> Path | None:
        """The report to write; None: none."""
        return self.where.file("report.html") if self.report else None

    def save(self, quantized: QuantizedModel) -> list[Path]:
        """Write the model; return the paths. A report of replaced files is removed."""
        from amct.export.request import DEFAULT_FORMATS
        from amct.report.page import is_report

        names = self._names() or DEFAULT_FORMATS
        options: dict[str, Any] = {"placement": self.placement, "target": self.target, "opset": self.opset}
        options["batch_size"] = self.batch_size
        files = quantized.save(self.output, names, check=self.run_files, **options)
        old = self.where.file("report.html")
        if not self.report and is_report(old):
            old.unlink()
            show(f"removed     {old}, which belonged to the files before; --report writes a new one", err=True)
        return files


def _quantized(
    door: FrontDoor,
    config: Path | None,
    files: _Files | None = None,
    state: CalibrationFile | None = None,
    **options: Any,  # noqa: ANN401  those of the door's quantize
) -> tuple[QuantizedModel, FirstBatches]:
    """Quantize a model; return it with its calibration batches."""
    from amct.pipeline.batches import FirstBatches

    batches = FirstBatches(door.batches())
    if files is not None:
        files.check_sizes(door.data, batches, door.shapes)
    return door.quantize(batches, config=config, resume=state, **options), batches


def _result(quantized: QuantizedModel, data: FirstBatches, files: _Files) -> dict[str, Any]:
    from amct.model.quant_json import documents_among

    batches = data.first()
    written = files.save(quantized)
    measured_on, layers, outputs = _measured(quantized, files.fitting(batches), written, files.page)
    documents = documents_among(written)
    return {
        "calibrated": str(quantized.calibration),
        "measured_batches": [len(batches), len(data)],
        "quantized": list(quantized.layers),
        "left_float": {skip.layer: skip.reason for skip in quantized.skipped},
        "measured": measured_on,
        "outputs": [comparison_row(output, "output") for output in outputs],
        "layers": [comparison_row(layer) for layer in layers],
        "files": [str(path) for path in (*written, files.page) if path is not None],
        "checks": _checks(documents),
        "would_help": [text for document in documents.values() for text in document.proposals],
    }


def _checks(documents: Mapping[Path, QuantJson]) -> dict[str, dict[str, Any]]:
    """What ``save`` measured on the files that it ran, by path, with its text for people."""
    found = {}
    for path, document in documents.items():
        for name, entry in document.files.items():
            if entry.check is not None:
                text = f"{entry.check.text()}{entry.check.batch and f' ({entry.check.batch})'}"
                found[str(path.with_name(name))] = {"text": text, **asdict(entry.check)}
    return found


def _measured(
    quantized: QuantizedModel, batches: Iterable[Any], written: list[Path], page: Path | None
) -> tuple[str, Iterable[LayerComparison], Iterable[LayerComparison]]:
    """Compare the file that counts, or without one the simulation, with the float model: its name, layers and outputs.

    A report is written of the same runs, or of the simulation's layers if the QDQ file does not show all of them.
    """
    file = quantized.file_to_measure(written)
    found = quantized.measure_file(batches, written, page)
    if found is not None:
        return str(file), found.layers.values(), found.outputs
    if page is not None:
        quantized.report(page, batches, files=written)
    if file is None:
        return "simulation", quantized.compare(batches), ()
    return _measured_by_name(quantized, batches, written, file)


def _measured_by_name(
    quantized: QuantizedModel, batches: Iterable[Any], written: list[Path], file: Path
) -> tuple[str, Iterable[LayerComparison], Iterable[LayerComparison]]:
    """Compare the QDQ file with the float ONNX model where tensors have the same names in both."""
    from amct.export.onnx.kept_weights import with_values
    from amct.model.quant_json import QUANT_JSON, add_measurement
    from amct.onnx_model import measure

    measured = measure(with_values(quantized.prepared.float_model(None)), file, batches)
    for document in (path for path in written if path.name.endswith(QUANT_JSON)):
        add_measurement(document, measured.as_measurement(file.name), None)
    return str(file), measured.layers.values(), measured.outputs


def _as_text(result: dict[str, Any]) -> str:
    worst = most_harmed(result["layers"], WORST_SHOWN)
    left = len(result["left_float"])
    lines = [
        f"calibrated  on {result['calibrated']}",
        f"quantized   {counted(len(result['quantized']), 'layer')}; {left} left as they are{':' if left else ''}",
    ]
    lines += [f"              {reason}: {_some(names)}" for reason, names in _by_reason(result["left_float"])]
    if worst:
        lines += [
            "most harmed " + ", ".join(f"{short_name(row['layer'])} (SQNR {row['sqnr']:.1f} dB)" for row in worst)
        ]
        lines += [f"              measured on {_data_name(result)}, of {_measured_name(result['measured'])}"]
    lines += [f"wrote       {path}" for path in result["files"]]
    lines += [f"{path}  {check['text']}" for path, check in result["checks"].items()]
    lines += [f"would help  {text}" for text in result["would_help"]]
    return "\n".join(lines)


def _data_name(result: dict[str, Any]) -> str:
    used, total = result["measured_batches"]
    return "the calibration data" if used >= total else f"the first {used} of {total} batches of the calibration data"


def _measured_name(measured: str) -> str:
    return "the simulation" if measured == "simulation" else Path(measured).name


def _some(names: list[str]) -> str:
    """Format the first few names; the JSON output, quant.json and the report have all of them."""
    more = len(names) - NAMES_SHOWN
    return ", ".join(map(short_name, names[:NAMES_SHOWN])) + (f" and {more} more" if more > 0 else "")


def _by_reason(left_float: dict[str, str]) -> list[tuple[str, list[str]]]:
    """Group the names of layers by reason."""
    groups: dict[str, list[str]] = {}
    for name, reason in left_float.items():
        groups.setdefault(reason, []).append(name)
    return list(groups.items())


@takes_own_layers
@takes_data
def sensitivity(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    weights: Annotated[Path | None, typer.Argument(help="The caffemodel of a prototxt.")] = None,
    *,
    config: Annotated[Path | None, typer.Option(help="An AMCT config, simple (.cfg) or full (.json).")] = None,
    data: DataOptions,
    own: OwnLayers,
    as_json: JsonOption = False,
) -> None:
    """Show which layers cause the error of a quantized model: each layer is quantized alone; no file is written.

    Example: amct sensitivity net.onnx --data images.npy --config quant.cfg
    """
    with few_lines():
        _check_model(model, weights)
        if config is not None:
            check_file(str(config))
        data.check()
        own.refuse_unless_caffe(weights is not None)
        found = _quantized(front_door(model, weights, data), config)[0].sensitivity()
    rows = [asdict(each) for each in found]
    if as_json:
        show_json(rows)
        return
    show("error of the model's output when only one layer is quantized, the largest first")
    table = [[each.layer, decibel(each.sqnr), f"{each.share:.1%}"] for each in found]
    for line in aligned([["layer", "SQNR", "of the noise"], *table]):
        show(line)
