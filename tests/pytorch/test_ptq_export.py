"""Quantized files in onnxruntime: they compute what the torch simulation computes, in integer kernels where asked."""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from ptq_helpers import Flow, difference, images, run_onnx, run_torch, small
from pytorch_nets import case
from torch import nn

import amct.pytorch as amct
from amct.errors import ArgumentError, ExportError
from amct.export.onnx.runtimes import count_integer_kernels
from amct.pytorch.onnx.torch_exporter import root_cause

NETS = (
    "mix", "conv1d3d", "attention", "resnet20", "mobile", "folds", "keywords", "one_dict", "lstm", "lstm_state",
    "gru_batch_first", "gru_state_batch_first",
)  # fmt: skip
ALL_INTEGER = ("attention", "resnet20", "mobile", "keywords")
"""Nets whose convolutions and matrix products are all quantized layers of kinds that onnxruntime has kernels for."""


def one_step(quantized, inputs):
    """How far the output moves when one layer's input is off by a quantization step at every place: the worst layer.

    Two programs that round the same way can differ by a step where a value lies on the border between two, and at far
    fewer places than all.
    """
    exact = run_torch(quantized.model, inputs)
    worst = 0.0
    for name in quantized.layers:
        step = quantized.record[name].scale_d

        def shift(_, args, step=step):
            return (args[0] + step, *args[1:])

        handle = quantized.model.get_submodule(name).register_forward_pre_hook(shift)
        worst = max(worst, difference(run_torch(quantized.model, inputs), exact))
        handle.remove()
    return worst


@pytest.mark.parametrize("name", NETS)
def test_files_compute_what_the_simulation_computes(name, tmp_path):
    net = case(name)
    model, inputs = net.model(), net.inputs()
    quantized = amct.quantize(model, [inputs])
    quantized.save(tmp_path / "exact", placement="exact", target="exact8")
    quantized.save(tmp_path / "fast", formats="qdq")
    expected, bound = run_torch(quantized.model, inputs), one_step(quantized, inputs)
    for file in ("exact_fake_quant_model.onnx", "exact_qdq_model.onnx"):
        assert difference(run_onnx(tmp_path / file, model, inputs), expected) <= bound, file
    # Between the layers, and with 7-bit weights, every tensor adds an error of its own: a few times that of the layers.
    original = run_torch(model, inputs)
    fast = difference(run_onnx(tmp_path / "fast_qdq_model.onnx", model, inputs), original)
    assert fast <= 0.2 * max(float(np.abs(output).max()) for output in original)
    kernels = count_integer_kernels(tmp_path / "fast_qdq_model.onnx")
    assert kernels.share >= 0.95 or name not in ALL_INTEGER, kernels.operators
    assert set(json.loads((tmp_path / "exact_quant.json").read_text())["layers"]) == set(quantized.layers)


def test_int16_activations_and_4_bit_weights_run(tmp_path):
    config = amct.QuantConfig(
        common=amct.LayerConfig(activations=amct.IfmrSettings(num_bits=16), weights=amct.ArqSettings(num_bits=4))
    )
    model, x = small(), images()
    quantized = amct.quantize(model, x, config)
    assert quantized.record["c2"].act_type == "INT16"
    assert quantized.record["c2"].wts_type == "INT4"
    quantized.save(tmp_path / "q", placement="exact", target="exact8", opset=21)
    expected, bound = run_torch(quantized.model, x), one_step(quantized, x)
    for file in ("q_fake_quant_model.onnx", "q_qdq_model.onnx"):
        assert difference(run_onnx(tmp_path / file, model, x), expected) <= bound


@pytest.fixture(scope="module")
def quantized_small():
    return amct.quantize(small(), images())


@pytest.mark.parametrize("opset", [16, 21])
def test_the_opset_asked_for_is_written(opset, quantized_small, tmp_path):
    quantized_small.save(tmp_path / "q", opset=opset)
    for file in ("q_deploy_model.onnx", "q_fake_quant_model.onnx", "q_qdq_model.onnx"):
        versions = {entry.domain: entry.version for entry in onnx.load(tmp_path / file).opset_import}
        assert versions[""] == opset
    run_onnx(tmp_path / "q_qdq_model.onnx", small(), images())


@pytest.mark.parametrize("opset", [11, 15, 22, True])
def test_other_opsets_are_refused(opset, quantized_small, tmp_path):
    with pytest.raises(ArgumentError, match=r"opset: expected 16\.\.21"):
        quantized_small.save(tmp_path / "q", opset=opset)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"formats": ["onnx"]}, r'formats: "onnx" is unknown\..*Choose from deploy, fake_quant, qdq'),
        ({"formats": ["float"]}, r'formats: "float" is unknown\..*Choose from deploy, fake_quant, qdq'),
        ({"placement": "faster"}, "placement: expected one of fast, exact, auto, got 'faster'"),
        ({"target": "avx"}, "target: expected one of portable, vnni, exact8, got 'avx'"),
    ],
)
def test_unknown_options_are_refused(arguments, message, quantized_small, tmp_path):
    with pytest.raises(ArgumentError, match=message):
        quantized_small.save(tmp_path / "q", **arguments)
    assert not list(tmp_path.iterdir())


def test_names_and_open_axes_reach_the_files(tmp_path):
    model = small()
    io = amct.IoOptions(input_names=["image"], output_names=["score"], dynamic_axes={"image": {0: "batch"}})
    quantized = amct.quantize(model, images(), io=io)
    quantized.save(tmp_path / "q")
    other = images(5, count=7)
    for file in ("q_fake_quant_model.onnx", "q_qdq_model.onnx"):
        graph = onnx.load(tmp_path / file).graph
        assert graph.input[0].name == "image"
        assert graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
        assert graph.output[0].name == "score"
        assert run_onnx(tmp_path / file, model, other)[0].shape == (7, 4)


def test_weights_of_the_modified_file_are_float_and_the_file_runs(tmp_path):
    flow = Flow(tmp_path).configure()
    flow.quantize()
    assert difference(run_onnx(flow.onnx, flow.model, flow.example), run_torch(flow.model, flow.example)) < 1e-5


def test_save_writes_the_four_files_and_a_report_with_fusions_and_skips(tmp_path):
    flow = Flow(tmp_path).configure(skip_layers=["fc"])
    flow.quantize()(flow.example)
    flow.save()
    names = ["q_deploy_model.onnx", "q_fake_quant_model.onnx", "q_qdq_model.onnx", "q_quant.json"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    report = json.loads((tmp_path / "out" / "q_quant.json").read_text())
    assert report["layers"]["c"]["original_layers"] == ["c", "bn"]
    (skip,) = report["skipped"]
    assert skip["layer"] == "fc"
    assert skip["reason"].startswith(f"switched off: config file ({flow.config}:")
    run_onnx(tmp_path / "out" / "q_qdq_model.onnx", flow.model, flow.example)


def test_a_modified_file_without_our_notes_can_be_saved(tmp_path):
    """As AMCT itself writes it: only the names of the nodes tell the layers, and each is marked by an attribute."""
    flow = Flow(tmp_path).configure()
    flow.quantize()(flow.example)
    flow.save()
    model = onnx.load(flow.onnx)
    del model.metadata_props[:]
    for node in model.graph.node:
        if node.name in ("c", "c2", "fc"):
            node.attribute.append(onnx.helper.make_attribute("op_data_type", "float"))
    flow.onnx.write_bytes(model.SerializeToString())
    flow.save(tmp_path / "bare" / "q")
    for name in ("q_deploy_model.onnx", "q_fake_quant_model.onnx", "q_qdq_model.onnx"):
        assert (tmp_path / "bare" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


def test_a_save_path_that_ends_in_a_slash_has_no_prefix(tmp_path):
    flow = Flow(tmp_path).configure()
    flow.quantize()(flow.example)
    flow.save(f"{tmp_path}/out/")
    assert (tmp_path / "out" / "qdq_model.onnx").exists()


def test_without_the_factors_between_layers_the_qdq_file_is_exact(tmp_path, caplog):
    flow = Flow(tmp_path).configure()
    flow.quantize()(flow.example)
    (tmp_path / "r.txt.qdq.json").unlink()
    with caplog.at_level("INFO"):
        flow.save()
    assert 'placement "exact" instead of "fast"' in caplog.text
    report = json.loads((tmp_path / "out" / "q_quant.json").read_text())
    assert any(
        "no factors of the tensors between layers" in note for note in report["files"]["q_qdq_model.onnx"]["notes"]
    )


def test_half_precision_models_are_quantized_and_run(tmp_path):
    model, x = small().half(), images().half()
    quantized = amct.quantize(model, x)
    quantized.save(tmp_path / "q")
    expected = run_torch(quantized.model, x)
    for file in ("q_fake_quant_model.onnx", "q_qdq_model.onnx"):
        found = run_onnx(tmp_path / file, model, x)
        assert found[0].dtype == np.float16
        # Half precision keeps 11 bits: the sums of some 70 products differ by a few of its steps.
        assert difference(found, expected) <= 0.02 * np.abs(expected[0]).max()


def test_a_bias_that_does_not_fit_int32_is_refused_by_amct_functions_with_the_layer(tmp_path):
    model = small()
    with torch.no_grad():
        model.fc.bias.fill_(1e6)
        model.fc.weight.mul_(1e-4)
    flow = Flow(tmp_path, model, images()).configure()
    flow.quantize()(images())
    with pytest.raises(ExportError, match=r'layer "fc": the bias does not fit int32.*skip_layers'):
        flow.save()
    assert not list((tmp_path / "out").glob("*"))


@pytest.mark.parametrize(
    ("factor", "bias"), [(0.0, 0.3), (1e-9, 0.3), (1e-5, 1e5)], ids=["no weights", "hardly any", "a huge bias"]
)
def test_a_channel_that_is_all_bias_is_as_good_as_the_others(factor, bias, tmp_path):
    """As a batch norm with a scale of zero leaves it: its weight scale follows from the bias, not from the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    with torch.no_grad():
        model[2].weight[1] *= factor
        model[2].bias[1] = bias
    data = [torch.randn(4, 3, 8, 8) for _ in range(4)]
    quantized = amct.quantize(model, data)
    quantized.save(tmp_path / "q", placement="exact")
    expected = run_torch(model, data[0])[0][:, 1]
    results = [run_torch(quantized.model, data[0])[0]]
    results += [run_onnx(tmp_path / f"q_{name}_model.onnx", model, data[0])[0] for name in ("qdq", "fake_quant")]
    for result in results:
        np.testing.assert_allclose(result[:, 1], expected, rtol=1e-5)
    files = json.loads((tmp_path / "q_quant.json").read_text())["files"]
    assert files["q_deploy_model.onnx"]["check"]["sqnr"] > 35


class Branching(nn.Module):
    """Control flow that depends on data: it can be calibrated, not exported."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x):
        return self.fc(x) if x.sum() > 0 else self.fc(-x)  # the line to be named


def test_data_dependent_control_flow_is_calibrated_and_the_export_names_the_line(tmp_path):
    x = torch.ones(2, 3)
    quantized = amct.quantize(Branching(), x)
    assert quantized.record["fc"].scale_d == pytest.approx(1 / 255, rel=0.4)
    assert quantized.model(x).shape == (2, 2)
    with pytest.raises(ExportError, match=r"test_ptq_export\.py:\d+: .*x\.sum\(\) > 0"):
        quantized.save(tmp_path / "q")
    flow = Flow(tmp_path, Branching(), x).configure()
    flow.quantize()(x)
    assert flow.record.exists()
    with pytest.raises(ExportError, match=r"test_ptq_export\.py:\d+: .*x\.sum\(\) > 0"):
        flow.save()


def test_a_pooling_that_rounds_up_and_counts_padding_divides_by_what_torch_divides_by(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.AvgPool2d(3, 2, 1, ceil_mode=True)).eval()
    x = images()
    quantized = amct.quantize(model, x)
    quantized.save(tmp_path / "q", formats=("qdq", "fake_quant"))
    # Half a step of the pooling's input, one of its output (no larger), and what the convolution before it lost.
    bound = 2 * quantized.record["1"].scale_d + quantized.compare(x)[0].largest_error
    for file in ("q_qdq_model.onnx", "q_fake_quant_model.onnx"):
        assert difference(run_onnx(tmp_path / file, model, x), run_torch(model, x)) <= bound


def test_zeros_before_a_convolution_are_added_by_the_convolution(tmp_path):
    torch.manual_seed(0)
    first, second = nn.Conv2d(3, 4, 3, 2), nn.Conv2d(4, 4, 5, groups=4)
    model = nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), first, nn.ReLU6(), nn.ZeroPad2d(2), second).eval()
    x = images()
    quantized = amct.quantize(model, x)
    quantized.save(tmp_path / "q")
    operators = {
        file: [node.op_type for node in onnx.load(tmp_path / f"q_{file}_model.onnx").graph.node]
        for file in ("qdq", "deploy", "fake_quant")
    }
    assert [operators[file].count("Pad") for file in operators] == [0, 2, 2]
    assert difference(run_onnx(tmp_path / "q_qdq_model.onnx", model, x), run_torch(model, x)) <= one_step(quantized, x)


@pytest.mark.parametrize("layer", [nn.Linear(8, 4), nn.Conv1d(8, 4, 1)], ids=["linear", "convolution"])
def test_weights_that_are_all_zero_are_saved(layer, tmp_path):
    """A head that was initialized with zeros: balancing its input would divide by zero noise."""
    nn.init.zeros_(layer.weight)
    first = nn.Linear(8, 8) if isinstance(layer, nn.Linear) else nn.Conv1d(8, 8, 1)
    model = nn.Sequential(first, nn.ReLU(), layer).eval()
    x = torch.randn(2, 8) if isinstance(layer, nn.Linear) else torch.randn(2, 8, 5)
    quantized = amct.quantize(model, [x])
    quantized.save(tmp_path / "z")
    session = onnxruntime.InferenceSession(tmp_path / "z_qdq_model.onnx")
    got = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
    expected = model(x).detach().numpy()
    # The output is the bias: half a step of the accumulator (scale_d · scale_w), and half a step of the output's grid.
    entry = quantized.record["2"]
    bound = entry.scale_d * entry.scale_w[0] / 2 + (max(expected.max(), 0) - min(expected.min(), 0)) / 255
    assert np.abs(got - expected).max() <= bound


def test_colors_of_torchs_messages_are_left_out():
    error = RuntimeError("Failed to convert. \x1b[96mThis is step 3/3\x1b[0m of exporting.")
    assert root_cause(error) == "Failed to convert. This is step 3/3 of exporting"
