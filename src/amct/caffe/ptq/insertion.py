"""Inserts layers before the inputs of others (IFMR for calibration, Quant in the results), and calibrates in memory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from amct.caffe.engine.layers.ifmr import IFMR, start_session
from amct.caffe.engine.layers.integer import moves_values
from amct.caffe.engine.messages import new_message
from amct.caffe.model import feed
from amct.caffe.prototxt import free_name
from amct.calibration import ALONE
from amct.config.registry import settings_to_dict
from amct.model import TensorIndex
from amct.numerics.settings import IfmrSettings
from amct.pipeline.door import Calibration

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

    from amct.caffe.engine.messages import ProtoMessage
    from amct.caffe.model import Batch, CaffeModel
    from amct.caffe.ptq.graph import QuantGraph
    from amct.calibration import Ranks
    from amct.config.plan import LayerPlan
    from amct.numerics.observer import TensorObserver


def taken_names(model: CaffeModel) -> set[str]:
    """The names of all layers and blobs, which new names must not repeat."""
    return model.blob_names() | {layer.name for layer in model.layers}


def input_layer(kind: str, owner: ProtoMessage, index: int, taken: set[str]) -> ProtoMessage:
    """Create a layer for one bottom of ``owner``, named after it, and connect its top to the owner."""
    suffix = f"_{index}" if len(owner.bottom) > 1 else ""
    name = free_name(f"{owner.name}_{kind.lower()}{suffix}", taken)
    made = new_message("LayerParameter", name=name, type=kind)
    made.bottom.append(owner.bottom[index])
    made.top.append(name)
    owner.bottom[index] = name
    return made


def insert_ifmr(model: CaffeModel, plans: Mapping[str, LayerPlan], record_file: str = "") -> None:
    """Insert an IFMR layer before every quantized input, in place; only with a record file it holds the settings.

    Layers that read one blob at the same index with the same settings share one IFMR layer. Where several IFMR layers
    see the same values, one observes and the others reuse its factors: those of one blob at different indices, and
    those of layers that only move or select values (Concat, MAX pooling ...), whose values are rounded behind them.
    Rounding twice on one grid equals rounding once, so such a layer costs no accuracy.
    """
    taken = taken_names(model)
    settings_of = {name: [(settings, plan.batch_num) for settings in plan.activations] for name, plan in plans.items()}
    where = watched_blobs(model.layers, settings_of)
    shared: dict[object, ProtoMessage] = {}
    watching: dict[object, ProtoMessage] = {}
    following: list[tuple[ProtoMessage, tuple[str, object]]] = []
    result: list[ProtoMessage] = []
    for layer in model.layers:
        plan = plans.get(layer.name)
        for index in range(len(layer.bottom)) if plan is not None else ():
            assert plan is not None
            blob, settings = layer.bottom[index], (plan.activations[index], plan.batch_num)
            key = (blob, index, settings)
            if key in shared:
                shared[key].ifmr_param.object_layer.append(layer.name)
                layer.bottom[index] = shared[key].top[0]
                continue
            made = shared[key] = input_layer("IFMR", layer, index, taken)
            _fill_ifmr(made.ifmr_param, plan, index, record_file)
            made.ifmr_param.object_layer.append(layer.name)
            result.append(made)
            source = (where[blob], settings)
            if where[blob] == blob and source not in watching:
                watching[source] = made
            else:
                following.append((made, source))
        result.append(layer)
    for follower, watched in following:
        follower.ifmr_param.factors_from = watching[watched].name
    if watching:
        list(watching.values())[-1].ifmr_param.reports_progress = True
    model.set_layers(result)


def watched_blobs(layers: Sequence[ProtoMessage], settings_of: Mapping[str, Sequence[Hashable]]) -> dict[str, str]:
    """For each blob, the blob where its values are observed: itself, or one behind layers that only move values.

    It is another blob if all readers, through such layers, finally read that blob with the same settings.

    Args:
        layers: The layers of a net without in-place layers.
        settings_of: By quantized layer, the settings of each bottom.
    """
    index: TensorIndex[ProtoMessage] = TensorIndex()
    for layer in layers:
        index.add(layer, layer.bottom, layer.top)
    ends: dict[str, _End | None] = {}
    for blob in reversed(list(dict.fromkeys(blob for layer in layers for blob in (*layer.bottom, *layer.top)))):
        found = {
            _end_of(blob, layer, place, settings_of, ends)
            for layer in index.consumers(blob)
            for place, bottom in enumerate(layer.bottom)
            if bottom == blob
        }
        ends[blob] = found.pop() if len(found) == 1 else None
    return {blob: blob if end is None else end.blob for blob, end in ends.items()}


@dataclass(frozen=True)
class _End:
    """The last blob where values are rounded, and the settings of that rounding."""

    blob: str
    settings: Hashable


def _end_of(
    blob: str,
    layer: ProtoMessage,
    index: int,
    settings_of: Mapping[str, Sequence[Hashable]],
    ends: Mapping[str, _End | None],
) -> _End | None:
    """Where the values that a layer reads are rounded last, or None if unknown."""
    settings = settings_of.get(layer.name)
    if len(layer.top) == 1 and (moves_values(layer) or _is_identity(layer)):
        end = ends.get(layer.top[0])
        if end is not None and (settings is None or {*settings[: len(layer.bottom)]} <= {end.settings}):
            return end
    return None if settings is None else _End(blob, settings[index])


def _is_identity(layer: ProtoMessage) -> bool:
    """Whether the layer is an identity at inference."""
    return layer.type == "Dropout" and bool(layer.dropout_param.scale_train)


def _fill_ifmr(options: ProtoMessage, plan: LayerPlan, index: int, record_file: str) -> None:
    options.index = index
    if not record_file:
        return  # in memory the session takes the settings from the plan
    settings = plan.activations[index]
    if isinstance(settings, IfmrSettings):
        options.search_range_start, options.search_range_end = settings.search_range
        options.search_step = settings.search_step
        options.max_percentile = settings.max_percentile
        options.min_percentile = settings.min_percentile
    else:
        options.settings = json.dumps(settings_to_dict(settings))
    options.with_offset = settings.asymmetric
    options.batch_num = plan.batch_num
    options.record_file_path = record_file
    options.num_bits_d = settings.num_bits


def insert_quant(
    model: CaffeModel, wanted: Mapping[str, object], fill: Callable[[ProtoMessage, ProtoMessage, int], None]
) -> dict[str, list[str]]:
    """Insert a Quant layer before every bottom of the given layers, in place; ``fill(quant, layer, index)`` sets it up.

    Returns:
        The names of the new layers, by layer.
    """
    taken = taken_names(model)
    inserted: dict[str, list[str]] = {}
    result: list[ProtoMessage] = []
    for layer in model.layers:
        for index in range(len(layer.bottom)) if layer.name in wanted else ():
            made = input_layer("Quant", layer, index, taken)
            fill(made, layer, index)
            inserted.setdefault(layer.name, []).append(made.name)
            result.append(made)
        result.append(layer)
    model.set_layers(result)
    return inserted


def start_calibration(graph: QuantGraph, tensors: Mapping[str, TensorObserver], ranks: Ranks = ALONE) -> Calibration:
    """Start a calibration by the IFMR layers of a copy of the net of a graph whose weights are quantized.

    Args:
        graph: the graph.
        tensors: observers of blobs between layers, by name.
        ranks: the processes that calibrate together.

    Raises:
        CalibrationError: every layer is disabled.
    """
    model = graph.with_quantized_weights()
    insert_ifmr(model, graph.plans())
    net = model.build(tensors)
    layers = [layer for layer in net.layers if isinstance(layer, IFMR)]
    session = start_session(layers, plans=graph.plans(), tensors=tensors, ranks=ranks)

    def run(batches: Iterable[Batch]) -> None:
        for batch in batches:
            feed(net, batch)
            del batch  # the net holds a copy: only one batch stays in memory
            with session.batch():
                net.forward()
                for name in tensors:
                    session.observe_tensor(name, net.blob(name).tensor)

    return Calibration(session=session, run=run)
