"""Proposal of Faster R-CNN, and pooling inside regions of a feature map: ROIPooling, PSROIPooling, ROIAlign.

Regions are rows (image, x1, y1, x2, y2) in image pixels; ``spatial_scale`` converts them to the feature map.
"""

from __future__ import annotations

import math
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import torch

from amct.caffe.engine.layer import Layer, Place, Shape, Tensors, count, register
from amct.caffe.engine.layers.detection import CORNERS, suppress
from amct.caffe.engine.onnx_place import FLOAT, INT64, fixed

if TYPE_CHECKING:
    from collections.abc import Sequence


DEFAULT_RATIOS = (0.5, 1.0, 2.0)
DEFAULT_SCALES = (8.0, 16.0, 32.0)


@register("Proposal")
class Proposal(Layer):
    """Bottoms: scores (1, 2A, H, W), offsets (1, 4A, H, W), image info (height, width, scale). Top: regions (R, 5).

    The optional second top holds the scores (R, 1), or with ``output_actual_rois_num`` the number R.
    """

    bottom_count = (3, 3)
    top_count = (1, 2)
    allows_in_place = False
    no_gradient = (0, 1, 2)

    def setup(self, bottoms: list[Shape]) -> None:
        """Compute the anchors."""
        options = self.options = self.parameter.proposal_param
        self.anchors = anchors(
            options.base_size, tuple(options.ratio) or DEFAULT_RATIOS, tuple(options.scale) or DEFAULT_SCALES
        )
        self.overlap: float = options.nms_thresh if options.HasField("nms_thresh") else options.iou_threshold
        if options.HasField("nms_thresh") and options.HasField("iou_threshold"):
            raise self.error("nms_thresh and iou_threshold are two names of one number; give one of them")
        if options.post_nms_topn <= 0:
            raise self.error(f"post_nms_topn must be > 0, got {options.post_nms_topn}")

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """(post_nms_topn, 5); forward sets the real number of regions."""
        scores, offsets, picture = bottoms
        number = len(self.anchors)
        for shape in (scores, offsets):
            self.require_image(shape)
        if scores[0] != 1:
            raise self.error(f"takes one picture at a time, got a batch of {scores[0]}")
        if scores[1] != 2 * number or offsets[1] != CORNERS * number or scores[2:] != offsets[2:]:
            raise self.error(
                f"{number} anchors (ratios times scales) need scores of {2 * number} and offsets of "
                f"{CORNERS * number} channels of one size, got {scores} and {offsets}"
            )
        if count(picture) < 3:
            raise self.error(f"the third bottom holds height, width and scale of the picture, got shape {picture}")
        most = self.options.post_nms_topn
        second: list[Shape] = [(1,) if self.options.output_actual_rois_num else (most, 1)]
        return [(most, 1 + CORNERS), *second[: len(self.top_blobs) - 1]]

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """Apply the offsets to the anchors, drop small boxes, sort by score, apply non-maximum suppression."""
        options, number = self.options, len(self.anchors)
        height, width, scale = bottoms[2].detach().reshape(-1)[:3].tolist()
        scores = bottoms[0].detach()[0, number:].permute(1, 2, 0).reshape(-1)
        rows, columns = bottoms[0].shape[2:]
        offsets = bottoms[1].detach()[0].permute(1, 2, 0).reshape(-1, CORNERS)
        boxes = apply_offsets(all_anchors(self.anchors, rows, columns, options.feat_stride).to(offsets), offsets)
        boxes = torch.stack(
            [boxes[:, side].clamp(0, (width if side % 2 == 0 else height) - 1) for side in range(CORNERS)], 1
        )
        large = (boxes[:, 2:] - boxes[:, :2] + 1 >= options.min_size * scale).all(1).nonzero().reshape(-1)
        order = large[scores[large].argsort(descending=True, stable=True)]
        if options.pre_nms_topn > 0:
            order = order[: options.pre_nms_topn]
        kept = order[list(islice(suppress(boxes[order], self.overlap, pixel=1), options.post_nms_topn))]
        regions = torch.cat([boxes.new_zeros(len(kept), 1), boxes[kept]], 1)
        second = torch.tensor([float(len(kept))]) if options.output_actual_rois_num else scores[kept].unsqueeze(1)
        return [regions, second][: len(self.top_blobs)]


def anchors(base: float, ratios: Sequence[float], scales: Sequence[float]) -> torch.Tensor:
    """The anchors of one position, (A, 4): each ratio (height / width) at each scale, around a square of ``base``."""
    centre = (base - 1) / 2
    found = []
    for ratio in ratios:
        width = round((base * base / ratio) ** 0.5)
        height = round(width * ratio)
        found += [
            [centre + sign * (side * scale - 1) / 2 for sign in (-1, 1) for side in (width, height)] for scale in scales
        ]
    return torch.tensor(found)


def all_anchors(base: torch.Tensor, rows: int, columns: int, stride: float) -> torch.Tensor:
    """The anchors of all positions of a feature map, (rows * columns * A, 4)."""
    y, x = torch.meshgrid(torch.arange(rows) * stride, torch.arange(columns) * stride, indexing="ij")
    shift = torch.stack([x, y, x, y], -1).reshape(-1, 1, CORNERS)
    return (shift + base).reshape(-1, CORNERS)


def apply_offsets(boxes: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Faster R-CNN's decoding: centre += offset * size, size *= exp(offset)."""
    size = boxes[:, 2:] - boxes[:, :2] + 1
    centre = boxes[:, :2] + 0.5 * size + offsets[:, :2] * size
    half = 0.5 * size * offsets[:, 2:].exp()
    return torch.cat([centre - half, centre + half], 1)


REGIONS = 1
COLUMNS = 5
SMALLEST = 0.1


class _RegionPooling(Layer):
    """Bottoms: features (N, C, H, W) and regions (R, 5). Top: (R, channels, pooled height, pooled width)."""

    bottom_count = (2, 2)
    allows_in_place = False
    channels: int
    pooled: tuple[int, int]
    scale: float
    no_gradient = (REGIONS,)

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """(R, channels, pooled height, pooled width)."""
        features, regions = bottoms
        self.require_image(features)
        if count(regions) != regions[0] * COLUMNS:
            raise self.error(f"regions must be rows of (image index, x1, y1, x2, y2), got shape {regions}")
        self.check_channels(features[1])
        return [(regions[0], self.channels, *self.pooled)]

    def check_channels(self, channels: int) -> None:
        """Set the number of output channels: that of the features."""
        self.channels = channels

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """Pool region by region."""
        features = bottoms[0]
        results = []
        for picture, *region in bottoms[1].detach().reshape(-1, COLUMNS).tolist():
            if not 0 <= picture < features.shape[0]:
                raise self.error(f"a region is in image {picture:g}, the batch has {features.shape[0]} images")
            results.append(self.pool(features[int(picture)], *region))
        if not results:
            return [features.new_zeros(0, self.channels, *self.pooled)]
        return [torch.stack(results)]

    def pool(self, features: torch.Tensor, x1: float, y1: float, x2: float, y2: float) -> torch.Tensor:
        """Pool one region of one image (C, H, W)."""
        raise NotImplementedError

    def read_size(self, height: int, width: int, scale: float) -> None:
        """Set and check the pooled size and the scale."""
        if height <= 0 or width <= 0:
            raise self.error(f"pooled_h and pooled_w must be > 0, got {height} and {width}")
        self.pooled, self.scale = (height, width), scale


def _round(value: float) -> int:
    """Round to the nearest integer, halves away from 0, as C's round."""
    return math.floor(abs(value) + 0.5) * (-1 if value < 0 else 1)


@register("ROIPooling")
class ROIPooling(_RegionPooling):
    """The maximum of each cell; cells consist of whole pixels and may overlap. As in Fast R-CNN."""

    def setup(self, bottoms: list[Shape]) -> None:
        options = self.parameter.roi_pooling_param
        self.read_size(options.pooled_h, options.pooled_w, options.spatial_scale)

    def pool(self, features: torch.Tensor, x1: float, y1: float, x2: float, y2: float) -> torch.Tensor:
        """Maximum over columns, then rows: the first of equal values in row-major order gets the gradient."""
        height, width = features.shape[1:]
        rows = _cells(_round(y1 * self.scale), _round(y2 * self.scale), self.pooled[0], height)
        columns = _cells(_round(x1 * self.scale), _round(x2 * self.scale), self.pooled[1], width)
        empty = features.new_zeros(features.shape[0])
        by_column = [features[:, :, a:b].max(2).values if b > a else None for a, b in columns]
        return torch.stack(
            [
                torch.stack([empty if part is None or b <= a else part[:, a:b].max(1).values for part in by_column], -1)
                for a, b in rows
            ],
            1,
        )

    def to_onnx(self, place: Place) -> None:
        regions = place.reshaped(place.bottoms[1], (None, COLUMNS), "regions")
        place.top("MaxRoiPool", place.bottom, regions, pooled_shape=list(self.pooled), spatial_scale=float(self.scale))


def _cells(start: int, end: int, cells: int, limit: int) -> list[tuple[int, int]]:
    """(first pixel, pixel after the last) of each cell along one axis."""
    size = max(end - start + 1, 1) / cells
    return [
        (_clip(math.floor(cell * size) + start, limit), _clip(math.ceil((cell + 1) * size) + start, limit))
        for cell in range(cells)
    ]


def _clip(value: int, limit: int) -> int:
    return min(max(value, 0), limit)


@register("PSROIPooling")
class PSROIPooling(_RegionPooling):
    """The mean of each cell, where each cell has its own channels. As in R-FCN."""

    def setup(self, bottoms: list[Shape]) -> None:
        options = self.parameter.psroi_pooling_param
        if not self.parameter.HasField("psroi_pooling_param") or options.output_dim <= 0:
            raise self.error("needs psroi_pooling_param with spatial_scale, output_dim > 0 and group_size > 0")
        self.read_size(options.group_size, options.group_size, options.spatial_scale)
        self.outputs: int = options.output_dim

    def check_channels(self, channels: int) -> None:
        """Each cell of each output needs one channel."""
        cells = self.pooled[0] * self.pooled[1]
        if channels != self.outputs * cells:
            raise self.error(
                f"input channel number does not match layer parameters: {channels}, expected output_dim "
                f"{self.outputs} * group_size^2 {cells}"
            )
        self.channels = self.outputs

    def pool(self, features: torch.Tensor, x1: float, y1: float, x2: float, y2: float) -> torch.Tensor:
        """Average cell by cell."""
        size, (height, width) = self.pooled[0], features.shape[1:]
        grouped = features.reshape(self.channels, size, size, height, width)
        rows = self._borders(y1, y2, height)
        columns = self._borders(x1, x2, width)
        result = [
            [
                grouped[:, row, column, a:b, c:d].mean((1, 2)) if b > a and d > c else grouped.new_zeros(self.channels)
                for column, (c, d) in enumerate(columns)
            ]
            for row, (a, b) in enumerate(rows)
        ]
        return torch.stack([torch.stack(row, -1) for row in result], 1)

    def _borders(self, first: float, last: float, limit: int) -> list[tuple[int, int]]:
        start, end = _round(first) * self.scale, (_round(last) + 1) * self.scale
        cells = self.pooled[0]
        step = max(end - start, SMALLEST) / cells
        return [
            (_clip(math.floor(cell * step + start), limit), _clip(math.ceil((cell + 1) * step + start), limit))
            for cell in range(cells)
        ]


@register("ROIAlign")
class ROIAlign(_RegionPooling):
    """The mean of bilinearly interpolated points of each cell, without rounding coordinates. As in Mask R-CNN."""

    def setup(self, bottoms: list[Shape]) -> None:
        options = self.options = self.parameter.roi_align_param
        self.read_size(options.pooled_h, options.pooled_w, options.spatial_scale)
        if options.roi_end_mode not in (0, 1):
            raise self.error(f"roi_end_mode must be 0, or 1 if regions include x2 and y2, got {options.roi_end_mode}")

    def pool(self, features: torch.Tensor, x1: float, y1: float, x2: float, y2: float) -> torch.Tensor:
        """Bilinear interpolation is separable: one weight matrix per axis."""
        height, width = features.shape[1:]
        down = self._weights(y1, y2, self.pooled[0], height).to(features)
        across = self._weights(x1, x2, self.pooled[1], width).to(features)
        return torch.einsum("ph,chw,qw->cpq", down, features, across)

    def _weights(self, first: float, last: float, cells: int, size: int) -> torch.Tensor:
        """The weight of each of ``size`` pixels in each cell, (cells, size)."""
        start = first * self.scale
        end = (last + self.options.roi_end_mode) * self.scale
        step = max(end - start, 1.0) / cells
        points = self.options.sampling_ratio if self.options.sampling_ratio > 0 else math.ceil(step)
        weights = torch.zeros(cells, size, dtype=torch.float64)
        for cell in range(cells):
            for point in range(points):
                place = start + (cell + (point + 0.5) / points) * step
                if not -1 <= place <= size:
                    continue
                place = min(max(place, 0.0), size - 1.0)
                low = min(int(place), size - 1)
                high = min(low + 1, size - 1)
                weights[cell, low] += (1 - (place - low)) / points
                weights[cell, high] += (place - low) / points
        return weights

    def to_onnx(self, place: Place) -> None:
        """RoiAlign without the half-pixel shift; image indices and corners are separate inputs."""
        regions = place.reshaped(place.bottoms[1], (None, COLUMNS), "regions")
        parts = [place.writer.tensor(f"{self.name}.{part}") for part in ("picture", "corners")]
        place.node("Split", "parts", [regions, place.value("columns", [1, COLUMNS - 1])], parts, axis=1)
        picture = place.step("flat_picture", "Reshape", parts[0], place.value("flat_shape", [-1]))
        picture = place.step("index", "Cast", picture, to=INT64)
        corners = parts[1]
        if self.options.roi_end_mode:
            inside = np.array([0.0, 0.0, self.options.roi_end_mode, self.options.roi_end_mode], np.float32)
            corners = place.step("ends", "Add", corners, place.value("inside", inside))
        place.top(
            "RoiAlign",
            place.bottom,
            corners,
            picture,
            mode="avg",
            coordinate_transformation_mode="output_half_pixel",
            output_height=self.pooled[0],
            output_width=self.pooled[1],
            sampling_ratio=max(0, int(self.options.sampling_ratio)),
            spatial_scale=float(self.scale),
        )


BATCH_AXES = 3


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

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
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

    def to_onnx(self, place: Place) -> None:
        """NonMaxSuppression, its indices cast to float."""
        (boxes,) = fixed(place.bottom_dims[0][1:2])
        most = boxes if self.most is None else self.most
        inputs = [*place.bottoms, place.value("most", [most])]
        inputs.append(place.value("iou_threshold", np.array([self.options.iou_threshold], np.float32)))
        if self.options.HasField("score_threshold"):
            inputs.append(place.value("score_threshold", np.array([self.threshold], np.float32)))
        kept = place.main("NonMaxSuppression", *inputs, center_point_box=int(self.options.center_point_box))
        place.writer.node("Cast", f"{self.name}.rows", [kept], place.tops, to=FLOAT)
