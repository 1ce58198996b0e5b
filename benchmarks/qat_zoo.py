"""Trains networks of torchvision and timm for one step with quantizers, saves them, and prints a line for each.

    python benchmarks/qat_zoo.py                  all networks
    python benchmarks/qat_zoo.py resnet18 …       these

Needs torchvision and timm (extra "zoo"). Weights are random but settled, as in ``zoo.py``: what counts is that a step
of training works and that the files compute what the trained module does in eval mode. Signal to noise, in dB, of the
fake-quant file against the module, and of the module against itself with inputs that differ by 1e-6: where rounding to
integers makes a deep random network chaotic, the two are alike. The table goes to ``benchmarks/results/qat_zoo.md``.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import onnxruntime
import torch
from prune_zoo import HERE, network, pictures, write_table
from torch import Tensor
from torch.utils import _pytree as pytree
from zoo_networks.weights import settle

import amct.pytorch
from amct.errors import AmctError

RESULTS = HERE / "results" / "qat_zoo.md"


def trained(name: str, batch: Tensor) -> amct.pytorch.QatModel:
    """A network after one step of training, in eval mode."""
    original = settle(network(name), lambda each: each(batch))
    model = amct.pytorch.prepare_qat(original, batch).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    outputs = [leaf for leaf in pytree.tree_leaves(model(batch)) if isinstance(leaf, Tensor)]
    torch.stack([output.square().mean() for output in outputs]).sum().backward()
    optimizer.step()
    return model.eval()


def row(name: str) -> str:
    """Train and save one network; its line of the table."""
    batch, start = pictures(name, 4), time.perf_counter()
    try:
        model = trained(name, batch)
        with tempfile.TemporaryDirectory() as folder:
            model.save(Path(folder) / "net", placement="exact", target="exact8")
            session = onnxruntime.InferenceSession(Path(folder) / "net_fake_quant_model.onnx")
            written = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: batch.numpy()})[0])
    except AmctError as error:
        return f"| {name} | {type(error).__name__}: {str(error).splitlines()[0][:120]} | | | |"
    with torch.no_grad():
        expected, nearby = (
            next(leaf for leaf in pytree.tree_leaves(model(inputs)) if isinstance(leaf, Tensor))
            for inputs in (batch, batch + 1e-6 * torch.randn_like(batch))
        )
    quantized = sum(hasattr(module, "weight_quantizer") for module in model.modules())
    seconds = time.perf_counter() - start
    return f"| {name} | {quantized} | {sqnr(written, expected):.0f} | {sqnr(nearby, expected):.0f} | {seconds:.0f} |"


def sqnr(values: Tensor, expected: Tensor) -> float:
    """Signal to noise in dB."""
    return float(10 * torch.log10(expected.square().sum() / (values - expected).square().sum()))


if __name__ == "__main__":
    write_table("| network | quantized layers | file | inputs + 1e-6 | s |", row, RESULTS)
