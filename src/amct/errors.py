"""The exception classes of this package.

Every error raised deliberately is an ``AmctError``. Scripts written for AMCT catch built-in types, so each class also
derives from the built-in type that AMCT raises in the same place::

    AmctError
    ├── ArgumentError            (ValueError)    a value passed to a function cannot be used
    │   └── ArgumentTypeError    (TypeError)     ... because it has the wrong type
    ├── FileError                (OSError)       a file or folder is missing, unreadable or cannot be written
    │   └── MissingFileError     (FileNotFoundError)  ... because it does not exist
    ├── ParseError               (ValueError)    the content of a file does not have its format (text, JSON, …)
    ├── ConfigError              (ValueError)    a config is readable but wrong
    │   └── ConfigTypeError      (TypeError)     ... a field has the wrong type
    ├── ModelError               (RuntimeError)  a model cannot be read, traced or built
    │   ├── UnsupportedLayerError                ... because of one layer
    │   └── ModelArgumentError   (ArgumentError) ... because of its settings or its input
    │       └── ModelTypeError   (ArgumentTypeError) ... which have the wrong type
    ├── CalibrationError         (RuntimeError)  data or call order make calibration impossible
    │   ├── CalibrationArgumentError (ArgumentError)     ... a setting of a calibration cannot be used
    │   │   └── CalibrationTypeError (ArgumentTypeError) ... because it has the wrong type
    │   └── MissingDefinitionError   (MissingFileError)  ... the config that names the layers does not exist
    ├── RecordError              (RuntimeError)  a record does not fit its model or is incomplete
    │   ├── RecordValueError     (ValueError)    ... a factor is outside its legal range
    │   └── RecordParseError     (ParseError)    ... it is not a record file
    ├── TrainingError            (RuntimeError)  a trained model or its checkpoint cannot be used as asked
    ├── SearchError              (RuntimeError)  a search for settings cannot be made as asked
    │   └── EvaluatorError       (ArgumentError) ... what the user's own function returns is no accuracy
    ├── CheckpointError          (KeyError)      an entry is missing from a checkpoint
    └── ExportError              (RuntimeError)  a file cannot be exported as requested

A message says where, what was expected, what was found and what to do. ``Position`` is a place in a text file;
``Problem`` is one mistake, so that all mistakes of a file can be reported together.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from amct.printable import escaped

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True, order=True)
class Position:
    """A place in a text file; line and column count from 1. Line 0: ``source`` names a part of a Python object."""

    source: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source


@dataclass(frozen=True)
class Problem:
    """One mistake, or one warning, and its position."""

    message: str
    position: Position | None = None

    def __str__(self) -> str:
        return f"{self.position}: {self.message}" if self.position else self.message


class AmctError(Exception):
    """Base of every error raised deliberately; ``problems`` lists each mistake with its position."""

    def __init__(self, message: str, *, position: Position | None = None, problems: Sequence[Problem] = ()) -> None:
        self.problems: tuple[Problem, ...] = tuple(problems) or (Problem(message, position),)
        self.position = position or self.problems[0].position
        super().__init__(message if problems else str(self.problems[0]))

    def __str__(self) -> str:
        # KeyError would show the repr of its argument, OSError its errno: show the message instead.
        return escaped(str(self.args[0]))

    @classmethod
    def from_problems(cls, problems: Sequence[Problem]) -> AmctError:
        """Return one error that lists every problem, one per line."""
        if len(problems) == 1:
            return cls(problems[0].message, position=problems[0].position)
        lines = "\n".join(f"  {problem}" for problem in problems)
        return cls(f"{len(problems)} mistakes:\n{lines}", problems=problems)


class ArgumentError(AmctError, ValueError):
    """A value passed to a function cannot be used."""


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument has the wrong type."""


class FileError(AmctError, OSError):
    """A file or folder is missing, unreadable or cannot be written."""


class MissingFileError(FileError, FileNotFoundError):
    """A file to be read does not exist; also a ``FileNotFoundError``, which older scripts catch."""


class ParseError(AmctError, ValueError):
    """The content of a file does not have the expected format."""


class ConfigError(AmctError, ValueError):
    """A config is readable but wrong."""


class ConfigTypeError(ConfigError, TypeError):
    """A config field has the wrong type."""


class ModelError(AmctError, RuntimeError):
    """A model cannot be read, traced or built."""


class UnsupportedLayerError(ModelError):
    """A layer of a model has an unsupported type."""


class ModelArgumentError(ModelError, ArgumentError):
    """A module cannot be built or run with these settings or this input; also a ``ValueError``."""


class ModelTypeError(ModelArgumentError, ArgumentTypeError):
    """A module of another type was expected, or its input has the wrong type; also a ``TypeError``."""


class CalibrationError(AmctError, RuntimeError):
    """Data or call order make calibration impossible."""


class CalibrationArgumentError(CalibrationError, ArgumentError):
    """A setting of a calibration cannot be used; also a ``ValueError``."""


class CalibrationTypeError(CalibrationArgumentError, ArgumentTypeError):
    """A setting of a calibration has the wrong type; also a ``TypeError``."""


class MissingDefinitionError(MissingFileError, CalibrationError):
    """The simple config of a calibration does not exist; both a ``FileNotFoundError`` and a ``RuntimeError``."""


class RecordError(AmctError, RuntimeError):
    """A record does not fit its model or is incomplete."""


class RecordValueError(RecordError, ValueError):
    """A factor of a record is outside its legal range."""


class RecordParseError(RecordError, ParseError):
    """A file is not a valid record file."""


class TrainingError(AmctError, RuntimeError):
    """A model in training, or its checkpoint, cannot be used as asked: it diverged, is not trained, or does not fit."""


class CheckpointError(AmctError, KeyError):
    """An entry is missing from a checkpoint."""


class SearchError(AmctError, RuntimeError):
    """A search for settings cannot be made as asked: its goal, its data, its evaluator or its journal."""


class EvaluatorError(SearchError, ArgumentError):
    """What the user's own function returns is no accuracy; also a ``ValueError``."""


class ExportError(AmctError, RuntimeError):
    """A file cannot be exported as requested."""


_LOOK_ALIKES = str.maketrans("1i0-.", "llo__")  # characters that are easily confused


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `` Did you mean "conv1"?`` with the most similar known name, or "" if none is similar.

    >>> did_you_mean("convl", ["conv1", "conv2", "fc"])
    ' Did you mean "conv1"?'
    """
    by_shape = {candidate.lower().translate(_LOOK_ALIKES): candidate for candidate in sorted(set(known), reverse=True)}
    given = name.lower().translate(_LOOK_ALIKES)
    near = difflib.get_close_matches(given, by_shape, n=5, cutoff=0.6)  # the most similar first
    if not near:
        return ""
    # The last word says what is meant: quant_skip_layer_types is nearer to quant_skip_types than to quant_skip_layers.
    words = {text: re.split(r"[^a-z0-9]", text) for text in (given, *near)}
    ends = [found for found in near if words[found][-1] == words[given][-1]]

    def common(found: str) -> tuple[int, bool]:
        return len({*words[found]} & {*words[given]}), words[found][0] == words[given][0]

    best = max(ends, key=common) if ends else near[0]
    return f' Did you mean "{by_shape[best]}"?'
