"""Quantizers inside the user's own forward: tensors between layers (for the fast QDQ file), functional calls."""

from __future__ import annotations

import copy
import io
import json
import logging
import pickle

import numpy as np
import pytest
import torch
from qat_helpers import Flow, evaluate, images, labels, net, run_onnx, train
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import amct.pytorch as amct
from amct.pytorch.capture.functional_layers import layer_module
from amct.pytorch.qat.layers import quantized_layers
from amct.pytorch.qat.operations import OperationQuantizer
from amct.record.conversion import read_tensor_qparams


class Block(nn.Module):
    def __init__(self, channels: int, *, again: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(inner)) + x)


class Residual(nn.Module):
    """Sums and a concatenation of functions, between layers that are modules."""

    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.first, self.second = Block(8), Block(8)
        self.side = nn.Conv2d(8, 4, 1)
        self.tail = nn.Sequential(nn.Conv2d(12, 8, 1), nn.ReLU())
        self.fc = nn.Linear(8, 5)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(torch.relu(self.stem(x)))
        x = checkpoint(self.second, x, use_reentrant=False) if self.recompute else self.second(x)
        x = self.tail(torch.cat([x, self.side(x)], 1))
        return self.fc(functional.adaptive_avg_pool2d(x, 1).flatten(1))


def residual(**options) -> Residual:
    torch.manual_seed(0)
    return Residual(**options)


def batches():
    return [images(seed) for seed in range(2)]


def operation_quantizers(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, OperationQuantizer)}


def steps_apart(found, expected, model):
    """The largest difference in steps of the input of the last layer, times its largest weight."""
    scale = model.fc.activation.qparams().step
    return np.abs(found - expected.numpy()).max() / (scale * model.fc.weight.detach().abs().max().item())


@torch.no_grad()
def round_biases(model, data):
    """Move every bias to the step of its layer's accumulator, as files do: a rounded value turned over travels far."""
    quantized = model.quantized(data)
    folded, record = quantized.prepared.fused, quantized.record
    for name, entry in record.items():
        bias = layer_module(folded.model, name).bias
        step = torch.tensor(entry.scale_w) * entry.scale_d
        moved = (bias / step).round() * step - bias
        holder = model.get_submodule(folded.fusions.get(name, name))
        holder.bias += moved


@pytest.fixture(scope="module", params=["portable", "vnni"])
def trained(request, tmp_path_factory):
    model = amct.prepare_qat(residual(), batches(), target=request.param)
    train(model, range(4))
    round_biases(model, batches())
    folder = tmp_path_factory.mktemp("fast")
    model.save(folder / "net", formats=["qdq", "record"], check=False)
    return model, folder


def test_the_tensors_that_only_the_fast_file_quantizes_are_trained(trained):
    model, _ = trained
    found = operation_quantizers(model)
    # what the sums and the concatenation read, and what the mean reads
    assert {name.partition(".amct_quantizers")[0] for name in found} >= {"first.norm2", "second.norm2", "side"}
    assert found["tail.1.amct_quantizers.operation_0_0"].fixed_min  # behind a ReLU
    assert not found["side.amct_quantizers.output"].fixed_min
    assert all(quantizer.clip_max.grad is not None for quantizer in found.values())


@pytest.mark.parametrize("optimize", [True, False])
def test_the_fast_file_computes_what_the_trained_model_computes(trained, optimize):
    model, folder = trained
    for seed in (1, 2):
        found = run_onnx(folder / "net_qdq_model.onnx", images(seed), optimize=optimize)
        expected = evaluate(model, images(seed))
        if model._qat.target == "portable":
            assert steps_apart(found, expected, model) <= 1
        else:  # linear layers are rounded again, with a scale for each output
            assert np.linalg.norm(found - expected.numpy()) < 0.01 * expected.norm()


def test_the_file_of_tensor_factors_has_the_trained_ones(trained):
    model, folder = trained
    tensors = read_tensor_qparams(folder / "net_record.txt.qdq.json")
    known = {(each.step, each.zero_point) for each in tensors.values()}
    found = [quantizer.qparams() for quantizer in operation_quantizers(model).values()]
    assert {(each.step, each.zero_point) for each in found} <= known
    assert all(factors.mean is None for factors in tensors.values())  # nothing is balanced or corrected


def test_bits_of_the_weights_are_those_of_the_file(trained):
    model, folder = trained
    del folder
    bits = {layer.weight_quantizer.bits for layer in quantized_layers(model).values()}
    assert bits == {{"portable": 7, "vnni": 8}[model._qat.target]}


def test_summary_and_report_show_the_clips_of_tensors_between_layers(trained):
    model, folder = trained
    report = model.report(folder / "report.html").read_text()
    quantizer = operation_quantizers(model)["side.amct_quantizers.output"]
    before, after = model._qat.start["side.output"], quantizer.clips
    assert before != after
    shown = " -> ".join(f"[{low:.4g}, {high:.4g}]" for low, high in (before, after))
    assert f"  side.output: {shown}" in model.summary().splitlines()
    assert "side.output" in report


def test_copies_pickles_and_states_are_complete(trained):
    model, _ = trained
    expected = evaluate(model, images(3))
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    other = amct.prepare_qat(residual(), batches(), target=model._qat.target)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    for same in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), other):
        assert torch.equal(evaluate(same, images(3)), expected)
        assert operation_quantizers(same).keys() == operation_quantizers(model).keys()


def test_the_state_of_the_float_model_loads():
    model = amct.prepare_qat(residual(), batches(), target="portable")
    clips = {name: quantizer.clips for name, quantizer in operation_quantizers(model).items()}
    torch.manual_seed(5)
    model.load_state_dict(Residual().state_dict())
    assert {name: quantizer.clips for name, quantizer in operation_quantizers(model).items()} == clips


def test_part_of_the_model_computed_again_for_its_gradient_has_its_quantizers():
    gradients = []
    for recompute in (False, True):
        model = amct.prepare_qat(residual(recompute=recompute), batches(), target="portable").train()
        functional.cross_entropy(model(images()), labels()).backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)


class Added(nn.Sequential):
    """A container with a sum of its own: a quantizer among its children would be called as one of them."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(super().forward(x) + x)


def test_a_tensor_of_a_container_is_observed_and_reported(caplog, tmp_path):
    torch.manual_seed(0)
    inner = Added(nn.Conv2d(8, 8, 3, padding=1))
    end = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    original = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), inner, Added(nn.Conv2d(8, 8, 1)), *end)
    with caplog.at_level(logging.INFO):
        model = amct.prepare_qat(original, batches(), target="portable").train()
    model(images()).square().mean().backward()
    assert "observed, not trained: " in caplog.text
    model.save(tmp_path / "net", formats=["qdq"], check=False)
    expected = evaluate(model, images(1))
    found = run_onnx(tmp_path / "net_qdq_model.onnx", images(1))
    assert np.linalg.norm(found - expected.numpy()) < 0.05 * expected.norm()


# -- hooks, and forwards that take another way -------------------------------------------------------------------------


def watch(model, seen):
    """Hooks of a user that compute something, before and after modules."""

    def look(*given):
        seen.append(given[-1][0].abs().mean() + 1)

    modules = [model.stem, model.first, model.first.conv1, model.second.conv2, model.side, model.tail[1]]
    return [each.register_forward_hook(look) for each in modules] + [
        each.register_forward_pre_hook(look) for each in (*modules, model)
    ]


def test_hooks_that_compute_do_not_move_the_quantizers():
    plain = amct.prepare_qat(residual(), batches(), target="portable")
    hooked = residual()
    seen: list[Tensor] = []
    watch(hooked, seen)
    before = amct.prepare_qat(hooked, batches(), target="portable")
    expected = evaluate(plain, images(3))
    assert operation_quantizers(before).keys() == operation_quantizers(plain).keys()
    assert torch.equal(evaluate(before, images(3)), expected)
    after = copy.deepcopy(plain)
    handles = watch(after, seen)
    count = len(seen)
    assert torch.equal(evaluate(after, images(3)), expected)
    assert len(seen) == count + len(handles)
    for handle in handles:
        handle.remove()
    assert torch.equal(evaluate(after, images(3)), expected)


def test_a_hook_that_changes_a_tensor_is_trained_as_part_of_the_model(tmp_path):
    original = residual()
    original.side.register_forward_hook(lambda _, __, output: functional.hardtanh(output * 2, -0.5, 0.5))
    model = amct.prepare_qat(original, batches(), target="portable")
    train(model, range(2))
    round_biases(model, batches())
    model.save(tmp_path / "net", formats=["qdq"], check=False)
    found = run_onnx(tmp_path / "net_qdq_model.onnx", images(1))
    assert steps_apart(found, evaluate(model, images(1)), model) <= 1


class Unfolded(nn.Module):
    """A batch norm that cannot be folded: in train mode it calls a function more than in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return self.last(torch.relu(self.norm(x) + x)).mean((2, 3))


def test_a_batch_norm_that_is_not_folded_is_quantized_in_train_mode_too(caplog):
    torch.manual_seed(0)
    model = amct.prepare_qat(Unfolded(), batches(), target="portable").train()
    quantizer = operation_quantizers(model)["norm.amct_quantizers.output"]
    model(images()).square().mean().backward()
    assert quantizer.clip_max.grad is not None
    assert "takes another way" not in caplog.text


class Direct(nn.Module):
    """Calls the forward of a child, without its hooks."""

    def __init__(self, *, direct: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block, self.last = Block(3), nn.Conv2d(3, 5, 1)
        self.direct = direct

    def forward(self, x: Tensor) -> Tensor:
        inner = self.block.forward(x) if self.direct else self.block(x)
        return self.last(functional.hardtanh(inner + x, -1.0, 1.0)).mean((2, 3))


def test_a_forward_that_is_called_directly_has_its_quantizers():
    expected, found = (amct.prepare_qat(Direct(direct=each), batches(), target="portable") for each in (False, True))
    assert len(operation_quantizers(found)) == len(operation_quantizers(expected)) > 0
    assert torch.equal(evaluate(found, images(3)), evaluate(expected, images(3)))


class OtherWay(Residual):
    late = False

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.neg(torch.neg(x)) if self.late else x)


def test_a_forward_that_takes_another_way_is_told_once(caplog):
    torch.manual_seed(0)
    model = amct.prepare_qat(OtherWay(), batches(), target="portable")
    model.late = True
    with caplog.at_level(logging.WARNING):
        for seed in range(3):
            evaluate(model, images(seed))
    told = [record.getMessage() for record in caplog.records if "takes another way" in record.getMessage()]
    assert told
    assert len(told) == len(set(told))
    assert "result of relu as operation_0_0, which is neg now" in told[0]


# -- functional calls, and modules called several times ----------------------------------------------------------------


class Functional(nn.Module):
    """A module called twice, products with parameters, and attention, whose projections are functional calls."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(8, 8)
        self.rows = nn.Parameter(torch.randn(8, 8) / 3)
        self.columns = nn.Parameter(torch.randn(8, 6) / 3)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.fc = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.twice(torch.relu(self.twice(x))))
        x = functional.linear(x, self.rows)
        x = x + self.attention(x, x, x)[0]
        return self.fc(torch.relu(x @ self.columns)).mean(1)


NAMES = {"twice", "rows", "columns", "attention.in_proj_weight", "attention.out_proj.weight", "fc"}


def sequences(seed: int = 0) -> Tensor:
    return torch.randn(8, 4, 8, generator=torch.Generator().manual_seed(seed))


def functional_model() -> Functional:
    torch.manual_seed(0)
    return Functional()


def train_functional(model, seeds):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()
    for seed in seeds:
        optimizer.zero_grad()
        functional.cross_entropy(model(sequences(seed)), labels(seed)).backward()
        optimizer.step()


def test_functional_calls_and_repeated_modules_are_trained_and_exported(tmp_path):
    original = functional_model()
    model = amct.prepare_qat(original, [sequences()])
    assert quantized_layers(model).keys() == NAMES
    assert set(dict(original.named_parameters())) <= set(dict(model.named_parameters()))
    train_functional(model, range(3))
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert not torch.equal(model.rows, original.rows)
    expected = evaluate(model, sequences(1))
    model.save(tmp_path / "net", placement="exact", target="exact8", check=False)
    for file in ("net_fake_quant_model.onnx", "net_qdq_model.onnx"):
        found = run_onnx(tmp_path / file, sequences(1), optimize=False)
        assert steps_apart(found, expected, model) <= 1


def test_the_weight_of_a_functional_call_is_on_its_grid():
    """Against the formula: x and the columns of the parameter, rounded in float64."""
    model = amct.prepare_qat(functional_model(), [sequences()]).eval()
    layer = quantized_layers(model)["columns"]
    seen = []
    layer.register_forward_hook(lambda _, given, made: seen.append((given, made)))
    evaluate(model, sequences(1))
    (((x, weight), (quantized_x, quantized_weight)),) = seen
    trained = layer.activation.qparams()
    scale, offset = trained.step, trained.zero_point
    expected = (np.clip(np.round(x.double().numpy() / scale) + offset, -128, 127) - offset) * scale
    np.testing.assert_allclose(quantized_x.numpy(), expected, atol=1.01 * scale * 1e-3)
    step = layer.weight_quantizer.scale.detach().double().numpy().reshape(-1, 1)
    expected = np.clip(np.round(model.columns.detach().double().numpy().T / step), -128, 127) * step
    np.testing.assert_allclose(quantized_weight.detach().numpy(), expected, atol=1e-6)
    assert torch.equal(weight.detach(), model.columns.detach().t())


def test_one_quantizer_holds_the_inputs_of_all_calls():
    original = functional_model().eval()
    model = amct.prepare_qat(original, [sequences()])
    low, high = model.twice.activation.clips
    first = torch.relu(original.twice(sequences()))
    assert low < first.min() - 0.5  # the first call reads values of both signs
    assert high >= 0.7 * sequences().max()


def test_copies_and_states_of_functional_calls(tmp_path):
    model = amct.prepare_qat(functional_model(), [sequences()])
    train_functional(model, range(2))
    expected = evaluate(model, sequences(1))
    again = amct.prepare_qat(functional_model(), [sequences(3)])
    again.load_state_dict(model.state_dict())
    torch.save(model, tmp_path / "whole.pth")
    whole = torch.load(tmp_path / "whole.pth", weights_only=False)
    for same in (again, copy.deepcopy(model), whole):
        assert torch.equal(evaluate(same, sequences(1)), expected)
    again.load_state_dict(functional_model().state_dict())  # a float state: learned scales begin anew
    assert torch.equal(again.rows, functional_model().rows)


def test_amcts_functions_leave_both_float(tmp_path):
    flow = Flow(tmp_path, None, functional_model(), sequences())
    assert quantized_layers(flow.create()).keys() == {"fc"}
    config = json.loads(flow.config.read_text())
    assert set(config) & NAMES == {"fc"}


def test_a_skipped_functional_call_stays_float_beside_a_trained_placement(tmp_path):
    config = amct.QatConfig(skip_layers=("rows",))
    model = amct.prepare_qat(functional_model(), [sequences()], config, target="portable")
    assert quantized_layers(model).keys() == NAMES - {"rows"}
    train_functional(model, range(2))
    model.save(tmp_path / "net", formats=["qdq"], check=False)
    found = run_onnx(tmp_path / "net_qdq_model.onnx", sequences(1), optimize=False)
    expected = evaluate(model, sequences(1))
    assert np.linalg.norm(found - expected.numpy()) < 0.01 * expected.norm()


def test_a_model_without_such_operations_runs_as_ever():
    model = amct.prepare_qat(net(), batches())
    assert not operation_quantizers(model)
    assert type(model.c1).__name__ == "QuantizedConv2d"
