"""The network behind AMCT's pruning cases, and other small ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

GOLDEN = Path(__file__).parent.parent.parent / "golden" / "amct"


class Retrain(nn.Module):
    """The network of AMCT's retraining cases."""

    def __init__(self) -> None:
        super().__init__()
        self.c1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.b1 = nn.BatchNorm2d(16)
        self.c2 = nn.Conv2d(16, 32, 3, padding=1)
        self.b2 = nn.BatchNorm2d(32)
        self.c3 = nn.Conv2d(32, 32, 3, padding=1, stride=2)
        self.dw = nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.pool = nn.AvgPool2d(4)
        self.fc1 = nn.Linear(128, 48)
        self.fc = nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.b1(self.c1(x)))
        x = torch.relu(self.b2(self.c2(x)))
        x = torch.relu(self.dw(torch.relu(self.c3(x))))
        return self.fc(torch.relu(self.fc1(self.pool(x).flatten(1))))


def retrain_net() -> tuple[Retrain, list[Tensor]]:
    """The network with its weights, and its three batches."""
    with np.load(GOLDEN / "retrain.npz") as archive:
        content = {name: torch.from_numpy(archive[name]) for name in archive.files}
    model = Retrain()
    model.load_state_dict({name[8:]: value for name, value in content.items() if name.startswith("weights/")})
    return model, [content[f"inputs/b{number}"] for number in range(3)]


def train_three_steps(model: nn.Module, batches: list[Tensor]) -> nn.Module:
    """The training of the cases; returns the model in eval mode."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number, batch in enumerate(batches):
        target = torch.from_numpy(np.random.RandomState(50 + number).randint(0, 10, 8))
        optimizer.zero_grad()
        functional.cross_entropy(model(batch), target).backward()
        optimizer.step()
    return model.eval()


def filters(ratio: float, *, ascend: bool = False, more: str = "") -> str:
    """A simple config of channel pruning."""
    inner = f"prune_ratio: {ratio} ascend_optimized: {str(ascend).lower()}"
    return f"prune_config {{ filter_pruner {{ balanced_l2_norm_filter_prune {{ {inner} }} }} }}\n{more}"


def masks(update_freq: int = 0, more: str = "") -> str:
    """A simple config of 2:4 sparsity."""
    inner = f"n_out_of_m_type: M4N2 update_freq: {update_freq}"
    return f"prune_config {{ n_out_of_m_pruner {{ l1_selective_prune {{ {inner} }} }} }}\n{more}"
