"""Every training run recorded from a real Caffe: losses, weights, learning rates, snapshots, BatchNorm statistics."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
from caffe_cases import FOLDER

from amct.caffe import pycaffe as caffe
from amct.caffe.engine.messages import parse_message
from amct.caffe.engine.solvers.rules import learning_rate
from amct.caffe.pycaffe.proto import caffe_pb2

TRAIN = FOLDER / "train"
RUNS = sorted(path.parent.name for path in TRAIN.glob("*/solver.prototxt"))
EVOLUTIONS = sorted(path.name for path in TRAIN.glob("bn_evolution_*"))
RATES = np.load(TRAIN / "learning_rates.npz")

# 20 iterations of float32 in another order of sums; Adam divides tiny gradients by their own size, which shows a
# rounding error of the first iteration at 2e-5 of the largest weight. The contract is 1e-3.
TOLERANCE = 1e-4
# Recorded under names whose solver is not in the corpus; their policies are in the table of the corpus.
RATES_WITHOUT_RUN = {
    "sgd_fixed": 'base_lr: 0.05 lr_policy: "fixed"',
    "sgd_poly": 'base_lr: 0.1 lr_policy: "poly" power: 1.5 max_iter: 20',
    "sgd_clip": 'base_lr: 0.1 lr_policy: "fixed"',
    "sgd_shared": 'base_lr: 0.05 lr_policy: "fixed"',
}


def test_the_corpus_is_complete():
    assert len(RUNS) == 22
    assert len(EVOLUTIONS) == 2
    assert len(RATES.files) == 16


@pytest.fixture
def run_folder(request, tmp_path, monkeypatch):
    """A copy of a case to run in: a solver writes snapshots into the current folder."""
    folder = tmp_path / request.param
    shutil.copytree(TRAIN / request.param, folder)
    monkeypatch.chdir(folder)
    return folder


def feed(net, data):
    for name in net.inputs:
        net.blobs[name].data[...] = data[f"in:{name}"]


def check_weights(net, data, moment):
    wanted = [key for key in data.files if key.startswith(f"{moment}:")]
    assert wanted
    for key in wanted:
        _, layer, index = key.split(":")
        largest = np.abs(data[key]).max()
        np.testing.assert_allclose(
            net.params[layer][int(index)].data, data[key], rtol=0, atol=TOLERANCE * largest, err_msg=key
        )


@pytest.mark.parametrize("run_folder", RUNS, indirect=True)
def test_a_training_run_agrees_with_caffe(run_folder):
    data = np.load("data.npz")
    names = json.loads(str(data["loss_names"]))
    solver = caffe.get_solver("solver.prototxt")
    solver.net.copy_from("init.caffemodel")
    check_weights(solver.net, data, "param_init")
    rates, losses = [], []
    for iteration in range(len(data["loss"])):
        feed(solver.net, data)
        rates.append(solver.lr)
        solver.step(1)
        losses.append([float(solver.net.blobs[name].data) for name in names])
        if iteration in (0, 4):
            check_weights(solver.net, data, f"param_iter{iteration + 1}")
    check_weights(solver.net, data, "param_final")
    np.testing.assert_allclose(losses, data["loss"], rtol=TOLERANCE)
    if run_folder.name in RATES.files:
        np.testing.assert_array_equal(np.float32(rates), RATES[run_folder.name])
    assert solver.iter == 20
    check_test_net(solver, data)
    check_model(solver.net, "final.caffemodel")


def check_test_net(solver, data):
    """The TEST net shares the trained weights and gives what Caffe's gave on the same batch."""
    (net,) = solver.test_nets
    solver.share_weights(net)
    if net.inputs:
        feed(net, data)
    net.forward()
    wanted = [key for key in data.files if key.startswith("test:")]
    assert sorted(key[5:] for key in wanted) == net.outputs
    for key in wanted:
        np.testing.assert_allclose(net.blobs[key[5:]].data, data[key], rtol=TOLERANCE, err_msg=key)


def check_model(net, recorded):
    """Saved now, the net has the layers, fields and shapes of the caffemodel Caffe saved, and its weights."""
    net.save("ours.caffemodel")
    compare_models(read_net("ours.caffemodel"), read_net(recorded))


def read_net(path):
    message = caffe_pb2.NetParameter()
    message.ParseFromString(Path(path).read_bytes())
    return message


def compare_models(ours, theirs):
    for mine, yours in zip(ours.layer, theirs.layer, strict=True):
        for blob, recorded in zip(mine.blobs, yours.blobs, strict=True):
            assert list(blob.shape.dim) == list(recorded.shape.dim)
            scale = np.abs(recorded.data).max(initial=0)
            np.testing.assert_allclose(blob.data, recorded.data, rtol=0, atol=TOLERANCE * scale)
            assert not blob.diff
        del mine.blobs[:]
        del yours.blobs[:]
    assert ours == theirs


@pytest.mark.parametrize("name", [name for name in RATES.files if name != "sgd_multistep_dup"])
def test_learning_rates_are_caffes_to_the_last_bit(name):
    text = RATES_WITHOUT_RUN.get(name) or (TRAIN / name / "solver.prototxt").read_text()
    parameter, step, rates = parse_message(text, "SolverParameter"), 0, []
    for iteration in range(20):
        rate, step = learning_rate(parameter, iteration, step)
        rates.append(rate)
    np.testing.assert_array_equal(np.float32(rates), RATES[name])


def test_two_step_values_due_at_once_take_two_looks():
    """Each iteration looks twice, once to record the rate and once to use it, as the recording did.

    The solver of this recording is not in the corpus. These step values give its schedule; its rates are 0.03, 0.009
    and 0.0027 rounded to float, one unit below 0.1 times powers of the float nearest to 0.3.
    """
    text = 'base_lr: 0.1 lr_policy: "multistep" gamma: 0.3 stepvalue: 5 stepvalue: 5 stepvalue: 7'
    parameter, step, rates = parse_message(text, "SolverParameter"), 0, []
    for iteration in range(20):
        rate, step = learning_rate(parameter, iteration, step)
        rates.append(rate)
        _, step = learning_rate(parameter, iteration, step)
    np.testing.assert_array_max_ulp(np.float32(rates), RATES["sgd_multistep_dup"], maxulp=1)


@pytest.mark.parametrize("run_folder", ["sgd_snapshot"], indirect=True)
def test_snapshots_are_caffes(run_folder):
    theirs = {
        name: (run_folder / name).read_bytes() for name in ("snap_iter_10.solverstate", "snap_iter_20.solverstate")
    }
    models = {name: read_net(name) for name in ("snap_iter_10.caffemodel", "snap_iter_20.caffemodel")}
    data = np.load("data.npz")
    solver = caffe.get_solver("solver.prototxt")
    solver.net.copy_from("init.caffemodel")
    feed(solver.net, data)
    solver.step(20)
    for name, content in theirs.items():
        ours, recorded = caffe_pb2.SolverState(), caffe_pb2.SolverState()
        ours.ParseFromString((run_folder / name).read_bytes())
        recorded.ParseFromString(content)
        for blob, wanted in zip(ours.history, recorded.history, strict=True):
            assert list(blob.shape.dim) == list(wanted.shape.dim)
            np.testing.assert_allclose(blob.data, wanted.data, rtol=0, atol=TOLERANCE * np.abs(wanted.data).max())
        del ours.history[:]
        del recorded.history[:]
        assert ours == recorded
    for name, model in models.items():
        compare_models(read_net(name), model)


@pytest.mark.parametrize("run_folder", ["sgd_snapshot"], indirect=True)
def test_a_state_read_and_written_again_is_byte_for_byte_caffes(run_folder):
    state, model = (run_folder / "snap_iter_10.solverstate").read_bytes(), read_net("snap_iter_10.caffemodel")
    solver = caffe.get_solver("solver.prototxt")
    solver.restore("snap_iter_10.solverstate")
    assert solver.iter == 10
    solver.snapshot()
    assert (run_folder / "snap_iter_10.solverstate").read_bytes() == state
    assert read_net("snap_iter_10.caffemodel") == model


@pytest.mark.parametrize("run_folder", ["sgd_snapshot"], indirect=True)
def test_caffes_snapshot_goes_on_to_caffes_end(run_folder):
    data = np.load(run_folder / "data.npz")
    solver = caffe.get_solver("solver.prototxt")
    solver.restore("snap_iter_10.solverstate")
    feed(solver.net, data)
    solver.step(10)
    check_weights(solver.net, data, "param_final")


def hdf5_tree(path):
    """Each dataset with its exact type and bytes, each group by name."""
    tree = {}

    def add(name, item):
        if isinstance(item, h5py.Dataset):
            kind = item.id.get_type()
            padding = kind.get_strpad() if item.dtype.kind == "S" else None
            tree[name] = (item.dtype, item.shape, padding, kind.get_size(), item[()])
        else:
            tree[name] = "group"

    with h5py.File(path) as file:
        file.visititems(add)
    return tree


@pytest.mark.parametrize("run_folder", ["adam_snapshot_h5"], indirect=True)
@pytest.mark.parametrize("ending", ["caffemodel.h5", "solverstate.h5"])
def test_hdf5_snapshots_are_caffes(run_folder, ending):
    theirs = hdf5_tree(f"snap_iter_10.{ending}")
    solver = caffe.get_solver("solver.prototxt")
    solver.restore("snap_iter_10.solverstate.h5")
    assert solver.iter == 10
    solver.snapshot()
    ours = hdf5_tree(f"snap_iter_10.{ending}")
    assert ours.keys() == theirs.keys()
    for name, wanted in theirs.items():
        if wanted == "group":
            assert ours[name] == "group"
        else:
            assert ours[name][:-1] == wanted[:-1], name
            np.testing.assert_array_equal(ours[name][-1], wanted[-1])
    data = np.load(run_folder / "data.npz")
    feed(solver.net, data)
    solver.step(10)
    check_weights(solver.net, data, "param_final")


@pytest.mark.parametrize("run_folder", EVOLUTIONS, indirect=True)
def test_batch_norm_statistics_evolve_as_in_caffe(run_folder):
    data = np.load(run_folder / "data.npz")
    net = caffe.Net("net.prototxt", caffe.TRAIN)
    for step, values in enumerate(data["in:x"]):
        net.blobs["x"].data[...] = values
        net.forward()
        np.testing.assert_allclose(net.blobs["y"].data, data["out:y"][step], rtol=1e-5, atol=1e-5)
        for index in range(3):
            wanted = data[f"blob{index}"][step]
            np.testing.assert_allclose(net.params["bn"][index].data, wanted, rtol=1e-5, atol=1e-5)
    tested = caffe.Net("net.prototxt", caffe.TEST, weights="after10.caffemodel")
    check_model(net, "after10.caffemodel")
    tested.blobs["x"].data[...] = data["in:x"][0]
    tested.forward()
    np.testing.assert_allclose(tested.blobs["y"].data, data["test_out:y_of_x0"], rtol=1e-5, atol=1e-5)
