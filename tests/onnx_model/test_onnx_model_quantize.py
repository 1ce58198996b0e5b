"""Quantizing ONNX models: the factors of the PyTorch door, files that run, and a reason for all that stays float."""

from __future__ import annotations

import json
import weakref
from functools import partial

import numpy as np
import onnx
import pytest
import torch
from onnx_nets import (
    Recurrent,
    Residual,
    Transposed,
    exported,
    graph_model,
    images,
    node,
    normal,
    products,
    run,
    seeded,
)

import amct.onnx_model as amct
import amct.pytorch as torch_door
from amct.calibration import CalibrationSession
from amct.errors import ArgumentError, CalibrationError, ConfigError, ModelError
from amct.export.onnx import runtime
from amct.export.onnx.runtimes import count_integer_kernels
from amct.numerics.settings import AdaRoundSettings
from amct.onnx_model import calibrating
from amct.record import read_record

EPSILON = float(np.finfo(np.float32).eps)


@pytest.fixture(scope="module")
def residual():
    return exported(seeded(Residual), torch.from_numpy(images()))


@pytest.fixture(scope="module")
def quantized(residual):
    return amct.quantize(residual, [images(seed) for seed in range(3)])


# -- memory ------------------------------------------------------------------------------------------------------------


def test_each_tensor_is_freed_when_it_was_observed(residual, monkeypatch):
    """The observers keep values of the tensors: both together would be twice the activations of a batch."""
    fetched, left = [], []
    run_batch, observe = runtime.Runner.run, CalibrationSession.observe

    def watched_run(self, feeds):
        values = run_batch(self, feeds)
        fetched.extend(weakref.ref(value) for name, value in values.items() if name not in feeds)
        return values

    def watched_observe(self, *args, **named):
        observe(self, *args, **named)
        left.append(sum(value() is not None for value in fetched))

    monkeypatch.setattr(runtime.Runner, "run", watched_run)
    monkeypatch.setattr(CalibrationSession, "observe", watched_observe)
    amct.quantize(residual, [images()])

    assert len(fetched) > 4
    assert left == sorted(left, reverse=True)
    assert left[-1] == 1  # what the last layer reads


@pytest.mark.parametrize(
    ("model", "data"),
    [
        (lambda: exported(seeded(Residual), torch.from_numpy(images())), [images(seed) for seed in range(3)]),
        (
            lambda: exported(seeded(Recurrent), torch.randn(5, 2, 4), torch.zeros(1, 2, 6)),
            [(normal(5, 2, 4, seed=seed), normal(1, 2, 6, seed=seed)) for seed in range(3)],
        ),
    ],
    ids=["residual", "recurrent"],
)
def test_a_large_model_is_calibrated_in_parts_with_the_same_result(model, data, monkeypatch):
    """As large models run: without weights in the order of fast kernels, which would sum in another order."""
    model, sizes, take = model(), [], calibrating._Observation.take

    def watched_take(self, found):
        sizes.append(len(found))
        take(self, found)

    monkeypatch.setattr(calibrating._Observation, "take", watched_take)
    monkeypatch.setattr(runtime, "LARGE_MODEL", 0)
    whole = amct.quantize(model, data)
    (together,) = set(sizes)
    sizes.clear()
    monkeypatch.setattr(calibrating, "LARGE_MODEL", 0)
    in_parts = amct.quantize(model, data)

    assert in_parts.record == whole.record
    assert in_parts._tensors == whole._tensors
    assert len(sizes) >= 3 * len(data)  # of each batch the inputs, and several parts
    assert max(sizes) < together


# -- the factors -------------------------------------------------------------------------------------------------------


def same_records(ours, theirs, names):
    """Equal to float rounding: onnxruntime and torch sum in different orders.

    A range of n values is a float32 sum of at most a thousand products here, so it is right to some 1000 · 2^-24; a
    percentile or a search step of IFMR could only differ by more if two values were that near to each other.
    """
    for mine, other in names.items():
        a, b = ours[mine], theirs[other]
        assert a.offset_d == b.offset_d, mine
        for key in ("scale_d", "scale_w", "scale_h", "scale_r"):
            first, second = getattr(a, key), getattr(b, key)
            if first is None or second is None:
                assert first is second, (mine, key)
                continue
            np.testing.assert_allclose(first, second, rtol=1000 * 2**-24, err_msg=f"{mine} {key}")
        assert (a.act_type, a.wts_type) == (b.act_type, b.wts_type)


def test_the_factors_are_those_of_the_pytorch_door_on_the_same_net(quantized):
    batches = [torch.from_numpy(images(seed)) for seed in range(3)]
    theirs = torch_door.quantize(seeded(Residual), batches)
    names = {
        "/stem/Conv": "stem",
        "/depthwise/Conv": "depthwise",
        "/pointwise/Conv": "pointwise",
        "/pool/AveragePool": "pool",
        "/fc/Gemm": "fc",
    }
    assert quantized.layers == tuple(names)
    same_records(quantized.record, theirs.record, names)
    # What the QDQ file asks for beside the record, under the names of each file: the same ranges, and the same means.
    ours, others = (sorted(each._tensors.values(), key=lambda found: found.step) for each in (quantized, theirs))
    for mine, other in zip(ours, others, strict=True):
        assert mine.zero_point == other.zero_point
        assert mine.step == pytest.approx(other.step, rel=1000 * 2**-24)
        assert (mine.mean is None) == (other.mean is None)
        if mine.mean is not None:
            np.testing.assert_allclose(mine.mean, other.mean, rtol=1e-4, atol=1e-5)  # stored with 6 digits


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (Recurrent, (torch.randn(5, 2, 4, generator=torch.Generator().manual_seed(3)), torch.zeros(1, 2, 6))),
        (Transposed, (torch.randn(2, 3, 9, generator=torch.Generator().manual_seed(3)),)),
    ],
    ids=["recurrent", "transposed"],
)
def test_every_layer_type_has_the_factors_of_the_pytorch_door(make, inputs, tmp_path):
    theirs = torch_door.quantize(seeded(make), [inputs])
    model = theirs.prepared.float_model(18)  # its layers are called as in torch
    ours = amct.quantize(model, [tuple(tensor.numpy() for tensor in inputs)])
    assert ours.layers == theirs.layers
    same_records(ours.record, theirs.record, {name: name for name in theirs.layers})
    ours.save(tmp_path / "q", placement="exact", target="exact8")
    feeds = {value.name: tensor.numpy() for value, tensor in zip(model.graph.input, inputs, strict=True)}
    simulated, exact = run(ours.model, feeds)[0], run(tmp_path / "q_qdq_model.onnx", feeds)[0]
    float_output = run(model, feeds)[0]
    assert np.abs(simulated - float_output).max() < 0.1 * np.abs(float_output).max()
    assert np.abs(exact - float_output).max() < 0.1 * np.abs(float_output).max()


def test_batch_norms_are_folded_and_the_folded_model_computes_the_same(residual, quantized):
    folded = quantized.prepared.folded
    assert quantized.prepared.folded_layers == {
        "/stem/Conv": ("/stem_norm/BatchNormalization",),
        "/depthwise/Conv": ("/depthwise_norm/BatchNormalization",),
    }
    x = images(7)
    expected, got = run(residual, {"x": x})[0], run(folded, {"x": x})[0]
    assert not any(each.op_type == "BatchNormalization" for each in folded.graph.node)
    # Folding rounds each weight once more: 2^-24 relative; sums of at most 128 terms round likewise.
    assert np.abs(expected - got).max() <= 128 * EPSILON * np.abs(expected).max()


# -- the files ---------------------------------------------------------------------------------------------------------


def far_from_ties(model, feeds, record, bindings):
    """Whether no layer input lies within a thousandth of a step of the border between two integers."""
    watched = [inputs for inputs in bindings.values() if inputs != "x"]
    extended = onnx.ModelProto()
    extended.CopyFrom(model)
    extended.graph.output.extend(onnx.ValueInfoProto(name=name) for name in watched)
    values = dict(zip([value.name for value in extended.graph.output], run(extended, feeds), strict=True)) | feeds
    for layer, tensor in bindings.items():
        steps = values[tensor].astype(np.float64) / record[layer].scale_d
        inside = steps[np.abs(steps + record[layer].offset_d) < 129]
        if np.abs(inside - np.floor(inside) - 0.5).min() < 1e-3:
            return False
    return True


def test_exact_qdq_equals_the_fake_quant_file(tmp_path):
    """Where no value is near a tie, both compute with the same integers; only scaling back rounds, in float32."""
    quantized = amct.quantize(products(), normal(16, 6))
    quantized.save(tmp_path / "q", placement="exact", target="exact8")
    first, second = quantized.layers
    bindings = {first: "x", second: "d"}
    checked = 0
    for seed in range(60):
        feeds = {"x": normal(1, 6, seed=seed)}
        if not far_from_ties(quantized.model, feeds, quantized.record, bindings):
            continue
        checked += 1
        fake, qdq = (run(tmp_path / f"q_{kind}_model.onnx", feeds)[0] for kind in ("fake_quant", "qdq"))
        # Sums of integers are exact in both; each rounds scale_d · scale_w and the product with it, half a step each.
        assert np.all(np.abs(fake - qdq) <= 2 * EPSILON * np.abs(fake))
    assert checked > 10


def test_the_files_run_in_integer_kernels_and_stay_near_float(residual, quantized, tmp_path):
    files = quantized.save(tmp_path / "q")
    assert [file.name for file in files] == [
        "q_qdq_model.onnx",
        "q_deploy_model.onnx",
        "q_fake_quant_model.onnx",
        "q_record.txt",
        "q_record.txt.qdq.json",
        "q_quant.json",
    ]
    kernels = count_integer_kernels(tmp_path / "q_qdq_model.onnx")
    assert kernels.integer == kernels.total == 4
    expected = run(residual, {"x": images(9)})[0]
    for file in ("q_qdq_model.onnx", "q_fake_quant_model.onnx"):
        got = run(tmp_path / file, {"x": images(9)})[0]
        assert 0 < np.abs(got - expected).max() < 0.1 * np.abs(expected).max()
    np.testing.assert_array_equal(got, quantized(images(9))["y"])
    assert read_record(tmp_path / "q_record.txt").layers == quantized.record.layers
    deploy = onnx.load(tmp_path / "q_deploy_model.onnx")
    assert sum(each.op_type == "AscendQuant" for each in deploy.graph.node) == 5
    stored = {tensor.name: tensor.data_type for tensor in deploy.graph.initializer}
    weights = [each.input[1] for each in deploy.graph.node if each.op_type in ("Conv", "Gemm")]
    assert {stored[name] for name in weights} == {onnx.TensorProto.INT8}


def test_quant_json_tells_of_folded_and_skipped_layers(tmp_path):
    nodes = [
        node("Conv", "x w", "a", "conv"),
        node("BatchNormalization", "a s s s s", "b", "norm"),
        node("MatMul", "b b", "c", "product"),
        node("BatchNormalization", "c s s s s", "y", "alone"),
    ]
    model = graph_model(nodes, {"w": normal(3, 3, 1, 1), "s": np.ones(3, np.float32)}, ("n", 3, 4, 4))
    quantized = amct.quantize(model, images(count=1)[..., :4, :4])
    quantized.save(tmp_path / "q", formats="qdq")
    document = json.loads((tmp_path / "q_quant.json").read_text())
    assert document["layers"]["conv"]["original_layers"] == ["conv", "norm"]
    assert {entry["layer"]: entry["reason"] for entry in document["skipped"]} == {
        "product": "both operands are computed; only a product with a constant weight can be quantized",
        "alone": 'not folded: it follows "product" (MatMul), which cannot take it',
    }
    text = quantized.summary()
    assert text.splitlines()[0] == "hand_made: 1 layer quantized, 1 batch norm folded"
    assert "both operands are computed" in text


@pytest.mark.parametrize("opset", [16, 21])
def test_the_opset_asked_for_is_written(opset, quantized, tmp_path):
    quantized.save(tmp_path / "q", formats=("qdq", "fake_quant"), opset=opset)
    for file in ("q_fake_quant_model.onnx", "q_qdq_model.onnx"):
        assert onnx.load(tmp_path / file).opset_import[0].version == opset
        assert run(tmp_path / file, {"x": images(1)})[0].shape == (4, 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"opset": 15}, r"opset: expected 16\.\.21, got 15"),
        ({"formats": ["onnx"]}, 'formats: "onnx" is unknown'),
        ({"placement": "faster"}, "placement: expected one of fast, exact"),
        ({"target": "avx"}, "target: expected one of portable, vnni, exact8"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_written(arguments, message, quantized, tmp_path):
    with pytest.raises(ArgumentError, match=message):
        quantized.save(tmp_path / "q", **arguments)
    assert not list(tmp_path.iterdir())


# -- kinds of models ---------------------------------------------------------------------------------------------------


def test_nameless_nodes_get_names_and_matmul_weights_are_found_behind_an_identity(tmp_path):
    quantized = amct.quantize(products(), normal(16, 6))
    assert quantized.layers == ("MatMul_a", "MatMul_y")
    quantized.save(tmp_path / "q", formats="qdq")
    assert count_integer_kernels(tmp_path / "q_qdq_model.onnx").share == 1


def test_an_mlp_of_gemms_is_quantized(tmp_path):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3)).eval()
    model = exported(net, torch.zeros(2, 6))
    quantized = amct.quantize(model, [normal(8, 6, seed=seed) for seed in range(2)])
    assert [quantized.record[name].wts_type for name in quantized.layers] == ["INT8", "INT8"]
    quantized.save(tmp_path / "q", formats="qdq")
    assert count_integer_kernels(tmp_path / "q_qdq_model.onnx").share == 1


@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("ceil_mode", [0, 1])
@pytest.mark.parametrize("counted", [0, 1])
def test_average_poolings_divide_by_what_torch_divides_by(padding, ceil_mode, counted, tmp_path):
    pool = node("AveragePool", "x", "y", "pool", kernel_shape=[3, 3], strides=[2, 2], pads=[padding] * 4,
                ceil_mode=ceil_mode, count_include_pad=counted)  # fmt: skip
    quantized = amct.quantize(graph_model([pool], {}, ("n", 3, 8, 8)), images())
    quantized.save(tmp_path / "q", formats=("qdq", "fake_quant"))
    expected = torch.nn.functional.avg_pool2d(
        torch.from_numpy(images()), 3, 2, padding, ceil_mode=bool(ceil_mode), count_include_pad=bool(counted)
    ).numpy()
    step = quantized.record["pool"].scale_d
    # A mean of values that are each off by half a step, and a result rounded to steps of its own, which are no larger;
    # what IFMR clips at the ends of the range comes on top: a ninth of the largest excess in a window of nine.
    for file in ("q_qdq_model.onnx", "q_fake_quant_model.onnx"):
        assert np.abs(run(tmp_path / file, {"x": images()})[0] - expected).max() < 2 * step


class Mixed(torch.nn.Module):
    """Recurrent layers as torch exports them, of one of which only the last state is used."""

    def __init__(self):
        super().__init__()
        self.lstm = torch.nn.LSTM(4, 6, batch_first=True)
        self.gru = torch.nn.GRU(6, 5)
        self.both = torch.nn.LSTM(5, 3, bidirectional=True)

    def forward(self, x):
        x, _ = self.lstm(x)
        last = self.gru(x)[1]
        return last, self.both(last)[0]


def test_recurrent_layers_as_torch_exports_them(tmp_path):
    torch.manual_seed(0)
    model = exported(Mixed().eval(), torch.zeros(3, 5, 4))
    data = [normal(3, 5, 4, seed=seed) for seed in range(3)]
    quantized = amct.quantize(model, data)
    assert quantized.layers == ("/lstm/LSTM", "/gru/GRU")
    assert {skip.layer: skip.reason for skip in quantized.skipped} == {
        "/both/LSTM": 'direction is "bidirectional"; only "forward" can be quantized'
    }
    assert all(layer.sqnr > 25 for layer in quantized.compare(data))
    quantized.report(tmp_path / "report.html")
    quantized.save(tmp_path / "q")
    expected = run(model, {"x": data[0]})[0]
    for file in ("q_qdq_model.onnx", "q_fake_quant_model.onnx"):
        assert np.abs(run(tmp_path / file, {"x": data[0]})[0] - expected).max() < 0.05 * np.abs(expected).max()


def test_a_model_too_large_for_one_message_runs_from_a_file(monkeypatch):
    monkeypatch.setattr(runtime, "EXTERNAL_THRESHOLD", 100)
    monkeypatch.setattr(runtime, "save_model", partial(runtime.save_model, external_threshold=600))
    expected = run(products(), {"x": normal(3, 6)})[0]
    np.testing.assert_array_equal(runtime.Runner(products()).run({"x": normal(3, 6)})["y"], expected)


def test_what_onnxruntime_cannot_run_is_said():
    model = products()
    model.graph.node[2].domain = "nobody.knows"
    model.opset_import.append(onnx.helper.make_opsetid("nobody.knows", 1))
    with pytest.raises(ModelError, match=r"onnxruntime cannot run the model: .*nobody\.knows"):
        amct.quantize(model, normal(4, 6))
    with pytest.raises(CalibrationError, match="onnxruntime cannot run the model on this batch"):
        runtime.Runner(products()).run({"x": normal(3, 5)})


def test_half_precision(tmp_path):
    model = products(dtype=np.float16)
    quantized = amct.quantize(model, normal(16, 6))
    quantized.save(tmp_path / "q")
    x = normal(16, 6, dtype=np.float16)
    expected = run(model, {"x": x})[0].astype(np.float32)
    for file in ("q_qdq_model.onnx", "q_fake_quant_model.onnx"):
        got = run(tmp_path / file, {"x": x})[0]
        assert got.dtype == np.float16
        assert np.abs(got - expected).max() < 0.05 * np.abs(expected).max()


def with_a_cast(to):
    """A half-precision model that divides by a size, which a Cast makes a number."""
    half = onnx.TensorProto.FLOAT16
    nodes = [
        node("Conv", "x w", "c", name="conv"),
        node("Size", "c", "size"),
        node("Cast", "size", "number", to=onnx.TensorProto.FLOAT),
        node("Cast", "number", "left", to=to),
        node("Div", "c left", "y", name="div"),
    ]
    return graph_model(nodes, {"w": normal(4, 3, 3, 3, dtype=np.float16)}, (1, 3, 8, 8), element_type=half)


def test_casts_of_a_float16_conversion(tmp_path):
    """With casts on both sides the file is quantized; where one is missing, the error says so and what to do."""
    x = normal(1, 3, 8, 8)
    model = with_a_cast(onnx.TensorProto.FLOAT16)
    quantized = amct.quantize(model, x)
    assert list(quantized.layers) == ["conv"]
    quantized.save(tmp_path / "q")
    expected = run(model, {"x": x.astype(np.float16)})[0].astype(np.float32)
    got = run(tmp_path / "q_qdq_model.onnx", {"x": x.astype(np.float16)})[0]
    assert got.dtype == np.float16
    assert np.abs(got - expected).max() < 0.05 * np.abs(expected).max()
    with pytest.raises(ModelError, match=r"in node \(div\)\. A conversion to float16 is incomplete .*float32 file"):
        amct.quantize(with_a_cast(onnx.TensorProto.FLOAT), x)


@pytest.mark.parametrize("opset", [9, 13, 22])
def test_other_opsets_are_converted(opset, tmp_path):
    quantized = amct.quantize(products(opset=opset), normal(16, 6))
    quantized.save(tmp_path / "q")
    written = onnx.load(tmp_path / "q_qdq_model.onnx").opset_import[0].version
    assert written == min(max(opset, 16), 21)
    expected = run(products(), {"x": normal(4, 6)})[0]
    assert np.abs(run(tmp_path / "q_qdq_model.onnx", {"x": normal(4, 6)})[0] - expected).max() < 0.2


def test_a_shared_weight_is_quantized_for_each_reader(tmp_path):
    nodes = [node("Conv", "x w", "a", "one"), node("Relu", "a", "b"), node("Conv", "b w", "y", "two")]
    model = graph_model(nodes, {"w": normal(3, 3, 3, 3)}, ("n", 3, "h", "w"))
    quantized = amct.quantize(model, images())
    assert quantized.record["one"].scale_w == quantized.record["two"].scale_w
    quantized.save(tmp_path / "q", placement="exact")
    expected = run(model, {"x": images()})[0]
    assert np.abs(run(tmp_path / "q_qdq_model.onnx", {"x": images()})[0] - expected).max() < 0.05 * expected.max()


def test_several_inputs_by_name_and_several_outputs():
    nodes = [node("MatMul", "x w", "y", "first"), node("MatMul", "z w", "u", "second")]
    model = graph_model(nodes, {"w": normal(6, 6)}, ("n", 6), outputs=("y", "u"))
    model.graph.input.append(onnx.helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, ["n", 6]))
    quantized = amct.quantize(model, {"x": normal(4, 6), "z": 3 * normal(4, 6)})
    assert quantized.record["second"].scale_d == pytest.approx(3 * quantized.record["first"].scale_d, rel=0.05)
    assert set(quantized((normal(4, 6), normal(4, 6)))) == {"y", "u"}


# -- the config --------------------------------------------------------------------------------------------------------


def test_a_simple_config_applies_by_layer_and_type(residual, tmp_path):
    (tmp_path / "q.cfg").write_text(
        'batch_num: 2\nskip_layers: "/fc/Gemm"\nskip_layer_types: "AvgPool2d"\nskip_fusion_layers: "/stem/Conv"\n'
        'override_layer_types { layer_type: "Conv2d" calibration_config { arq_quantize { channel_wise: false } '
        "hfmg_quantize { num_of_bins: 4096 } } }\n"
    )
    quantized = amct.quantize(residual, [images(seed) for seed in range(4)], tmp_path / "q.cfg")
    assert quantized.layers == ("/stem/Conv", "/depthwise/Conv", "/pointwise/Conv")
    assert all(len(quantized.record[name].scale_w) == 1 for name in quantized.layers)
    reasons = {skip.layer: skip.reason for skip in quantized.skipped}
    assert reasons["/fc/Gemm"].endswith("q.cfg:2:1)")
    assert reasons["/pool/AveragePool"].endswith("q.cfg:3:1)")
    assert "skip_fusion_layers" in reasons["/stem_norm/BatchNormalization"]


def test_too_little_data_for_the_config_is_said(residual):
    with pytest.raises(CalibrationError, match="2 more batches needed"):
        amct.quantize(residual, [images()], amct.QuantConfig(batch_num=3))


def test_dmq_balances_and_computes_the_same_function(tmp_path):
    spread = np.ones(6, np.float32)
    spread[2] = 30
    x = normal(64, 6) * spread
    config = amct.QuantConfig(common=amct.LayerConfig(migration_strength=0.5))
    plain, balanced = amct.quantize(products(), x), amct.quantize(products(), iter([x]), config)
    assert len(balanced.record["MatMul_a"].tensor_balance_factor) == 6
    errors = [min(layer.sqnr for layer in each.compare(x)) for each in (plain, balanced)]
    assert errors[1] > errors[0] + 3
    balanced.save(tmp_path / "q")
    expected = run(products(), {"x": x})[0]
    assert np.abs(run(tmp_path / "q_qdq_model.onnx", {"x": x})[0] - expected).max() < 0.05 * np.abs(expected).max()


def test_adaround_is_refused_with_the_way_out():
    config = amct.QuantConfig(common=amct.LayerConfig(weights=AdaRoundSettings()))
    with pytest.raises(ConfigError, match=r"ada_quantize learns in PyTorch.*use arq_quantize"):
        amct.quantize(products(), normal(4, 6), config)


def test_a_model_without_layers_is_refused():
    model = graph_model([node("Relu", "x", "y")], {}, ("n", 4))
    with pytest.raises(ConfigError, match="the model has no layer that can be quantized"):
        amct.quantize(model, normal(2, 4))


def test_switching_every_layer_off_is_refused(residual):
    every = ("Conv2d", "Linear", "AvgPool2d")
    with pytest.raises(ConfigError, match="switch off every layer that can be quantized"):
        amct.quantize(residual, images(), amct.QuantConfig(skip_layer_types=every))


# -- the data ----------------------------------------------------------------------------------------------------------


def test_nan_names_the_layer(residual):
    x = images()
    x[0, 0, 0, 0] = np.nan
    with pytest.raises(CalibrationError, match=r'layer "/stem/Conv", batch 2: .*NaN'):
        amct.quantize(residual, [images(), x])


def test_nan_weights_name_the_layer():
    model = products()
    broken = normal(6, 8)
    broken[0, 0] = np.nan
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(broken, "w"))
    with pytest.raises(CalibrationError, match='layer "MatMul_a"'):
        amct.quantize(model, normal(4, 6))


def test_what_is_kept_does_not_grow_with_the_number_of_batches(residual):
    """A generator is read batch by batch: no batch is alive when the one after the next is asked for."""
    alive = []

    def batches():
        for seed in range(8):
            batch = images(seed)
            alive.append(weakref.ref(batch))
            yield {"x": batch}
            del batch
            assert sum(reference() is not None for reference in alive) <= 2

    amct.quantize(residual, batches())
    assert len(alive) == 8


def test_without_a_quantizable_layer_each_node_is_listed_with_its_reason():
    model = graph_model([node("MatMul", "x x", "y", name="square")], {}, (3, 3))
    with pytest.raises(ConfigError, match=r"no layer that can be quantized(.|\n)*square \(MatMul\): \w+"):
        amct.quantize(model, [normal(3, 3)])
