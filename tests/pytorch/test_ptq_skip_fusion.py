"""Batch norms that stay because the config (``skip_fusion_layers``) or the record (``skip_fusion``) says so."""

from __future__ import annotations

from dataclasses import replace

import onnx
import pytest
import torch
from ptq_helpers import Flow
from torch import Tensor, nn

import amct_pytorch as amct
from amct.errors import RecordError
from amct.record import read_record, write_record


class Norms(nn.Module):
    """A batch norm behind each type of layer that takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.conv_norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.up2d, self.up2d_norm = nn.ConvTranspose2d(4, 6, 2, stride=2), nn.BatchNorm2d(6)
        self.up1d, self.up1d_norm = nn.ConvTranspose1d(6, 5, 2, stride=2), nn.BatchNorm1d(5)
        self.up3d, self.up3d_norm = nn.ConvTranspose3d(5, 4, 2), nn.BatchNorm3d(4)
        self.fc, self.fc_norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.conv_norm(self.conv(x)))
        x = torch.relu(self.up2d_norm(self.up2d(x))).flatten(2)
        x = torch.relu(self.up1d_norm(self.up1d(x))).reshape(-1, 5, 8, 8, 8)
        x = torch.relu(self.up3d_norm(self.up3d(x))).mean((2, 3, 4))
        return self.fc_norm(self.fc(x))


LAYERS = ("conv", "up2d", "up1d", "up3d", "fc")


@pytest.fixture
def flow(tmp_path):
    torch.manual_seed(0)
    model = Norms()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.uniform_(module.weight, 0.5, 3)
            module.running_var.uniform_(0.5, 2)
    return Flow(tmp_path, model.eval(), torch.randn(2, 3, 8, 8))


def norms_in(path):
    return sum(node.op_type == "BatchNormalization" for node in onnx.load(path).graph.node)


@pytest.mark.parametrize("kept", [*LAYERS, None])
def test_each_type_of_layer_keeps_its_norm_and_the_record_says_so(flow, kept):
    """Scales are those of the float weight where the norm stays, of the folded weight where it does not."""
    calibrating = flow.simple("" if kept is None else f'skip_fusion_layers: "{kept}"').quantize()
    calibrating(flow.example)
    record = read_record(flow.record)
    assert [name for name, entry in record.items() if entry.skip_fusion] == [
        name for name in LAYERS if name == kept and name != "up3d"
    ]
    for name in LAYERS:
        is_norm = isinstance(calibrating.get_submodule(f"{name}_norm"), nn.modules.batchnorm._BatchNorm)
        assert is_norm == (name == kept)
    assert norms_in(flow.onnx) == (kept is not None)
    weight, scale = flow.model.fc.weight, record["fc"].scale_w[0]
    if kept != "fc":
        norm = flow.model.fc_norm
        weight = weight * (norm.weight / torch.sqrt(norm.running_var + norm.eps)).reshape(-1, 1)
    assert scale == pytest.approx(max(weight.max() / 127, -weight.min() / 128).item(), rel=1e-5)
    flow.save()
    assert norms_in(flow.folder / "out" / "q_fake_quant_model.onnx") == (kept is not None)


def test_without_fusion_every_layer_that_could_take_a_norm_has_skip_fusion(flow):
    flow.simple("do_fusion: false").quantize()(flow.example)
    assert [entry.skip_fusion for entry in read_record(flow.record).layers.values()] == [True] * 4


def test_skip_fusion_in_the_record_that_quantize_model_reads_is_obeyed(flow):
    """With DMQ it reads what ``quantize_preprocess`` has written; a user may add ``skip_fusion`` to an entry."""
    flow.simple('skip_fusion_layers: "conv" common_config { dmq_balancer { } }')
    amct.quantize_preprocess(flow.config, flow.record, flow.model, flow.example)(flow.example)
    record = read_record(flow.record)
    assert [name for name, entry in record.items() if entry.skip_fusion] == ["conv"]
    write_record(record.with_layers({"fc": replace(record["fc"], skip_fusion=True)}), flow.record)
    calibrating = flow.quantize()
    calibrating(flow.example)
    assert norms_in(flow.onnx) == 2
    assert isinstance(calibrating.fc_norm, nn.BatchNorm1d)
    assert [name for name, entry in read_record(flow.record).items() if entry.skip_fusion] == ["conv", "fc"]


def test_a_record_that_keeps_a_norm_which_is_folded_already_is_refused(flow):
    flow.configure().quantize()(flow.example)
    record = read_record(flow.record)
    write_record(record.with_layers({"fc": replace(record["fc"], skip_fusion=True)}), flow.record)
    with pytest.raises(RecordError, match='layer "fc" has skip_fusion, but quantize_model has folded "fc_norm"'):
        flow.save()
    assert not (flow.folder / "out").exists()
