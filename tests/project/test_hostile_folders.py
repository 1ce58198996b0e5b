"""A model folder from a stranger: its hidden files make no command and no function touch anything outside of it."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx import save_model as save_onnx
from torch import nn

import amct.caffe
import amct.onnx_model
import amct.pytorch
import amct.record
import amct_caffe.caffe
import amct_pytorch
from amct import atomic, log
from amct.atomic import _group
from amct.atomic._disk import _machine
from amct.caffe import installed_alias
from amct.cli import main
from amct.errors import AmctError, FileError
from amct.record import CaffeLayerRecord, DataFactors
from amct_pytorch.common.auto_calibration import AutoCalibrationEvaluatorBase
from caffe_tree import write_bones

PROTOTXT = """\
name: "small"
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 2 dim: 3 dim: 8 dim: 8 } } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
  convolution_param { num_output: 4 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "relu" type: "ReLU" bottom: "conv" top: "conv" }
layer { name: "fc" type: "InnerProduct" bottom: "conv" top: "fc"
  inner_product_param { num_output: 5 weight_filler { type: "xavier" } } }
"""
TRAINED = """\
layer { name: "data" type: "DummyData" top: "data" top: "label" dummy_data_param {
  shape { dim: 2 dim: 4 } shape { dim: 2 } data_filler { type: "constant" value: 1 } data_filler { value: 0 } } }
layer { name: "fc" type: "InnerProduct" bottom: "data" top: "fc"
  inner_product_param { num_output: 3 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "fc" bottom: "label" top: "loss" }
"""
SOLVER = 'net: "train.prototxt" base_lr: 0.1 lr_policy: "fixed" max_iter: 2 snapshot_prefix: "trained"\n'
RETRAIN_SOLVER = SOLVER.replace("trained", "retrain") + "test_iter: 1 test_interval: 2 test_initialization: false\n"
PRUNE_CFG = """\
prune_config { filter_pruner { balanced_l2_norm_filter_prune { prune_ratio: 0.5 ascend_optimized: true } } }
"""
QAT_CFG = """\
retrain_data_quant_config { ulq_quantize { } }
retrain_weight_quant_config { arq_retrain { channel_wise: true } }
"""
FACTORY = """\
import torch
from torch import nn
def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)).eval()
"""
CUSTOM_PROTO = (
    'syntax = "proto2";\npackage caffe;\nmessage LayerParameter { optional MineParameter mine_param = 9999; }\n'
)
CUSTOM_PROTO += "message MineParameter { optional int32 number = 1; }\n"
NETS = "my_nets_of_hostile_test"
DATA = ["--data", "data.npy", "--batch-size", "2"]
CAFFE_PAIR = ("net.prototxt", "net.caffemodel")
TRAINED_PAIR = ("train.prototxt", "trained_iter_2.caffemodel")
CAFFE_RESULT = ("caffe_fake_quant_model.prototxt", "caffe_fake_quant_weights.caffemodel")


def onnx_model():
    random = np.random.default_rng(0)
    shapes = {"w": (4, 3, 3, 3), "b": (4,), "v": (144, 5), "c": (5,)}
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["a"], name="conv"),
        helper.make_node("Relu", ["a"], ["r"], name="relu"),
        helper.make_node("Flatten", ["r"], ["f"], name="flat"),
        helper.make_node("Gemm", ["f", "v", "c"], ["y"], name="fc"),
    ]
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 5])],
        [numpy_helper.from_array(random.normal(size=s).astype(np.float32), n) for n, s in shapes.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@cache  # one object, whose trace is kept: tracing takes most of the time
def torch_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)).eval()


def values():
    return np.load("data.npy")


def batch():
    return torch.from_numpy(values()[:2])


def run_caffe(model, weights):
    net = amct_caffe.caffe.Net(str(model), str(weights), amct_caffe.caffe.TEST)
    net.blobs["data"].data[...] = values()[:2]
    net.forward()


def retrain_caffe():
    """Leave a trained model for save_quant_retrain_model: its prototxt, snapshot, record and config."""
    amct_caffe.create_quant_retrain_config("retrain.json", *TRAINED_PAIR)
    modified = ("retrain.prototxt", "retrain.caffemodel")
    amct_caffe.create_quant_retrain_model(*TRAINED_PAIR, "retrain.json", *modified, "retrain_record.txt")
    solver = Path("retrain_solver.prototxt")
    text = solver.read_text()
    solver.write_text(text.replace("train.prototxt", "retrain.prototxt"))
    amct_caffe.caffe.SGDSolver("retrain_solver.prototxt").solve()
    solver.write_text(text)


def caffe_graph():
    return amct_caffe.init("caffe.json", *CAFFE_PAIR, "flow_record.txt")


@cache
def prunable_model():
    torch.manual_seed(0)
    convolutions = nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU()
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(512, 5))


def train_torch():
    """Leave configs, records and states of trained models for restoring and saving them."""
    amct_pytorch.create_quant_retrain_config("qat.json", torch_model(), batch())
    models = {
        "qat": amct_pytorch.create_quant_retrain_model("qat.json", torch_model(), "qat.txt", batch()),
        "pruned": amct_pytorch.create_prune_retrain_model(prunable_model(), batch(), "prune.cfg", "pruned.txt"),
        "both": amct_pytorch.create_compressed_retrain_model(prunable_model(), batch(), "compress.cfg", "both.txt"),
    }
    for name, model in models.items():
        model.train()(batch())
        torch.save(model.state_dict(), f"{name}.pth")
    amct.pytorch.prune(prunable_model(), batch(), 0.5).save("pruned")


def write_files(folder: Path, prototxt=PROTOTXT, trained=TRAINED, onnx=None, factory=FACTORY, nets=NETS) -> None:
    """Write float models of all kinds, their quantized files, configs and records, and data."""
    for name, text in {
        "net.prototxt": prototxt,
        "train.prototxt": trained,
        "solver.prototxt": SOLVER,
        "retrain_solver.prototxt": RETRAIN_SOLVER,
        f"{nets}.py": factory,
        "custom.proto": CUSTOM_PROTO,
        "prune.cfg": PRUNE_CFG,
        "search.cfg": "compress_ratio: 1.3",
        "compress.cfg": PRUNE_CFG + QAT_CFG,
        "quant.cfg": "batch_num: 1\n",
        "dmq.cfg": "batch_num: 1\ncommon_config { dmq_balancer { migration_strength: 0.5 } }\n",
        "script.py": "import caffe\ncaffe.Net('net.prototxt', 'net.caffemodel', caffe.TEST).save('new.caffemodel')\n",
    }.items():
        (folder / name).write_text(text)
    write_bones(folder / "real")
    np.save(folder / "data.npy", np.random.default_rng(0).normal(size=(4, 3, 8, 8)).astype(np.float32))
    save_onnx(onnx or onnx_model(), folder / "net.onnx")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("AMCT_LOG_LEVEL", "error")
        net = amct_caffe.caffe.Net("net.prototxt", amct_caffe.caffe.TEST)
        net.save("net.caffemodel")
        net.save_hdf5("net.h5")
        assert main(["quantize", *CAFFE_PAIR, *DATA, "-o", "caffe"]) == 0
        assert main(["quantize", "net.onnx", *DATA, "-o", "onnx"]) == 0
        assert main(["quantize", f"{nets}:build", *DATA, "-o", "torch"]) == 0
        assert main(["quantize", "net.onnx", "--data", "data.npy", "--min-sqnr", "1", "-o", "found"]) == 0
        assert main(["caffe", "train", "--solver", "solver.prototxt"]) == 0
        amct_caffe.create_quant_config("caffe.json", *CAFFE_PAIR)
        retrain_caffe()
        train_torch()
        amct_pytorch.create_quant_config("torch.json", torch_model(), batch())
        amct_pytorch.create_distill_config("distill.json", torch_model(), batch())
        amct_pytorch.tensor_decompose.auto_decomposition(nn.Conv2d(64, 64, 3), "pairs.json")
        amct_pytorch.create_quant_config("dmq.json", torch_model(), batch(), config_defination="dmq.cfg")
        amct_pytorch.quantize_model("torch.json", "m.onnx", "r.txt", torch_model(), batch())(batch())
    shutil.rmtree(folder / "amct_log", ignore_errors=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with float models of all kinds, their quantized files, configs and records, and data."""
    folder = tmp_path_factory.mktemp("made")
    write_files(folder)
    return folder


# ------------------------------------------------------------------------------------------------------ the stranger


def planted(folder: Path, token: int, ending: str, *, ours: bool = True) -> Path:
    """A hidden name of this program's pattern, as a process of this or of another machine would give it."""
    return folder / f".amct-{_machine() if ours else '0' * 8}-{2**31}-1-{token:012x}.{ending}"


def plant_journals(model: Path, home: Path) -> None:
    """What the first version of this program obeyed, and what looks like what it writes today."""
    (model / "link").symlink_to(home / ".bashrc")
    (model / "folder link").symlink_to(home)
    outside = [["../home/.ssh/id_rsa", "../home/.bashrc"]]
    absolute = [[str(home / ".ssh/id_rsa"), str(home / ".bashrc")]]
    through_links = [["folder link/.ssh/id_rsa", "link"], ["link", "folder link/moved"]]
    elsewhere = planted(model.parent, 1, "journal")
    for token, files in enumerate((outside, absolute, through_links), 1):
        for ours in (True, False):
            text = json.dumps({"files": files, "pointers": ["../home/.ssh/config"]})
            planted(model, token, "journal", ours=ours).write_text(text)
            elsewhere.write_text(text)
    planted(model, 4, "pointer").write_text(f"../{elsewhere.name}")
    planted(model, 5, "journal").symlink_to(home / ".bashrc")
    planted(model, 6, "journal").write_text(json.dumps({"version": 2, "files": ["../home/.bashrc"]}))
    planted(model, 7, "journal").write_text(json.dumps({"version": 2, "files": [str(home / ".bashrc")]}))
    planted(model, 8, "journal").write_text(json.dumps({"version": 2, "files": ["link", "folder link"]}))
    os.mkfifo(planted(model, 9, "journal"))
    planted(model, 10, "tmp").symlink_to(home / ".bashrc")
    planted(model, 11, "tmp.onnx").symlink_to(home / ".ssh" / "new")
    planted(model, 12, "tmp").symlink_to(home)


def plant_lock(model: Path, home: Path) -> None:
    (model / ".amct.lock").symlink_to(home / ".bashrc")


def plant_all(model: Path, home: Path) -> None:
    plant_journals(model, home)
    plant_lock(model, home)


def state(folder: Path, without: Path | None = None) -> dict[str, tuple[object, ...]]:
    """All that a program could change below a folder: contents, kinds, modes, and which inode has which name."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if without is not None and path.is_relative_to(without):
            continue
        about = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else None
        found[str(path.relative_to(folder))] = (about.st_mode, about.st_ino, about.st_nlink, about.st_size, content)
    return found


@pytest.fixture
def place(made, tmp_path, monkeypatch):
    """The folder that holds a downloaded model folder, and the home beside it; the model folder is the current one."""
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    (home / ".bashrc").write_text("export PATH\n")
    (home / ".ssh" / "id_rsa").write_text("secret\n")
    shutil.copytree(made, tmp_path / "model")
    monkeypatch.chdir(tmp_path / "model")
    monkeypatch.setenv("AMCT_LOG_LEVEL", "error")
    monkeypatch.setattr(installed_alias, "_path", lambda: tmp_path / "caffe.py")  # not that of this environment
    return tmp_path


# ------------------------------------------------------------------------------------- every command, every function

READING_COMMANDS = {
    "record show": ["record", "show", "caffe_quant_param_record.txt"],
    "record show --json": ["record", "show", "r.txt", "--json"],
    "record diff": ["record", "diff", "caffe_quant_param_record.txt", "caffe_quant_param_record.txt"],
    "config check": ["config", "check", "caffe.json", "--model", "net.prototxt"],
    "config explain": ["config", "explain", "quant.cfg", "--model", "net.onnx"],
    "inspect Caffe": ["inspect", "net.prototxt"],
    "inspect ONNX": ["inspect", "net.onnx"],
    "compare Caffe": ["compare", *CAFFE_PAIR, "caffe", *DATA],
    "compare ONNX": ["compare", "net.onnx", "onnx", *DATA],
    "compare PyTorch": ["compare", f"{NETS}:build", "torch", *DATA],
    "sensitivity": ["sensitivity", "net.onnx", *DATA],
    "certificate check": ["certificate", "check", "found_quant.json"],
    "caffe test": ["caffe", "test", "--model", "train.prototxt", "--weights", "trained_iter_2.caffemodel"],
    "caffe install-alias": ["caffe", "install-alias", "--remove"],
    "caffe patch export": ["caffe", "patch", "export", "caffe_patch"],
    "caffe patch install": ["caffe", "patch", "install", "--caffe_dir", "real"],
    "caffe time": ["caffe", "time", "--model", "net.prototxt", "--iterations", "1"],
}
WRITING_COMMANDS = {
    "record convert": ["record", "convert", "caffe_quant_param_record.txt", "new.bin"],
    "config init": ["config", "init", "--model", "net.prototxt", "--cfg", "quant.cfg", "-o", "new.json"],
    "quantize Caffe": ["quantize", *CAFFE_PAIR, *DATA, "-o", "caffe", "--report", "--equalize"],
    "quantize ONNX": ["quantize", "net.onnx", *DATA, "-o", "onnx"],
    "quantize PyTorch": ["quantize", f"{NETS}:build", *DATA, "-o", "torch"],
    "doctor": ["doctor", "net.onnx", *DATA, "-o", "new.json"],
    "compare --report": ["compare", "net.onnx", "onnx", *DATA, "--report", "new.html"],
    "report Caffe": ["report", *CAFFE_PAIR, "caffe", *DATA, "-o", "new.html"],
    "report ONNX": ["report", "net.onnx", "onnx", *DATA, "-o", "new.html"],
    "caffe train": ["caffe", "train", "--solver", "solver.prototxt"],
    "caffe train on": ["caffe", "train", "--solver", "solver.prototxt", "--snapshot", "trained_iter_2.solverstate"],
    "caffe merge-proto": ["caffe", "merge-proto", "--custom", "custom.proto", "-o", "new.proto"],
    "caffe to-onnx": ["caffe", "to-onnx", "--model", "net.prototxt", "--weights", "net.caffemodel", "-o", "new.onnx"],
    "caffe run": ["caffe", "run", "--force", "script.py"],
    "prune": ["prune", f"{NETS}:build", "--input-shape", "2,3,8,8", "-o", "pruned", "--sparse"],
    "caffe retrain": [
        "caffe",
        "retrain",
        "--solver",
        "retrain_solver.prototxt",
        "--model",
        TRAINED_PAIR[0],
        "--weights",
        TRAINED_PAIR[1],
        "-o",
        "retrained",
    ],
}


def quantized_torch():
    return amct.pytorch.quantize(torch_model(), [batch()], "torch.json")


def weights_and_activations():
    graph = caffe_graph()
    amct_caffe.weights_quantize_model(graph, "w.prototxt", "w.caffemodel")
    amct_caffe.activation_quantize_model(graph, "a.prototxt", "a.caffemodel")
    run_caffe("a.prototxt", "a.caffemodel")
    amct_caffe.save_model(graph, "Both", "flow")


def change_record():
    amct.record.update_inputs("caffe_quant_param_record.txt", {"conv": [DataFactors(scale=0.5, offset=0)]})
    amct.record.update("caffe_quant_param_record.txt", "new", CaffeLayerRecord())


def load_snapshot():
    amct_caffe.caffe.SGDSolver("solver.prototxt").restore("trained_iter_2.solverstate")


def trained_torch():
    model = amct.pytorch.prepare_qat(torch_model(), [batch()])
    model.train()(batch())
    model.eval()(batch())
    return model


def restored(name):
    example, state = batch(), f"{name}.pth"
    if name == "qat":
        return amct_pytorch.restore_quant_retrain_model("qat.json", torch_model(), "qat.txt", example, state)
    if name == "pruned":
        return amct_pytorch.restore_prune_retrain_model(prunable_model(), example, "pruned.txt", "prune.cfg", state)
    return amct_pytorch.restore_compressed_retrain_model(prunable_model(), example, "compress.cfg", "both.txt", state)


def kv_cache(config="new.json", record="new.txt"):
    amct_pytorch.create_quant_cali_config(config, torch_model(), {"kv_cache_quant_layers": ["3"]})
    amct_pytorch.create_quant_cali_model(config, record, torch_model())(batch())


def distilled():
    """A student that has learned from the float model for one epoch."""
    student = amct_pytorch.create_distill_model("distill.json", torch_model(), batch())
    return amct_pytorch.distill(torch_model(), student, "distill.json", [batch()])


READING_FUNCTIONS = {
    "amct_pytorch.create_distill_model": lambda: amct_pytorch.create_distill_model(
        "distill.json", torch_model(), batch()
    ),
    "amct_pytorch.distill": distilled,
    "amct_pytorch.tensor_decompose.decompose_network": lambda: amct_pytorch.tensor_decompose.decompose_network(
        nn.Conv2d(64, 64, 3), "pairs.json"
    ),
    "amct.pytorch.decompose": lambda: amct.pytorch.decompose(prunable_model(), batch(), flops=0.9, skip_slower=False),
    "amct_pytorch.restore_compressed_retrain_model": lambda: restored("both"),
    "amct_pytorch.restore_prune_retrain_model": lambda: restored("pruned"),
    "amct.pytorch.prepare_qat": trained_torch,
    "amct.pytorch.prune_to": lambda: amct.pytorch.prune_to(prunable_model(), batch(), flops=0.9),
    "amct.pytorch.prune": lambda: amct.pytorch.prune(prunable_model(), batch(), config="prune.cfg"),
    "amct.pytorch.sparsify": lambda: amct.pytorch.sparsify(prunable_model(), batch()),
    "amct.pytorch.restore_pruned": lambda: amct.pytorch.restore_pruned(
        prunable_model(), "pruned_record.txt", "pruned_state.pth"
    ),
    "amct.pytorch.quantize": quantized_torch,
    "amct.pytorch.compare": lambda: amct.pytorch.compare(torch_model(), quantized_torch(), [batch()]),
    "amct.onnx_model.quantize": lambda: amct.onnx_model.quantize("net.onnx", values(), "quant.cfg"),
    "amct.onnx_model.compare": lambda: amct.onnx_model.compare("net.onnx", "onnx_qdq_model.onnx", values()),
    "amct.onnx_model.measure": lambda: amct.onnx_model.measure("net.onnx", "onnx_fake_quant_model.onnx", values()),
    "amct.caffe.quantize": lambda: amct.caffe.quantize(*CAFFE_PAIR, values()[:2], "caffe.json"),
    "amct.caffe.compare": lambda: amct.caffe.compare(CAFFE_PAIR, CAFFE_RESULT, values()[:2]),
    "amct.pytorch.quantize_to": lambda: amct.pytorch.quantize_to(torch_model(), [batch()], [batch()], min_sqnr=1),
    "amct.onnx_model.quantize_to": lambda: amct.onnx_model.quantize_to("net.onnx", values(), values(), min_sqnr=1),
    "amct.caffe.quantize_to": lambda: amct.caffe.quantize_to(*CAFFE_PAIR, values()[:2], values()[2:], min_sqnr=1),
    "amct.pytorch.diagnose": lambda: amct.pytorch.diagnose(torch_model(), [batch()], [batch()]),
    "amct.onnx_model.diagnose": lambda: amct.onnx_model.diagnose("net.onnx", values(), values()),
    "amct.caffe.diagnose": lambda: amct.caffe.diagnose(*CAFFE_PAIR, values()[:2], values()[2:]),
    "amct.record.read_caffe_record": lambda: amct.record.read_caffe_record("caffe_quant_param_record.txt"),
    "amct.record.read_record": lambda: amct.record.read_record("r.txt"),
    "amct_caffe.caffe.Net": lambda: run_caffe(*CAFFE_RESULT),
    "amct_caffe.caffe.Net.load_hdf5": lambda: amct_caffe.caffe.Net("net.prototxt", 1).load_hdf5("net.h5"),
    "amct_caffe.caffe.SGDSolver.restore": load_snapshot,
    "atomic.check_writable": lambda: atomic.check_writable("."),
}
WRITING_FUNCTIONS = {
    "amct.pytorch.QatModel.save": lambda: trained_torch().save("torch"),
    "amct.pytorch.QatModel.report": lambda: trained_torch().report("new.html", [batch()]),
    "amct.pytorch.PrunedModel.save": lambda: amct.pytorch.prune(prunable_model(), batch(), 0.5).save("pruned"),
    "amct_pytorch.create_quant_retrain_config": lambda: amct_pytorch.create_quant_retrain_config(
        "new.json", torch_model(), batch()
    ),
    "amct_pytorch.create_quant_retrain_model": lambda: amct_pytorch.create_quant_retrain_model(
        "qat.json", torch_model(), "new.txt", batch()
    ),
    "amct_pytorch.accuracy_based_auto_calibration": lambda: amct_pytorch.accuracy_based_auto_calibration(
        torch_model(), AnyMetric(), "torch.json", "new.txt", "automatic/net", batch()
    ),
    "amct_pytorch.restore_quant_retrain_model": lambda: restored("qat"),
    "amct_pytorch.save_quant_retrain_model": lambda: amct_pytorch.save_quant_retrain_model(
        "qat.json", restored("qat"), "qat.txt", "flow", batch()
    ),
    "amct_pytorch.create_prune_retrain_model": lambda: amct_pytorch.create_prune_retrain_model(
        prunable_model(), batch(), "prune.cfg", "new.txt"
    ),
    "amct_pytorch.auto_channel_prune_search": lambda: amct_pytorch.auto_channel_prune_search(
        prunable_model(), "search.cfg", [batch(), torch.zeros(len(batch()), 5)], "new.cfg"
    ),
    "amct_pytorch.save_prune_retrain_model": lambda: amct_pytorch.save_prune_retrain_model(
        restored("pruned"), "flow", batch()
    ),
    "amct_pytorch.create_compressed_retrain_model": lambda: amct_pytorch.create_compressed_retrain_model(
        prunable_model(), batch(), "compress.cfg", "new.txt"
    ),
    "amct_pytorch.save_compressed_retrain_model": lambda: amct_pytorch.save_compressed_retrain_model(
        restored("both"), "both.txt", "flow", batch()
    ),
    "amct_pytorch.create_quant_cali_config": lambda: amct_pytorch.create_quant_cali_config(
        "new.json", torch_model(), {"kv_cache_quant_layers": ["3"]}
    ),
    "amct_pytorch.create_quant_cali_model": kv_cache,
    "amct_pytorch.create_distill_config": lambda: amct_pytorch.create_distill_config(
        "new.json", torch_model(), batch()
    ),
    "amct_pytorch.save_distill_model": lambda: amct_pytorch.save_distill_model(distilled(), "flow", batch(), "new.txt"),
    "amct_pytorch.tensor_decompose": lambda: amct_pytorch.tensor_decompose.auto_decomposition(
        nn.Conv2d(64, 64, 3), "new.json"
    ),
    "amct.pytorch.DecomposedModel.save": lambda: amct.pytorch.decompose(
        prunable_model(), batch(), flops=0.9, skip_slower=False
    ).save("pruned"),
    "amct.pytorch.QuantizedModel.save": lambda: quantized_torch().save("torch"),
    "amct.pytorch.QuantizedModel.report": lambda: quantized_torch().report("new.html", [batch()]),
    "amct.onnx_model.QuantizedModel.save": lambda: amct.onnx_model.quantize("net.onnx", values()).save("onnx"),
    "amct.onnx_model.QuantizedModel.report": lambda: amct.onnx_model.quantize("net.onnx", values()).report(
        "new.html", values()
    ),
    "amct.caffe.QuantizedModel.save": lambda: amct.caffe.quantize(*CAFFE_PAIR, values()[:2]).save("caffe"),
    "amct.caffe.report": lambda: amct.caffe.report("new.html", CAFFE_PAIR, CAFFE_RESULT, values()[:2]),
    "amct.caffe.equalize_model": lambda: amct.caffe.equalize_model(
        *CAFFE_PAIR, values()[:2], "e.prototxt", "e.caffemodel"
    ),
    "amct.caffe.export_onnx": lambda: amct.caffe.export_onnx(*CAFFE_PAIR, "new.onnx"),
    "amct_pytorch.create_quant_config": lambda: amct_pytorch.create_quant_config("new.json", torch_model(), batch()),
    "amct_pytorch.quantize_preprocess": lambda: amct_pytorch.quantize_preprocess(
        "dmq.json", "new.txt", torch_model(), batch()
    )(batch()),
    "amct_pytorch.quantize_model": lambda: amct_pytorch.quantize_model(
        "torch.json", "m.onnx", "r.txt", torch_model(), batch()
    )(batch()),
    "amct_pytorch.save_model": lambda: amct_pytorch.save_model("m.onnx", "r.txt", "flow"),
    "amct_caffe.create_quant_config": lambda: amct_caffe.create_quant_config("new.json", *CAFFE_PAIR),
    "amct_caffe.init to save_model": weights_and_activations,
    "amct_caffe.accuracy_based_auto_calibration": lambda: amct_caffe.accuracy_based_auto_calibration(
        *CAFFE_PAIR, AnyCaffeMetric(), "caffe.json", "new.txt", "automatic/net"
    ),
    "amct_caffe.convert_model": lambda: amct_caffe.convert_model(
        *CAFFE_PAIR, "caffe_quant_param_record.txt", "converted"
    ),
    "amct.caffe.prepare_qat": lambda: amct.caffe.prepare_qat(*TRAINED_PAIR, "retrain_solver.prototxt", folder="."),
    "amct_caffe.create_quant_retrain_config": lambda: amct_caffe.create_quant_retrain_config("new.json", *TRAINED_PAIR),
    "amct_caffe.create_quant_retrain_model": lambda: amct_caffe.create_quant_retrain_model(
        *TRAINED_PAIR, "retrain.json", "new.prototxt", "new.caffemodel", "new.txt"
    ),
    "amct_caffe.save_quant_retrain_model": lambda: amct_caffe.save_quant_retrain_model(
        "retrain.prototxt", "retrain_iter_2.caffemodel", "Both", "retrained", "retrain_record.txt", "retrain.json"
    ),
    "amct_caffe.uninplace_model": lambda: amct_caffe.uninplace_model("net.prototxt", "new.prototxt"),
    "amct_caffe.caffe.Net.save": lambda: amct_caffe.caffe.Net("net.prototxt", 1).save("new.caffemodel"),
    "amct_caffe.caffe.Net.save_hdf5": lambda: amct_caffe.caffe.Net("net.prototxt", 1).save_hdf5("new.h5"),
    "amct.record.update": change_record,
    "amct.record.write_record": lambda: amct.record.write_record(
        amct.record.read_caffe_record("caffe_quant_param_record.txt"), "new.txt"
    ),
}


class AnyMetric(AutoCalibrationEvaluatorBase):
    """An evaluator that is content with every model."""

    def calibration(self, model):
        model(batch())

    def evaluate(self, model):
        model(batch())
        return 1.0

    def metric_eval(self, original_metric, new_metric):
        return new_metric <= original_metric, new_metric - original_metric


class AnyCaffeMetric(AnyMetric):
    """The same for the files of a Caffe model."""

    def calibration(self, *files):
        run_caffe(*files)

    def evaluate(self, *files):
        run_caffe(*files)
        return 1.0


PLANTS = {"journals": plant_journals, "lock": plant_lock}
LOCK_REFUSED = r'\.amct\.lock" is a link, a folder or a device'


def guarded(place: Path, plant, action) -> None:
    """Run an action on the planted folder; nothing outside of it and nothing that was planted may change."""
    model, home = place / "model", place / "home"
    before_planting = set(state(model))
    plant(model, home)
    outside = state(place, without=model)
    strange = {name: content for name, content in state(model).items() if name not in before_planting}
    try:
        action()
    finally:
        assert state(place, without=model) == outside
        after = state(model)
        assert {name: after.get(name) for name in strange} == strange


@pytest.mark.parametrize("name", READING_COMMANDS)
def test_commands_that_read(place, name, capsys):
    codes = []
    guarded(place, plant_all, lambda: codes.append(main(READING_COMMANDS[name])))
    assert codes == [0], capsys.readouterr().err


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("name", WRITING_COMMANDS)
def test_commands_that_write(place, plant, name, capsys):
    codes = []
    guarded(place, PLANTS[plant], lambda: codes.append(main(WRITING_COMMANDS[name])))
    error = capsys.readouterr().err
    if plant == "journals":
        assert codes == [0], error
    else:
        assert codes != [0]
        assert '.amct.lock" is a link, a folder or a device' in error
        assert name == "caffe run" or "Traceback" not in error  # a script's author needs the line


@pytest.mark.parametrize("name", READING_FUNCTIONS)
def test_functions_that_read(place, name):
    guarded(place, plant_all, READING_FUNCTIONS[name])


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("name", WRITING_FUNCTIONS)
def test_functions_that_write(place, plant, name):
    def refused() -> None:
        with pytest.raises(FileError, match=LOCK_REFUSED):
            WRITING_FUNCTIONS[name]()

    guarded(place, PLANTS[plant], WRITING_FUNCTIONS[name] if plant == "journals" else refused)


def outputs_of(folder: Path, action) -> list[Path]:
    """The files below a folder that an action writes, found by running it."""
    before = state(folder)
    action()
    after = state(folder)
    changed = [folder / name for name in after if before.get(name) != after[name]]
    return [path for path in changed if path.is_file()]


WRITING = {
    **{name: lambda words=words: main(words) for name, words in WRITING_COMMANDS.items()},
    **WRITING_FUNCTIONS,
}


@pytest.mark.parametrize("name", WRITING)
def test_output_names_that_are_links_do_not_lead_outside(place, made, name):
    model, home = place / "model", place / "home"
    outputs = outputs_of(model, WRITING[name])
    log.stop()
    shutil.rmtree(model)
    shutil.copytree(made, model)
    os.chdir(model)
    for number, path in enumerate(outputs):
        outside = home / str(number)
        if path.exists():  # also an input: it has to stay readable
            path.rename(outside)
        else:
            outside.write_text("mine")
        path.parent.mkdir(exist_ok=True)
        path.symlink_to(outside)
    before = state(home)
    assert outputs
    WRITING[name]()
    assert state(home) == before
    log.stop()


def test_a_log_folder_that_is_a_link_is_not_used(place, caplog):
    (place / "home" / "logs").mkdir()
    (place / "model" / "amct_log").symlink_to(place / "home" / "logs")
    amct_caffe.create_quant_config("new.json", *CAFFE_PAIR)
    logging.getLogger("amct").error("a line")
    assert list((place / "home" / "logs").iterdir()) == []
    assert "amct_log is a link" in caplog.text


# --------------------------------------------------------------------------------------------- nothing is forgotten


def leaf_commands() -> set[str]:
    from typer.main import get_command

    from amct.cli.app import app

    def below(command, words):
        inner = getattr(command, "commands", None)
        if inner is None:
            return {" ".join(words)}
        return set().union(*(below(each, [*words, name]) for name, each in inner.items()))

    return below(get_command(app), [])


def test_every_command_is_here():
    tried = [" ".join(words[:3]) + " " for words in (*READING_COMMANDS.values(), *WRITING_COMMANDS.values())]
    assert [name for name in leaf_commands() if not any(each.startswith(f"{name} ") for each in tried)] == []


NO_FILES = {"install_as_caffe", "amct", "set_cpu_mode", "set_gpu_mode"}


@pytest.mark.parametrize("module", [amct.pytorch, amct.onnx_model, amct.caffe, amct_pytorch, amct_caffe])
def test_every_public_function_is_here(module):
    flow = {
        f"amct_caffe.{name}" for name in ("init", "weights_quantize_model", "activation_quantize_model", "save_model")
    }
    tried = {*READING_FUNCTIONS, *WRITING_FUNCTIONS, *flow}
    functions = [name for name in module.__all__ if name[0].islower() and name not in NO_FILES]
    assert [name for name in functions if f"{module.__name__}.{name}" not in tried] == []


# ------------------------------------------------------------------------------------------------ interrupted saves

SAVES = {
    "amct.pytorch.QatModel.save": ("torch", "_record.txt"),
    "amct.pytorch.PrunedModel.save": ("pruned", "_record.txt"),
    "amct_pytorch.save_quant_retrain_model": ("flow", None),
    "amct_pytorch.save_prune_retrain_model": ("flow", None),
    "amct_pytorch.save_compressed_retrain_model": ("flow", None),
    "amct.pytorch.QuantizedModel.save": ("torch", "_record.txt"),
    "amct.onnx_model.QuantizedModel.save": ("onnx", "_record.txt"),
    "amct.caffe.QuantizedModel.save": ("caffe", "_quant_param_record.txt"),
    "amct_pytorch.save_model": ("flow", None),  # its record was written by the calibration
    "amct_caffe.init to save_model": ("flow", "_quant_param_record.txt"),
    "amct_caffe.save_quant_retrain_model": ("retrained", "_quant_param_record.txt"),
}


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("save", SAVES)
def test_one_save_is_one_group_with_the_record_and_quant_json_last(save, monkeypatch):
    prefix, record = SAVES[save]
    groups = []

    def noted(targets, written):
        groups.append([path.name for path in targets if path.name.startswith(f"{prefix}_")])
        return write_notices(targets, written)

    write_notices = _group.write_notices
    monkeypatch.setattr(_group, "write_notices", noted)
    WRITING_FUNCTIONS[save]()
    (group,) = [names for names in groups if names]
    assert group[-1] == f"{prefix}_quant.json"
    assert record is None or f"{prefix}{record}" in group
    assert set(group) == set(json.loads(Path(group[-1]).read_text())["files"]) | {group[-1]}


REFUSING = {
    "record show": (["record", "show", "caffe_quant_param_record.txt"], "caffe_quant_param_record.txt"),
    "config check": (["config", "check", "caffe.json", "--model", "net.prototxt"], "caffe.json"),
    "prototxt": (["inspect", "net.prototxt"], "net.prototxt"),
    "ONNX": (["inspect", "net.onnx"], "net.onnx"),
    "caffemodel": (["compare", *CAFFE_PAIR, "caffe", *DATA], CAFFE_RESULT[1]),
    "quant.json": (["report", "net.onnx", "onnx", *DATA, "-o", "new.html"], "onnx_quant.json"),
    "QDQ file": (["report", "net.onnx", "onnx", *DATA, "-o", "new.html"], "onnx_qdq_model.onnx"),
    "solverstate": (
        ["caffe", "train", "--solver", "solver.prototxt", "--snapshot", "trained_iter_2.solverstate"],
        "trained_iter_2.solverstate",
    ),
}


@pytest.mark.parametrize(("command", "file"), REFUSING.values(), ids=REFUSING)
def test_files_of_an_interrupted_save_are_refused_by_every_reader(place, command, file, capsys):
    def plant(model: Path, _: Path) -> None:
        planted(model, 1, "journal").write_text(json.dumps({"version": 2, "files": [file, "other"]}))

    codes = []
    guarded(place, plant, lambda: codes.append(main(command)))
    assert codes != [0]
    error = capsys.readouterr().err
    assert f'{file}" cannot be used' in error
    assert "Run that save again" in error
    assert "Traceback" not in error


@pytest.mark.parametrize("named", [".bashrc", ".profile", "new/record.txt"])
def test_a_prototxt_that_names_a_record_elsewhere_writes_no_file_of_the_user(place, named):
    graph = caffe_graph()
    amct_caffe.weights_quantize_model(graph, "a.prototxt", "a.caffemodel")
    amct_caffe.activation_quantize_model(graph, "a.prototxt", "a.caffemodel")
    model, target = place / "model" / "a.prototxt", place / "home" / named
    text = model.read_text()
    own = str(place / "model" / "flow_record.txt")
    assert own in text
    model.write_text(text.replace(own, str(target)))
    before = state(place / "home")
    with pytest.raises(AmctError, match=r"not a record|does not exist; a prototxt creates no files|\.bashrc:1"):
        run_caffe("a.prototxt", "a.caffemodel")
    assert state(place / "home") == before


@pytest.mark.parametrize("named", [".bashrc", ".profile"])
def test_a_retrained_prototxt_that_names_a_record_elsewhere_writes_no_file_of_the_user(place, named):
    model, target = place / "model" / "retrain.prototxt", place / "home" / named
    text, found = re.subn(r'record_file_path: "[^"]*"', f'record_file_path: "{target}"', model.read_text())
    assert found
    model.write_text(text)
    before = state(place / "home")
    net = amct_caffe.caffe.Net(str(model), "retrain_iter_2.caffemodel", amct_caffe.caffe.TEST)
    with pytest.raises(AmctError, match=r"does not exist; a prototxt creates no files|\.bashrc:1"):
        net.forward()
    assert state(place / "home") == before


def test_the_modified_onnx_file_of_an_interrupted_save_is_refused(place):
    planted(place / "model", 1, "journal").write_text(json.dumps({"version": 2, "files": ["m.onnx"]}))
    with pytest.raises(FileError, match="was interrupted"):
        amct_pytorch.save_model("m.onnx", "r.txt", "flow")
    amct_pytorch.quantize_model("torch.json", "m.onnx", "r.txt", torch_model(), batch())(batch())
    amct_pytorch.save_model("m.onnx", "r.txt", "flow")
    assert [path.name for path in (place / "model").iterdir() if path.name.startswith(".")] == []
