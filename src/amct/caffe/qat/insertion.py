"""Writes the model that is trained for quantization: layers that round go into a net with the layers of every phase."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from amct.atomic import FileGroup, read_bytes, write_text
from amct.caffe.engine.layer import moves_values
from amct.caffe.engine.layers.retrain import CLIP_SIZES
from amct.caffe.engine.messages import new_message
from amct.caffe.model import read_model, read_training_model, write_model
from amct.caffe.prototxt import layer_infos
from amct.caffe.ptq.folding import FusionReport, fuse_after
from amct.caffe.ptq.graph import input_layer, shared_inputs, taken_names
from amct.config.plan import say_fixed_min
from amct.config.qat.dialect import CAFFE_QAT
from amct.model import Skip
from amct.numerics.settings import CaffeArqRetrainSettings, CaffeUlqSettings
from amct.printable import counted
from amct.record import CaffeRecord, write_record

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from amct.atomic import AnyPath
    from amct.caffe.engine.messages import ProtoMessage
    from amct.caffe.model import CaffeModel
    from amct.caffe.ptq.graph import Input
    from amct.config.plan import RetrainLayerPlan, RetrainPlan

logger = logging.getLogger(__name__)

_CLIP_BLOBS = ("clip_max", "clip_min", "legal_clips")
_NEVER_NEGATIVE = ("ReLU6", "Sigmoid", "Softmax", "AbsVal", "BNLL", "Exp")
_KEEPS_SIGN = ("Pooling", "Dropout", "LRN", "Normalize", "Interp", "Upsample")


@dataclass(frozen=True, kw_only=True)
class RetrainFiles:
    """The files of a model that is trained; the inserted layers name the record that they write, and the config."""

    config: AnyPath
    record: Path
    model: Path
    weights: Path


def write_retrain_config(
    target: AnyPath,
    model_file: AnyPath,
    weights_file: AnyPath,
    definition: AnyPath | None,
    custom_proto: AnyPath | None,
) -> None:
    """Write the JSON config of a model, from a simple config or with the defaults.

    Raises:
        FileError, ParseError, ModelError, ConfigError: A file cannot be read, is malformed or invalid.
    """
    layers = layer_infos(read_model(model_file, weights_file, custom_proto).net)
    if definition is None:
        config = CAFFE_QAT.default_config(layers)
    else:
        config = CAFFE_QAT.expand_config(read_bytes(definition), str(definition), layers)
    for warning in config.warnings:
        logger.warning("%s", warning)
    write_text(target, config.to_json())
    logger.info("Create quant retrain config %s success!", target)


def write_retrain_model(
    model_file: AnyPath, weights_file: AnyPath, files: RetrainFiles, custom_proto: AnyPath | None
) -> None:
    """Write the model that is trained, as the config says, and an empty record.

    Raises:
        FileError, ParseError, ModelError, ConfigError: A file cannot be read, is malformed, invalid, or does not
            belong to the model.
    """
    tested = read_model(model_file, weights_file, custom_proto)
    plan = retrain_plan(files.config, tested)
    for warning in plan.warnings:
        logger.warning("%s", warning)
    model = read_training_model(model_file, weights_file, custom_proto)
    plans = _plans_to_train(plan, tested)
    insert_retrain_layers(model, tested, plans, files)
    write_record(CaffeRecord(), files.record, form="text")
    with FileGroup() as group:
        write_model(group, model, files.model, files.weights)
    logger.info("Inserted layers of retraining for %s.", counted(len(plans), "layer"))


def retrain_plan(config_file: AnyPath, tested: CaffeModel) -> RetrainPlan:
    """The plan of a JSON config for a model.

    Raises:
        FileError, ParseError, ConfigError: The config cannot be read, or does not belong to the model.
    """
    layers = layer_infos(tested.net)
    return CAFFE_QAT.make_plan(CAFFE_QAT.read_config(read_bytes(config_file), str(config_file), layers), layers)


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


def insert_retrain_layers(
    model: CaffeModel, tested: CaffeModel, plans: Mapping[str, RetrainLayerPlan], files: RetrainFiles
) -> None:
    """Insert RetrainDataQuant before every bottom, and RetrainWeightQuant for the weights, of the planned layers.

    Inputs that see the same values, because layers in between only move them, share their clips: rounding twice on one
    grid equals rounding once, and a deploy model keeps the integers.

    Args:
        model: The net with the layers of every phase; it is changed.
        tested: Its TEST phase without in-place layers.
        plans: The layers that are quantized.
        files: The files for the options of the new layers.
    """
    inputs = _planned_inputs(tested, plans)
    leaders = shared_inputs(tested.layers, inputs)
    taken = taken_names(model)
    names: dict[Input, str] = {}
    result: list[ProtoMessage] = []
    for layer in model.layers:
        plan = plans.get(layer.name)
        if plan is not None and layer.type == plan.type and len(layer.bottom) == len(inputs[layer.name]):
            for index, settings in enumerate(inputs[layer.name]):
                key = (layer.name, index)
                made = input_layer("RetrainDataQuant", layer, index, taken - {names.get(key, "")})
                names[key] = made.name
                taken.add(made.name)
                _fill_data(made, key, settings, plan.batch_num, files)
                _share_clips(made, key, leaders)
                _copy_rules(layer, made)
                result.append(made)
            if plan.quantizes_weights:
                result.append(_weight_layer(layer, plan, files))
        result.append(layer)
    for made in result:
        options = made.retrain_data_quant_param
        leader = leaders.get((options.object_layer, options.index))
        if made.type == "RetrainDataQuant" and leader is not None:
            options.clips_from = names[leader]
    model.set_layers(result)
    for name in names.values():
        model.weights[name] = [torch.zeros(size) for size in CLIP_SIZES]


def _planned_inputs(tested: CaffeModel, plans: Mapping[str, RetrainLayerPlan]) -> dict[str, list[CaffeUlqSettings]]:
    """The settings of each bottom of the planned layers; ``fixed_min`` is decided."""
    makers = {blob: layer for layer in tested.layers for blob in layer.top}
    inputs, fixed = {}, []
    for layer in tested.layers:
        if layer.name not in plans:
            continue
        settings = plans[layer.name].activation
        assert isinstance(settings, CaffeUlqSettings)
        is_open = settings.fixed_min is None and settings.clip_min is None and settings.clip_max is None
        positive = [is_open and _is_positive(blob, makers) for blob in layer.bottom]
        inputs[layer.name] = [replace(settings, fixed_min=True) if each else settings for each in positive]
        if any(positive):
            fixed.append(layer.name)
    say_fixed_min(logger, fixed)
    return inputs


def _is_positive(blob: str, makers: Mapping[str, ProtoMessage]) -> bool:
    """Whether a blob has no negative values: it comes from a ReLU, perhaps through layers that keep signs."""
    while (maker := makers.get(blob)) is not None:
        if maker.type == "ReLU":
            return not maker.relu_param.negative_slope
        if maker.type in _NEVER_NEGATIVE:
            return True
        if not (moves_values(maker) or maker.type in _KEEPS_SIGN) or not maker.bottom:
            return False
        if len(maker.bottom) > 1:
            return all(_is_positive(each, makers) for each in maker.bottom)
        blob = maker.bottom[0]
    return False


def _fill_data(
    layer: ProtoMessage, key: Input, settings: CaffeUlqSettings, batch_num: int, files: RetrainFiles
) -> None:
    options = layer.retrain_data_quant_param
    options.object_layer, options.index = key
    options.num_bits_d = settings.num_bits
    if settings.clip_max is not None:
        options.clip_max = settings.clip_max
    if settings.clip_min is not None:
        options.clip_min = settings.clip_min
    options.fixed_min = bool(settings.fixed_min)
    options.batch_num = batch_num
    options.record_file_path = str(files.record.absolute())
    options.config_file_path = os.path.abspath(files.config)  # noqa: PTH100 - a PathLike too
    keeps_given = settings.fixed_clip is not False
    fixed = (
        keeps_given and settings.clip_max is not None,
        bool(settings.fixed_min) or (keeps_given and settings.clip_min is not None),
        True,
    )
    for each in fixed:
        layer.param.add(lr_mult=0.0 if each else 1.0, decay_mult=0.0)


def _share_clips(layer: ProtoMessage, key: Input, leaders: Mapping[Input, Input]) -> None:
    """Name the parameters of a layer whose clips others use, or which uses those of another one, after their leader."""
    leader = leaders.get(key, key)
    if leader != key or key in leaders.values():
        for spec, blob in zip(layer.param, _CLIP_BLOBS, strict=True):
            spec.name = f"{leader[0]}_{leader[1]}_{blob}"


def _weight_layer(owner: ProtoMessage, plan: RetrainLayerPlan, files: RetrainFiles) -> ProtoMessage:
    made = new_message("LayerParameter", name=f"{owner.name}_retrainweightquant", type="RetrainWeightQuant")
    options = made.retrain_weight_quant_param
    assert isinstance(plan.weight, CaffeArqRetrainSettings)
    options.object_layer = owner.name
    options.channel_wise, options.num_bits_w = plan.weight.channel_wise, plan.weight.num_bits
    options.record_file_path = str(files.record.absolute())
    _copy_rules(owner, made)
    return made


def _copy_rules(owner: ProtoMessage, made: ProtoMessage) -> None:
    """The new layer is there in the phases and stages of its owner."""
    for rules in ("include", "exclude"):
        for rule in getattr(owner, rules):
            getattr(made, rules).add().ParseFromString(rule.SerializeToString())
