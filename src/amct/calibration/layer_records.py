"""Conversion from planned layers to streams, and from calibration results to records, in both dialects of AMCT."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from amct.calibration.session import HIDDEN, INPUT, OUTPUT, Stream
from amct.record import CaffeLayerRecord, DataFactors, KvCacheRecord, LayerRecord

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from amct.calibration.session import CalibrationResult
    from amct.config.plan import LayerPlan
    from amct.config.ptq.kv_cache import KvCacheLayerPlan
    from amct.numerics.qparams import Observed
    from amct.record import CaffeRecord, Record


def plan_streams(layers: Iterable[LayerPlan], recurrent: Collection[str] = ()) -> Iterator[Stream]:
    """Yield the streams to observe: the input of each layer, and the hidden state of the ``recurrent`` layers."""
    for layer in layers:
        for name in (INPUT, HIDDEN) if layer.name in recurrent else (INPUT,):
            yield Stream(
                layer=layer.name,
                name=name,
                settings=layer.activation,
                batch_num=layer.batch_num,
                force_fp16=layer.force_fp16,
            )


def complete_record(record: Record, result: CalibrationResult) -> Record:
    """Return a record of weight factors with the activation factors added."""
    return record.with_layers({name: _with_activations(entry, result.layers[name]) for name, entry in record.items()})


def _with_activations(entry: LayerRecord, factors: Mapping[str, Observed]) -> LayerRecord:
    found = factors[INPUT]
    entry = replace(entry, scale_d=float(found.scale), offset_d=int(found.offset), act_type=f"INT{found.bits}")
    hidden = factors.get(HIDDEN)
    if hidden is None:
        return entry
    return replace(entry, scale_h=float(hidden.scale), offset_h=int(hidden.offset))


LAST_AXIS = -1


def kv_cache_stream(layer: KvCacheLayerPlan) -> Stream:
    """Return the stream of a layer whose output goes to a key/value cache."""
    return Stream(
        layer=layer.name,
        name=OUTPUT,
        settings=layer.activation,
        batch_num=layer.batch_num,
        channel_axis=LAST_AXIS if layer.per_channel else None,
    )


def kv_cache_entries(result: CalibrationResult) -> dict[str, KvCacheRecord]:
    """Return the entries of the record, one scale and offset per layer or per element of the last dimension."""
    return {layer: _kv_cache_entry(found[OUTPUT]) for layer, found in result.layers.items()}


def _kv_cache_entry(factors: Observed) -> KvCacheRecord:
    return KvCacheRecord(
        scale=tuple(factors.scale.reshape(-1).tolist()), offset=tuple(factors.offset.reshape(-1).tolist())
    )


IMAGE_AXES = 4


def caffe_stream(index: int) -> str:
    """Return the name of the stream of one bottom of a Caffe layer."""
    return f"{INPUT} {index}"


def caffe_inputs(result: CalibrationResult) -> dict[str, list[DataFactors]]:
    """Return the factors of all inputs of each Caffe layer, with channels, height and width of 4-dimensional inputs."""
    return {
        layer: [
            _data_factors(int(name.removeprefix(INPUT)), factors, result.shapes[layer][name])
            for name, factors in found.items()
        ]
        for layer, found in result.layers.items()
    }


def _data_factors(index: int, factors: Observed, shape: Sequence[int]) -> DataFactors:
    sizes = dict(zip(("channels", "height", "width"), shape[1:], strict=True)) if len(shape) == IMAGE_AXES else {}
    return DataFactors(
        index=index, scale=float(factors.scale), offset=int(factors.offset), num_bits=factors.bits, **sizes
    )


def complete_caffe_record(record: CaffeRecord, result: CalibrationResult) -> CaffeRecord:
    """Return a record of weight factors with the activation factors added; layers without weights get new entries."""
    found = caffe_inputs(result)
    entries = {
        layer: replace(record.layers.get(layer, CaffeLayerRecord()), record_d=tuple(inputs))
        for layer, inputs in found.items()
    }
    return record.with_layers(entries)
