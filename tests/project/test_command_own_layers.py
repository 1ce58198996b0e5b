"""A user's own layers on the command line: --import, --custom-proto and --allow-python, alike for every command."""

from __future__ import annotations

import sys
from contextlib import suppress

import numpy as np
import pytest

from amct.caffe.pycaffe import set_random_seed
from amct.cli import main
from amct.extend import unregister_caffe_layer

REGISTERED = """
from dataclasses import dataclass
from amct.extend import CaffeLayer, register_caffe_layer

@dataclass(frozen=True)
class Parameters:
    factor: float = 1.0

@register_caffe_layer("Own", parameters=Parameters)
class Own(CaffeLayer):
    def reshape(self, bottoms):
        return [bottoms[0]]

    def forward(self, bottoms, parameters):
        return [bottoms[0] * self.parameter.own_param.factor]

    def to_onnx(self, place):
        place.top("Mul", place.bottom, place.value("factor", self.parameter.own_param.factor))
"""
MESSAGES = """
syntax = "proto2";
package caffe;
message LayerParameter { optional OwnParameter own_param = 4999; }
message OwnParameter { optional float factor = 1 [default = 1]; }
"""
PYTHON = """
import caffe

class Own(caffe.Layer):
    def reshape(self, bottom, top):
        top[0].reshape(*bottom[0].shape)

    def forward(self, bottom, top):
        top[0].data[...] = bottom[0].data * float(self.param_str)

    def backward(self, top, propagate_down, bottom):
        bottom[0].diff[...] = top[0].diff * float(self.param_str)
"""
LAYERS = """
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
  convolution_param { num_output: 4 kernel_size: 3 weight_filler { type: "xavier" } } }
OWN
layer { name: "fc" type: "InnerProduct" bottom: "own" top: "fc"
  inner_product_param { num_output: 3 weight_filler { type: "xavier" } } }
"""
DATA = 'layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 2 dim: 3 dim: 8 dim: 8 } } }'
BATCHES = """layer { name: "data" type: "DummyData" top: "data" top: "label" dummy_data_param {
  shape { dim: 2 dim: 3 dim: 8 dim: 8 } shape { dim: 2 } data_filler { type: "gaussian" }
  data_filler { value: 1 } } }"""
LOSS = 'layer { name: "loss" type: "SoftmaxWithLoss" bottom: "fc" bottom: "label" top: "loss" }'
SOLVER = 'net: "train.prototxt" base_lr: 0.01 lr_policy: "fixed" max_iter: 2 snapshot_prefix: "trained"'
SCRIPT = "import caffe, sys\nprint(sorted(caffe.Net('net.prototxt', caffe.TEST).forward()))\n"

PAIR = ["net.prototxt", "net.caffemodel"]
VALUES = ["--data", "data.npy", "--batch-size", "2"]
MODEL = ["--model", "net.prototxt"]
COMMANDS = {
    "quantize": ["quantize", *PAIR, *VALUES, "-o", "again/net"],
    "inspect": ["inspect", "net.prototxt"],
    "compare": ["compare", *PAIR, "out/net", *VALUES],
    "report": ["report", *PAIR, "out/net", *VALUES, "-o", "report.html"],
    "config": ["config", "init", *MODEL, "-o", "config.json"],
    "to-onnx": ["caffe", "to-onnx", *MODEL, "--weights", "net.caffemodel", "-o", "net.onnx"],
    "train": ["caffe", "train", "--solver", "solver.prototxt"],
    "test": ["caffe", "test", "--model", "train.prototxt", "--weights", "net.caffemodel", "--iterations", "1"],
    "time": ["caffe", "time", *MODEL, "--iterations", "1"],
    "run": ["caffe", "run", "script.py"],
}
FIELDS = 'layer { name: "own" type: "Own" bottom: "conv" top: "own" own_param { factor: 0.5 } }'
CODE = """layer { name: "own" type: "Python" bottom: "conv" top: "own"
  python_param { module: "own_python_layers" layer: "Own" param_str: "0.5" } }"""
KINDS = {
    "import": (FIELDS, ["--import", "own_layers.py"]),
    "custom-proto": (FIELDS, ["--custom-proto", "custom.proto", "--import", "without_message.py"]),
    "python": (CODE, ["--allow-python"]),
}


def run(command, switches):
    """Run a command as a new process would: no layer is registered before."""
    at = 2 if command[0] in ("caffe", "config") else 1
    try:
        return main([*command[:at], *switches, *command[at:]])
    finally:
        for name in ("own_layers", "without_message", "own_python_layers"):
            sys.modules.pop(name, None)
        with suppress(KeyError):
            unregister_caffe_layer("Own")


@pytest.fixture(scope="module", params=KINDS)
def made(request, tmp_path_factory):
    """A folder with a net that has a layer of its own, its quantized files, data and a solver; the switches."""
    layer, switches = KINDS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    layers = LAYERS.replace("OWN", layer)
    for name, text in {
        "net.prototxt": DATA + layers,
        "train.prototxt": BATCHES + layers + LOSS,
        "solver.prototxt": SOLVER,
        "own_layers.py": REGISTERED,
        "without_message.py": REGISTERED.replace(", parameters=Parameters", ""),
        "custom.proto": MESSAGES,
        "own_python_layers.py": PYTHON,
        "script.py": SCRIPT,
        "weights.py": "import caffe\ncaffe.Net('net.prototxt', caffe.TEST).save('net.caffemodel')\n",
    }.items():
        (folder / name).write_text(text)
    np.save(folder / "data.npy", np.random.default_rng(0).normal(size=(6, 3, 8, 8)).astype(np.float32))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("AMCT_LOG_LEVEL", "error")
        set_random_seed(0)
        assert run(["caffe", "run", "weights.py"], switches) == 0
        assert run(["quantize", *PAIR, *VALUES, "-o", "out/net"], switches) == 0
    return folder, switches


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_runs_own_layers_where_it_is_told_to(command, made, monkeypatch, capsys):
    folder, switches = made
    monkeypatch.chdir(folder)
    monkeypatch.setenv("AMCT_LOG_LEVEL", "error")
    end = ["--end", "conv"] if command == "to-onnx" and "--allow-python" in switches else []  # they have no ONNX form
    assert run([*COMMANDS[command], *end], switches) == 0, capsys.readouterr().err
    assert "caffe" not in sys.modules


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in ("inspect", "config", "run")])
def test_without_the_switch_the_error_names_it(command, made, monkeypatch, capsys):
    folder, switches = made
    monkeypatch.chdir(folder)
    before = set(folder.rglob("*"))
    assert main(COMMANDS[command]) == 2
    assert switches[0] in capsys.readouterr().err
    assert "own_python_layers" not in sys.modules
    assert set(folder.rglob("*")) == before
