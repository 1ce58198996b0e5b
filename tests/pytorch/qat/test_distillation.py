"""AMCT's distillation: its config, its groups, what a group learns, and its files."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn import functional

import amct_pytorch as amct
from amct.numerics.adaround.scale import least_error_scale
from amct.pytorch.blocks import distillation
from amct.pytorch.blocks.distillation import find_groups, units_of
from amct.pytorch.capture.cached_trace import cached_trace
from amct.pytorch.qat.layers import QuantizedLayer
from amct.record import read_record

INT4 = """
batch_num: 2
distill_data_quant_config { ulq_quantize { dst_type: INT4 } }
distill_weight_quant_config { ulq_distill { dst_type: INT4 } }
distill_override_layers {
  layer_name: "stem"
  distill_data_quant_config { ulq_quantize { dst_type: INT8 } }
  distill_weight_quant_config { arq_distill { dst_type: INT8 } }
}
"""


class Network(nn.Module):
    """A chain, a residual sum, and a linear layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.stem, self.norm, self.act = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()
        self.first, self.second = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.fc = nn.Linear(8, 5)
        self.norm.running_mean.uniform_(-0.5, 0.5)
        self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x):
        x = self.act(self.norm(self.stem(x)))
        x = functional.relu(self.second(functional.relu(self.first(x))) + x)
        return self.fc(x.mean((2, 3)))


def images(count=32, seed=0):
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def model():
    return Network().eval()


@pytest.fixture
def made(tmp_path, model, monkeypatch):
    """The config of 4 bits and a student made with it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "distill.cfg").write_text(INT4)
    amct.create_distill_config("config.json", model, images(2), "distill.cfg")
    return "config.json", amct.create_distill_model("config.json", model, images(2))


# -- config ------------------------------------------------------------------------------------------------------------


def test_the_json_has_amct_s_keys_and_the_groups(made):
    config = json.loads(Path(made[0]).read_text())
    assert list(config)[:5] == ["version", "batch_num", "group_size", "data_dump", "distill_group"]
    assert config["distill_group"] == [["stem"], ["first"], ["second"], ["fc"]]
    assert config["first"] == {
        "quant_enable": True,
        "distill_data_config": {"algo": "ulq_quantize", "dst_type": "INT4"},
        "distill_weight_config": {"algo": "ulq_distill", "channel_wise": True, "dst_type": "INT4"},
    }
    assert config["stem"]["distill_weight_config"]["algo"] == "arq_distill"
    assert config["fc"]["distill_weight_config"]["channel_wise"] is False


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("batch_num: 0 group_size: 0", "batch_num must be at least 1, got 0(.|\n)*group_size must be at least 1"),
        ('distill_group { start_layer_name: "stm" end_layer_name: "fc" }', 'the layer "stm" is unknown.*"stem"'),
        (
            'distill_group { start_layer_name: "stem" end_layer_name: "second" }',
            'no single path from "stem" to "second"',
        ),
        (
            'distill_group { start_layer_name: "first" end_layer_name: "second" } '
            'distill_group { start_layer_name: "second" end_layer_name: "second" }',
            '"second" is in the group that starts at "first" and in the one that starts at "second"',
        ),
        ('distill_group { start_layer_name: "norm" end_layer_name: "first" }', '"norm" is no Conv2d or Linear layer'),
        (
            "distill_data_quant_config { ulq_quantize { dst_type: INT4 } }",
            "must have the same dst_type, got INT4 and INT8",
        ),
        ('quant_skip_layer_types: "Conv2d" quant_skip_layer_types: "Linear"', "is switched off"),
        ('quant_skip_layers: "frist"', 'quant_skip_layers: the layer "frist" is unknown'),
        ("weight_bits: 3", "weight_bits"),
    ],
)
def test_a_config_that_cannot_be_used(tmp_path, model, text, match):
    (tmp_path / "bad.cfg").write_text(text)
    with pytest.raises(ValueError, match=match):
        amct.create_distill_config(tmp_path / "c.json", model, images(2), tmp_path / "bad.cfg")


def test_a_skip_wins_over_an_override(tmp_path, model):
    (tmp_path / "a.cfg").write_text(
        'quant_skip_layers: "first" distill_override_layers { layer_name: "first" '
        "distill_data_quant_config { ulq_quantize {} } distill_weight_quant_config { ulq_distill {} } }"
    )
    amct.create_distill_config(tmp_path / "c.json", model, images(2), tmp_path / "a.cfg")
    assert json.loads((tmp_path / "c.json").read_text())["first"]["quant_enable"] is False
    student = amct.create_distill_model(tmp_path / "c.json", model, images(2))
    assert not isinstance(student.first, QuantizedLayer)
    assert isinstance(student.second, QuantizedLayer)


# -- groups ------------------------------------------------------------------------------------------------------------


def test_layers_that_read_each_other_are_groups_of_the_given_size(model):
    traced = cached_trace(model, images(2))
    units = units_of(traced, traced.layers)
    assert units["stem"].nodes[:2] == ("stem", "norm")
    assert len(units["stem"].nodes) == 3
    assert units["stem"].following == ""  # what it computes is read by a layer and by the sum
    assert units["first"].following == "second"
    assert find_groups(units, 1) == [["stem"], ["first"], ["second"], ["fc"]]
    assert find_groups(units, 3) == [["stem"], ["first", "second"], ["fc"]]
    assert find_groups(units, 1, [["first", "second"]]) == [["stem"], ["first", "second"], ["fc"]]


# -- learning ----------------------------------------------------------------------------------------------------------


def difference(student, model):
    student.eval()
    with torch.no_grad():
        return float((student(images(64, seed=5)) - model(images(64, seed=5))).square().mean())


def learned(made, model, **options):
    config, student = made
    batches = [(part, torch.zeros(len(part), dtype=torch.int64)) for part in images(48).split(16)]
    return amct.distill(model, student, config, batches, **options)


def test_no_group_ends_with_a_larger_error_and_the_student_comes_closer(made, model, monkeypatch):
    errors, distill_groups = [], distillation.distill_groups

    def noted(*arguments):
        errors.extend(distill_groups(*arguments))
        return errors

    monkeypatch.setattr("amct.pytorch.blocks.amct_api.distill_groups", noted)
    with monkeypatch.context() as patch:
        patch.setattr(distillation, "_learn", lambda *_: (1.0, 1.0))
        before = difference(learned(made, model), model)
    errors.clear()
    student = learned(made, model, epochs=4, lr=1e-4)
    assert len(errors) == 4
    assert all(after <= first for first, after in errors)
    assert sum(after < first for first, after in errors) >= 2
    assert difference(student, model) < before
    assert student is made[1]


def test_ulq_distill_learns_the_scales_of_weights_and_arq_distill_has_none(made, model):
    _, student = made
    student = learned(made, model, epochs=4, lr=1e-4)
    quantizer = student.first.weight_quantizer
    start = least_error_scale(model.first.weight, kind=quantizer.kind, bits=4).scale
    assert not torch.equal(quantizer.scale, start)
    assert torch.allclose(quantizer.scale, start, rtol=0.2)
    assert not list(student.stem.weight_quantizer.parameters())


def test_only_the_group_that_learns_moves_and_the_float_model_stays(made, model, monkeypatch):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    learn, moved = distillation._learn, []

    def watched(runs, kept, settings, name):
        before = {key: value.clone() for key, value in made[1].state_dict().items()}
        found = learn(runs, kept, settings, name)
        after = made[1].state_dict()
        moved.append({key.split(".")[0] for key in before if not torch.equal(before[key], after[key])})
        return found

    monkeypatch.setattr(distillation, "_learn", watched)
    learned(made, model, epochs=4, lr=1e-4)
    own = [{"stem", "norm"}, {"first"}, {"second"}, {"fc"}]
    assert all(found <= names for found, names in zip(moved, own, strict=True))
    assert sum(map(bool, moved)) >= 2
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())
    assert all(parameter.grad is None for parameter in made[1].parameters())


def test_kept_values_can_lie_in_files(tmp_path, made, model, monkeypatch):
    other = copy.deepcopy(made[1])
    learned(made, model, epochs=2)
    config = json.loads(Path(made[0]).read_text()) | {"data_dump": True}
    (tmp_path / "dump.json").write_text(json.dumps(config))
    written, save = [], torch.save
    monkeypatch.setattr(torch, "save", lambda values, path: (written.append(path), save(values, path)))
    learned(("dump.json", other), model, epochs=2)
    assert written
    assert not any(path.exists() for path in written)
    pairs = zip(made[1].state_dict().items(), other.state_dict().values(), strict=True)
    assert all(torch.equal(value, same) for (_, value), same in pairs)


def test_the_user_s_loss_optimizer_and_batches_are_used(made, model):
    used = []

    class Loss(nn.Module):
        def forward(self, found, wanted):
            used.append(found.shape == wanted.shape)
            return functional.l1_loss(found, wanted)

    class Sgd(torch.optim.SGD):
        def __init__(self, params, *arguments, **options):
            super().__init__(params, *arguments, **options)
            used.append([group["lr"] for group in self.param_groups])

    class Samples:
        def get_model_input(self, batch):
            return batch["image"]

    optimizer = Sgd(model.parameters(), lr=0.01, momentum=0.9)
    used.clear()
    batches = [{"image": part} for part in images(32).split(16)]
    config, student = made
    amct.distill(model, student, config, batches, sample_instance=Samples(), loss=Loss(), optimizer=optimizer)
    assert True in used
    assert any(isinstance(rates, list) and 0.01 in rates for rates in used)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"epochs": 0}, ValueError, "epochs: expected at least 1, got 0"),
        ({"epochs": 1.5}, TypeError, "epochs"),
        ({"lr": -1.0}, ValueError, "lr: expected a positive number"),
        ({"train_loader": []}, ValueError, "train_loader is empty"),
        ({"sample_instance": object()}, TypeError, "get_model_input"),
        ({"loss": lambda found, wanted: found - wanted}, RuntimeError, "expected a tensor with one number"),
        ({"loss": lambda found, wanted: (found - wanted).mean() * float("nan")}, RuntimeError, "the loss is nan"),
        ({"compress_model": Network()}, RuntimeError, "give the model that create_distill_model returned"),
    ],
)
def test_arguments_that_cannot_be_used(made, model, options, error, match):
    config, student = made
    given = {"model": model, "compress_model": student, "config_file": config, "train_loader": [images(4)]}
    with pytest.raises(error, match=match):
        amct.distill(**{**given, **options})


def test_another_config_than_the_student_s_is_an_error(made, model):
    amct.create_distill_config("other.json", model, images(2))
    with pytest.raises(RuntimeError, match="the student was made with another config"):
        amct.distill(model, made[1], "other.json", [images(4)])


class Padded(nn.Conv2d):
    """A convolution that pads in its own forward."""

    def forward(self, x):
        return super().forward(functional.pad(x, (0, 1, 0, 1)))


def test_layers_that_pad_first_are_in_groups_too(tmp_path):
    torch.manual_seed(4)
    model = nn.Sequential(
        Padded(3, 4, 2), nn.ReLU(), Padded(4, 4, 2), nn.BatchNorm2d(4), nn.LeakyReLU(), nn.Conv2d(4, 2, 1)
    )
    model.eval()
    (tmp_path / "a.cfg").write_text("group_size: 3")
    amct.create_distill_config(tmp_path / "c.json", model, images(2), tmp_path / "a.cfg")
    assert json.loads((tmp_path / "c.json").read_text())["distill_group"] == [["0", "2", "5"]]
    student = amct.create_distill_model(tmp_path / "c.json", model, images(2))
    student = amct.distill(model, student, tmp_path / "c.json", [images(8), images(5, seed=1)])
    assert difference(student, model) < 0.01


# -- files -------------------------------------------------------------------------------------------------------------


def test_the_files_compute_what_the_student_does(tmp_path, made, model):
    student = learned(made, model, epochs=2)
    amct.save_distill_model(student, "out/net", images(2))
    record = read_record(tmp_path / "amct_log" / "scale_offset_record.txt")
    assert record.layers["first"].act_type == record.layers["first"].wts_type == "INT4"
    deploy = onnx.load("out/net_deploy_model.onnx")
    assert any(node.op_type == "AscendQuant" for node in deploy.graph.node)
    student.eval()
    session = onnxruntime.InferenceSession("out/net_fake_quant_model.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: images(2, seed=3).numpy()})
    with torch.no_grad():
        expected = student(images(2, seed=3))
    # A value between two of 16 integers may be rounded either way.
    assert float((torch.from_numpy(found) - expected).square().mean()) < 0.02 * float(expected.square().mean())


def test_only_a_student_can_be_saved(model):
    with pytest.raises(RuntimeError, match="has no quantizers"):
        amct.save_distill_model(model, "out/net", images(2))
