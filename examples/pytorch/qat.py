"""Quantization-aware training: a small network with 4 bits, trained with its float self as teacher.

python examples/pytorch/qat.py [folder]
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

import amct.pytorch as amct

data = load_digits()
images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
labels = torch.tensor(data.target)


def epoch(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Train the float model on every image once."""
    for batch in torch.randperm(1400).split(50):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()


def accuracy(model: nn.Module) -> float:
    """Share of test images recognised."""
    with torch.no_grad():
        return (model.eval()(images[1400:]).argmax(1) == labels[1400:]).float().mean().item()


torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
    nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
    nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10),
)  # fmt: skip
for _ in range(3):
    epoch(model.train(), torch.optim.Adam(model.parameters(), lr=0.005))
print(f"float: {accuracy(model):.1%}")

qat = amct.prepare_qat(model, [images[:200]], amct.QatConfig(weight_bits=4, activation_bits=4), teacher=model)
print(f"4 bits before training: {accuracy(qat):.1%}")
recipe = qat.recipe((images[:50], labels[:50]), steps_per_epoch=28)
recipe.epoch_ended(accuracy(qat))
for _ in range(recipe.epochs):
    qat.train()
    for batch in torch.randperm(1400).split(50):
        recipe.optimizer.zero_grad()
        recipe.loss(images[batch], qat(images[batch]), labels[batch]).backward()
        recipe.optimizer.step()
        recipe.schedule.step()
    recipe.epoch_ended(accuracy(qat))
print(f"4 bits after training: {accuracy(qat):.1%}")
qat.save(Path(sys.argv[1] if len(sys.argv) > 1 else "out") / "digits")
