"""The one-call way: ``amct.caffe.quantize(model, weights, data)`` calibrates and gives a model to run and to save."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from amct import log
from amct.atomic import read_bytes
from amct.caffe.arguments import input_file
from amct.caffe.engine.net import Net
from amct.caffe.insertion import insert_ifmr
from amct.caffe.layer_list import layer_list
from amct.caffe.model import read_model
from amct.caffe.onnx_graph import DEFAULT_OPSET
from amct.caffe.ptq import prepare_weights, with_real_weights
from amct.caffe.ptq_graph import QuantGraph, Stage
from amct.caffe.ptq_qdq import QdqFile, QdqRanges
from amct.caffe.ptq_save import check_save_type, results_of, save_results
from amct.config.ptq_caffe import default_config, expand_config
from amct.config.ptq_caffe_json import make_plan, read_config
from amct.errors import ArgumentError, ArgumentTypeError, CalibrationError, ConfigError
from amct.export.onnx_qdq import Placement
from amct.export.qdq_nodes import Target
from amct.record import CaffeRecord, write_record
from amct.report.compare import Comparison

if TYPE_CHECKING:
    import numpy.typing as npt

    from amct.caffe.deploy import Results
    from amct.caffe.model import CaffeModel
    from amct.config.layers import LayerList
    from amct.config.plan import Plan
    from amct.report.compare import LayerComparison

AnyPath = str | os.PathLike[str]
Array = "npt.NDArray[np.float32]"
Batch = Any
"""An array for a net with one input, or a dict of arrays by the inputs' names."""
SOURCE = "config"


class QuantizedCaffeModel:
    """A quantized Caffe model: run it (``model(batch)``), compare it, save it."""

    def __init__(self, graph: QuantGraph, results: Results, ranges: QdqRanges) -> None:
        self._graph = graph
        self._results = results
        self._ranges = ranges
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
        return _run(self._net("deploy" if deploy else "fake_quant"), batch)

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
        net = build_net(self._results.float_model())
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

    def compare(self, data: Iterable[Batch], *, deploy: bool = False) -> list[LayerComparison]:
        """How near the quantized model comes to the float one: every blob that both have, over all batches."""
        float_net, quantized = self._net("float"), self._net("deploy" if deploy else "fake_quant")
        names = [name for name in float_net.graph.blob_names if name in set(quantized.graph.blob_names)]
        inputs = {float_net.graph.blob_names[index] for index in float_net.graph.inputs}
        comparison = Comparison()
        for batch in data:
            _run(float_net, batch)
            _run(quantized, batch)
            for name in names:
                if name not in inputs and not name.endswith(")"):
                    comparison.add(name, float_net.blob(name).tensor, quantized.blob(name).tensor)
        return comparison.layers()

    def _net(self, kind: str) -> Net:
        if kind not in self._nets:
            if kind == "float":
                model = self._graph.model
            else:
                model = (self._results.deploy() if kind == "deploy" else self._results.fake_quant()).model
            self._nets[kind] = build_net(model)
        return self._nets[kind]


def quantize(
    model: AnyPath,
    weights: AnyPath,
    data: Iterable[Batch],
    config: AnyPath | Mapping[str, Any] | None = None,
) -> QuantizedCaffeModel:
    """Quantize a Caffe model with some batches of data.

    Args:
        model: The prototxt.
        weights: The caffemodel.
        data: Batches: arrays, or dicts of arrays by input name; every batch is used, unless the config says how many.
        config: A simple config (``.cfg``), a JSON config, its content as a dict, or nothing for the defaults.

    Raises:
        FileError, ParseError, ModelError, ConfigError: a file is not what it should be.
        CalibrationError: the data is not enough or cannot be used.
    """
    log.start("amct_caffe")
    input_file(model, "model")
    input_file(weights, "weights")
    layers = layer_list(model)
    if config is None and not isinstance(data, Sized):
        data = list(data)  # how many there are decides when calibration ends
    plan = _plan(config, layers, len(data) if isinstance(data, Sized) else 0)
    if plan.update_bn is not None:
        raise ConfigError("quantize: update_bn needs two rounds of data; use init, weights_quantize_model and so on")
    original = read_model(model, weights)
    with tempfile.TemporaryDirectory() as folder:
        graph = QuantGraph(original=original, plan=plan, record_file=Path(folder) / "record.txt", model=original.copy())
        prepare_weights(graph)
        record = CaffeRecord({name: each.record() for name, each in graph.weights.items()})
        write_record(record, graph.record_file)
        ranges = _calibrate(graph, data)
        return QuantizedCaffeModel(graph, results_of(graph), ranges)


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


def _calibrate(graph: QuantGraph, batches: Iterable[Batch]) -> QdqRanges:
    ranges = QdqRanges(build_net(graph.model), graph.plans())
    calibration = with_real_weights(graph)
    insert_ifmr(calibration, graph.plans(), str(graph.record_file))
    graph.calibration_record = graph.record_file
    graph.stage = Stage.CALIBRATING
    net = build_net(calibration, keep_blobs=ranges.names)
    for count, batch in enumerate(batches):
        if count == graph.plan.batch_num:
            break
        _run(net, batch)
        ranges.observe(net)
    return ranges


def build_net(model: CaffeModel, *, keep_blobs: bool | Iterable[str] = True) -> Net:
    """A net that runs a model in memory."""
    net = Net(model.net, with_gradients=False, keep_blobs=keep_blobs)
    for layer in net.layers:
        for blob, tensor in zip(layer.blobs, model.weights.get(layer.name, layer.blobs), strict=True):
            if isinstance(tensor, torch.Tensor):
                blob.set_tensor(tensor.view(torch.int8) if tensor.dtype is torch.uint8 else tensor)
    return net


def _run(net: Net, batch: Batch) -> dict[str, npt.NDArray[np.float32]]:
    graph = net.graph
    names = [graph.blob_names[index] for index in graph.inputs]
    given = batch if isinstance(batch, Mapping) else {names[0]: batch} if len(names) == 1 else None
    if given is None or set(given) != set(names):
        got = sorted(given) if given is not None else "one array"
        raise ArgumentError(f"a batch must be a dict with the arrays of the net's inputs {names}, got {got}")
    for name, value in given.items():
        array = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
        blob = net.blob(name)
        blob.set_tensor(torch.from_numpy(np.array(array, np.float32)))
    net.forward()
    return {graph.blob_names[index]: graph.blobs[index].data.copy() for index in graph.outputs}
