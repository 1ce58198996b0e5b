"""How weights are rounded and scaled is a named setting that every door understands."""

from __future__ import annotations

import json
import warnings

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

import amct.onnx_model
import amct.pytorch
import amct_pytorch
from amct import caffe
from amct.caffe import pycaffe
from amct.errors import ConfigError, ConfigTypeError, ParseError

IMAGES = np.random.default_rng(8).normal(0.3, 1.0, size=(4, 3, 8, 8)).astype(np.float32)
PROTOTXT = """
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 4 dim: 3 dim: 8 dim: 8 } } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv" convolution_param { num_output: 4 kernel_size: 3 } }
"""


def network():
    torch.manual_seed(3)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)).eval()
    with torch.no_grad():
        net[0].weight[0, 0, 0, 0] = -0.5  # the negative side is the larger one
    return net


@pytest.fixture(scope="module")
def onnx_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("rounding") / "net.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.onnx itself
        torch.onnx.export(network(), (torch.from_numpy(IMAGES),), path, dynamo=True, opset_version=18, verbose=False)
    return path


@pytest.fixture(scope="module")
def caffe_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rounding")
    model, weights = folder / "net.prototxt", folder / "net.caffemodel"
    model.write_text(PROTOTXT)
    net = pycaffe.Net(str(model), pycaffe.TEST)
    net.params["conv"][0].data[...] = network()[0].weight.detach().numpy()
    net.save(str(weights))
    return str(model), str(weights)


def stored_weight(file):
    """The integers of the convolution's weight in a QDQ file."""
    arrays = {each.name: numpy_helper.to_array(each).astype(int) for each in onnx.load(file).graph.initializer}
    name, weight = next((name, array) for name, array in arrays.items() if array.ndim == 4)
    zero_point = arrays[name.replace("quantized", "zero_point")]
    return weight - zero_point.reshape(-1, 1, 1, 1)


def quantize_torch(config, onnx_file):
    del onnx_file
    return amct.pytorch.quantize(network(), [torch.from_numpy(IMAGES)], config)


def quantize_onnx(config, onnx_file):
    return amct.onnx_model.quantize(onnx_file, [IMAGES], config)


@pytest.mark.parametrize("quantize", [quantize_torch, quantize_onnx])
def test_error_cancelling_integers_reach_the_files(quantize, onnx_file, tmp_path):
    quantized = quantize(amct.pytorch.QuantConfig(weight_rounding="error_cancelling"), onnx_file)
    quantized.save(tmp_path / "q", formats=("qdq", "fake_quant"), target="exact8")
    weight = next(iter(quantized.prepared.weights.values())).weights[0]
    float_weight, scale = weight.source.tensor, weight.qparams.scale.reshape(-1, 1, 1, 1)
    simulated = (weight.real() / scale).round().numpy()
    stored = stored_weight(tmp_path / "q_qdq_model.onnx")
    np.testing.assert_array_equal(stored, simulated)
    errors = stored - (float_weight.double() / scale.double()).numpy()
    assert np.abs(errors.reshape(4, -1).sum(1)).max() <= 0.5
    nearest = np.rint((float_weight / scale).numpy())
    assert (stored != nearest).any()
    assert np.abs(stored - nearest).max() == 1


@pytest.mark.parametrize("quantize", [quantize_torch, quantize_onnx])
def test_the_default_cancels_errors_corrects_biases_and_takes_the_negative_side(quantize, onnx_file):
    settings = {"weight_rounding": "error_cancelling", "weight_scale": "negative_side", "bias_correction": True}
    found = quantize(None, onnx_file)
    named = quantize(amct.pytorch.QuantConfig(**settings), onnx_file)
    default = found.record
    assert named.record == default
    assert all(each.cancels_errors and each.corrects_bias and each.mean is not None for each in found.qparams.values())
    plain = quantize(amct.pytorch.QuantConfig(weight_rounding="nearest", bias_correction=False), onnx_file)
    assert not any(each.cancels_errors or each.corrects_bias for each in plain.qparams.values())
    full = quantize(amct.pytorch.QuantConfig(weight_scale="full_range"), onnx_file).record
    first = next(iter(default))
    assert default[first].scale_w[0] == pytest.approx(0.5 / 128)
    assert full[first].scale_w[0] == pytest.approx(0.5 / 127)


def test_caffe_rounds_to_the_nearest_when_asked(caffe_files, tmp_path):
    stored = {}
    for rounding, scale in (("nearest", "negative_side"), ("error_cancelling", "full_range"), (None, None)):
        config = caffe.QuantConfig(weight_rounding=rounding, weight_scale=scale)
        quantized = caffe.quantize(*caffe_files, [IMAGES], config)
        prefix = tmp_path / f"{rounding}"
        quantized.save(prefix)
        net = pycaffe.Net(f"{prefix}_deploy_model.prototxt", f"{prefix}_deploy_weights.caffemodel", pycaffe.TEST)
        stored[rounding] = np.array(net.params["conv"][0].data), quantized.record["conv"].scale_w
    weight = network()[0].weight.detach().numpy()
    integers, scales = stored["nearest"]
    np.testing.assert_array_equal(integers, np.rint(weight / np.array(scales, np.float32).reshape(-1, 1, 1, 1)))
    np.testing.assert_array_equal(stored[None][0], stored["error_cancelling"][0])
    assert stored[None][1][0] == pytest.approx(0.5 / 127)
    assert scales[0] == pytest.approx(0.5 / 128)


def test_a_full_config_can_name_them(tmp_path):
    content = {"weight_rounding": "error_cancelling", "weight_scale": "full_range", "0": {}, "3": {}}
    (tmp_path / "a.json").write_text(json.dumps(content))
    from_file = amct.pytorch.quantize(network(), [torch.from_numpy(IMAGES)], tmp_path / "a.json")
    config = amct.pytorch.QuantConfig(weight_rounding="error_cancelling", weight_scale="full_range")
    from_object = amct.pytorch.quantize(network(), [torch.from_numpy(IMAGES)], config)
    assert from_file.record == from_object.record
    (tmp_path / "a.json").write_text(json.dumps(content | {"weight_rounding": "nearset"}))
    with pytest.raises(ConfigError, match=r"a\.json:1:\d+: weight_rounding must be 'nearest' or 'error_cancelling'"):
        amct.pytorch.quantize(network(), [torch.from_numpy(IMAGES)], tmp_path / "a.json")


def amct_flow(folder, cfg):
    """AMCT's functions on the network with a simple config; the initializers of the deploy file by name."""
    folder.mkdir()
    (folder / "a.cfg").write_text(cfg)
    model, x = network(), torch.from_numpy(IMAGES)
    amct_pytorch.create_quant_config(str(folder / "a.json"), model, x, config_defination=str(folder / "a.cfg"))
    files = [str(folder / name) for name in ("a.json", "m.onnx", "record.txt")]
    amct_pytorch.quantize_model(*files, model, x)(x)
    amct_pytorch.save_model(*files[1:], str(folder / "q"))
    initializers = onnx.load(folder / "q_deploy_model.onnx").graph.initializer
    return {each.name: numpy_helper.to_array(each) for each in initializers}


def test_amct_s_functions_round_and_correct_as_a_simple_config_asks(tmp_path):
    plain = amct_flow(tmp_path / "plain", "batch_num: 1")
    both = amct_flow(tmp_path / "both", "batch_num: 1 weight_rounding: error_cancelling bias_correction: true")
    written = json.loads((tmp_path / "both" / "a.json").read_text())
    assert (written["weight_rounding"], written["bias_correction"]) == ("error_cancelling", True)
    assert not {"weight_rounding", "bias_correction"} & set(json.loads((tmp_path / "plain" / "a.json").read_text()))
    quantized = amct.pytorch.quantize(network(), [torch.from_numpy(IMAGES)])
    quantized.save(tmp_path / "own", formats=("deploy",), check=False)
    initializers = onnx.load(tmp_path / "own_deploy_model.onnx").graph.initializer
    own = {each.name: numpy_helper.to_array(each) for each in initializers}
    for dtype in (np.int8, np.int32):
        integers = [[array for array in file.values() if array.dtype == dtype] for file in (plain, both, own)]
        assert len(integers[0]) == 2
        assert any((first != second).any() for first, second in zip(*integers[:2], strict=True))
        for second, third in zip(*integers[1:], strict=True):
            np.testing.assert_array_equal(second, third)
    with pytest.raises(ParseError, match=r"a\.cfg:1:18: weight_rounding takes one of nearest, error_cancelling"):
        amct_flow(tmp_path / "wrong", "weight_rounding: nearset")


@pytest.mark.parametrize(
    ("config", "error", "match"),
    [
        (caffe.QuantConfig(force_fp16=True), ConfigError, r"^config.force_fp16: .*only for PyTorch"),
        (
            caffe.QuantConfig(common=caffe.LayerConfig(migration_strength=0.5)),
            ConfigError,
            "config.common.migration_str",
        ),
        (
            caffe.QuantConfig(types={"Convolution": caffe.LayerConfig(weights=amct.pytorch.AdaRoundSettings())}),
            ConfigTypeError,
            r'^config.types\["Convolution"\].weights: expected ArqSettings or SnqSettings, got AdaRound',
        ),
        (
            caffe.QuantConfig(common=caffe.LayerConfig(activations=amct.pytorch.HfmgSettings())),
            ConfigTypeError,
            r"^config.common.activations: expected IfmrSettings, got HfmgSettings",
        ),
        (caffe.QuantConfig(weight_rounding="up"), ConfigError, r"config.weight_rounding: weight_rounding must be"),
        (
            caffe.QuantConfig(skip_layers="conv"),
            ConfigTypeError,
            r"config.skip_layers: skip_layers must be a list, got",
        ),
        (caffe.QuantConfig(skip_layers=("cov",)), ConfigError, r'^config.skip_layers: .*"cov".*Did you mean "conv"'),
    ],
)
def test_what_the_caffe_dialect_has_not_is_refused_with_its_place(config, error, match, caffe_files):
    with pytest.raises(error, match=match):
        caffe.quantize(*caffe_files, [IMAGES], config)
