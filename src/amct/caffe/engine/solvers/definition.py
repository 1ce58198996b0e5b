"""Reads a solver prototxt: upgrades older formats and resolves its nets with phase, level and stages."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from amct.atomic import AnyPath, is_folder
from amct.caffe.engine.layer import TEST, TRAIN
from amct.caffe.engine.messages import new_message, parse_message, read_net_message, read_text_file
from amct.errors import ConfigError, FileError

if TYPE_CHECKING:
    from amct.caffe.engine.messages import ProtoMessage

logger = logging.getLogger(__name__)

#: The current name of each value of the old ``solver_type`` enum.
_TYPE_OF_ENUM = {
    "SGD": "SGD", "NESTEROV": "Nesterov", "ADAGRAD": "AdaGrad", "RMSPROP": "RMSProp", "ADADELTA": "AdaDelta",
    "ADAM": "Adam",
}  # fmt: skip
_TRAIN_NET_FIELDS = ("net", "net_param", "train_net", "train_net_param")


@dataclass(frozen=True, kw_only=True)
class NetDefinition:
    """One net of a solver: the message, the state for its rules, and its source."""

    parameter: ProtoMessage
    phase: int
    level: int
    stages: tuple[str, ...]
    source: str


def read_solver(path: AnyPath) -> ProtoMessage:
    """Read a solver prototxt and upgrade it to the current format.

    ``solver_type: ADAM`` becomes ``type: "Adam"``. A missing ``snapshot_prefix`` is the file's name without its
    extension; if it is a folder, that name is appended.

    Raises:
        FileError: The file cannot be read.
        ParseError: It is not a solver prototxt.
        ConfigError: Both ``type`` and ``solver_type`` are given.
    """
    try:
        text = read_text_file(path)
    except FileError as error:
        raise FileError(f"File not found: {path} (the solver prototxt; looked for in {Path.cwd()}): {error}") from error
    parameter = parse_message(text, "SolverParameter", str(path))
    upgrade_type(parameter, str(path))
    file = Path(path)
    if not parameter.HasField("snapshot_prefix"):
        parameter.snapshot_prefix = str(file.with_suffix(""))
        logger.info("snapshot_prefix was not specified and is set to %s", parameter.snapshot_prefix)
    elif is_folder(parameter.snapshot_prefix):
        parameter.snapshot_prefix = str(Path(parameter.snapshot_prefix) / file.stem)
        logger.info("snapshot_prefix was a directory and is replaced to %s", parameter.snapshot_prefix)
    return parameter


def upgrade_type(parameter: ProtoMessage, source: str) -> None:
    """Convert the old ``solver_type`` to ``type``, in place.

    Raises:
        ConfigError: Both are given.
    """
    if not parameter.HasField("solver_type"):
        return
    if parameter.HasField("type"):
        raise ConfigError(
            f"{source}: Failed to upgrade solver: old solver_type field (enum) and new type field (string) cannot be "
            "both specified in solver proto text. Remove solver_type"
        )
    values = parameter.DESCRIPTOR.fields_by_name["solver_type"].enum_type.values_by_number
    parameter.type = _TYPE_OF_ENUM[values[parameter.solver_type].name]
    parameter.ClearField("solver_type")


def train_definition(parameter: ProtoMessage) -> NetDefinition:
    """The net that a solver trains.

    Raises:
        ConfigError: The solver names none, or more than one.
        FileError, ParseError: The file it names cannot be read.
    """
    given = [name for name in _TRAIN_NET_FIELDS if parameter.HasField(name)]
    names = ", ".join(_TRAIN_NET_FIELDS)
    if not given:
        raise ConfigError(f"SolverParameter must specify a train net using one of these fields: {names}")
    if len(given) > 1:
        raise ConfigError(
            f"SolverParameter must not contain more than one of these fields specifying a train_net: {names}; got "
            f"{' and '.join(given)}"
        )
    net, source = _field(parameter, given[0])
    return _with_state(net, TRAIN, parameter.train_state, source)


def test_definitions(parameter: ProtoMessage) -> list[NetDefinition]:
    """The nets that a solver tests: ``test_net_param``, ``test_net``, and ``net`` for each remaining ``test_iter``.

    Raises:
        ConfigError: Numbers of test nets, ``test_iter`` and ``test_state`` do not fit, or ``test_interval`` is missing.
        FileError, ParseError: A file it names cannot be read.
    """
    generic = next((name for name in ("net_param", "net") if parameter.HasField(name)), None)
    own = len(parameter.test_net_param) + len(parameter.test_net)
    count = len(parameter.test_iter)
    if count < own or (generic is None and count != own):
        raise ConfigError(
            f"test_iter must be specified for each test network: {own} test net(s) given, {count} test_iter"
        )
    if parameter.test_state and len(parameter.test_state) != count:
        raise ConfigError(
            f"test_state must be unspecified or specified once per test net: {count} test net(s), "
            f"{len(parameter.test_state)} test_state"
        )
    if count and parameter.test_interval <= 0:
        raise ConfigError(
            f"test_interval must be > 0 when there are test nets ({count} test_iter given), got "
            f"{parameter.test_interval}. Add test_interval to the solver, or remove test_iter"
        )
    nets = [(net, "test_net_param") for net in parameter.test_net_param]
    nets += [(_read_net(path, "test_net"), f"test_net file: {path}") for path in parameter.test_net]
    if generic is not None:
        nets += [_field(parameter, generic) for _ in range(count - own)]
    states = list(parameter.test_state) or [new_message("NetState")] * count
    return [_with_state(net, TEST, state, source) for (net, source), state in zip(nets, states, strict=True)]


def _field(parameter: ProtoMessage, name: str) -> tuple[ProtoMessage, str]:
    value = getattr(parameter, name)
    if isinstance(value, str):
        return _read_net(value, name), f"{name} file: {value}"
    return value, name


def _read_net(path: str, field: str) -> ProtoMessage:
    try:
        return read_net_message(path)
    except FileError as error:
        raise FileError(
            f'the net of the solver ({field}: "{path}") cannot be read: {error}. Paths are relative to the current '
            f"folder, {Path.cwd()}, not to the solver's"
        ) from error


def _with_state(net: ProtoMessage, phase: int, state: ProtoMessage, source: str) -> NetDefinition:
    """Phase, level and stages: the solver's state overrides the net's, which overrides the phase's default."""
    merged = new_message("NetState", phase=phase)
    for each in (net.state, state):  # one of them may be of a custom.proto, with a class of its own
        merged.MergeFromString(each.SerializeToString())
    # The net's own stages stay in its message; only the solver's are added.
    return NetDefinition(
        parameter=net, phase=merged.phase, level=merged.level, stages=tuple(state.stage), source=source
    )
