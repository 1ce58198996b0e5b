"""Another package adds an activation algorithm through ``amct.extend`` alone, for files and objects of every door."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from toy_activation import TOY, ToyObserver, ToySettings

import amct.onnx_model
import amct.pytorch
import amct_caffe
from amct import caffe, extend
from amct.caffe import pycaffe
from amct.errors import ArgumentError, ArgumentTypeError, ConfigError, ConfigTypeError, ParseError

IMAGES = np.random.default_rng(8).normal(0.3, 1.0, size=(4, 3, 8, 8)).astype(np.float32)
CFG = 'common_config { toy_quantize { k: 2.5 mode: "std" limits: [-1.5, 9] } }\n'
BLOCK = {"num_bits": 8, "act_algo": "toy", "asymmetric": True, "k": 2.5, "mode": "std", "limits": [-1.5, 9.0]}
SETTINGS = ToySettings(k=2.5, limits=(-1.5, 9.0))
PROTOTXT = """
name: "small"
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 4 dim: 3 dim: 8 dim: 8 } } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
  convolution_param { num_output: 4 kernel_size: 3 weight_filler { type: "gaussian" std: 0.3 } } }
layer { name: "sum" type: "Eltwise" bottom: "conv" bottom: "conv" top: "sum" }
"""


@pytest.fixture(autouse=True)
def toy():
    with extend.registered(**TOY):
        yield


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1)).eval()


@pytest.fixture(scope="module")
def onnx_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("toy") / "net.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.onnx itself
        torch.onnx.export(network(), (torch.from_numpy(IMAGES),), path, dynamo=True, opset_version=18, verbose=False)
    return path


def expected_scale():
    low = max(IMAGES.astype(np.float64).mean() - 2.5 * IMAGES.astype(np.float64).std(), -1.5)
    high = min(IMAGES.astype(np.float64).mean() + 2.5 * IMAGES.astype(np.float64).std(), 9.0)
    return (high - low) / 255


def forms(folder):
    """The same config as a simple config, as a full one, as its content and as an object."""
    (folder / "toy.cfg").write_text(CFG)
    full = {"0": {"activation_quant_params": BLOCK}, "2": {"activation_quant_params": BLOCK}}
    (folder / "toy.json").write_text(json.dumps(full))
    config = amct.pytorch.QuantConfig(common=amct.pytorch.LayerConfig(activations=SETTINGS))
    return folder / "toy.cfg", folder / "toy.json", full, config


# -- the PyTorch door and the ONNX door --------------------------------------------------------------------------------


def test_a_torch_model_is_quantized_with_it_from_every_form_of_config(tmp_path):
    records = [
        amct.pytorch.quantize(network(), [torch.from_numpy(IMAGES)], config).record for config in forms(tmp_path)
    ]
    assert all(record == records[0] for record in records)
    assert records[0]["0"].scale_d == pytest.approx(expected_scale(), rel=1e-5)


def test_an_onnx_model_is_quantized_with_it_and_saved(onnx_file, tmp_path):
    config = amct.onnx_model.QuantConfig(common=amct.onnx_model.LayerConfig(activations=SETTINGS))
    quantized = amct.onnx_model.quantize(onnx_file, [IMAGES], config)
    first = next(iter(quantized.record.values()))
    assert first.scale_d == pytest.approx(expected_scale(), rel=1e-5)
    from_file = amct.onnx_model.quantize(onnx_file, [IMAGES], forms(tmp_path)[0])
    assert from_file.record == quantized.record
    quantized.save(tmp_path / "toy")
    assert "ToySettings(num_bits=8" in (tmp_path / "toy_quant.json").read_text()


def test_settings_of_one_layer_and_of_one_type_are_taken():
    config = amct.pytorch.QuantConfig(
        layers={"0": amct.pytorch.LayerConfig(activations=ToySettings(mode="max", asymmetric=False))},
        types={"Conv2d": amct.pytorch.LayerConfig(activations=amct.pytorch.HfmgSettings())},
    )
    record = amct.pytorch.quantize(network(), [torch.from_numpy(IMAGES)], config).record
    largest = np.abs(IMAGES).max()
    assert record["0"].scale_d == pytest.approx(largest / 127, rel=1e-6)
    assert record["0"].offset_d == 0


# -- mistakes ----------------------------------------------------------------------------------------------------------

MISTAKES = {
    "unknown field": ("toy_quantize { kk: 2 }", ParseError, r"2:20: ToyQuantize has no field kk. Did you mean \"?k"),
    "unknown algorithm": ("toi_quantize { k: 2 }", ParseError, r"2:5: .*Did you mean \"?toy_quantize"),
    "wrong type": ('toy_quantize { k: "two" }', ParseError, r"2:23: .*k takes a decimal number"),
    "out of range": ("toy_quantize { k: 0 }", ConfigError, r"2:20: toy_quantize.k must be greater than 0, got 0"),
    "no such choice": ('toy_quantize { mode: "med" }', ConfigError, r"2:20: toy_quantize.mode must be 'std' or 'max'"),
    "one limit": ("toy_quantize { limits: 1 }", ConfigError, r"2:20: toy_quantize.limits must be a list"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("dialect", ["pytorch", "caffe"])
def test_mistakes_in_a_simple_config_have_their_line_and_column(mistake, dialect, tmp_path):
    block, error, match = MISTAKES[mistake]
    cfg = tmp_path / "a.cfg"
    cfg.write_text(f"common_config {{\n    {block}\n}}\n")
    read = {
        "pytorch": lambda: amct.pytorch.quantize(network(), [torch.from_numpy(IMAGES)], cfg),
        "caffe": lambda: caffe_config(tmp_path, cfg),
    }
    with pytest.raises(error, match=rf"a\.cfg:{match}"):
        read[dialect]()


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"kk": 1.0}, ConfigError, r'a\.json:1:\d+: .*the key "kk" is unknown. Did you mean "k"'),
        (
            {"act_algo": "toi"},
            ConfigError,
            r'a\.json:1:\d+: .*ifmr or hfmg or toy, got "toi".*Did you mean "toy"',
        ),
        ({"k": "two"}, ConfigTypeError, r"a\.json:1:\d+: .*k must be a number, got \"two\""),
        ({"k": 101.0}, ConfigError, r"a\.json:1:\d+: .*k must be at most 100, got 101"),
        (
            {"num_of_bins": 1024},
            ConfigError,
            r'a\.json:1:\d+: .*"num_of_bins" belongs to hfmg, but .* of toy',
        ),
    ],
)
def test_mistakes_in_a_full_config_have_their_line_and_column(change, error, match, tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"0": {"activation_quant_params": BLOCK | change}}))
    with pytest.raises(error, match=match):
        amct.pytorch.quantize(network(), [torch.from_numpy(IMAGES)], tmp_path / "a.json")


def test_mistakes_in_an_object_name_their_place():
    config = amct.pytorch.QuantConfig(layers={"0": amct.pytorch.LayerConfig(activations=ToySettings(k=-1.0))})
    with pytest.raises(
        ConfigError, match=r'^config.layers\["0"\].activations.k: toy_quantize.k must be greater than 0'
    ):
        amct.pytorch.quantize(network(), [torch.from_numpy(IMAGES)], config)


# -- the Caffe dialect -------------------------------------------------------------------------------------------------


def caffe_files(folder):
    model, weights = folder / "net.prototxt", folder / "net.caffemodel"
    model.write_text(PROTOTXT)
    pycaffe.Net(str(model), pycaffe.TEST).save(str(weights))
    return str(model), str(weights)


def caffe_config(folder, cfg):
    """What ``create_quant_config`` writes for a small net."""
    amct_caffe.create_quant_config(str(folder / "quant.json"), *caffe_files(folder), config_defination=str(cfg))
    return json.loads((folder / "quant.json").read_text())


def test_a_caffe_model_is_quantized_with_it_from_every_form_of_config(tmp_path):
    files = caffe_files(tmp_path)
    (tmp_path / "toy.cfg").write_text(CFG)
    block = {"act_algo": "toy", "num_bits": 8, "k": 2.5, "mode": "std", "limits": [-1.5, 9.0]}
    full = {"conv": {"activation_quant_params": block}, "sum": {"activation_quant_params": [block, block]}}
    (tmp_path / "toy.json").write_text(json.dumps(full))
    config = caffe.QuantConfig(common=caffe.LayerConfig(activations=SETTINGS))
    records = [
        caffe.quantize(*files, [IMAGES], form).record
        for form in (tmp_path / "toy.cfg", tmp_path / "toy.json", full, config)
    ]
    assert all(record == records[0] for record in records)
    assert records[0]["conv"].record_d[0].scale == pytest.approx(expected_scale(), rel=1e-5)


def test_the_caffe_json_names_the_algorithm_when_it_is_not_ifmr(tmp_path):
    (tmp_path / "toy.cfg").write_text(
        "common_config { toy_quantize { k: 2.5 } }\n"
        'override_layer_configs { layer_name: "sum" calibration_config { } }\n'
    )
    config = caffe_config(tmp_path, tmp_path / "toy.cfg")
    assert config["conv"]["activation_quant_params"] == {
        "act_algo": "toy",
        "num_bits": 8,
        "k": 2.5,
        "mode": "std",
        "limits": [-1e6, 1e6],
    }
    assert all("act_algo" not in block for block in config["sum"]["activation_quant_params"])


def test_an_offset_asked_for_in_a_caffe_config_is_written(tmp_path):
    (tmp_path / "toy.cfg").write_text("common_config { toy_quantize { asymmetric: false } }\n")
    assert caffe_config(tmp_path, tmp_path / "toy.cfg")["conv"]["activation_quant_params"]["with_offset"] is False


# -- registering -------------------------------------------------------------------------------------------------------


def test_registering_again_changes_nothing_and_another_class_is_refused():
    assert extend.register_activation(**TOY) is extend.register_activation(**TOY)

    @dataclass(frozen=True, kw_only=True)
    class Other:
        num_bits: int = 8
        asymmetric: bool = True

    with pytest.raises(ArgumentError, match='"toy" with Other clashes with the registered algorithm "toy"'):
        extend.register_activation(name="toy", settings=Other, observer=ToyObserver)
    with pytest.raises(ArgumentError, match='clashes with the registered algorithm "toy"'):
        extend.register_activation(name="toy2", settings=ToySettings, observer=ToyObserver)
    with pytest.raises(ArgumentError, match='clashes with the registered algorithm "ifmr"'):
        extend.register_activation(name="ifmr", settings=Other, observer=ToyObserver)


def test_a_removed_algorithm_is_unknown_again(tmp_path):
    (tmp_path / "a.cfg").write_text(CFG)
    extend.register_activation(**TOY).remove()
    with pytest.raises(ParseError, match="has no field toy_quantize"):
        amct.pytorch.quantize(network(), [torch.from_numpy(IMAGES)], tmp_path / "a.cfg")


def test_settings_that_cannot_be_used_are_refused():
    @dataclass(frozen=True)
    class NoBits:
        asymmetric: bool = True

    @dataclass(frozen=True, kw_only=True)
    class NoDefault:
        num_bits: int
        asymmetric: bool = True

    @dataclass
    class Changeable:
        num_bits: int = 8
        asymmetric: bool = True

    for settings, match in ((NoBits, "num_bits"), (NoDefault, "num_bits"), (Changeable, "frozen"), (dict, "dataclass")):
        with pytest.raises(ArgumentTypeError, match=match):
            extend.register_activation(name="odd", settings=settings, observer=ToyObserver)
    with pytest.raises(ArgumentError, match="letters, digits and underscores"):
        extend.register_activation(name="a b", settings=ToySettings, observer=ToyObserver)
