"""Runs models in onnxruntime as a user's program does, and measures their time.

Sessions have one thread, and CPU time counts: on a machine with other work, threads that wait for each other would
measure that work. Of a transformer that is 1.4 times as fast as float, wall-clock times with two threads on two busy
cores gave anything from 0.1 to 18.

::

    quantized, original = LoadedModel(path, profile=True), LoadedModel(float_model)
    outputs = quantized.run(feeds)
    quantized.costliest_nodes(feeds)                             [NodeCost(node="conv1", operator="QLinearConv", …)]
    median_seconds({"qdq": lambda: quantized.run(feeds), "float": lambda: original.run(feeds)})
"""

from __future__ import annotations

import json
import math
import re
import shutil
import statistics
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import finalize

import numpy as np

from amct.errors import ModelError
from amct.export.onnx.messages import first_line, parameter_bytes, reads
from amct.export.onnx.parts import consecutive_parts, part_model
from amct.export.onnx.runtime import RunWatch, longest_run, open_session, quiet_options
from amct.memory import give_back_freed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from onnx import ModelProto, NodeProto

    from amct.model.verdict import Level

COSTLIEST = 3
"""The number of nodes that are reported."""
FEWEST_ROUNDS, MOST_ROUNDS = 3, 60
BUDGET = 0.15
"""CPU seconds for which two models are timed, beyond the fewest rounds."""
PARTS = 8
"""So many parts of a large float model are loaded one after the other: three copies of an eighth of its weights."""
CLEAR = 1.1
"""A ratio that the spread of the runs does not make doubtful."""
TINY = 5e-4
"""Seconds of a run below which it hardly matters how fast a file is."""
UNNOTICED = 1e-4
"""Seconds that a run may lose unnoticed: a network of 1 ms has runs whose quartiles are 0.14 ms apart."""
_PROFILED_RUNS = 4
"""The first allocates memory and does not count; of the others some are interrupted on a busy machine."""
_KERNEL_TIME = "_kernel_time"
_RUN_ENDED = "model_run"
_RENAMED = re.compile(r"(_token_\d+|_nchwc)$")
"""What onnxruntime appends to the name of a node that it replaces."""


@dataclass(frozen=True, kw_only=True)
class NodeCost:
    """The time of one node as onnxruntime runs it.

    Attributes:
        node: Its name in the optimized model, usually that in the file.
        operator: What onnxruntime computes: "QLinearConv" for a convolution in integers.
        seconds: The time of one run.
        share: Its share of all nodes' time, 0 to 1.
    """

    node: str
    operator: str
    seconds: float
    share: float


class LoadedModel:
    """A model loaded with all optimizations of onnxruntime, for one thread.

    Args:
        model: A file, or a model in memory, which is not changed.
        profile: Measure the time of each node in the first ``_PROFILED_RUNS`` runs; later runs are not slowed down.
        lean: Load a large model in less memory; it runs slower than in a user's program.

    Raises:
        ModelError: onnxruntime cannot load the model.
    """

    def __init__(self, model: ModelProto | Path, *, profile: bool = False, lean: bool = False) -> None:
        self._folder = Path(tempfile.mkdtemp()) if profile else None
        self._cleanup = finalize(self, shutil.rmtree, str(self._folder), ignore_errors=True)
        prefix = self._folder / "profile" if self._folder is not None else None
        self._session = open_session(model, threads=1, profile=prefix, lean=lean)
        self._seconds = longest_run(model)
        self._runs = 0
        self.last_seconds = 0.0
        """The CPU time of the last run."""
        self._costs: list[NodeCost] = []

    @property
    def inputs(self) -> dict[str, tuple[list[Any], str]]:
        """By input: its shape, in which an unknown size is a name or None, and its type such as "tensor(float)"."""
        return {value.name: (value.shape, value.type) for value in self._session.get_inputs()}

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """The outputs by name.

        Raises:
            ModelError: onnxruntime cannot run the model on these inputs, or it does not end.
        """
        names = [value.name for value in self._session.get_outputs()]
        options = quiet_options()
        watch = RunWatch(options, self._seconds)
        begin = time.thread_time()
        try:
            with nullcontext() if self._runs else watch:  # the first run tells; watching would lengthen the others
                results = self._session.run(names, dict(feeds), options)
        except Exception as error:
            reason = watch.reason or f"onnxruntime cannot run the model: {first_line(error)}"
            raise ModelError(reason) from error
        self.last_seconds = time.thread_time() - begin
        self._runs += 1
        if self._folder is not None and self._runs == _PROFILED_RUNS:
            self._end_profile()
        return dict(zip(names, results, strict=True))

    def kept_outputs(self, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """The outputs by name, for use after the model was freed: those of ``run`` keep all memory of its session."""
        return {name: _own(value) for name, value in self.run(feeds).items()}

    def costliest_nodes(self, feeds: Mapping[str, NDArray[Any]], count: int = COSTLIEST) -> list[NodeCost]:
        """The nodes that take most time, the costliest first; the model runs a few more times.

        Of all runs but the first each node's shortest time counts, because a busy machine only lengthens times.
        """
        while self._folder is not None:
            self.run(feeds)
        return self._costs[:count]

    def close(self) -> None:
        """Free the model."""
        self._session = None
        give_back_freed()

    def _end_profile(self) -> None:
        self._costs = _costs(_events(Path(self._session.end_profiling()).read_text(errors="replace")))
        self._cleanup()
        self._folder = None


def _own(value: Any) -> Any:  # noqa: ANN401  an array, or a sequence of them
    return value.copy() if isinstance(value, np.ndarray) else value


def _events(profile: str) -> Iterator[dict[str, Any]]:
    """The events of a profile that count: it has one in each line, of which most are not worth reading.

    They are parsed one at a time: those of thousands of nodes together are so many objects that Python's garbage
    collector searches all memory of the process for what it may free, several times.
    """
    lines = [line.strip().rstrip(",") for line in profile.splitlines() if _KERNEL_TIME in line or _RUN_ENDED in line]
    whole = all(line.startswith("{") for line in lines)
    return map(json.loads, lines) if whole else iter(json.loads(profile))


def _costs(events: Iterable[dict[str, Any]]) -> list[NodeCost]:
    """The shortest time of each node in all runs of a profile but the first; a run is listed after its nodes."""
    runs: list[dict[tuple[str, str], int]] = [{}]
    for event in events:
        name = str(event.get("name", ""))
        if name == _RUN_ENDED:
            runs.append({})
        elif event.get("cat") == "Node" and name.endswith(_KERNEL_TIME):
            key = _RENAMED.sub("", name.removesuffix(_KERNEL_TIME)), str(event["args"].get("op_name", ""))
            runs[-1][key] = runs[-1].get(key, 0) + int(event["dur"])
    counted = [run for run in runs[1:] if run]
    shortest = {key: min(run[key] for run in counted if key in run) for run in counted for key in run}
    total = sum(shortest.values()) or 1
    costs = [
        NodeCost(node=node, operator=operator, seconds=duration * 1e-6, share=duration / total)
        for (node, operator), duration in shortest.items()
    ]
    return sorted(costs, key=lambda cost: -cost.seconds)


def median_seconds(runs: Mapping[str, Callable[[], object]], *, budget: float = BUDGET) -> dict[str, float]:
    """The median CPU time of each function; they are called in turn, so that a busy machine slows all of them alike.

    Args:
        runs: Functions that have been called before: the first call of a model allocates memory.
        budget: CPU seconds after which no further round starts; at least ``FEWEST_ROUNDS`` rounds are made.
    """
    return {name: statistics.median(values) for name, values in _times(runs, budget).items()}


def _times(runs: Mapping[str, Callable[[], object]], budget: float) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in runs}
    start = time.thread_time()
    for round_number in range(MOST_ROUNDS):
        if round_number >= FEWEST_ROUNDS and time.thread_time() - start > budget:
            break
        for name, run in runs.items():
            before = time.thread_time()
            run()
            times[name].append(time.thread_time() - before)
    return times


def timed_inputs(
    file: LoadedModel, inputs: Mapping[str, NDArray[Any]], budget: float = BUDGET
) -> Mapping[str, NDArray[Any]]:
    """The first sample of a batch if the fewest runs with all of it take longer than the budget, else all of it.

    Args:
        file: A model that has run on the batch.
        inputs: The batch.
        budget: CPU seconds that timing should take.
    """
    rounds = _PROFILED_RUNS + 2 * FEWEST_ROUNDS
    shapes = [file.inputs[name][0] for name in inputs]
    is_open = all(shape and not isinstance(shape[0], int) for shape in shapes)
    if not is_open or len({len(array) for array in inputs.values()}) != 1 or rounds * file.last_seconds <= budget:
        return inputs
    sample = {name: array[:1] for name, array in inputs.items()}
    try:
        file.run(sample)
    except ModelError:  # inside, the size of the batch is fixed
        return inputs
    return sample


@dataclass(frozen=True, kw_only=True)
class Speed:
    """How fast a file is.

    Attributes:
        ratio: How many times as fast as the original, by the medians of the times.
        least: What that may be with other runs: the ratio of the shortest times, which a busy machine changes least,
            or two standard errors less than a ratio below ``CLEAR``, if that is smaller.
        nodes: Its costliest nodes as text.
        seconds: The median of its times.
    """

    ratio: float
    least: float
    nodes: tuple[str, ...]
    seconds: float

    def matters(self, verdict: Level | None) -> bool:
        """Whether a user should act on a file that is slower.

        Not if a run takes next to no time, and not if it loses less than runs differ and the numbers are good too.
        """
        lost = self.seconds * (1 - self.ratio)
        return self.seconds >= TINY and (lost >= UNNOTICED or verdict not in (None, "good"))


def speed_of(
    file: LoadedModel, original: LoadedModel, inputs: Mapping[str, NDArray[Any]], budget: float = BUDGET
) -> Speed:
    """Compare the time of a file with that of the original.

    Args:
        file: Loaded with ``profile=True``.
        original: The model that it is compared with.
        inputs: The batch.
        budget: As for ``median_seconds``.
    """
    nodes = _costliest(file, inputs)
    original.run(inputs)
    return _speed(_times({"file": lambda: file.run(inputs), "original": lambda: original.run(inputs)}, budget), nodes)


def speed_apart(
    file: LoadedModel, original: ModelProto, inputs: Mapping[str, NDArray[Any]], budget: float = BUDGET
) -> Speed:
    """As ``speed_of`` for large models: the file is closed before the original is loaded, which is timed in parts.

    Args:
        file: Loaded with ``profile=True``; it cannot be used any more.
        original: The model that it is compared with.
        inputs: The batch.
        budget: As for ``median_seconds``.
    """
    nodes = _costliest(file, inputs)
    times = _times({"file": lambda: file.run(inputs)}, budget / 2)
    file.close()
    times["original"] = _times_in_parts(original, inputs, budget / 2)
    rounds = min(len(values) for values in times.values())
    return _speed({name: values[:rounds] for name, values in times.items()}, nodes)


def _times_in_parts(model: ModelProto, inputs: Mapping[str, NDArray[Any]], budget: float) -> list[float]:
    """The times of a model, each the sum of those of its parts."""
    parts = consecutive_parts(model, parameter_bytes(model) // PARTS)
    times = list[list[float]]()
    for part, own in _loaded_parts(model, parts, dict(inputs)):  # their first run does not count
        times.append(_times({"part": partial(part.run, own)}, budget / len(parts))["part"])
    return [sum(each) for each in zip(*times, strict=False)]


def outputs_in_parts(model: ModelProto, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The outputs of a large model, of which a part is loaded at a time, with its own weights.

    Raises:
        ModelError: onnxruntime cannot load or run the model.
    """
    names = [value.name for value in model.graph.output]
    made = {name for node in model.graph.node for name in node.output}
    if not made.issuperset(names):  # a constant
        return LoadedModel(model, lean=True).kept_outputs(inputs)
    values = dict(inputs)
    for _ in _loaded_parts(model, consecutive_parts(model, parameter_bytes(model) // PARTS), values, lean=True):
        pass
    return {name: values[name] for name in names}


def _loaded_parts(
    model: ModelProto, parts: Sequence[Sequence[NodeProto]], values: dict[str, NDArray[Any]], *, lean: bool = False
) -> Iterator[tuple[LoadedModel, dict[str, NDArray[Any]]]]:
    """Each part, after it has run once, and its inputs; it is closed when the next one is asked for.

    Args:
        model: The model.
        parts: Its nodes.
        values: The inputs; outputs of the parts are added, and removed when no later part reads them.
        lean: As for ``LoadedModel``.
    """
    wanted = {value.name for value in model.graph.output}
    for index in range(len(parts)):
        part = LoadedModel(part_model(model, parts, index, values), lean=lean)
        own = {name: values[name] for name in part.inputs}
        values |= part.kept_outputs(own)
        yield part, own
        part.close()
        wanted_later = wanted.union(*(reads(node) for later in parts[index + 1 :] for node in later))
        for name in values.keys() - wanted_later:
            del values[name]


def _costliest(file: LoadedModel, inputs: Mapping[str, NDArray[Any]]) -> tuple[str, ...]:
    return tuple(f"{cost.node} ({cost.operator}) {cost.share:.0%}" for cost in file.costliest_nodes(inputs))


def _speed(times: Mapping[str, Sequence[float]], nodes: tuple[str, ...]) -> Speed:
    ratio = statistics.median(times["original"]) / statistics.median(times["file"])
    surely = ratio if ratio >= CLEAR else ratio - 2 * _median_error(times)
    least = min(surely, min(times["original"]) / min(times["file"]))
    return Speed(ratio=ratio, least=least, nodes=nodes, seconds=statistics.median(times["file"]))


def _median_error(times: Mapping[str, Sequence[float]]) -> float:
    """The standard error of the median of the ratios of the rounds: 1.25 σ / √n, where the quartiles give σ."""
    ratios = [slow / fast for slow, fast in zip(times["original"], times["file"], strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    return 1.25 * (high - low) / 1.35 / math.sqrt(len(ratios))
