"""``prepare_qat``: where training starts, distillation, summary, report, target."""

from __future__ import annotations

import copy
import pickle
import warnings
from dataclasses import replace

import pytest
import torch
from qat_helpers import evaluate, images, labels, net, train
from test_qat_model import Kinds
from torch import nn
from torch.nn import functional

import amct.pytorch as amct
from amct.errors import AmctError, ArgumentError, ArgumentTypeError, ConfigError, TrainingError
from amct.model.quant_json import read_quant_json
from amct.numerics.ifmr import IfmrObserver
from amct.numerics.settings import IfmrSettings
from amct.pytorch.capture import trace as tracing
from amct.pytorch.qat.layers import quantized_layers


def batches(count=3):
    return [images(seed) for seed in range(count)]


def test_clips_start_from_all_the_batches():
    model = amct.prepare_qat(net(), batches())
    observer = IfmrObserver(IfmrSettings(num_bits=8, asymmetric=True))
    for batch in batches():
        observer.observe(batch)
    found = observer.result()
    assert model.c1.input_quantizer.clips == (found.clip_min.item(), found.clip_max.item())


def test_how_much_was_calibrated_with_is_told(tmp_path, caplog):
    caplog.set_level("INFO", logger="amct")
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images(0, 12)), 4)
    for data, told in ((loader, "12 of 12 samples"), ((images(seed) for seed in range(2)), "2 batches")):
        model = amct.prepare_qat(net(), data).eval()
        assert f"calibrated on {told}" in caplog.messages
        assert f"calibrated on {told}" in model.summary().splitlines()
    model.save(tmp_path / "net", formats=["fake_quant"])
    assert read_quant_json(tmp_path / "net_quant.json").calibration.used == 2


@pytest.mark.parametrize("bits", [4, 8])
def test_the_start_is_close_to_the_float_model(bits):
    original = net().eval()
    model = amct.prepare_qat(original, batches(), amct.QatConfig(weight_bits=bits, activation_bits=bits))
    expected = evaluate(original, images(9))
    noise = (evaluate(model, images(9)) - expected).norm() / expected.norm()
    assert noise < {4: 0.25, 8: 0.02}[bits]


def test_learned_scales_start_with_less_error_than_the_largest_weight_gives():
    original = net()
    model = amct.prepare_qat(original, batches(1), amct.QatConfig(weight_bits=4))
    weight = original.c2.weight.detach()
    learned = (model.c2.weight_quantizer.eval()(model.c2.weight) - weight).square().sum()
    measured = amct.prepare_qat(original, batches(1), amct.QatConfig(weight_bits=4, weight_scales="measured"))
    assert learned < 0.9 * (measured.c2.weight_quantizer(weight) - weight).square().sum()


def test_a_config_sets_bits_by_layer_and_type_and_skips():
    config = amct.QatConfig(
        weight_bits=4, activation_bits=4, layers={"c1": (8, 8)}, types={"Linear": (8, 16)}, skip_layers=("c3",)
    )
    model = amct.prepare_qat(net(), batches(1), config)
    found = {
        name: (layer.weight_quantizer.bits, layer.activation.bits) for name, layer in quantized_layers(model).items()
    }
    assert found == {"c1": (8, 8), "c2": (4, 4), "fc": (8, 16)}
    assert "c3" in model.summary()


def test_configs_of_amct_are_read_too(tmp_path):
    cfg = tmp_path / "q.cfg"
    cfg.write_text("retrain_data_quant_config { ulq_quantize { clip_max_min { clip_max: 3.0 clip_min: -2.0 } } }")
    model = amct.prepare_qat(net(), batches(1), cfg)
    assert model.c1.input_quantizer.clips == (-2.0, 3.0)
    assert not list(model.c1.weight_quantizer.parameters())  # AMCT's default is arq_retrain


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"config": amct.QatConfig(weight_bits=5)}, ArgumentError, "weight_bits: expected 4 or 8, got 5"),
        ({"config": amct.QatConfig(activation_bits=6)}, ArgumentError, "activation_bits: expected 4, 8 or 16, got 6"),
        ({"config": amct.QatConfig(weight_scales="guessed")}, ArgumentError, "weight_scales: expected"),
        ({"config": amct.QatConfig(skip_layers=("nope",))}, ConfigError, "nope"),
        ({"config": 3}, ArgumentTypeError, "config: expected"),
        ({"teacher": "me"}, ArgumentTypeError, "teacher: expected"),
        ({"target": "toaster"}, ArgumentError, 'target: expected one of "portable"'),
        ({"batches": []}, RuntimeError, "at least one batch is needed"),
    ],
)
def test_wrong_arguments_are_explained(arguments, error, message):
    with pytest.raises(error, match=message):
        amct.prepare_qat(net(), **{"batches": batches(1), **arguments})


def test_a_data_loader_with_labels_is_read():
    loader = torch.utils.data.DataLoader([(images(0)[0], 1), (images(1)[0], 2)], batch_size=2)
    assert amct.prepare_qat(net(), loader).c1.input_quantizer.has_clips()


def test_every_kind_of_layer_starts_from_calibration_and_is_saved(tmp_path):
    torch.manual_seed(0)
    model = amct.prepare_qat(Kinds(), [torch.randn(4, 3, 8)])
    assert all(layer.activation.has_clips() for layer in quantized_layers(model).values())
    assert model.lstm.state_quantizer.has_clips()
    assert model.gru.state_quantizer.has_clips()
    model.save(tmp_path / "net", formats=["fake_quant", "record"])


class OnlyLstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 4)

    def forward(self, x):
        return self.lstm(x)[0]


def test_a_model_that_is_one_recurrent_layer_is_saved(tmp_path):
    amct.prepare_qat(OnlyLstm(), [torch.randn(5, 2, 3)]).save(tmp_path / "net", formats=["record", "qdq"])
    assert "scale_h" in (tmp_path / "net_record.txt").read_text()


# -- distillation ------------------------------------------------------------------------------------------------------


def test_the_loss_against_the_teacher_is_zero_for_its_own_outputs_and_has_gradients():
    original = net().eval()
    model = amct.prepare_qat(original, batches(1), teacher=original)
    x = images(3)
    assert model.distillation_loss(x, original(x)).item() == pytest.approx(0, abs=1e-6)
    loss = model.distillation_loss(x, model.train()(x))
    loss.backward()
    assert loss > 0
    assert model.c1.weight.grad is not None
    assert all(parameter.grad is None for parameter in original.parameters())
    assert not any("teacher" in key for key in model.state_dict())


def test_learning_from_the_teacher_comes_closer_to_it():
    torch.manual_seed(0)
    original = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    model = amct.prepare_qat(original, batches(1), teacher=original).train()
    with torch.no_grad():
        model[0].weight.mul_(0.8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = model.distillation_loss(images(), model(images()))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_outputs_of_other_forms_are_compared_tensor_by_tensor():
    torch.manual_seed(0)
    original = nn.Sequential(nn.Conv2d(3, 4, 3))
    model = amct.prepare_qat(original, batches(1), teacher=original)
    x = images()
    expected = functional.mse_loss(2 * original(x), original(x)) / original(x).square().mean()
    torch.testing.assert_close(model.distillation_loss((x,), 2 * original(x)), expected)
    with pytest.raises(ArgumentError, match="expected tensors like the teacher's"):
        model.distillation_loss(x, torch.zeros(1, 2))


def test_without_a_teacher_the_error_says_so():
    with pytest.raises(TrainingError, match="no teacher; give prepare_qat teacher="):
        amct.prepare_qat(net(), batches(1)).distillation_loss(images(), images())


def test_copies_share_the_teacher_and_pickles_leave_it_out():
    original = net().eval()
    model = amct.prepare_qat(original, batches(1), teacher=original)
    assert copy.deepcopy(model)._qat.teacher[0] is model._qat.teacher[0]
    with pytest.raises(TrainingError, match="no teacher"):
        pickle.loads(pickle.dumps(model)).distillation_loss(images(), images())


# -- results -----------------------------------------------------------------------------------------------------------


def test_the_summary_shows_layers_batch_norms_and_how_the_clips_moved():
    model = amct.prepare_qat(net(), batches(1))
    train(model, range(2))
    text = model.summary()
    assert "Net: 4 layers quantized, 2 batch norms folded" in text
    assert "c1: [" in text
    assert " -> " in text


def test_the_report_shows_losses_clips_and_layers(tmp_path):
    model = amct.prepare_qat(net(), batches(1))
    losses = train(model, range(3))

    def accuracy(output, batch):
        return float((output.argmax(1) == batch[1]).double().mean())

    path = model.report(tmp_path / "r.html", [(images(5), labels(5))], accuracy, losses=losses)
    text = path.read_text()
    assert 'id="training"' in text
    assert "polyline" in text
    assert "clips before" in text
    assert "accuracy" in text
    assert "Most harmed layers" in text


def test_the_portable_target_trains_seven_bit_weights(tmp_path):
    model = amct.prepare_qat(net(), batches(1), target="portable")
    assert {layer.weight_quantizer.bits for layer in quantized_layers(model).values()} == {7}
    train(model, [0])
    model.save(tmp_path / "net", formats=["qdq", "record"])
    assert 'wts_type: "INT7"' in (tmp_path / "net_record.txt").read_text()


def test_frozen_batch_norms_keep_their_statistics_and_are_trained_otherwise():
    original = net()
    model = amct.prepare_qat(original, batches(1), freeze_norms=True)
    train(model, range(2))
    assert model.drop.training
    for name in ("running_mean", "running_var"):
        assert torch.equal(getattr(model.b1, name), getattr(original.b1, name))
    assert not torch.equal(model.b1.weight, original.b1.weight)
    assert not copy.deepcopy(model).eval().train().b1.training
    assert amct.prepare_qat(original.train(), batches(1)).b1.training


def test_a_pickled_model_is_saved_in_another_process(tmp_path):
    model = amct.prepare_qat(net(), batches(1))
    train(model, [0])
    duplicate = pickle.loads(pickle.dumps(model))
    duplicate.save(tmp_path / "net", formats=["fake_quant", "record"])
    model.save(tmp_path / "other", formats=["fake_quant", "record"])
    assert (tmp_path / "net_record.txt").read_text() == (tmp_path / "other_record.txt").read_text()


@pytest.fixture
def captures(monkeypatch):
    """The models that are captured from now on."""
    found, capture = [], tracing.capture
    monkeypatch.setattr(tracing, "capture", lambda *args: found.append(args[0]) or capture(*args))
    return found


class WithFunction(nn.Module):
    """A functional call is a layer, and a tensor that is no buffer is a constant of the program."""

    def __init__(self):
        super().__init__()
        self.weight, self.factor = nn.Parameter(torch.randn(5, 3 * 8 * 8)), torch.tensor(2.0)

    def forward(self, x):
        return functional.linear(x.flatten(1), self.weight) * self.factor


CAPTURED = {
    "norms": (net, (8, 3, 8, 8)),
    "every kind": (Kinds, (4, 3, 8)),
    "functional": (WithFunction, (4, 3, 8, 8)),
}


@pytest.mark.parametrize("case", CAPTURED)
def test_a_trained_model_is_not_captured_again(case, captures, tmp_path):
    make, shape = CAPTURED[case]
    data = [torch.randn(shape, generator=torch.Generator().manual_seed(5))]
    model = amct.prepare_qat(make(), data, target="vnni")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.125)
    model.save(tmp_path / "once", data=data)
    assert len(captures) == 1
    model._qat = replace(model._qat, origin=None)
    model.save(tmp_path / "anew", data=data)
    assert len(captures) == 2
    for name in ("qdq_model.onnx", "deploy_model.onnx"):
        assert (tmp_path / f"once_{name}").read_bytes() == (tmp_path / f"anew_{name}").read_bytes()


def test_a_model_that_was_changed_or_unpickled_is_captured_again(captures, tmp_path):
    model = amct.prepare_qat(net(), batches(1))
    model.b3.eps = 0.25
    model.save(tmp_path / "changed")
    assert len(captures) == 2
    pickle.loads(pickle.dumps(model)).save(tmp_path / "unpickled")
    assert len(captures) == 3


class CountsItsCalls(nn.Module):
    """Attributes of the user's own with names that a trainable model could have too."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        self.seen = getattr(self, "seen", 0) + 1
        self.last = self.fc(x)
        return self.last * 2


def test_attributes_that_the_forward_sets_are_the_users_own(tmp_path):
    x = torch.randn(4, 8)
    trained = amct.prepare_qat(CountsItsCalls().eval(), [x])
    before = getattr(trained, "seen", 0)
    trained.train()(x)
    assert trained.seen == before + 1
    trained.eval().save(tmp_path / "net")


def test_a_scripted_part_is_refused_by_name_when_the_model_is_saved(tmp_path):
    x = torch.randn(4, 8)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".torch.jit.script. is deprecated")  # a FutureWarning since torch 2.15
        model = nn.Sequential(nn.Linear(8, 8), torch.jit.script(nn.ReLU()), nn.Linear(8, 2)).eval()
    trained = amct.prepare_qat(model, [x])
    trained.train()(x)
    with pytest.raises(AmctError, match='module "1" is a ScriptModule'):
        trained.eval().save(tmp_path / "net")
