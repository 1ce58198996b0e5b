"""How the flow behaves around the numbers: the user's model, tracing once, counting, interleaving, what is between."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch
from ptq_helpers import Flow, images, small
from pytorch_nets import case
from torch import nn

import amct.pytorch as own
import amct_pytorch as amct
from amct.errors import ModelError, RecordError
from amct.export.check.batch import batch_path, read_batch
from amct.memory import uncollected
from amct.numerics.observer import widening
from amct.pytorch import intermediate_tensors
from amct.pytorch.capture import cached_trace as caching
from amct.record import read_record
from amct.record.conversion import read_tensor_qparams


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def snapshot(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def unchanged(model, before):
    after = model.state_dict()
    return list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("training", [True, False])
def test_the_users_model_stays_as_it_is(training, tmp_path):
    flow = Flow(tmp_path)
    flow.model.train(training)
    before, hooks = snapshot(flow.model), [len(module._forward_hooks) for module in flow.model.modules()]
    flow.simple("batch_num: 2 common_config { dmq_balancer { } }")
    amct.quantize_preprocess(flow.config, flow.record, flow.model, flow.example)(flow.example)
    calibrating = flow.quantize()
    for seed in range(2):
        calibrating(images(seed))
    flow.save()
    assert unchanged(flow.model, before)
    assert flow.model.training is training
    assert [len(module._forward_hooks) for module in flow.model.modules()] == hooks
    assert all(parameter.requires_grad for parameter in flow.model.parameters())


def test_a_model_in_train_mode_gives_what_it_gives_in_eval_mode(tmp_path):
    records = []
    for training in (True, False):
        folder = tmp_path / str(training)
        flow = Flow(folder)
        flow.model.train(training)
        flow.configure()
        flow.quantize()(flow.example)
        records.append(read_record(flow.record))
    assert records[0] == records[1]


def test_the_model_is_traced_once(tmp_path, monkeypatch):
    traces, trace = [], caching.trace
    monkeypatch.setattr(caching, "trace", lambda *args, **named: traces.append(1) or trace(*args, **named))
    flow = Flow(tmp_path).simple("common_config { dmq_balancer { } }")
    amct.quantize_preprocess(flow.config, flow.record, flow.model, flow.example)(flow.example)
    flow.quantize()(flow.example)
    flow.save()
    assert len(traces) == 1
    flow.model.fc = nn.Linear(8, 5)  # another model now
    flow.configure()
    assert len(traces) == 2
    flow.model.fc.weight.data.mul_(2)  # new values, the same model
    flow.configure()
    assert len(traces) == 2
    flow.model.c2.stride = (2, 2)
    flow.configure()
    assert len(traces) == 3
    flow.example = images(count=3)
    flow.configure()
    assert len(traces) == 4


def test_what_is_remembered_of_a_model_does_not_keep_it_alive(tmp_path):
    flow = Flow(tmp_path).configure()
    seen = weakref.ref(flow.model)
    assert seen() in caching._cache
    del flow
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize("is_part", [False, True])  # only the modules of observed operations are followed
def test_the_copy_that_was_calibrated_is_freed_at_once(monkeypatch, is_part):
    """A cycle would keep its weights until Python happens to look for cycles."""
    copies = []

    class Watched(intermediate_tensors.AttachedTensorWatch):
        def __init__(self, watch, model, session):
            super().__init__(watch, model, session)
            assert self._operations is not None  # operations between the layers are observed too
            copies.append(weakref.ref(model))

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)

        def forward(self, x):
            return self.second(torch.relu(self.first(x)) + x)

    monkeypatch.setattr(intermediate_tensors, "AttachedTensorWatch", Watched)
    with uncollected():
        model = nn.Sequential(Residual(), nn.ReLU()) if is_part else Residual()
        quantized = own.quantize(model.eval(), images())
        assert [copy() for copy in copies] == [None]
    assert quantized.layers


def test_new_weights_of_a_remembered_model_are_used(tmp_path):
    flow = Flow(tmp_path).configure()
    flow.quantize()
    first = read_record(flow.record)["c2"].scale_w
    with torch.no_grad():
        flow.model.c2.weight.mul_(2)
    flow.quantize()
    assert read_record(flow.record)["c2"].scale_w == pytest.approx([2 * scale for scale in first])


def test_the_record_fills_up_in_two_steps_and_extra_batches_are_ignored(tmp_path):
    flow = Flow(tmp_path).configure(batch_num=2)
    calibrating = flow.quantize()
    begun = read_record(flow.record)
    assert begun["c"].scale_w
    assert begun["c"].scale_d is None
    calibrating(images(0))
    assert json.loads((tmp_path / "r.txt.progress.json").read_text())["layers"]["fc"] == [1, 2]
    calibrating(images(1))
    assert not (tmp_path / "r.txt.progress.json").exists()
    done = flow.record.read_bytes()
    calibrating(images(2) * 100)
    assert flow.record.read_bytes() == done


def test_the_calibration_model_is_a_plain_module_that_runs_without_gradients(tmp_path):
    flow = Flow(tmp_path).configure(batch_num=4)
    calibrating = flow.quantize()
    assert type(calibrating) is type(flow.model)
    assert not calibrating.training
    output = calibrating.to("cpu").eval()(images(0))
    assert not output.requires_grad
    assert torch.is_grad_enabled()
    assert set(calibrating.state_dict()) == {"c.weight", "c.bias", "c2.weight", "c2.bias", "fc.weight", "fc.bias"}
    copied = copy.deepcopy(calibrating)
    with torch.no_grad():
        copied.fc.bias.add_(100)
    assert torch.allclose(copied(images(0)), output + 100)
    calibrating(x=images(1))
    calibrating(images(2, count=5))
    assert read_record(flow.record)["fc"].scale_d is not None


def test_weights_are_rounded_during_calibration_and_activations_are_not(tmp_path):
    flow = Flow(tmp_path)
    flow.simple('override_layer_types { layer_type: "Conv2d" calibration_config { arq_quantize { quant_bits: 4 } } }')
    calibrating = flow.quantize()
    record = read_record(flow.record)
    scales = torch.tensor(record["c2"].scale_w).reshape(-1, 1, 1, 1)
    steps = calibrating.c2.weight / scales
    assert torch.allclose(steps, steps.round(), atol=1e-4)
    assert steps.abs().max() <= 8
    seen = []
    calibrating.fc.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    calibrating(flow.example)
    grid = seen[0] / read_record(flow.record)["fc"].scale_d
    assert not torch.allclose(grid, grid.round(), atol=1e-3)


@pytest.mark.parametrize("name", ["mix", "conv1d3d", "lstm_state", "gru"])
def test_every_kind_of_layer_is_calibrated_with_rounded_weights(name):
    net = case(name)
    model = net.model()
    quantized = own.quantize(model, [net.inputs()])
    copied = quantized.prepared.quantized_copy()
    for layer in quantized.layers:
        for attribute, scale in (("weight", "scale_w"), ("weight_ih_l0", "scale_w"), ("weight_hh_l0", "scale_r")):
            weight = getattr(copied.get_submodule(layer), attribute, None)
            if weight is not None:
                original = getattr(quantized.prepared.fused.model.get_submodule(layer), attribute)
                step = max(getattr(quantized.record[layer], scale))
                assert not torch.equal(weight, original)
                # Half a step, and up to one where the largest positive weight has no integer of its own.
                assert (weight - original).abs().max() <= step


def test_a_model_being_calibrated_is_not_quantized_again(tmp_path):
    flow = Flow(tmp_path).configure()
    calibrating = flow.quantize()
    for model in (calibrating, own.quantize(small(), images()).model):
        with pytest.raises(ModelError, match=r'already contains 3 AMCT operators: "c" \(Conv2d\)') as caught:
            amct.quantize_model(flow.config, flow.onnx, flow.record, model, flow.example)
        assert isinstance(caught.value, RuntimeError)


def test_interleaved_quantizations_do_not_disturb_each_other(tmp_path):
    alone = []
    for seed in (1, 2):
        flow = Flow(tmp_path / f"alone{seed}", example=images(seed)).configure(batch_num=2)
        calibrating = flow.quantize()
        calibrating(images(seed))
        calibrating(images(seed + 10))
        alone.append(read_record(flow.record))
    flows = [Flow(tmp_path / f"both{seed}", example=images(seed)).configure(batch_num=2) for seed in (1, 2)]
    first, second = (flow.quantize() for flow in flows)
    first(images(1))
    second(images(2))
    second(images(12))
    first(images(11))
    for flow in flows:
        flow.save()
    assert [read_record(flow.record) for flow in flows] == alone


def test_saving_needs_nothing_but_the_files(tmp_path):
    flow = Flow(tmp_path).configure()
    flow.quantize()(flow.example)
    code = "import amct_pytorch as amct; amct.save_model('m.onnx', 'r.txt', 'other/q')"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True)
    flow.save()
    for name in ("q_deploy_model.onnx", "q_fake_quant_model.onnx", "q_qdq_model.onnx"):
        assert (tmp_path / "other" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    assert without_times(tmp_path / "other/q_quant.json") == without_times(tmp_path / "out/q_quant.json")


def without_times(path):
    document = json.loads(path.read_text())
    for name in ("speed", "costliest"):
        del document["files"]["q_qdq_model.onnx"]["check"][name]
    return document


def test_another_process_can_tell_what_is_missing(tmp_path):
    flow = Flow(tmp_path).configure(batch_num=3)
    flow.quantize()(flow.example)
    code = "import amct_pytorch as amct; amct.save_model('m.onnx', 'r.txt', 'q')"
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False, capture_output=True, text=True)
    assert result.returncode == 1
    assert "calibration has seen 1 of 3 batches; run 2 more forward passes" in result.stderr


def test_skipped_and_unfused_layers(tmp_path):
    flow = Flow(tmp_path).simple('skip_layers: "c2" skip_fusion_layers: "c" batch_num: 1')
    calibrating = flow.quantize()
    assert isinstance(calibrating.bn, nn.BatchNorm2d)
    calibrating(flow.example)
    assert list(read_record(flow.record)) == ["c", "fc"]
    flow.save()
    report = json.loads((tmp_path / "out" / "q_quant.json").read_text())
    assert {entry["layer"] for entry in report["skipped"]} == {"bn", "c2"}


def test_dmq_factors_accumulate_over_forwards(tmp_path):
    flow = Flow(tmp_path).simple("common_config { dmq_balancer { } }")
    balancing = amct.quantize_preprocess(flow.config, flow.record, flow.model, flow.example)
    assert flow.record.read_text() == ""
    balancing(images(0))
    first = read_record(flow.record)["c"].tensor_balance_factor
    balancing(images(1) * 3)
    both = torch.maximum(images(0).abs().amax((0, 2, 3)), images(1).mul(3).abs().amax((0, 2, 3)))
    weight = Flow(tmp_path).model  # the factors belong to the folded weights
    folded = weight.c.weight * (weight.bn.weight / torch.sqrt(weight.bn.running_var + weight.bn.eps)).reshape(
        -1, 1, 1, 1
    )
    expected = (both / folded.abs().amax((0, 2, 3))).sqrt()
    found = torch.tensor(read_record(flow.record)["c"].tensor_balance_factor)
    assert torch.allclose(found, expected, rtol=1e-5)
    assert torch.all(found >= torch.tensor(first))
    flow.quantize()(flow.example)
    flow.save()
    record = read_record(flow.record)
    assert record["c"].tensor_balance_factor == tuple(found.tolist())
    with pytest.raises(ModelError, match="AMCT operators"):
        amct.quantize_model(flow.config, flow.onnx, flow.record, balancing, flow.example)


def test_forcing_half_precision_rounds_the_activation_scales_only(tmp_path):
    scales = {}
    for mode in ("", "fakequant_precision_mode: FORCE_FP16_QUANT"):
        flow = Flow(tmp_path).simple(f"batch_num: 1 {mode}")
        flow.quantize()(flow.example)
        scales[mode] = read_record(flow.record)
    plain, forced = scales.values()
    for name, entry in forced.items():
        assert entry.scale_d == torch.tensor(plain[name].scale_d).half().item()
        assert entry.scale_w == plain[name].scale_w


# -- tensors between layers ----------------------------------------------------------------------------------------


class Between(nn.Module):
    """Sums, products and concatenations, in modules called twice, in place, and of the input itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 4, 1)
        self.b = nn.Conv2d(3, 4, 1)
        self.act = nn.ReLU(inplace=True)
        self.join = nn.Conv2d(11, 4, 1)
        self.out = nn.Conv2d(4, 2, 1)

    def forward(self, x):
        total = self.a(x) + self.b(x)
        gated = self.act(total.clone()) * torch.sigmoid(self.b(x).mean() + self.a.bias.sum())
        joined = torch.cat([self.act(gated), total, x], 1)
        return self.out(self.join(joined).relu_() + 1)


def observed_by_hand(model, batches):
    """Minimum and maximum of the sum and of the product, computed apart."""
    totals, gates = [], []
    with torch.no_grad():
        for x in batches:
            total = model.a(x) + model.b(x)
            totals.append(total)
            gates.append(torch.relu(total) * torch.sigmoid(model.b(x).mean() + model.a.bias.sum()))
    return torch.cat(totals), torch.cat(gates)


def test_tensors_between_layers_are_observed_in_any_batch_size(tmp_path):
    torch.manual_seed(3)
    flow = Flow(tmp_path, Between().eval(), images()).configure(batch_num=3)
    calibrating = flow.quantize()
    batches = [images(1), images(2, count=5), images(3, count=1)]
    for batch in batches:
        calibrating(batch)
    found = read_tensor_qparams(tmp_path / "r.txt.qdq.json")
    ranges = sorted((factors.scale * 255) for factors in found.values())
    total, gated = observed_by_hand(calibrating, batches)
    more, low, high = widening(total.numel()), float(total.min()), float(total.max())
    middle, half = (low + high) / 2, (high - low) / 2  # both ends move away from zero and from the middle
    width = max(more * high, middle + more * half) - min(more * low, middle - more * half)
    for expected in (width, float(gated.max()) * widening(gated.numel())):
        assert min(abs(width / expected - 1) for width in ranges) < 1e-5, (expected, ranges)


def test_a_batch_that_takes_another_way_leaves_its_tensors_out(tmp_path):
    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Conv2d(3, 4, 1)
            self.b = nn.Conv2d(3, 4, 1)
            self.out = nn.Conv2d(4, 2, 1)

        def forward(self, x):
            if x.shape[0] > 2:
                return self.out(torch.maximum(self.a(x), self.b(x)).tanh())
            return self.out(torch.add(self.a(x), self.b(x)).tanh())

    flow = Flow(tmp_path, Fork().eval(), images()).configure(batch_num=2)
    calibrating = flow.quantize()
    calibrating(images(1))
    calibrating(images(2, count=5))
    layers = {"conv2d", "conv2d_1", "conv2d_2"}
    found = read_tensor_qparams(tmp_path / "r.txt.qdq.json")
    assert {name for name, factors in found.items() if factors.mean is None} <= layers
    flow.save()


def test_the_simulated_model_can_be_copied_and_pickled():
    quantized = own.quantize(small(), images())
    expected = quantized.model(images(4))
    assert torch.equal(copy.deepcopy(quantized.model)(images(4)), expected)
    assert torch.equal(pickle.loads(pickle.dumps(quantized.model))(images(4)), expected)


def test_layers_with_a_shared_weight_are_told_with_their_reasons():
    net = case("shared")
    quantized = own.quantize(net.model(), [net.inputs()])
    assert any("it shares its weight" in skip.reason for skip in quantized.skipped)
    assert "it shares its weight" in quantized.summary()


def test_an_unfinished_record_of_another_model_is_refused(tmp_path):
    flow = Flow(tmp_path).configure()
    flow.quantize()(flow.example)
    other = Flow(tmp_path / "other", nn.Sequential(nn.Conv2d(3, 4, 3)), images()).configure()
    other.quantize()(images())
    with pytest.raises(RecordError, match="the model has no such layer"):
        amct.save_model(flow.onnx, other.record, tmp_path / "q")


def checks_of(folder):
    files = json.loads((folder / "out/q_quant.json").read_text())["files"]
    return {name: entry["check"] for name, entry in files.items() if "check" in entry}


def test_saved_files_are_checked_on_the_batch_kept_beside_the_record(tmp_path):
    flow = Flow(tmp_path).configure()
    flow.quantize()(flow.example)
    np.testing.assert_array_equal(read_batch(flow.record)["x"], flow.example.numpy())
    flow.save()
    checks = checks_of(tmp_path)
    assert set(checks) == {"q_deploy_model.onnx", "q_fake_quant_model.onnx", "q_qdq_model.onnx"}
    assert {check["batch"] for check in checks.values()} == {"a calibration batch"}


def test_without_the_kept_batch_saved_files_are_checked_on_random_inputs(tmp_path, caplog):
    caplog.set_level("INFO", logger="amct")
    flow = Flow(tmp_path).configure()
    flow.quantize()(flow.example)
    batch_path(flow.record).unlink()
    flow.save()
    assert {check["batch"] for check in checks_of(tmp_path).values()} == {"random inputs"}
    assert "checked on random inputs, not on calibration data: r.txt.check.npz does not exist" in caplog.text


def test_a_copy_that_no_user_gets_shares_what_is_not_quantized_and_any_other_shares_nothing():
    net = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 4), nn.LayerNorm(4)).eval()
    prepared = own.quantize(net, [torch.arange(16).reshape(2, 8)]).prepared
    folded = dict(prepared.fused.model.named_parameters())
    for is_private, shared in ((True, {"0.weight", "1.bias", "2.weight", "2.bias"}), (False, set())):
        copied = dict(prepared.quantized_copy(is_private=is_private).named_parameters())
        assert {name for name in folded if copied[name].data_ptr() == folded[name].data_ptr()} == shared
