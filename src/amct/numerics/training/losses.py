"""Losses of training with quantizers: of a teacher's outputs, of labels, and of both without a weight to tune."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

_TINY = torch.finfo(torch.float32).tiny


def teacher_distance(own: Tensor, target: Tensor, temperature: float) -> Tensor:
    """How far an output is from the teacher's.

    For scores ``[N, C]`` the Kullback-Leibler divergence of the softened probabilities, else the mean squared
    difference relative to the teacher's mean square.
    """
    own, target = own.float(), target.float()
    if own.ndim == 2 and own.shape[1] > 1:
        return _divergence(own, target, temperature).mean()
    return functional.mse_loss(own, target) / target.square().mean().clamp(min=_TINY)


def _divergence(own: Tensor, target: Tensor, temperature: float) -> Tensor:
    """By row; times the squared temperature, so that gradients do not shrink with it."""
    student = functional.log_softmax(own / temperature, dim=1)
    teacher = functional.log_softmax(target / temperature, dim=1)
    return functional.kl_div(student, teacher, reduction="none", log_target=True).sum(dim=1) * temperature**2


def class_rows(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor] | None:
    """Scores as rows ``[M, C]`` and the labels ``[M]`` (classes) or ``[M, C]`` (shares); None if they do not fit.

    The classes are the second axis, as for ``cross_entropy``, or else the last one. Rows whose label is negative
    (padding) are left out.
    """
    if scores.ndim < 2 or not scores.is_floating_point():
        return None
    if labels.is_floating_point():
        return None if labels.shape != scores.shape else (_as_rows(scores, 1), _as_rows(labels.float(), 1))
    for axis in (1, scores.ndim - 1):
        if labels.shape == (*scores.shape[:axis], *scores.shape[axis + 1 :]):
            rows, classes = _as_rows(scores, axis), labels.reshape(-1).long()
            return rows[classes >= 0], classes[classes >= 0]
    return None


def _as_rows(tensor: Tensor, axis: int) -> Tensor:
    return tensor.movedim(axis, -1).reshape(-1, tensor.shape[axis])


def balanced(own: Tensor, target: Tensor | None, labels: Tensor, temperature: float) -> Tensor:
    """The loss of rows of scores from labels and from a teacher that counts as much as it knows the label.

    With p the probability that the teacher gives the label of a row, its loss is p · T² · KL(teacher, own; softened by
    T) + (1 - p) · cross-entropy(own, label): where the teacher knows the answer all that it says is learned, where it
    is wrong the label is. Without a teacher p is 0. The loss is the mean over the rows.

    Args:
        own: Rows ``[M, C]``.
        target: The teacher's rows.
        labels: Classes ``[M]``, or shares ``[M, C]``.
        temperature: T.
    """
    own = own.float()
    crossed = functional.cross_entropy(own, labels, reduction="none")
    if target is None:
        return crossed.sum() / max(len(own), 1)
    target = target.float()
    known = target.softmax(dim=1)
    trust = (known * labels).sum(1) if labels.is_floating_point() else known.gather(1, labels[:, None])[:, 0]
    return torch.lerp(crossed, _divergence(own, target, temperature), trust).sum() / max(len(own), 1)


def as_strong(loss: Tensor, other: Tensor, outputs: list[Tensor]) -> Tensor:
    """A loss, scaled down where it would pull at the outputs harder than the other loss does."""
    pulls = []
    for each in (loss, other):
        found = torch.autograd.grad(each, outputs, retain_graph=True, allow_unused=True)
        pulls.append(sum(float(gradient.double().square().sum()) for gradient in found if gradient is not None) ** 0.5)
    return loss if pulls[0] <= pulls[1] else loss * (pulls[1] / pulls[0])
