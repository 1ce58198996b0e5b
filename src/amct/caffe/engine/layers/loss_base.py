"""The common part of loss layers: batch size check, scalar top, normalization, labels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from amct.caffe.engine.layer import Layer

if TYPE_CHECKING:
    from amct.caffe.engine.blob import Shape

FULL, VALID, BATCH_SIZE, NONE = 0, 1, 2, 3
LABELS = 1


class LossLayer(Layer):
    """A layer whose first top is a scalar loss with weight 1."""

    bottom_count = (2, 2)
    default_loss_weight = 1.0
    makes_missing_tops = True
    no_gradient: tuple[int, ...] = (LABELS,)

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """()."""
        if bottoms[0][:1] != bottoms[1][:1]:
            raise self.error(f"The data and label should have the same first dimension: {bottoms[0]} and {bottoms[1]}")
        return [()]

    def normalization(self, default: int) -> int:
        """The normalization mode of loss_param: ``normalization`` or the older ``normalize``."""
        options = self.parameter.loss_param
        if options.HasField("normalization"):
            mode: int = options.normalization
            return mode
        if options.HasField("normalize"):
            return VALID if options.normalize else BATCH_SIZE
        return default

    @property
    def ignore_label(self) -> int | None:
        """The label that is ignored, if any."""
        options = self.parameter.loss_param
        return options.ignore_label if options.HasField("ignore_label") else None

    def labels(self, bottom: torch.Tensor, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the labels as integers (0 where ignored) and a mask of those that are not ignored.

        Raises:
            ModelError: A label is not a class.
        """
        labels = bottom.detach().to(torch.int64)
        counts = torch.ones_like(labels, dtype=torch.bool) if self.ignore_label is None else labels != self.ignore_label
        labels = torch.where(counts, labels, torch.zeros_like(labels))
        if labels.numel() and (int(labels.min()) < 0 or int(labels.max()) >= classes):
            raise self.error(
                f"a label lies outside 0..{classes - 1}: found {int(labels.min())}..{int(labels.max())}. Are there "
                "fewer outputs than "
                "classes, or should ignore_label be set?"
            )
        return labels, counts


def normalizer(mode: int, outer: int, inner: int, valid: int) -> float:
    """The number by which a loss is divided, at least 1."""
    value = {FULL: outer * inner, VALID: valid, BATCH_SIZE: outer, NONE: 1}[mode]
    return max(1.0, float(value))
