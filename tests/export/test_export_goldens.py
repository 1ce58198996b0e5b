"""Our deploy and fake-quant files against the node lists of the reference's own, from the same weights and record."""

from __future__ import annotations

import json

import numpy as np
import pytest
from export_nets import quantized
from onnx import TensorProto, helper, numpy_helper

from amct.export.deploy import ascend_model, fake_quant_model
from amct.export.onnx.layer_lookup import bindings_by_name

SMALL = [
    "small_mix_default",
    "small_mix_dmq",
    "small_matmul_default",
    "small_conv1d3d_default",
    "small_gru_bf_hx",
    "small_lstm_bf_hx",
    "small_const",
]
RESNET = ["r20_default", "r20_arq_bits4", "r20_ifmr_int16", "r20_dmq"]
BITS = {f"INT{bits}": bits for bits in (4, 6, 7, 8, 16)}


class Case:
    """One golden: the float model rebuilt from its node list, with the factors of its record."""

    def __init__(self, folder, name):
        self.golden = json.loads((folder / "export" / f"{name}.json").read_text())
        weights = folder / "export" / f"{name}.npz"
        self.has_weights = weights.exists()
        self.weights = (
            {key.replace("|", "/"): value for key, value in np.load(weights).items()} if self.has_weights else {}
        )
        self.model = self.build()
        self.factors = {layer: self.layer_factors(entry) for layer, entry in self.golden["record"].items()}
        self.bindings = bindings_by_name(self.model, self.factors)

    def build(self):
        source = self.golden["modified"]
        random = np.random.default_rng(0)
        initializers = []
        for name, (_, shape, *_) in source["initializers"].items():
            value = self.weights[name] if self.has_weights else random.standard_normal(shape).astype(np.float32) / 100
            initializers.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        nodes = [
            helper.make_node(operator, inputs, outputs, name=name, **attributes)
            for operator, name, inputs, outputs, attributes in source["nodes"]
            if operator != "ConstantOfShape"
        ]
        graph = helper.make_graph(
            nodes,
            "golden",
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in source["inputs"].items()],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in source["outputs"]],
            initializers,
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])

    @staticmethod
    def layer_factors(entry):
        recurrent = {name: entry[name] for name in ("scale_h", "scale_r") if name in entry}
        if "offset_h" in entry:
            recurrent["offset_h"] = int(entry["offset_h"])
        return quantized(
            scale_d=entry["scale_d"],
            offset_d=int(entry["offset_d"]),
            act_bits=BITS[entry["act_type"]],
            scale_w=np.array(entry["scale_w"]),
            wts_bits=BITS[entry.get("wts_type", "INT8")],
            balance=entry.get("tensor_balance_factor"),
            **recurrent,
        )


def described(model):
    """Nodes and initializers in the terms of the goldens."""
    nodes = {}
    for node in model.graph.node:
        attributes = {}
        for attribute in node.attribute:
            value = helper.get_attribute_value(attribute)
            if isinstance(value, TensorProto):
                kind = TensorProto.DataType.Name(value.data_type)
                value = f"tensor{list(value.dims)}:{kind}"
            attributes[attribute.name] = value.decode() if isinstance(value, bytes) else value
        nodes[node.name] = [node.op_type, list(node.input), list(node.output), attributes]
    initializers = {}
    for tensor in model.graph.initializer:
        value = numpy_helper.to_array(tensor)
        kind = TensorProto.DataType.Name(tensor.data_type)
        initializers[tensor.name] = [kind, list(value.shape), float(value.min()), float(value.max())]
    return nodes, initializers


def golden_nodes(golden):
    return {node[1]: [node[0], *node[2:]] for node in golden["nodes"] if node[0] != "ConstantOfShape"}


def equal_attributes(ours, theirs):
    if ours.keys() != theirs.keys():
        return False
    for name, value in theirs.items():
        if isinstance(value, float):
            # 1/scale_d: the record prints scale_d with 8 digits, the reference had all of them.
            if abs(ours[name] - value) > 2e-7 * abs(value):
                return False
        elif list(ours[name]) != value if isinstance(value, list) else ours[name] != value:
            return False
    return True


def compare(ours, golden, *, ranges):
    nodes, initializers = described(ours)
    expected = golden_nodes(golden)
    assert nodes.keys() == expected.keys()
    for name, (operator, inputs, outputs, attributes) in expected.items():
        assert nodes[name][:3] == [operator, inputs, outputs], name
        assert equal_attributes(nodes[name][3], attributes), (name, nodes[name][3], attributes)
    assert initializers.keys() == golden["initializers"].keys()
    for name, (kind, shape, *limits) in golden["initializers"].items():
        assert initializers[name][:2] == [kind, shape], name
        if name.endswith(".dequant.param"):
            # Bits of float32: 4 units in the last place for scale_w · scale_d from printed scales.
            np.testing.assert_allclose(initializers[name][2:], limits, atol=4)
        elif ranges:
            compare_range(name, kind, initializers[name][2:], limits)


def compare_range(name, kind, ours, theirs):
    """Integer weights: one step, where a value lies on a half. Biases: the relative error of the printed scales."""
    tolerance = 1.0 if kind == "INT8" else 3e-7 * max(map(abs, theirs)) + 1
    if kind == "FLOAT" and max(map(abs, theirs)) < 7:
        tolerance = 3e-3  # dequantized in place (LSTM, GRU): one step of about 0.002
    assert abs(ours[0] - theirs[0]) <= tolerance, name
    assert abs(ours[1] - theirs[1]) <= tolerance, name


@pytest.mark.parametrize("name", SMALL)
def test_deploy_model_has_the_reference_s_nodes_attributes_and_integers(golden, name):
    case = Case(golden, name)
    compare(ascend_model(case.model, case.bindings, case.factors).model, case.golden["deploy"], ranges=True)


@pytest.mark.parametrize("name", SMALL)
def test_fake_quant_model_has_the_reference_s_nodes_attributes_and_integers(golden, name):
    case = Case(golden, name)
    compare(fake_quant_model(case.model, case.bindings, case.factors).model, case.golden["fake_quant"], ranges=True)


@pytest.mark.parametrize("name", RESNET)
def test_deploy_model_of_resnet20_has_the_reference_s_structure(golden, name):
    case = Case(golden, name)
    compare(ascend_model(case.model, case.bindings, case.factors).model, case.golden["deploy"], ranges=False)


def test_fake_quant_model_of_resnet20_has_the_reference_s_structure(golden):
    case = Case(golden, "r20_default")
    compare(fake_quant_model(case.model, case.bindings, case.factors).model, case.golden["fake_quant"], ranges=False)


def test_the_comparison_notices_a_wrong_node(golden):
    case = Case(golden, "small_const")
    model = ascend_model(case.model, case.bindings, case.factors).model
    next(node for node in model.graph.node if node.op_type == "AscendQuant").attribute[1].f += 1
    with pytest.raises(AssertionError):
        compare(model, case.golden["deploy"], ranges=True)
