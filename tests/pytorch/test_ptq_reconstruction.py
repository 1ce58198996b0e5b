"""Reconstruction by blocks: which blocks there are, that none becomes worse, resuming, repeating, files."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn import functional

import amct.pytorch as amct
from amct.errors import ArgumentError, ArgumentTypeError
from amct.pipeline import flow
from amct.pipeline.blocks import block, reconstruction
from amct.pipeline.blocks.reconstruction import Reconstruction, _Clock
from amct.pytorch.blocks.regions import RegionProgram
from amct.pytorch.folding import fuse
from amct.pytorch.onnx.float_onnx import trace_for_files

FOUR = amct.LayerConfig(activations=amct.IfmrSettings(num_bits=4), weights=amct.ArqSettings(num_bits=4))
CONFIG = amct.QuantConfig(common=FOUR, layers={"stem": amct.LayerConfig()})


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        return functional.relu_(self.second(self.norm(self.first(x)).relu()) + x)


class Network(nn.Module):
    """A stem, two residual blocks, a pooling and a linear layer; activations in place, and a view of the batch size."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.stem, self.act = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True)
        self.blocks = nn.Sequential(Residual(8), Residual(8))
        self.fc = nn.Linear(8, 5)
        for norm in (self.blocks[0].norm, self.blocks[1].norm):
            norm.running_mean.uniform_(-0.5, 0.5)
            norm.running_var.uniform_(0.5, 2)

    def forward(self, x):
        x = self.blocks(self.act(self.stem(x)))
        return self.fc(functional.adaptive_avg_pool2d(x, 1).view(x.shape[0], -1))


def images(count=48, seed=0):
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module", autouse=True)
def _few_iterations():
    with pytest.MonkeyPatch.context() as patch:
        settings = dataclasses.replace(reconstruction.SETTINGS, num_iteration=120, learning_rate=0.03, batch_size=16)
        patch.setattr(reconstruction, "SETTINGS", settings)
        yield


@pytest.fixture(scope="module")
def model():
    return Network().eval()


@pytest.fixture(scope="module")
def plain(model):
    return amct.quantize(model, list(images().split(16)), CONFIG)


@pytest.fixture(scope="module")
def learned(model):
    return amct.quantize(model, list(images().split(16)), CONFIG, reconstruct="blocks")


# -- blocks ------------------------------------------------------------------------------------------------------------


def regions_of(model, data):
    traced = trace_for_files(model, data)
    fused = fuse(traced)
    program = RegionProgram(traced, fused, traced.layers)
    return program, program.regions(), program.constants(fused.model)


def test_residual_blocks_are_blocks_and_the_pooling_belongs_to_what_reads_it(model):
    _, regions, _ = regions_of(model, images(2))
    layers = [region.layers for region in regions]
    assert layers == [["stem"], ["blocks.0.first", "blocks.0.second"], ["blocks.1.first", "blocks.1.second"], ["fc"]]
    assert all(len(region.inputs) == len(region.outputs) == 1 for region in regions)


def test_blocks_one_after_the_other_are_the_model_for_any_number_of_samples(model):
    program, regions, constants = regions_of(model, images(2))
    data = images(5)
    values = program.given(((data,), {}))
    with torch.no_grad():
        for region in regions:
            values = dict(zip(region.outputs, program.run(region, constants, values), strict=True))
        assert torch.allclose(next(iter(values.values())), model(data), atol=1e-5)
    assert all(program.is_by_sample(region, constants, values) for region in regions)


class Dense(nn.Module):
    """Every layer reads all earlier ones: no single tensor leads on before the end."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3 + 2 * place, 2, 3, padding=1) for place in range(14))

    def forward(self, x):
        made = [x]
        for layer in self.layers:
            made.append(layer(torch.cat(made, 1)).relu())
        return torch.cat(made, 1)


def test_a_part_with_many_layers_is_divided_between_them():
    model = Dense().eval()
    program, regions, constants = regions_of(model, images(2))
    assert [len(region.layers) for region in regions] == [1] * 14
    data = images(3)
    values = program.given(((data,), {}))
    with torch.no_grad():
        for region in regions:
            values |= dict(zip(region.outputs, program.run(region, constants, values), strict=True))
        assert torch.allclose(values[program.outputs[0]], model(data), atol=1e-5)


class Chain(nn.Module):
    """Three layers of one module without a sum, as an inverted bottleneck."""

    def __init__(self):
        super().__init__()
        self.part = nn.Sequential(
            nn.Conv2d(3, 6, 1), nn.ReLU6(), nn.Conv2d(6, 6, 3, groups=6), nn.ReLU6(), nn.Conv2d(6, 4, 1)
        )
        self.fc = nn.Linear(4 * 36, 5)

    def forward(self, x):
        return self.fc(self.part(x).flatten(1))


def test_few_layers_of_one_module_are_one_block():
    _, regions, _ = regions_of(Chain().eval(), images(2))
    assert [region.layers for region in regions] == [["part.0", "part.2", "part.4"], ["fc"]]


# -- what is learned ---------------------------------------------------------------------------------------------------


def test_no_block_ends_with_a_larger_error_and_the_residual_blocks_with_a_smaller_one(model, plain):
    passes = flow.Passes(amct_batches(model), None, None)
    found = Reconstruction.of(plain.prepared, plain.qparams)
    found.run(passes)
    assert len(found.errors) == 4
    assert all(after <= before for before, after in found.errors.values())
    assert sum(after < 0.95 * before for before, after in found.errors.values()) >= 2


def amct_batches(model):
    from amct.pytorch.inputs import torch_batches

    return torch_batches(model, list(images().split(16)))


def test_a_block_that_becomes_worse_stays_as_it_was(model, plain, monkeypatch):
    settings = dataclasses.replace(reconstruction.SETTINGS, learning_rate=50.0, num_iteration=3)
    monkeypatch.setattr(reconstruction, "SETTINGS", settings)
    monkeypatch.setattr(block, "_BIAS_RATE", 5.0)
    found = Reconstruction.of(plain.prepared, plain.qparams)
    found.run(flow.Passes(amct_batches(model), None, None))
    prepared, layers = found.result()
    assert all(after <= before for before, after in found.errors.values())
    assert any(after == before for before, after in found.errors.values())
    unchanged = [name for name in layers if prepared.weights[name] is plain.prepared.weights[name]]
    assert unchanged
    assert all(layers[name].inputs == plain.qparams[name].inputs for name in unchanged)


def test_weights_lie_on_their_grid_and_clips_are_learned_below_eight_bits_only(plain, learned):
    for weights in learned.prepared.weights.values():
        (weight,) = weights.weights
        steps = weight.real().flatten(1) / weight.qparams.scale.reshape(-1, 1)
        assert torch.allclose(steps, steps.round(), atol=1e-4)
        bits = weight.qparams.bits
        assert steps.round().min() >= -(2 ** (bits - 1))
        assert steps.round().max() <= 2 ** (bits - 1) - 1
    moved = {name for name, each in plain.qparams.items() if learned.qparams[name].input != each.input}
    assert "stem" not in moved
    assert len(moved) >= 2


def test_the_same_data_give_the_same_bytes(model, learned, tmp_path):
    again = amct.quantize(model, list(images().split(16)), CONFIG, reconstruct="blocks")
    for quantized, name in ((learned, "a"), (again, "b")):
        quantized.save(tmp_path / name / "net", ["qdq", "deploy", "fake_quant", "record"], check=False)
    for file in sorted((tmp_path / "a").iterdir()):
        if file.suffix != ".json":  # which tells the time
            assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()


def test_the_files_compute_what_the_simulation_does(learned, tmp_path):
    learned.save(tmp_path / "net", target="exact8", check=False)
    data = images(16, seed=4)
    with torch.no_grad():
        expected = learned(data).numpy()
    for name in ("net_qdq_model.onnx", "net_fake_quant_model.onnx"):
        session = onnxruntime.InferenceSession(str(tmp_path / name), providers=["CPUExecutionProvider"])
        (found,) = session.run(None, {session.get_inputs()[0].name: data.numpy()})
        # A value between two of 16 integers may be rounded either way; noise of that kind is far below that of 4 bits.
        assert np.square(found - expected).mean() < 0.02 * np.square(expected).mean()
        assert np.median(np.abs(found - expected)) < 1e-4


def test_a_variant_keeps_the_learned_biases(learned):
    made, layers = learned.prepared.variant(learned.prepared.plan, learned.qparams)
    found = {name: each.lost for name, each in learned.qparams.items() if each.lost is not None}
    assert len(found) >= 2
    assert all(torch.equal(layers[name].lost, lost) for name, lost in found.items())
    assert set(made.weights) == set(learned.layers)


# -- in one call -------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Ends a run."""


def test_it_goes_on_after_a_kill_with_the_same_result(model, learned, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(flow, "SECONDS", 0.0)
    monkeypatch.setattr(flow, "MOST_SHARE", float("inf"))
    learn, runs = Reconstruction._learn, []

    def killed(self, network, number):
        runs.append(number)
        if runs == [0, 1, 2]:
            raise Killed
        learn(self, network, number)

    monkeypatch.setattr(Reconstruction, "_learn", killed)
    options = {"reconstruct": "blocks", "resume": tmp_path / "net.calibration.npz"}
    with pytest.raises(Killed):
        amct.quantize(model, list(images().split(16)), CONFIG, **options)
    with caplog.at_level(logging.INFO, logger="amct"):
        again = amct.quantize(model, list(images().split(16)), CONFIG, **options)
    assert runs == [0, 1, 2, 2, 3]
    assert "reconstruction goes on after 2 blocks" in caplog.text
    assert again.record == learned.record
    for name in learned.layers:
        assert torch.equal(
            again.prepared.weights[name].weights[0].real(), learned.prepared.weights[name].weights[0].real()
        )
        lost = learned.qparams[name].lost
        assert lost is None or torch.equal(again.qparams[name].lost, lost)


class Undecided(nn.Module):
    """Its forward depends on values, so it has no program."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return self.conv(x) if x.sum() > 0 else self.conv(-x)


def test_a_model_without_a_program_stays_as_it_is_and_says_why(caplog):
    quantized = amct.quantize(Undecided().eval(), [images(8)], reconstruct="blocks")
    assert "no block is reconstructed: the model cannot be captured as a program" in caplog.text
    assert not quantized.prepared.weights["conv"].custom_rounding


class Recurrent(nn.Module):
    """A layer before an LSTM, whose operation in the program has no gradients."""

    def __init__(self):
        super().__init__()
        self.before, self.lstm, self.fc = nn.Linear(6, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x):
        return self.fc(self.lstm(self.before(x))[0])


def test_what_cannot_learn_stays_as_it_is_and_the_rest_learns():
    model = nn.Sequential(Recurrent(), nn.ReLU()).eval()
    quantized = amct.quantize(model, [torch.randn(8, 5, 6) for _ in range(2)], reconstruct="blocks")
    learned = {name: weights.custom_rounding for name, weights in quantized.prepared.weights.items()}
    assert learned["0.lstm"] is False
    assert set(learned) == {"0.before", "0.lstm", "0.fc"}
    assert quantized(torch.randn(3, 5, 6)).shape == (3, 5, 4)


@pytest.mark.parametrize("name", ["lstm_bidirectional", "gru_state_batch_first", "transformer", "mix", "keywords"])
def test_unusual_networks_learn_or_say_why_not(name):
    from pytorch_nets import case

    model = case(name).model()
    quantized = amct.quantize(model, [case(name).inputs()], reconstruct="blocks")
    assert len(quantized.layers) > 0


def test_it_takes_the_place_of_adaround(model, monkeypatch):
    monkeypatch.setattr("amct.pytorch.preparation.learn_rounding", lambda *_, **__: pytest.fail("AdaRound was run"))
    ada = amct.LayerConfig(weights=amct.AdaRoundSettings(num_bits=4))
    quantized = amct.quantize(model, [images()], amct.QuantConfig(layers={"blocks.0.first": ada}), reconstruct="blocks")
    assert quantized.prepared.weights["blocks.0.first"].custom_rounding


def test_the_user_s_seconds_are_divided_by_what_blocks_cost(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(reconstruction.time, "monotonic", lambda: now[0])
    clock = _Clock(10.0, [0.01, 0.03])
    first = clock.iterations(0)
    assert first == int(10 / (10 * 0.04))
    now[0] = 4.0
    clock.note(0, first, 4.0)
    assert clock.iterations(1) == max(20, int(6 / (4.0 / first / 0.01 * 0.03)))
    assert _Clock(None, [1.0]).iterations(0) == reconstruction.SETTINGS.num_iteration


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"reconstruct": "layers"}, ArgumentError, 'expected "blocks" or None'),
        ({"reconstruct": "blocks", "reconstruct_seconds": "10"}, ArgumentTypeError, "expected a number, got str"),
        ({"reconstruct": "blocks", "reconstruct_seconds": 0}, ArgumentError, "expected a positive number"),
        ({"reconstruct_seconds": 10}, ArgumentError, "nothing is reconstructed"),
    ],
)
def test_options_that_cannot_be_used(model, options, error, match):
    with pytest.raises(error, match=match):
        amct.quantize(model, [images(8)], **options)


def test_fewer_batches_where_they_take_too_much_memory(model, monkeypatch, caplog):
    monkeypatch.setattr(reconstruction, "_MOST_BYTES", 1)
    amct.quantize(model, list(images().split(16)), CONFIG, reconstruct="blocks")
    assert "reconstruction learns from 1 of 3 batches" in caplog.text
