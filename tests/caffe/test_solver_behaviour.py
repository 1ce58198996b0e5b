"""What a solver does around its updates: nets and states, tests, log lines, callbacks, snapshots, requests, errors."""

from __future__ import annotations

import logging
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from amct.caffe import pycaffe as caffe
from amct.caffe.engine.messages import parse_message
from amct.caffe.engine.solvers.definition import read_solver
from amct.caffe.engine.solvers.solver import Action, EngineSolver, signal_actions
from amct.caffe.pycaffe.proto import caffe_pb2
from amct.errors import ArgumentTypeError, ConfigError, FileError, ModelError, ParseError

NET = """
name: "small"
layer { name: "in" type: "Input" top: "data" top: "label"
        input_param { shape { dim: 4 dim: 3 } shape { dim: 4 } } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip"
        inner_product_param { num_output: 3 weight_filler { type: "xavier" } } }
layer { name: "acc" type: "Accuracy" bottom: "ip" bottom: "label" top: "acc" include { phase: TEST } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""
SOLVER = (
    'net: "net.prototxt" base_lr: 0.1 lr_policy: "fixed" momentum: 0.9 max_iter: 7 solver_mode: CPU random_seed: 3 '
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.prototxt").write_text(NET)
    return tmp_path


def write_solver(text="", base=SOLVER, name="sv.prototxt"):
    Path(name).write_text(base + text)
    return name


def feed(net, seed=0):
    random = np.random.default_rng(seed)
    net.blobs["data"].data[...] = random.normal(size=(4, 3))
    net.blobs["label"].data[...] = [0, 1, 2, 1]


def make(text="", solver_class=None, base=SOLVER):
    path = write_solver(text, base)
    solver = caffe.get_solver(path) if solver_class is None else solver_class(path)
    feed(solver.net)
    for net in solver.test_nets:
        feed(net, seed=1)
    return solver


def messages(caplog):
    return [record.getMessage() for record in caplog.records]


pytestmark = pytest.mark.usefixtures("folder")


def test_a_solver_has_the_members_of_pycaffe():
    solver = make("test_iter: 1 test_interval: 3 ")
    wanted = {
        "add_callback", "apply_update", "iter", "lr", "net", "param", "restore", "share_weights", "snapshot", "solve",
        "step", "test_nets",
    }  # fmt: skip
    assert wanted <= set(dir(solver))
    assert isinstance(solver.net, caffe.Net)
    assert isinstance(solver.test_nets[0], caffe.Net)
    assert (solver.iter, solver.lr, solver.param.max_iter) == (0, 0.10000000149011612, 7)
    assert type(solver) is caffe.SGDSolver


@pytest.mark.parametrize("name", ["SGD", "Nesterov", "AdaGrad", "RMSProp", "AdaDelta", "Adam"])
def test_get_solver_goes_by_type_and_states_have_one_or_two_histories(name):
    base = SOLVER.replace("momentum: 0.9", "") if name in ("AdaGrad", "RMSProp") else SOLVER
    solver = make(f'type: "{name}"', base=base)
    assert type(solver) is getattr(caffe, f"{name}Solver")
    solver.step(1)
    solver.snapshot()
    state = caffe_pb2.SolverState()
    state.ParseFromString(Path("sv_iter_1.solverstate").read_bytes())
    assert len(state.history) == (4 if name in ("AdaDelta", "Adam") else 2)
    assert [list(blob.shape.dim) for blob in state.history[:2]] == [[3, 3], [3]]
    assert (state.iter, state.learned_net, state.current_step) == (1, "sv_iter_1.caffemodel", 0)


def test_a_class_uses_its_own_rule_whatever_the_file_says():
    solver = make('type: "Adam"', caffe.SGDSolver)
    assert len(solver.history) == 2


def test_the_old_solver_type_is_understood():
    assert type(make("solver_type: NESTEROV")) is caffe.NesterovSolver
    with pytest.raises(ConfigError, match=r"old solver_type field .enum. and new type field .string. cannot be both"):
        make('solver_type: ADAM type: "Adam"')


def test_step_ignores_max_iter_and_solve_stops_there():
    solver = make()
    solver.step(2)
    solver.step(0)
    solver.step(-1)
    assert solver.iter == 2
    solver.solve()
    assert solver.iter == 7
    assert Path("sv_iter_7.caffemodel").exists()
    solver.step(3)
    assert solver.iter == 10
    solver.solve()
    assert solver.iter == 10
    solver.solve("sv_iter_7.solverstate")
    assert solver.iter == 7
    with pytest.raises(ArgumentTypeError, match=r"step takes a whole number of iterations, got 1.5"):
        solver.step(1.5)


def test_the_parameter_is_live():
    solver = make()
    solver.param.base_lr = 0.5
    assert solver.lr == 0.5


def test_after_a_step_diff_is_the_update():
    solver = make()
    before = solver.net.params["ip"][0].data.copy()
    solver.step(1)
    blob = solver.net.params["ip"][0]
    np.testing.assert_array_equal(before - blob.diff, blob.data)


def test_apply_update_uses_the_diffs_it_finds():
    solver = make(base=SOLVER.replace("momentum: 0.9", ""))
    blob = solver.net.params["ip"][0]
    before = blob.data.copy()
    blob.diff[...] = 2.0
    solver.apply_update()
    np.testing.assert_allclose(before - blob.data, 0.2, rtol=1e-6)
    assert solver.iter == 1


def test_callbacks_come_in_caffes_order():
    solver, events = make(), []
    solver.add_callback(lambda: events.append("start"), lambda: events.append("gradients"))
    solver.net.before_forward(lambda layer: events.append(f"forward {layer}"))
    solver.net.after_backward(lambda layer: events.append(f"backward {layer}"))
    solver.step(1)
    assert events == [
        "start", "forward 0", "forward 1", "forward 2", "backward 2", "backward 1", "backward 0", "gradients"
    ]  # fmt: skip


def test_test_nets_share_weights_from_the_first_test_on():
    solver = make("test_iter: 1 test_interval: 3")
    (tested,) = solver.test_nets
    ours, theirs = solver.net.params["ip"][0], tested.params["ip"][0]
    assert not np.shares_memory(ours.data, theirs.data)
    solver.step(1)
    assert np.shares_memory(ours.data, theirs.data)
    assert tested.outputs == ["acc", "loss"]


def test_test_initialization_false_tests_later():
    solver = make("test_iter: 1 test_interval: 2 test_initialization: false")
    (tested,) = solver.test_nets
    solver.step(2)
    assert not np.shares_memory(solver.net.params["ip"][0].data, tested.params["ip"][0].data)
    solver.step(1)
    assert np.shares_memory(solver.net.params["ip"][0].data, tested.params["ip"][0].data)


def test_log_lines_are_caffes(caplog):
    caplog.set_level(logging.INFO, logger="amct")
    solver = make("test_iter: 2 test_interval: 4 test_compute_loss: true display: 2 max_iter: 4 average_loss: 2")
    solver.solve()
    lines = messages(caplog)
    loss = float(solver.test_nets[0].blobs["loss"].data)
    for wanted in [
        "Creating training net from net file: net.prototxt",
        "Creating test net (#0) specified by net file: net.prototxt",
        "Solving small",
        "Learning Rate Policy: fixed",
        "Iteration 0, Testing net (#0)",
        f"Test loss: {loss:g}",
        f"    Test net output #1: loss = {loss:g} (* 1 = {loss:g} loss)",
        "Iteration 2, lr = 0.1",
        "Snapshotting to binary proto file sv_iter_4.caffemodel",
        "Snapshotting solver state to binary proto file sv_iter_4.solverstate",
        "Iteration 4, Testing net (#0)",
        "Optimization Done.",
    ]:
        assert wanted in lines, wanted
    assert (
        sum(line.startswith("Iteration 2 (") and "iter/s" in line and "/2 iters), loss = " in line for line in lines)
        == 1
    )
    assert sum(line.startswith("    Train net output #0: loss = ") for line in lines) == 2
    assert sum(line.startswith("    Test net output #0: acc = ") for line in lines) == 2


def test_the_displayed_loss_is_the_mean_of_the_last_ones(caplog):
    caplog.set_level(logging.INFO, logger="amct")
    solver = make("display: 1 average_loss: 3")
    losses = []
    solver.add_callback(lambda: None, lambda: losses.append(float(solver.net.blobs["loss"].data)))
    solver.step(5)
    shown = [float(line.rsplit("= ", 1)[1]) for line in messages(caplog) if "iters), loss" in line]
    np.testing.assert_allclose(shown, [np.mean(losses[max(0, end - 3) : end]) for end in range(1, 6)], rtol=1e-5)


def test_iter_size_adds_gradients_of_several_batches():
    """Two halves, each fed as a batch of its own, make the step that the mean of their gradients makes."""
    halves, plain = make("iter_size: 2"), make()
    batches = iter((1, 2))
    halves.net.before_forward(lambda layer: feed(halves.net, next(batches)) if layer == 0 else None)
    start = [blob.data.copy() for blob in plain.net.params["ip"]]
    for blob, values in zip(halves.net.params["ip"], start, strict=True):
        blob.data[...] = values
    halves.step(1)
    gradients = []
    for seed in (1, 2):
        feed(plain.net, seed)
        plain.net.clear_param_diffs()
        plain.net.forward()
        plain.net.backward()
        gradients.append([blob.diff.copy() for blob in plain.net.params["ip"]])
    for blob, before, first, second in zip(halves.net.params["ip"], start, *gradients, strict=True):
        np.testing.assert_allclose(blob.data, before - 0.1 * (first + second) / 2, rtol=1e-6, atol=1e-7)


def test_clipping_is_logged(caplog):
    caplog.set_level(logging.INFO, logger="amct")
    make("clip_gradients: 0.001").step(1)
    assert any(line.startswith("Gradient clipping: scaling down gradients (L2 norm ") for line in messages(caplog))


# ---------------------------------------------------------------------- nets, states, weights


def test_train_and_test_nets_may_be_files_of_their_own():
    solver = make(
        'train_net: "net.prototxt" test_net: "net.prototxt" test_iter: 1 test_interval: 1',
        base=SOLVER.replace('net: "net.prototxt"', ""),
    )
    assert len(solver.test_nets) == 1


def test_states_reach_the_rules():
    with Path("net.prototxt").open("a") as file:
        file.write(
            'layer { name: "s" type: "ReLU" bottom: "ip" top: "s" include { stage: "extra" } }\n'
            'layer { name: "l" type: "ReLU" bottom: "ip" top: "l" include { min_level: 2 } }\n'
        )
    solver = make(
        'train_state { stage: "extra" } test_state { level: 2 } test_state { stage: "extra" level: 3 } test_iter: 1 '
        "test_iter: 1 test_interval: 9"
    )
    assert "s" in solver.net.blobs
    assert "l" not in solver.net.blobs
    assert [sorted({"s", "l"} & set(net.blobs)) for net in solver.test_nets] == [["l"], ["l", "s"]]


def test_weights_of_the_solver_fill_all_nets():
    first = make()
    first.net.params["ip"][0].data[...] = 9
    first.net.save("nine.caffemodel")
    first.net.params["ip"][0].data[...] = 5
    first.net.save("five.caffemodel")
    solver = make('weights: "nine.caffemodel, five.caffemodel" test_iter: 1 test_interval: 1 snapshot_diff: true')
    for net in (solver.net, *solver.test_nets):
        assert (net.params["ip"][0].data == 5).all()
    solver.step(1)
    solver.snapshot()
    model = caffe_pb2.NetParameter()
    model.ParseFromString(Path("sv_iter_1.caffemodel").read_bytes())
    assert [[len(blob.diff) for blob in layer.blobs] for layer in model.layer if layer.blobs] == [[9, 3]]


def test_random_seed_makes_runs_equal():
    def weights():
        torch.manual_seed(99)
        return make("test_iter: 1 test_interval: 2").net.params["ip"][0].data.copy()

    np.testing.assert_array_equal(weights(), weights())
    torch.manual_seed(1)
    other = make(base=SOLVER.replace("random_seed: 3", "random_seed: 4")).net.params["ip"][0].data
    assert not np.array_equal(other, weights())


@pytest.mark.parametrize(
    ("base", "message"),
    [
        (
            "base_lr: 0.1",
            "SolverParameter must specify a train net using one of these fields: net, net_param, train_net",
        ),
        (
            'net: "net.prototxt" train_net: "net.prototxt"',
            "must not contain more than one of these fields .* net and train",
        ),
        (
            'train_net: "net.prototxt" test_iter: 1',
            "test_iter must be specified for each test network: 0 test net.s. given",
        ),
        ('net: "net.prototxt" test_net: "net.prototxt"', "1 test net.s. given, 0 test_iter"),
        ('net: "net.prototxt" test_iter: 1', "test_interval must be > 0 when there are test nets .* got 0"),
        (
            'net: "net.prototxt" test_iter: 1 test_interval: 1 test_state { } test_state { }',
            "test_state must be unspecified or specified once per test net: 1 test net.s., 2 test_state",
        ),
    ],
)
def test_contradictions_about_nets(base, message):
    with pytest.raises(ConfigError, match=message):
        caffe.SGDSolver(write_solver(base=base))


def test_missing_files():
    with pytest.raises(FileError, match=r"File not found: none.prototxt"):
        caffe.SGDSolver("none.prototxt")
    with pytest.raises(FileError, match=r'net: "nonet.prototxt".*relative to the current folder'):
        caffe.SGDSolver(write_solver(base='net: "nonet.prototxt"'))
    with pytest.raises(FileError, match=r"Could not open file none.caffemodel"):
        make('weights: "none.caffemodel"')
    with pytest.raises(ParseError, match=r"sv.prototxt:1"):
        caffe.SGDSolver(write_solver(base="net: 3"))
    with pytest.raises(ArgumentTypeError, match=r"from the path of a solver prototxt, got int"):
        caffe.SGDSolver(3)


def test_an_unknown_policy_is_told_at_the_first_step():
    solver = make(base=SOLVER.replace('"fixed"', '"zzz"'))
    with pytest.raises(ConfigError, match=r"Unknown learning rate policy"):
        solver.step(1)


# ---------------------------------------------------------------------- snapshots


@pytest.mark.parametrize("ending", ["", ".h5"], ids=["binary", "hdf5"])
@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_restoring_goes_on_exactly(name, ending):
    text = f'type: "{name}" lr_policy: "multistep" gamma: 0.5 stepvalue: 2 stepvalue: 5 '
    text += "snapshot_format: HDF5 " if ending else ""
    base = SOLVER.replace('lr_policy: "fixed"', "")
    straight = make(text, base=base)
    straight.step(4)
    straight.snapshot()
    straight.step(4)
    resumed = make(text, base=base)
    resumed.restore(f"sv_iter_4.solverstate{ending}")
    assert (resumed.iter, resumed.lr) == (4, np.float32(0.05))
    resumed.step(4)
    for ours, theirs in zip(resumed.net.params["ip"], straight.net.params["ip"], strict=True):
        np.testing.assert_array_equal(ours.data, theirs.data)
    for ours, theirs in zip(resumed.history, straight.history, strict=True):
        assert torch.equal(ours, theirs)


def test_snapshots_come_at_their_interval_and_after_training(folder):
    make("snapshot: 3").solve()
    assert sorted(path.name for path in folder.glob("*.solverstate")) == [
        "sv_iter_3.solverstate", "sv_iter_6.solverstate", "sv_iter_7.solverstate"
    ]  # fmt: skip


def test_snapshot_after_train_false_and_no_snapshot_twice(folder):
    make("snapshot_after_train: false").solve()
    assert not list(folder.glob("*.solverstate"))
    make("snapshot: 7").solve()
    assert [path.name for path in folder.glob("*.caffemodel")] == ["sv_iter_7.caffemodel"]


def test_a_prefix_may_be_a_folder(folder):
    (folder / "out").mkdir()
    solver = make('snapshot_prefix: "out"')
    solver.snapshot()
    assert (folder / "out" / "sv_iter_0.caffemodel").is_file()


def test_snapshots_that_cannot_be_written():
    with pytest.raises(
        ConfigError, match=r"Cannot write to snapshot prefix 'no/x'.  Make sure that the directory exists"
    ):
        make('snapshot: 5 snapshot_prefix: "no/x"')
    solver = make('snapshot_prefix: "no/x"')
    with pytest.raises(ConfigError, match=r"Cannot write to snapshot prefix 'no/x'"):
        solver.snapshot()
    parameter = parse_message(SOLVER, "SolverParameter")
    with pytest.raises(ConfigError, match=r"a snapshot needs snapshot_prefix"):
        EngineSolver(parameter).snapshot()
    parameter.snapshot = 3
    with pytest.raises(ConfigError, match=r"snapshot is specified but snapshot_prefix is not"):
        EngineSolver(parameter)


def test_the_weights_are_found_beside_the_state(folder, caplog):
    caplog.set_level(logging.INFO, logger="amct")
    solver = make()
    solver.step(2)
    solver.snapshot()
    wanted = solver.net.params["ip"][0].data.copy()
    (folder / "moved").mkdir()
    for ending in ("caffemodel", "solverstate"):
        (folder / f"sv_iter_2.{ending}").rename(folder / "moved" / f"sv_iter_2.{ending}")
    solver = make()
    solver.restore("moved/sv_iter_2.solverstate")
    np.testing.assert_array_equal(solver.net.params["ip"][0].data, wanted)
    assert any("names sv_iter_2.caffemodel, which does not exist; using moved" in line for line in messages(caplog))
    (folder / "moved" / "sv_iter_2.caffemodel").unlink()
    with pytest.raises(FileError, match=r'the caffemodel it names, "sv_iter_2.caffemodel", is neither there'):
        solver.restore("moved/sv_iter_2.solverstate")


def test_states_that_do_not_fit_change_nothing(folder):
    adam = make('type: "Adam"')
    adam.step(1)
    adam.snapshot()
    solver = make()
    before = solver.net.params["ip"][0].data.copy()
    with pytest.raises(ConfigError, match=r"Incorrect length of history blobs: the file has 4, this solver needs 2"):
        solver.restore("sv_iter_1.solverstate")
    (folder / "net.prototxt").write_text(NET.replace("num_output: 3", "num_output: 4"))
    other = make('type: "Adam"')
    with pytest.raises(ConfigError, match=r"history blob 0 has shape \(3, 3\) \(9 values\), this net needs \(4, 3\)"):
        other.restore("sv_iter_1.solverstate")
    assert solver.iter == 0
    np.testing.assert_array_equal(solver.net.params["ip"][0].data, before)


def test_states_that_cannot_be_read(folder):
    solver = make()
    with pytest.raises(FileError, match=r"File not found: none.solverstate"):
        solver.restore("none.solverstate")
    solver.snapshot()
    content = (folder / "sv_iter_0.solverstate").read_bytes()
    (folder / "cut.solverstate").write_bytes(content[:-20])
    with pytest.raises(ParseError, match=r"cut.solverstate: .* damaged"):
        solver.restore("cut.solverstate")
    solver.param.snapshot_format = 0
    solver.snapshot()
    with pytest.raises(ParseError, match=r"caffemodel.h5: not an HDF5 solver state"):
        solver.restore("sv_iter_0.caffemodel.h5")


# ---------------------------------------------------------------------- requests to stop


def test_a_request_to_stop_writes_a_snapshot(folder, caplog):
    caplog.set_level(logging.INFO, logger="amct")
    solver = make("test_iter: 1 test_interval: 1 test_initialization: false")
    requests = iter([Action.NONE, Action.NONE, Action.STOP])
    solver.action_source = lambda: next(requests, Action.NONE)
    solver.solve()
    assert solver.stopped_early
    assert "Optimization stopped early." in messages(caplog)
    assert (folder / f"sv_iter_{solver.iter}.solverstate").is_file()
    assert solver.iter < 7
    solver.solve()
    assert (solver.iter, solver.stopped_early) == (7, False)


def test_a_request_during_a_test_ends_it(caplog):
    caplog.set_level(logging.INFO, logger="amct")
    solver = make("test_iter: 3 test_iter: 1 test_interval: 1")
    requests = iter([Action.SNAPSHOT, Action.NONE, Action.STOP])
    solver.action_source = lambda: next(requests, Action.NONE)
    solver.solve()
    assert (solver.iter, solver.stopped_early) == (0, True)
    lines = messages(caplog)
    assert "Test interrupted." in lines
    assert "Iteration 0, Testing net (#1)" not in lines
    assert lines.count("Snapshotting to binary proto file sv_iter_0.caffemodel") == 2


def test_signals_become_requests_and_the_second_stop_is_the_programs_own(caplog):
    caplog.set_level(logging.INFO, logger="amct")
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGHUP)
    effects = {signal.SIGINT: Action.STOP, signal.SIGHUP: Action.SNAPSHOT}
    with signal_actions(effects) as requests:
        assert requests() is Action.NONE
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGINT)
        assert [requests() for _ in range(4)] == [Action.SNAPSHOT, Action.SNAPSHOT, Action.STOP, Action.NONE]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGHUP)) == before
    assert "SIGINT: stopping after this iteration; send it again to stop at once" in messages(caplog)


def test_signals_without_effect_stay_as_they_are():
    handler = signal.getsignal(signal.SIGINT)
    with signal_actions({signal.SIGINT: Action.NONE}):
        assert signal.getsignal(signal.SIGINT) is handler


def test_the_engines_solver_needs_no_pycaffe():
    write_solver()
    solver = EngineSolver(read_solver("sv.prototxt"))
    assert type(solver.net).__module__ == "amct.caffe.engine.net"
    solver.net.blob("label").data[...] = [0, 1, 2, 1]
    solver.step(2)
    assert solver.iter == 2


def test_test_nets_keep_no_gradients():
    solver = make("test_iter: 1 test_interval: 1")
    with pytest.raises(ModelError, match=r"was created without gradients"):
        solver.test_nets[0].backward()
