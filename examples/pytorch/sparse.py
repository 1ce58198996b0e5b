"""2:4 sparsity: two of every four weights of a small network become zero.

python examples/pytorch/sparse.py [folder]
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


def train(model: nn.Module, epochs: int) -> float:
    """Train on 1400 images; returns the share of the others that is recognised."""
    optimizer = torch.optim.Adam(model.train().parameters(), lr=0.005)
    for _ in range(epochs):
        for batch in torch.randperm(1400).split(50):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    with torch.no_grad():
        return (model.eval()(images[1400:]).argmax(1) == labels[1400:]).float().mean().item()


torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
    nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
    nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 10),
)  # fmt: skip
print(f"float: {train(model, 3):.1%}")
where = Path(sys.argv[1] if len(sys.argv) > 1 else "out")

sparse = amct.sparsify(model, images[:1])
print(sparse.summary())
print(f"after training: {train(sparse.model, 2):.1%}")
sparse.save(where / "sparse")
