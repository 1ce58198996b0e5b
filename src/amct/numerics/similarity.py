"""How alike the outputs of two models are, accumulated over batches: cosine and SQNR of tensors, and detected boxes.

Boxes have no fixed number and order, so they are matched first: a detection is a row of numbers, ``rows_of`` recognizes
the usual forms, ``BoxMatching`` matches and counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from amct.errors import ArgumentError
from amct.numerics.counts.compiled import compiled_sum

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray
    from torch import Tensor

    Rows = NDArray[np.float64]
    Arrays = Mapping[str, NDArray[Any]]

_CHUNK = 1 << 14
"""Values whose differences stay in the processor's cache."""


@dataclass(frozen=True, kw_only=True)
class LayerComparison:
    """The comparison of one layer's output ``x`` in the reference model and ``y`` in the other, over all data.

    Attributes:
        layer: The name of the layer.
        cosine: The cosine similarity of both outputs as flat vectors; 1 if both are zero, 0 if one of them is.
        sqnr: Signal-to-quantization-noise ratio in dB, ``10 log10(Σ x² / Σ (x - y)²)``; infinite if they are equal.
        mean_squared_error: ``Σ (x - y)² / n``.
        largest_error: The largest ``|x - y|``.
        values: The number of values compared.
    """

    layer: str
    cosine: float
    sqnr: float
    mean_squared_error: float
    largest_error: float
    values: int


class Comparison:
    """Accumulates the comparison of layer outputs in constant memory, in float64."""

    def __init__(self) -> None:
        self._sums: dict[str, _ErrorSums] = {}

    def add(self, layer: str, reference: Tensor, other: Tensor) -> None:
        """Add one batch of a layer's output in the reference model and in the other model.

        Raises:
            ArgumentError: The shapes differ.
        """
        if reference.shape != other.shape:
            raise ArgumentError(
                f'layer "{layer}": outputs of different shapes cannot be compared, '
                f"{list(reference.shape)} and {list(other.shape)}"
            )
        self._sums.setdefault(layer, _ErrorSums()).add(reference.detach().cpu(), other.detach().cpu())

    def layers(self) -> list[LayerComparison]:
        """Return the comparison of each layer, in the order in which the layers were first added."""
        return [sums.result(layer) for layer, sums in self._sums.items()]


@dataclass
class _ErrorSums:
    product: float = 0.0
    reference: float = 0.0
    other: float = 0.0
    error: float = 0.0
    largest: float = 0.0
    values: int = 0

    def add(self, reference: Tensor, other: Tensor) -> None:
        if reference.numel() == 0:
            return
        x, y = (each.reshape(-1).contiguous() for each in (reference, other))
        if x.dtype != torch.float32 or y.dtype != torch.float32:
            x, y = x.double(), y.double()
        product, own, others, error, largest = _sums_of(x.numpy(), y.numpy())
        self.product += product
        self.reference += own
        self.other += others
        self.error += error
        self.largest = max(self.largest, float(np.int64(largest).view(np.float64)))
        self.values += x.numel()

    def result(self, layer: str) -> LayerComparison:
        return LayerComparison(
            layer=layer,
            cosine=self._cosine(),
            sqnr=self._sqnr(),
            mean_squared_error=self.error / max(self.values, 1),
            largest_error=self.largest,
            values=self.values,
        )

    def _cosine(self) -> float:
        if self.reference == 0 or self.other == 0:
            return 1.0 if self.reference == self.other else 0.0
        return min(1.0, max(-1.0, self.product / math.sqrt(self.reference * self.other)))

    def _sqnr(self) -> float:
        if self.error == 0:
            return math.inf
        return 10 * math.log10(self.reference / self.error) if self.reference > 0 else -math.inf


@compiled_sum
def _sums_of(x: NDArray[Any], y: NDArray[Any]) -> tuple[float, float, float, float, int]:
    """Return Σ x·y, Σ x², Σ y², Σ (x - y)² in float64, and the bits of the largest |x - y|.

    Positive floats are ordered like their bits, and only maxima of integers are vectorized.
    """
    product = own = others = errors = 0.0
    largest = np.int64(0)
    distance = np.empty(min(_CHUNK, x.size))
    for begin in range(0, x.size, _CHUNK):
        left, right = x[begin : begin + _CHUNK], y[begin : begin + _CHUNK]
        for place in range(left.size):
            a, b = np.float64(left[place]), np.float64(right[place])
            product += a * b
            own += a * a
            others += b * b
            errors += (a - b) * (a - b)
            distance[place] = abs(a - b)
        bits = distance[: left.size].view(np.int64)
        for place in range(bits.size):
            largest = max(largest, bits[place])
    return product, own, others, errors, largest


LEAST_SCORE = 0.5
"""Detections of the reference count from this score on: the many uncertain ones come and go with any rounding."""
LEAST_OTHER = 0.3
"""Those of the other model may have a lower score, so that one of 0.51 in the reference is not lost at 0.49."""
SAME_OBJECT = 0.5
"""Two boxes with this intersection over union mean the same object."""
CORNERS, END_TO_END, SSD = 4, 6, 7
"""Numbers of columns: x1, y1, x2, y2; these, score, label; image, label, score, x1, y1, x2, y2."""
CAFFE_AXES = 4


@dataclass(frozen=True, kw_only=True)
class BoxComparison:
    """The detections of a reference model, and what another model makes of them, over all data.

    Attributes:
        output: The name of the output; of boxes, scores and labels in several outputs, that of the boxes.
        boxes: Detections of the reference with a score of at least ``LEAST_SCORE``.
        found: Those of them that the other model finds again: a box of the same image and label that overlaps by half.
        more: Detections of the other model with such a score that the reference does not have.
        mean_iou: The mean intersection over union of the boxes found again.
        score_difference: The mean distance between their scores.
    """

    __pydantic_config__ = {"extra": "forbid", "strict": True}  # noqa: RUF012  read by quant_json, which needs pydantic
    output: str
    boxes: int
    found: int
    more: int
    mean_iou: float = 0.0
    score_difference: float = 0.0

    @property
    def share(self) -> float:
        """Of the detections of both models together, the share that both have."""
        return self.found / (self.boxes + self.more) if self.boxes + self.more else 1.0

    def __str__(self) -> str:
        """``45 of 47 boxes found again, mean IoU 0.93, scores differ by 0.012``."""
        text = f"{self.found} of {self.boxes} boxes found again"
        if self.found:
            text += f", mean IoU {self.mean_iou:.2f}, scores differ by {self.score_difference:.3f}"
        return text + (f", {self.more} more" if self.more else "")


def rows_of(outputs: Arrays) -> dict[str, Rows]:
    """The detections among the outputs of a model, as rows of image, label, score, x1, y1, x2, y2.

    Recognized are rows of seven numbers in this order (SSD, the YOLO layers of Caffe) or of image, x1, y1, x2, y2,
    label, score, rows of six numbers x1, y1, x2, y2, score, label (YOLO with its selection inside), and an output of
    boxes beside outputs of a score and perhaps a label for each of them (torchvision). Rows without a box, which are
    filled with zeros or with -1, are left out.
    """
    found: dict[str, Rows] = {}
    for name, value in outputs.items():
        columns = value.shape[-1] if value.ndim > 1 and value.dtype.kind == "f" else 0
        if columns == SSD and value.size == value.shape[-2] * SSD:
            found[name] = _with_area(_label_first(value.reshape(-1, SSD).astype(np.float64)))
        elif columns == END_TO_END and value.ndim <= 3:
            found[name] = _with_area(_by_image(value)[:, [0, 6, 5, 1, 2, 3, 4]])
        elif columns == CORNERS and value.ndim <= 3 and (beside := _beside(value, outputs)) is not None:
            found[name] = _with_area(beside)
    return found


def _label_first(rows: Rows) -> Rows:
    """Rows of seven numbers in the order of SSD."""
    is_last = len(rows) > 0 and _are_shares(rows[:, 6]) and _are_whole(rows[:, 5]) and not _are_shares(rows[:, 2])
    return rows[:, [0, 5, 6, 1, 2, 3, 4]] if is_last else rows


def _by_image(value: NDArray[Any]) -> Rows:
    """Rows with the index of their image in front; the first of three axes counts images."""
    images = value.shape[0] if value.ndim == 3 else 1
    rows = value.reshape(images, -1, value.shape[-1]).astype(np.float64)
    index = np.broadcast_to(np.arange(images, dtype=np.float64)[:, None, None], (*rows.shape[:2], 1))
    return np.concatenate([index, rows], axis=2).reshape(-1, value.shape[-1] + 1)


def _beside(boxes: NDArray[Any], outputs: Arrays) -> Rows | None:
    """Rows of an output of boxes and the outputs of their scores and labels; None if there is no score."""
    numbers = [value.reshape(-1).astype(np.float64) for value in outputs.values() if value.shape == boxes.shape[:-1]]
    scores = next((each for each in numbers if _are_shares(each) and not _are_whole(each)), None)
    if scores is None:
        return None
    labels = next((each for each in numbers if each is not scores and _are_whole(each)), np.zeros_like(scores))
    rows = _by_image(boxes)
    return np.concatenate([rows[:, :1], labels[:, None], scores[:, None], rows[:, 1:]], axis=1)


def _are_shares(values: Rows) -> bool:
    return bool((np.abs(values - 0.5) <= 0.5).all())


def _are_whole(values: Rows) -> bool:
    return values.size > 0 and bool((values == np.rint(values)).all())


def _with_area(rows: Rows) -> Rows:
    usable = np.isfinite(rows).all(1)
    with np.errstate(invalid="ignore"):
        return rows[usable & (rows[:, 5] > rows[:, 3]) & (rows[:, 6] > rows[:, 4])]


class BoxMatching:
    """Matches the detections of two models, batch by batch, and counts; memory does not grow with the data.

    An output counts as detections if its form says so and its number of rows differs between the models; an output of
    Caffe's detection layers, with four axes, always does.
    """

    def __init__(self) -> None:
        self._sums: dict[str, NDArray[np.float64]] = {}
        """By output: the numbers of boxes, found and more, the sums of overlaps and of distances of scores."""
        self._beside: dict[str, set[str]] = {}
        self._counted: set[str] = set()

    def take(self, reference: Arrays, other: Arrays) -> None:
        """Match the detections among the outputs of both models for one batch."""
        found, others = rows_of(reference), rows_of(other)
        for name in found.keys() & others.keys():
            self.add(name, found[name], others[name])
            value = reference[name]
            self._beside.setdefault(name, {name}).update(
                each for each, array in reference.items() if array.shape == value.shape[:-1]
            )
            if other[name].shape != value.shape or value.ndim == CAFFE_AXES:
                self._counted.add(name)

    @property
    def names(self) -> frozenset[str]:
        """The outputs that are compared by their detections, and those of their scores and labels."""
        return frozenset(each for name in self._counted for each in self._beside[name])

    def comparisons(self) -> tuple[BoxComparison, ...]:
        """The comparison of each output whose detections count."""
        return tuple(each for each in self.result() if each.output in self._counted)

    def possible(self) -> Mapping[BoxComparison, frozenset[str]]:
        """The comparison of each output with the form of detections, and the outputs that it stands for."""
        return {each: frozenset(self._beside[each.output]) for each in self.result()}

    def add(self, output: str, reference: Rows, other: Rows) -> None:
        """Add the detections of one batch, rows as ``rows_of`` returns them."""
        sums = self._sums.setdefault(output, np.zeros(5))
        boxes = reference[reference[:, 2] >= LEAST_SCORE]
        pairs = _matched(boxes, other[other[:, 2] >= LEAST_OTHER])
        again = _matched(other[other[:, 2] >= LEAST_SCORE], reference[reference[:, 2] >= LEAST_OTHER])
        sums += len(boxes), len(pairs), (other[:, 2] >= LEAST_SCORE).sum() - len(again), *pairs.sum(0)

    def result(self) -> list[BoxComparison]:
        """The comparison of each output that was added, in the order in which they were first added."""
        return [
            BoxComparison(
                output=output,
                boxes=int(boxes),
                found=int(found),
                more=int(more),
                mean_iou=float(overlap / max(found, 1)),
                score_difference=float(distance / max(found, 1)),
            )
            for output, (boxes, found, more, overlap, distance) in self._sums.items()
        ]


def _matched(boxes: Rows, others: Rows) -> Rows:
    """Overlap and distance of the scores of each box that has a partner; the most certain boxes choose first."""
    left = np.ones(len(others), bool)
    pairs = []
    for box in boxes[np.argsort(-boxes[:, 2], kind="stable")]:
        overlap = _overlaps(box[3:], others[:, 3:]) * (left & (others[:, :2] == box[:2]).all(1))
        best = int(overlap.argmax()) if len(others) else 0
        if len(others) and overlap[best] >= SAME_OBJECT:
            left[best] = False
            pairs.append((overlap[best], abs(box[2] - others[best, 2])))
    return np.array(pairs, np.float64).reshape(-1, 2)


def _overlaps(box: Rows, others: Rows) -> Rows:
    """Intersection over union with each of the others."""
    low, high = np.maximum(box[:2], others[:, :2]), np.minimum(box[2:], others[:, 2:])
    both = np.prod(np.clip(high - low, 0, None), axis=1)
    area = np.prod(others[:, 2:] - others[:, :2], axis=1)
    result: Rows = both / (np.prod(box[2:] - box[:2]) + area - both)
    return result
