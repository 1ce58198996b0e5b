"""Losses on class probabilities: SoftmaxWithLoss, InfogainLoss, MultinomialLogisticLoss."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from amct.caffe.engine.layers.loss_base import VALID, LossLayer, normalizer
from amct.caffe.engine.registry import register
from amct.caffe.engine.shapes import canonical_axis, count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amct.caffe.engine.blob import Shape
    from amct.caffe.engine.layer import AutogradContext

SMALLEST_NORMAL = torch.finfo(torch.float32).tiny
LOG_THRESHOLD = 1e-20


class _SoftmaxLoss(torch.autograd.Function):
    """Caffe's softmax loss: the probability is clamped from below in the loss, but not in the gradient p - y."""

    @staticmethod
    def forward(
        ctx: AutogradContext,
        scores: torch.Tensor,
        labels: torch.Tensor,
        counts: torch.Tensor,
        axis: int,
        divisor: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        probability = torch.softmax(scores, axis)
        chosen = probability.gather(axis, labels.unsqueeze(axis)).squeeze(axis).clamp(min=SMALLEST_NORMAL)
        ctx.save_for_backward(probability, labels, counts)
        ctx.axis, ctx.divisor = axis, divisor
        ctx.mark_non_differentiable(probability)
        return -(chosen.log() * counts).sum() / divisor, probability

    @staticmethod
    def backward(ctx: AutogradContext, gradient: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        probability, labels, counts = ctx.saved_tensors
        index = labels.unsqueeze(ctx.axis)
        slope = probability.scatter_add(ctx.axis, index, torch.full_like(index, -1, dtype=probability.dtype))
        return slope * counts.unsqueeze(ctx.axis) * (gradient / ctx.divisor), None, None, None, None


class _ClassLoss(LossLayer):
    """The common part of losses with scores along one axis and one label for each other position."""

    def prepare(self, bottoms: list[Shape]) -> None:
        """Find the axis and check the number of labels."""
        scores = bottoms[0]
        self.axis = canonical_axis(self.class_axis(), len(scores), self.name)
        self.outer, self.inner = count(scores, 0, self.axis), count(scores, self.axis + 1)
        if count(bottoms[1]) != self.outer * self.inner:
            raise self.error(
                "Number of labels must match number of predictions; e.g., if softmax axis == 1 and prediction shape "
                "is (N, C, H, W), "
                f"label count must be N*H*W. Predictions {scores}, labels {bottoms[1]}"
            )
        self.label_shape = scores[: self.axis] + scores[self.axis + 1 :]

    def class_axis(self) -> int:
        """The class axis of the prototxt."""
        return int(self.parameter.softmax_param.axis)

    def divisor(self, counts: torch.Tensor) -> float:
        """The normalizer of the sum of losses."""
        mode = self.normalization(VALID)
        valid = int(counts.sum()) if mode == VALID and self.ignore_label is not None else counts.numel()
        return normalizer(mode, self.outer, self.inner, valid)


@register("SoftmaxWithLoss")
class SoftmaxWithLoss(_ClassLoss):
    """-log(softmax(x)[label]), averaged; an optional second top holds the probabilities."""

    top_count = (1, 2)

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """(), and the scores' shape for the probabilities."""
        tops = super().reshape(bottoms)
        self.prepare(bottoms)
        return [*tops, bottoms[0]][: len(self.top_blobs)]

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The normalized loss, and the probabilities."""
        scores = bottoms[0]
        labels, counts = self.labels(bottoms[1].reshape(self.label_shape), scores.shape[self.axis])
        results = _SoftmaxLoss.apply(scores, labels, counts, self.axis, self.divisor(counts))  # type: ignore[no-untyped-call]
        return results[: len(self.top_blobs)]  # type: ignore[no-any-return]


@register("InfogainLoss")
class InfogainLoss(_ClassLoss):
    """-sum_c H[label, c] * log(p_c), averaged; H (C, C) is the infogain matrix."""

    bottom_count = (2, 3)
    top_count = (1, 2)
    no_gradient = (1, 2)

    def setup(self, bottoms: list[Shape]) -> None:
        """Read the matrix unless it is the third bottom."""
        if self.parameter.loss_param.HasField("normalize"):
            raise self.error('normalize is deprecated. use "normalization"')
        options = self.parameter.infogain_loss_param
        self.matrix: torch.Tensor | None = None
        if len(bottoms) < 3:
            if not options.HasField("source"):
                raise self.error("Infogain matrix source must be specified, or a third bottom given.")
            self.matrix = _read_matrix(options.source)

    def class_axis(self) -> int:
        """The axis of infogain_loss_param."""
        return int(self.parameter.infogain_loss_param.axis)

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """(), and the scores' shape for the probabilities."""
        tops = super().reshape(bottoms)
        self.prepare(bottoms)
        classes = bottoms[0][self.axis]
        given = count(bottoms[2]) if self.matrix is None else self.matrix.numel()
        if given != classes * classes:
            raise self.error(f"the infogain matrix must be {classes} x {classes}, it has {given} values")
        return [*tops, bottoms[0]][: len(self.top_blobs)]

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The normalized loss; probabilities are clamped at 1e-20 in the loss, but not in the gradient."""
        scores = bottoms[0]
        classes = scores.shape[self.axis]
        given = bottoms[2].detach() if self.matrix is None else self.matrix.to(scores.device)
        matrix = given.reshape(classes, classes)
        labels, counts = self.labels(bottoms[1].reshape(self.label_shape), classes)
        weights = (matrix[labels] * counts.unsqueeze(-1)).movedim(-1, self.axis)
        logarithm = torch.log_softmax(scores, self.axis)
        floored = logarithm + (logarithm.clamp(min=_LOG_OF_THRESHOLD) - logarithm).detach()
        loss = -(weights * floored).sum() / self.divisor(counts)
        return [loss, logarithm.detach().exp()][: len(self.top_blobs)]


_LOG_OF_THRESHOLD = float(torch.tensor(LOG_THRESHOLD).log())


def _read_matrix(path: str) -> torch.Tensor:
    from amct.caffe.engine.weights import read_file
    from amct.caffe.engine.wire import read_blob

    return torch.from_numpy(read_blob(read_file(path), path).values.astype("float32"))


@register("MultinomialLogisticLoss")
class MultinomialLogisticLoss(LossLayer):
    """-log(p[label]), averaged; the first bottom holds probabilities."""

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """()."""
        if count(bottoms[1]) != bottoms[1][0]:
            raise self.error(f"one label per sample is needed, got shape {bottoms[1]}")
        return super().reshape(bottoms)

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The loss with probabilities clamped at 1e-20; the gradient is that of the clamped value."""
        rows = bottoms[0].reshape(bottoms[0].shape[0], -1)
        labels, _ = self.labels(bottoms[1].reshape(-1), rows.shape[1])
        chosen = rows.gather(1, labels.unsqueeze(1))
        floored = chosen + (chosen.clamp(min=LOG_THRESHOLD) - chosen).detach()
        return [-floored.log().sum() / rows.shape[0]]
