"""Weights beside their model: the files, the sessions and the results are those of a model that holds its weights."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import numpy as np
import onnx
import pytest
import torch
from onnx import ModelProto, TensorProto, helper, numpy_helper
from torch import nn

import amct.caffe
import amct.onnx_model
import amct.pytorch
from amct.caffe.engine import net as engine
from amct.errors import AmctError, ExportError
from amct.export import formats
from amct.export.formats import save_model
from amct.export.onnx import kept_weights, runtime
from amct.export.onnx.kept_weights import (
    KeptWeights,
    initializer_bytes,
    kept_arrays,
    model_parts,
    owner_of,
    read_parts,
    tensor_array,
    with_values,
    with_weights_beside,
)
from amct.export.onnx.runtime import Runner

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def keep_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_weights, "LEAST_BYTES", 1)


def net(kept: KeptWeights | None, *, rows: int = 64) -> tuple[ModelProto, dict[str, np.ndarray]]:
    random = np.random.default_rng(rows)
    arrays = {
        "conv.weight": random.standard_normal((8, 3, 3, 3)).astype(np.float32),
        "conv.bias": random.standard_normal(8).astype(np.float32),
        "shape": np.array([1, -1]),
        "fc.weight": random.standard_normal((rows, 8 * 36)).astype(np.float32),
        "half": random.standard_normal((rows,)).astype(np.float16),
    }
    nodes = [
        helper.make_node("Conv", ["x", "conv.weight", "conv.bias"], ["y"], kernel_shape=[3, 3]),
        helper.make_node("Relu", ["y"], ["r"]),
        helper.make_node("Reshape", ["r", "shape"], ["f"]),
        helper.make_node("Gemm", ["f", "fc.weight"], ["g"], transB=1),
        helper.make_node("Cast", ["half"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["g", "wide"], ["out"]),
    ]
    make = numpy_helper.from_array if kept is None else lambda array, name: kept.tensor(name, array)
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 8, 8])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, [1, rows])],
        [make(array, name) for name, array in arrays.items()],
        doc_string="behind the weights",
        value_info=[helper.make_tensor_value_info("r", TensorProto.FLOAT, [1, 8, 6, 6])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], producer_name="test", ir_version=8)
    model.metadata_props.add(key="behind", value="the graph")
    return model, arrays


@pytest.mark.usefixtures("keep_all")
@pytest.mark.parametrize("rows", [1, 64, 300])
def test_parts_are_the_bytes_of_the_whole_message(rows: int) -> None:
    kept = KeptWeights()
    light, arrays = net(kept, rows=rows)
    whole, _ = net(None, rows=rows)

    assert set(kept_arrays(light)) == set(arrays) - {"shape"}  # int64 is not among the types of weights
    assert len(light.SerializeToString()) < len(whole.SerializeToString())
    assert b"".join(bytes(part) for part in model_parts(light)) == whole.SerializeToString()
    assert with_values(light) == whole
    assert with_values(whole) is whole
    sizes = [initializer_bytes(tensor) for tensor in light.graph.initializer]
    assert sizes == [initializer_bytes(tensor) for tensor in whole.graph.initializer]


def test_small_arrays_are_in_the_message() -> None:
    kept = KeptWeights()
    light, _ = net(kept, rows=256)

    assert set(kept_arrays(light)) == {"fc.weight"}


@pytest.mark.usefixtures("keep_all")
def test_written_file_is_the_same(tmp_path) -> None:
    kept = KeptWeights()
    for folder, (model, _) in {"light": net(kept), "whole": net(None)}.items():
        save_model(tmp_path / folder / "one.onnx", model)
        save_model(tmp_path / folder / "apart.onnx", model, external_threshold=1500)

    names = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert len(names) == 3
    assert names == sorted(path.name for path in (tmp_path / "light").iterdir())
    for name in names:
        assert (tmp_path / "light" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.usefixtures("keep_all")
def test_session_computes_the_same_and_keeps_the_weights() -> None:
    kept = KeptWeights()
    light, whole = net(kept)[0], net(None)[0]
    runner = Runner(light, ["r"])
    del kept
    gc.collect()
    feeds = {"x": np.random.default_rng(1).standard_normal((1, 3, 8, 8)).astype(np.float32)}

    got, expected = runner.run(feeds), Runner(whole, ["r"]).run(feeds)

    assert set(got) == {"out", "r"}
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value)


@pytest.mark.usefixtures("keep_all")
def test_lean_session_computes_nearly_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "LARGE_MODEL", 1)
    kept = KeptWeights()
    session = runtime.open_session(net(kept)[0], lean=True)
    feeds = {"x": np.random.default_rng(1).standard_normal((1, 3, 8, 8)).astype(np.float32)}

    assert [value.name for value in session.get_inputs()] == ["x"]
    (got,) = session.run(["out"], feeds)
    (of_turned,) = session.run(["out"], {"x": np.asfortranarray(feeds["x"])})

    np.testing.assert_allclose(got, Runner(net(None)[0]).run(feeds)["out"], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(of_turned, got)


@pytest.mark.usefixtures("keep_all")
def test_lean_session_takes_and_gives_what_is_no_number() -> None:
    kept = KeptWeights()
    model = net(kept)[0]
    model.graph.input.append(helper.make_tensor_value_info("words", TensorProto.STRING, [2]))
    model.graph.node.append(helper.make_node("Identity", ["words"], ["same"]))
    model.graph.output.append(helper.make_tensor_value_info("same", TensorProto.STRING, [2]))
    session = runtime.open_session(model, lean=True)
    words = np.array(["one", "two"], object)

    got, same = session.run(["out", "same"], {"x": np.ones((1, 3, 8, 8), np.float32), "words": words})

    assert got.dtype == np.float32
    assert same.tolist() == ["one", "two"]


@pytest.mark.usefixtures("keep_all")
@pytest.mark.parametrize("in_file", [False, True], ids=["in memory", "left in the file"])
def test_a_written_file_is_read_with_its_weights_beside_it(tmp_path, in_file) -> None:
    whole, arrays = net(None)
    whole.graph.initializer.append(helper.make_tensor("floats", TensorProto.FLOAT, [2], [1.0, 2.0]))
    packed = TensorProto(name="nibbles", data_type=TensorProto.INT4, dims=[4], raw_data=b"\x12\x34")
    whole.graph.initializer.append(packed)
    whole.graph.initializer.append(TensorProto(name="empty", data_type=TensorProto.FLOAT, dims=[0]))
    save_model(tmp_path / "net.onnx", whole)
    kept = KeptWeights()

    read = read_parts(tmp_path / "net.onnx", kept, in_file=in_file)

    assert any(isinstance(each, kept_weights.KeptInFile) for each in kept._owned.values()) == in_file
    assert b"".join(model_parts(read)) == whole.SerializeToString()
    assert set(kept_arrays(read)) == set(arrays) - {"shape"}
    assert with_values(read) == whole


@pytest.mark.usefixtures("keep_all")
def test_integers_that_are_floats_in_the_file() -> None:
    integers = np.random.default_rng(0).integers(-127, 128, (700, 900)).astype(np.int8)
    kept = KeptWeights()
    graph = helper.make_graph([], "g", [], [], [kept.tensor("w", integers, np.float32)])
    whole = helper.make_graph([], "g", [], [], [numpy_helper.from_array(integers.astype(np.float32), "w")])
    light, plain = (helper.make_model(each, ir_version=8) for each in (graph, whole))

    np.testing.assert_array_equal(tensor_array(light.graph.initializer[0]), integers.astype(np.float32))
    assert b"".join(bytes(part) for part in model_parts(light)) == plain.SerializeToString()


def test_models_get_their_weights_beside_them() -> None:
    whole, arrays = net(None, rows=300)
    kept = KeptWeights()

    light = with_weights_beside(whole, kept)

    assert set(kept_arrays(light)) == {"fc.weight"}
    np.testing.assert_array_equal(kept_arrays(light)["fc.weight"], arrays["fc.weight"])
    assert with_values(light) == whole
    other = owner_of(light)
    del kept
    assert set(kept_arrays(light)) == {"fc.weight"}
    del other
    with pytest.raises(ExportError, match="were freed"):
        kept_arrays(light)


@pytest.mark.usefixtures("keep_all")
def test_arrays_are_shared_and_cannot_be_changed() -> None:
    kept = KeptWeights()
    array = np.ones((4, 4), np.float32)
    found = tensor_array(kept.tensor("w", array))

    assert np.shares_memory(found, array)
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 2


@pytest.mark.usefixtures("keep_all")
@pytest.mark.parametrize("lean", [False, True])
def test_a_transposed_matrix_is_not_copied_and_its_values_are_in_order_where_they_are_used(lean: bool) -> None:
    weight = np.random.default_rng(0).standard_normal((5, 7)).astype(np.float32)
    kept = KeptWeights()
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("x", "y")]
    ends[0].type.tensor_type.shape.dim.add(dim_value=7)
    graph = helper.make_graph(nodes, "net", ends[:1], ends[1:], [kept.tensor("w", weight.T)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    assert np.shares_memory(tensor_array(model.graph.initializer[0]), weight)
    whole = with_values(model)
    np.testing.assert_array_equal(numpy_helper.to_array(whole.graph.initializer[0]), weight.T)
    assert b"".join(model_parts(model)) == whole.SerializeToString()
    x = np.arange(7, dtype=np.float32)
    found = runtime.open_session(model, lean=lean, is_large=lean).run(["y"], {"x": x})[0]
    np.testing.assert_allclose(found, weight @ x, rtol=1e-5)


@pytest.mark.usefixtures("keep_all")
def test_freed_weights_are_a_clear_error() -> None:
    kept = KeptWeights()
    tensor = kept.tensor("w", np.ones((4, 4), np.float32))
    del kept

    with pytest.raises(ExportError, match='the values of "w" were freed'):
        tensor_array(tensor)


def test_a_file_cannot_refer_to_memory(tmp_path) -> None:
    kept = KeptWeights()
    array = np.ones((300, 300), np.float32)
    reference = kept.tensor("w", array)
    for location in (reference.external_data[0].value, "kept-weights/0"):
        tensor = TensorProto(name="w", data_type=1, dims=[300, 300], data_location=TensorProto.EXTERNAL)
        tensor.external_data.add(key="location", value=location)
        graph = helper.make_graph(
            [helper.make_node("MatMul", ["x", "w"], ["y"])],
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 300])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 300])],
            [tensor],
        )
        path = tmp_path / "net.onnx"
        path.write_bytes(helper.make_model(graph).SerializeToString())
        with pytest.raises(AmctError):
            amct.onnx_model.quantize(path, np.ones((1, 300), np.float32))


# -- a whole job -------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.first, self.second = nn.Linear(8 * 36, 32), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.conv(x))).flatten(1)
        return self.second(torch.relu(self.first(x)))


def saved(folder, quantize) -> dict[str, bytes]:
    quantize().save(folder / "net")
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.endswith("quant.json")}


def from_torch(_: Path):
    torch.manual_seed(0)
    return amct.pytorch.quantize(Net().eval(), torch.randn(4, 3, 8, 8))


def from_onnx(folder: Path):
    random = np.random.default_rng(0)
    shapes = {"conv.weight": (8, 3, 3, 3), "scale": (8,), "shift": (8,), "mean": (8,), "fc.weight": (16, 288)}
    arrays = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    arrays["variance"] = np.full(8, 0.5, np.float32)
    nodes = [
        helper.make_node("Conv", ["x", "conv.weight"], ["y"], "conv", kernel_shape=[3, 3]),
        helper.make_node("BatchNormalization", ["y", "scale", "shift", "mean", "variance"], ["n"], "norm"),
        helper.make_node("Relu", ["n"], ["r"], "relu"),
        helper.make_node("Flatten", ["r"], ["f"], "flatten"),
        helper.make_node("Gemm", ["f", "fc.weight"], ["out"], "fc", transB=1),
    ]
    ends = [helper.make_tensor_value_info("x", 1, ["n", 3, 8, 8])], [helper.make_tensor_value_info("out", 1, ["n", 16])]
    stored = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    model = helper.make_model(
        helper.make_graph(nodes, "net", *ends, stored), opset_imports=[helper.make_opsetid("", 17)]
    )
    onnx.save(model, folder / "net.onnx")
    return amct.onnx_model.quantize(folder / "net.onnx", random.standard_normal((4, 3, 8, 8)).astype(np.float32))


def from_caffe(folder: Path):
    (folder / "net.prototxt").write_text(PROTOTXT)
    torch.manual_seed(0)
    net = engine.Net.from_file(folder / "net.prototxt")
    for layer in net.layers:
        for blob in layer.blobs:
            blob.set_tensor(torch.rand(blob.shape))
    net.save_weights(folder / "net.caffemodel")
    data = [np.random.default_rng(seed).standard_normal((1, 3, 8, 8)).astype(np.float32) for seed in range(4)]
    return amct.caffe.quantize(folder / "net.prototxt", folder / "net.caffemodel", data)


PROTOTXT = """
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 1 dim: 3 dim: 8 dim: 8 } } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv" convolution_param { num_output: 8 kernel_size: 3 } }
layer { name: "norm" type: "BatchNorm" bottom: "conv" top: "norm" batch_norm_param { use_global_stats: true } }
layer { name: "relu" type: "ReLU" bottom: "norm" top: "relu" }
layer { name: "fc" type: "InnerProduct" bottom: "relu" top: "fc" inner_product_param { num_output: 16 } }
"""


@pytest.mark.parametrize("door", [from_torch, from_onnx, from_caffe])
def test_files_of_a_save_do_not_depend_on_it(door, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for name, least in {"light": 1, "whole": 2**40}.items():
        monkeypatch.setattr(kept_weights, "LEAST_BYTES", least)
        source = tmp_path / f"{name}_source"
        source.mkdir()
        found[name] = saved(tmp_path / name, lambda source=source: door(source))

    assert "net_qdq_model.onnx" in found["whole"]
    assert len(found["whole"]) >= 4
    assert found["light"] == found["whole"]
    onnx.checker.check_model(onnx.load_model_from_string(found["light"]["net_qdq_model.onnx"]))


@pytest.mark.usefixtures("keep_all")
def test_registered_exporter_gets_the_values(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_FORMATS", dict(formats._FORMATS))
    formats.register_exporter(name="copy", exporter=lambda request: request.model)
    model = Net().eval()

    amct.pytorch.quantize(model, torch.randn(4, 3, 8, 8)).save(tmp_path / "net", ["copy"], check=False)

    stored = {tensor.name: tensor for tensor in onnx.load(tmp_path / "net_copy_model.onnx").graph.initializer}
    np.testing.assert_array_equal(numpy_helper.to_array(stored["second.weight"]), model.second.weight.detach().numpy())


def test_exported_report_alone_does_not_keep_weights() -> None:
    kept = KeptWeights()
    tensor = kept.tensor("w", np.ones((300, 300), np.float32))
    exported = formats.ExportedModel(model=ModelProto(), kept=kept)
    report = exported.report
    del kept, exported

    assert report.layers == ()
    with pytest.raises(ExportError):
        tensor_array(tensor)
