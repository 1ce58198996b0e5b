"""AMCT's functions for quantization-aware training of Caffe models, up to the training itself.

create_quant_retrain_config → create_quant_retrain_model → the user's own solver → ``save_quant_retrain_model``.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from amct import log
from amct.arguments import check_types, input_file, output_file
from amct.atomic import FileGroup, read_bytes, write_text
from amct.caffe.model import read_model, read_training_model, write_model
from amct.caffe.prototxt import layer_infos
from amct.caffe.ptq.folding import FusionReport, fuse_after
from amct.caffe.qat.insertion import RetrainFiles, insert_retrain_layers
from amct.config.qat.caffe import default_config, expand_config, make_plan, read_config
from amct.model import Skip
from amct.record import CaffeRecord, write_record

if TYPE_CHECKING:
    from amct.caffe.model import CaffeModel
    from amct.config.plan import RetrainLayerPlan, RetrainPlan

logger = logging.getLogger(__name__)

AnyPath = str | os.PathLike[str]
PATH = (str, os.PathLike)
OPTIONAL_PATH = (*PATH, type(None))


def create_quant_retrain_config(
    config_file: AnyPath,
    model_file: AnyPath,
    weights_file: AnyPath,
    config_defination: AnyPath | None = None,
    custom_proto: AnyPath | None = None,
) -> None:
    """Write the JSON config of retraining: every layer that can be quantized, with its settings.

    Args:
        config_file: The file to write; an existing file is overwritten.
        model_file: The prototxt.
        weights_file: The caffemodel.
        config_defination: A simple config (``.cfg``) of retraining.
        custom_proto: A ``custom.proto`` with messages of your own layers (not in AMCT).

    Raises:
        ArgumentTypeError: an argument has the wrong type.
        FileError: a file cannot be read or written.
        ParseError, ModelError, ConfigError: a file is malformed or invalid.
    """
    check_types(
        "create_quant_retrain_config",
        {
            "config_file": (config_file, PATH),
            "model_file": (model_file, PATH),
            "weights_file": (weights_file, PATH),
            "config_defination": (config_defination, OPTIONAL_PATH),
            "custom_proto": (custom_proto, OPTIONAL_PATH),
        },
    )
    log.start("amct_caffe")
    target = output_file(config_file, "config_file")
    input_file(model_file, "model_file")
    input_file(weights_file, "weights_file")
    layers = layer_infos(read_model(model_file, weights_file, custom_proto).net)
    if config_defination is None:
        config = default_config(layers)
    else:
        source = input_file(config_defination, "config_defination")
        config = expand_config(read_bytes(source), str(config_defination), layers)
    for warning in config.warnings:
        logger.warning("%s", warning)
    write_text(target, config.to_json())
    logger.info("Create quant retrain config %s success!", config_file)


def create_quant_retrain_model(
    model_file: AnyPath,
    weights_file: AnyPath,
    config_file: AnyPath,
    modified_model_file: AnyPath,
    modified_weights_file: AnyPath,
    scale_offset_record_file: AnyPath,
    custom_proto: AnyPath | None = None,
) -> None:
    """Write a model that trains with rounded data and weights, for both phases.

    Train it with a solver that has ``net``, ``test_interval`` and ``test_iter`` above 0 and
    ``test_initialization: false``: the record is written in the TEST phase.

    Args:
        model_file: The prototxt, with the layers of both phases.
        weights_file: The caffemodel of the trained float model.
        config_file: The JSON config that ``create_quant_retrain_config`` wrote, possibly edited.
        modified_model_file: Where the new prototxt is written.
        modified_weights_file: Where the new caffemodel is written.
        scale_offset_record_file: The record file; emptied if it exists.
        custom_proto: A ``custom.proto`` with messages of your own layers (not in AMCT).

    Raises:
        ArgumentTypeError: an argument has the wrong type.
        FileError: a file cannot be read or written.
        ParseError, ModelError, ConfigError: a file is malformed, invalid, or does not belong to the model.
    """
    inputs = {
        "model_file": (model_file, PATH),
        "weights_file": (weights_file, PATH),
        "config_file": (config_file, PATH),
    }
    outputs = {
        "modified_model_file": (modified_model_file, PATH),
        "modified_weights_file": (modified_weights_file, PATH),
        "scale_offset_record_file": (scale_offset_record_file, PATH),
    }
    check_types("create_quant_retrain_model", {**inputs, **outputs, "custom_proto": (custom_proto, OPTIONAL_PATH)})
    log.start("amct_caffe")
    for name, (value, _) in inputs.items():
        input_file(value, name)
    modified, weights, record = (output_file(value, name) for name, (value, _) in outputs.items())
    tested = read_model(model_file, weights_file, custom_proto)
    plan = retrain_plan(config_file, tested)
    for warning in plan.warnings:
        logger.warning("%s", warning)
    model = read_training_model(model_file, weights_file, custom_proto)
    plans = _plans_to_train(plan, tested)
    files = RetrainFiles(record=str(record.absolute()), config=os.path.abspath(config_file))  # noqa: PTH100 - a PathLike too
    insert_retrain_layers(model, tested, plans, files)
    write_record(CaffeRecord(), record, form="text")
    with FileGroup() as group:
        write_model(group, model, modified, weights)
    logger.info("Inserted layers of retraining for %d layers.", len(plans))


def retrain_plan(config_file: AnyPath, tested: CaffeModel) -> RetrainPlan:
    """The plan of a JSON config for a model.

    Raises:
        FileError, ParseError, ConfigError: The config cannot be read, or does not belong to the model.
    """
    layers = layer_infos(tested.net)
    return make_plan(read_config(read_bytes(config_file), str(config_file), layers), layers)


def _plans_to_train(plan: RetrainPlan, tested: CaffeModel) -> dict[str, RetrainLayerPlan]:
    """The enabled layers, without those that are folded into others when the trained model is saved."""
    per_tensor = {each.name for each in plan.enabled if each.type == "InnerProduct"}
    folded = FusionReport()
    fuse_after(tested.copy(), folded, refuse_head=lambda layer: "one scale" if layer.name in per_tensor else None)
    gone = {name: head for head, names in folded.folded.items() for name in names}
    for name, reason in plan.not_quantized.items():
        logger.info("left as it is: %s", Skip(name, reason))
    for each in plan.enabled:
        if each.name in gone:
            reason = f'it is folded into "{gone[each.name]}" when the trained model is saved'
            logger.info("left as it is: %s", Skip(each.name, reason))
    return {each.name: each for each in plan.enabled if each.name not in gone}
