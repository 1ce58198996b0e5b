"""What users' models and configs have beside the plain case: views as examples, shared weights, settings by level."""

from __future__ import annotations

import json

import pytest
import torch
from ptq_helpers import Flow, difference, images, run_onnx, run_torch, small
from pytorch_nets import case
from torch import nn

import amct.pytorch as own
import amct_pytorch as amct
from amct.errors import ExportError
from amct.record import read_record
from amct.record.conversion import read_tensor_qparams


def test_an_example_that_is_a_slice_of_a_larger_tensor_is_as_good_as_a_copy(tmp_path):
    """A view has an offset and strides of its own; the tensors between layers must be found all the same."""
    whole = torch.randn(6, 3, 8, 16, generator=torch.Generator().manual_seed(2))
    view = whole[2:4, :, :, ::2]
    assert view.storage_offset() > 0
    assert not view.is_contiguous()
    found = {}
    for name, example in (("view", view), ("copy", view.clone())):
        flow = Flow(tmp_path / name, small(), example).configure()
        flow.quantize()(example)
        flow.save()
        found[name] = (read_record(flow.record), read_tensor_qparams(f"{flow.record}.qdq.json"))
    assert found["view"] == found["copy"]
    assert any(factors.mean is None for factors in found["view"][1].values())
    names = ("view", "copy")
    files = [(tmp_path / name / "out" / "q_qdq_model.onnx").read_bytes() for name in names]
    assert files[0] == files[1]


class Tied(nn.Module):
    """Two layers with one weight, and one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 6)
        self.b.weight = self.a.weight
        self.c = nn.Linear(6, 2)

    def forward(self, x):
        return self.c(torch.relu(self.b(torch.relu(self.a(x))))), x.sum()


def test_layers_with_one_weight_stay_float_with_the_reason_and_the_files_run(tmp_path):
    torch.manual_seed(0)
    model, x = Tied().eval(), torch.randn(4, 6)
    quantized = own.quantize(model, [x])
    assert quantized.layers == ("c",)
    reasons = {skip.layer: skip.reason for skip in quantized.skipped}
    assert "shares its weight" in reasons["a"]
    assert "shares its weight" in reasons["b"]
    quantized.save(tmp_path / "q", placement="exact", target="exact8")
    expected = run_torch(quantized.model, x)
    assert len(expected) == 2
    step = quantized.record["c"].scale_d * float(model.c.weight.detach().abs().sum(1).max())
    for file in ("q_fake_quant_model.onnx", "q_qdq_model.onnx"):
        assert difference(run_onnx(tmp_path / file, model, x), expected) <= step


@pytest.mark.parametrize("name", ["functional", "shared", "lstm_batch_first", "gru", "gru_state"])
def test_other_forms_of_calls_run_quantized_or_are_told(name, tmp_path):
    net = case(name)
    model, inputs = net.model(), net.inputs()
    quantized = own.quantize(model, [inputs])
    quantized.save(tmp_path / "q")
    assert quantized.layers
    original = run_torch(model, inputs)
    largest = max(float(abs(output).max()) for output in original)
    for file in ("q_fake_quant_model.onnx", "q_qdq_model.onnx"):
        assert difference(run_onnx(tmp_path / file, model, inputs), original) <= 0.2 * largest, file
    told = {entry["layer"] for entry in json.loads((tmp_path / "q_quant.json").read_text())["skipped"]}
    assert told >= {skip.layer for skip in quantized.skipped}


@pytest.mark.parametrize("bits", [4, 6, 7, 8])
def test_weight_bits_of_a_simple_config_reach_the_record_and_the_grid(bits, tmp_path):
    block = f"calibration_config {{ arq_quantize {{ quant_bits: {bits} }} }}"
    flow = Flow(tmp_path).simple(f'override_layer_configs {{ layer_name: "c2" {block} }}')
    calibrating = flow.quantize()
    entry = read_record(flow.record)["c2"]
    assert entry.wts_type == f"INT{bits}"
    integers = calibrating.c2.weight / torch.tensor(entry.scale_w).reshape(-1, 1, 1, 1)
    assert torch.allclose(integers, integers.round(), atol=1e-3)
    assert integers.round().min() >= -(2 ** (bits - 1))
    assert integers.round().max() <= 2 ** (bits - 1) - 1
    assert integers.abs().max() > 2 ** (bits - 1) - 2
    assert {read_record(flow.record)[name].wts_type for name in ("c", "fc")} == {"INT8"}


IFMR = "ifmr_quantize { asymmetric: %s }"
LEVELS = {
    "global": ("activation_offset: false", set()),
    "common beats global": (f"activation_offset: true common_config {{ {IFMR % 'false'} }}", set()),
    "type beats common": (
        f"common_config {{ {IFMR % 'false'} }} "
        f'override_layer_types {{ layer_type: "Conv2d" calibration_config {{ {IFMR % "true"} }} }}',
        {"c", "c2"},
    ),
    "layer beats type": (
        f'override_layer_types {{ layer_type: "Conv2d" calibration_config {{ {IFMR % "false"} }} }} '
        f'override_layer_configs {{ layer_name: "c" calibration_config {{ {IFMR % "true"} }} }} '
        "activation_offset: false",
        {"c"},
    ),
    "HFMG": ("common_config { hfmg_quantize { asymmetric: false } }", set()),
}


@pytest.mark.parametrize("level", LEVELS)
def test_the_offset_is_switched_at_every_level(level, tmp_path):
    text, expected = LEVELS[level]
    flow = Flow(tmp_path).simple(text)
    flow.quantize()(flow.example.abs() + 0.1)  # positive data: with an offset it is -128, or near
    record = read_record(flow.record)
    assert {name for name, entry in record.items() if entry.offset_d != 0} == expected


def test_do_fusion_off_keeps_the_batch_norm_and_the_output(tmp_path):
    flow = Flow(tmp_path).simple("do_fusion: false")
    calibrating = flow.quantize()
    assert isinstance(calibrating.bn, nn.BatchNorm2d)
    calibrating(flow.example)
    flow.save()
    expected = run_torch(flow.model, flow.example)
    found = run_onnx(tmp_path / "out" / "q_fake_quant_model.onnx", flow.model, flow.example)
    assert difference(found, expected) <= 0.1 * float(abs(expected[0]).max())


def test_a_model_that_cannot_be_captured_is_refused_when_it_is_exported_only(tmp_path):
    class Forks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            if float(x.sum()) > 0:
                x = x + 1
            return self.fc(x)

    quantized = own.quantize(Forks().eval(), [torch.ones(2, 3)])
    assert quantized.record["fc"].scale_d is not None
    with pytest.raises(ExportError, match=r"(?s)test_ptq_variants\.py.*if float\(x\.sum\(\)\) > 0"):
        quantized.save(tmp_path / "q", formats="qdq")


def test_two_quantizations_of_one_model_with_different_configs_do_not_disturb_each_other(tmp_path):
    model = small()
    flows = [Flow(tmp_path / name, model) for name in ("a", "b")]
    for flow in flows:
        flow.folder.mkdir()
    flows[0].simple("activation_offset: true batch_num: 2")
    flows[1].simple("activation_offset: false batch_num: 1")
    first, second = (flow.quantize() for flow in flows)
    first(images(1))
    second(images(2))
    first(images(3))
    for flow in flows:
        amct.save_model(flow.onnx, flow.record, flow.folder / "q")
    offsets = [{entry.offset_d for entry in read_record(flow.record).values()} for flow in flows]
    assert offsets[1] == {0}
    assert 0 not in offsets[0]


class Outlier(nn.Module):
    """Two layers that read one tensor, of which one channel is far larger than the rest, as in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("size", torch.ones(32).index_fill(0, torch.tensor([5]), 60.0))
        self.a = nn.Linear(32, 16)
        self.b = nn.Linear(32, 16)

    def forward(self, x):
        x = torch.tanh(x) * self.size
        return self.a(x) + torch.sigmoid(self.b(x))


def test_a_huge_channel_is_balanced_in_the_fast_file_and_nowhere_else(tmp_path):
    torch.manual_seed(1)
    model, x = Outlier().eval(), torch.randn(64, 32)
    flow = Flow(tmp_path, model, x).configure()
    flow.quantize()(x)
    assert read_record(flow.record)["a"].tensor_balance_factor == ()
    entries = [entry for entry in read_tensor_qparams(f"{flow.record}.qdq.json").values() if entry.balance is not None]
    assert len(entries) == 1
    assert max(range(32), key=entries[0].balance.__getitem__) == 5
    flow.save()
    expected = run_torch(model, x)
    error = {}
    for kind in ("fake_quant", "qdq"):
        found = run_onnx(tmp_path / "out" / f"q_{kind}_model.onnx", model, x)
        error[kind] = float(((found[0] - expected[0]) ** 2).mean())
    assert error["qdq"] < error["fake_quant"] / 2
