"""The error tree: one base, the built-in types that AMCT scripts catch, readable text."""

from __future__ import annotations

import pytest

from amct import errors
from amct.errors import AmctError, ConfigError, Position, Problem, did_you_mean

BUILT_IN = {
    "ArgumentError": ValueError,
    "ArgumentTypeError": TypeError,
    "FileError": OSError,
    "MissingFileError": FileNotFoundError,
    "ParseError": ValueError,
    "ConfigError": ValueError,
    "ConfigTypeError": TypeError,
    "ModelError": RuntimeError,
    "UnsupportedLayerError": RuntimeError,
    "ModelArgumentError": (RuntimeError, ValueError),
    "ModelTypeError": (RuntimeError, TypeError),
    "CalibrationError": RuntimeError,
    "CalibrationArgumentError": (RuntimeError, ValueError),
    "CalibrationTypeError": (RuntimeError, TypeError),
    "MissingDefinitionError": (RuntimeError, FileNotFoundError),
    "RecordError": RuntimeError,
    "RecordValueError": ValueError,
    "RecordParseError": ValueError,
    "TrainingError": RuntimeError,
    "SearchError": RuntimeError,
    "EvaluatorError": (RuntimeError, ValueError),
    "CheckpointError": KeyError,
    "ExportError": RuntimeError,
}


@pytest.mark.parametrize(("name", "built_in"), BUILT_IN.items(), ids=BUILT_IN)
def test_scripts_that_catch_the_built_in_type_catch_ours(name, built_in):
    for each in built_in if isinstance(built_in, tuple) else (built_in,):
        with pytest.raises(each) as caught:
            raise getattr(errors, name)("conv1: expected 8, got 9")
        assert isinstance(caught.value, AmctError)
        assert str(caught.value) == "conv1: expected 8, got 9"


def test_every_error_class_is_in_the_tree_of_the_docstring():
    classes = {n for n, c in vars(errors).items() if isinstance(c, type) and issubclass(c, AmctError)}
    assert classes - {"AmctError"} == set(BUILT_IN)
    assert all(name in errors.__doc__ for name in classes)


def test_position_is_said_first():
    error = ConfigError("unknown field", position=Position("quant.cfg", 31, 5))
    assert str(error) == "quant.cfg:31:5: unknown field"
    assert error.position == Position("quant.cfg", 31, 5)


def test_all_problems_are_listed():
    problems = [Problem("first", Position("a.json", 1, 2)), Problem("second")]
    error = ConfigError.from_problems(problems)
    assert error.problems == tuple(problems)
    assert str(error) == "2 mistakes:\n  a.json:1:2: first\n  second"


def test_one_problem_reads_like_a_plain_error():
    assert str(ConfigError.from_problems([Problem("first", Position("a.json", 1, 2))])) == "a.json:1:2: first"


FIELDS = (
    "skip_layers", "skip_layer_types", "quant_skip_layers", "quant_skip_types", "regular_prune_skip_layers",
    "regular_prune_skip_types",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("convl", ["conv1", "fc"], ' Did you mean "conv1"?'),
        ("CONV1", ["conv1", "fc"], ' Did you mean "conv1"?'),
        ("zzz", ["conv1", "fc"], ""),
        ("quant_skip_layer_types", FIELDS, ' Did you mean "quant_skip_types"?'),
        ("prune_skip_layers", FIELDS, ' Did you mean "regular_prune_skip_layers"?'),
        ("skip_layer", FIELDS, ' Did you mean "skip_layers"?'),
        ("layer1.conv2", ["layer1.0.conv1", "layer1.0.conv2"], ' Did you mean "layer1.0.conv2"?'),
        ("x", [], ""),
    ],
)
def test_nearest_name(name, known, expected):
    assert did_you_mean(name, known) == expected
