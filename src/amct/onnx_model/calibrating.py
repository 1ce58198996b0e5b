"""Calibration: runs the model in onnxruntime with quantized weights while a session observes the layer inputs.

Only the observed tensors of one batch are in memory at a time, of a large model those of a part of its layers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from amct.calibration import ALONE, BalanceSession, CalibrationSession
from amct.calibration.session import HIDDEN
from amct.calibration.streams import plan_streams
from amct.export.onnx.kept_weights import KeptWeights
from amct.export.onnx.layer_lookup import find_layers
from amct.export.onnx.messages import parameter_bytes
from amct.export.onnx.parts import PartRunner
from amct.export.onnx.runtime import Runner, as_tensor
from amct.memory import LARGE_MODEL
from amct.onnx_model.layers import find_all_layers, float_weights
from amct.pipeline.door import Calibration
from amct.pipeline.flow import BALANCE
from amct.pipeline.weights import layer_balance

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from numpy.typing import NDArray
    from onnx import ModelProto
    from torch import Tensor

    from amct.calibration import Ranks
    from amct.config.plan import Plan
    from amct.export.onnx.layer import OnnxLayer
    from amct.onnx_model.batches import Feeds
    from amct.onnx_model.door import OnnxPreparation
    from amct.pipeline.flow import Passes

_PARTS = 12
"""Of a large model: so many parts run one after the other."""


@dataclass(frozen=True, kw_only=True)
class ObservedNames:
    """The observed tensors of a layer: its input; recurrent layers: also initial state (if any) and output."""

    input: str
    state: str | None = None
    output: str | None = None
    hidden_size: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all observed tensors."""
        return tuple(name for name in (self.input, self.state, self.output) if name)

    def hidden(self, values: Mapping[str, NDArray[Any]]) -> Tensor:
        """The initial hidden state (zero if none is given) and the state after every step but the last."""
        assert self.output is not None
        outputs = values[self.output]
        first = values[self.state] if self.state else np.zeros(self.hidden_size, outputs.dtype)
        return as_tensor(np.concatenate([first.reshape(-1), outputs[:-1].reshape(-1)]))


def start_calibration(prepared: OnnxPreparation, ranks: Ranks = ALONE) -> Calibration:
    """Start the calibration of a prepared model in onnxruntime.

    Raises:
        ModelError: onnxruntime cannot load the model.
    """
    recurrent = [name for name, layer in prepared.onnx_layers.items() if layer.kind.is_recurrent]
    observers = prepared.tensor_observers()
    session = CalibrationSession(plan_streams(prepared.layer_plans, recurrent), tensors=observers, ranks=ranks)
    kept = KeptWeights()
    model, watched = watch_layers(prepared.partly_rounded(prepared.weights, kept), prepared)
    show = _watching(model, kept, watched, observers)

    def run(batches: Iterable[Feeds]) -> None:
        for feeds in batches:
            with session.batch(called_once=watched):
                observation = _Observation(session, prepared, watched, observers)
                for values in show(feeds):
                    observation.take(values)

    return Calibration(session=session, run=run, observes_tensors=prepared.tensor_plan is not None)


def _watching(
    model: ModelProto, kept: KeptWeights, watched: Mapping[str, ObservedNames], between: Collection[str]
) -> Callable[[Feeds], Iterable[dict[str, NDArray[Any]]]]:
    """A function that runs the model and returns the watched tensors, those of a large model in parts."""
    names = [*(name for each in watched.values() for name in each.names), *between]
    if parameter_bytes(model) < LARGE_MODEL:
        runner = Runner(model, names, lean=True)
        return lambda feeds: [runner.run(feeds)]
    return PartRunner(model, kept, names, _places_to_cut(model, watched)).run


def _places_to_cut(model: ModelProto, watched: Mapping[str, ObservedNames]) -> set[str]:
    """Outputs of the nodes that read a layer's input first, in ``_PARTS`` parts of equally many layers."""
    inputs = {each.input for each in watched.values()}
    readers = [node.output[0] for node in model.graph.node if not inputs.isdisjoint(node.input)]
    return set(readers[:: max(1, len(readers) // _PARTS)])


class _Observation:
    """Passes the tensors of one batch to the session; each is freed before observers keep values of the next.

    Args:
        session: The session.
        prepared: The model.
        watched: The tensors of the layers.
        between: Tensors that are observed by themselves, too.
    """

    def __init__(
        self,
        session: CalibrationSession,
        prepared: OnnxPreparation,
        watched: Mapping[str, ObservedNames],
        between: Collection[str],
    ) -> None:
        self._session, self._prepared, self._between = session, prepared, between
        self._waiting = dict(watched)
        self._readers = Counter(tensor for tensors in watched.values() for tensor in set(tensors.names))
        self._values: dict[str, NDArray[Any]] = {}

    def take(self, found: dict[str, NDArray[Any]]) -> None:
        """Observe some tensors, which are removed from ``found``, and the layers that have all of theirs now."""
        for name in [name for name in self._between if name in found and not self._readers[name]]:
            self._session.observe_tensor(name, as_tensor(found.pop(name)))
        self._values |= {name: value for name, value in found.items() if self._readers[name]}
        found.clear()
        for layer, tensors in list(self._waiting.items()):
            if all(name in self._values for name in tensors.names):
                del self._waiting[layer]
                self._observe_layer(layer, tensors)

    def _observe_layer(self, layer: str, tensors: ObservedNames) -> None:
        weights = self._prepared.weights[layer]
        self._session.observe(layer, weights.balanced_input(as_tensor(self._values[tensors.input])))
        if tensors.output is not None:
            self._session.observe(layer, tensors.hidden(self._values), HIDDEN)
        for name in set(tensors.names):
            self._readers[name] -= 1
            if self._readers[name]:
                continue
            if name in self._between:
                self._session.observe_tensor(name, as_tensor(self._values[name]))
            del self._values[name]


def watch_layers(model: ModelProto, prepared: OnnxPreparation) -> tuple[ModelProto, dict[str, ObservedNames]]:
    """Find the tensors to observe for each quantized layer, in a model with the nodes of the folded one.

    Returns:
        The model, with the observed output added to every recurrent layer, and the tensors by layer.
    """
    graph, layers, _ = find_layers(model, [each for each in prepared.bindings if each.layer in prepared.weights])
    watched = {}
    for layer in layers:
        if layer.kind.is_recurrent and not layer.node.output[0]:
            layer.node.output[0] = graph.fresh_name(f"{layer.name}.all_states")
        watched[layer.name] = _watched(layer)
    return graph.build(), watched


def _watched(layer: OnnxLayer) -> ObservedNames:
    if not layer.kind.is_recurrent:
        return ObservedNames(input=layer.reader.input[0])
    assert layer.recurrent_weight is not None
    state = layer.node.input[5] if len(layer.node.input) > 5 else ""
    return ObservedNames(
        input=layer.node.input[0],
        state=state or None,
        output=layer.node.output[0],
        hidden_size=layer.recurrent_weight.shape[1],
    )


def balance_of(model: ModelProto, plan: Plan, data: Passes, ranks: Ranks = ALONE) -> dict[str, Tensor]:
    """Compute the DMQ factors of the layers that the plan balances; without such layers nothing is run.

    Of several processes each runs its share of the batches, and all get the same factors.

    Raises:
        CalibrationError: the data of a layer cannot be used; the message names the layer.
    """
    plans = {layer.name: layer for layer in plan.balanced}
    if not plans:
        return {}
    layers = {name: found.layer for name, found in find_all_layers(model).found.items() if name in plans}
    maxima: dict[str, Tensor] = {}
    session = BalanceSession(layers, maxima.update, ranks=ranks)
    runner = Runner(model, [layer.node.input[0] for layer in layers.values()], lean=True)
    for feeds in data.observed(BALANCE, session):
        values = runner.run(feeds)
        with session.batch():
            for name, layer in layers.items():
                session.observe(name, as_tensor(values[layer.node.input[0]]), layer.kind.channel_axis)
    session.finish()
    return {
        name: layer_balance(plans[name], float_weights(layers[name])[0], maximum) for name, maximum in maxima.items()
    }
