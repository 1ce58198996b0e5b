"""Options that several commands have: of data, models and output."""

from __future__ import annotations

import inspect
import logging
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import wraps
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from amct.atomic import is_file
from amct.cli.printing import show
from amct.errors import AmctError, ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from amct.data import Preparation, Sample, StoredBatches

    LabelledBatch = tuple[NDArray[np.float32], list[int | None]]

MODEL_HELP = 'A prototxt, an ONNX file, or a Python reference "package.module:factory".'
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for other programs.")]
ShapeOption = Annotated[
    str | None, typer.Option("--input-shape", help="Example input of a PyTorch model, such as 1,3,224,224.")
]
Models = Annotated[
    list[str],
    typer.Argument(
        metavar="FLOAT QUANT",
        help="FLOAT: net.prototxt net.caffemodel, net.onnx or package.module:factory. "
        "QUANT: what amct quantize was given with -o, or the quantized file (a prototxt, perhaps with its caffemodel).",
    ),
]
Top1 = Annotated[
    bool, typer.Option("--top1", help="Also count how often the largest output is the label; the data has labels.")
]

logger = logging.getLogger(__name__)

_COLOR_REASONS = {"rgb": "RGB is usual for PyTorch and ONNX models", "bgr": "BGR is the order of Caffe"}
_MOST_DIGITS = 9
_MOST_PIXELS = 2**26
_PICTURE_INPUT_AXES = 4  # batch, channels, height, width


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """The location and the preprocessing of data, as given on the command line.

    Iteration yields batches, reads one batch at a time and can be repeated.
    """

    data: Annotated[
        Path,
        typer.Option(
            help="Data: a folder of pictures, a list of them (.txt: a path and perhaps a label in each line), .npy, "
            ".npz (several inputs: arrays of their names), LMDB or idx. The first pictures of a folder are from all "
            "over it. None unless given, where a command can do without."
        ),
    ]
    size: Annotated[
        str | None,
        typer.Option(help="Resize pictures to this size, 224 or height,width; that of the model's input unless given."),
    ] = None
    crop: Annotated[
        str | None, typer.Option(help="Then crop the centre to this size, 224 or height,width; no crop unless given.")
    ] = None
    mean: Annotated[
        str | None, typer.Option(help="Subtract this, 104,117,123 or a mean file; nothing unless given.")
    ] = None
    scale: Annotated[
        str, typer.Option(help="After subtracting the mean, multiply by this: 0.017 or 0.0171,0.0175,0.0174.")
    ] = "1"
    color: Annotated[
        str | None,
        typer.Option(
            help="Channels of pictures: rgb, bgr or gray. Without: gray if the model takes one channel, else bgr for "
            "Caffe models and rgb for others."
        ),
    ] = None
    batch_size: Annotated[int, typer.Option(help="Samples in a batch of the data.")] = 1
    batches: Annotated[int | None, typer.Option(help="Use no more batches than this; all unless given.")] = None

    def __iter__(self) -> Iterator[NDArray[np.float32]]:
        return iter(self.stored())

    def stored(self) -> StoredBatches:
        """Return the batches.

        Raises:
            ArgumentError: An option is invalid.
        """
        from amct.data import StoredBatches

        if self.batches is not None and self.batches < 1:
            raise ArgumentError(f"--batches: expected at least 1, got {self.batches}")
        return StoredBatches(self.data, self.batch_size, prepare=self._preparation(), most=self.batches)

    def samples(self) -> Iterator[Sample]:
        """Return an iterator over single samples with their names and labels."""
        from amct.data import open_samples

        most = None if self.batches is None else self.batches * self.batch_size
        return islice(open_samples(self.data, self._preparation()), most)

    def labelled(self) -> Iterator[LabelledBatch]:
        """Return an iterator over the batches with the labels of their samples; a missing label is None.

        Raises:
            ArgumentError: An option is invalid.
            FileError, ParseError: The data cannot be read.
        """
        return self.stored().labelled()

    def check(self) -> None:
        """Check the options and that the data can be read: of pictures and databases, the first sample.

        Raises:
            ArgumentError: An option is invalid.
            FileError, ParseError: The data cannot be read.
        """
        from amct.data import first_shape

        self.stored()
        first_shape(self.data, self._preparation())

    @property
    def changes_values(self) -> bool:
        """Whether an option asks for other values than the stored ones."""
        return not (self.mean is self.size is self.crop is None and _scale(self.scale) == 1)

    def fitting(self, model_input: Sequence[int | str | None] | None, color: str = "rgb") -> DataOptions:
        """Return the options with the size and the channels of the model's input for pictures, where not given.

        A line tells what is done to each picture, and what of it was chosen here.

        Args:
            model_input: The shape that the model declares; names or None where any size fits; None: not known.
            color: The order of three channels that models of this kind expect.
        """
        from amct.data import holds_pictures

        if not holds_pictures(self.data):
            return self
        chosen: list[str] = []
        options = self._with_color(model_input, color, chosen)._with_size(model_input, chosen)
        text = options._preparation().text(pictures=True)
        show(f"pictures    {'; '.join([text, *chosen])}", err=True)
        return options

    def _with_color(self, model_input: Sequence[int | str | None] | None, color: str, chosen: list[str]) -> DataOptions:
        shape = model_input or ()
        if self.color is not None:
            return self
        if len(shape) == _PICTURE_INPUT_AXES and shape[1] == 1:
            chosen.append("no --color given: the model's input has one channel")
            return replace(self, color="gray")
        chosen.append(f"no --color given: {_COLOR_REASONS[color]}")
        return replace(self, color=color)

    def _with_size(self, model_input: Sequence[int | str | None] | None, chosen: list[str]) -> DataOptions:
        from amct.data import first_shape

        if self.size is not None or self.crop is not None:
            return self
        height, width = _picture_size(model_input)
        if height is not None and width is not None:
            chosen.append("no --size given: the size of the model's input")
            return replace(self, size=f"{height},{width}")
        shape = first_shape(self.data, self._preparation())
        assert shape is not None  # pictures have one
        why = "a PyTorch model does not tell its size" if model_input is None else "the model takes any size"
        chosen.append(f"no --size given: as large as they are, the first {shape[1]} x {shape[2]}, for {why}")
        return self

    def warn_of_other_preparation(self, quantized: str) -> None:
        """Warn if pictures were prepared otherwise for the calibration of a file, as the quant.json beside it says."""
        from amct.data import holds_pictures
        from amct.model.quant_json import notes_beside

        with suppress(AmctError):  # the comparison itself does not need the file
            used = notes_beside(Path(quantized)).calibration
            here = self._preparation().text(pictures=True)
            if used is not None and used.unit == "pictures" and holds_pictures(self.data) and used.preparation != here:
                logger.warning(
                    "pictures are prepared otherwise than for calibration: %s here, %s there; give the options of amct "
                    "quantize",
                    here,
                    used.preparation,
                )

    def _preparation(self) -> Preparation:
        import numpy as np

        from amct.data import Preparation

        return Preparation(
            size=_pair("--size", self.size),
            crop=_pair("--crop", self.crop),
            color=cast("Literal['bgr', 'rgb', 'gray'] | None", self.color),
            mean=np.zeros(0, np.float32) if self.mean is None else _mean(self.mean),
            scale=_scale(self.scale),
        )


def with_options_of(
    options: type[Any], command: Callable[..., Any], name: str, run: Callable[[Any, Callable[[Any], Any]], Any]
) -> Callable[..., Any]:
    """A command with an option for each field of a dataclass, in place of its parameter ``name``, or behind all others.

    Typer derives the options from the signature, so this changes the signature.

    Args:
        options: The dataclass.
        command: The command; it gets the object if it has the parameter.
        name: The parameter.
        run: Called with the object and a function that runs the command with one.
    """
    given = [*inspect.signature(command, eval_str=True).parameters.values()]
    ours = dict(inspect.signature(options, eval_str=True).parameters)
    places = [index for index, parameter in enumerate(given) if parameter.name == name]
    parameters = [*given]
    for place in places or [len(given)]:
        parameters[place : place + len(places)] = ours.values()

    @wraps(command)
    def with_options(**arguments: Any) -> Any:  # noqa: ANN401  the options have various types
        chosen = options(**{field: arguments.pop(field) for field in ours})
        return run(chosen, lambda value: command(**arguments, **({name: value} if places else {})))

    keyword = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    with_options.__signature__ = inspect.Signature(keyword)  # type: ignore[attr-defined]  # functions take any attribute
    with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in keyword}
    return with_options


def takes_data(command: Callable[..., Any], *, optional: bool = False) -> Callable[..., Any]:
    """Decorate a command: replace its parameter ``data`` by one option for each field of ``DataOptions``.

    If ``optional``, the command gets None when there is no ``--data``.
    """
    changed = with_options_of(DataOptions, command, "data", lambda given, call: call(given if given.data else None))
    if optional:
        signature = inspect.signature(changed)
        parameters = [
            each.replace(default=None) if each.name == "data" else each for each in signature.parameters.values()
        ]
        changed.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # as above
    return changed


def _picture_size(shape: Sequence[int | str | None] | None) -> tuple[int | None, int | None]:
    """Height and width of an input of four axes, where they are fixed."""
    height, width = shape[2:] if shape is not None and len(shape) == _PICTURE_INPUT_AXES else (None, None)
    return (height if isinstance(height, int) else None), (width if isinstance(width, int) else None)


def _pair(option: str, text: str | None) -> tuple[int, int] | None:
    """Parse ``224`` or ``240,320`` as height and width."""
    if text is None:
        return None
    words = text.replace("x", ",").split(",")
    if len(words) > 2 or not all(len(word) <= _MOST_DIGITS and word.strip().isdecimal() for word in words):
        raise ArgumentError(f'{option}: expected a number, or height,width, got "{text}"')
    height, width = int(words[0]), int(words[-1])
    if height * width > _MOST_PIXELS:
        raise ArgumentError(f"{option}: a picture of {height} x {width} is larger than {_MOST_PIXELS} pixels")
    return height, width


def _mean(text: str) -> NDArray[np.float32]:
    """Parse one number per channel, or read a mean file."""
    import numpy as np

    if is_file(text):
        from amct.data.samples import read_mean

        return read_mean(text)
    return np.array(_numbers("--mean", text, "numbers such as 104,117,123 or the name of a mean file"), np.float32)


def _scale(text: str) -> float | tuple[float, ...]:
    """Parse one number, or one per channel."""
    found = _numbers("--scale", text, "a number such as 0.017, or one for each channel: 0.0171,0.0175,0.0174")
    return found if len(found) > 1 else found[0]


def _numbers(option: str, text: str, expected: str) -> tuple[float, ...]:
    try:
        return tuple(float(word) for word in text.split(","))
    except ValueError:
        raise ArgumentError(f'{option}: expected {expected}, got "{text}"') from None


@dataclass(frozen=True, kw_only=True)
class Learning:
    """The options, by the names that ``quantize`` of PyTorch and Caffe models has for them."""

    adaround: Annotated[
        str | None,
        typer.Option(
            help='How AdaRound learns, "plain" as AMCT does or "fast": of a PyTorch model where its config has it '
            "(plain unless given), of a Caffe model everywhere (nowhere unless given)."
        ),
    ] = None
    reconstruct: Annotated[
        str | None,
        typer.Option(
            help='"blocks": let each block of a PyTorch or Caffe model learn to compute what it does in float, for 4 '
            "bits; no learning unless given."
        ),
    ] = None
    reconstruct_seconds: Annotated[
        float | None,
        typer.Option("--reconstruct-seconds", help="About how long that may take; as long as it needs unless given."),
    ] = None

    def arguments(self) -> dict[str, Any]:
        """What is handed on: what is given."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def check(self, *, has_modes: bool) -> None:
        """Check the options.

        Args:
            has_modes: Whether the model can learn: a PyTorch or Caffe model without a goal.

        Raises:
            ArgumentError: One cannot be used.
        """
        if self.adaround not in (None, "plain", "fast"):
            raise ArgumentError(f"--adaround: expected plain or fast, got {self.adaround!r}")
        if self.reconstruct not in (None, "blocks"):
            raise ArgumentError(f"--reconstruct: expected blocks, got {self.reconstruct!r}")
        if self.reconstruct_seconds is not None and not 0 < self.reconstruct_seconds < float("inf"):
            raise ArgumentError(f"--reconstruct-seconds: expected a positive number, got {self.reconstruct_seconds:g}")
        if self.reconstruct_seconds is not None and self.reconstruct is None:
            raise ArgumentError(
                "--reconstruct-seconds: nothing is reconstructed; add --reconstruct blocks, or leave it out"
            )
        if has_modes:
            return
        for option, given in ((f"--adaround {self.adaround}", self.adaround), ("--reconstruct", self.reconstruct)):
            if given:
                raise ArgumentError(f"{option} is for PyTorch and Caffe models without a goal; leave it out")


def takes_learning(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command: its parameter ``learning`` is replaced by the options."""
    return with_options_of(Learning, command, "learning", lambda given, call: call(given))
