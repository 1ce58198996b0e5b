"""What each choice of a layer costs: bytes of weights, bit operations, or milliseconds on this machine."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from amct import log
from amct.errors import ExportError, ModelError, SearchError
from amct.export.check.batch import batch_size
from amct.export.check.running import LoadedModel, median_seconds
from amct.export.request import Placement
from amct.model.kinds import KIND_OF_CAFFE_TYPE, KIND_OF_TORCH_TYPE, LayerKind
from amct.report.filling import input_key
from amct.search.choices import DATA_BITS, FLOAT, WEIGHT_BITS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from amct.pipeline.quantized_model import QuantizedModel
    from amct.search.run import Candidates

BUDGET = 0.4
"""Seconds for one comparison of two files."""
WITHOUT_WEIGHTS = 0.01
"""How many weights a layer without weights counts as, as a share of the mean layer."""


@dataclass(frozen=True)
class Cost:
    """What is to be small.

    Attributes:
        unit: Of the numbers, for people.
        of: The cost of a layer and a choice.
        measured: The cost of a whole candidate; None: the sum of its layers.
    """

    unit: str
    of: Callable[[str, str], float]
    measured: Callable[[QuantizedModel], float] | None = None


def bytes_of(candidates: Candidates) -> Cost:
    """The cost of a choice in bytes of weights; a layer without weights has a little too."""
    values = {name: each.values for name, each in candidates.freedom.items()}
    least = WITHOUT_WEIGHTS * sum(values.values()) / max(1, len(values))
    return Cost("bytes", lambda layer, choice: (values[layer] or least) * WEIGHT_BITS[choice] / 8)


def bit_operations_of(candidates: Candidates) -> Cost:
    """The cost of a choice: multiplications of one sample times the bits of both factors; float counts 32 bits."""
    counts = multiplications(candidates)
    return Cost("bit operations", lambda layer, choice: counts[layer] * WEIGHT_BITS[choice] * DATA_BITS[choice])


def multiplications(candidates: Candidates) -> dict[str, float]:
    """By layer: how often its weights are multiplied for one sample; without weights, how many results it has."""
    base, freedom = candidates.base, candidates.freedom
    seen: Counter[str] = Counter()

    def note(key: str, tensor: Tensor) -> None:
        owner = transposed.get(key)
        kind = kinds.get(owner or key)
        if owner is None and kind is LayerKind.CONV_TRANSPOSE:
            return
        axis = 1 if kind in (LayerKind.CONV, LayerKind.CONV_TRANSPOSE) else -1
        channels = tensor.shape[axis] if tensor.ndim > 1 and freedom[owner or key].values else 1
        seen[owner or key] += tensor.numel() // max(1, channels)

    kinds: dict[str, LayerKind | None] = {}
    for name in base.layers:
        plan = base.prepared.plan.find(name)
        assert plan is not None
        kinds[name] = KIND_OF_TORCH_TYPE.get(plan.type) or KIND_OF_CAFFE_TYPE.get(plan.type)
    transposed = {input_key(name): name for name, kind in kinds.items() if kind is LayerKind.CONV_TRANSPOSE}
    example = base.examples[0]
    watched = base.prepared.compared_models(base.qparams)[0]
    with watched.watch(
        outputs=note, inputs=lambda key, tensor: note(key, tensor) if key in transposed else None
    ) as run:
        run(example)
    samples = max(1, batch_size(example)[0])
    return {name: max(1, freedom[name].values) * seen[name] / samples for name in base.layers}


def latency_of(candidates: Candidates) -> Cost:
    """The cost of a choice: by how much the file is slower, in ms, if only this layer becomes that.

    Whole files are timed, as a layer changes its neighbours. Layers of regions that placement "auto" leaves float, and
    layers that are faster in float, have their lowest cost there, so the search leaves them float.

    Raises:
        SearchError: The model has no QDQ file that could be timed.
    """
    base, layers = candidates.base, candidates.base.layers
    fastest = base.exported(Placement.AUTO.value)
    if isinstance(fastest, ExportError):
        raise SearchError(f'minimize="latency": there is no file to be timed: {fastest}')
    paying = {report.layer for report in fastest.layers} if FLOAT in candidates.choices else set(layers)
    left = {name: FLOAT for name in layers if name not in paying}
    quantized = next(each for each in candidates.choices if each != FLOAT)
    timer = _Timer(candidates, left)
    found: dict[tuple[str, str], float] = {}
    for layer in log.track([name for name in layers if name in paying], "Timing each layer"):
        for choice in candidates.possible(layer):
            if choice == quantized or len(paying) <= (choice == FLOAT):
                continue
            slower = timer.milliseconds({**left, layer: choice}) - timer.present
            found[layer, choice] = min(slower, timer.present)  # without a file it is avoided
    share = timer.present / len(layers)
    nothing = dict.fromkeys(((name, FLOAT) for name in left), -share)  # more than any other choice saves
    return Cost("ms", lambda layer, choice: share + {**nothing, **found}.get((layer, choice), 0.0), timer.of)


class _Timer:
    """Times files in turn with one of them.

    Args:
        candidates: What can be made.
        choices: Of the file beside which all others are timed.

    Attributes:
        present: Its time in ms.
    """

    def __init__(self, candidates: Candidates, choices: Mapping[str, str]) -> None:
        self._candidates = candidates
        self._inputs = candidates.base.prepared.onnx_inputs(candidates.base.examples[0])
        exported = candidates.made(choices).exported()
        assert not isinstance(exported, ExportError)  # its layers are some of those of a file that there is
        self._beside = LoadedModel(exported.model)
        self.present = 1000 * self._seconds(self._beside)["other"]

    def milliseconds(self, choices: Mapping[str, str]) -> float:
        """The time of a candidate."""
        return self.of(self._candidates.made(choices))

    def of(self, model: QuantizedModel) -> float:
        """The time of the file of a model; infinite if there is none, or onnxruntime cannot run it."""
        exported = model.exported()
        if isinstance(exported, ExportError):
            return math.inf
        try:
            loaded = LoadedModel(exported.model)
            times = self._seconds(loaded)
        except ModelError:
            return math.inf
        loaded.close()
        return self.present * times["other"] / times["present"]

    def _seconds(self, loaded: LoadedModel) -> dict[str, float]:
        for each in (self._beside, loaded):
            each.run(self._inputs)
        runs = {"present": lambda: self._beside.run(self._inputs), "other": lambda: loaded.run(self._inputs)}
        return median_seconds(runs, budget=BUDGET)


SIZE, LATENCY = "size", "latency"
COSTS: Mapping[str, Callable[[Candidates], Cost]] = MappingProxyType(
    {SIZE: bytes_of, LATENCY: latency_of, "bitops": bit_operations_of}
)
"""What can be minimized."""
