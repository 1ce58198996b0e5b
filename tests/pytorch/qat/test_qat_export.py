"""What is exported is what was trained: integers, folded batch norms, files in onnxruntime."""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from qat_helpers import Flow, evaluate, images, net, run_onnx, train
from test_qat_model import Kinds
from torch import Tensor, nn

import amct.pytorch as amct
from amct.pytorch.qat.layers import quantized_layers
from amct.record import read_record
from amct.record.conversion import read_tensor_qparams, tensor_qparams_path

LEARNED = "retrain_weight_quant_config { ulq_retrain { dst_type: INT8 } }"


def steps_apart(found, expected, model):
    """The largest difference in steps of the last layer's accumulator input: one activation step reaches the output."""
    layer = model.fc
    scale = layer.activation.qparams().step
    gain = layer.weight.detach().abs().max().item()
    return np.abs(found - expected.numpy()).max() / (scale * gain)


@pytest.fixture(scope="module", params=[None, LEARNED], ids=["measured", "learned"])
def saved(request, tmp_path_factory):
    flow = Flow(tmp_path_factory.mktemp("qat"), request.param)
    model = flow.create()
    train(model, range(4))
    return flow, model, flow.save(model)


def test_the_files_are_those_of_post_training_quantization(saved):
    flow, _, folder = saved
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["net_deploy_model.onnx", "net_fake_quant_model.onnx", "net_qdq_model.onnx", "net_quant.json"]
    assert tensor_qparams_path(flow.record).exists()


def test_the_fake_quant_file_computes_what_the_trained_model_computes(saved):
    _, model, folder = saved
    for seed in (1, 2):
        found = run_onnx(folder / "net_fake_quant_model.onnx", images(seed))
        assert steps_apart(found, evaluate(model, images(seed)), model) <= 1


def test_the_exact_qdq_file_computes_what_the_trained_model_computes(saved, tmp_path):
    _, model, _ = saved
    model.save(tmp_path / "net", formats=["qdq"], data=[images()], placement="exact", target="exact8")
    found = run_onnx(tmp_path / "net_qdq_model.onnx", images(1), optimize=False)
    assert steps_apart(found, evaluate(model, images(1)), model) <= 1


def test_the_integers_in_the_file_are_those_of_training_with_the_sign_of_gamma(saved):
    _, model, folder = saved
    graph = onnx.load(folder / "net_deploy_model.onnx").graph
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    for name, norm in (("c1", model.b1), ("c3", model.b3), ("c2", None)):
        layer = quantized_layers(model)[name]
        integers = layer.weight_quantizer.integers(layer.weight).reshape(layer.weight.shape)
        sign = torch.ones(8) if norm is None else norm.weight.detach().sign()
        node = next(node for node in graph.node if node.name == name)
        expected = (integers * sign[:, None, None, None]).numpy()
        np.testing.assert_array_equal(weights[node.input[1]], expected)


def test_recorded_scales_are_folded(saved):
    flow, model, _ = saved
    record = read_record(flow.record)
    scale = model.c1.weight_quantizer.scales(model.c1.weight)
    factor = model.b1.weight.detach().abs() / (model.b1.running_var + model.b1.eps).sqrt()
    np.testing.assert_allclose(record["c1"].scale_w, (scale * factor).numpy(), rtol=1e-6)
    assert record["c2"].scale_w == tuple(model.c2.weight_quantizer.scales(model.c2.weight).tolist())
    trained = model.c1.activation.qparams()
    assert (record["c1"].scale_d, record["c1"].offset_d) == (trained.step, trained.zero_point)
    assert record["c2"].scale_d == record["c3"].scale_d  # one quantizer


def test_quant_json_names_what_was_folded_and_the_record(saved):
    _, _, folder = saved
    document = json.loads((folder / "net_quant.json").read_text())
    assert document["layers"]["c1"]["original_layers"] == ["c1", "b1"]
    assert "ULQ" in document["config"].upper()
    assert document["related"]["record"]


def test_the_fast_file_knows_the_tensors_between_layers(saved):
    flow, model, folder = saved
    tensors = read_tensor_qparams(tensor_qparams_path(flow.record))
    assert any(factors.mean is None for factors in tensors.values())
    assert any(factors.mean is not None for factors in tensors.values()), "inputs of layers, which correct biases"
    found = run_onnx(folder / "net_qdq_model.onnx", images(1))
    expected = evaluate(model, images(1)).numpy()
    assert np.linalg.norm(found - expected) < 0.05 * np.linalg.norm(expected)  # 7-bit weights


def test_biases_of_the_fast_file_make_up_for_what_its_own_rounding_loses(saved):
    """The trained weights of 8 bits become 7 for this file, whose mean error goes to the bias."""
    flow, model, folder = saved
    graph = onnx.load(folder / "net_qdq_model.onnx").graph
    stored = {tensor.name: numpy_helper.to_array(tensor).astype(np.float64) for tensor in graph.initializer}
    layer = quantized_layers(model)["c2"]
    integers, scales = layer.weight_quantizer.integers(layer.weight), layer.weight_quantizer.scales(layer.weight)
    trained = (integers * scales.reshape(-1, 1)).detach().double().numpy()
    again = stored["c2.weight.quantized"].reshape(trained.shape) * stored["c2.weight.scale"].reshape(-1, 1)
    lost = (trained - again).reshape(layer.weight.shape).sum((2, 3))
    assert np.abs(lost).max() > 0
    tensors = read_tensor_qparams(tensor_qparams_path(flow.record)).values()
    means = [each.mean for each in tensors if each.mean is not None and each.mean.numel() == lost.shape[1]]
    step = stored["c2.bias.scale"]
    moved = stored["c2.bias.quantized"] * step - layer.bias.detach().double().numpy()
    errors = [np.abs(moved - lost @ mean.double().numpy()).max() for mean in means]
    assert min(errors) <= 1.01 * step.max() / 2


def test_saving_changes_nothing_and_training_goes_on(saved, tmp_path):
    flow, model, _ = saved
    model.train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    flow.save(model)
    assert model.training
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    first = read_record(flow.record)
    train(model, [7, 8])
    flow.save(model)
    assert read_record(flow.record) != first  # the record is written anew at each save
    del tmp_path


def test_a_gamma_of_zero_gives_zero_weights_and_a_legal_scale(tmp_path):
    original = net()
    with torch.no_grad():
        original.b1.weight[3] = 0
    flow = Flow(tmp_path, LEARNED, original)
    model = flow.create()
    train(model, [0])
    with torch.no_grad():
        model.b1.weight[3] = 0
    folder = flow.save(model)
    assert 1e-6 < read_record(flow.record)["c1"].scale_w[3] < 1
    found = run_onnx(folder / "net_fake_quant_model.onnx", images(1))
    assert steps_apart(found, evaluate(model, images(1)), model) <= 1


def test_where_gamma_is_negative_the_lowest_integer_is_not_used(tmp_path):
    original = net()
    with torch.no_grad():
        original.b1.weight.fill_(-0.5)
        original.c1.weight[:, 0, 0, 0] = -2.0  # the largest weight is negative: the scale is 2 / 128
    flow = Flow(tmp_path, None, original)
    model = flow.create()
    train(model, [0])
    assert model.c1.weight_quantizer.integers(model.c1.weight).min() == -127
    found = run_onnx(flow.save(model) / "net_fake_quant_model.onnx", images(1))
    assert steps_apart(found, evaluate(model, images(1)), model) <= 1


@pytest.mark.parametrize("algorithm", ["arq_retrain", "ulq_retrain"])
def test_every_kind_of_layer_is_exported(tmp_path, algorithm):
    torch.manual_seed(0)
    x = torch.randn(4, 3, 8)
    flow = Flow(tmp_path, f"retrain_weight_quant_config {{ {algorithm} {{ }} }}", Kinds(), x)
    model = flow.create().train()
    model(x).sum().backward()
    folder = flow.save(model)
    found = run_onnx(folder / "net_fake_quant_model.onnx", x)
    expected = evaluate(model, x)
    assert np.abs(found - expected.numpy()).max() < 0.02 * expected.abs().max()
    record = read_record(flow.record)
    assert len(record["lstm"].scale_w) == 4 * 6  # one per row
    assert record["lstm"].scale_h is not None


class UnfoldedNorm(nn.Module):
    """The batch norm reads a sum: it cannot be folded."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 4, 1)
        self.b = nn.Conv2d(3, 4, 1)
        self.norm = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.relu(self.norm(self.a(x) + self.b(x))).mean((2, 3)))


def test_a_batch_norm_that_is_not_folded_is_reported_and_exported(tmp_path):
    model = amct.prepare_qat(UnfoldedNorm(), images())
    assert "norm" in model.summary()
    assert [skip.layer for skip in model.not_folded] == ["norm"]
    train(model, range(2))
    model.save(tmp_path / "net", placement="exact", target="exact8")
    assert any(skip["layer"] == "norm" for skip in json.loads((tmp_path / "net_quant.json").read_text())["skipped"])
    found = run_onnx(tmp_path / "net_fake_quant_model.onnx", images())
    assert steps_apart(found, evaluate(model, images()), model) <= 1


def test_names_and_axes_of_the_files_can_be_given(tmp_path):
    flow = Flow(tmp_path)
    model = flow.create()
    train(model, [0])
    folder = flow.save(
        model, input_names=["image"], output_names=["score"], dynamic_axes={"image": {0: "n"}, "score": {0: "n"}}
    )
    graph = onnx.load(folder / "net_fake_quant_model.onnx").graph
    assert ([value.name for value in graph.input], [value.name for value in graph.output]) == (["image"], ["score"])
    assert run_onnx(folder / "net_fake_quant_model.onnx", images(1, count=3)).shape == (3, 5)


def test_a_model_inside_data_parallel_and_compiled_wrappers_is_saved(tmp_path):
    flow = Flow(tmp_path)
    model = flow.create()
    train(model, [0])
    assert flow.save(nn.DataParallel(model)).exists()


def test_weights_far_outside_of_their_range_mean_their_outermost_integer(tmp_path):
    """Their gradient passes through, so training may move them anywhere without effect."""
    model = amct.prepare_qat(net(), images())
    with torch.no_grad():
        model.c2.weight[:, 0] *= 50
    expected = evaluate(model, images(1))
    quantized = model.quantized()
    (weight,) = quantized.prepared.weights["c2"].weights
    step = weight.qparams.scale[:, None, None, None]
    assert ((weight.source.tensor - weight.real()).abs() <= 0.501 * step).all()
    quantized.save(tmp_path / "net", formats=["qdq"])
    found = run_onnx(tmp_path / "net_qdq_model.onnx", images(1))
    assert np.linalg.norm(found - expected.numpy()) < 0.1 * expected.norm()


@pytest.mark.parametrize("target", ["portable", "vnni"])
def test_files_that_round_anew_start_from_the_trained_weights(tmp_path, target):
    """A learned scale as large as the weights leaves three integers: what was trained is not the float weight."""
    model = amct.prepare_qat(net(), images())
    train(model, range(2))
    with torch.no_grad():
        for layer in (model.c1, model.c2, model.c3):
            scale = 0.6 * layer.weight.abs().amax(dim=(1, 2, 3))
            layer.weight_quantizer.scale.copy_(scale)
    model.save(tmp_path / "net", formats=["qdq"], data=images(), target=target, check=False)
    expected = evaluate(model, images(3)).numpy()
    found = run_onnx(tmp_path / "net_qdq_model.onnx", images(3))
    assert np.linalg.norm(found - expected) < 0.03 * np.linalg.norm(expected)


class TiedWeights(nn.Module):
    """A language model whose head has the weight of its embedding."""

    def __init__(self):
        super().__init__()
        self.embedding, self.middle, self.head = nn.Embedding(20, 16), nn.Linear(16, 16), nn.Linear(16, 20)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(torch.relu(self.middle(self.embedding(x))))


@pytest.mark.parametrize("shape", [(4, 7), (9,)])  # the head is a MatMul, a Gemm
def test_a_weight_that_an_embedding_shares(shape, tmp_path):
    torch.manual_seed(0)
    tokens = torch.randint(0, 20, shape)
    model = amct.prepare_qat(TiedWeights().eval(), [tokens])
    with torch.no_grad():
        model.embedding.weight.mul_(1.02)  # as training does: the weight is not on the grid of the head's scales
    assert model.eval().head.weight is model.embedding.weight
    model.save(tmp_path / "tied", ["qdq"], placement="exact", target="exact8")
    session = onnxruntime.InferenceSession(tmp_path / "tied_qdq_model.onnx")
    (written,) = session.run(None, {session.get_inputs()[0].name: tokens.numpy()})
    np.testing.assert_allclose(model(tokens).detach().numpy(), written, atol=5e-4)  # biases are rounded
