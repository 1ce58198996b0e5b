"""AMCT's functions for post-training quantization of Caffe models, in the order of the AMCT guide.

create_quant_config → init → weights_quantize_model → (BatchNorm updates by the user's forwards) →
activation_quantize_model → the user's own forwards of the modified model → save_model. The calibration is done by the
IFMR layers of the modified model: running it calibrates.

Under ``torch.distributed`` every process calls these functions, with the same files, and runs its share of the batches;
only that of rank 0 writes, and the functions that write a model wait for it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from amct import log
from amct.arguments import input_file, input_files, output_file
from amct.atomic import FileGroup, read_bytes, write_text
from amct.caffe.engine import blob
from amct.caffe.model import read_model, write_model
from amct.caffe.prototxt import caffe_function, layer_infos, restore_in_place
from amct.caffe.ptq.folding import check_global_statistics
from amct.caffe.ptq.graph import (
    QuantGraph,
    Stage,
    check_graph,
    fold_updated_statistics,
    insert_ifmr,
    refresh_statistics,
)
from amct.calibration import all_ranks
from amct.calibration.record_files import progress_path
from amct.config.ptq.caffe import CAFFE
from amct.export.check.batch import batch_path
from amct.printable import counted
from amct.record import CaffeRecord, write_record

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from amct.atomic import AnyPath

logger = logging.getLogger(__name__)


def set_gpu_mode() -> None:
    """Run all following quantization on the GPU; without a GPU, warn and use the CPU."""
    log.start("amct_caffe")
    blob.set_mode_gpu()


def set_cpu_mode() -> None:
    """Run all following quantization on the CPU (the default)."""
    blob.set_mode_cpu()


@caffe_function
def create_quant_config(  # noqa: PLR0913  most of them are optional
    config_file: AnyPath,
    model_file: AnyPath,
    weights_file: AnyPath,
    batch_num: int = 1,
    activation_offset: bool = True,
    config_defination: AnyPath | None = None,
    custom_proto: AnyPath | None = None,
    skip_layers: Sequence[str] | None = None,
) -> None:
    """Write the JSON config of a model: every quantizable layer with its settings.

    Args:
        config_file: The file to write; an existing file is overwritten.
        model_file: The prototxt.
        weights_file: The caffemodel.
        batch_num: Number of calibration batches; ignored with ``config_defination``.
        activation_offset: Whether activations are quantized with an offset; ignored with ``config_defination``.
        config_defination: A simple config (``.cfg``).
        custom_proto: A ``custom.proto`` with messages of your own layers (not in AMCT).
        skip_layers: Names of layers that stay float, as in the guide's sample; ignored with ``config_defination``.

    Raises:
        ArgumentTypeError: an argument has the wrong type.
        FileError: a file cannot be read or written.
        ParseError, ModelError, ConfigError: a file is malformed or invalid, or a layer to skip is unknown.
    """
    target = output_file(config_file, "config_file")
    input_files(model_file=model_file, weights_file=weights_file)
    layers = layer_infos(read_model(model_file, weights_file, custom_proto).net)
    if config_defination is not None:
        source = input_file(config_defination, "config_defination")
        config = CAFFE.expand_config(read_bytes(source), str(config_defination), layers)
    else:
        config = CAFFE.default_config(
            layers, batch_num=batch_num, activation_offset=activation_offset, skip_layers=skip_layers or ()
        )
    for warning in config.warnings:
        logger.warning("%s", warning)
    write_text(target, config.to_json())
    logger.info("Create quant config %s success!", config_file)


@caffe_function
def init(
    config_file: AnyPath,
    model_file: AnyPath,
    weights_file: AnyPath,
    scale_offset_record_file: AnyPath,
    custom_proto: AnyPath | None = None,
) -> QuantGraph:
    """Read config and model, and create an empty record file.

    Args:
        config_file: The JSON config that ``create_quant_config`` wrote, possibly edited.
        model_file: The prototxt; its BatchNorm layers must use global statistics.
        weights_file: The caffemodel.
        scale_offset_record_file: The record file; emptied if it exists.
        custom_proto: A ``custom.proto`` with messages of your own layers (not in AMCT).

    Returns:
        The graph to pass to the other functions.

    Raises:
        ArgumentTypeError: an argument has the wrong type.
        FileError: a file cannot be read or written.
        ParseError, ModelError, ConfigError: a file is malformed, invalid, or does not belong to the model.
    """
    input_files(config_file=config_file, model_file=model_file, weights_file=weights_file)
    record = output_file(scale_offset_record_file, "scale_offset_record_file")
    original = read_model(model_file, weights_file, custom_proto)
    layers = layer_infos(original.net)
    config = CAFFE.read_config(read_bytes(config_file), str(config_file), layers)
    plan = CAFFE.make_plan(config, layers)
    if any(layer.bias_correction for layer in plan.enabled):
        logger.warning(
            "%s: bias_correction has no effect in these functions, because a record has no means; amct.caffe.quantize "
            "and amct quantize correct biases",
            config_file,
        )
    for warning in plan.warnings:
        logger.warning("%s", warning)
    if plan.update_bn is None:
        check_global_statistics(original.net)
    record = record.absolute()
    if all_ranks().is_first:
        write_record(CaffeRecord(), record, form="text")
        progress_path(record).unlink(missing_ok=True)
    return QuantGraph(original=original, plan=plan, record_file=record, model=original.copy())


@caffe_function
def weights_quantize_model(graph: QuantGraph, modified_model_file: AnyPath, modified_weights_file: AnyPath) -> None:
    """Fold, quantize the weights, write their factors to the record and the modified model to files.

    With ``update_bn`` in the config nothing is folded yet: the BatchNorm layers of the modified model update their
    statistics in the first forwards.

    Args:
        graph: The graph that ``init`` returned.
        modified_model_file: Where the new prototxt is written.
        modified_weights_file: Where the new caffemodel is written.

    Raises:
        ArgumentTypeError: an argument has the wrong type.
        FileError: a file cannot be written.
        CalibrationError: weights are NaN or infinite.
    """
    graph = check_graph("weights_quantize_model", graph)
    files = _output_files(modified_model_file, modified_weights_file)
    graph.fold()
    graph.quantize_weights()
    for skip in graph.not_quantized:
        if skip.layer in graph.model.weights or graph.plan.find(skip.layer) is not None:
            logger.info("left as it is: %s", skip)
    modified = graph.with_quantized_weights()
    ranks = all_ranks()
    if ranks.is_first:
        if graph.plan.update_bn is not None:
            refresh_statistics(modified, graph.plan.update_bn)
        write_record(graph.weights_record(), graph.record_file)
        with FileGroup() as group:
            write_model(group, modified, *files)
    ranks.meet("weights_quantize_model")
    graph.stage = Stage.WEIGHTS_QUANTIZED
    logger.info("Quantized the weights of %s.", counted(len(graph.weights), "layer"))


@caffe_function
def activation_quantize_model(graph: QuantGraph, modified_model_file: AnyPath, modified_weights_file: AnyPath) -> None:
    """Insert an IFMR layer before every quantized input and write the calibration model to files.

    After ``batch_num`` forwards of this model the record holds the activation factors. With ``update_bn`` the updated
    BatchNorm statistics are read and folded first; the record is then ``<record>_update.txt``.

    Args:
        graph: The graph after ``weights_quantize_model``.
        modified_model_file: Where the new prototxt is written.
        modified_weights_file: Where the new caffemodel is written.

    Raises:
        ArgumentTypeError: an argument has the wrong type.
        FileError: a file cannot be written.
        CalibrationError: called out of order, or the BatchNorm statistics have not been updated.
    """
    graph = check_graph("activation_quantize_model", graph)
    files = _output_files(modified_model_file, modified_weights_file)
    graph.need(Stage.WEIGHTS_QUANTIZED, "activation_quantize_model")
    record, ranks = graph.calibration_record, all_ranks()
    if graph.plan.update_bn is not None:
        ranks.meet("statistics of batch norms")  # those of the last layers are written when this process gets here
        if graph.stage is Stage.WEIGHTS_QUANTIZED:
            fold_updated_statistics(graph)
    model = graph.with_quantized_weights()
    plans = graph.plans()
    insert_ifmr(model, plans, str(record))
    restore_in_place(model.net)
    if ranks.is_first:
        write_record(graph.weights_record(), record, form="text")
        progress_path(record).unlink(missing_ok=True)
        batch_path(record).unlink(missing_ok=True)
        with FileGroup() as group:
            write_model(group, model, *files)
    ranks.meet("activation_quantize_model")
    graph.stage = Stage.CALIBRATING
    logger.info(
        "Inserted calibration layers for %s; run %s.",
        counted(len(plans), "layer"),
        counted(graph.plan.batch_num, "batch"),
    )


def _output_files(model: AnyPath, weights: AnyPath) -> tuple[Path, Path]:
    return output_file(model, "modified_model_file"), output_file(weights, "modified_weights_file")
