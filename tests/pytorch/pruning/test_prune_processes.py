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

import amct_pytorch
from amct.record import read_record

HERE = Path(__file__).parent
QUANTIZED = "retrain_data_quant_config { ulq_quantize { } } retrain_weight_quant_config { arq_retrain { } }"
BOTH = filters(
    0.3, more=f'override_layer_configs {{ layer_name: "c3" {masks(2)} }} {QUANTIZED} quant_skip_types: "Linear"'
)
SHARED = f"""
import os, sys, torch
sys.path.insert(0, {str(HERE)!r})
from prune_nets import retrain_net
import amct.pytorch, amct_pytorch

def train(model, optimizer, steps, batches):
    for step in steps:
        optimizer.zero_grad()
        model(batches[step % 3] + step).square().mean().backward()
        optimizer.step()
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
        import socket
        import torch.distributed as dist

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
