"""``amct caffe train``, ``test`` and ``run``: a net learns digits from prototxt and LMDB alone, Ctrl-C, old scripts."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from amct import log
from amct.caffe.engine.solvers import solver as solver_module
from amct.caffe.pycaffe.proto import caffe_pb2
from amct.cli import INTERRUPTED, USAGE_OR_INPUT_ERROR, main
from amct.data import open_samples
from amct.data.lmdb import write_lmdb

LENET = """
name: "LeNet for 8 x 8 digits"
layer { name: "digits" type: "Data" top: "data" top: "label" include { phase: TRAIN }
        transform_param { scale: 0.00390625 } data_param { source: "train" batch_size: 50 backend: LMDB } }
layer { name: "digits" type: "Data" top: "data" top: "label" include { phase: TEST }
        transform_param { scale: 0.00390625 } data_param { source: "test" batch_size: 99 backend: LMDB } }
layer { name: "conv1" type: "Convolution" bottom: "data" top: "conv1" param { lr_mult: 1 } param { lr_mult: 2 }
        convolution_param { num_output: 20 kernel_size: 3 weight_filler { type: "xavier" } bias_filler { value: 0 } } }
layer { name: "pool1" type: "Pooling" bottom: "conv1" top: "pool1"
        pooling_param { pool: MAX kernel_size: 2 stride: 2 } }
layer { name: "conv2" type: "Convolution" bottom: "pool1" top: "conv2" param { lr_mult: 1 } param { lr_mult: 2 }
        convolution_param { num_output: 50 kernel_size: 2 weight_filler { type: "xavier" } bias_filler { value: 0 } } }
layer { name: "ip1" type: "InnerProduct" bottom: "conv2" top: "ip1" param { lr_mult: 1 } param { lr_mult: 2 }
        inner_product_param { num_output: 100 weight_filler { type: "xavier" } } }
layer { name: "relu1" type: "ReLU" bottom: "ip1" top: "ip1" }
layer { name: "ip2" type: "InnerProduct" bottom: "ip1" top: "ip2" param { lr_mult: 1 } param { lr_mult: 2 }
        inner_product_param { num_output: 10 weight_filler { type: "xavier" } } }
layer { name: "accuracy" type: "Accuracy" bottom: "ip2" bottom: "label" top: "accuracy" include { phase: TEST } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip2" bottom: "label" top: "loss" }
"""
SOLVER = """
net: "lenet.prototxt" base_lr: 0.05 momentum: 0.9 weight_decay: 0.0005 lr_policy: "multistep" gamma: 0.1 stepvalue: 200
test_iter: 3 test_interval: 150 display: 150 max_iter: 300 snapshot_prefix: "lenet" random_seed: 1
"""


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """1500 digits to learn from and 297 to test with, as LMDBs beside the prototxts."""
    folder = tmp_path_factory.mktemp("digits")
    data = load_digits()
    images = (data.images * 15.9375).astype(np.uint8)[:, None]
    order = np.random.default_rng(0).permutation(len(images))
    for name, part in (("train", order[:1500]), ("test", order[1500:])):
        write_lmdb(folder / name, zip(images[part], data.target[part], strict=True))
    (folder / "lenet.prototxt").write_text(LENET)
    (folder / "solver.prototxt").write_text(SOLVER)
    return folder


@pytest.fixture(autouse=True)
def _in_folder(digits, monkeypatch):
    monkeypatch.chdir(digits)
    yield
    log.stop()


def short_solver(prefix, extra=""):
    text = SOLVER.replace("max_iter: 300", "max_iter: 20").replace('"lenet"', f'"{prefix}"')
    Path("short.prototxt").write_text(text + extra)
    return "short.prototxt"


def accuracy(output):
    (line,) = [line for line in output.splitlines() if line.startswith("accuracy = ")]
    return float(line.removeprefix("accuracy = "))


def test_lenet_learns_digits_from_prototxt_and_solver_alone(capsys):
    assert main(["caffe", "train", "--solver", "solver.prototxt"]) == 0
    log_text = capsys.readouterr().err
    assert "[AMCT][INFO]Iteration 300, Testing net (#0)" in log_text
    assert "[AMCT][INFO]Optimization Done." in log_text
    assert "Iteration 150, Testing net (#0)" in log_text
    assert not Path("amct_log").exists()
    model = ["--model", "lenet.prototxt", "--weights", "lenet_iter_300.caffemodel"]
    assert main(["caffe", "test", *model, "--iterations", "3"]) == 0
    output = capsys.readouterr()
    assert accuracy(output.out) > 0.97
    assert output.out.startswith("Loss: ")
    assert "loss = " in output.out
    assert "[AMCT][INFO]Batch 2, accuracy = " in output.err


def test_weights_and_snapshots_to_go_on_from(capsys):
    solver = short_solver("short", "snapshot: 10")
    assert main(["caffe", "train", "--solver", solver]) == 0
    straight = Path("short_iter_20.solverstate").read_bytes()
    Path("short_iter_20.solverstate").unlink()
    capsys.readouterr()
    assert main(["caffe", "train", "--solver", solver, "--snapshot", "short_iter_10.solverstate"]) == 0
    assert "Restoring previous solver status from short_iter_10.solverstate" in capsys.readouterr().err
    resumed = caffe_pb2.SolverState.FromString(Path("short_iter_20.solverstate").read_bytes())
    recorded = caffe_pb2.SolverState.FromString(straight)
    # the data start again from the first digit, so the histories differ, everything else does not
    assert (resumed.iter, resumed.learned_net) == (recorded.iter, recorded.learned_net)
    assert main(["caffe", "train", "--solver", solver, "--weights", "short_iter_10.caffemodel"]) == 0
    assert "Finetuning from short_iter_10.caffemodel" in capsys.readouterr().err


def interrupt_at(monkeypatch, iteration, kind=signal.SIGINT):
    """Send a signal in the middle of an iteration."""
    learning_rate = solver_module.learning_rate

    def with_signal(parameter, current, step):
        if current == iteration:
            signal.raise_signal(kind)
        return learning_rate(parameter, current, step)

    monkeypatch.setattr(solver_module, "learning_rate", with_signal)


def test_ctrl_c_finishes_the_iteration_writes_a_snapshot_and_stops(monkeypatch, capsys):
    interrupt_at(monkeypatch, 4)
    handler = signal.getsignal(signal.SIGINT)
    assert main(["caffe", "train", "--solver", short_solver("stopped")]) == INTERRUPTED
    assert Path("stopped_iter_5.caffemodel").is_file()
    assert Path("stopped_iter_5.solverstate").is_file()
    assert not Path("stopped_iter_20.caffemodel").exists()
    assert "Optimization stopped early." in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is handler


def test_effects_of_signals_can_be_chosen(monkeypatch):
    interrupt_at(monkeypatch, 4)
    solver = short_solver("chosen")
    assert main(["caffe", "train", "--solver", solver, "--sigint-effect", "snapshot"]) == 0
    assert Path("chosen_iter_5.caffemodel").is_file()
    assert Path("chosen_iter_20.caffemodel").is_file()


def test_a_hang_up_writes_a_snapshot_and_goes_on(monkeypatch):
    interrupt_at(monkeypatch, 2, signal.SIGHUP)
    assert main(["caffe", "train", "--solver", short_solver("hung")]) == 0
    assert Path("hung_iter_3.caffemodel").is_file()
    assert Path("hung_iter_20.caffemodel").is_file()


def test_stages_and_levels_reach_the_net(capsys):
    Path("staged.prototxt").write_text(
        LENET
        + 'layer { name: "s" type: "Softmax" bottom: "ip2" top: "staged" include { stage: "deploy" } }'
        + 'layer { name: "l" type: "Softmax" bottom: "ip2" top: "levelled" include { min_level: 2 } }'
    )
    Path("weights.caffemodel").write_bytes(b"")
    options = ["--model", "staged.prototxt", "--weights", "weights.caffemodel", "--iterations", "1"]
    assert main(["caffe", "test", *options, "--stage", "deploy"]) == 0
    output = capsys.readouterr().out
    assert "staged = " in output
    assert "levelled = " not in output
    assert main(["caffe", "test", *options, "--level", "2"]) == 0
    assert "levelled = " in capsys.readouterr().out
    solver = short_solver("staged")
    Path(solver).write_text(Path(solver).read_text().replace("lenet.prototxt", "staged.prototxt"))
    assert main(["caffe", "train", "--solver", solver, "--stage", "deploy", "--level", "2"]) == 0
    layers = caffe_pb2.NetParameter.FromString(Path("staged_iter_20.caffemodel").read_bytes()).layer
    assert {"s", "l"} <= {layer.name for layer in layers}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--solver", "none.prototxt"], "error: File not found: none.prototxt"),
        (
            ["train", "--solver", "solver.prototxt", "--weights", "a", "--snapshot", "b"],
            "--snapshot to go on or --weights",
        ),
        (["train"], "Missing option '--solver'"),
        (["test", "--model", "lenet.prototxt", "--weights", "none"], "Could not open file none"),
        (["test", "--model", "none", "--weights", "none"], "Could not open file none"),
        (
            ["test", "--model", "lenet.prototxt", "--weights", "w", "--iterations", "0"],
            "iterations must be at least 1, got 0",
        ),
        (["run", "none.py"], "none.py: there is no such script"),
    ],
)
def test_mistakes_on_the_command_line(arguments, message, capsys):
    Path("w").touch()
    assert main(["caffe", *arguments]) == USAGE_OR_INPUT_ERROR
    assert message in capsys.readouterr().err


SCRIPT = """
import sys
import numpy as np
import caffe
from caffe.proto import caffe_pb2
import caffe.io

caffe.set_mode_cpu()
net = caffe.Net('deploy.prototxt', caffe.TEST)
net.params['ip'][0].data[...] = np.eye(3)
net.params['ip'][1].data[...] = [0, 0, int(sys.argv[1])]
net.save('surgery.caffemodel')
again = caffe.Net('deploy.prototxt', 'surgery.caffemodel', caffe.TEST)
again.blobs['data'].data[...] = [[1, 2, 3]]
print(again.forward()['ip'].tolist(), sys.argv[2:], __name__)
"""


@pytest.fixture
def _forget_caffe():
    yield
    for name in [name for name in sys.modules if name == "caffe" or name.startswith("caffe.")]:
        del sys.modules[name]


@pytest.mark.usefixtures("_forget_caffe")
def test_an_old_script_runs_unchanged(capsys):
    Path("deploy.prototxt").write_text(
        'input: "data" input_shape { dim: 1 dim: 3 }\n'
        'layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param { num_output: 3 } }'
    )
    Path("script.py").write_text(SCRIPT)
    arguments = list(sys.argv)
    assert main(["caffe", "run", "script.py", "5", "--help", "-x"]) == 0
    assert capsys.readouterr().out == "[[1.0, 2.0, 8.0]] ['--help', '-x'] __main__\n"
    assert sys.argv == arguments


@pytest.mark.usefixtures("_forget_caffe")
def test_a_script_that_fails_shows_where(capsys):
    Path("fails.py").write_text("import caffe\n\ncaffe.Net('nothing.prototxt', caffe.TEST)\n")
    assert main(["caffe", "run", "fails.py"]) == 1
    error = capsys.readouterr().err
    assert 'fails.py", line 3' in error
    assert "Could not open file nothing.prototxt" in error
    Path("exits.py").write_text("raise SystemExit(7)")
    with pytest.raises(SystemExit) as caught:
        main(["caffe", "run", "exits.py"])
    assert caught.value.code == 7


@pytest.mark.usefixtures("_forget_caffe")
def test_python_layers_of_a_script_need_leave(capsys):
    Path("doubling.py").write_text(
        "import caffe\n"
        "class Double(caffe.Layer):\n"
        "    def setup(self, bottom, top): pass\n"
        "    def reshape(self, bottom, top): top[0].reshape(*bottom[0].data.shape)\n"
        "    def forward(self, bottom, top): top[0].data[...] = 2 * bottom[0].data\n"
    )
    Path("python.prototxt").write_text(
        'input: "data" input_shape { dim: 2 }\n'
        'layer { name: "d" type: "Python" bottom: "data" top: "d" python_param { module: "doubling" layer: "Double" } }'
    )
    Path("layers.py").write_text(
        "import caffe\nnet = caffe.Net('python.prototxt', caffe.TEST)\n"
        "net.blobs['data'].data[...] = [1, 2]\nprint(net.forward()['d'].tolist())\n"
    )
    assert main(["caffe", "run", "layers.py"]) == 1
    assert "it would execute code" in capsys.readouterr().err
    assert main(["caffe", "run", "--allow-python", "layers.py"]) == 0
    assert capsys.readouterr().out == "[2.0, 4.0]\n"


@pytest.mark.assets
def test_the_published_lenet_on_all_of_mnist(assets, tmp_path, monkeypatch, capsys):
    """Its own train_test prototxt in the old syntax, an LMDB made from the idx files, 10 000 digits."""
    monkeypatch.chdir(tmp_path)
    samples = open_samples(assets / "mnist" / "t10k-images-idx3-ubyte.gz")
    pairs = ((sample.values.astype(np.uint8), sample.label) for sample in samples)
    assert write_lmdb(tmp_path / "examples" / "mnist" / "mnist_test_lmdb", pairs) == 10_000
    folder = assets / "caffe_lenet_mnist"
    model = ["--model", str(folder / "lenet_train_test.prototxt")]
    weights = ["--weights", str(folder / "lenet_iter_10000.caffemodel")]
    assert main(["caffe", "test", *model, *weights, "--iterations", "100"]) == 0
    assert accuracy(capsys.readouterr().out) == pytest.approx(0.9905, abs=1e-6)
