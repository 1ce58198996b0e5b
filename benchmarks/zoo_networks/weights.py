"""Seeded weights for networks without training: statistics of batch norms from data, no dead or vanishing parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
SMALL_NAMES = ("gamma", "layer_scale", "lambda_", ".ls")


def settle(model: nn.Module, run: Callable[[nn.Module], object], seed: int = 0) -> nn.Module:
    """Give an initialized model the look of a trained one, in place; ``run`` passes a large batch through it.

    Trained networks have norms whose scales differ by channel, a few channels of transformers far above the others, no
    weights that are all zero, and batch norms that know the statistics of the data.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            _spread_norm(module, generator)
        for name, parameter in model.named_parameters():
            _revive(name, parameter, generator)
        _learn_statistics(model, run)
    return model.eval()


def _spread_norm(module: nn.Module, generator: torch.Generator) -> None:
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    kind = type(module).__name__
    if not isinstance(weight, torch.Tensor) or weight.ndim != 1 or "Norm" not in kind:
        return
    weight.copy_(torch.exp(0.3 * torch.randn(weight.shape, generator=generator)))
    if not isinstance(module, BATCH_NORMS):  # outliers of the residual stream
        weight[torch.rand(weight.shape, generator=generator) < 0.02] *= 5
    if isinstance(bias, torch.Tensor):
        bias.copy_(0.2 * torch.randn(bias.shape, generator=generator))


def _revive(name: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
    largest = parameter.abs().max() if parameter.numel() else torch.tensor(1.0)
    if parameter.ndim >= 2 and largest == 0 and parameter.is_floating_point():
        spread = parameter[0].numel() ** -0.5
        parameter.copy_(spread * torch.randn(parameter.shape, generator=generator))
    elif largest < 0.01 and any(word in name for word in SMALL_NAMES):
        parameter.copy_(0.1 + 0.2 * torch.rand(parameter.shape, generator=generator))


def _learn_statistics(model: nn.Module, run: Callable[[nn.Module], object]) -> None:
    norms: Sequence[nn.Module] = [module for module in model.eval().modules() if isinstance(module, BATCH_NORMS)]
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a mean over all batches
        norm.train()
    run(model)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
        norm.eval()
