"""EuclideanLoss, HingeLoss, SigmoidCrossEntropyLoss and ContrastiveLoss."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from amct.caffe.engine.layers.loss_base import BATCH_SIZE, LossLayer, normalizer
from amct.caffe.engine.registry import register
from amct.caffe.engine.shapes import count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amct.caffe.engine.blob import Shape
    from amct.caffe.engine.layer import AutogradContext

L2 = 2
SIMILARITY = 2


@register("EuclideanLoss")
class EuclideanLoss(LossLayer):
    """sum((a - b)^2) / (2 N); both bottoms get gradients."""

    no_gradient = ()

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """()."""
        if count(bottoms[0], 1) != count(bottoms[1], 1):
            raise self.error(f"Inputs must have the same dimension: {bottoms[0]} and {bottoms[1]}")
        return super().reshape(bottoms)

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """sum((a - b)^2) / (2 N)."""
        difference = bottoms[0].reshape(-1) - bottoms[1].reshape(-1)
        return [difference.dot(difference) / bottoms[0].shape[0] / 2]


@register("HingeLoss")
class HingeLoss(LossLayer):
    """sum(max(0, 1 - x) for the label, max(0, 1 + x) for the other classes) / N; squared with norm L2."""

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The mean hinge loss of the batch."""
        rows = bottoms[0].reshape(bottoms[0].shape[0], -1)
        labels, _ = self.labels(bottoms[1].reshape(-1), rows.shape[1])
        sign = torch.ones_like(rows).scatter_(1, labels.unsqueeze(1), -1.0)
        margin = torch.relu(1 + sign * rows)
        if self.parameter.hinge_loss_param.norm == L2:
            margin = margin * margin
        return [margin.sum() / rows.shape[0]]


@register("SigmoidCrossEntropyLoss")
class SigmoidCrossEntropyLoss(LossLayer):
    """-sum(t * log(sigmoid(x)) + (1 - t) * log(1 - sigmoid(x))) with targets t in 0..1, divided by the normalizer."""

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """()."""
        if count(bottoms[0]) != count(bottoms[1]):
            raise self.error(
                f"SIGMOID_CROSS_ENTROPY_LOSS layer inputs must have the same count: {bottoms[0]} and {bottoms[1]}"
            )
        return super().reshape(bottoms)

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The normalized loss; targets equal to ignore_label are left out."""
        scores, targets = bottoms[0].reshape(-1), bottoms[1].detach().reshape(-1)
        losses = functional.binary_cross_entropy_with_logits(scores, targets, reduction="none")
        valid = scores.numel()
        if self.ignore_label is not None:
            counts = targets.to(torch.int64) != self.ignore_label
            losses, valid = losses[counts], int(counts.sum())
        outer = bottoms[0].shape[0]
        inner = bottoms[0].numel() // max(outer, 1)
        return [losses.sum() / normalizer(self.normalization(BATCH_SIZE), outer, inner, valid)]


class _ContrastiveLoss(torch.autograd.Function):
    """The contrastive loss with Caffe's gradient, which divides by (distance + 1e-4)."""

    @staticmethod
    def forward(
        ctx: AutogradContext,
        first: torch.Tensor,
        second: torch.Tensor,
        similar: torch.Tensor,
        margin: float,
        legacy: bool,
    ) -> torch.Tensor:
        difference = first - second
        squared = (difference * difference).sum(1)
        far = torch.relu(margin - squared) if legacy else torch.relu(margin - squared.sqrt()).square()
        ctx.save_for_backward(difference, squared, similar)
        ctx.margin, ctx.legacy = margin, legacy
        return torch.where(similar, squared, far).sum() / first.shape[0] / 2

    @staticmethod
    def backward(ctx: AutogradContext, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        difference, squared, similar = ctx.saved_tensors
        if ctx.legacy:
            pull = torch.where(ctx.margin - squared > 0, -torch.ones_like(squared), torch.zeros_like(squared))
        else:
            distance = squared.sqrt()
            room = ctx.margin - distance
            pull = torch.where(room > 0, -room / (distance + 1e-4), torch.zeros_like(squared))
        factor = torch.where(similar, torch.ones_like(squared), pull)
        slope = difference * factor.unsqueeze(1) * (gradient / difference.shape[0])
        return slope, -slope, None, None, None


@register("ContrastiveLoss")
class ContrastiveLoss(LossLayer):
    """sum(d^2 if similar else max(0, margin - d)^2) / (2 N), d = |a - b|; legacy_version uses max(0, margin - d^2)."""

    bottom_count = (3, 3)
    no_gradient = (SIMILARITY,)

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """()."""
        first, second, similar = bottoms
        if first[1:2] != second[1:2] or count(first) != count(first, 0, 2) or count(second) != count(second, 0, 2):
            raise self.error(f"the two feature blobs need shape (N, C) or (N, C, 1, 1): {first} and {second}")
        if count(similar) != similar[0]:
            raise self.error(f"one similarity label per pair is needed, got shape {similar}")
        return super().reshape([first, second])

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The mean contrastive loss of the batch."""
        options = self.parameter.contrastive_loss_param
        first, second = (bottom.reshape(bottom.shape[0], -1) for bottom in bottoms[:2])
        similar = bottoms[2].detach().reshape(-1).to(torch.int64) != 0
        return [_ContrastiveLoss.apply(first, second, similar, options.margin, options.legacy_version)]  # type: ignore[no-untyped-call]
