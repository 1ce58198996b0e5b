"""Calibration: runs the model in onnxruntime with quantized weights while a session observes the layer inputs.

Only the observed tensors of one batch are in memory at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from amct.calibration import ALONE, BalanceSession, CalibrationSession
from amct.calibration.layer_records import plan_streams
from amct.calibration.session import HIDDEN
from amct.export.binding import placeholder_factors
from amct.export.onnx.kept_weights import KeptWeights
from amct.export.onnx.layer_lookup import find_layers
from amct.export.onnx.runtime import Runner, as_tensor
from amct.onnx_model.layers import find_all_layers, weight_parts
from amct.ptq.door import Calibration
from amct.ptq.passes import BALANCE
from amct.ptq.weights import balance_factors as layer_balance_factors

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from numpy.typing import NDArray
    from onnx import ModelProto
    from torch import Tensor

    from amct.calibration import Ranks
    from amct.config.plan import Plan
    from amct.export.onnx.layer import Layer
    from amct.onnx_model.batches import Feeds
    from amct.onnx_model.door import OnnxPreparation
    from amct.ptq.passes import Passes


@dataclass(frozen=True, kw_only=True)
class Watched:
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
    kept = KeptWeights()  # the session of the runner keeps them
    model, watched = watch_layers(prepared.rounded_model(kept), prepared)
    runner = Runner(model, [*(name for each in watched.values() for name in each.names), *observers], lean=True)

    def run(batches: Iterable[Feeds]) -> None:
        for feeds in batches:
            with session.batch():
                values = runner.run(feeds)
                _observe(session, prepared, watched, values, observers)
                del values

    return Calibration(session=session, run=run, observes_tensors=prepared.intermediate_tensors is not None)


def _observe(
    session: CalibrationSession,
    prepared: OnnxPreparation,
    watched: Mapping[str, Watched],
    values: dict[str, NDArray[Any]],
    between: Collection[str],
) -> None:
    """Observe the tensors of layers and those between them; each is freed before observers keep values of the next."""
    last = {tensor: name for name, tensors in watched.items() for tensor in tensors.names}
    for tensor in between:
        if tensor not in last:
            session.observe_tensor(tensor, as_tensor(values.pop(tensor)))
    for name, tensors in watched.items():
        session.observe(name, prepared.weights[name].balanced_input(as_tensor(values[tensors.input])))
        if tensors.output is not None:
            session.observe(name, tensors.hidden(values), HIDDEN)
        for tensor in dict.fromkeys(tensors.names):
            if last[tensor] != name:
                continue
            if tensor in between:
                session.observe_tensor(tensor, as_tensor(values[tensor]))
            del values[tensor]


def watch_layers(model: ModelProto, prepared: OnnxPreparation) -> tuple[ModelProto, dict[str, Watched]]:
    """Find the tensors to observe for each quantized layer, in a model with the nodes of the folded one.

    Returns:
        The model, with the observed output added to every recurrent layer, and the tensors by layer.
    """
    placeholders = dict.fromkeys(prepared.weights, placeholder_factors())
    graph, layers, _ = find_layers(model, prepared.bindings, placeholders)
    watched = {}
    for layer in layers:
        if layer.kind.is_recurrent and not layer.node.output[0]:
            layer.node.output[0] = graph.fresh_name(f"{layer.name}.all_states")
        watched[layer.name] = _watched(layer)
    return graph.build(), watched


def _watched(layer: Layer) -> Watched:
    if not layer.kind.is_recurrent:
        return Watched(input=layer.reader.input[0])
    assert layer.recurrent_weight is not None
    state = layer.node.input[5] if len(layer.node.input) > 5 else ""
    return Watched(
        input=layer.node.input[0],
        state=state or None,
        output=layer.node.output[0],
        hidden_size=layer.recurrent_weight.shape[1],
    )


def balance_factors(model: ModelProto, plan: Plan, data: Passes, ranks: Ranks = ALONE) -> dict[str, Tensor]:
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
        name: layer_balance_factors(plans[name], weight_parts(layers[name])[0], maximum)
        for name, maximum in maxima.items()
    }
