"""The options with which ``amct quantize`` searches for settings, and ``amct certificate``."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from amct.cli.batches import DataBatches
from amct.cli.front_door import front_door
from amct.cli.model_layers import check_reference, import_module
from amct.cli.model_pair import check_file
from amct.cli.options import JsonOption, with_options_of
from amct.cli.printing import show, show_json
from amct.errors import ArgumentError, ParseError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from amct.cli.front_door import FrontDoor
    from amct.cli.options import DataOptions
    from amct.export.request import SavePath
    from amct.model.certificate import Certificate
    from amct.pipeline.batches import FirstBatches
    from amct.pipeline.quantized_model import QuantizedModel

CALIBRATION_SHARE = 8
"""One sample of so many calibrates, the others are searched on and certify."""
MOST_CALIBRATION = 256
"""No more samples than this calibrate."""
app = typer.Typer(name="certificate", help="Certificates of models whose settings were searched.", no_args_is_help=True)


@dataclass(frozen=True, kw_only=True)
class GoalOptions:
    """The goal of a search for settings, and what it may take."""

    max_drop: Annotated[
        float | None,
        typer.Option(
            help="Search for the smallest model whose accuracy drops by at most so many points; --data has labels, or "
            "--labels gives them. No search unless given."
        ),
    ] = None
    min_agreement: Annotated[
        float | None,
        typer.Option(
            help="The same without labels: so many percent of the answers stay the same; no search unless given."
        ),
    ] = None
    min_sqnr: Annotated[
        float | None,
        typer.Option(
            help="The same without labels: the first output's SQNR has at least so many dB; no search unless given."
        ),
    ] = None
    labels: Annotated[
        Path | None,
        typer.Option(
            help="A file with the name of a picture, a tab and its class number on each line; "
            "the labels of the data unless given."
        ),
    ] = None
    evaluate: Annotated[
        str | None,
        typer.Option(
            help='With --max-drop: "module:function" that returns the accuracy of a model on its own data; '
            "top-1 unless given."
        ),
    ] = None
    minimize: Annotated[str, typer.Option(help='What is to be small: "size", "latency" or "bitops".')] = "size"
    choices: Annotated[
        str | None,
        typer.Option(
            help='What a layer may become: "float,int8,int4" (default), hfmg8, minmax8, int12, int16, adaround4.'
        ),
    ] = None
    max_minutes: Annotated[
        float | None, typer.Option(help="End the search after so many minutes; no limit unless given.")
    ] = None
    max_evaluations: Annotated[
        float | None, typer.Option(help="End it after so many passes over the data; no limit unless given.")
    ] = None
    seed: Annotated[int, typer.Option(help="Divides the data into calibration, search and certificate.")] = 0
    certify: Annotated[
        bool, typer.Option("--certify", help="Also the bound of the certificate must meet the goal.")
    ] = False
    point: Annotated[
        int | None,
        typer.Option(
            help="Write this point of an earlier search of OUTPUT, without searching again; no point unless given."
        ),
    ] = None

    @property
    def is_given(self) -> bool:
        """Whether settings are searched for, or those of an earlier search are wanted."""
        return self.has_goal or self.point is not None

    @property
    def has_goal(self) -> bool:
        """Whether there is a goal."""
        return not (self.max_drop is self.min_agreement is self.min_sqnr is None)

    def check(self) -> None:
        """Check the options before anything is read.

        Raises:
            ArgumentError: Options do not go together, or a file does not exist.
        """
        if self.point is not None and self.has_goal:
            raise ArgumentError("--point: writes a point of an earlier search; leave out the goal")
        if not self.has_goal:
            for name, given in (("--labels", self.labels), ("--evaluate", self.evaluate)):
                if given is not None:
                    raise ArgumentError(f"{name}: goes with --max-drop; give it, or leave {name} out")
        if self.labels is not None:
            check_file(str(self.labels))
        if self.evaluate is not None:
            if ":" not in self.evaluate:
                raise ArgumentError(f'--evaluate: expected "package.module:function", got "{self.evaluate}"')
            check_reference(self.evaluate)

    def function(self) -> Callable[[Any], Any] | None:
        """The user's function; None: there is none."""
        if self.evaluate is None:
            return None
        module, _, name = self.evaluate.partition(":")
        found = getattr(import_module(module, "--evaluate", self.evaluate), name, None)
        if not callable(found):
            raise ArgumentError(f'--evaluate: "{module}" has no function "{name}"')
        function: Callable[[Any], Any] = found
        return function


def takes_goal(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command: replace its parameter ``goal`` by one option for each field of ``GoalOptions``."""
    return with_options_of(GoalOptions, command, "goal", lambda given, call: call(given))


# -- the data ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Split:
    """The data of a search in memory.

    Attributes:
        calibration: Batches.
        search: Batches of the other samples, with labels where there are any.
    """

    calibration: list[Any]
    search: list[Any]


@dataclass(frozen=True)
class _Stored:
    """All samples: an array, or several by input name; and the label of each."""

    values: NDArray[Any] | dict[str, NDArray[Any]]
    labels: list[int | None]

    def __len__(self) -> int:
        return len(self.labels)

    def at(self, numbers: NDArray[np.int64]) -> NDArray[Any] | dict[str, NDArray[Any]]:
        """Some of them."""
        if isinstance(self.values, dict):
            return {name: array[numbers] for name, array in self.values.items()}
        return self.values[numbers]


def _read(data: DataOptions, labels: Path | None, names: tuple[str, ...]) -> _Stored:
    """All samples."""
    import numpy as np

    if names:
        from amct.cli.batches import named_arrays

        if labels is not None:
            raise ArgumentError("--labels: names pictures; the labels of arrays are an array of the same file")
        arrays, found = named_arrays(names, data)
        count = len(next(iter(arrays.values())))
        return _Stored(arrays, [None] * count if found is None else [int(label) for label in found])
    by_name = None if labels is None else _labels_of(labels)
    used: dict[str, str] = {}
    values: list[NDArray[Any]] = []
    given: list[int | None] = []
    for sample in data.samples():
        label = sample.label
        if by_name is not None:
            parts = Path(sample.name).parts
            ends = ("/".join(parts[first:]) for first in range(len(parts)))
            key = next((end for end in ends if end in by_name), None)
            if key is None:
                raise ArgumentError(f'--labels: {labels} has no label for the picture "{parts[-1]}"')
            if used.setdefault(key, sample.name) != sample.name:
                raise ArgumentError(
                    f'--labels: "{key}" in {labels} is both {used[key]} and {sample.name}; write their folders too'
                )
            label = by_name[key]
        values.append(sample.values)
        given.append(label)
    shapes = {each.shape for each in values}
    if len(shapes) > 1:
        raise ArgumentError(f"{data.data}: the samples have different shapes; give --size and --crop")
    return _Stored(np.stack(values), given)


def _labels_of(path: Path) -> dict[str, int]:
    """By file name, with folders or without as it is written: the class number."""
    from amct.atomic import read_bytes

    found: dict[str, int] = {}
    for number, line in enumerate(read_bytes(path).decode("utf-8-sig", "replace").splitlines(), 1):
        name, _, label = line.strip().rpartition("\t" if "\t" in line else " ")
        if not line.strip():
            continue
        if not name or not label.strip().lstrip("-").isdecimal():
            raise ParseError(f'{path}:{number}: expected a file name, a tab and a class number, got "{line[:80]}"')
        key = Path(name.strip()).as_posix()
        if found.setdefault(key, int(label)) != int(label):
            raise ParseError(f'{path}:{number}: "{key}" has the label {found[key]} before and {int(label)} here')
    return found


def _split(door: FrontDoor, goal: GoalOptions) -> _Split:
    """Divide the samples by the seed."""
    import numpy as np

    data, convert, batch = door.data, door.converted, door.batch_size
    values = _read(data, goal.labels, door.names)
    labels = values.labels
    order = np.random.default_rng(goal.seed).permutation(len(values))
    count = min(MOST_CALIBRATION, max(batch, len(values) // CALIBRATION_SHARE))
    count = max(batch, count - count % batch)
    if goal.evaluate is not None or (goal.point is not None and goal.max_drop is None and count >= len(values)):
        count = len(values) - len(values) % batch
    own, rest = order[:count], order[count:]
    rest = rest[: len(rest) - len(rest) % batch]
    calibration = [convert(values.at(own[i : i + batch])) for i in range(0, len(own), batch)]
    if goal.max_drop is None or goal.evaluate is not None:
        return _Split(calibration, [convert(values.at(rest[i : i + batch])) for i in range(0, len(rest), batch)])
    if any(labels[index] is None for index in rest):
        raise ArgumentError(
            f"{data.data}: the samples have no labels, which --max-drop needs; give "
            f"{'an array of the name labels' if door.names else '--labels'}, or --min-agreement"
        )
    numbers = np.array([labels[index] for index in rest])
    found = [(convert(values.at(rest[i : i + batch])), numbers[i : i + batch]) for i in range(0, len(rest), batch)]
    return _Split(calibration, found)


# -- the search --------------------------------------------------------------------------------------------------------


def search_settings(  # noqa: PLR0913  the options of the command
    model: str,
    weights: Path | None,
    data: DataOptions,
    config: Path | None,
    goal: GoalOptions,
    where: SavePath,
    save: Callable[[QuantizedModel], object],
    *,
    resume: bool = False,
    equalize: bool = False,
    part: str | None = None,
) -> tuple[QuantizedModel, FirstBatches]:
    """Search for settings, or use those of a point; returns the model with its calibration batches.

    Args:
        model: As on the command line.
        weights: The caffemodel.
        data: All the data.
        config: The settings to begin with.
        goal: The goal.
        where: Where the files go.
        save: Writes the best model so far.
        resume: Whether a search that was killed goes on.
        equalize: Whether channels are equalized first.
        part: The part of a PyTorch model.
    """
    journal = where.file("search.jsonl")
    if not resume:
        journal.unlink(missing_ok=True)
    point = None if goal.point is None else _point(where, goal.point)
    options: dict[str, Any] = {name: getattr(goal, name) for name in ("max_drop", "min_agreement", "min_sqnr")}
    options |= {name: getattr(goal, name) for name in ("minimize", "max_minutes", "max_evaluations", "seed", "certify")}
    options |= {
        "choices": None if goal.choices is None else [name.strip() for name in goal.choices.split(",")],
        "evaluate": goal.function(),
        "resume": journal,
        "on_best": save,
    }
    door = front_door(model, weights, data, part=part)
    if point is not None:
        goal = replace(goal, seed=point[2])
    split = _split(door, goal)
    if point is not None:
        quantized = door.quantize(split.calibration, point[0], equalize=equalize)
        quantized.history, quantized.certificate = point[1], point[3]
        return quantized, in_memory(split.calibration)
    labelled = None if goal.evaluate is not None else split.search
    quantized = door.quantize_to(split.calibration, labelled, config=config, equalize=equalize, **options)
    _write_points(where, quantized)
    return quantized, in_memory(split.calibration)


def in_memory(batches: list[Any]) -> FirstBatches:
    """Batches as those of data on disk."""
    from amct.pipeline.batches import FirstBatches

    return FirstBatches(
        DataBatches(lambda first, step: iter(batches[first::step]), lambda: len(batches), lambda: "", reads_ahead=False)
    )


def _point(where: SavePath, number: int) -> tuple[dict[str, Any], Any, int, Certificate]:
    """The config of a point of the curve in a quant.json, the whole curve, its seed, and what is known of it."""
    from amct.model.certificate import Certificate
    from amct.model.quant_json import read_quant_json

    document = read_quant_json(where.quant_json)
    found = next((point for point in document.curve if point.number == number), None)
    if found is None or document.certificate is None:
        known = ", ".join(str(point.number) for point in document.curve) or "none"
        raise ArgumentError(f"--point: {where.quant_json} has no point {number}; it has {known}")
    curve = tuple(replace(point, chosen=point.number == number) for point in document.curve)
    before = document.certificate
    certificate = Certificate(
        goal=before.goal,
        limit=before.limit,
        loss=found.loss,
        bound=None,
        confidence=before.confidence,
        error=0.0,
        samples=0,
        searched=found.samples,
        seed=before.seed,
        unit=before.unit,
        factor=before.factor,
        remark=f"point {number} of a search, measured on its samples only",
    )
    return dict(found.config), curve, before.seed, certificate


def _write_points(where: SavePath, quantized: QuantizedModel) -> None:
    """Write the config of each point, which ``--config`` and AMCT's functions read."""
    from amct import atomic
    from amct.cli.printing import as_json

    for point in quantized.history:
        atomic.write_text(where.file("points") / f"{point.number}.json", as_json(point.config) + "\n")


def curve_lines(quantized: QuantizedModel) -> list[str]:
    """What a search found, for people."""
    certificate = quantized.certificate
    if certificate is None:
        return []
    lines = [f"certificate {certificate}"]
    for point in quantized.history:
        mark = "*" if point.chosen else " "
        loss = certificate.shown(point.loss)
        lines.append(f"point {point.number:<3}{mark} {point.cost:.6g} {point.unit}  loss {loss}  {point.summary}")
    return lines


# -- certificates ------------------------------------------------------------------------------------------------------


@app.command("check")
def check_certificate(
    file: Annotated[Path, typer.Argument(help="The OUTPUT_quant.json of a model whose settings were searched.")],
    as_json: JsonOption = False,
) -> None:
    """Compute the bound of a certificate again from the losses of its samples, and check the files it is about.

    Example: amct certificate check out/net_quant.json
    """
    from amct.model.quant_json import read_quant_json
    from amct.search.judge import recomputed

    check_file(str(file))
    certificate = read_quant_json(file).certificate
    if certificate is None:
        raise ArgumentError(f"{file}: there is no certificate; amct quantize --max-drop writes one")
    found = recomputed(certificate)
    wrong = [
        f"{name}: {there:.6g} is written, {here:.6g} follows from the losses"
        for name, there, here in (
            ("loss", certificate.loss, found.loss),
            ("bound", certificate.bound or math.nan, found.bound or math.nan),
        )
        if not (math.isnan(there) and math.isnan(here)) and not math.isclose(there, here, rel_tol=1e-6, abs_tol=1e-9)
    ]
    if found.samples != certificate.samples:
        wrong.append(f"samples: {certificate.samples} are written, there are losses of {found.samples}")
    if wrong:
        raise ParseError(f"{file}: the certificate is not right: {'; '.join(wrong)}")
    if as_json:
        show_json({**asdict(certificate), "met": certificate.met, "certified": certificate.certified})
        return
    show(f"certificate {certificate}")
    show("the loss and the bound follow from the losses of the samples, and the files are those that were written")
