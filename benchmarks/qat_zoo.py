"""Trains networks of torchvision and timm for one step with quantizers, saves them, and prints a line for each.

    python benchmarks/qat_zoo.py                  all networks
    python benchmarks/qat_zoo.py resnet18 …       these

Needs torchvision and timm (extra "zoo"). Weights are random but settled, as in ``zoo.py``: what counts is that a step
of training works and that the files compute what the trained module does in eval mode. Signal to noise, in dB, against
the trained module: of the fake-quant file, which also rounds biases, and of the float network before training. The
table goes to ``benchmarks/results/qat_zoo.md``.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import onnxruntime
import torch
from prune_zoo import HERE, network, pictures, write_table
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from zoo_networks.weights import settle

import amct.pytorch
from amct.errors import AmctError

RESULTS = HERE / "results" / "qat_zoo.md"


def trained(original: nn.Module, batch: Tensor) -> amct.pytorch.QatModel:
    """A network after one step of training, in eval mode."""
    model = amct.pytorch.prepare_qat(original, batch).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    torch.stack([output.square().mean() for output in tensors(model(batch))]).sum().backward()
    optimizer.step()
    return model.eval()


def row(name: str) -> str:
    """Train and save one network; its line of the table."""
    batch, start = pictures(name, 4), time.perf_counter()
    original = settle(network(name), lambda each: each(batch))
    try:
        model = trained(original, batch)
        with tempfile.TemporaryDirectory() as folder:
            model.save(Path(folder) / "net", placement="exact", target="exact8")
            session = onnxruntime.InferenceSession(Path(folder) / "net_fake_quant_model.onnx")
            written = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: batch.numpy()})[0])
    except AmctError as error:
        return f"| {name} | {type(error).__name__}: {str(error).splitlines()[0][:120]} | | | |"
    with torch.no_grad():
        expected, unquantized = (tensors(each(batch))[0] for each in (model, original))
    quantized = sum(hasattr(module, "weight_quantizer") for module in model.modules())
    seconds = time.perf_counter() - start
    return (
        f"| {name} | {quantized} | {sqnr(written, expected):.0f} | {sqnr(unquantized, expected):.0f} | {seconds:.0f} |"
    )


def tensors(outputs: object) -> list[Tensor]:
    """The tensors among the outputs of a network."""
    return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]


def sqnr(values: Tensor, expected: Tensor) -> float:
    """Signal to noise in dB."""
    return float(10 * torch.log10(expected.square().sum() / (values - expected).square().sum()))


if __name__ == "__main__":
    write_table("| network | quantized layers | file | float | s |", row, RESULTS)
