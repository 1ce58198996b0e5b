"""AMCT's functions for quantization-aware training: config, trainable model, restoring, saving.

A script calls them one after the other, with a training loop in between::

    create_quant_retrain_config("config.json", model, inputs)                              → the JSON config
    create_quant_retrain_model("config.json", model, "record.txt", inputs)                 → the model to train
    restore_quant_retrain_model("config.json", model, "record.txt", inputs, "state.pth")   → the same, in a new process
    save_quant_retrain_model("config.json", model, "record.txt", "out/net", inputs)        → deploy, fake-quant, QDQ

The model is an ordinary module whose ``state_dict`` is saved and loaded like any other.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from amct import atomic
from amct.arguments import output_file
from amct.atomic import read_bytes
from amct.config.qat.dialect import PYTORCH_QAT
from amct.errors import TrainingError
from amct.export.check.batch import batch_path
from amct.export.request import SavePath, SaveRequest
from amct.export.saving import save_files
from amct.pipeline.compare import reference
from amct.pytorch.amct_api import create_config, pytorch_function
from amct.pytorch.capture.cached_trace import cached_trace
from amct.pytorch.inputs import IoOptions, example_inputs
from amct.pytorch.qat.checkpoint import load_state
from amct.pytorch.qat.deployment import tensors_between_layers, trained_layers
from amct.pytorch.qat.door import build
from amct.pytorch.qat.model import QatModel
from amct.pytorch.user_model import unwrap
from amct.record import Record, encode_record, write_record
from amct.record.conversion import tensor_qparams_path, tensor_qparams_text
from amct.record.files import form_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import nn

    from amct.atomic import AnyPath
    from amct.config.plan import RetrainPlan
    from amct.pytorch.capture.trace import Traced
    from amct.pytorch.preparation import TorchPreparation
    from amct.record import PruneRecord

logger = logging.getLogger(__name__)


PRUNED = "amct_pruned_channels"
"""The attribute that tells what was pruned of a model that AMCT's functions for pruning made, to know its record."""


@pytorch_function
def create_quant_retrain_config(
    config_file: AnyPath, model: nn.Module, input_data: object, config_defination: AnyPath | None = None
) -> None:
    """Write the full JSON config of quantization-aware training, from a simple config (``.cfg``) or with defaults.

    Args:
        config_file: the file to write.
        model: any nn.Module.
        input_data: a tensor, or a tuple or dict of arguments, with which the model can be run.
        config_defination: a simple config.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the config does not fit the model; all mistakes are listed with their positions.
        OSError: a file cannot be read or written.
        RuntimeError: the model cannot be run on the example input, or is already quantized.
    """
    create_config(PYTORCH_QAT, config_file, model, input_data, config_defination)


@pytorch_function
def create_quant_retrain_model(
    config_file: AnyPath, model: nn.Module, record_file: AnyPath, input_data: object
) -> nn.Module:
    """Return a copy of the model to be trained: its layers have quantizers with trained clips and scales.

    The first ``batch_num`` forwards in train mode determine the clips, unless the config gives them.

    Args:
        config_file: the JSON config of ``create_quant_retrain_config``.
        model: any nn.Module; it is not changed.
        record_file: written by ``save_quant_retrain_model``; an empty one is created.
        input_data: an example input; its values do not matter.

    Raises:
        TypeError: an argument or a config value has the wrong type.
        ValueError: the config does not fit the model.
        OSError: a file cannot be read or written.
        RuntimeError: the model cannot be run, is already quantized, or no layer is to be quantized.
    """
    path = output_file(record_file, "record_file")
    trainable = _built(config_file, model, input_data)
    _empty_record(path)
    return trainable


@pytorch_function
def restore_quant_retrain_model(
    config_file: AnyPath,
    model: nn.Module,
    record_file: AnyPath,
    input_data: object,
    pth_file: AnyPath,
    state_dict_name: str | None = None,
) -> nn.Module:
    """As ``create_quant_retrain_model``, with the trained state of a checkpoint: to continue or to save.

    Args:
        config_file: the JSON config that the model was created with.
        model: the float model.
        record_file: as for ``create_quant_retrain_model``.
        input_data: an example input.
        pth_file: a checkpoint with the ``state_dict`` of the trained model.
        state_dict_name: the key of the ``state_dict`` in the checkpoint, where it holds more.

    Raises:
        TypeError, ValueError, OSError: as ``create_quant_retrain_model``.
        KeyError: the checkpoint has no entry ``state_dict_name``.
        RuntimeError: the checkpoint cannot be read, or does not belong to this model and config.
    """
    path = output_file(record_file, "record_file")
    trainable = _built(config_file, model, input_data)
    load_state(trainable, pth_file, state_dict_name)
    _empty_record(path)
    return trainable


@pytorch_function
def save_quant_retrain_model(  # noqa: PLR0913  AMCT's signature
    config_file: AnyPath,
    model: nn.Module,
    record_file: AnyPath,
    save_path: AnyPath,
    input_data: object,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    dynamic_axes: Mapping[str, Any] | None = None,
) -> None:
    """Write the record, and the deploy, fake-quant and QDQ models and a report as ``save_model`` does.

    The tensors between layers, which the QDQ file quantizes too, are observed on the first batch that the model was run
    on in eval mode after training, or on ``input_data``.

    Args:
        config_file: the JSON config that the model was created with.
        model: the trained model, in any mode; DistributedDataParallel is unwrapped.
        record_file: where the factors are written.
        save_path: ``folder/prefix``.
        input_data: an example input.
        input_names: names of the inputs in the ONNX files.
        output_names: names of the outputs.
        dynamic_axes: axes whose size may vary, ``{name: {axis: label}}``.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the config does not fit the model.
        OSError: a file cannot be read or written.
        RuntimeError: the model is no model in training, was not trained long enough, has diverged, was created with
            another config, or cannot be exported; nothing was saved.
    """
    where = SavePath.parse(save_path)
    path = output_file(record_file, "record_file")
    atomic.check_writable(where.folder)
    content = read_bytes(config_file)
    trained = unwrap(model)
    if not isinstance(trained, QatModel):
        raise TrainingError(
            f"model: {type(trained).__name__} has no trained quantizers; save the model that "
            "create_quant_retrain_model or restore_quant_retrain_model returned"
        )
    if getattr(trained, PRUNED, ()):
        logger.warning("model: it is pruned too; its record says so only if save_compressed_retrain_model saves it")
    io = IoOptions(input_names=input_names, output_names=output_names, dynamic_axes=dynamic_axes)
    inputs = example_inputs(trained, input_data)
    preparation = trained.preparation((inputs.args, inputs.kwargs), io)
    _check_config(_plan(content, config_file, preparation.traced), trained.plan)
    save_trained(trained, preparation, path, where)


def save_trained(
    trained: QatModel, preparation: TorchPreparation, path: Path, where: SavePath, prune: Sequence[PruneRecord] = ()
) -> None:
    """Write the record and the exported files of a trained model.

    Args:
        trained: The model.
        preparation: The folded model with the trained integers.
        path: The record.
        where: The folder and the prefix of the exported files.
        prune: The pruning part of the record.

    Raises:
        ExportError: The model cannot be exported, or a file cannot be used.
        FileError: A file cannot be written.
    """
    example = (preparation.traced.inputs.args, preparation.traced.inputs.kwargs)
    tensors = tensors_between_layers(trained, preparation, [trained._qat.seen or example])
    layers = trained_layers(preparation, trained, tensors)
    record = replace(preparation.record_of(layers), prune=tuple(prune))
    compared = reference(preparation, layers, [example])
    with atomic.FileGroup() as group:
        group.write_bytes(path, encode_record(record, form_of(path) or "text"))
        if tensors is not None:
            group.write_text(tensor_qparams_path(path), tensor_qparams_text(tensors))
    request = SaveRequest(where=where, record_file=path)
    save_files(preparation.files(request, layers, tensors, compared))


def _built(config_file: AnyPath, model: nn.Module, input_data: object) -> QatModel:
    content = read_bytes(config_file)
    traced = cached_trace(model, input_data)
    trainable = build(traced, _plan(content, config_file, traced), only_behind_relu=True)
    for skip in (*traced.skips, *trainable.not_folded):
        logger.info("left as it is: %s", skip)
    return trainable


def _plan(content: bytes, config_file: AnyPath, traced: Traced) -> RetrainPlan:
    layers = traced.config_layers()
    return PYTORCH_QAT.make_plan(PYTORCH_QAT.read_config(content, os.fspath(config_file), layers), layers)


def _empty_record(path: Path) -> None:
    write_record(Record(), path)
    for stale in (tensor_qparams_path(path), batch_path(path)):
        stale.unlink(missing_ok=True)


def _check_config(given: RetrainPlan, own: RetrainPlan) -> None:
    """Raise unless the config of a save is the one that the model was trained with."""
    before = {layer.name: layer for layer in own.enabled}
    after = {layer.name: layer for layer in given.enabled}
    different = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    if different:
        listed = ", ".join(f'"{name}"' for name in different[:5])
        raise TrainingError(
            f"{given.source}: the model was trained with another config; the layers {listed} differ. Give the config "
            "that it was created with"
        )
