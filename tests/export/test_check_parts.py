"""A large model in parts: they compute what the whole model computes, and each has few of the weights."""

from __future__ import annotations

import numpy as np
import pytest
from export_nets import residual, run
from onnx import helper

from amct.export.check.running import LoadedModel
from amct.export.onnx.kept_weights import KeptWeights
from amct.export.onnx.messages import parameter_bytes
from amct.export.onnx.parts import PartRunner, consecutive_parts, part_model, parts_before
from amct.export.onnx.runtime import Runner


@pytest.mark.parametrize("most", [1, 3000, 10**9], ids=["one layer each", "two layers", "everything"])
def test_parts_compute_what_the_whole_model_computes(most):
    net, model = residual()
    feeds = net.data()
    parts = consecutive_parts(model, most)
    values, sizes = dict(feeds), []
    for index in range(len(parts)):
        part = part_model(model, parts, index, values)
        sizes.append(parameter_bytes(part))
        loaded = LoadedModel(part)
        values |= loaded.run({name: values[name] for name in loaded.inputs})

    assert [node.name for part in parts for node in part] == [node.name for node in model.graph.node]
    assert len(parts) == {1: 4, 3000: 3, 10**9: 1}[most]
    assert sum(sizes) == parameter_bytes(model)
    np.testing.assert_allclose(values["y"], run(model, feeds)["y"], rtol=1e-5, atol=1e-6)


def test_what_follows_a_layer_stays_with_it():
    _, model = residual()
    assert all(part[0].op_type in ("Conv", "Gemm") for part in consecutive_parts(model, 1))


def test_a_model_with_sequences_is_one_part():
    _, model = residual()
    model.graph.node.append(helper.make_node("SequenceConstruct", ["y"], ["all"]))
    assert len(consecutive_parts(model, 1)) == 1


def test_watched_tensors_are_shown_part_by_part():
    net, model = residual()
    kept, outputs = KeptWeights(), {node.name.removeprefix("node_"): node.output[0] for node in model.graph.node}
    watched = ["x", "stem.w", *(outputs[name] for name in ("stem", "first_relu", "join", "gap"))]
    runner = PartRunner(model, kept, watched, {outputs["first"], outputs["fc"]})
    expected = Runner(model, watched).run(net.data())

    for _ in range(2):  # the second time with the sessions of the first
        shown = list(runner.run(net.data()))
        assert [sorted(part) for part in shown] == [
            sorted(["x", "stem.w"]),
            [outputs["stem"]],
            sorted(outputs[name] for name in ("first_relu", "join", "gap")),
            [],
        ]
        for part in shown:
            for name, value in part.items():
                np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-6)


def test_a_model_of_any_batch_size_takes_any_in_its_parts():
    net, model = residual()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "batch"
    outputs = {node.name.removeprefix("node_"): node.output[0] for node in model.graph.node}
    runner = PartRunner(model, KeptWeights(), [outputs["join"]], {outputs["first"]})
    shapes = []
    for samples in (2, 1):
        shown = list(runner.run({name: array[:samples] for name, array in net.data().items()}))
        shapes += [value.shape[0] for part in shown for value in part.values()]
    assert shapes == [2, 1]


def test_a_model_with_sequences_is_not_cut():
    _, model = residual()
    model.graph.node.append(helper.make_node("SequenceConstruct", ["y"], ["all"]))
    assert len(parts_before(model, ["y"])) == 1
