"""How much each layer alone harms the outputs of a model: the causes, where a comparison layer by layer shows victims.

One layer at a time is quantized, weights and input, and the float model around it stays as it is. No labels are needed,
and no other calibration than the one that gave the parameters. What comes before the layer is computed once: the float
model leaves its tensors at some places, and each model runs from the last place before its layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from amct import log
from amct.export.check.losses import similarity_over
from amct.export.onnx.messages import reads
from amct.export.onnx.parts import part_model
from amct.export.onnx.runtime import Runner

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from onnx import ModelProto, NodeProto

    from amct.export.formats import ExportedModel

MOST_PLACES = 12
"""Places at which the tensors of the float model are kept."""
MOST_KEPT = 256 << 20
"""Bytes of all of them; from the beginning of the model on, as it goes on from there."""


@dataclass(frozen=True, kw_only=True)
class LayerSensitivity:
    """What quantizing one layer alone does to the outputs of the model.

    Attributes:
        layer: The layer.
        sqnr: The signal-to-quantization-noise ratio in dB of the output that suffers most; infinite without any error.
        share: The share of this layer in the sum of the noise of all layers.
    """

    layer: str
    sqnr: float
    share: float


def layer_sensitivity(
    layers: Sequence[str],
    quantized: Callable[[Collection[str]], ExportedModel],
    batches: Sequence[Mapping[str, NDArray[Any]]],
) -> list[LayerSensitivity]:
    """Quantize each layer alone and compare the outputs with those of the float model; the worst layer comes first.

    Args:
        layers: The quantized layers.
        quantized: Returns the folded model with just some layers quantized.
        batches: Inputs by name.

    Raises:
        ExportError: A layer has no quantized form.
        CalibrationError: The model does not run on the batches.
    """
    model = quantized(())  # it owns the weights of its model
    prefixes = Prefixes(model.model, batches)
    del model
    noise = {}
    for name in log.track(layers, "Quantizing each layer alone"):
        alone = quantized([name])
        found, _ = similarity_over(zip(prefixes.expected, prefixes.outputs(alone.model), strict=True))
        if found is not None:
            noise[name] = math.inf if math.isnan(found.sqnr) else 10 ** (-found.sqnr / 10)
    total = sum(noise.values())
    return [
        LayerSensitivity(
            layer=name,
            sqnr=math.inf if each == 0 else -10 * math.log10(each) if math.isfinite(each) else -math.inf,
            share=_share(each, total),
        )
        for name, each in sorted(noise.items(), key=lambda item: -item[1])
    ]


class Prefixes:
    """What the float model computes on some batches, kept at places where other models can go on.

    Args:
        model: The float model.
        batches: Inputs by name.

    Attributes:
        expected: The outputs of the float model.

    Raises:
        CalibrationError: The model does not run on the batches.
    """

    def __init__(self, model: ModelProto, batches: Sequence[Mapping[str, NDArray[Any]]]) -> None:
        self._batches = batches
        self._nodes = {node.SerializeToString() for node in model.graph.node}
        places = _places(model)
        runner = Runner(model, {name for place in places for name in place}, lean=True)
        found = [runner.run(batch) for batch in batches]
        self.expected = [{name: each[name] for name in runner.outputs} for each in found]
        self._kept: list[dict[str, NDArray[Any]]] = [dict(batch) for batch in batches]
        left = MOST_KEPT
        for name in dict.fromkeys(name for place in places for name in sorted(place)):
            left -= sum(each[name].nbytes for each in found)
            if left < 0:
                break
            for kept, each in zip(self._kept, found, strict=True):
                kept[name] = each[name]

    def outputs(self, model: ModelProto) -> Iterator[dict[str, NDArray[Any]]]:
        """The outputs of another model that has nodes of this one, and others: only what these change is computed."""
        nodes, changed = list(model.graph.node), set[str]()
        for node in nodes:
            if node.SerializeToString() not in self._nodes or not changed.isdisjoint(reads(node)):
                changed.update(node.output)
        known = {name for name in self._kept[0] if name not in changed}
        suffix = _nodes_behind(nodes, {value.name for value in model.graph.output} & changed, known)
        if not suffix:  # nothing that reaches an output is changed
            yield from self.expected
            return
        known -= {name for node in suffix for name in node.output}  # of a node that also makes another tensor
        if len(suffix) == len(nodes):
            runner = Runner(model, lean=True)
            yield from (runner.run(batch) for batch in self._batches)
            return
        given = [{name: kept[name] for name in known} for kept in self._kept]
        shapes = {tuple(array.shape for array in each.values()) for each in given}
        own = {id(node) for node in suffix}
        before = [node for node in nodes if id(node) not in own]
        part = part_model(model, [before, suffix], 1, given[0], any_size=len(shapes) > 1)
        runner = Runner(part, lean=True)
        names = {value.name for value in part.graph.input}
        for each, expected in zip(given, self.expected, strict=True):
            yield {**expected, **runner.run({name: each[name] for name in names})}


def _places(model: ModelProto) -> list[frozenset[str]]:
    """The tensors that cross each of some places in a model: all that comes later can be computed of them."""
    nodes = list(model.graph.node)
    if any("Sequence" in node.op_type or "Optional" in node.op_type for node in nodes):
        return []
    step = max(1, -(-len(nodes) // (MOST_PLACES + 1)))
    found = []
    for place in range(step, len(nodes), step):
        made = {name for node in nodes[:place] for name in node.output if name}
        found.append(frozenset(made & {name for node in nodes[place:] for name in reads(node)}))
    return [each for each in dict.fromkeys(found) if each]


def _nodes_behind(nodes: Sequence[NodeProto], outputs: Collection[str], known: Collection[str]) -> list[NodeProto]:
    """The nodes that compute some outputs of tensors that are known, in their order."""
    wanted, found = set(outputs), []
    for node in reversed(nodes):
        if wanted.isdisjoint(node.output):
            continue
        found.append(node)
        wanted.update(name for name in reads(node) if name not in known)
    return found[::-1]


def _share(noise: float, total: float) -> float:
    if not math.isfinite(total):
        return float(noise == math.inf)
    return noise / total if total else 0.0
