"""The one-call way: ``amct.caffe.quantize(model, weights, data)`` calibrates and gives a model to run and to save."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sized
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amct import log
from amct.arguments import input_file, output_file
from amct.atomic import read_bytes
from amct.caffe.amct_api import fold, quantize_folded, with_real_weights
from amct.caffe.comparing import ModelSide, both_sides, float_side, measure
from amct.caffe.layer_list import layer_list
from amct.caffe.model import read_model
from amct.caffe.onnx.graph import DEFAULT_OPSET
from amct.caffe.ptq.equalization import divide_channels, find_factors
from amct.caffe.ptq.graph import QuantGraph, Stage
from amct.caffe.ptq.insertion import insert_ifmr
from amct.caffe.ptq.qdq import QdqFile, QdqRanges, types_with_ready_integers
from amct.caffe.ptq.save import check_save_type, results_of, save_results
from amct.caffe.reporting import Runs, files_report, model_report
from amct.caffe.running import batches_of, build_net, feed, run_net
from amct.config.ptq.caffe import default_config, expand_config
from amct.config.ptq.caffe_json import make_plan, read_config
from amct.errors import ArgumentTypeError, CalibrationError, ConfigError
from amct.export.qdq.exporter import Placement
from amct.export.qdq.nodes import Target
from amct.record import CaffeRecord, write_record
from amct.report.measuring import check_metric
from amct.report.page import write_page

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from amct.caffe.comparing import FilePair, Side
    from amct.caffe.engine.net import Net
    from amct.caffe.ptq.deploy import Results
    from amct.caffe.running import Batch, BatchInputs
    from amct.config.layers import LayerList
    from amct.config.plan import Plan
    from amct.report.compare import LayerComparison
    from amct.report.measuring import Metric

AnyPath = str | os.PathLike[str]
SOURCE = "config"


class QuantizedCaffeModel:
    """A quantized Caffe model: run it (``model(batch)``), compare it, report on it, save it."""

    def __init__(self, graph: QuantGraph, results: Results, ranges: QdqRanges, example: Batch = None) -> None:
        self._graph = graph
        self._results = results
        self._ranges = ranges
        self._example = example
        self._nets: dict[str, Net] = {}

    @property
    def record(self) -> CaffeRecord:
        """The final factors of all quantized layers."""
        return self._results.record

    @property
    def layers(self) -> tuple[str, ...]:
        """The quantized layers, in model order."""
        return tuple(self._results.record.layers)

    @property
    def not_quantized(self) -> Mapping[str, str]:
        """Why each other layer stays float."""
        return self._graph.not_quantized

    def __call__(self, batch: Batch, *, deploy: bool = True) -> dict[str, npt.NDArray[np.float32]]:
        """Run the deploy model (or the fake-quant one) and return the outputs by name."""
        return run_net(self._net("deploy" if deploy else "fake_quant"), batch)

    def summary(self) -> str:
        """A table of the quantized layers, and how many there are."""
        kinds = {layer.name: layer.type for layer in self._graph.model.layers}
        width = max(len(name) for name in self.layers)
        lines = [f"{len(self.layers)} of {len(kinds)} layers are quantized"]
        for name, entry in self.record.items():
            bits = "/".join(str(data.bits) for data in entry.record_d)
            weight = f", {entry.weight_bits}-bit weights ({len(entry.scale_w)} scales)" if entry.scale_w else ""
            lines.append(f"  {name:<{width}}  {kinds[name]:<14} {bits}-bit data{weight}")
        return "\n".join(lines)

    def save(
        self,
        path: AnyPath,
        *,
        save_type: str = "Both",
        placement: str = Placement.FAST.value,
        target: str = Target.PORTABLE.value,
        opset: int = DEFAULT_OPSET,
    ) -> list[Path]:
        """Write the files of ``save_model`` and ``<path>_qdq_model.onnx`` for onnxruntime, and return their paths.

        A net without an ONNX form has no QDQ file: a warning and ``quant.json`` say why.

        Args:
            path: Folder and prefix, such as ``results/model``.
            save_type: Which Caffe models: "Fakequant", "Deploy" or "Both".
            placement: Of the QDQ file: "fast" also quantizes between the layers, "exact" only what the record says.
            target: Of the QDQ file: "portable" (7-bit weights, right on every CPU), "vnni" or "exact8".
            opset: Of the QDQ file: 16 to 21; data of more than 8 bits needs 21.

        Raises:
            ArgumentError: An unknown save_type, placement, target or opset.
            FileError: They cannot be written.
        """
        check_save_type("save", save_type)
        graph = self._graph
        net = build_net(self._results.float_model(rounded=types_with_ready_integers(placement, target)))
        qdq = QdqFile.of(net, self.record, self._ranges, placement=placement, target=target, opset=opset)
        return save_results(
            self._results,
            path,
            save_type=save_type,
            original=graph.original,
            fusion=graph.fusion,
            not_quantized=graph.not_quantized,
            qdq=qdq,
        )

    def compare(
        self, data: object, *, deploy: bool = False, inputs: BatchInputs | None = None
    ) -> list[LayerComparison]:
        """Run the float and the quantized model on data, and compare the output of every quantized layer.

        Args:
            data: An array, or batches as for ``quantize``; one at a time is in memory.
            deploy: Whether the integer model is run, and not the fake-quant one.
            inputs: Makes of a batch what the net takes, where its form does not tell.

        Raises:
            ArgumentError, ArgumentTypeError: the data does not fit the net.
            CalibrationError: there is no data.
        """
        quantized = self._side("deploy" if deploy else "fake_quant")
        measured = measure(self._side("float"), quantized, data, inputs=inputs, with_inputs=False)
        return list(measured.layers.values())

    def report(
        self,
        path: AnyPath,
        data: object = None,
        metric: Metric | None = None,
        *,
        inputs: BatchInputs | None = None,
        files: Iterable[AnyPath] = (),
    ) -> Path:
        """Run the float and the fake-quant model on data, and write what was found as one HTML file.

        Args:
            path: Of the HTML file.
            data: As for ``compare``, best with labels behind the inputs; None: the first calibration batch.
            metric: ``metric(outputs, batch) -> float``, the mean over one batch: the outputs are a dict of arrays by
                name, the batch is as the data gives it. It is called for both models; batches count as much as they
                have samples. Its name is shown.
            inputs: Makes of a batch what the net takes, where its form does not tell.
            files: Whose sizes are shown, such as those that ``save`` returned.

        Returns:
            The path.

        Raises:
            ArgumentTypeError: the data is of no known form, or the metric gives no number.
            ArgumentError: a metric without data, or a batch that does not fit the net.
            CalibrationError: there is no data.
            FileError: the file cannot be written, or one of ``files`` cannot be looked at.
        """
        where = output_file(path, "path")
        check_metric(metric, data)
        runs = Runs(
            reference=self._side("float"),
            quantized=self._side("fake_quant"),
            data=[self._example] if data is None else data,
            metric=metric,
            inputs=None if data is None else inputs,
            on="the first calibration batch" if data is None else None,
        )
        write_page(where, model_report(self._graph, self._results, runs, files))
        return where

    def _side(self, kind: str) -> ModelSide:
        if kind == "float":
            return ModelSide(self._graph.model)
        return ModelSide((self._results.deploy() if kind == "deploy" else self._results.fake_quant()).model)

    def _net(self, kind: str) -> Net:
        if kind not in self._nets:
            self._nets[kind] = self._side(kind).build(())
        return self._nets[kind]


def compare(
    float_model: FilePair,
    quantized_model: QuantizedCaffeModel | FilePair,
    data: object,
    *,
    inputs: BatchInputs | None = None,
) -> list[LayerComparison]:
    """Run both models on data and compare the outputs of the quantized layers, in model order.

    A layer that has taken in BatchNorm, Scale or Bias is compared with what the last of them makes in the float model.

    Args:
        float_model: Prototxt and caffemodel of the original.
        quantized_model: What ``quantize`` returned, or prototxt and caffemodel of the fake-quant or deploy model.
        data: An array, or batches as for ``quantize``; one at a time is in memory.
        inputs: Makes of a batch what the net takes, where its form does not tell.

    Raises:
        ArgumentError, ArgumentTypeError: an argument is not what it should be, or the data does not fit the net.
        FileError, ParseError: a file cannot be read.
        ModelError: they are not the same net, or the second one is not quantized.
        CalibrationError: there is no data.
    """
    reference: Side
    quantized: Side
    if isinstance(quantized_model, QuantizedCaffeModel):
        reference, quantized = float_side(float_model), quantized_model._side("fake_quant")
    else:
        reference, quantized = both_sides(float_model, quantized_model)
    return list(measure(reference, quantized, data, inputs=inputs, with_inputs=False).layers.values())


def report(
    path: AnyPath,
    float_model: FilePair,
    quantized_model: FilePair,
    data: object,
    metric: Metric | None = None,
    *,
    inputs: BatchInputs | None = None,
) -> Path:
    """Write the report of a float pair of files and of the pair that quantization made of it.

    The arguments are those of ``compare`` and of ``QuantizedCaffeModel.report``.

    Raises:
        AmctError: a subclass says what is wrong: arguments, files, models or data.
    """
    where = output_file(path, "path")
    write_page(where, files_report(float_model, quantized_model, data, metric=metric, inputs=inputs).content)
    return where


@log.screen_only()
def quantize(
    model: AnyPath,
    weights: AnyPath,
    data: object,
    config: AnyPath | Mapping[str, Any] | None = None,
    *,
    equalize: bool = False,
) -> QuantizedCaffeModel:
    """Quantize a Caffe model with some batches of data.

    Args:
        model: The prototxt.
        weights: The caffemodel.
        data: An array, or batches: arrays, dicts of arrays by input name, or tuples of arrays with labels behind them;
            every batch is used, unless the config says how many.
        config: A simple config (``.cfg``), a JSON config, its content as a dict, or nothing for the defaults.
        equalize: Make the channels between layers more equal first, from a round of forwards of its own: 8 bits lose
            less then, most of all in nets with depthwise convolutions. The record is that of the equalized float
            model, which ``save`` writes too.

    Raises:
        FileError, ParseError, ModelError, ConfigError: a file is not what it should be.
        CalibrationError: the data is not enough or cannot be used.
    """
    input_file(model, "model")
    input_file(weights, "weights")
    layers = layer_list(model)
    batches = batches_of(data)
    if (config is None or equalize) and not isinstance(batches, Sized):
        batches = list(batches)  # how many there are decides when calibration ends; equalization goes through them too
    plan = _plan(config, layers, len(batches) if isinstance(batches, Sized) else 0)
    if plan.update_bn is not None:
        raise ConfigError("quantize: update_bn needs two rounds of data; use init, weights_quantize_model and so on")
    original = read_model(model, weights)
    with tempfile.TemporaryDirectory() as folder:
        graph = QuantGraph(original=original, plan=plan, record_file=Path(folder) / "record.txt", model=original.copy())
        fold(graph)
        if equalize:
            _equalize(graph, islice(batches, plan.batch_num))
        quantize_folded(graph)
        record = CaffeRecord({name: each.record() for name, each in graph.weights.items()})
        write_record(record, graph.record_file)
        source = iter(batches)
        first = list(islice(source, 1))
        ranges = _calibrate(graph, chain(first, source))
        return QuantizedCaffeModel(graph, results_of(graph), ranges, next(iter(first), None))


def _plan(config: AnyPath | Mapping[str, Any] | None, layers: LayerList, batches: int) -> Plan:
    if config is None:
        if not batches:
            raise CalibrationError("quantize: data has no batch")
        return make_plan(default_config(layers, batch_num=batches), layers)
    if isinstance(config, Mapping):
        return make_plan(read_config(json.dumps(config), SOURCE, layers), layers)
    if not isinstance(config, (str, os.PathLike)):
        raise ArgumentTypeError(f"quantize: config must be a path, a dict or None, got {type(config).__name__}")
    content = read_bytes(config)
    reader = read_config if content.lstrip()[:1] == b"{" else expand_config
    return make_plan(reader(content, os.fspath(config), layers), layers)


def _equalize(graph: QuantGraph, batches: Iterable[Batch]) -> None:
    weights = {name: plan.weight for name, plan in graph.plans().items()}
    one_scale = {name for name, each in weights.items() if each is not None and not each.channel_wise}
    factors = find_factors(graph.model, batches, one_scale=one_scale)
    divide_channels(graph.model, factors)
    graph.equalized = tuple(factors)


def _calibrate(graph: QuantGraph, batches: Iterable[Batch]) -> QdqRanges:
    ranges = QdqRanges(build_net(graph.model), graph.plans())
    calibration = with_real_weights(graph)
    insert_ifmr(calibration, graph.plans(), str(graph.record_file))
    graph.calibration_record = graph.record_file
    graph.stage = Stage.CALIBRATING
    net = build_net(calibration, keep_blobs=ranges.names)
    for batch in islice(batches, graph.plan.batch_num):
        feed(net, batch)
        del batch  # the net has a copy; one batch is enough to hold
        net.forward()
        ranges.observe(net)
    return ranges
