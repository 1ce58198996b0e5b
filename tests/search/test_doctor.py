"""The doctor names the fault that was planted into a network, its layer, and what helps."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from three_doors import caffe_pair, onnx_file, uneven_network
from torch import nn

import amct.caffe
import amct.onnx_model
import amct.pytorch
from amct.cli import main
from amct.export.onnx.kept_weights import with_values
from amct.search.causes import (
    CHANNEL_ORDER,
    CLIPPED,
    FEW_BITS,
    FEW_SAMPLES,
    FIRST,
    LAST,
    OTHER_SCALE,
    OUTLIER_CHANNEL,
    OUTLIER_WEIGHT,
    PER_TENSOR,
    RESIDUAL,
    WRONG_MEAN,
)

GENERATOR = torch.Generator().manual_seed(3)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 16, 3, padding=1)
        self.conv3 = nn.Conv2d(16, 16, 3, padding=1)
        self.fc1 = nn.Linear(16 * 16, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = torch.relu(self.conv1(x))
        x = torch.relu(self.conv2(x))
        x = torch.relu(self.conv3(x))
        x = nn.functional.avg_pool2d(x, 2).flatten(1)
        return self.fc2(torch.relu(self.fc1(x)))


def net():
    torch.manual_seed(0)
    return Net().eval()


def pictures(count=32, scale=1.0, shift=0.0, colour=(0.0, 0.0, 0.0)):
    values = torch.randn(count, 3, 8, 8, generator=GENERATOR) * scale + shift
    return values + torch.tensor(colour).reshape(1, 3, 1, 1)


def large_channel(model):
    with torch.no_grad():
        model.conv1.weight[3] *= 60
        model.conv2.weight[:, 3] /= 60


def large_channel_of_a_linear_layer(model):
    with torch.no_grad():
        model.conv3.weight[5] *= 80
        model.conv3.bias[5] *= 80
        model.fc1.weight[:, 5 * 16 : 6 * 16] /= 80


def uneven_rows(model):
    with torch.no_grad():
        model.conv3.weight[1] = 0
        model.conv3.bias[1] = -1  # after the ReLU this channel is always 0,
        model.fc1.weight[7, 16:32] = 3.0  # so that these weights do nothing but fill the range


def one_large_weight(model):
    with torch.no_grad():
        model.conv3.weight[:, 2, 1, 1] = 12.0
        model.conv2.weight[2] /= 200
        model.conv2.bias[2] /= 200


DATA = pictures()
FAULTS = {
    "outlier channel of a convolution": (large_channel, {}, DATA, None, OUTLIER_CHANNEL, "conv2"),
    "outlier channel of a linear layer": (large_channel_of_a_linear_layer, {}, DATA, None, OUTLIER_CHANNEL, "fc1"),
    "one scale for uneven outputs": (uneven_rows, {}, DATA, None, PER_TENSOR, "fc1"),
    "one large weight": (one_large_weight, {}, DATA, None, OUTLIER_WEIGHT, "conv3"),
    "4 bits in one layer": (lambda _: None, {"conv2": 4}, DATA, None, FEW_BITS, "conv2"),
    "too few samples": (lambda _: None, {}, DATA[:1], None, FEW_SAMPLES, ""),
    "another scale": (lambda _: None, {}, DATA / 255, None, OTHER_SCALE, ""),
    "another mean": (lambda _: None, {}, DATA - 3, None, WRONG_MEAN, ""),
    "another order of colours": (
        lambda _: None, {}, pictures(colour=(0, 1.0, 2.0)).flip(1), pictures(colour=(0, 1.0, 2.0)), CHANNEL_ORDER, "",
    ),
    "a range that ends too early": (lambda _: None, {}, DATA.clamp(-0.7, 0.7), None, CLIPPED, "conv1"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault):
    plant, bits, calibration, data, cause, layer = FAULTS[fault]
    model = net()
    plant(model)
    config = None
    if bits:
        layers = {
            name: amct.pytorch.LayerConfig(weights=amct.pytorch.ArqSettings(num_bits=number))
            for name, number in bits.items()
        }
        config = amct.pytorch.QuantConfig(layers=layers)
    found = amct.pytorch.diagnose(model, list(calibration.split(8)), [DATA if data is None else data], config)
    assert (cause, layer) in {(each.name, each.layer) for each in found.causes[:2]}, str(found)
    assert found.remedies, str(found)
    assert found.remedies[0].gain > 1, str(found)
    seen = DATA if data is None else data
    healthy = amct.pytorch.diagnose(net(), list(seen.split(8)), [seen])
    lost = healthy.sqnr - found.sqnr
    if cause not in (FEW_SAMPLES,):
        assert lost > 1
    assert found.remedies[0].gain >= 0.8 * lost, f"lost {lost:.1f} dB\n{found}"


def test_a_healthy_model_has_no_cause():
    found = amct.pytorch.diagnose(net(), list(DATA.split(8)), [pictures()])
    assert not [each for each in found.causes if "sensitive" not in each.name], str(found)


@pytest.mark.parametrize("door", ["pytorch", "onnx", "caffe"])
def test_every_door_names_the_channel_and_equalizes_it(door, tmp_path):
    model = uneven_network()
    batches = [np.random.default_rng(seed).normal(0.2, 1.0, (4, 3, 8, 8)).astype(np.float32) for seed in range(8)]
    if door == "pytorch":
        batches = [torch.from_numpy(each) for each in batches]
        found = amct.pytorch.diagnose(model, batches[:4], batches[4:])
    elif door == "onnx":
        found = amct.onnx_model.diagnose(onnx_file(model, tmp_path), batches[:4], batches[4:])
    else:
        found = amct.caffe.diagnose(*caffe_pair(model, tmp_path), batches[:4], batches[4:])
    assert (found.causes[0].name, found.causes[0].layer) == (OUTLIER_CHANNEL, "pointwise"), str(found)
    (equalized,) = [each for each in found.remedies if each.equalize]
    assert equalized.gain > 6, str(found)


def test_what_cannot_be_tried_is_said():
    model = net()
    large_channel(model)
    balanced = amct.pytorch.QuantConfig(layers={"fc2": amct.pytorch.LayerConfig(migration_strength=0.5)})
    found = amct.pytorch.diagnose(model, list(DATA.split(8)), [pictures()], balanced)
    (name,) = found.impossible  # equalization and DMQ, which another layer has here, do not go together
    assert name == "equalize channels of all layers"
    assert "dmq_balancer and equalize" in found.impossible[name]
    assert f"skipped {name}: " in str(found)


def test_the_command_writes_the_config_of_the_best_remedy(tmp_path, capsys):
    model = net()
    large_channel(model)
    quantized = amct.pytorch.quantize(model, [DATA[:8]])  # it owns the weights
    onnx.save(with_values(quantized.prepared.float_model(None)), tmp_path / "net.onnx")
    np.save(tmp_path / "data.npy", DATA.numpy())
    arguments = [str(tmp_path / "net.onnx"), "--data", str(tmp_path / "data.npy"), "-o", str(tmp_path / "net.json")]
    assert main(["doctor", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "outlier channel" in printed
    assert "remedy" in printed
    assert main(["config", "check", str(tmp_path / "net.json"), "--model", str(tmp_path / "net.onnx")]) == 0


# -- other architectures -----------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """Three blocks beside a stream of 32 channels."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.first = nn.ModuleList(nn.Conv2d(32, 32, 3, padding=1) for _ in range(3))
        self.second = nn.ModuleList(nn.Conv2d(32, 32, 3, padding=1) for _ in range(3))
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        for first, second in zip(self.first, self.second, strict=True):
            x = torch.relu(x + second(torch.relu(first(x))))
        return self.head(x.mean((2, 3)))


class Dense(nn.Module):
    """Each layer reads what all before it made."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.grow = nn.Conv2d(16, 12, 3, padding=1)
        self.more = nn.Conv2d(28, 12, 3, padding=1)
        self.last = nn.Conv2d(40, 24, 1)
        self.head = nn.Linear(24, 10)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        x = torch.cat([x, torch.relu(self.grow(x))], 1)
        x = torch.cat([x, torch.relu(self.more(x))], 1)
        return self.head(torch.relu(self.last(x)).mean((2, 3)))


class Separable(nn.Module):
    """Depthwise and pointwise convolutions."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 3, 2)
        self.deep = nn.Conv2d(24, 24, 3, 1, 1, groups=24)
        self.point = nn.Conv2d(24, 48, 1)
        self.head = nn.Linear(48, 10)

    def forward(self, x):
        x = nn.functional.hardswish(self.stem(x))
        return self.head(nn.functional.hardswish(self.point(torch.relu(self.deep(x)))).mean((2, 3)))


class Signal(nn.Module):
    """Convolutions over time."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv1d(4, 24, 5, padding=2), nn.Conv1d(24, 24, 5, padding=2)
        self.third, self.head = nn.Conv1d(24, 24, 5, padding=2), nn.Linear(24, 5)

    def forward(self, x):
        x = torch.relu(self.third(torch.relu(self.second(torch.relu(self.first(x))))))
        return self.head(x.mean(-1))


class Table(nn.Module):
    """A network of linear layers."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(20, 64), nn.Linear(64, 64), nn.Linear(64, 3)

    def forward(self, x):
        act = nn.functional.silu
        return self.third(act(self.second(act(self.first(x)))))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.lstm, self.head = nn.Linear(10, 20), nn.LSTM(20, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.lstm(torch.relu(self.first(x)))[0][:, -1])


class Attentive(nn.Module):
    """A norm in front of two linear layers."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Linear(12, 24), nn.LayerNorm(24)
        self.wide, self.narrow, self.head = nn.Linear(24, 96), nn.Linear(96, 24), nn.Linear(24, 7)

    def forward(self, x):
        x = self.embed(x)
        x = x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))
        return self.head(x.mean(1))


def loud_lstm(model):
    model.first.weight[11] *= 16
    model.first.bias[11] *= 16
    model.lstm.weight_ih_l0[:, 11] /= 16


def loud_norm(model):
    model.norm.weight[7] *= 40
    model.norm.bias[7] *= 40
    model.wide.weight[:, 7] /= 40


def one_weight_of_a_row(model):
    model.first.weight[17] /= 64
    model.first.bias[17] /= 64
    model.second.weight[23, 17] *= 128


def loud_stream(model):
    model.stem.weight[5] *= 60
    model.stem.bias[5] *= 60
    for first, second in zip(model.first, model.second, strict=True):
        first.weight[:, 5] /= 60
        second.weight[5] *= 60
        second.bias[5] *= 60
    model.head.weight[:, 5] /= 60


def loud_growth(model):
    model.grow.weight[4] *= 70
    model.grow.bias[4] *= 70
    model.more.weight[:, 20] /= 70
    model.last.weight[:, 20] /= 70


def loud_signal(model):
    model.first.weight[5] *= 70
    model.first.bias[5] *= 70
    model.second.weight[:, 5] /= 70


def edges(model):
    model.stem.weight -= model.stem.weight.mean((2, 3), keepdim=True)
    for name, each in model.named_parameters():
        if name.endswith("bias"):
            each.zero_()


def common_part(model):
    model.second.bias += 40
    model.third.weight -= model.third.weight.mean(1, keepdim=True)


def draw(*shape):
    return torch.randn(*shape, generator=GENERATOR)


ROWS, SIGNALS = draw(32, 20), draw(16, 4, 40)
WORDS, STEPS = draw(32, 9, 12), draw(32, 15, 10)
BROKEN = torch.cat([ROWS[:20], 8 * ROWS[20:21], ROWS[21:]])
NARROW = amct.pytorch.IfmrSettings(max_percentile=0.8, min_percentile=0.8, search_range=(0.3, 0.5))
CLIPPING = amct.pytorch.QuantConfig(layers={"second": amct.pytorch.LayerConfig(activations=NARROW)})
BRIGHT = draw(32, 3, 16, 16) + 60 * draw(32, 1, 1, 1)
OTHERS = {
    "residual stream": (Residual, loud_stream, DATA, DATA, None, RESIDUAL, "head"),
    "concatenation": (Dense, loud_growth, DATA, DATA, None, OUTLIER_CHANNEL, "last"),
    "signal over time": (Signal, loud_signal, SIGNALS, SIGNALS, None, OUTLIER_CHANNEL, "second"),
    "edges of bright pictures": (Separable, edges, BRIGHT, BRIGHT, None, FIRST, "stem"),
    "large common part": (Table, common_part, ROWS, ROWS, None, LAST, "third"),
    "two rows": (Table, lambda _: None, 0.6 * ROWS[:2], ROWS, None, FEW_SAMPLES, ""),
    "rows in another unit": (Table, lambda _: None, ROWS / 10, ROWS, None, OTHER_SCALE, ""),
    "one broken sample of many": (Table, lambda _: None, BROKEN, ROWS, None, OTHER_SCALE, ""),
    "channel before an LSTM": (Recurrent, loud_lstm, STEPS, STEPS, None, OUTLIER_CHANNEL, "lstm"),
    "gain of a norm": (Attentive, loud_norm, WORDS, WORDS, None, OUTLIER_CHANNEL, "wide"),
    "one weight of a linear layer": (Table, one_weight_of_a_row, ROWS, ROWS, None, OUTLIER_WEIGHT, "second"),
    "a config that clips": (Table, lambda _: None, ROWS, ROWS, CLIPPING, CLIPPED, "second"),
}


@pytest.mark.parametrize("fault", OTHERS)
def test_a_fault_in_another_architecture_is_named_and_healed(fault):
    kind, plant, calibration, data, config, cause, layer = OTHERS[fault]
    torch.manual_seed(5)
    model = kind().eval()
    torch.manual_seed(5)
    healthy = kind().eval()
    with torch.no_grad():
        plant(model)
    found = amct.pytorch.diagnose(model, list(calibration.split(8)), [data], config)
    assert (cause, layer) in {(each.name, each.layer) for each in found.causes[:2]}, str(found)
    lost = amct.pytorch.diagnose(healthy, list(data.split(8)), [data]).sqnr - found.sqnr
    assert lost > 1
    assert found.remedies[0].gain >= 0.8 * lost, f"lost {lost:.1f} dB\n{found}"


def test_all_readers_of_a_stream_are_named_and_healed_together():
    torch.manual_seed(5)
    model = Residual().eval()
    with torch.no_grad():
        loud_stream(model)
    found = amct.pytorch.diagnose(model, list(DATA.split(8)), [DATA])
    guilty = [each for each in found.causes if each.name == RESIDUAL]
    assert {each.layer for each in guilty} == {"head", "first.0", "first.1", "first.2"}
    assert all("channel 5 " in each.text and "of 4 layers, first.0 first" in each.text for each in guilty)
    float_head = next(each for each in found.remedies if each.name == "float: head")
    assert found.remedies[0].gain > float_head.gain + 5


class _Messages(nn.Module):
    """A layer, what it says along the edges of a graph, another layer: the two inputs have different first axes."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x, edges):
        return self.last(self.first(x).relu()[edges])


def test_inputs_that_cannot_be_divided_into_samples_stay_whole_batches():
    torch.manual_seed(0)
    data = [(torch.randn(10, 8), torch.randint(0, 10, (20,)))]
    found = amct.pytorch.diagnose(_Messages().eval(), data * 2, data)
    assert {cause.layer for cause in found.causes if cause.layer} <= {"first", "last"}
    assert found.sqnr > 20
