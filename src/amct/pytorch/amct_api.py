"""AMCT's functions for post-training quantization: config, balancing, calibration model, saving.

A script calls them one after the other, with files in between::

    create_quant_config("config.json", model, inputs)                       → the JSON config
    quantize_preprocess("config.json", "record.txt", model, inputs)         only with dmq_balancer; then one forward
    quantize_model("config.json", "m.onnx", "record.txt", model, inputs)    → calibration model; then batch_num forwards
    save_model("m.onnx", "record.txt", "out/net")                           → deploy, fake-quant and QDQ models

The model is traced once and never changed; every file is checked to be writable before any work is done.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from amct import atomic
from amct.arguments import FILE, amct_function, check_types, output_file
from amct.atomic import read_bytes
from amct.calibration import all_ranks, read_progress
from amct.config.ptq.pytorch import PYTORCH
from amct.errors import CalibrationError, ExportError, RecordError, RecordValueError
from amct.export.check.batch import batch_beside, declared_inputs
from amct.export.check.losses import Reference
from amct.export.onnx.layer import further_node
from amct.export.request import SavePath, SaveRequest
from amct.export.saving import OnnxFiles, save_files
from amct.model import Skip
from amct.numerics.qparams import with_means
from amct.pipeline.preparation import inputs_of_nodes
from amct.pytorch.calibrating import balancing_model, start_calibration
from amct.pytorch.capture.cached_trace import cached_trace
from amct.pytorch.inputs import IoOptions
from amct.pytorch.onnx.modified_onnx import FileNotes, file_notes, read_modified, write_modified
from amct.pytorch.preparation import prepare
from amct.record import LayerRecord, Record, read_record, validate_record, write_record
from amct.record.conversion import layer_qparams, read_tensor_qparams, tensor_qparams_path

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from onnx import ModelProto
    from torch import Tensor

    from amct.atomic import AnyPath
    from amct.config.plan import Plan
    from amct.config.ptq.dialect import PtqDialect
    from amct.config.qat.dialect import QatDialect
    from amct.config.simple_config import FullConfig
    from amct.numerics.qparams import LayerQParams, Observed
    from amct.pytorch.capture.trace import Traced

logger = logging.getLogger(__name__)


pytorch_function = amct_function(
    "amct_pytorch",
    {
        "model": (nn.Module,),
        "config": FILE,
        "config_file": FILE,
        "output_cfg": FILE,
        "config_defination": FILE,
        "record_file": FILE,
        "modfied_onnx_file": FILE,
        "pth_file": FILE,
        "save_path": FILE,
        "state_dict_name": (str,),
        "skip_layers": (list, tuple),
        "batch_num": (int,),
        "activation_offset": (bool,),
        "quant_layers": (dict,),
    },
)
"""Decorates AMCT's functions; an argument of one name has the same types in all of them."""


@pytorch_function
def create_quant_config(
    config_file: AnyPath,
    model: nn.Module,
    input_data: object,
    skip_layers: list[str] | None = None,
    batch_num: int = 1,
    activation_offset: bool = True,
    config_defination: AnyPath | None = None,
) -> None:
    """Write the full JSON config of a model, from a simple config (``.cfg``) or from the arguments.

    Args:
        config_file: the file to write.
        model: any nn.Module.
        input_data: a tensor, or a tuple or dict of arguments, with which the model can be run.
        skip_layers: layers that stay float; ignored with ``config_defination``.
        batch_num: number of calibration batches; ignored with ``config_defination``.
        activation_offset: whether activations have an offset; ignored with ``config_defination``.
        config_defination: a simple config.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the config does not fit the model; all mistakes are listed with their positions.
        OSError: a file cannot be read or written.
        RuntimeError: the model cannot be run on the example input, or is already quantized.
    """
    for name in skip_layers or ():
        check_types("create_quant_config", {"each name in skip_layers": (name, (str,))})
    if config_defination is not None and skip_layers:
        logger.warning("skip_layers is ignored, because config_defination is given; name them in the file")
    options = {"batch_num": batch_num, "activation_offset": activation_offset, "skip_layers": skip_layers or ()}
    create_config(PYTORCH, config_file, model, input_data, config_defination, options)


def create_config(
    dialect: PtqDialect | QatDialect,
    config_file: AnyPath,
    model: nn.Module,
    input_data: object,
    definition: AnyPath | None,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Write the full JSON config of a model, from a simple config or with defaults; ``options`` choose the defaults."""
    path = output_file(config_file, "config_file")
    text = read_bytes(definition) if definition is not None else None
    layers = cached_trace(model, input_data).config_layers()
    if definition is None or text is None:
        config = dialect.default_config(layers, **options)
    else:
        config = dialect.expand_config(text, os.fspath(definition), layers)
    write_config(path, config)


def write_config(path: Path, config: FullConfig) -> None:
    """Write a config, and say what it warns of."""
    for warning in config.warnings:
        logger.warning("%s", warning)
    atomic.write_text(path, config.to_json())
    logger.info("wrote %s", path)


@pytorch_function
def quantize_preprocess(config_file: AnyPath, record_file: AnyPath, model: nn.Module, input_data: object) -> nn.Module:
    """Prepare DMQ: forwards of the returned model on data (one or more) write the balance factors to the record.

    Raises:
        TypeError, ValueError, OSError: as ``quantize_model``.
        RuntimeError: no layer of the config has ``dmq_balancer_param``, or the model cannot be run.
    """
    path = output_file(record_file, "record_file")
    content = read_bytes(config_file)
    traced = cached_trace(model, input_data)
    plan = _plan(content, config_file, traced)
    if not plan.balanced:
        raise CalibrationError(
            f"{os.fspath(config_file)}: no layer that is quantized has dmq_balancer_param, so there is nothing to "
            "balance; skip quantize_preprocess, or add dmq_balancer to the config"
        )

    def write(factors: Mapping[str, Tensor]) -> None:
        if not ranks.is_first:
            return
        kept = {layer.name for layer in plan.balanced if layer.skip_fusion}
        entries = {
            name: LayerRecord(tensor_balance_factor=tuple(values.tolist()), skip_fusion=name in kept)
            for name, values in factors.items()
        }
        write_record(Record(entries), path)

    ranks = all_ranks()
    ranks.need_a_batch_each(plan.batch_num)
    balancing, _ = balancing_model(traced, plan, write, ranks=ranks, batch_num=plan.batch_num)
    if ranks.is_first:
        write_record(Record(), path)
    return balancing


@pytorch_function
def quantize_model(  # noqa: PLR0913  AMCT's signature
    config_file: AnyPath,
    modfied_onnx_file: AnyPath,
    record_file: AnyPath,
    model: nn.Module,
    input_data: object,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    dynamic_axes: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Fold, quantize the weights, and return the calibration model, to be run on ``batch_num`` batches.

    The weight factors are written to the record at once, the activation factors when every layer has enough batches.
    Under ``torch.distributed`` every process calls this function and runs its share of the batches: process r of n runs
    batches r, r + n, r + 2n, … of ``batch_num``; only that of rank 0 writes (``docs/scaling.md``).

    Args:
        config_file: the JSON config of ``create_quant_config``.
        modfied_onnx_file: where the folded float model is written, for ``save_model``.
        record_file: where the quantization factors are written; with DMQ it holds the balance factors.
        model: any nn.Module.
        input_data: an example input; AdaRound learns from it.
        input_names: names of the inputs in the ONNX files.
        output_names: names of the outputs.
        dynamic_axes: axes whose size may vary, ``{name: {axis: label}}``.

    Raises:
        TypeError: an argument, a config value or the type of the weights is wrong.
        ValueError: the config does not fit the model, or the record lacks the balance factors of a layer.
        OSError: a file cannot be read or written.
        RuntimeError: the model cannot be run or exported, no layer is to be quantized, or weights are not finite.
    """
    onnx_path = output_file(modfied_onnx_file, "modfied_onnx_file")
    record_path = output_file(record_file, "record_file")
    content = read_bytes(config_file)
    io = IoOptions(input_names=input_names, output_names=output_names, dynamic_axes=dynamic_axes)
    traced = cached_trace(model, input_data, io=io)
    plan = _plan(content, config_file, traced)
    ranks = all_ranks()
    ranks.need_a_batch_each(plan.batch_num)
    plan, balance = _with_record(plan, record_path)
    preparation = prepare(traced, plan, balance=balance, ranks=ranks)
    for skip in preparation.skips:
        logger.info("left as it is: %s", skip)
    onnx, model_of_file, failure = preparation.default_onnx, None, ""
    if not isinstance(onnx, ExportError):
        model_of_file = onnx.model
    elif traced.program is not None:
        raise onnx
    else:  # data-dependent control flow: the model can be calibrated but not saved; the file holds the reason
        failure = str(onnx)
        logger.warning("calibration works, but save_model will not: %s", failure)
    if ranks.is_first:
        write_modified(onnx_path, model_of_file, file_notes(preparation, failure))
    watch = preparation.tensor_watch()
    return start_calibration(preparation, record_file=record_path, intermediate=watch, ranks=ranks).model


@pytorch_function
def save_model(modfied_onnx_file: AnyPath, record_file: AnyPath, save_path: AnyPath) -> None:
    """Write the deploy, fake-quant and QDQ models and a report, as ``<save_path>_deploy_model.onnx`` and so on.

    The files are first run on the calibration batch kept beside the record (``<record>.check.npz``), or on random
    inputs, and compared with the float model. Under ``torch.distributed`` only the process of rank 0 does anything.

    Args:
        modfied_onnx_file: written by ``quantize_model``.
        record_file: completed by the calibration model.
        save_path: ``folder/prefix``.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the ONNX file does not exist, or a factor of the record is outside its range.
        OSError: a file cannot be read or written.
        RuntimeError: calibration is incomplete (the message lists the missing batches by layer), record and model do
            not belong together, or a written file cannot be used; nothing was saved.
    """
    where = SavePath.parse(save_path)
    if not all_ranks().is_first:
        return
    atomic.check_writable(where.folder)
    model, notes = read_modified(modfied_onnx_file)
    record = read_record(record_file)
    for note in (
        *record.warnings,
        *validate_record(record, notes.record_layers(), progress=read_progress(record_file)),
    ):
        logger.warning("%s", note)
    _check_fusion(record, notes)
    unrecorded = tuple(
        Skip(name, "the record has no entry for it")
        for name, layer in notes.layers.items()
        if layer.enabled and name not in record.layers
    )
    beside = tensor_qparams_path(record_file)
    tensors = read_tensor_qparams(beside) if beside.exists() else None
    inputs, origin = batch_beside(record_file, declared_inputs(model))
    files = OnnxFiles(
        request=SaveRequest(where=where, record_file=Path(record_file)),
        model=model,
        layers=_layers_of(record, notes, tensors, model),
        tensors=tensors,
        reference=Reference(inputs=inputs, origin=origin),
        folded=notes.fusions,
        skipped=(*notes.skips(), *unrecorded),
        config=notes.config,
    )
    save_files(files)


def _layers_of(
    record: Record, notes: FileNotes, tensors: Mapping[str, Observed] | None, model: ModelProto
) -> dict[str, LayerQParams]:
    """The parameters of the record, with what ``quantize_model`` has noted and calibration has seen of each layer."""
    found = {name: layer_qparams(entry) for name, entry in record.items()}
    for name, layer in notes.layers.items():
        if name in found:
            corrects, cancels = layer.corrects_bias, layer.cancels_errors
            found[name] = replace(found[name], corrects_bias=corrects, cancels_errors=cancels)
    names = {node.name for node in model.graph.node}
    inputs = inputs_of_nodes(model)
    once = {name: inputs[name] for name in found if name in inputs and further_node(name, 1) not in names}
    return with_means(found, tensors, once)


def _plan(content: bytes, config_file: AnyPath, traced: Traced) -> Plan:
    layers = traced.config_layers()
    return PYTORCH.make_plan(PYTORCH.read_config(content, os.fspath(config_file), layers), layers)


# -- DMQ ---------------------------------------------------------------------------------------------------------------


def _with_record(plan: Plan, record_path: Path) -> tuple[Plan, dict[str, Tensor]]:
    """Read the balance factors from the record, required if the config uses DMQ, and obey its ``skip_fusion``."""
    if not plan.balanced:
        return plan, {}
    what_to_do = "run quantize_preprocess and one forward of the model it returns"
    record = read_record(record_path) if record_path.exists() else Record()
    if record.is_empty:
        state = "is empty" if record_path.exists() else "does not exist"
        raise RecordError(f'the config asks for dmq_balancer, but the record "{record_path}" {state}; {what_to_do}')
    found: dict[str, Tensor] = {}
    for layer in plan.balanced:
        entry = record.layers.get(layer.name)
        factors = entry.tensor_balance_factor if entry is not None else ()
        if not factors:
            raise RecordValueError(
                f'layer "{layer.name}": the config asks for dmq_balancer, but "{record_path}" has no '
                f"tensor_balance_factor for it; {what_to_do}"
            )
        found[layer.name] = torch.tensor(factors, dtype=torch.float32)
    return plan.without_fusion(name for name, entry in record.items() if entry.skip_fusion), found


def _check_fusion(record: Record, notes: FileNotes) -> None:
    """Raise if the record keeps a batch norm that is folded in the modified file: its factors are of other weights."""
    for name, entry in record.items():
        if entry.skip_fusion and name in notes.fusions:
            raise RecordError(
                f'{record.where(name, "skip_fusion") or record.source}: layer "{name}" has skip_fusion, but '
                f'quantize_model has folded "{notes.fusions[name][0]}" into it; list the layer in skip_fusion_layers '
                "of the config and run quantize_model again, or remove skip_fusion"
            )
