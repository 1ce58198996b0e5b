"""Proposal: the regions of Faster R-CNN's region proposal network, without a Python layer."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import torch

from amct.caffe.engine.boxes import suppress
from amct.caffe.engine.layer import Layer
from amct.caffe.engine.registry import register
from amct.caffe.engine.shapes import count, require_image

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amct.caffe.engine.blob import Shape

DEFAULT_RATIOS = (0.5, 1.0, 2.0)
DEFAULT_SCALES = (8.0, 16.0, 32.0)
CORNERS = 4


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
            require_image(shape, self.name)
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

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
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
