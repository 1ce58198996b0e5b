"""Layers put in front of the inputs of others: IFMR for calibration, Quant in the results."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amct.caffe.engine.messages import new_message
from amct.caffe.uninplace import free_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from amct.caffe.engine.messages import ProtoMessage
    from amct.caffe.model import CaffeModel
    from amct.config.plan import LayerPlan


def taken_names(model: CaffeModel) -> set[str]:
    """The names of all layers and blobs, so that new ones do not meet them."""
    return model.blob_names() | {layer.name for layer in model.layers}


def input_layer(kind: str, owner: ProtoMessage, index: int, taken: set[str]) -> ProtoMessage:
    """A layer for one bottom of ``owner``, named after it; the owner reads its top from now on."""
    suffix = f"_{index}" if len(owner.bottom) > 1 else ""
    name = free_name(f"{owner.name}_{kind.lower()}{suffix}", taken)
    made = new_message("LayerParameter", name=name, type=kind)
    made.bottom.append(owner.bottom[index])
    made.top.append(name)
    owner.bottom[index] = name
    return made


def insert_ifmr(model: CaffeModel, plans: Mapping[str, LayerPlan], record_file: str) -> None:
    """Put an IFMR layer before every input that is quantized, in place.

    Layers that read one blob at the same index with the same settings share one.
    """
    taken = taken_names(model)
    shared: dict[object, ProtoMessage] = {}
    result: list[ProtoMessage] = []
    for layer in model.layers:
        plan = plans.get(layer.name)
        for index in range(len(layer.bottom)) if plan is not None else ():
            assert plan is not None
            key = (layer.bottom[index], index, plan.activations[index], plan.batch_num)
            if key in shared:
                shared[key].ifmr_param.object_layer.append(layer.name)
                layer.bottom[index] = shared[key].top[0]
                continue
            made = shared[key] = input_layer("IFMR", layer, index, taken)
            _fill_ifmr(made.ifmr_param, plan, index, record_file)
            made.ifmr_param.object_layer.append(layer.name)
            result.append(made)
        result.append(layer)
    last = [layer for layer in result if layer.type == "IFMR"]
    if last:
        last[-1].ifmr_param.reports_progress = True
    model.set_layers(result)


def _fill_ifmr(options: ProtoMessage, plan: LayerPlan, index: int, record_file: str) -> None:
    settings = plan.activations[index]
    options.search_range_start, options.search_range_end = settings.search_range  # type: ignore[union-attr]
    options.search_step = settings.search_step  # type: ignore[union-attr]
    options.max_percentile = settings.max_percentile  # type: ignore[union-attr]
    options.min_percentile = settings.min_percentile  # type: ignore[union-attr]
    options.with_offset = settings.asymmetric
    options.batch_num = plan.batch_num
    options.record_file_path = record_file
    options.index = index
    options.num_bits_d = settings.num_bits


def insert_quant(
    model: CaffeModel, wanted: Mapping[str, object], fill: Callable[[ProtoMessage, ProtoMessage, int], None]
) -> dict[str, list[str]]:
    """Put a Quant layer before every bottom of the wanted layers, in place; ``fill(quant, layer, index)`` sets it up.

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
