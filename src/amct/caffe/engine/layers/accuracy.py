"""Accuracy: the fraction of labels whose score is among the ``top_k`` largest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from amct.caffe.engine.layer import Layer
from amct.caffe.engine.registry import register
from amct.caffe.engine.shapes import canonical_axis, count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amct.caffe.engine.blob import Shape


@register("Accuracy")
class Accuracy(Layer):
    """Tops: the accuracy (), and optionally that of each class (C,). A tie with another class counts as wrong."""

    bottom_count = (2, 2)
    top_count = (1, 2)
    no_gradient = (0, 1)

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """(), and (C,) for the second top."""
        scores, labels = bottoms
        options = self.parameter.accuracy_param
        self.axis = canonical_axis(options.axis, len(scores), self.name)
        self.positions = scores[: self.axis] + scores[self.axis + 1 :]
        self.classes = scores[self.axis]
        if options.top_k > self.classes:
            raise self.error(
                f"top_k must be less than or equal to the number of classes: {options.top_k} and {self.classes}"
            )
        if count(labels) != count(self.positions):
            raise self.error(
                "Number of labels must match number of predictions; e.g., if label axis == 1 and prediction shape is "
                "(N, C, H, W), label "
                f"count must be N*H*W. Predictions {scores}, labels {labels}"
            )
        return [(), (self.classes,)][: len(self.top_blobs)]

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """A prediction is right if fewer than ``top_k`` other classes have a score >= that of the label."""
        options, scores = self.parameter.accuracy_param, bottoms[0].detach()
        labels = bottoms[1].detach().reshape(self.positions).to(torch.int64)
        counts = torch.ones_like(labels, dtype=torch.bool)
        if options.HasField("ignore_label"):
            counts = labels != options.ignore_label
            labels = torch.where(counts, labels, torch.zeros_like(labels))
        if labels.numel() and (int(labels.min()) < 0 or int(labels.max()) >= self.classes):
            raise self.error(f"a label lies outside 0..{self.classes - 1}: {int(labels.min())}..{int(labels.max())}")
        chosen = scores.gather(self.axis, labels.unsqueeze(self.axis))
        better = (scores >= chosen).sum(self.axis) - 1
        right = (better < options.top_k) & counts
        total = int(counts.sum())
        results = [torch.tensor(int(right.sum()) / total if total else 0.0)]
        if len(self.top_blobs) > 1:
            results.append(self._per_class(labels[counts], right[counts]))
        return results

    def _per_class(self, labels: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        seen = torch.bincount(labels, minlength=self.classes).to(torch.float32)
        hits = torch.bincount(labels[right], minlength=self.classes).to(torch.float32)
        return torch.where(seen > 0, hits / seen.clamp(min=1), torch.zeros_like(seen))
