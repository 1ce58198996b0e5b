"""Decomposition of a VGG-like network for CIFAR-10 that is trained here: accuracy, operations and speed.

    python benchmarks/decompose.py             trains the network on first use (kept in benchmarks/results)

The network: 3×3 convolutions with batch norm and ReLU of 32 | 64 | 128, 128, 128 channels, a maximum pooling after each
part, then one linear layer. Trained on 10 000 pictures with flips and shifts, SGD with momentum 0.9 and weight
decay 5e-4, one cycle up to 0.1 over 8 epochs, batch 64. Decomposed with 2048 of the pictures and without labels to
half of the operations, then one more epoch (cosine from 0.01), three seeds. Needs the pictures
(AMCT_ASSETS, or shared/assets beside the project). One thread; the times are CPU times in onnxruntime.
"""

from __future__ import annotations

import copy
import json
import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("AMCT_LOG_LEVEL", "ERROR")
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests" / "pytorch")]

import torch  # noqa: E402  the networks of the tests are found through the path above
from prune_pytorch import ASSETS, BATCH, augmented, train  # noqa: E402
from real_models import cifar_images, torch_top1  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import amct.pytorch  # noqa: E402
from amct.pytorch.capture.trace import trace  # noqa: E402
from amct.pytorch.pruning.propagation import map_channels  # noqa: E402
from amct.pytorch.pruning.removal import Removal, cost_of  # noqa: E402
from amct.pytorch.pruning.timing import Stopwatch  # noqa: E402
from amct_pytorch.tensor_decompose import auto_decomposition  # noqa: E402

EPOCHS, SEEDS = 8, int(os.environ.get("AMCT_BENCH_SEEDS", "3"))
STATE = HERE / "results" / "vgg_like.pth"
RESULTS = HERE / "results" / "decompose.json"


def vgg_like() -> nn.Sequential:
    """The network, without training."""
    layers: list[nn.Module] = []
    inputs = 3
    for outputs in (32, 0, 64, 0, 128, 128, 128, 0):
        if outputs == 0:
            layers.append(nn.MaxPool2d(2))
            continue
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        inputs = outputs
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 4 * 4, 10))


def trained() -> nn.Sequential:
    """The network as the docstring above says; its state is kept for the next run."""
    torch.manual_seed(0)
    model = vgg_like()
    if STATE.exists():
        model.load_state_dict(torch.load(STATE, weights_only=True))
        return model.eval()
    random = torch.Generator().manual_seed(0)
    pictures, labels = cifar_images(ASSETS, "train_10000")
    steps = EPOCHS * (len(pictures) // BATCH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, steps)
    model.train().to(memory_format=torch.channels_last)
    for _ in range(EPOCHS):
        for chosen in torch.randperm(len(pictures), generator=random)[: len(pictures) // BATCH * BATCH].split(BATCH):
            inputs = augmented(pictures[chosen], random).contiguous(memory_format=torch.channels_last)
            loss = functional.cross_entropy(model(inputs), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    STATE.parent.mkdir(exist_ok=True)
    torch.save(model.state_dict(), STATE)
    return model.eval()


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    model, test = trained(), cifar_images(ASSETS, "test_6000")
    pictures = cifar_images(ASSETS, "train_10000", 2048)[0]
    found = {"float": torch_top1(model, *test)}
    start = time.process_time()
    result = amct.pytorch.decompose(model, pictures.split(128), flops=0.5)
    found |= {"decompose, CPU s": time.process_time() - start, "decomposed": torch_top1(result.model.eval(), *test)}
    whole, smaller = result.latency()
    found |= {"operations": result.after.macs / result.before.macs, "latency": smaller / whole}
    by_amct = auto_decomposition(copy.deepcopy(model))[0].eval()
    found["AMCT's function"] = torch_top1(by_amct, *test)
    costs = [cost_of(Removal(map_channels(trace(each, pictures[:1])))).macs for each in (model, by_amct)]
    found["AMCT's function, operations"] = costs[1] / costs[0]
    whole, smaller = Stopwatch(result.original, result.io).seconds(by_amct)
    found["AMCT's function, latency"] = smaller / whole
    for name, start_model in (("decomposed", result.model), ("AMCT's function", by_amct)):
        after = []
        for seed in range(SEEDS):
            duplicate = copy.deepcopy(start_model)
            train(duplicate, 1, seed)
            after.append(torch_top1(duplicate, *test))
        found[f"{name}, after one epoch"] = statistics.mean(after)
    for name, value in found.items():
        print(f"{name:<36} {value:.3f}")
    print(result.summary())
    RESULTS.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
