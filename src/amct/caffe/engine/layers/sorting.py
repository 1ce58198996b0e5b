"""Sort, TopK and Nms."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import torch

from amct.caffe.engine.boxes import suppress
from amct.caffe.engine.layer import Layer
from amct.caffe.engine.layers.tensor_operator import TensorOperator
from amct.caffe.engine.registry import register
from amct.caffe.engine.shapes import canonical_axis

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amct.caffe.engine.blob import Shape

BATCH_AXES = 3
CORNERS = 4


@register("Sort")
class Sort(TensorOperator):
    """Sorts along ``axis``, ascending unless ``descending``; stable. Top 0: the values.

    Top 1 (optional): their indices.
    """

    top_count = (1, 2)

    def shapes(self, bottoms: list[Shape]) -> list[Shape]:
        """The bottom's shape, twice."""
        canonical_axis(self.parameter.sort_param.axis, len(bottoms[0]), self.name)
        return [bottoms[0], bottoms[0]]

    def compute(self, bottoms: list[torch.Tensor]) -> list[torch.Tensor]:
        """A stable sort."""
        options, bottom = self.parameter.sort_param, bottoms[0]
        axis = canonical_axis(options.axis, bottom.dim(), self.name)
        values, places = bottom.sort(dim=axis, descending=options.descending, stable=True)
        return [values, places.to(bottom.dtype)]


@register("TopK")
class TopK(TensorOperator):
    """The ``k`` largest (or smallest) values along ``axis``, best first, then their indices; ties: first index wins."""

    top_count = (1, 2)

    def shapes(self, bottoms: list[Shape]) -> list[Shape]:
        """The bottom's shape with size k along the axis, twice."""
        options, shape = self.parameter.topk_param, bottoms[0]
        axis = canonical_axis(options.axis, len(shape), self.name)
        if not 1 <= options.k <= shape[axis]:
            raise self.error(f"k must lie between 1 and the {shape[axis]} values of axis {axis}, got {options.k}")
        return [(*shape[:axis], options.k, *shape[axis + 1 :])] * 2

    def compute(self, bottoms: list[torch.Tensor]) -> list[torch.Tensor]:
        """A stable sort, cut to k."""
        options, bottom = self.parameter.topk_param, bottoms[0]
        axis = canonical_axis(options.axis, bottom.dim(), self.name)
        values, places = bottom.sort(dim=axis, descending=options.largest, stable=True)
        best = values.narrow(axis, 0, options.k).contiguous()
        return [best, places.narrow(axis, 0, options.k).to(bottom.dtype)]


@register("Nms")
class Nms(Layer):
    """Boxes (N, B, 4) and scores (N, classes, B) to rows (image, class, box index) of the boxes kept.

    ONNX's NonMaxSuppression: boxes are (y1, x1, y2, x2), corners in any order, or with ``center_point_box`` (x centre,
    y centre, width, height). Without ``max_output_boxes_per_class`` there is no limit.
    """

    bottom_count = (2, 2)
    allows_in_place = False
    no_gradient = (0, 1)

    def setup(self, bottoms: list[Shape]) -> None:
        """Read the options."""
        options = self.options = self.parameter.nms_param
        self.most = options.max_output_boxes_per_class if options.HasField("max_output_boxes_per_class") else None
        self.threshold = options.score_threshold if options.HasField("score_threshold") else -float("inf")
        if not 0 <= options.iou_threshold <= 1:
            raise self.error(f"iou_threshold must lie between 0 and 1, got {options.iou_threshold}")
        if self.most is not None and self.most < 0:
            raise self.error(f"max_output_boxes_per_class must not be negative, got {self.most}")

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """(largest possible number of boxes, 3); forward sets the real number."""
        boxes, scores = bottoms
        fits = len(boxes) == len(scores) == BATCH_AXES and boxes[2] == CORNERS
        if not fits or (boxes[0], boxes[1]) != (scores[0], scores[2]):
            raise self.error(f"needs boxes (N, B, 4) and scores (N, classes, B), got {boxes} and {scores}")
        each = scores[2] if self.most is None else min(self.most, scores[2])
        return [(scores[0] * scores[1] * each, BATCH_AXES)]

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Suppress class by class."""
        boxes, scores = self._corners(bottoms[0].detach()), bottoms[1].detach()
        rows = [
            [picture, label, int(index)]
            for picture in range(scores.shape[0])
            for label in range(scores.shape[1])
            for index in self._keep(boxes[picture], scores[picture, label])
        ]
        return [torch.tensor(rows, dtype=torch.float32).reshape(-1, BATCH_AXES)]

    def _corners(self, boxes: torch.Tensor) -> torch.Tensor:
        first, second = boxes[..., :2], boxes[..., 2:]
        if self.options.center_point_box:
            return torch.cat([first - second / 2, first + second / 2], -1)
        return torch.cat([torch.minimum(first, second), torch.maximum(first, second)], -1)

    def _keep(self, boxes: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        likely = (scores > self.threshold).nonzero().reshape(-1)
        order = likely[scores[likely].argsort(descending=True, stable=True)]
        kept = list(islice(suppress(boxes[order], self.options.iou_threshold), self.most))
        return order[kept]
