from __future__ import annotations

import copy
import re

import pytest
import torch
from pytorch_nets import CASES, Case, DataDependent, ResNet, case, lively
from torch import nn
from torch.utils import _pytree as pytree

from amct.pytorch.capture.trace import trace
from amct.pytorch.folding import fuse
from amct.pytorch.inputs import example_inputs


def outputs(model: nn.Module, data) -> list[torch.Tensor]:
    inputs = example_inputs(model, data)
    with torch.no_grad():
        return pytree.tree_leaves(model(*inputs.args, **inputs.kwargs))


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Equal to float rounding: folding rounds each weight once, sums keep their length, so relative to the largest."""
    for one, other in zip(found, expected, strict=True):
        bound = 64 * torch.finfo(other.dtype).eps * max(float(other.abs().max()), 1.0)
        assert float((one - other).abs().max()) <= bound


def norms(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]


@pytest.mark.parametrize("item", CASES, ids=lambda item: item.name)
def test_outputs_stay_the_same(item: Case):
    model, data = item.model(), item.inputs()
    fused = fuse(trace(model, data))
    assert_same(outputs(fused.model, data), outputs(model, data))


def test_every_kind_of_layer_is_folded_into():
    fused = fuse(trace(case("folds").model(), case("folds").inputs()))
    assert norms(fused.model) == []
    assert fused.skips == ()
    assert fused.fusions == {
        "conv1": "norm1",
        "deconv1": "norm2",
        "conv2": "norm3",
        "deconv2": "norm4",
        "conv3": "norm5",
        "deconv3": "norm6",
        "linear": "norm7",
    }
    assert all(isinstance(fused.model.get_submodule(norm), nn.Identity) for norm in fused.fusions.values())
    assert fused.model.deconv1.bias is not None  # it had none


def test_resnet_loses_all_its_batch_norms():
    fused = fuse(trace(ResNet(), torch.randn(1, 3, 32, 32)))
    assert len(fused.fusions) == 19
    assert fused.skips == ()


def test_a_model_in_train_mode_is_left_as_it_is():
    model = lively(ResNet(1)).train()
    before = copy.deepcopy(model.state_dict())
    data = torch.randn(2, 3, 32, 32)
    fused = fuse(trace(model, data))
    assert model.training
    assert all(module.training for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not fused.model.training
    assert_same(outputs(fused.model, data), outputs(model.eval(), data))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_other_precisions(dtype: torch.dtype):
    model = case("folds").model().to(dtype)
    data = case("folds").inputs().to(dtype)
    fused = fuse(trace(model, data))
    assert len(fused.fusions) == 7
    assert {parameter.dtype for parameter in fused.model.parameters()} == {dtype}
    assert_same(outputs(fused.model, data), outputs(model, data))


def test_switched_off():
    model = case("folds").model()
    fused = fuse(trace(model, case("folds").inputs()), do_fusion=False)
    assert fused.fusions == {}
    assert norms(fused.model) == norms(model)
    assert {skip.reason for skip in fused.skips} == {"not folded: do_fusion is false"}


def test_skip_fusion_layers():
    fused = fuse(trace(case("folds").model(), case("folds").inputs()), skip=["conv2"])
    assert "conv2" not in fused.fusions
    assert [str(skip) for skip in fused.skips] == [
        '"norm3": not folded into "conv2": "conv2" is listed in skip_fusion_layers'
    ]


def test_a_model_that_cannot_be_captured_keeps_its_batch_norms():
    fused = fuse(trace(DataDependent(), torch.randn(2, 3, 6, 6)))
    assert fused.fusions == {}
    (skip,) = fused.skips
    assert skip.layer == "norm"
    assert "pytorch_nets.py:" in skip.reason


class Pair(nn.Module):
    """A layer and a batch norm, called one after the other unless ``forward`` does it otherwise."""

    def __init__(self, layer: nn.Module, norm: nn.Module, forward=None) -> None:
        super().__init__()
        self.layer, self.norm = layer, norm
        self.other = nn.Identity()
        self.how = forward

    def forward(self, x):
        return self.how(self, x) if self.how else self.norm(self.layer(x))


class NormAndActivation(nn.BatchNorm2d):
    def forward(self, input):  # noqa: A002
        return torch.relu(super().forward(input))


class NormAndShortcut(nn.BatchNorm2d):
    def forward(self, input):  # noqa: A002
        return input + super().forward(input)


class NormOfDouble(nn.BatchNorm2d):
    def forward(self, input):  # noqa: A002
        return super().forward(2 * input)


class NormTwice(nn.BatchNorm2d):
    def forward(self, input):  # noqa: A002
        return super().forward(super().forward(input))


class ScaledWeight(nn.Conv2d):
    def forward(self, input):  # noqa: A002
        return self._conv_forward(input, 2 * self.weight, self.bias)


class ScaledOutput(nn.Conv2d):
    def forward(self, input):  # noqa: A002
        return 2 * super().forward(input)


def shared_weight() -> Pair:
    pair = Pair(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), lambda self, x: self.other(self.norm(self.layer(x))))
    pair.other = nn.Conv2d(3, 3, 1)
    pair.other.weight = pair.layer.weight
    return pair


def twice(self, x):
    return self.norm(self.layer(self.norm(self.layer(x))))


def norm_twice(self, x):
    return self.norm(torch.relu(self.norm(self.layer(x))))


IMAGE = (2, 3, 6, 6)


@pytest.mark.parametrize(
    ("model", "shape", "reason"),
    [
        (Pair(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=False)), IMAGE, "affine=False"),
        (Pair(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False)), IMAGE, "no running statistics"),
        (Pair(nn.Conv2d(3, 4, 3, padding_mode="reflect", padding=1), nn.BatchNorm2d(4)), IMAGE, "padding_mode"),
        (Pair(nn.Conv2d(3, 4, 3), NormAndShortcut(4)), IMAGE, "NormAndShortcut changes its input .* or reads it"),
        (Pair(nn.Conv2d(3, 4, 3), NormOfDouble(4)), IMAGE, "NormOfDouble changes its input"),
        (Pair(nn.Conv2d(3, 4, 3), NormTwice(4)), IMAGE, "NormTwice changes its input .* or reads it"),
        (Pair(ScaledOutput(3, 4, 3), nn.BatchNorm2d(4)), IMAGE, "changes its output"),
        (Pair(ScaledWeight(3, 4, 3), nn.BatchNorm2d(4)), IMAGE, "computes its weight"),
        (Pair(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), twice), IMAGE, '"layer" is called 2 times'),
        (Pair(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), norm_twice), IMAGE, '"norm" is called 2 times'),
        (shared_weight(), IMAGE, '"layer" shares its weight'),
        (Pair(nn.Linear(6, 5), nn.BatchNorm1d(4)), (2, 4, 6), "3 dimensions; its channels are not on axis 1"),
        (
            Pair(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), lambda s, x: (y := s.layer(x)) + s.norm(y)),
            IMAGE,
            '"add" reads the same tensor',
        ),
        (
            Pair(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), lambda s, x: s.norm(torch.relu(s.layer(x)))),
            IMAGE,
            r'follows "relu" \(relu\)',
        ),
        (
            Pair(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), lambda s, x: (y := s.layer(x), s.norm(y))),
            IMAGE,
            "the model also returns",
        ),
        (
            Pair(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), lambda s, x: s.norm(s.layer(x)) * s.layer.weight.norm()),
            IMAGE,
            r'parameters of "layer" are also read elsewhere \(.*test_pytorch_fuse',
        ),
        (
            Pair(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), lambda s, x: s.norm(s.layer(x)) + s.norm.bias.sum()),
            IMAGE,
            'parameters of "norm" are also read elsewhere',
        ),
    ],
    ids=str,
)
def test_refusals_have_reasons_and_change_nothing(model: nn.Module, shape, reason):
    torch.manual_seed(0)
    lively(model).eval()
    data = torch.randn(shape)
    fused = fuse(trace(model, data))
    assert fused.fusions == {}
    assert any(re.search(reason, skip.reason) for skip in fused.skips), fused.skips
    assert_same(outputs(fused.model, data), outputs(model, data))


@pytest.mark.parametrize(
    "model",
    [
        Pair(nn.Conv2d(3, 4, 3), NormAndActivation(4)),
        Pair(nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3)), nn.BatchNorm2d(4)),
    ],
    ids=["activation inside the norm", "computed weight"],
)
def test_a_norm_with_an_activation_and_a_computed_weight_are_folded(model: nn.Module):
    torch.manual_seed(0)
    lively(model).eval()
    data = torch.randn(IMAGE)
    expected = outputs(model, data)
    fused = fuse(trace(model, data))
    assert fused.fusions == {"layer": "norm"}
    assert fused.skips == ()
    assert_same(outputs(fused.model, data), expected)
    assert_same(outputs(model, data), expected)


def test_a_result_that_is_not_finite_is_not_folded(caplog):
    model = Pair(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    model.layer.weight.data.fill_(1e30)
    model.norm.weight.data.fill_(1e30)
    fused = fuse(trace(model, torch.zeros(IMAGE)))
    assert fused.fusions == {}
    assert "not finite" in fused.skips[0].reason
    assert "not finite" in caplog.text
    assert torch.equal(fused.model.layer.weight, model.layer.weight)


def test_an_alias_of_a_folded_batch_norm_goes_too():
    model = Pair(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    model.other = model.norm
    fused = fuse(trace(model, torch.randn(IMAGE)))
    assert fused.fusions == {"layer": "norm"}
    assert norms(fused.model) == []
