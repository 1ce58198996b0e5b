"""Post-training quantization in one call, for every front door: config, preparation, calibration, record.

First the passes over the calibration data: each process reads its share, and a killed calibration goes on where it was.
``<prefix>.calibration.npz`` has what was observed so far.

The file is written while batches run, at most every 30 s and so seldom that it costs next to nothing; as any other file
it is replaced as a whole or not at all. It holds arrays of numbers, no Python objects. It is bound to fingerprints of
the model, the config and the data, and read only if the user asks for it. Of several processes that calibrate together
each has a file of its own.

::

    format              the version of this form
    bound               what the state belongs to: a JSON object of fingerprints and versions
    seconds             the CPU time spent so far
    <pass>/done         the batches that this process has run in a pass over the data ("balance", "calibration")
    <pass>/state/…      what the session of the pass has observed in them
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from amct import __version__, atomic, log
from amct.calibration import all_ranks
from amct.calibration.ranks import ALONE, fingerprint, joined, part_of
from amct.data.arrays import read_arrays
from amct.errors import AmctError, ArgumentTypeError, CalibrationError, FileError
from amct.export.check.batch import KeptBatches
from amct.interrupts import raise_if_interrupted
from amct.memory import LARGE_MODEL, give_back_freed
from amct.pipeline.quantized_model import QuantizedModel

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from amct.calibration import Ranks
    from amct.config.plan import LayerPlan, Plan
    from amct.config.python_config import AnyConfig
    from amct.numerics.qparams import LayerQParams
    from amct.numerics.settings import ActivationSettings
    from amct.pipeline.batches import Batches, BatchInputs
    from amct.pipeline.door import Door

    Arrays = dict[str, NDArray[Any]]

logger = logging.getLogger(__name__)

BALANCE, CALIBRATION = "balance", "calibration"
"""The names of the passes."""
FORMAT = 1
SECONDS = 30.0
"""The file is not written more often."""
MOST_SHARE = 0.005
"""Nor so often that writing takes more than this share of the time."""
_LONGEST_TEXT = 1 << 16
_WHAT_DIFFERS = {
    "model": "the model differs",
    "config": "the config differs",
    "data": "the data differ: their files, the first batch, the batch size or the number of batches",
}


class Passes:
    """Starts passes over some data.

    Args:
        batches: The data.
        limit: The batches of a pass, of all processes together; None: all there are.
        ranks: The processes that calibrate together.
        interim: Keeps what is observed, to go on after an interruption; None: nothing is kept.
    """

    def __init__(self, batches: Batches, limit: int | None, ranks: Ranks, interim: Interim | None = None) -> None:
        self._batches = batches
        self.limit = limit
        self._ranks = ranks
        self._interim = interim

    def all(self) -> Iterator[Any]:
        """A pass over all batches, in every process."""
        return self._batches.limited(self.limit, ALONE)

    def observed(self, what: str, session: ObservingSession, kept: KeptBatches | None = None) -> Iterator[Any]:
        """A pass over the share of this process that a session observes, from where an interrupted one was.

        Each batch must have been observed when the next one is asked for.

        Args:
            what: The name of the pass.
            session: Its session, which has observed nothing yet.
            kept: Is shown the batches from the first one on.
        """
        interim = self._interim
        if interim is not None and session.without_state:
            interim.leave_out(what, f"{session.without_state}: its observer has no state that can be kept")
            interim = None
        total = self._batches.length if self.limit is None else self.limit
        share = None if total is None else self._ranks.share(total)
        done = 0 if interim is None else interim.restore(what, session, share)
        batches = self._from(done, kept)
        if kept is not None:
            batches = kept.passing(batches)
        return batches if interim is None else _Noted(batches, interim, what, session, done)

    def blocks(self, what: str, session: ObservingSession, total: int) -> Iterator[int]:
        """The numbers of the blocks of a model that are learned one after the other, from where it was interrupted.

        Each must be in the session's state when the next number is asked for.

        Args:
            what: The name of the pass.
            session: What was learned so far.
            total: How many blocks there are.
        """
        done = 0 if self._interim is None else self._interim.restore(what, session, total, "blocks")
        for number in range(done, total):
            yield number
            raise_if_interrupted()
            if self._interim is not None:
                self._interim.note(what, session, number + 1)

    def _from(self, done: int, kept: KeptBatches | None) -> Iterator[Any]:
        """The batches behind the first ``done``; of those, ``kept`` needs to see the very first."""
        if self._batches.is_read_once:
            stream = self._batches.limited(self.limit, self._ranks)
            for batch in islice(stream, done):
                if kept is not None:
                    kept.notice(batch)
            return stream
        if kept is not None and done:
            for batch in islice(self._batches.limited(self.limit, self._ranks), done):
                kept.notice(batch)
                if kept.is_full:
                    break
            self._batches.close()
        return self._batches.limited(self.limit, self._ranks, skip=done)


class _Noted(Iterator[Any]):
    """Batches of a pass; when the next one is asked for, the state of its session may be written."""

    def __init__(
        self, batches: Iterator[Any], interim: Interim, what: str, session: ObservingSession, done: int
    ) -> None:
        self._batches = batches
        self._interim = interim
        self._what = what
        self._session = session
        self._done = done

    def __next__(self) -> Any:  # noqa: ANN401  the door's arguments
        raise_if_interrupted()
        self._interim.note(self._what, self._session, self._done)
        try:
            batch = next(self._batches)
        except StopIteration:
            self._interim.finish(self._what, self._session, self._done)
            raise
        self._done += 1
        return batch


# -- what is kept of a calibration that was killed ---------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CalibrationFile:
    """Where the state of a calibration is kept, and whether a calibration continues from one that exists.

    Attributes:
        path: The file; each of several processes puts its number into the name.
        read: Whether a state in it is used; if not, it is replaced.
        removed_by_caller: Whether the caller removes it; if not, the calibration does when it has succeeded.
    """

    path: Path
    read: bool = True
    removed_by_caller: bool = False

    @classmethod
    def of(cls, resume: str | os.PathLike[str] | CalibrationFile) -> CalibrationFile:
        """The file that the user names.

        Raises:
            ArgumentTypeError: It is no path.
        """
        if isinstance(resume, cls):
            return resume
        if not isinstance(resume, (str, os.PathLike)):
            raise ArgumentTypeError(
                f"resume: expected the path of a file such as out/net.calibration.npz, got {type(resume).__name__}"
            )
        return cls(path=Path(resume))

    def of_process(self, ranks: Ranks) -> Path:
        """The file of one of the processes that calibrate together."""
        if ranks.is_alone:
            return self.path
        return self.path.with_name(f"{self.path.stem}.rank{ranks.rank}of{ranks.size}{self.path.suffix}")

    def remove(self, ranks: Ranks) -> None:
        """Remove the file of a process, if there is one."""
        path = self.of_process(ranks)
        if atomic.is_file(path):
            path.unlink(missing_ok=True)


class ObservingSession(Protocol):
    """A session whose observations can be kept."""

    @property
    def is_observing(self) -> bool:
        """Whether it still takes batches."""

    @property
    def without_state(self) -> str:
        """Which of its observers cannot be kept; "" if all can."""

    def state(self) -> Arrays:
        """What it has observed so far."""

    def restore(self, state: Arrays, batches: int) -> None:
        """Replace what it has observed by a state after so many batches.

        Raises:
            CalibrationError: It does not belong to such a session.
        """


class Interim:
    """The states of the passes of one calibration, in memory and in the file.

    Args:
        file: The file.
        ranks: The processes that calibrate together.
        bound: Returns what the state belongs to. It is called when the file is first read or written.
        begin: The CPU time at which the calibration began.
    """

    def __init__(
        self, file: CalibrationFile, ranks: Ranks, bound: Callable[[], dict[str, str]], begin: float = 0.0
    ) -> None:
        self._path = file.of_process(ranks)
        self._make_bound = bound
        self._bound: dict[str, str] | None = None
        self._begin = begin
        self._finished: Arrays = {}
        self._due = time.monotonic() + SECONDS
        self.seconds_before = 0.0
        """The CPU time of the runs before this one."""
        self._is_read = file.read
        self._found = self._read() if file.read else {}

    def restore(self, what: str, session: ObservingSession, most: int | None, unit: str = "batches") -> int:
        """Put the state of a pass into its session, if there is one; returns the number of batches in it.

        Args:
            what: The name of the pass.
            session: Its session, which has observed nothing.
            most: The batches that this process runs, if that is known.
            unit: What is counted.

        Raises:
            CalibrationError: The state does not fit.
        """
        if f"{what}/done" not in self._found:
            return 0
        state = part_of(self._found, f"{what}/state")
        try:
            done = _number(self._found[f"{what}/done"])
            if not 0 < done <= (done if most is None else most):
                raise CalibrationError(f"{done} {unit} run, of {most}")
            session.restore(state, done)
        except Exception as error:  # arrays of a damaged file can be anything
            raise self._damaged(error) from error
        logger.info("%s: %s goes on after %d %s", self._path, what, done, unit)
        return done

    def leave_out(self, what: str, why: str) -> None:
        """Tell that a pass starts from the beginning, now and after a kill."""
        level = logging.WARNING if self._is_read else logging.INFO
        logger.log(level, "%s starts from the beginning, also after a kill: %s", what, why)

    def note(self, what: str, session: ObservingSession, done: int) -> None:
        """Called between two batches: write the file if it is time."""
        if time.monotonic() >= self._due and done and session.is_observing:
            self._write(_pass_arrays(what, session, done))

    def finish(self, what: str, session: ObservingSession, done: int) -> None:
        """Called at the end of a pass: its state is written with those of later passes."""
        if done and session.is_observing:
            self._finished |= _pass_arrays(what, session, done)

    # -- the file ------------------------------------------------------------------------------------------------------

    @property
    def _bound_to(self) -> dict[str, str]:
        if self._bound is None:
            self._bound = self._make_bound()
        return self._bound

    def _write(self, running: Arrays) -> None:
        begin = time.monotonic()
        seconds = self.seconds_before + time.process_time() - self._begin
        arrays: Arrays = {
            "format": np.array([FORMAT], np.int64),
            "bound": np.frombuffer(json.dumps(self._bound_to).encode(), np.uint8),
            "seconds": np.array([seconds], np.float64),
            **self._finished,
            **running,
        }
        try:
            with atomic.open_write(self._path) as stream:
                np.savez(stream, **arrays)  # type: ignore[arg-type]  # no array is named as its option
        except FileError as error:
            logger.warning("a calibration that is killed could not be resumed: %s", error)
            self._due = float("inf")
            return
        now = time.monotonic()
        self._due = now + max(SECONDS, (now - begin) / MOST_SHARE)

    def _read(self) -> Arrays:
        """What an earlier run has left; nothing if there is no file.

        Raises:
            CalibrationError: The file is damaged, or belongs to another calibration.
        """
        if not os.path.lexists(self._path):
            logger.warning("%s: no calibration to resume; it starts from the beginning", self._path)
            return {}
        if not atomic.is_file(self._path):
            raise CalibrationError(f"{self._path}: not a file, so no calibration can be resumed from it")
        atomic.check_whole(self._path)
        try:
            arrays = read_arrays(self._path)
            version = _number(arrays["format"])
            bound = json.loads(arrays["bound"].astype(np.uint8, casting="equiv")[:_LONGEST_TEXT].tobytes())
            seconds = float(arrays["seconds"].reshape(-1)[0])
            if not isinstance(bound, dict) or not 0 <= seconds < float("inf"):
                raise CalibrationError("it does not say what it belongs to")
        except Exception as error:  # arrays of a damaged file can be anything
            raise self._damaged(error) from error
        self._check(version, bound)
        self.seconds_before = seconds
        return arrays

    def _check(self, version: int, bound: dict[str, Any]) -> None:
        if version != FORMAT:
            raise self._other(f"its form has version {version}, this version of amct has {FORMAT}")
        for name, wanted in self._bound_to.items():
            if bound.get(name) != wanted:
                raise self._other(_WHAT_DIFFERS.get(name, f"{name}: {bound.get(name)!s:.100} there, {wanted} here"))

    def _other(self, why: str) -> CalibrationError:
        return CalibrationError(
            f"{self._path}: the calibration in it cannot be resumed here: {why}. Use what it was begun with, or leave "
            "out resume (--resume) to start from the beginning"
        )

    def _damaged(self, error: Exception) -> CalibrationError:
        reason = str(error) if isinstance(error, AmctError) else f"{type(error).__name__}: {error}"
        return CalibrationError(
            f"{self._path}: not the state of a calibration, or damaged ({reason}). Leave out resume (--resume) to "
            "start from the beginning"
        )


def _pass_arrays(what: str, session: ObservingSession, done: int) -> Arrays:
    return {f"{what}/done": np.array([done], np.int64), **joined({f"{what}/state": session.state()})}


def _number(array: NDArray[Any]) -> int:
    if array.dtype != np.int64 or array.shape != (1,):
        raise CalibrationError(f"expected one whole number, got {array.dtype} {list(array.shape)}")
    return int(array[0])


def bound_to(parts: Mapping[str, str], ranks: Ranks) -> dict[str, str]:
    """What a state belongs to: fingerprints, and what else decides the bits of the result."""
    return {
        "amct": __version__,
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
        "process": f"{ranks.rank} of {ranks.size}",
        **parts,
    }


# -- the flow ---------------------------------------------------------------------------------------------------------


Refine = Callable[[Any, Mapping[str, "LayerQParams"], Passes], tuple[Any, Mapping[str, "LayerQParams"]]]
"""From a prepared model, the parameters of its layers and the data: others that were learned."""
AnyResume = str | os.PathLike[str] | CalibrationFile | None
"""The file that keeps what a calibration has observed so far."""


@log.screen_only()
def quantize(
    door: Door,
    data: object,
    config: AnyConfig,
    inputs: BatchInputs | None = None,
    resume: AnyResume = None,
    others: Callable[[LayerPlan], tuple[ActivationSettings, ...]] | None = None,
    refine: Refine | None = None,
) -> QuantizedModel:
    """Quantize the model behind a front door with calibration data.

    If several processes do so together under ``torch.distributed``, with the same data in each, every process runs its
    share of the batches, and all get the same result.

    Args:
        door: The model.
        data: The calibration data, in a form that the door takes.
        config: A simple config (``.cfg``), a full config (``.json``, or its content as a dict), a ``QuantConfig``, or
            None for the defaults of the door's dialect.
        inputs: Turns a batch into the model's inputs, where its form does not tell them.
        resume: The file that keeps what was observed so far, to go on after a kill; None: nothing is kept.
        others: By layer: settings whose ranges are found too, for a search.
        refine: Learns from the data what needs the ranges of activations; None: nothing is learned then.

    Raises:
        AmctError: A subclass says what is wrong: config, model, data or files.
    """
    ranks = all_ranks()
    begin = time.process_time()
    weight_bytes = door.weight_bytes  # now: a door may free weights that it folds
    with closing(door.batches(data, inputs)) as batches:
        example = batches.first()
        plan, open_ended = door.plan(config, example, batches.length)
        if others is not None:
            plan = replace(plan, layers=tuple(replace(each, other_ranges=others(each)) for each in plan.layers))
        if door.reads_data_first(plan) or refine is not None:
            batches.keep()
        file = None if resume is None else CalibrationFile.of(resume)
        interim = None
        if file is not None:
            model = door.fingerprint()  # now: a door may free weights that it folds
            interim = Interim(file, ranks, lambda: bound_to(_parts(model, plan, batches, example), ranks), begin)
        passes = Passes(batches, None if open_ended else plan.batch_num, ranks, interim)
        prepared = door.prepare(plan, passes, ranks)
        if weight_bytes >= LARGE_MODEL:
            give_back_freed()  # copies of weights that were folded
        calibration = prepared.start_calibration(ranks)
        seen = KeptBatches()
        with closing(calibration.session):
            calibration.run(passes.observed(CALIBRATION, calibration.session, seen))
            calibration.session.finish(complete=not open_ended)
            result = calibration.session.result
        layers = prepared.quantized_layers(result)
        if refine is not None:
            prepared, layers = refine(prepared, layers, passes)
    tensors = result.tensors if calibration.observes_tensors else None
    del calibration  # a caught error may keep this frame, and with it a copy of the model
    give_back_freed()
    used = batches.used(_batches_used(passes, seen, batches.length))
    if file is not None and not file.removed_by_caller:
        file.remove(ranks)
    seconds = time.process_time() - begin + (0.0 if interim is None else interim.seconds_before)
    quantized = QuantizedModel(prepared, layers, tensors, seen.kept, seconds, weight_bytes, used)
    if ranks.is_first:
        logger.info("calibrated on %s%s", used, used.preparation and f": {used.preparation}")
    return quantized


def _batches_used(passes: Passes, seen: KeptBatches, length: int | None) -> int:
    """The batches of all processes and of the run before a kill; without a limit or a length, those of this process."""
    known = [number for number in (passes.limit, length) if number is not None]
    return min(known) if known else seen.passed


def _parts(model: str, plan: Plan, batches: Batches, example: object) -> dict[str, str]:
    """Fingerprints of what the result depends on; ``model`` is that of the model."""
    settings = replace(plan, source="", warnings=())
    return {
        "model": model,
        "data": batches.fingerprint(example),
        "config": fingerprint([repr(settings)]),
    }
