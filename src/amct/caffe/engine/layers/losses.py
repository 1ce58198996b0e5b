"""Softmax, the losses, and Accuracy: what compares a net's outputs with labels or targets."""

from __future__ import annotations

import torch
from torch.nn import functional

from amct.caffe.engine.layer import AutogradContext, Layer, Place, ProtoMessage, Shape, Tensors, count, register
from amct.caffe.engine.weights import read_file
from amct.caffe.engine.wire import read_blob

FULL, VALID, BATCH_SIZE, NONE = 0, 1, 2, 3
LABELS = 1


def _ignored(options: ProtoMessage) -> int | None:
    return options.ignore_label if options.HasField("ignore_label") else None


def class_labels(
    layer: Layer, bottom: torch.Tensor, classes: int, ignored: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The labels as integers (0 where ignored) and a mask of those that are not ignored.

    Raises:
        ModelError: A label is not a class.
    """
    labels = bottom.detach().to(torch.int64)
    counts = torch.ones_like(labels, dtype=torch.bool) if ignored is None else labels != ignored
    labels = torch.where(counts, labels, torch.zeros_like(labels))
    if labels.numel() and (int(labels.min()) < 0 or int(labels.max()) >= classes):
        raise layer.error(
            f"a label lies outside 0..{classes - 1}: found {int(labels.min())}..{int(labels.max())}. Are there "
            "fewer outputs than classes, or should ignore_label be set?"
        )
    return labels, counts


def class_positions(layer: Layer, scores: Shape, labels: Shape, axis: int) -> Shape:
    """The shape of scores along ``axis`` without that axis: a position for each label.

    Raises:
        ModelError: There is another number of labels.
    """
    positions = scores[:axis] + scores[axis + 1 :]
    if count(labels) != count(positions):
        raise layer.error(
            "Number of labels must match number of predictions; e.g., if softmax axis == 1 and prediction shape is "
            f"(N, C, H, W), label count must be N*H*W. Predictions {scores}, labels {labels}"
        )
    return positions


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
        return _ignored(self.parameter.loss_param)


def normalizer(mode: int, outer: int, inner: int, valid: int) -> float:
    """The number by which a loss is divided, at least 1."""
    value = {FULL: outer * inner, VALID: valid, BATCH_SIZE: outer, NONE: 1}[mode]
    return max(1.0, float(value))


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

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """sum((a - b)^2) / (2 N)."""
        difference = bottoms[0].reshape(-1) - bottoms[1].reshape(-1)
        return [difference.dot(difference) / bottoms[0].shape[0] / 2]


@register("HingeLoss")
class HingeLoss(LossLayer):
    """sum(max(0, 1 - x) for the label, max(0, 1 + x) for the other classes) / N; squared with norm L2."""

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """The mean hinge loss of the batch."""
        rows = bottoms[0].reshape(bottoms[0].shape[0], -1)
        labels, _ = class_labels(self, bottoms[1].reshape(-1), rows.shape[1], self.ignore_label)
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

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
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

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """The mean contrastive loss of the batch."""
        options = self.parameter.contrastive_loss_param
        first, second = (bottom.reshape(bottom.shape[0], -1) for bottom in bottoms[:2])
        similar = bottoms[2].detach().reshape(-1).to(torch.int64) != 0
        return [_ContrastiveLoss.apply(first, second, similar, options.margin, options.legacy_version)]  # type: ignore[no-untyped-call]


INSIDE, OUTSIDE = 2, 3


@register("SmoothL1Loss")
class SmoothL1Loss(LossLayer):
    """sum(outside * f(inside * (a - b))) / N; f(d) = (sigma d)^2 / 2 if |d| < 1 / sigma^2, else |d| - 1 / (2 sigma^2).

    Bottom 2 holds the inside weights, bottom 3 the outside weights; both default to 1.
    """

    bottom_count = (2, 4)
    no_gradient = (INSIDE, OUTSIDE)

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """()."""
        self.require_same_shapes(bottoms)
        return super().reshape(bottoms)

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """The smooth L1 loss of the batch."""
        sharpness = self.parameter.smooth_l1_loss_param.sigma**2
        difference = bottoms[0] - bottoms[1]
        if len(bottoms) > INSIDE:
            difference = difference * bottoms[INSIDE].detach()
        size = difference.abs()
        values = torch.where(size < 1 / sharpness, 0.5 * sharpness * size * size, size - 0.5 / sharpness)
        if len(bottoms) > OUTSIDE:
            values = values * bottoms[OUTSIDE].detach()
        return [values.sum() / bottoms[0].shape[0]]


#: torch computes rows shorter than a vector of the processor number by number; so many of them are faster as columns.
SHORT_ROW, MANY_ROWS = 16, 64


@register("Softmax")
class Softmax(Layer):
    """y = exp(x) / sum(exp(x)) along ``axis``; the maximum is subtracted first."""

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        self.axis = self.canonical_axis(self.parameter.softmax_param.axis, len(bottoms[0]))
        return [bottoms[0]]

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """Softmax along the axis; many short rows are computed as columns."""
        bottom, axis = bottoms[0], self.axis
        is_last = 0 < axis == bottom.dim() - 1
        if is_last and bottom.shape[axis] < SHORT_ROW and bottom.shape[axis - 1] >= MANY_ROWS:
            columns = torch.softmax(bottom.transpose(axis - 1, axis).contiguous(), axis - 1)
            return [columns.transpose(axis - 1, axis).contiguous()]
        return [torch.softmax(bottom, axis)]

    def to_onnx(self, place: Place) -> None:
        place.top("Softmax", place.bottom, axis=self.axis)


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
        self.axis = self.canonical_axis(self.class_axis(), len(scores))
        self.outer, self.inner = count(scores, 0, self.axis), count(scores, self.axis + 1)
        self.label_shape = class_positions(self, scores, bottoms[1], self.axis)

    def scored_labels(self, bottoms: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """``class_labels`` in the shape of the scores without the class axis."""
        classes = bottoms[0].shape[self.axis]
        return class_labels(self, bottoms[1].reshape(self.label_shape), classes, self.ignore_label)

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

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """The normalized loss, and the probabilities."""
        labels, counts = self.scored_labels(bottoms)
        results = _SoftmaxLoss.apply(bottoms[0], labels, counts, self.axis, self.divisor(counts))  # type: ignore[no-untyped-call]
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
            values = read_blob(read_file(options.source), options.source).values
            self.matrix = torch.from_numpy(values.astype("float32"))

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

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """The normalized loss; probabilities are clamped at 1e-20 in the loss, but not in the gradient."""
        scores = bottoms[0]
        classes = scores.shape[self.axis]
        given = bottoms[2].detach() if self.matrix is None else self.matrix.to(scores.device)
        matrix = given.reshape(classes, classes)
        labels, counts = self.scored_labels(bottoms)
        weights = (matrix[labels] * counts.unsqueeze(-1)).movedim(-1, self.axis)
        logarithm = torch.log_softmax(scores, self.axis)
        floored = logarithm + (logarithm.clamp(min=_LOG_OF_THRESHOLD) - logarithm).detach()
        loss = -(weights * floored).sum() / self.divisor(counts)
        return [loss, logarithm.detach().exp()][: len(self.top_blobs)]


_LOG_OF_THRESHOLD = float(torch.tensor(LOG_THRESHOLD).log())


@register("MultinomialLogisticLoss")
class MultinomialLogisticLoss(LossLayer):
    """-log(p[label]), averaged; the first bottom holds probabilities."""

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """()."""
        if count(bottoms[1]) != bottoms[1][0]:
            raise self.error(f"one label per sample is needed, got shape {bottoms[1]}")
        return super().reshape(bottoms)

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """The loss with probabilities clamped at 1e-20; the gradient is that of the clamped value."""
        rows = bottoms[0].reshape(bottoms[0].shape[0], -1)
        labels, _ = class_labels(self, bottoms[1].reshape(-1), rows.shape[1], self.ignore_label)
        chosen = rows.gather(1, labels.unsqueeze(1))
        floored = chosen + (chosen.clamp(min=LOG_THRESHOLD) - chosen).detach()
        return [-floored.log().sum() / rows.shape[0]]


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
        self.axis = self.canonical_axis(options.axis, len(scores))
        self.classes = scores[self.axis]
        if options.top_k > self.classes:
            raise self.error(
                f"top_k must be less than or equal to the number of classes: {options.top_k} and {self.classes}"
            )
        self.positions = class_positions(self, scores, labels, self.axis)
        return [(), (self.classes,)][: len(self.top_blobs)]

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """A prediction is right if fewer than ``top_k`` other classes have a score >= that of the label."""
        options, scores = self.parameter.accuracy_param, bottoms[0].detach()
        labels, counts = class_labels(self, bottoms[1].reshape(self.positions), self.classes, _ignored(options))
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
