"""QuantizedModel.report and compare: what they measure is what the models do."""

from __future__ import annotations

import json
import math
import re
from collections import OrderedDict

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import amct.pytorch as amct
from amct.config.plan import config_text
from amct.errors import ArgumentError, ArgumentTypeError, CalibrationError, FileError, ModelError


class InPlaceNet(nn.Module):
    """A folded batch norm, ReLUs that work in place, a ReLU called twice, a layer that stays float."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.LayerNorm(8)
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.conv2(x))
        return self.fc(self.norm(x.mean((2, 3))))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    net = InPlaceNet()
    net.bn1.running_mean.normal_()
    net.bn1.running_var.uniform_(0.5, 2)
    return net.eval()


@pytest.fixture(scope="module")
def batches():
    generator = torch.Generator().manual_seed(4)
    return [(torch.randn(size, 3, 8, 8, generator=generator), torch.arange(size) % 5) for size in (8, 8, 3)]


@pytest.fixture(scope="module")
def quantized(model, batches):
    return amct.quantize(model, batches)


def content_of(quantized, batches, metric=None):
    return quantized.report_content(batches, metric)


def outputs_of(model, name, batches):
    """A module's outputs over all batches, copied as they are made."""
    found = []
    handle = model.get_submodule(name).register_forward_hook(lambda _, __, output: found.append(output.clone()))
    with torch.no_grad():
        for images, _ in batches:
            model(images)
    handle.remove()
    return torch.cat(found).double().numpy().reshape(-1)


def test_outputs_and_metric_are_those_of_the_written_file(model, quantized, batches, tmp_path):
    """Of a file that takes 8 samples at once; the last batch has 3."""
    files = quantized.save(tmp_path / "net", ("qdq", "record"), check=False)
    seen = []

    def largest(output, _):
        seen.append(output.numpy())
        return float(output.max())

    content = quantized.report_content(batches, largest, files=files)
    session = onnxruntime.InferenceSession(files[0])
    (name,) = (value.name for value in session.get_inputs())
    images = np.concatenate([batch.numpy() for batch, _ in batches])
    padded = np.concatenate([images, images[-1:].repeat(5, 0)])
    expected = np.concatenate([session.run(None, {name: padded[start : start + 8]})[0] for start in (0, 8, 16)])[:19]
    np.testing.assert_array_equal(np.concatenate(seen[1::2]), expected)
    with torch.no_grad():
        np.testing.assert_allclose(np.concatenate(seen[::2]), model(torch.from_numpy(images)).numpy(), atol=1e-5)
    assert (content.outputs_of, content.layers_of) == ("net_qdq_model.onnx", "the simulation")
    assert quantized.report_content(batches).outputs_of == "the simulation"


def test_the_network_is_in_the_report(quantized, batches):
    network = content_of(quantized, batches).network
    assert [box.layer for box in network.boxes if box.layer] == ["conv1", "conv2", "fc"]
    assert all(box.inputs for box in network.boxes[1:])


def test_a_report_puts_its_numbers_into_quant_json(quantized, batches, tmp_path):
    files = quantized.save(tmp_path / "net", ("qdq",), check=False)
    quantized.report(tmp_path / "report.html", batches, files=files)
    measured = json.loads((tmp_path / "net_quant.json").read_text())["measured"]
    layers = quantized.compare(batches)
    assert measured["layers"] == {layer.layer: pytest.approx(layer.sqnr, abs=1e-3) for layer in layers}
    assert (measured["of"], measured["on"]) == ("the simulation", "3 batches")


def test_an_exception_in_the_users_metric_ends_at_the_users_line(quantized, batches, tmp_path):
    def metric(output, batch):
        del output, batch
        return {}["labels"]

    with pytest.raises(KeyError, match="labels") as caught:
        quantized.report(tmp_path / "report.html", batches, metric)
    places = [entry.path.name for entry in caught.traceback]
    assert places[0] == places[-1] == "test_pytorch_report.py"
    assert len(places) <= 8  # a few lines of ours between the call and the metric
    assert not (tmp_path / "report.html").exists()


def test_a_notebook_shows_the_summary_with_every_name_escaped():
    net = nn.Sequential(OrderedDict({"fc": nn.Linear(4, 4), "<b>harm</b>": nn.LayerNorm(4)}))
    quantized = amct.quantize(net, [torch.randn(2, 4)])
    assert repr(quantized) == "<Sequential: 1 layer quantized, 0 batch norms folded>"
    shown = quantized._repr_html_()
    assert "Sequential: 1 layer quantized" in shown
    assert "<td><code>&lt;b&gt;harm&lt;/b&gt;</code></td><td>" in shown
    assert "<b>" not in shown


def test_sqnr_and_cosine_are_those_of_the_layers_outputs(model, quantized, batches):
    content = content_of(quantized, batches)
    assert [layer.name for layer in content.layers] == ["conv1", "conv2", "fc"]
    for layer, place in zip(content.layers, ("bn1", "conv2", "fc"), strict=True):
        x, y = outputs_of(model, place, batches), outputs_of(quantized.model, layer.name, batches)
        # The float model is compared after folding, which changes its outputs by float32 rounding only.
        assert layer.sqnr == pytest.approx(10 * math.log10((x @ x) / ((x - y) @ (x - y))), abs=0.01)
        assert layer.cosine == pytest.approx(x @ y / math.sqrt((x @ x) * (y @ y)), abs=1e-6)


def test_clipped_share_and_range_are_those_of_the_inputs(quantized, batches):
    first = content_of(quantized, batches).layers[0]
    x = np.concatenate([images.numpy().reshape(-1) for images, _ in batches])
    entry = quantized.record["conv1"]
    integers = np.rint(x / np.float32(entry.scale_d)) + entry.offset_d
    given = first.inputs[0]
    assert given.activation.clipped == pytest.approx(np.mean((integers < -128) | (integers > 127)), abs=1 / x.size)
    assert (given.activation.minimum, given.activation.maximum) == (x.min(), x.max())
    assert (given.scale, given.offset) == (entry.scale_d, entry.offset_d)
    found = given.activation.histogram
    assert sum(found.counts) + found.below + found.above == x.size


def test_weight_ranges_are_those_of_the_folded_weights(model, quantized, batches):
    norm = model.bn1
    factor = norm.weight / torch.sqrt(norm.running_var + norm.eps)
    folded = (model.conv1.weight * factor[:, None, None, None]).detach().reshape(8, -1)
    weights = content_of(quantized, batches).layers[0].weights
    assert weights.minimum == pytest.approx(folded.amin(1).tolist(), rel=1e-5)
    assert weights.maximum == pytest.approx(folded.amax(1).tolist(), rel=1e-5)


def test_the_metric_is_the_mean_over_samples(model, quantized, batches):
    def top1(output, batch):
        return (output.argmax(1) == batch[1]).float().mean()

    content = content_of(quantized, batches, top1)
    images, labels = torch.cat([batch[0] for batch in batches]), torch.cat([batch[1] for batch in batches])
    with torch.no_grad():
        expected = [(net(images).argmax(1) == labels).double().mean() for net in (model, quantized.model)]
    figure = content.figures[0]
    assert (figure.label, figure.before, figure.after) == (
        "top1",
        f"{expected[0]:.2%}".replace("%", " %"),
        f"{expected[1]:.2%}".replace("%", " %"),
    )


def test_fused_skipped_and_config_are_told(quantized, batches):
    content = content_of(quantized, batches)
    assert [(note.layer, note.text) for note in content.fused] == [("bn1", 'folded into "conv1"')]
    assert "norm" in [note.layer for note in content.skipped]
    assert "source: defaults" in content.config
    assert {"conv1, conv2", "fc"} <= set(content.config.splitlines())  # a linear layer has one weight scale by default
    assert "torch" in dict(content.versions)


def test_config_text_tells_what_differs(model, batches):
    config = amct.QuantConfig(
        layers={"fc": amct.LayerConfig(activations=amct.HfmgSettings(), migration_strength=0.5)},
        skip_layers=("conv2",),
        skip_fusion_layers=("conv1",),
        force_fp16=True,
    )
    balanced = amct.quantize(model, batches, config)
    text = config_text(balanced.prepared.plan)
    assert "skip_fusion_layers: conv1" in text
    assert "FORCE_FP16_QUANT" in text
    assert "dmq_balancer: migration_strength=0.5" in text
    assert "HfmgSettings" in text
    content = content_of(balanced, batches)
    with torch.no_grad():
        x = torch.cat([balanced.prepared.fused.model.norm(
            torch.relu(model.conv2(torch.relu(model.bn1(model.conv1(images))))).mean((2, 3))
        ) for images, _ in batches])  # fmt: skip
    divided = x / torch.tensor(balanced.record["fc"].tensor_balance_factor)
    seen = content.layers[-1].inputs[0].activation
    assert (seen.minimum, seen.maximum) == pytest.approx((float(divided.min()), float(divided.max())), rel=1e-4)


def test_the_report_is_a_file_with_all_layers(quantized, batches, tmp_path):
    files = quantized.save(tmp_path / "net", formats=("record",))
    path = quantized.report(tmp_path / "report.html", batches, lambda *_: 1, files=files)
    text = path.read_text(encoding="utf-8")
    data = json.loads(re.search(r'id="data">(.*?)</script>', text)[1])
    assert [layer["name"] for layer in data["layers"]] == ["conv1", "conv2", "fc"]
    assert "measured on 3 batches" in text
    assert "net_record.txt" in text
    assert ">metric<" in text


def test_without_data_the_calibration_batch_is_measured(quantized, tmp_path):
    text = quantized.report(tmp_path / "report.html").read_text(encoding="utf-8")
    assert "measured on the first calibration batch" in text


def test_data_that_can_be_read_once_is_enough(quantized, batches, tmp_path):
    assert "measured on 3 batches" in quantized.report(tmp_path / "r.html", iter(batches)).read_text(encoding="utf-8")


def test_recurrent_and_weightless_layers_are_reported():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.pool = nn.AvgPool2d(2)
            self.lstm = nn.LSTM(4, 6)

        def forward(self, x):
            return self.lstm(self.pool(x).squeeze(1))[0]

    torch.manual_seed(0)
    quantized = amct.quantize(Net().eval(), torch.randn(6, 1, 6, 8))
    content = quantized.report_content()
    by_name = {layer.name: layer for layer in content.layers}
    assert len(by_name["lstm"].weights.minimum) == 2 * 4 * 6
    assert by_name["lstm"].sqnr > 10
    assert (by_name["pool"].weights, by_name["pool"].weight_bits) == (None, None)


def test_mistakes_write_nothing(quantized, batches, tmp_path):
    target = tmp_path / "report.html"
    with pytest.raises(ArgumentError, match="metric: it needs data"):
        quantized.report(target, metric=lambda *_: 1.0)
    with pytest.raises(ArgumentTypeError, match="metric: expected a number for each batch, got str"):
        quantized.report(target, batches, lambda *_: "good")
    with pytest.raises(CalibrationError, match="data is empty"):
        quantized.report(target, [])
    with pytest.raises(ArgumentTypeError, match="expected a tensor, an array, an iterable"):
        quantized.report(target, 5)
    with pytest.raises(FileError, match="cannot be read"):
        quantized.report(target, batches, files=[tmp_path / "missing.onnx"])
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError):
        quantized.report(tmp_path / "file" / "report.html", batches)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


# -- compare -----------------------------------------------------------------------------------------------------------


def test_data_that_the_model_cannot_take_names_the_argument_and_the_shapes(quantized, batches, tmp_path):
    wrong = [batches[0][0][:, :1]]
    for run in (lambda: quantized.compare(wrong), lambda: quantized.report(tmp_path / "report.html", wrong)):
        with pytest.raises(ModelError) as caught:
            run()
        assert f"data: InPlaceNet fails on a batch with tensors of shapes [{list(wrong[0].shape)}]: " in str(
            caught.value
        )
        assert "\n" not in str(caught.value)
        assert isinstance(caught.value.__cause__, RuntimeError), "with the line of the user's forward"
    assert not list(tmp_path.iterdir())


def test_compare_takes_the_original_model_with_its_batch_norms(model, quantized, batches):
    model.train()  # is run in eval mode all the same, and stays as it is
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    try:
        found = {layer.layer: layer for layer in amct.compare(model, quantized, batches)}
    finally:
        assert model.training
        model.eval()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert list(found) == ["conv1", "conv2", "fc"]
    for layer in quantized.compare(batches):
        assert found[layer.layer].sqnr == pytest.approx(layer.sqnr, abs=0.01)


def test_compare_takes_a_simulated_model(model, quantized, batches):
    found = {layer.layer: layer for layer in amct.compare(model, quantized.model, batches)}
    assert list(found) == ["bn1", "conv2", "norm", "fc"]  # conv1 has taken in bn1: its outputs mean something else
    for name, place in (("conv1", "bn1"), ("conv2", "conv2"), ("fc", "fc")):
        expected = next(layer for layer in quantized.compare(batches) if layer.layer == name)
        assert found[place].sqnr == pytest.approx(expected.sqnr, abs=0.01)


def test_a_model_equals_itself(model, batches):
    for layer in amct.compare(model, model, batches):
        assert (layer.cosine, layer.sqnr, layer.largest_error) == (pytest.approx(1.0), math.inf, 0.0)


def test_compare_refuses_what_cannot_be_compared(model, quantized, batches):
    with pytest.raises(ArgumentTypeError, match="float_model: expected a torch"):
        amct.compare("net", quantized, batches)
    with pytest.raises(ArgumentTypeError, match="quantized_model: expected what quantize"):
        amct.compare(model, "net", batches)
    with pytest.raises(ModelError, match='"bn1" is not in Sequential'):
        amct.compare(nn.Sequential(nn.Conv2d(3, 8, 3)), quantized, batches)
    with pytest.raises(ModelError, match="the same layer names"):
        amct.compare(nn.Sequential(nn.Conv2d(3, 8, 3)), model, batches)
    with pytest.raises(CalibrationError, match="empty"):
        amct.compare(model, quantized, [])


def test_every_output_of_a_model_is_measured(tmp_path):
    """Outputs of a tuple are no longer one: the worst are shown, the others counted."""

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Conv2d(3, 4, 3)
            self.heads = nn.ModuleList(nn.Linear(4, 3) for _ in range(7))

        def forward(self, x):
            x = self.stem(x).mean((2, 3))
            return tuple(head(x) for head in self.heads)

    torch.manual_seed(0)
    quantized = amct.quantize(Heads().eval(), [torch.randn(4, 3, 8, 8)])
    page = quantized.report(tmp_path / "heads.html").read_text()
    assert page.count("SQNR of output ") == 4
    assert "SQNR of 3 more outputs" in page
