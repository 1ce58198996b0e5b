"""AMCT's functions for distillation: config, student, learning, saving.

A script calls them one after the other::

    create_distill_config("config.json", model, inputs, "distill.cfg")             → the JSON config
    student = create_distill_model("config.json", model, inputs)                   → a model with quantizers
    student = distill(model, student, "config.json", loader, epochs=20)            → group after group has learned
    save_distill_model(student, "out/net", inputs)                                 → deploy, fake-quant, QDQ
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from amct import atomic
from amct.arguments import output_file
from amct.atomic import read_bytes
from amct.config.qat.distill import GROUPS_KEY, PYTORCH_DISTILL
from amct.errors import ArgumentError, ArgumentTypeError, TrainingError
from amct.export.request import SavePath
from amct.pytorch.amct_api import pytorch_function
from amct.pytorch.blocks.distillation import DistillSettings, distill_groups, find_groups, units_of
from amct.pytorch.capture.cached_trace import cached_trace
from amct.pytorch.inputs import IoOptions, example_inputs, torch_batches
from amct.pytorch.qat.amct_api import save_trained
from amct.pytorch.qat.door import build, start_activations, start_weights
from amct.pytorch.qat.model import QatModel
from amct.pytorch.user_model import copy_model, unwrap

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from amct.atomic import AnyPath
    from amct.config.plan import RetrainPlan
    from amct.config.simple_config import FullConfig
    from amct.pytorch.capture.trace import Traced
    from amct.pytorch.layer_hooks import Arguments

logger = logging.getLogger(__name__)

RECORD = "amct_log/scale_offset_record.txt"


@pytorch_function
def create_distill_config(
    config_file: AnyPath, model: nn.Module, input_data: object, config_defination: AnyPath | None = None
) -> None:
    """Write the full JSON config of distillation, from a simple config (``.cfg``) or with defaults.

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
    path = output_file(config_file, "config_file")
    text = read_bytes(config_defination) if config_defination is not None else None
    traced = cached_trace(model, input_data)
    layers = traced.config_layers()
    if config_defination is not None and text is not None:
        config = PYTORCH_DISTILL.expand_config(text, os.fspath(config_defination), layers)
    else:
        config = PYTORCH_DISTILL.default_config(layers)
    for warning in config.warnings:
        logger.warning("%s", warning)
    fields = {**config.fields, GROUPS_KEY: _groups(config, traced)}
    atomic.write_text(path, replace(config, fields=fields).to_json())
    logger.info("wrote %s", path)


@pytorch_function
def create_distill_model(config_file: AnyPath, model: nn.Module, input_data: object) -> nn.Module:
    """Return the student: a copy of the model whose layers have quantizers.

    Args:
        config_file: the JSON config of ``create_distill_config``.
        model: any nn.Module; it is not changed.
        input_data: an example input; its values do not matter.

    Raises:
        TypeError: an argument or a config value has the wrong type.
        ValueError: the config does not fit the model.
        OSError: the config cannot be read.
        RuntimeError: the model cannot be run, is already quantized, or no layer is to be quantized.
    """
    content = read_bytes(config_file)
    traced = cached_trace(model, input_data)
    config, plan = _read(content, config_file, traced)
    _groups(config, traced)  # its mistakes are told now
    student = build(traced, plan, only_behind_relu=True)
    for skip in (*traced.skips, *student.not_folded):
        logger.info("left as it is: %s", skip)
    return student


@pytorch_function
def distill(  # noqa: PLR0913  AMCT's signature
    model: nn.Module,
    compress_model: nn.Module,
    config_file: AnyPath,
    train_loader: object,
    epochs: int = 1,
    lr: float = 1e-3,
    sample_instance: object = None,
    loss: Callable[..., Any] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> nn.Module:
    """Let the student learn group after group to compute what the float model computes; no labels are needed.

    The first ``batch_num`` batches tell the clips that the config does not give. Then each group learns for ``epochs``
    passes over the data. A group whose error would become larger stays as it was.

    Args:
        model: the float model; it is not changed.
        compress_model: the student of ``create_distill_model``; it learns in place.
        config_file: the JSON config that the student was made with.
        train_loader: batches: tensors, or (inputs, labels), whose labels are left out.
        epochs: passes over the data, for each group.
        lr: the learning rate of weights.
        sample_instance: an object whose ``get_model_input(batch)`` gives the model's inputs, for other batches.
        loss: of what a group computes and what it should; the mean squared error unless given.
        optimizer: another optimizer than AdamW, with any parameters: a new one of its class is made for each group,
            with its settings and the learning rate of its first parameters.

    Returns:
        The student.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: ``epochs`` is below 1, there is no data, or the config does not fit the model.
        OSError: the config cannot be read.
        RuntimeError: the student has no quantizers or was made with another config, or a loss is not finite.
    """
    student = _checked(compress_model, epochs, lr, optimizer)
    teacher = copy_model(unwrap(model), share_tensors=True).eval()
    read: Any = getattr(sample_instance, "get_model_input", None)
    if sample_instance is not None and not callable(read):
        raise ArgumentTypeError("sample_instance: expected an object with a method get_model_input")
    batches = list(torch_batches(teacher, train_loader, read, name="train_loader").limited(None))
    if not batches:
        raise ArgumentError("train_loader is empty; at least one batch is needed")
    traced = cached_trace(unwrap(model), (*batches[0][0], batches[0][1]), any_batch=True)
    config, plan = _read(read_bytes(config_file), config_file, traced)
    _check_plan(plan, student.plan)
    _start(student, batches, plan.batch_num)
    rate = lr if optimizer is None else float(optimizer.param_groups[0]["lr"])
    settings = DistillSettings(
        epochs=epochs,
        rate=rate,
        loss=loss or functional.mse_loss,
        optimizer=partial(torch.optim.AdamW, lr=rate) if optimizer is None else _like(optimizer, rate),
        on_disk=config.fields["data_dump"],
    )
    errors = distill_groups(teacher, student, traced, _groups(config, traced), batches, settings)
    better = sorted(after / before for before, after in errors if before)
    if better:
        logger.info(
            "%d groups have learned: their error is %.2f of what it was (median)", len(better), better[len(better) // 2]
        )
    return student


@pytorch_function
def save_distill_model(
    model: nn.Module,
    save_path: AnyPath,
    input_data: object,
    record_file: AnyPath | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    dynamic_axes: Mapping[str, Any] | None = None,
) -> None:
    """Write the record, and the deploy, fake-quant and QDQ models and a report as ``save_model`` does.

    Args:
        model: the student; DistributedDataParallel is unwrapped.
        save_path: ``folder/prefix``.
        input_data: an example input.
        record_file: where the factors are written; ``amct_log/scale_offset_record.txt`` unless given.
        input_names: names of the inputs in the ONNX files.
        output_names: names of the outputs.
        dynamic_axes: axes whose size may vary, ``{name: {axis: label}}``.

    Raises:
        TypeError: an argument has the wrong type.
        OSError: a file cannot be written.
        RuntimeError: the model is no student, or cannot be exported; nothing was saved.
    """
    where = SavePath.parse(save_path)
    path = output_file(Path(RECORD) if record_file is None else record_file, "record_file")
    atomic.check_writable(where.folder)
    trained = unwrap(model)
    if not isinstance(trained, QatModel):
        raise TrainingError(
            f"model: {type(trained).__name__} has no quantizers; save the model that create_distill_model returned and "
            "distill has trained"
        )
    io = IoOptions(input_names=input_names, output_names=output_names, dynamic_axes=dynamic_axes)
    inputs = example_inputs(trained, input_data)
    save_trained(trained, trained.preparation((inputs.args, inputs.kwargs), io), path, where)


# -- parts -------------------------------------------------------------------------------------------------------------


def _read(content: bytes, file: AnyPath, traced: Traced) -> tuple[FullConfig, RetrainPlan]:
    layers = traced.config_layers()
    config = PYTORCH_DISTILL.read_config(content, os.fspath(file), layers)
    for warning in config.warnings:
        logger.warning("%s", warning)
    return config, PYTORCH_DISTILL.make_plan(config, layers)


def _groups(config: FullConfig, traced: Traced) -> list[list[str]]:
    """The groups of a config, completed: every layer that can be quantized is in one."""
    units = units_of(traced, [layer.name for layer in config.layers])
    return find_groups(units, config.fields["group_size"], config.fields[GROUPS_KEY], config.source)


def _checked(model: object, epochs: object, rate: object, optimizer: object) -> QatModel:
    if isinstance(epochs, bool) or not isinstance(epochs, int):
        raise ArgumentTypeError(f"epochs: expected a number, got {type(epochs).__name__}")
    if epochs < 1:
        raise ArgumentError(f"epochs: expected at least 1, got {epochs}")
    if isinstance(rate, bool) or not isinstance(rate, (int, float)):
        raise ArgumentTypeError(f"lr: expected a number, got {type(rate).__name__}")
    if not 0 < rate < float("inf"):
        raise ArgumentError(f"lr: expected a positive number, got {rate:g}")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentTypeError(f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    student = unwrap(model) if isinstance(model, nn.Module) else model
    if not isinstance(student, QatModel):
        raise TrainingError(
            f"compress_model: {type(student).__name__} has no quantizers; give the model that create_distill_model "
            "returned"
        )
    return student


def _check_plan(given: RetrainPlan, own: RetrainPlan) -> None:
    before, after = ({layer.name: layer for layer in plan.enabled} for plan in (own, given))
    different = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    if different:
        listed = ", ".join(f'"{name}"' for name in different[:5])
        raise TrainingError(
            f"{given.source}: the student was made with another config; the layers {listed} differ. Give the config "
            "that it was created with"
        )


def _start(student: QatModel, batches: Sequence[Arguments], batch_num: int) -> None:
    """Find the clips and scales that are not known yet; a student that has learned before goes on."""
    from amct.pytorch.qat.layers import quantized_layers

    if not all(layer.activation.is_ready for layer in quantized_layers(student).values()):
        start_weights(student)
        start_activations(student, islice(batches, batch_num))


def _like(optimizer: torch.optim.Optimizer, rate: float) -> Callable[[list[dict[str, Any]]], torch.optim.Optimizer]:
    settings = {**optimizer.defaults, "lr": rate}
    return lambda groups: type(optimizer)(groups, **settings)
