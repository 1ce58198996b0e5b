"""Every large weight that a written file keeps in float is listed with a reason, by every door."""

import json
import math

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import amct.caffe
import amct.onnx_model
import amct.pytorch

TOKENS, WIDTH = 40, 16
IDS = [np.array([[1, 5, 7, 2]], np.int64), np.array([[3, 39, 0, 8]], np.int64)]


class _TableBesideLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(TOKENS, WIDTH))
        self.position = nn.Parameter(torch.randn(4, WIDTH))
        self.first = nn.Linear(WIDTH, WIDTH)
        self.pairs = nn.Bilinear(WIDTH, WIDTH, 8)
        self.last = nn.Linear(8, 8)

    def forward(self, ids):
        x = self.first(self.table[ids] + self.position)
        return self.last(self.pairs(x, x))


def _torch_door(_):
    return amct.pytorch.quantize(_TableBesideLayers().eval(), [torch.from_numpy(ids) for ids in IDS])


def _onnx_door(_):
    rng = np.random.default_rng(0)
    tensors = {"table": (TOKENS, WIDTH), "left": (12, 4), "w": (WIDTH, 8)}
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["x"], "rows"),
        helper.make_node("MatMul", ["x", "w"], ["y"], "product"),
        helper.make_node("MatMul", ["left", "y"], ["z"], "from_the_left"),
    ]
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, [1, 4])],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, [1, 12, 8])],
        [numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name) for name, shape in tensors.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    return amct.onnx_model.quantize(model, [{"ids": ids} for ids in IDS])


CAFFE_NET = """
name: "net"
layer { name: "ids" type: "Input" top: "ids" input_param { shape { dim: 1 dim: 4 } } }
layer { name: "rows" type: "Embed" bottom: "ids" top: "x"
  embed_param { num_output: 16 input_dim: 40 bias_term: false weight_filler { type: "gaussian" std: 1 } } }
layer { name: "fc" type: "InnerProduct" bottom: "x" top: "y"
  inner_product_param { num_output: 8 weight_filler { type: "gaussian" std: 1 } } }
"""


def _caffe_door(tmp_path):
    (tmp_path / "net.prototxt").write_text(CAFFE_NET)
    from amct.caffe import pycaffe

    pycaffe.Net(str(tmp_path / "net.prototxt"), pycaffe.TEST).save(str(tmp_path / "net.caffemodel"))
    data = [{"ids": ids.astype(np.float32)} for ids in IDS]
    return amct.caffe.quantize(tmp_path / "net.prototxt", tmp_path / "net.caffemodel", data)


@pytest.mark.parametrize(
    ("door", "tables"),
    [
        pytest.param(_torch_door, {"table", "position", "pairs"}, id="torch"),
        pytest.param(_onnx_door, {"table", "left"}, id="onnx"),
        pytest.param(_caffe_door, {"rows"}, id="caffe"),
    ],
)
def test_every_large_float_weight_of_the_file_is_listed(door, tables, tmp_path):
    torch.manual_seed(0)
    quantized = door(tmp_path)
    quantized.save(tmp_path / "net", formats=["qdq"])
    listed = {entry["layer"] for entry in json.loads((tmp_path / "net_quant.json").read_text())["skipped"]}

    graph = onnx.load(tmp_path / "net_qdq_model.onnx").graph
    sizes = {tensor.name: math.prod(tensor.dims) for tensor in graph.initializer}
    kept = [tensor for tensor in graph.initializer if tensor.data_type == TensorProto.FLOAT]
    floats = {tensor.name for tensor in kept if len(tensor.dims) > 1}
    large = {name for name in floats if sizes[name] > 0.01 * sum(sizes.values())}
    readers = {name: {node.name for node in graph.node if name in node.input} for name in large}
    for name in large:
        owners = {name, *readers[name]}
        assert any(own == each or own.startswith(f"{each}.") for own in owners for each in listed), name

    assert tables <= {name.removesuffix("_rearranged").removeprefix("from_the_") for name in listed}
    assert {skip.layer for skip in quantized.skipped} == listed
    assert all(name in quantized.summary() for name in listed)
    page = quantized.report(tmp_path / "net.html").read_text()
    assert all(name in page for name in listed)
