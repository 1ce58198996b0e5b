"""convert_model: builds a quantized model from a float model and user-supplied factors."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from amct.arguments import input_file, input_files
from amct.caffe.model import FEEDFORWARD_TYPES, CaffeModel, read_model
from amct.caffe.prototxt import caffe_function, layer_infos
from amct.caffe.ptq.deploy import Results
from amct.caffe.ptq.folding import check_global_statistics, fuse
from amct.caffe.ptq.graph import record_layers
from amct.caffe.ptq.quantized_weights import UNIFORM_BITS, given_weights
from amct.caffe.ptq.save import SaveNotes, prefix_of, save_results
from amct.errors import RecordError
from amct.model import Skip
from amct.record import normalize_record, read_caffe_record, validate_record
from amct.record.conversion import caffe_layer_qparams

if TYPE_CHECKING:
    from amct.atomic import AnyPath
    from amct.record import CaffeRecord

logger = logging.getLogger(__name__)


DATA_TYPES = (
    "PassThrough", "Pooling", "PSROIPooling", "ROIPooling", "SPP", "Upsample", "Eltwise", "Slice", "Concat", "Softmax",
    "ROIAlign", "AbsVal", "BNLL", "CReLU", "ELU", "Exp", "Interp", "Log", "LRN", "Mvm", "Nms", "Normalize", "Power",
    "PReLU", "Reduction", "ReLU", "Sigmoid", "Sort", "Threshold", "Scale", "BatchNorm", "Bias", "Reshape",
    "ShuffleChannel", "Crop",
)  # fmt: skip
"""The layers without weights that the guide lists for this function."""


@caffe_function
def convert_model(
    model_file: AnyPath,
    weights_file: AnyPath,
    scale_offset_record_file: AnyPath,
    save_path: AnyPath,
    custom_proto: AnyPath | None = None,
) -> None:
    """Write the fake-quant and the deploy model of a float model and a record of its factors.

    BatchNorm, Scale and Bias are folded unless the layer's entry has ``skip_fusion``; the factors must be those of the
    folded layers.

    Args:
        model_file: The prototxt of the float model.
        weights_file: Its caffemodel.
        scale_offset_record_file: The record; also the older form with ``scale_d`` directly in ``value``.
        save_path: Folder and prefix of the files, such as ``results/model``.
        custom_proto: A ``custom.proto`` with messages of your own layers (not in AMCT).

    Raises:
        ArgumentTypeError: an argument has the wrong type.
        FileError: a file cannot be read or written.
        ParseError, ModelError: a file is malformed or invalid, or the model is already quantized.
        RecordError: the record does not fit the model.
        CalibrationError: a bias does not fit int32 with these factors.
    """
    input_files(model_file=model_file, weights_file=weights_file)
    record_file = input_file(scale_offset_record_file, "scale_offset_record_file")
    record = read_caffe_record(scale_offset_record_file)
    for warning in record.warnings:
        logger.warning("%s", warning)
    original = read_model(model_file, weights_file, custom_proto)
    check_global_statistics(original.net)
    model = original.copy()
    fusion = fuse(model, skip=[name for name, entry in record.items() if entry.skip_fusion])
    record = _checked(record, original, model)
    refused = {info.name: info.refusal for info in layer_infos(model.net) if info.refusal}
    for name in refused.keys() & record.layers.keys():
        logger.warning('layer "%s" has factors in %s and stays float: %s', name, record.source, refused[name])
    record = replace(record, layers={name: entry for name, entry in record.items() if name not in refused})
    weights = {
        layer.name: given_weights(layer, model.weights[layer.name], record[layer.name].scale_w)
        for layer in model.layers
        if layer.type in FEEDFORWARD_TYPES and layer.name in record.layers
    }
    layers = {name: caffe_layer_qparams(entry) for name, entry in record.items()}
    left = [layer.name for layer in model.layers if layer.name not in record.layers]
    skips = [Skip(name, refused.get(name, "the record has no factors for it")) for name in left]
    notes = SaveNotes(original=original, fusion=fusion, not_quantized=skips)
    where, results = prefix_of(save_path), Results(model, weights, layers, may_raise_scale=False)
    save_results(results, notes, where, record_file, "Both")


def _checked(record: CaffeRecord, original: CaffeModel, model: CaffeModel) -> CaffeRecord:
    """The record, checked against the folded model, without entries of other layers."""
    left = {layer.name for layer in model.layers}
    folded = [layer.name for layer in original.layers if layer.name in record.layers and layer.name not in left]
    if folded:
        raise RecordError(
            f'layer "{folded[0]}" has factors in {record.source}, but it is fused into the layer before it; remove the '
            "entry, or set skip_fusion in the entry of that layer"
        )
    types = {*FEEDFORWARD_TYPES, *DATA_TYPES}
    layers = record_layers(model, set(), types)
    for note in validate_record(record, layers):
        logger.info("%s", note)
    record = normalize_record(record, layers)
    by_name = {layer.name: layer for layer in model.layers}
    for name, entry in record.items():
        if name not in by_name:  # accepted so far because of its object_layer
            raise RecordError(
                f'{record.source}: the key "{name}" is no layer of the model; its object_layer is '
                f'"{entry.object_layer}". Write the name of the layer as the key'
            )
        layer = by_name[name]
        if layer.type not in FEEDFORWARD_TYPES:
            continue
        if entry.weight_bits != UNIFORM_BITS:
            raise RecordError(
                f'layer "{name}": num_bits_w {entry.weight_bits} cannot be converted: a record has no table of the 16 '
                "values; use weights of 8 bits"
            )
    return record
