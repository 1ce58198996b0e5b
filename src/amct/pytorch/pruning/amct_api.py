"""AMCT's functions for pruning, alone or with quantization-aware training, from a simple config without a JSON.

A script calls them one after the other, with a training loop in between::

    create_prune_retrain_model(model, inputs, "prune.cfg", "record.txt")                  → the model to train
    restore_prune_retrain_model(model, inputs, "record.txt", "prune.cfg", "state.pth")    → the same, in a new process
    save_prune_retrain_model(model, "out/net", inputs)                                    → the ONNX files

The ``compressed`` functions are the same with quantization.

Channels are removed at once; the result is an ordinary, smaller module. A layer with 2:4 sparsity is its torch class
with a mask among its buffers. The record has the removed channels and the masks.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amct import atomic
from amct.arguments import output_file
from amct.atomic import read_bytes
from amct.config.prune.dialect import COMPRESSION, PRUNING, CompressionDialect
from amct.errors import RecordError, TrainingError
from amct.export.request import SavePath
from amct.pytorch.amct_api import pytorch_function
from amct.pytorch.capture.cached_trace import cached_trace
from amct.pytorch.inputs import IoOptions, example_inputs
from amct.pytorch.pruning.amct_chains import prunable_layers
from amct.pytorch.pruning.compression import apply_plan, restore_plan
from amct.pytorch.pruning.saving import save_float
from amct.pytorch.pruning.sparse import mask_records, put_sparse, without_masks
from amct.pytorch.qat.amct_api import PRUNED, save_trained
from amct.pytorch.qat.checkpoint import load_state
from amct.pytorch.qat.door import build
from amct.pytorch.qat.model import QatModel
from amct.pytorch.user_model import refuse_operators, unwrap
from amct.record import Record, read_record, write_record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from amct.atomic import AnyPath
    from amct.config.plan import CompressionPlan
    from amct.pytorch.capture.trace import Traced

logger = logging.getLogger(__name__)


_RECORD = "amct_prune_record"
"""The attribute of such a model that tells where its record is."""


@pytorch_function
def create_prune_retrain_model(
    model: nn.Module, input_data: object, config_defination: AnyPath, record_file: AnyPath
) -> nn.Module:
    """Return a copy of the model to be trained, without the channels that the config removes, or with 2:4 masks.

    Args:
        model: any nn.Module; it is not changed.
        input_data: a tensor, or a tuple or dict of arguments, with which the model can be run.
        config_defination: a simple config with ``prune_config``; its quantization is ignored.
        record_file: where the removed channels and the masks are written.

    Returns:
        The model in train mode.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the config does not fit the model; all mistakes are listed with their positions.
        OSError: a file cannot be read or written.
        RuntimeError: the model cannot be run on the example input, or is already compressed.
    """
    return _created(PRUNING, model, input_data, config_defination, record_file)


@pytorch_function
def restore_prune_retrain_model(
    model: nn.Module,
    input_data: object,
    record_file: AnyPath,
    config_defination: AnyPath,
    pth_file: AnyPath,
    state_dict_name: str | None = None,
) -> nn.Module:
    """As ``create_prune_retrain_model``, with the channels and masks of a record and the trained state of a checkpoint.

    Args:
        model: the whole model.
        input_data: an example input.
        record_file: written by ``create_prune_retrain_model``.
        config_defination: the config that the model was created with.
        pth_file: a checkpoint with the ``state_dict`` of the trained model.
        state_dict_name: the key of the ``state_dict`` in the checkpoint, where it holds more.

    Raises:
        TypeError, ValueError, OSError: as ``create_prune_retrain_model``.
        KeyError: the checkpoint has no entry ``state_dict_name``.
        RuntimeError: record or checkpoint cannot be read, or do not belong to this model and config.
    """
    files = {"record_file": record_file, "config_defination": config_defination, "pth_file": pth_file}
    return _restored(PRUNING, model, input_data, files, state_dict_name)


@pytorch_function
def save_prune_retrain_model(
    model: nn.Module,
    save_path: AnyPath,
    input_data: object,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    dynamic_axes: Mapping[str, Any] | None = None,
) -> None:
    """Write the pruned model, which is float, as ``<save_path>_deploy_model.onnx`` and ``…_fake_quant_model.onnx``.

    The record that the model was created or restored with gets the trained 2:4 masks.

    Args:
        model: the trained model, in any mode; DistributedDataParallel is unwrapped.
        save_path: ``folder/prefix``.
        input_data: an example input.
        input_names: names of the inputs in the ONNX files.
        output_names: names of the outputs.
        dynamic_axes: axes whose size may vary, ``{name: {axis: label}}``.

    Raises:
        TypeError: an argument has the wrong type.
        OSError: a file cannot be written.
        RuntimeError: the model cannot be exported, or a written file cannot be used; nothing was saved.
    """
    where = SavePath.parse(save_path)
    atomic.check_writable(where.folder)
    io = IoOptions(input_names=input_names, output_names=output_names, dynamic_axes=dynamic_axes)
    trained = unwrap(model)
    if isinstance(trained, QatModel):
        raise TrainingError(
            "model: it has trained quantizers; a model with pruning and quantization is saved with "
            "save_compressed_retrain_model"
        )
    if not getattr(trained, PRUNED, ()):
        logger.warning(
            "model: create_prune_retrain_model or restore_prune_retrain_model did not prune it; it is saved as is"
        )
    masks = _record_with_masks(trained)
    save_float(trained, where, input_data, io)
    if masks is not None:
        write_record(*masks)


@pytorch_function
def create_compressed_retrain_model(
    model: nn.Module, input_data: object, config_defination: AnyPath, record_file: AnyPath
) -> nn.Module:
    """As ``create_prune_retrain_model``, with trained quantizers if the config asks for quantization.

    Args:
        model: any nn.Module; it is not changed.
        input_data: an example input.
        config_defination: a simple config with ``prune_config``, quantization blocks, or both.
        record_file: where the removed channels and the masks are written.

    Raises:
        TypeError, ValueError, OSError, RuntimeError: as ``create_prune_retrain_model``.
    """
    return _created(COMPRESSION, model, input_data, config_defination, record_file)


@pytorch_function
def restore_compressed_retrain_model(
    model: nn.Module,
    input_data: object,
    config_defination: AnyPath,
    record_file: AnyPath,
    pth_file: AnyPath,
    state_dict_name: str | None = None,
) -> nn.Module:
    """As ``create_compressed_retrain_model``, from a record and with the trained state of a checkpoint.

    Args:
        model: the whole float model.
        input_data: an example input.
        config_defination: the config that the model was created with.
        record_file: written by ``create_compressed_retrain_model``.
        pth_file: a checkpoint with the ``state_dict`` of the trained model.
        state_dict_name: the key of the ``state_dict`` in the checkpoint, where it holds more.

    Raises:
        TypeError, ValueError, OSError, KeyError, RuntimeError: as ``restore_prune_retrain_model``.
    """
    files = {"config_defination": config_defination, "record_file": record_file, "pth_file": pth_file}
    return _restored(COMPRESSION, model, input_data, files, state_dict_name)


@pytorch_function
def save_compressed_retrain_model(
    model: nn.Module,
    record_file: AnyPath,
    save_path: AnyPath,
    input_data: object,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    dynamic_axes: Mapping[str, Any] | None = None,
) -> None:
    """Write the record, and the files of ``save_quant_retrain_model``, or those of ``save_prune_retrain_model``.

    Args:
        model: the trained model, in any mode; DistributedDataParallel is unwrapped.
        record_file: written by ``create_compressed_retrain_model``; factors and the latest masks are put into it.
        save_path: ``folder/prefix``.
        input_data: an example input.
        input_names: names of the inputs in the ONNX files.
        output_names: names of the outputs.
        dynamic_axes: axes whose size may vary, ``{name: {axis: label}}``.

    Raises:
        TypeError: an argument has the wrong type.
        OSError: a file cannot be read or written.
        RuntimeError: the model was not trained long enough, has diverged, or cannot be exported; nothing was saved.
    """
    where = SavePath.parse(save_path)
    path = output_file(record_file, "record_file")
    atomic.check_writable(where.folder)
    io = IoOptions(input_names=input_names, output_names=output_names, dynamic_axes=dynamic_axes)
    trained = unwrap(model)
    record = read_record(record_file)
    _check_record(record, trained, path)
    chains = [chain for chain in record.prune if chain.selective is None]
    prune = (*chains, *mask_records(trained))
    if isinstance(trained, QatModel):
        inputs = example_inputs(trained, input_data)
        preparation = trained.preparation((inputs.args, inputs.kwargs), io)
        save_trained(trained, preparation, path, where, prune)
    else:
        save_float(trained, where, input_data, io)
        write_record(Record(prune=prune), path)


def _created(
    dialect: CompressionDialect,
    model: nn.Module,
    input_data: object,
    config: AnyPath,
    record_file: AnyPath,
) -> nn.Module:
    path = output_file(record_file, "record_file")
    traced, plan = _read_plan(dialect, model, input_data, config)
    compressed = apply_plan(traced, plan.prune)
    for skip in compressed.skips:
        logger.info("not pruned: %s", skip)
    trainable = _quantized(compressed.model, input_data, plan)
    record = Record(prune=compressed.records)
    write_record(record, path)
    return _with_marks(trainable, record, record_file).train()


def _restored(
    dialect: CompressionDialect,
    model: nn.Module,
    input_data: object,
    files: Mapping[str, Any],
    state_dict_name: str | None,
) -> nn.Module:
    record = read_record(files["record_file"])
    traced, plan = _read_plan(dialect, model, input_data, files["config_defination"])
    restored = restore_plan(traced, plan.prune, record.prune, os.fspath(files["record_file"]))
    trainable = _quantized(restored, input_data, plan)
    load_state(trainable, files["pth_file"], state_dict_name)
    return _with_marks(trainable, record, files["record_file"]).train()


def _with_marks(model: nn.Module, record: Record, file: AnyPath) -> nn.Module:
    """The model, with what it must know of its record."""
    setattr(model, PRUNED, _pruned_channels(record))
    setattr(model, _RECORD, str(Path(file).absolute()))
    return model


def _record_with_masks(model: nn.Module) -> tuple[Record, Path] | None:
    """The record of a model with its masks, which training may have chosen anew; None: there is nothing to update."""
    masks = mask_records(model)
    if not masks or not hasattr(model, _RECORD):
        return None
    path = Path(str(getattr(model, _RECORD)))
    record = read_record(path) if path.exists() else Record()
    if _pruned_channels(record) != getattr(model, PRUNED):
        logger.warning("%s is no longer the record of this model; the trained 2:4 masks are not written to it", path)
        return None
    chains = [chain for chain in record.prune if chain.selective is None]
    return replace(record, prune=(*chains, *masks)), path


def _pruned_channels(record: Record) -> frozenset[tuple[str, tuple[int, ...]]]:
    """The layers of the record with their removed channels; those with 2:4 sparsity have none."""
    return frozenset((node.name, tuple(node.prune_index)) for chain in record.prune for node in chain.nodes)


def _check_record(record: Record, model: nn.Module, path: Path) -> None:
    """Raise unless the record is the one that the model was created with.

    Raises:
        RecordError: It is empty, or of another network or config.
    """
    given = _pruned_channels(record)
    own: frozenset[tuple[str, tuple[int, ...]]] = getattr(model, PRUNED, frozenset())
    if given == own:
        if not hasattr(model, PRUNED) and not isinstance(model, QatModel):
            logger.warning(
                "model: create_compressed_retrain_model or restore_compressed_retrain_model neither pruned nor "
                "quantized it; it is saved as is"
            )
        return
    what = "is of another network or config"
    if not hasattr(model, PRUNED):
        what = "names pruned layers, but the model was not created or restored with it"
    elif not given:
        what = "names no pruned layer, but the model has some"
    layers = sorted({f'"{name}"' for name, _ in given ^ own})
    shown = ", ".join(layers[:5]) + (" and others" if len(layers) > 5 else "")
    raise RecordError(
        f"the record {path} {what} (see {shown}); give the record with which the model was created or restored"
    )


def _quantized(model: nn.Module, input_data: object, plan: CompressionPlan) -> nn.Module:
    """The model with trained quantizers, if the plan has any."""
    if plan.quant is None:
        return model
    plain, masks = without_masks(model)
    trainable = build(cached_trace(plain, input_data), plan.quant, only_behind_relu=True)
    put_sparse(trainable, masks)
    return trainable


def _read_plan(
    dialect: CompressionDialect, model: nn.Module, input_data: object, config: AnyPath
) -> tuple[Traced, CompressionPlan]:
    """Trace a model and read a simple config of pruning for it."""
    text = read_bytes(config)
    refuse_operators(unwrap(model))
    traced = cached_trace(model, input_data)
    layers = prunable_layers(traced)
    expanded = dialect.expand_config(text, os.fspath(config), layers)
    for warning in expanded.warnings:
        logger.warning("%s", warning)
    return traced, dialect.compression_plan(expanded, layers)
