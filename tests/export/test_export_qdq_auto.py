"""Placement auto: the fastest of fast, exact and float for each region; the times are given, not measured."""

from __future__ import annotations

import pytest
from export_nets import Net, calibrate, recurrent, residual, run
from transformer_nets import vision_transformer

from amct.export.onnx.layer_lookup import find_layers
from amct.export.qdq import auto
from amct.export.qdq.auto import grouped_regions
from amct.export.qdq.exporter import qdq_model


def two_parts():
    """A convolutional part, a Softmax, which stays float, and a linear part."""
    net = Net(seed=10)
    y = net.layer("Conv", "conv", net.input("x", 1, 3, 6, 6), net.weight("conv.w", 4, 3, 3, 3))
    y = net.layer("Conv", "conv2", net.add("Relu", "relu", y), net.weight("conv2.w", 4, 4, 3, 3))
    y = net.add("Softmax", "soft", net.add("Flatten", "flat", y))
    net.layer("Gemm", "fc", y, net.weight("fc.w", 5, 16), transB=1, outputs=["y"])
    return net, net.model("y")


@pytest.fixture
def timed(monkeypatch):
    """Lets a test set the time of a file by a function of its nodes."""

    def use(cost):
        class Timed(auto.LoadedModel):
            def __init__(self, model):
                super().__init__(model)
                self.seconds = cost(model)

        monkeypatch.setattr(auto, "LoadedModel", Timed)
        monkeypatch.setattr(
            auto, "median_seconds", lambda runs: {name: _model_of(each).seconds for name, each in runs.items()}
        )

    return use


def _model_of(function):
    return next(cell.cell_contents for cell in function.__closure__ if hasattr(cell.cell_contents, "seconds"))


def count(model, operator):
    return sum(node.op_type == operator for node in model.graph.node)


def exported(make):
    net, model = make()
    factors, tensors = calibrate(net, model)
    result = qdq_model(model, net.bindings(), factors, tensors=tensors, placement="auto")
    fast = qdq_model(model, net.bindings(), factors, tensors=tensors)
    return net, model, result, fast


def test_a_fast_file_is_kept_where_nothing_is_faster(timed):
    timed(lambda _: 1.0)
    _, _, result, fast = exported(two_parts)
    assert result.model == fast.model
    assert result.skipped == fast.skipped


def test_differences_below_the_noise_change_nothing(timed):
    timed(lambda model: 1 + 0.002 * count(model, "QuantizeLinear"))
    _, _, result, fast = exported(two_parts)
    assert result.model == fast.model


def test_a_region_that_is_faster_in_float_is_left_float_and_reported(timed):
    def cost(model):
        gemm = next(node for node in model.graph.node if node.op_type == "Gemm")
        return 0.002 if gemm.input[1].endswith("dequantize.output0") else 0.001

    timed(cost)
    net, model, result, _ = exported(two_parts)
    assert {report.layer for report in result.layers} == {"conv", "conv2"}
    assert [(skip.layer, skip.reason) for skip in result.skipped if skip.layer == "fc"] == [
        ("fc", 'placement "auto" leaves it float, because the QDQ file is faster then: 1 ms instead of 2 ms')
    ]
    assert run(result.model, net.data())["y"].shape == run(model, net.data())["y"].shape


def test_a_region_that_is_faster_in_exact_keeps_its_layers_quantized(timed):
    timed(lambda model: 0.001 * (1 + any(node.name == "conv2_out.quantize" for node in model.graph.node)))
    _, _, result, _ = exported(two_parts)
    assert {report.layer for report in result.layers} == {"conv", "conv2", "fc"}
    assert "conv2_out" not in result.tensors
    assert any(note.startswith('placement "exact" for conv, conv2: 1 ms instead of 2 ms') for note in result.notes)


def test_regions_are_connected_by_integer_tensors_and_equal_ones_are_decided_together():
    net, model = two_parts()
    factors, tensors = calibrate(net, model)
    graph, layers, _ = find_layers(model, net.bindings(), factors)
    groups = grouped_regions(graph, layers, qdq_model(model, net.bindings(), factors, tensors=tensors).tensors)
    assert [[set(region.layers) for region in group] for group in groups] == [[{"conv", "conv2"}], [{"fc"}]]
    net, model = vision_transformer()
    factors, tensors = calibrate(net, model)
    graph, layers, _ = find_layers(model, net.bindings(), factors)
    groups = grouped_regions(graph, layers, qdq_model(model, net.bindings(), factors, tensors=tensors).tensors)
    assert [{"b1.up"}, {"b2.up"}] in [[set(region.layers) for region in group] for group in groups]
    assert sum(len(region.layers) for group in groups for region in group) == len(net.layers)


def test_layers_without_integer_kernels_are_not_timed(timed):
    timed(lambda _: 1.0)
    _, _, result, fast = exported(lambda: recurrent("LSTM"))
    assert result.skipped == fast.skipped


def test_a_model_that_does_not_run_on_inputs_of_size_one_gets_the_fast_file():
    net, model = residual()
    factors, tensors = calibrate(net, model)
    for dim in model.graph.input[0].type.tensor_type.shape.dim[1:]:
        dim.dim_param = "unknown"
    result = qdq_model(model, net.bindings(), factors, tensors=tensors, placement="auto")
    assert result.model == qdq_model(model, net.bindings(), factors, tensors=tensors).model
    assert result.notes[-1].endswith('placement "fast" instead of "auto"')


def test_without_observed_tensors_auto_is_exact_with_a_note():
    net, model = residual()
    factors, _ = calibrate(net, model)
    result = qdq_model(model, net.bindings(), factors, placement="auto")
    assert result.notes[-1].endswith('placement "exact" instead of "auto"')
