"""Prunes networks of torchvision and timm by 30 %, saves them, and prints one line of a table for each.

    python benchmarks/prune_zoo.py                  all networks
    python benchmarks/prune_zoo.py resnet18 …       these

Needs torchvision and timm (extra "zoo"). Weights are random: what counts is that the pruned network runs, that its file
gives its outputs, and which layers were left. The table goes to ``benchmarks/results/prune_zoo.md``.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("AMCT_LOG_LEVEL", "ERROR")
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import torch  # noqa: E402
from zoo_networks.vision import torchvision  # noqa: E402

import amct.pytorch  # noqa: E402
from amct.errors import AmctError  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

RESULTS = HERE / "results" / "prune_zoo.md"
TORCHVISION = (
    "alexnet", "vgg11_bn", "resnet18", "resnet50", "resnext50_32x4d", "wide_resnet50_2", "densenet121", "googlenet",
    "inception_v3", "squeezenet1_1", "mobilenet_v2", "mobilenet_v3_small", "mobilenet_v3_large", "shufflenet_v2_x1_0",
    "mnasnet0_5", "efficientnet_b0", "efficientnet_v2_s", "regnet_y_400mf", "regnet_x_400mf", "convnext_tiny",
    "vit_b_16", "swin_t", "maxvit_t",
)  # fmt: skip
TIMM = (
    "convnext_atto",
    "dla46_c",
    "fbnetc_100",
    "lcnet_050",
    "resnet10t",
    "resnetv2_50",
    "semnasnet_075",
    "spnasnet_100",
    "tinynet_e",
    "mixer_s32_224",
    "ghostnet_100",
    "repvgg_a0",
    "mobilevit_xxs",
    "poolformer_s12",
    "deit_tiny_patch16_224",
    "swin_tiny_patch4_window7_224",
)
LARGE_PICTURES = ("inception_v3", "vit_b_16", "swin_t", "maxvit_t", *TIMM[-2:], "mixer_s32_224")


def network(name: str) -> torch.nn.Module:
    """A network with random weights."""
    torch.manual_seed(0)
    models = torchvision().models  # timm needs it too
    if name not in TORCHVISION:
        import timm

        return timm.create_model(name, pretrained=False).eval()
    options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    return getattr(models, name)(weights=None, **options).eval()


def pictures(name: str, count: int) -> torch.Tensor:
    """Random pictures of a size that the network takes."""
    size = 299 if name == "inception_v3" else 224 if name in LARGE_PICTURES else 64
    return torch.randn(count, 3, size, size)


def row(name: str) -> str:
    """Prune and save one network; its line of the table."""
    start = time.perf_counter()
    try:
        pruned = amct.pytorch.prune(network(name), pictures(name, 1), ratio=0.3)
        with tempfile.TemporaryDirectory() as folder:
            pruned.save(Path(folder) / "net")
    except AmctError as error:
        return f"| {name} | {type(error).__name__}: {str(error).splitlines()[0][:120]} | | | |"
    cut = sum(before != after for before, after in pruned.channels.values())
    share = [pruned.after.parameters / pruned.before.parameters, pruned.after.macs / pruned.before.macs]
    reasons = sorted({skip.reason.partition(" (")[0].partition(" in ")[0] for skip in pruned.skipped})
    layers = f"{cut} of {len(pruned.channels)}"
    seconds = time.perf_counter() - start
    return f"| {name} | {layers} | {share[0]:.0%} | {share[1]:.0%} | {'; '.join(reasons[:3])} | {seconds:.0f} |"


def write_table(head: str, row: Callable[[str], str], results: Path) -> None:
    """Print a table of the networks named on the command line, or of all, and write it."""
    lines = [head, re.sub(r"[^|]+", " --- ", head)]
    for name in sys.argv[1:] or (*TORCHVISION, *TIMM):
        lines.append(row(name))
        print(lines[-1], flush=True)
        results.parent.mkdir(exist_ok=True)
        results.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    write_table("| network | layers pruned | parameters left | MACs left | left as they are | s |", row, RESULTS)
