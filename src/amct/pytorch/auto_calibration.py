"""AMCT's accuracy-based calibration: layers are rolled back to float until the user's evaluator is content.

The model is calibrated once; every probe is the same calibrated model with other layers left float.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from amct import atomic
from amct.arguments import output_file
from amct.atomic import read_bytes
from amct.config.ptq.pytorch import PYTORCH
from amct.errors import ArgumentError, ArgumentTypeError, CalibrationError, FileError
from amct.export.check.batch import KeptBatches
from amct.export.request import SavePath
from amct.pipeline.quantized_model import QuantizedModel
from amct.pytorch.amct_api import pytorch_function
from amct.pytorch.calibrating import start_calibration
from amct.pytorch.capture.cached_trace import cached_trace
from amct.pytorch.capture.functional_layers import layer_module
from amct.pytorch.inputs import IoOptions
from amct.pytorch.layer_hooks import fake_quant_copy
from amct.pytorch.preparation import TorchPreparation, prepare
from amct.pytorch.user_model import copy_model
from amct.record import write_record
from amct.search.roll_back import AccuracyBasedAutoCalibrationBase, EvaluatorCalls, compared

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from amct.atomic import AnyPath
    from amct.search.roll_back import AutoCalibrationEvaluatorBase, AutoCalibrationStrategyBase, SensitivityBase

logger = logging.getLogger(__name__)


@pytorch_function
def accuracy_based_auto_calibration(  # noqa: PLR0913  AMCT's signature
    model: nn.Module,
    model_evaluator: AutoCalibrationEvaluatorBase,
    config_file: AnyPath,
    record_file: AnyPath,
    save_dir: AnyPath,
    input_data: object,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    dynamic_axes: Mapping[str, Any] | None = None,
    strategy: str | AutoCalibrationStrategyBase = "BinarySearch",
    sensitivity: str | SensitivityBase = "CosineSimilarity",
) -> None:
    """Quantize a model, and leave the most sensitive layers float until an evaluator is content.

    Beside the models of ``save_model`` three JSON files are written: the sensitivity of each layer, the final config
    (the config file itself is left alone), and in ``amct_log/`` what was tried.

    Args:
        model: any nn.Module; it is not changed.
        model_evaluator: an object of a class derived from ``AutoCalibrationEvaluatorBase``.
        config_file: the JSON config of ``create_quant_config``.
        record_file: where the quantization factors of the result are written.
        save_dir: ``folder/prefix`` of the models.
        input_data: an example input.
        input_names: names of the inputs in the ONNX files.
        output_names: names of the outputs.
        dynamic_axes: axes whose size may vary, ``{name: {axis: label}}``.
        strategy: "BinarySearch", or an object of a class derived from ``AutoCalibrationStrategyBase``.
        sensitivity: "CosineSimilarity", "MseSimilarity", or an object of a class derived from ``SensitivityBase``.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the config does not fit the model, the evaluator returns no number, or does not accept the metric
            of the float model.
        OSError: a file cannot be read or written.
        RuntimeError: the evaluator raises, does not calibrate with enough batches, or the model cannot be quantized.
    """
    calibration = _TorchCalibration(model_evaluator, strategy, sensitivity)
    io = IoOptions(input_names=input_names, output_names=output_names, dynamic_axes=dynamic_axes)
    where, record_path = SavePath.parse(save_dir), output_file(record_file, "record_file")
    atomic.check_writable(where.folder)
    content = read_bytes(config_file)

    def prepared() -> TorchPreparation:
        traced = cached_trace(model, input_data, io=io, stored_weights=True)
        layers = traced.config_layers()
        return prepare(traced, PYTORCH.make_plan(PYTORCH.read_config(content, str(config_file), layers), layers))

    calibration.prepared = prepared
    float_model = copy_model(model)  # the evaluator's own, which it may change
    found = calibration.run([float_model], content, where.folder)
    if found is not None:
        write_record(found.record, record_path)
        found.save(save_dir, ("deploy", "fake_quant", "qdq"))


class _TorchCalibration(AccuracyBasedAutoCalibrationBase):
    """That of a module."""

    prepared: Callable[[], TorchPreparation]

    def calibrated(self, evaluator: EvaluatorCalls) -> QuantizedModel:
        """The model calibrated by the user's own loop."""
        prepared = self.prepared()
        intermediate = prepared.tensor_watch()
        calibrated = start_calibration(prepared, intermediate=intermediate)
        kept = KeptBatches()

        def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            kept.notice((args, kwargs))

        handle = calibrated.model.register_forward_pre_hook(keep, with_kwargs=True)
        with torch.no_grad():
            evaluator.calibrate(calibrated.model)
        handle.remove()
        calibrated.session.finish(complete=True)
        result = calibrated.session.result
        layers = prepared.quantized_layers(result)
        return QuantizedModel(prepared, layers, result.tensors if intermediate is not None else None, kept.kept)

    def evaluated(self, evaluator: EvaluatorCalls, quantized: QuantizedModel) -> tuple[bool, float]:
        """Of the simulation."""
        return evaluator.of(quantized.model)

    def ranking(self, base: QuantizedModel) -> dict[str, float]:
        """By hooks on the layers of the folded model."""
        prepared = base.prepared
        assert isinstance(prepared, TorchPreparation)
        simulated = fake_quant_copy(prepared, base.qparams, is_private=True)
        model = copy_model(prepared.fused.model, share_tensors=True)
        found: dict[str, list[float]] = {name: [] for name in base.layers}

        def look(name: str) -> Callable[..., None]:
            other = layer_module(simulated, name)

            def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:  # noqa: ANN401
                quantized = other(*args, **kwargs)
                first = [next(each for each in pytree.tree_leaves(out)) for out in (output, quantized)]
                found[name].append(compared(self.sensitivity, *first))

            return hook

        layers = {name: layer_module(model, name) for name in base.layers}
        handles = [layer.register_forward_hook(look(name), with_kwargs=True) for name, layer in layers.items()]
        with torch.no_grad():
            for args, kwargs in base.examples:
                model(*args, **kwargs)
        for handle in handles:
            handle.remove()
        return {name: float(np.mean(values)) for name, values in found.items() if values}


# -- raw files ---------------------------------------------------------------------------------------------------------

_TYPES = ("float64", "float32", "float16", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


class ModelEvaluator:
    """Runs a model on raw ``.bin`` files, in the order of their names; all inputs of a forward at once.

    Args:
        data_dir: A folder for each input, with ";" between them.
        input_shape: ``name:n,c,h,w`` for each input, with ";" between them; a name may contain ":".
        data_types: The type of each input, such as "float32", with ";" between them.

    Raises:
        TypeError: An argument is no text, or a type is unknown.
        ValueError: The three have different lengths, or a shape cannot be read.
        OSError: A folder does not exist.
    """

    def __init__(self, data_dir: str, input_shape: str, data_types: str) -> None:
        for name, value in (("data_dir", data_dir), ("input_shape", input_shape), ("data_types", data_types)):
            if not isinstance(value, str):
                raise ArgumentTypeError(f"ModelEvaluator: {name} must be str, got {type(value).__name__}")
        folders, shapes, types = (value.strip(";").split(";") for value in (data_dir, input_shape, data_types))
        if not len(folders) == len(shapes) == len(types):
            raise ArgumentError(
                f"ModelEvaluator: {len(folders)} folders, {len(shapes)} shapes and {len(types)} types; expected one of "
                "each for every input"
            )
        for each in types:
            if each.strip() not in (*_TYPES, "bool"):
                raise ArgumentTypeError(
                    f'ModelEvaluator: data_types: "{each}" is unknown; there are {", ".join(_TYPES)}'
                )
        self._types = [np.dtype(each.strip()) for each in types]
        self._shapes = [_shape_of(each) for each in shapes]
        self._files = [_bin_files(Path(each.strip())) for each in folders]

    def calibration(self, model: nn.Module, batch_num: int) -> None:
        """Run ``batch_num`` forwards."""
        self._run(model, batch_num, "batch_num")

    def evaluate(self, model: nn.Module, iterations: int) -> None:
        """Run so many forwards."""
        self._run(model, iterations, "iterations")

    def _run(self, model: nn.Module, count: int, argument: str) -> None:
        if not isinstance(count, int) or count <= 0:
            raise ArgumentError(f"{argument}: expected at least 1, got {count}")
        there = min(map(len, self._files))
        if there < count:
            raise CalibrationError(
                f"{argument}: {count} forwards need as many .bin files for each input, there are {there}"
            )
        training = model.training
        model.eval()
        with torch.no_grad():
            for number in range(count):
                model(*map(self._tensor, range(len(self._files)), [number] * len(self._files)))
        model.train(training)

    def _tensor(self, index: int, number: int) -> torch.Tensor:
        file, dtype, shape = self._files[index][number], self._types[index], self._shapes[index]
        values = np.frombuffer(read_bytes(file), dtype)
        if values.size != int(np.prod(shape)):
            raise FileError(f"{file}: {values.size} values of {dtype}, expected {list(shape)}")
        return torch.from_numpy(values.reshape(shape).copy())


def _shape_of(text: str) -> tuple[int, ...]:
    name, _, numbers = text.strip().rpartition(":")
    words = [word.strip() for word in numbers.split(",")]
    if not name or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ArgumentError(f'ModelEvaluator: input_shape: expected "name:n,c,h,w", got "{text[:80]}"')
    return tuple(map(int, words))


def _bin_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise FileError(f"ModelEvaluator: data_dir: there is no folder {folder}")
    return sorted(folder.glob("*.bin"))
