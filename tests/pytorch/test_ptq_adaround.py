"""AdaRound in the flow: which layers learn from what, and that it pays."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from ptq_helpers import difference, images, run_onnx, run_torch, small
from pytorch_nets import case
from torch import nn
from torch.nn import functional

import amct.pytorch as amct
from amct.errors import CalibrationError
from amct.pytorch.adaround import OutputCache, _collect, _FloatOutputs, activation_after
from amct.pytorch.capture.trace import trace
from amct.pytorch.folding import fuse

LEARN = amct.AdaRoundSettings(num_bits=4, num_iteration=60)


def config(**layers):
    common = amct.LayerConfig(weights=LEARN)
    return amct.QuantConfig(common=common, layers=layers)


# -- the activation behind a layer ---------------------------------------------------------------------------------


FUNCTIONS = {
    "relu": torch.relu,
    "relu_": lambda x: x.relu_(),
    "sigmoid": torch.sigmoid,
    "tanh": nn.Tanh(),
    "leaky": nn.LeakyReLU(0.2),
    "prelu": nn.PReLU(init=0.3),
    "relu6": nn.ReLU6(),
    "hardtanh06": nn.Hardtanh(0, 6),
    "clamp06": lambda x: x.clamp(0, 6),
    "gelu": nn.GELU(),
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "rrelu": nn.RReLU(0.1, 0.5),
    "clamp01": lambda x: x.clamp(0, 1),
    "elu": functional.elu,
    "nothing": lambda x: x * 1,
}


class Activations(nn.Module):
    """Every activation that AdaRound knows behind a layer, and some that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(4, 4) for name in FUNCTIONS})
        self.functions = nn.ModuleDict(
            {name: function for name, function in FUNCTIONS.items() if isinstance(function, nn.Module)}
        )

    def forward(self, x):
        for name, layer in self.layers.items():
            x = (self.functions[name] if name in self.functions else FUNCTIONS[name])(layer(x))
        return x


def test_activations_are_recognized_and_computed_as_the_model_does():
    torch.manual_seed(0)
    model = Activations().eval()
    traced = trace(model, torch.randn(3, 4))
    fused = fuse(traced)
    x = torch.linspace(-8, 8, 400).reshape(-1, 4)
    unknown = set()
    for name in model.layers:
        found = activation_after(f"layers.{name}", traced, fused)
        if found is None:
            unknown.add(name)
            continue
        function = model.functions[name] if name in model.functions else FUNCTIONS[name]
        assert torch.allclose(found(x.clone()), function(x.clone())), name
    assert unknown == {"clamp01", "elu", "nothing"}


def test_an_activation_counts_only_when_it_alone_reads_the_layer():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Conv2d(3, 3, 1)
            self.bn = nn.BatchNorm2d(3)
            self.b = nn.Conv2d(3, 3, 1)

        def forward(self, x):
            x = torch.relu(self.bn(self.a(x)))
            y = self.b(x)
            return torch.relu(y) + y

    model = Two().eval()
    traced = trace(model, images())
    found = activation_after("a", traced, fuse(traced))  # behind the folded batch norm
    assert found is not None
    assert torch.equal(found(torch.tensor([-1.0, 2.0])), torch.tensor([0.0, 2.0]))
    assert activation_after("b", traced, fuse(traced)) is None
    assert activation_after("a", traced, fuse(traced, do_fusion=False)) is None


# -- learning ------------------------------------------------------------------------------------------------------


def output_error(quantized, model, x):
    return difference(run_torch(quantized.model, x), run_torch(model, x))


@pytest.mark.parametrize("mode", ["plain", "fast"])
def test_learned_rounding_is_nearer_to_the_float_model_than_nearest(mode):
    model, data = small(), [images(seed, count=16) for seed in range(2)]
    nearest = amct.QuantConfig(
        common=amct.LayerConfig(weights=amct.ArqSettings(num_bits=4)),
    )
    settings = amct.AdaRoundSettings(num_bits=4, num_iteration=300)
    learned = amct.quantize(model, data, amct.QuantConfig(common=amct.LayerConfig(weights=settings)), adaround=mode)
    plain = amct.quantize(model, data, nearest)
    error = {found.layer: found.mean_squared_error for found in learned.compare(data)}
    before = {found.layer: found.mean_squared_error for found in plain.compare(data)}
    assert error["c2"] < before["c2"]
    assert error["fc"] < before["fc"]
    again = amct.quantize(model, data, amct.QuantConfig(common=amct.LayerConfig(weights=settings)), adaround=mode)
    assert torch.equal(again.model.c2.weight, learned.model.c2.weight)  # chance is seeded


@pytest.mark.parametrize("mode", ["plain", "fast"])
def test_every_kind_of_layer_learns_and_the_files_hold_what_was_learned(mode, tmp_path):
    net = case("mix")
    model, x = net.model(), net.inputs()
    quantized = amct.quantize(model, [x], config(), adaround=mode)
    learned = {name for name, weights in quantized.prepared.weights.items() if weights.custom_rounding}
    assert learned == {"conv", "grp", "dw", "dil", "deconv", "deconvg", "fc", "fcnb"}
    quantized.save(tmp_path / "q", placement="exact", target="exact8")
    expected = run_torch(quantized.model, x)
    for file in ("q_fake_quant_model.onnx", "q_qdq_model.onnx"):
        # The same integers in both: nothing but float rounding is left (sums of up to 512 products).
        assert difference(run_onnx(tmp_path / file, model, x), expected) <= 512 * 2**-24 * np.abs(expected[0]).max()


def test_learned_weights_of_balanced_layers_reach_the_files(tmp_path):
    model, x = small(), images()
    common = amct.LayerConfig(weights=LEARN, migration_strength=0.5)
    quantized = amct.quantize(model, [x], amct.QuantConfig(common=common))
    assert quantized.record["c2"].tensor_balance_factor
    quantized.save(tmp_path / "q", placement="exact", target="exact8")
    expected = run_torch(quantized.model, x)
    assert difference(run_onnx(tmp_path / "q_fake_quant_model.onnx", model, x), expected) <= 1e-5


def test_zero_iterations_round_to_nearest():
    settings = amct.AdaRoundSettings(num_iteration=0)
    quantized = amct.quantize(small(), images(), amct.QuantConfig(common=amct.LayerConfig(weights=settings)))
    (weight,) = quantized.prepared.weights["c2"].weights
    folded = quantized.prepared.fused.model.c2.weight
    scales = weight.qparams.scale.reshape(-1, 1, 1, 1)
    assert torch.equal(weight.real(), (folded / scales).round().clamp(-128, 127) * scales)


def test_layers_without_data_are_named():
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 3)
            self.b = nn.Linear(3, 3)

        def forward(self, x):
            return self.a(x) if x.sum() > 0 else self.b(self.a(x))

    example, data = -torch.ones(2, 3), torch.ones(2, 3)
    given = iter([example])  # whoever looks at the model sees both branches
    with pytest.raises(CalibrationError, match='layer "b": no data reaches it, so AdaRound cannot learn'):
        amct.quantize(Branch(), data, config(), inputs=lambda batch: next(given, batch))


def test_batches_of_different_sizes(caplog):
    class Free(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, padding="same")
            self.fc = nn.Linear(4, 2)

        def forward(self, x):
            return self.fc(self.conv(x).permute(0, 2, 3, 1)).mean((1, 2))

    data = [images(), torch.randn(3, 3, 6, 6), images(1)]
    with caplog.at_level(logging.INFO):
        quantized = amct.quantize(Free().eval(), data, config())
    assert "AdaRound learns from 2 of 3 batches" in caplog.text
    assert quantized.prepared.weights["fc"].custom_rounding


def test_inputs_come_from_the_quantized_model_and_outputs_from_the_float_model():
    model = small()
    x = images()
    quantized = amct.quantize(model, [x], config())
    preparation = quantized.prepared
    copied = preparation.quantized_copy()
    inputs = _collect(copied, ["c2"], [((x,), {})], inputs=True)["c2"]
    with torch.no_grad():
        assert torch.equal(inputs[0], torch.relu(copied.c(x)))
        wanted = _FloatOutputs(preparation.fused.model, ["c", "c2"], [((x,), {})])
        for name in ("c", "c2"):
            outputs = wanted.of(name)
            assert len(outputs) == 1
        assert torch.equal(outputs[0], preparation.fused.model.c2(torch.relu(preparation.fused.model.c(x))))
    assert not copied.c2._forward_pre_hooks


# -- forwards that skip what is finished ---------------------------------------------------------------------------


def counted_forwards(model, monkeypatch):
    """How often each layer type's own forward runs."""
    counts = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):

            def forward(x, original=module.forward, name=name):
                counts[name] = counts.get(name, 0) + 1
                return original(x)

            monkeypatch.setattr(module, "forward", forward)
    return counts


def test_finished_modules_are_not_computed_again_and_give_the_same(monkeypatch):
    net = case("resnet20")
    model, names = net.model(), ["conv1", "layer1.0.conv1", "layer1.0.conv2", "layer1.1.conv1", "layer2.0.conv1"]
    plain = net.model()
    counts = counted_forwards(model, monkeypatch)
    finished = OutputCache(model, [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d)])
    batches = [((torch.randn(2, 3, 32, 32),), {}) for _ in range(2)]
    for name in names:
        found = _collect(model, [name], batches, inputs=True, begin=finished.begin)[name]
        with torch.no_grad():
            expected = _collect(plain, [name], batches, inputs=True)[name]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        for copy in (model, plain):  # what is learned
            nn.init.constant_(copy.get_submodule(name).weight, 0.01)
        finished.finish(name)
    assert counts["conv1"] == 2  # once a batch, after it was learned
    assert counts["layer1.0.conv1"] == 2
    # Of layer1.0 the block, not its parts; of layer1.1 the parts before conv2, which is still to be learned.
    assert {name for name, _ in finished._outputs} == {"conv1", "bn1", "layer1.0", "layer1.1.conv1", "layer1.1.bn1"}


def test_modules_called_twice_or_beyond_the_budget_are_computed_again(monkeypatch):
    net = case("shared")
    model = net.model()
    counts = counted_forwards(model, monkeypatch)
    batches = [((net.inputs(),), {})]
    finished = OutputCache(model, ["b", "c"])
    for _ in range(2):
        _collect(model, ["c"], batches, inputs=True, begin=finished.begin)
    assert counts["a"] == 4
    small_memory = net.model()
    counts = counted_forwards(small_memory, monkeypatch)
    finished = OutputCache(small_memory, ["c"], budget=10)
    for _ in range(2):
        _collect(small_memory, ["c"], batches, inputs=True, begin=finished.begin)
    assert counts["b"] == 2


def test_a_shuffling_loader_pairs_inputs_with_their_own_outputs():
    model = small()
    data = torch.cat([images(seed, count=8) for seed in range(4)])
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=8, shuffle=True)
    errors = []
    for weights in (amct.AdaRoundSettings(num_bits=4, num_iteration=300), amct.ArqSettings(num_bits=4)):
        torch.manual_seed(0)
        layers = {"c2": amct.LayerConfig(weights=weights)}
        quantized = amct.quantize(model, loader, amct.QuantConfig(layers=layers, batch_num=4))
        errors.append({found.layer: found.mean_squared_error for found in quantized.compare(data)}["c2"])
    assert errors[0] < errors[1]


class SamePadding(nn.Conv2d):
    """Pads its input at one side, as TensorFlow does."""

    def forward(self, x):
        return functional.conv2d(functional.pad(x, (0, 1, 0, 1)), self.weight, self.bias, self.stride)


@pytest.mark.parametrize("mode", ["plain", "fast"])
def test_a_layer_whose_operation_has_other_settings_is_left_to_arq(mode, caplog):
    torch.manual_seed(0)
    net = nn.Sequential(SamePadding(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 1)).eval()
    quantized = amct.quantize(net, [images()], config(), adaround=mode)
    assert [weights.custom_rounding for weights in quantized.prepared.weights.values()] == [False, True]
    assert 'layer "0": its forward uses other settings than its own, so ARQ rounds it' in caplog.text


@pytest.mark.parametrize("mode", ["plain", "fast"])
def test_a_layer_that_pads_its_input_learns_from_what_its_operation_reads(mode):
    torch.manual_seed(0)
    net, data = nn.Sequential(SamePadding(3, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 2, 1)).eval(), images()
    (given,) = _collect(net, ["0"], [((data,), {})], inputs=True)["0"]
    assert given.shape[2:] == (data.shape[2] + 1, data.shape[3] + 1)
    assert "forward" not in vars(net[0])
    quantized = amct.quantize(net, [data], config(), adaround=mode)
    assert quantized.layers == ("0", "2")
    assert quantized.prepared.weights["0"].custom_rounding
