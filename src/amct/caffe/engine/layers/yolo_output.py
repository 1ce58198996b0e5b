"""YoloDetectionOutput and Yolov3DetectionOutput: the last layers of MobileNet-YOLO; boxes and their suppression."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from amct.caffe.engine.boxes import suppress
from amct.caffe.engine.layer import Layer
from amct.caffe.engine.registry import register
from amct.caffe.engine.shapes import require_image

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amct.caffe.engine.blob import Shape
    from amct.caffe.engine.messages import ProtoMessage

COLUMNS = 7
BOX_AND_OBJECT = 5


class _YoloOutput(Layer):
    """The common part: feature maps (N, boxes * (5 + classes), H, W) to rows (1, 1, detections, 7).

    A row holds image, class (from 1), score, xmin, ymin, xmax, ymax, best first in each image. If nothing is detected
    there is one row per image: its index, then six times -1. Boxes of all classes suppress each other.
    """

    bottom_count = (1, None)
    allows_in_place = False
    options: ProtoMessage

    def setup(self, bottoms: list[Shape]) -> None:
        """Read the options that both layers have."""
        self.no_gradient = tuple(range(len(bottoms)))
        if not self.options.HasField("num_classes"):
            raise self.error("must specify num_classes")
        self.classes: int = self.options.num_classes
        self.boxes: int = self.options.num_box
        sizes = list(self.options.biases)
        if len(sizes) % 2:
            raise self.error(f"biases are pairs of width and height, got {len(sizes)} numbers")
        self.sizes = torch.tensor(sizes).reshape(-1, 2)

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """(1, 1, 1, 7); forward sets the real number of rows."""
        channels = self.boxes * (BOX_AND_OBJECT + self.classes)
        for shape in bottoms:
            require_image(shape, self.name)
            if shape[1] != channels or shape[2] != shape[3] or shape[0] != bottoms[0][0]:
                raise self.error(
                    f"{self.boxes} boxes of {self.classes} classes need bottoms of {channels} channels, as high as "
                    f"wide, for the same images, got {bottoms}"
                )
        return [(1, 1, 1, COLUMNS)]

    def anchors(self, bottom: int, side: int) -> torch.Tensor:
        """Width and height of the boxes of a bottom, (boxes, 2), as parts of the image."""
        raise NotImplementedError

    def detections(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Row, class and score of each detection, from objectness and class outputs (rows, 1 + classes)."""
        raise NotImplementedError

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """For each image: decode the boxes, sort by score, suppress."""
        pictures = bottoms[0].shape[0]
        rows = [row for picture in range(pictures) for row in self._picture(bottoms, picture)]
        if not rows:
            rows = [[picture] + [-1.0] * (COLUMNS - 1) for picture in range(pictures)]
        return [torch.tensor(rows, dtype=torch.float32).reshape(1, 1, -1, COLUMNS)]

    def _picture(self, bottoms: list[torch.Tensor], picture: int) -> list[list[float]]:
        decoded = [self._decode(index, bottom.detach()[picture]) for index, bottom in enumerate(bottoms)]
        boxes = torch.cat([corners for corners, _ in decoded])
        places, labels, scores = self.detections(torch.cat([outputs for _, outputs in decoded]))
        order = scores.argsort(descending=True, stable=True)
        candidates = boxes[places[order]]
        # suppressed where the overlap is at least the threshold
        threshold = torch.nextafter(torch.tensor(self.options.nms_threshold), torch.tensor(-1.0))
        kept = order[list(suppress(candidates, float(threshold)))]
        return [
            [picture, int(labels[index]) + 1, float(scores[index]), *boxes[places[index]].tolist()] for index in kept
        ]

    def _decode(self, index: int, maps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Corners (cells * boxes, 4), and the raw outputs of object and classes."""
        side = maps.shape[-1]
        values = maps.reshape(self.boxes, -1, side, side).permute(2, 3, 0, 1)
        rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
        cells = torch.stack([columns, rows], -1).unsqueeze(2).to(values)
        centre = (cells + values[..., :2].sigmoid()) / side
        half = values[..., 2:4].exp() * self.anchors(index, side).to(values) / 2
        corners = torch.cat([centre - half, centre + half], -1)
        return corners.reshape(-1, 4), values[..., 4:].reshape(-1, 1 + self.classes)


@register("YoloDetectionOutput")
class YoloDetectionOutput(_YoloOutput):
    """YOLO v2: sizes in cells; each box has the class of the largest softmax output."""

    def setup(self, bottoms: list[Shape]) -> None:
        """Check the number of boxes."""
        self.options = self.parameter.yolo_detection_output_param
        super().setup(bottoms)
        if len(self.sizes) < self.boxes:
            raise self.error(f"biases must hold {self.boxes} pairs of width and height, got {len(self.sizes)}")

    def anchors(self, bottom: int, side: int) -> torch.Tensor:
        """The sizes divided by the number of cells."""
        del bottom
        return self.sizes[: self.boxes] / side

    def detections(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """At most one detection per box."""
        best, labels = scores[:, 1:].softmax(1).max(1)
        confidence = scores[:, 0].sigmoid() * best
        places = (confidence >= self.options.confidence_threshold).nonzero().reshape(-1)
        return places, labels[places], confidence[places]


@register("Yolov3DetectionOutput")
class Yolov3DetectionOutput(_YoloOutput):
    """YOLO v3: sizes in pixels, chosen by ``mask`` for each bottom; each class has a sigmoid of its own."""

    def setup(self, bottoms: list[Shape]) -> None:
        """Check the masks and strides."""
        options = self.options = self.parameter.yolov3_detection_output_param
        super().setup(bottoms)
        groups, masks = options.mask_group_num, list(options.mask)
        if groups != len(bottoms) or len(options.anchors_scale) < groups:
            raise self.error(
                f"needs mask_group_num bottoms with an anchors_scale each, got {groups}, {len(bottoms)} bottoms and "
                f"{len(options.anchors_scale)} anchors_scale"
            )
        per_bottom = len(masks) // groups
        if per_bottom < self.boxes or max(masks, default=0) >= len(self.sizes):
            raise self.error(
                f"mask must hold {self.boxes} indices of biases per bottom, below {len(self.sizes)}, got {masks}"
            )
        self.masks = [masks[start : start + self.boxes] for start in range(0, per_bottom * groups, per_bottom)]

    def anchors(self, bottom: int, side: int) -> torch.Tensor:
        """The sizes of the bottom's mask divided by the size of the image."""
        stride: int = self.options.anchors_scale[bottom]
        return self.sizes[self.masks[bottom]] / (side * stride)

    def detections(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One detection for each class of a box above the threshold."""
        confidence = scores[:, 1:].sigmoid() * scores[:, :1].sigmoid()
        places, labels = (confidence > self.options.confidence_threshold).nonzero(as_tuple=True)
        return places, labels, confidence[places, labels]
