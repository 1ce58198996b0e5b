"""Pruning in several processes: data parallel training with two ranks, and training that goes on in a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from prune_nets import filters, masks, retrain_net
from torch import nn

import amct_pytorch
from amct.pytorch.pruning.compensation import measure_inputs
from amct.record import read_record

HERE = Path(__file__).parent
QUANTIZED = "retrain_data_quant_config { ulq_quantize { } } retrain_weight_quant_config { arq_retrain { } }"
BOTH = filters(
    0.3, more=f'override_layer_configs {{ layer_name: "c3" {masks(2)} }} {QUANTIZED} quant_skip_types: "Linear"'
)
SHARED = f"""
import os, socket, sys, torch
import torch.distributed as dist
sys.path.insert(0, {str(HERE)!r})
from prune_nets import retrain_net
import amct.pytorch, amct_pytorch
from amct.errors import AmctError

def train(model, optimizer, steps, batches):
    for step in steps:
        optimizer.zero_grad()
        model(batches[step % 3] + step).square().mean().backward()
        optimizer.step()

def in_two_processes(run):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            try:
                run(rank, port)
                os._exit(0)
            except BaseException:
                import traceback
                traceback.print_exc()
                os._exit(1)
        children.append(child)
    sys.exit(any([os.waitpid(child, 0)[1] for child in children]))
"""


def in_fresh_process(code: str, folder: Path) -> None:
    """Run code in a new interpreter, in a folder."""
    result = subprocess.run(
        [sys.executable, "-c", SHARED + textwrap.dedent(code)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(HERE.parents[2] / "src"), "AMCT_LOG_LEVEL": "error"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]


def train(model, optimizer, steps, batches):
    for step in steps:
        optimizer.zero_grad()
        model(batches[step % 3] + step).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("kind", ["prune", "compressed"])
def test_training_goes_on_in_a_fresh_process_bit_by_bit(tmp_path, kind):
    """Channels, masks that are chosen every second forward, and quantizers: two steps here, two there."""
    (tmp_path / "prune.cfg").write_text(BOTH)
    model, batches = retrain_net()
    files = [str(tmp_path / name) for name in ("prune.cfg", "record.txt")]
    trained = getattr(amct_pytorch, f"create_{kind}_retrain_model")(model, batches[0], *files)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.05, momentum=0.9)
    train(trained, optimizer, range(2), batches)
    torch.save({"net": trained.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "state.pth")
    train(trained, optimizer, range(2, 5), batches)
    names = '"record.txt", "prune.cfg"' if kind == "prune" else '"prune.cfg", "record.txt"'
    in_fresh_process(
        f"""
        model, batches = retrain_net()
        trained = amct_pytorch.restore_{kind}_retrain_model(model, batches[0], {names}, "state.pth", "net")
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.05, momentum=0.9)
        optimizer.load_state_dict(torch.load("state.pth", weights_only=True)["optimizer"])
        train(trained, optimizer, range(2, 5), batches)
        torch.save(trained.state_dict(), "end.pth")
        """,
        tmp_path,
    )
    expected, found = trained.state_dict(), torch.load(tmp_path / "end.pth", weights_only=True)
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert found["c3.mask_steps"] == 5


def test_two_ranks_have_the_same_channels_and_masks(tmp_path):
    """Each rank has other data; channels, chosen on data too, masks and weights are the same on both."""
    (tmp_path / "prune.cfg").write_text(BOTH)
    in_fresh_process(
        """
        def run(rank, port):
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            dist.init_process_group("gloo", rank=rank, world_size=2)
            model, batches = retrain_net()
            batches = [(1 + 3 * rank) * torch.roll(batch, rank, 0) for batch in batches]
            chosen = amct.pytorch.prune(model.eval(), batches[0], 0.5, batches=batches)
            torch.save({"record": str(chosen.record), "state": chosen.model.state_dict()}, f"chosen{rank}.pth")
            model.train()
            for kind in ("prune", "compressed"):
                create = getattr(amct_pytorch, f"create_{kind}_retrain_model")
                trained = create(model, batches[0], "prune.cfg", f"{kind}{rank}.txt")
                parallel = torch.nn.parallel.DistributedDataParallel(trained)
                optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05)
                train(parallel, optimizer, range(4), batches)
                torch.save(dict(trained.named_parameters()) | {"mask": trained.c3.weight_mask}, f"{kind}{rank}.pth")
            dist.destroy_process_group()

        in_two_processes(run)
        """,
        tmp_path,
    )
    for kind in ("prune", "compressed", "chosen"):
        one, other = (torch.load(tmp_path / f"{kind}{rank}.pth", weights_only=True) for rank in range(2))
        if kind == "chosen":
            assert one["record"] == other["record"]
            one, other = one["state"], other["state"]
        assert list(one) == list(other)
        assert all(torch.equal(one[name], other[name]) for name in one), kind
    assert read_record(tmp_path / "prune0.txt").prune == read_record(tmp_path / "prune1.txt").prune


def test_layers_are_measured_in_the_same_order_by_all_processes():
    """Sets have another order in each process; the tensors of one layer must meet those of the same layer."""
    model, batches = retrain_net()
    layers = {name: module for name, module in model.named_modules() if isinstance(module, (nn.Conv2d, nn.Linear))}
    names = [name for name, module in layers.items() if getattr(module, "groups", 1) == 1]  # others are not measured
    found = measure_inputs(model, names[::-1], [((batches[0],), {})])
    assert list(found) == sorted(names)


LONELY = """
    def outcome(work):
        try:
            return f"pruned {{len(work().channels)}} layers"
        except AmctError as error:
            return str(error)

    def run(rank, port):
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group("gloo", rank=rank, world_size=2)
        store = dist.distributed_c10d._get_default_store()  # rank 0 keeps it: it leaves last
        model, batches = retrain_net()
        if rank == 1:
            {other}
            store.get("first is done")
            store.set("second is done", "")
            return
        found = outcome(lambda: amct.pytorch.prune(model.eval(), batches[0], 0.5, batches=batches))
        with open("outcome.txt", "w") as file:
            file.write(found)
        store.set("first is done", "")
        store.get("second is done")

    in_two_processes(run)
    """


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ("", "rank 1 of 2 is lost to the pruning (rank 1 has not begun this pruning, or prunes another model). With"),
        (
            "outcome(lambda: amct.pytorch.prune(model.eval(), batches[0], 0.5, batches=[batches[0], 'words']))",
            "rank 1: ",
        ),
    ],
)
def test_a_process_that_does_not_prune_with_the_others_is_an_error_in_all(tmp_path, monkeypatch, other, message):
    monkeypatch.setenv("AMCT_RANK_TIMEOUT", "5")
    in_fresh_process(LONELY.format(other=other), tmp_path)
    assert (tmp_path / "outcome.txt").read_text().startswith(message)


def test_one_process_prunes_by_itself_where_it_is_told_to(tmp_path, monkeypatch):
    monkeypatch.setenv("AMCT_LOCAL_CALIBRATION", "1")
    in_fresh_process(LONELY.format(other=""), tmp_path)
    assert (tmp_path / "outcome.txt").read_text().startswith("pruned ")
