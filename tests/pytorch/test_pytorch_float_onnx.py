from __future__ import annotations

import inspect

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from pytorch_nets import CASES, Case, DataDependent, ResNet, case, lively
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from amct.errors import ArgumentError, ExportError
from amct.export.onnx.layer_lookup import bindings_by_name
from amct.pytorch.capture.trace import Traced, trace
from amct.pytorch.folding import fuse
from amct.pytorch.inputs import IoOptions
from amct.pytorch.onnx.float_onnx import TracedOnnx, float_onnx


def exported(model: nn.Module, data, *, opset: int = 18, do_fusion: bool = True, **names) -> tuple[Traced, TracedOnnx]:
    traced = trace(model, data, io=IoOptions(**names))
    return traced, float_onnx(traced, fuse(traced, do_fusion=do_fusion), opset=opset)


def run(model: onnx.ModelProto, tensors: list[torch.Tensor]) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    return session.run(None, dict(zip(names, (tensor.numpy() for tensor in tensors), strict=True)))


def reference(model: nn.Module, traced: Traced) -> list[torch.Tensor]:
    with torch.no_grad():
        found = pytree.tree_leaves(model(*traced.inputs.args, **traced.inputs.kwargs))
    return [tensor.detach() for tensor in found]


def assert_same(found: list[np.ndarray], expected: list[torch.Tensor]) -> None:
    """Equal to float rounding: both sum the same products, in another order; errors are relative to the largest."""
    for one, other in zip(found, expected, strict=True):
        assert list(one.shape) == list(other.shape)
        bound = 64 * torch.finfo(other.dtype).eps * max(float(other.abs().max()), 1.0)
        assert float(np.abs(one.astype(np.float64) - other.double().numpy()).max()) <= bound


def operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


@pytest.fixture(scope="module", params=CASES, ids=lambda item: item.name)
def each(request) -> tuple[Case, nn.Module, Traced, TracedOnnx]:
    model = request.param.model()
    traced, result = exported(model, request.param.inputs())
    return request.param, model, traced, result


def test_onnxruntime_computes_the_same(each):
    _, model, traced, result = each
    assert_same(run(result.model, traced.inputs.tensors()), reference(model, traced))


def test_every_layer_is_bound_to_its_node(each):
    _, _, traced, result = each
    assert [binding.layer for binding in result.bindings] == list(traced.layers)
    assert list(result.bindings) == bindings_by_name(result.model, traced.layers)


def test_layers_read_their_parameters_straight(each):
    _, _, _traced, result = each
    nodes = {node.name: node for node in result.model.graph.node}
    stored = {tensor.name for tensor in result.model.graph.initializer}
    for binding in result.bindings:
        node = nodes[binding.node]
        if node.op_type != "AveragePool":
            assert node.input[1] in stored
        assert node.input[0] not in stored


def test_tensors_hold_what_the_program_computes(each):
    """Every activation that is said to exist in the file has there the values of the float model."""
    _, _model, traced, result = each
    values = activations(traced)
    wanted = {name: tensor for name, tensor in result.tensors.items() if name in values}
    assert wanted
    shown = onnx.ModelProto()
    shown.CopyFrom(result.model)
    taken = {value.name for value in (*shown.graph.output, *shown.graph.input)}
    known = {value.name: value for value in shown.graph.value_info}
    extra = [tensor for tensor in dict.fromkeys(wanted.values()) if tensor not in taken and tensor in known]
    shown.graph.output.extend(known[tensor] for tensor in extra)
    session = onnxruntime.InferenceSession(shown.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {value.name: t.numpy() for value, t in zip(session.get_inputs(), traced.inputs.tensors(), strict=True)}
    found = dict(zip((value.name for value in session.get_outputs()), session.run(None, feeds), strict=True))
    compared = 0
    for name, tensor in wanted.items():
        if tensor in found and values[name].is_floating_point():
            assert_same([found[tensor]], [values[name]])
            compared += 1
    assert compared >= len(traced.layers)


def activations(traced: Traced) -> dict[str, torch.Tensor]:
    """Every tensor of the program, computed by torch on the example input."""
    found: dict[str, torch.Tensor] = {}

    class Noting(torch.fx.Interpreter):
        def run_node(self, node):
            result = super().run_node(node)
            if isinstance(result, torch.Tensor):
                found[node.name] = result.clone()
            return result

    module = traced.program.module()
    with torch.no_grad():
        graph = torch.fx.GraphModule(module, module.graph)
        Noting(graph).run(*pytree.tree_leaves((traced.inputs.args, traced.inputs.kwargs)))
    return found


# -- opsets -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("opset", range(16, 22))
def test_the_opset_asked_for_is_written(opset: int):
    item = case("transformer")
    model = item.model()
    traced, result = exported(model, item.inputs(), opset=opset)
    assert {entry.domain: entry.version for entry in result.model.opset_import}[""] == opset
    assert result.model.ir_version <= 10
    assert ("Gelu" in operators(result.model)) == (opset >= 20)  # before as Erf
    assert ("LayerNormalization" in operators(result.model)) == (opset >= 17)
    onnx.checker.check_model(result.model, full_check=True)
    assert_same(run(result.model, traced.inputs.tensors()), reference(model, traced))


@pytest.mark.parametrize("opset", [15, 22, 0, "17"])
def test_other_opsets_are_refused(opset):
    with pytest.raises(ArgumentError, match=r"opset: expected 16\.\.21, got"):
        exported(nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4), opset=opset)


# -- names and sizes --------------------------------------------------------------------------------------------


def test_names_are_respected():
    item = case("conv1d3d")
    names = {"input_names": ["relu", "convolution"], "output_names": ["conv1d", "out put"]}  # three exist inside
    model = item.model()
    traced, result = exported(model, item.inputs(), **names)
    assert [value.name for value in result.model.graph.input] == names["input_names"]
    assert [value.name for value in result.model.graph.output] == names["output_names"]
    assert_same(run(result.model, traced.inputs.tensors()), reference(model, traced))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"output_names": ["a", "b"]}, r"output_names: the model has 1 outputs, got 2 names \(a, b\)"),
        ({"input_names": ["0.weight"]}, '"0.weight" is the name of a parameter'),
        ({"output_names": ["y"], "dynamic_axes": {"y": [2]}}, "axis 2 does not exist, it has 2 axes"),
    ],
    ids=["too many outputs", "a parameter's name", "no such axis"],
)
def test_names_that_cannot_be(names, message):
    with pytest.raises(ExportError, match=message):
        exported(nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4), **names)


BATCH_AXES = {
    "mobile": {"x": 0},
    "keywords": {"image": 0, "extra_words": 0, "scale": 0},
    "transformer": {"ids": 0},
    "gru_state_batch_first": {"x": 0, "h": 1},
}


@pytest.mark.parametrize("name", BATCH_AXES)
def test_open_batch_size_from_a_single_example(name: str):
    item, axes = case(name), BATCH_AXES[name]
    model = item.model()
    inputs = trace(model, item.inputs()).inputs
    single = resized(inputs, axes, 1)
    _traced, result = exported(model, (*single[0], single[1]), dynamic_axes={key: {axes[key]: "batch"} for key in axes})
    for value in result.model.graph.input:
        assert value.type.tensor_type.shape.dim[axes[value.name]].dim_param == "batch"
    for size in (1, 4):
        args, kwargs = resized(inputs, axes, size)
        with torch.no_grad():
            expected = pytree.tree_leaves(model(*args, **kwargs))
        assert_same(run(result.model, pytree.tree_leaves((args, kwargs))), expected)


def resized(inputs, axes: dict[str, int], size: int):
    names = iter(inputs.names)

    def of_leaf(tensor: torch.Tensor) -> torch.Tensor:
        axis = axes[next(names)]
        return tensor.index_select(axis, torch.arange(size) % tensor.shape[axis])

    return pytree.tree_map(of_leaf, (inputs.args, inputs.kwargs))


def test_open_sequence_length_of_a_recurrent_layer():
    item = case("lstm_state")
    model = item.model()
    axes = {"x": {0: "time", 1: "batch"}, "h": {1: "batch"}, "c": {1: "batch"}}
    _traced, result = exported(model, item.inputs(), dynamic_axes=axes)
    x, h, c = torch.randn(9, 2, 8), torch.randn(1, 2, 12), torch.randn(1, 2, 12)
    with torch.no_grad():
        expected = pytree.tree_leaves(model(x, h, c))
    assert_same(run(result.model, [x, h, c]), expected)


@pytest.mark.parametrize(
    "layer",
    [nn.LSTM(8, 4), nn.GRU(8, 4, num_layers=2), nn.RNN(8, 4, bidirectional=True, batch_first=True)],
    ids=lambda layer: type(layer).__name__,
)
def test_a_recurrent_layer_that_is_the_whole_model(layer):
    weights = [each.clone() for each in layer.parameters()]
    traced, result = exported(lively(layer), torch.randn(5, 2, 8))
    assert traced.failure is None
    assert_same(run(result.model, traced.inputs.tensors()), reference(layer, traced))
    assert len(layer._flat_weights) == len(layer._flat_weights_names) == len(weights)
    assert all(listed is own for listed, own in zip(layer._flat_weights, layer.parameters(), strict=True))


@pytest.mark.parametrize("norm", [nn.InstanceNorm2d(3, affine=True), nn.BatchNorm2d(3, track_running_stats=False)])
def test_a_model_with_a_buffer_that_holds_nothing(norm):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("missing", None)
            self.register_buffer("factor", torch.tensor(2.0))
            self.conv = nn.Conv2d(3, 3, 1)

        def forward(self, x):
            return self.conv(x) * self.factor if self.missing is None else x

    for model in (norm.eval(), Net().eval()):
        traced, result = exported(model, torch.randn(2, 3, 5, 5))
        assert traced.failure is None
        assert_same(run(result.model, traced.inputs.tensors()), reference(model, traced))
        assert [name for name, buffer in model._buffers.items() if buffer is None]


def test_labels_of_outputs():
    axes = {"x": {0: "batch", 2: "height"}, "y": {0: "images", 3: "width"}}
    model = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2))
    names = {"input_names": ["x"], "output_names": ["y"], "dynamic_axes": axes}
    _, result = exported(model, torch.randn(2, 3, 8, 8), **names)
    dims = result.model.graph.output[0].type.tensor_type.shape.dim
    assert [dim.dim_param or dim.dim_value for dim in dims][:2] == ["images", 4]
    assert "height" in dims[2].dim_param
    assert dims[3].dim_param == "width"


# -- folding ----------------------------------------------------------------------------------------------------


def test_folded_batch_norms_are_gone():
    _, result = exported(case("folds").model(), case("folds").inputs())
    assert "BatchNormalization" not in operators(result.model)
    assert not [tensor.name for tensor in result.model.graph.initializer if "norm" in tensor.name]


def test_the_file_holds_the_folded_weights():
    model, data = lively(ResNet(1)).eval(), torch.randn(2, 3, 32, 32)
    traced = trace(model, data)
    fused = fuse(traced)
    stored = {item.name: numpy_helper.to_array(item) for item in float_onnx(traced, fused).model.graph.initializer}
    for name in traced.layers:
        layer = fused.model.get_submodule(name)
        np.testing.assert_array_equal(stored[f"{name}.weight"], layer.weight.detach().numpy())
        np.testing.assert_array_equal(stored[f"{name}.bias"], layer.bias.detach().numpy())


def test_batch_norms_that_stay_are_not_folded_by_the_exporter():
    model, data = lively(ResNet(1)).eval(), torch.randn(2, 3, 32, 32)
    traced, result = exported(model, data, do_fusion=False)
    assert operators(result.model).count("BatchNormalization") == 7
    stored = {item.name: numpy_helper.to_array(item) for item in result.model.graph.initializer}
    np.testing.assert_array_equal(stored["conv1.weight"], model.conv1.weight.detach().numpy())
    assert len(next(node for node in result.model.graph.node if node.name == "conv1").input) == 2  # no bias
    assert_same(run(result.model, traced.inputs.tensors()), reference(model, traced))


def test_a_folded_batch_norm_at_the_end_keeps_the_name_of_the_output():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    traced, result = exported(model, torch.randn(2, 3, 6, 6), output_names=["y"])
    assert [value.name for value in result.model.graph.output] == ["y"]
    assert_same(run(result.model, traced.inputs.tensors()), reference(model, traced))


class SharedEpsilon(nn.Module):
    """Adds the number that the batch norm also adds; torch stores equal constants of a program once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, eps=1e-5)

    def forward(self, x):
        x = self.norm(self.layer(x))
        return x / (x.abs().sum(1, keepdim=True) + 1e-5)


def test_a_constant_of_a_folded_batch_norm_stays_for_its_other_readers():
    model = SharedEpsilon().eval()
    traced, result = exported(model, torch.randn(2, 3, 6, 6))
    assert "BatchNormalization" not in operators(result.model)
    assert_same(run(result.model, traced.inputs.tensors()), reference(model, traced))


# -- oddities ---------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Returns an input, a parameter, a constant and one tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        y = self.layer(x)
        return x, y, y, self.layer.bias, torch.ones(2)


def test_odd_outputs():
    model = Odd()
    traced, result = exported(model, torch.randn(2, 4))
    assert len({value.name for value in result.model.graph.output}) == 5
    assert_same(run(result.model, traced.inputs.tensors()), reference(model, traced))


def test_half_precision():
    item = case("mix")
    model, data = item.model().half(), item.inputs().half()
    traced, result = exported(model, data)
    assert {tensor.data_type for tensor in result.model.graph.initializer if ".weight" in tensor.name} == {
        onnx.TensorProto.FLOAT16
    }
    assert_same(run(result.model, traced.inputs.tensors()), reference(model, traced))


def test_bfloat16_is_written():
    item = case("attention")
    _, result = exported(item.model().bfloat16(), item.inputs().bfloat16())
    stored = {tensor.name: tensor for tensor in result.model.graph.initializer}
    assert stored["q.weight_transposed"].data_type == onnx.TensorProto.BFLOAT16


def test_a_table_shared_with_an_embedding_is_stored_once():
    class Language(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(300, 64)
            self.head = nn.Linear(64, 300, bias=False)
            self.head.weight = self.table.weight

        def forward(self, ids):
            return self.head(self.table(ids))

    model = Language()
    traced, result = exported(model, torch.tensor([[1, 2, 3]]))
    assert sum(
        tensor.dims[0] * tensor.dims[1] for tensor in result.model.graph.initializer if len(tensor.dims) == 2
    ) == (300 * 64)
    assert_same(run(result.model, traced.inputs.tensors()), reference(model, traced))


def test_the_file_does_not_name_the_users_files():
    _, result = exported(case("mobile").model(), case("mobile").inputs())
    assert b"pytorch_nets" not in result.model.SerializeToString()


def test_the_model_can_be_changed_after_tracing():
    """The parameters come from the folded copy, not from the model as it is now."""
    model = nn.Sequential(nn.Linear(80, 80))
    traced = trace(model, torch.randn(2, 80))
    fused = fuse(traced)
    expected = reference(model, traced)
    nn.init.zeros_(model[0].weight)
    assert_same(run(float_onnx(traced, fused).model, traced.inputs.tensors()), expected)


def test_two_exports_of_one_trace():
    item = case("folds")
    model = item.model()
    traced = trace(model, item.inputs())
    first = float_onnx(traced, fuse(traced))
    second = float_onnx(traced, fuse(traced, do_fusion=False), opset=17)
    for result in (first, second):
        assert_same(run(result.model, traced.inputs.tensors()), reference(model, traced))


# -- refusals ---------------------------------------------------------------------------------------------------


def test_data_dependent_control_flow_is_refused_with_the_users_line():
    lines, first = inspect.getsourcelines(DataDependent)
    branch = first + next(number for number, line in enumerate(lines) if "if x.sum()" in line)
    traced = trace(DataDependent(), torch.randn(2, 3, 6, 6))
    with pytest.raises(ExportError, match=rf"DataDependent cannot be exported to ONNX.*pytorch_nets\.py:{branch}"):
        float_onnx(traced, fuse(traced))


def test_an_operation_that_onnx_lacks():
    class Decomposes(nn.Module):
        def forward(self, x):
            return torch.linalg.svdvals(x)

    with pytest.raises(ExportError, match=r"torch\.onnx cannot export the model: .*svd"):
        exported(Decomposes(), torch.randn(3, 3))


def test_activations_of_torch_functions_are_named():
    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Conv2d(3, 4, 3)
            self.norm = nn.BatchNorm2d(4)

        def forward(self, x):
            return functional.relu(self.norm(self.layer(x))).mean((2, 3))

    traced, result = exported(Chain().eval(), torch.randn(2, 3, 6, 6))
    layer, norm = traced.graph["layer"].outputs[0], traced.graph["norm"].outputs[0]
    assert layer not in result.tensors  # it exists no longer: the batch norm is folded in
    assert result.tensors[norm] == next(node for node in result.model.graph.node if node.name == "layer").output[0]
    assert set(traced.graph.outputs) <= set(result.tensors)
