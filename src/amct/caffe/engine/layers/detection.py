"""Boxes of detectors: PriorBox and DetectionOutput of SSD, the outputs of YOLO, and non-maximum suppression."""

from __future__ import annotations

import math
from itertools import islice
from typing import TYPE_CHECKING, TypeAlias

import torch

from amct.caffe.engine.layer import Layer, Place, ProtoMessage, Shape, Tensors, count, register
from amct.caffe.engine.onnx_place import fixed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


#: SSD's adaptive suppression (eta < 1) does not reduce a threshold below this value.
ADAPTIVE_LIMIT = 0.5


def overlaps(box: torch.Tensor, others: torch.Tensor, *, pixel: float = 0.0) -> torch.Tensor:
    """Intersection over union of one box with many.

    Args:
        box: Four numbers.
        others: (N, 4).
        pixel: 1 if xmax and ymax are the last pixels inside (Faster R-CNN), 0 if they are coordinates (SSD).
    """
    low = torch.maximum(box[:2], others[:, :2])
    high = torch.minimum(box[2:], others[:, 2:])
    sides = (high - low + pixel).clamp(min=0)
    common = sides[:, 0] * sides[:, 1]
    union = area(box.unsqueeze(0), pixel=pixel) + area(others, pixel=pixel) - common
    return torch.where(common > 0, common / union, torch.zeros_like(common))


def area(boxes: torch.Tensor, *, pixel: float = 0.0) -> torch.Tensor:
    """The area of each box; 0 where a maximum is below its minimum."""
    sides = boxes[:, 2:] - boxes[:, :2]
    product = (sides[:, 0] + pixel) * (sides[:, 1] + pixel)
    return torch.where((sides < 0).any(1), torch.zeros_like(product), product)


def suppress(boxes: torch.Tensor, threshold: float, *, pixel: float = 0.0, eta: float = 1.0) -> Iterator[int]:
    """Non-maximum suppression: yield the index of each box that no box yielded before overlaps too much.

    Args:
        boxes: (N, 4), best first.
        threshold: A box is dropped if its overlap with a kept one is larger.
        pixel: As for ``overlaps``.
        eta: SSD's adaptive form: each box kept multiplies the threshold by it, while that is above one half.
    """
    if eta < 1:
        yield from _suppress_adaptively(boxes, threshold, eta)
        return
    alive = torch.ones(len(boxes), dtype=torch.bool, device=boxes.device)
    for index in range(len(boxes)):
        if not alive[index]:
            continue
        yield index
        rest = slice(index + 1, None)
        alive[rest] &= ~(overlaps(boxes[index], boxes[rest], pixel=pixel) > threshold)


def _suppress_adaptively(boxes: torch.Tensor, threshold: float, eta: float) -> Iterator[int]:
    kept: list[int] = []
    for index in range(len(boxes)):
        if kept and not bool((overlaps(boxes[index], boxes[kept]) <= threshold).all()):
            continue
        kept.append(index)
        yield index
        if threshold > ADAPTIVE_LIMIT:
            threshold *= eta


SAME_RATIO = 1e-6
DEFAULT_VARIANCE = 0.1
CORNERS = 4


@register("PriorBox")
class PriorBox(Layer):
    """Bottoms: feature map and image. Top: (1, 2, boxes * 4), normalized corners and variances.

    Each position has, for every ``min_size``: a square of that size, a square of sqrt(min_size * max_size) if max_size
    is given, and one box per aspect ratio other than 1.
    """

    bottom_count = (2, 2)
    allows_in_place = False
    no_gradient = (0, 1)

    def setup(self, bottoms: list[Shape]) -> None:
        """Read and check sizes, ratios and variances."""
        options = self.options = self.parameter.prior_box_param
        self.sizes = self._sizes()
        self.ratios = self._ratios()
        self.variances = list(options.variance) or [DEFAULT_VARIANCE]
        if len(self.variances) not in (1, CORNERS) or min(self.variances) <= 0:
            raise self.error(f"variance must be one or four numbers above 0, got {self.variances}")
        self.image = self._pair("img", "img_size", ("img_h", "img_w"))
        self.step = self._pair("step", "step", ("step_h", "step_w"))
        self.shapes = list(self._shapes())

    def _sizes(self) -> list[tuple[float, float | None]]:
        options = self.options
        smallest, largest = list(options.min_size), list(options.max_size)
        if not smallest:
            raise self.error("must provide min_size")
        if largest and len(largest) != len(smallest):
            raise self.error(f"needs as many max_size as min_size: {len(largest)} and {len(smallest)}")
        pairs = list(zip(smallest, largest or [None] * len(smallest), strict=True))
        for low, high in pairs:
            if low <= 0:
                raise self.error(f"min_size must be positive, got {low}")
            if high is not None and high <= low:
                raise self.error(f"max_size must be greater than min_size, got {high} and {low}")
        return pairs

    def _ratios(self) -> list[float]:
        ratios = [1.0]
        for ratio in self.options.aspect_ratio:
            if ratio <= 0:
                raise self.error(f"aspect_ratio must be positive, got {ratio}")
            if any(abs(ratio - known) < SAME_RATIO for known in ratios):
                continue
            ratios.append(ratio)
            if self.options.flip:
                ratios.append(1 / ratio)
        return ratios[1:]

    def _pair(self, what: str, single: str, pair: tuple[str, str]) -> tuple[float, float] | None:
        options = self.options
        two = [options.HasField(name) for name in pair]
        if any(two) and options.HasField(single):
            raise self.error(f"either {single} or {pair[0]}/{pair[1]} should be specified; not both")
        if not any(two) and not options.HasField(single):
            return None
        values = [getattr(options, name) for name in (pair if any(two) else (single, single))]
        if min(values) <= 0:
            raise self.error(f"{what}: sizes must be larger than 0, got {values}")
        return values[0], values[1]

    def _shapes(self) -> Sequence[tuple[float, float]]:
        """(width, height) of each box of one position."""
        shapes = []
        for low, high in self.sizes:
            shapes.append((low, low))
            if high is not None:
                side = math.sqrt(low * high)
                shapes.append((side, side))
            shapes += [(low * math.sqrt(ratio), low / math.sqrt(ratio)) for ratio in self.ratios]
        return shapes

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """(1, 2, boxes * 4)."""
        for shape in bottoms:
            self.require_image(shape)
        height, width = bottoms[0][2:]
        return [(1, 2, height * width * len(self.shapes) * CORNERS)]

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """The boxes, which depend on the bottoms' shapes only; cached until these change."""
        feature, picture = (tuple(bottom.shape[2:]) for bottom in bottoms)
        result = self.derived("boxes", [], lambda: self._boxes(feature, picture), (feature, picture))
        return [result.to(bottoms[0].device).clone()]

    def _boxes(self, feature: Shape, picture: Shape) -> torch.Tensor:
        height, width = self.image or picture
        step_y, step_x = self.step or (height / feature[0], width / feature[1])
        places = [
            (torch.arange(size, dtype=torch.float32) + self.options.offset) * step
            for size, step in zip(feature, (step_y, step_x), strict=True)
        ]
        y, x = (grid.reshape(-1, 1) for grid in torch.meshgrid(*places, indexing="ij"))
        wide, high = torch.tensor(self.shapes).unbind(1)
        corners = torch.stack(
            [(x - wide / 2) / width, (y - high / 2) / height, (x + wide / 2) / width, (y + high / 2) / height], -1
        )
        if self.options.clip:
            corners = corners.clamp(0, 1)
        row = torch.tensor(self.variances * (CORNERS // len(self.variances)))
        return torch.stack([corners.reshape(-1), row.repeat(corners.numel() // CORNERS)]).unsqueeze(0)

    def to_onnx(self, place: Place) -> None:
        """A constant, because the result depends on the shapes only."""
        pictures = [torch.empty(1, 1, *fixed(dims[2:])) for dims in place.bottom_dims]
        place.alias(place.value("boxes", self.forward(pictures, [])[0].numpy()))


CORNER, CENTER_SIZE, CORNER_SIZE = 1, 2, 3
COLUMNS = 7


def detections(rows: list[list[float]], pictures: int) -> torch.Tensor:
    """Rows of image, class, score, xmin, ymin, xmax, ymax as (1, 1, N, 7); without any one per image, of -1."""
    nothing = [[picture] + [-1.0] * (COLUMNS - 1) for picture in range(pictures)]
    return torch.tensor(rows or nothing, dtype=torch.float32).reshape(1, 1, -1, COLUMNS)


#: Detections of one image: class -> (score, index of the box), best first.
Found: TypeAlias = dict[int, list[tuple[float, int]]]


@register("DetectionOutput")
class DetectionOutput(Layer):
    """Bottoms: offsets (N, boxes * 4), scores (N, boxes * classes), prior boxes (1, 2, boxes * 4).

    Top: (1, 1, detections, 7), one row per detection: image, class, score, xmin, ymin, xmax, ymax. If nothing is
    detected there is one row per image: its index, then six times -1.
    """

    bottom_count = (3, 3)
    allows_in_place = False
    no_gradient = (0, 1, 2)

    def setup(self, bottoms: list[Shape]) -> None:
        """Read and check the options."""
        options = self.options = self.parameter.detection_output_param
        if not options.HasField("num_classes"):
            raise self.error("must specify num_classes")
        self.classes: int = options.num_classes
        self.location_classes = 1 if options.share_location else self.classes
        self.threshold = options.confidence_threshold if options.HasField("confidence_threshold") else -float("inf")
        self.overlap: float = options.nms_param.nms_threshold
        self.top_k = options.nms_param.top_k if options.nms_param.HasField("top_k") else -1
        if self.overlap < 0:
            raise self.error(f"nms_threshold must be non negative, got {self.overlap}")
        if not 0 < options.nms_param.eta <= 1:
            raise self.error(f"eta must lie above 0 and be at most 1, got {options.nms_param.eta}")

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """(1, 1, 1, 7); forward sets the real number of rows."""
        locations, scores, priors = bottoms
        if locations[0] != scores[0]:
            raise self.error(f"offsets are for {locations[0]} images, scores for {scores[0]}")
        self.boxes = count(priors, 2) // CORNERS
        if count(locations, 1) != self.boxes * self.location_classes * CORNERS:
            raise self.error(
                f"Number of priors must match number of location predictions: {self.boxes} priors, "
                f"{self.location_classes} location(s) each, offsets {locations}"
            )
        if count(scores, 1) != self.boxes * self.classes:
            raise self.error(
                f"Number of priors must match number of confidence predictions: {self.boxes} priors, {self.classes} "
                f"classes, scores {scores}"
            )
        return [(1, 1, 1, COLUMNS)]

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """For each image: decode the boxes, suppress overlapping ones, keep the best."""
        pictures = bottoms[0].shape[0]
        locations = bottoms[0].detach().reshape(pictures, self.boxes, self.location_classes, CORNERS)
        scores = bottoms[1].detach().reshape(pictures, self.boxes, self.classes)
        priors, variances = bottoms[2].detach().reshape(2, self.boxes, 1, CORNERS)
        rows = []
        for picture in range(pictures):
            decoded = decode(
                locations[picture],
                priors,
                variances,
                self.options.code_type,
                is_scaled=self.options.variance_encoded_in_target,
            )
            if getattr(self.options, "clip", False):
                decoded = decoded.clamp(0, 1)
            found = self._keep_best(self._detect(decoded, scores[picture]))
            for label in sorted(found):
                boxes = decoded[:, 0 if self.location_classes == 1 else label]
                rows += [[picture, label, score, *boxes[index].tolist()] for score, index in found[label]]
        return [detections(rows, pictures)]

    def _detect(self, decoded: torch.Tensor, scores: torch.Tensor) -> Found:
        """The boxes of each class that remain after non-maximum suppression."""
        found: Found = {}
        for label in range(self.classes):
            if label == self.options.background_label_id:
                continue
            boxes = decoded[:, 0 if self.location_classes == 1 else label]
            likely = (scores[:, label] > self.threshold).nonzero().reshape(-1)
            order = likely[scores[likely, label].argsort(descending=True, stable=True)]
            if self.top_k > -1:
                order = order[: self.top_k]
            kept = list(suppress(boxes[order], self.overlap, eta=self.options.nms_param.eta))
            found[label] = [(float(scores[index, label]), int(index)) for index in order[kept]]
        return found

    def _keep_best(self, found: Found) -> Found:
        """The ``keep_top_k`` best detections of all classes together."""
        most = self.options.keep_top_k
        if most <= -1 or sum(map(len, found.values())) <= most:
            return found
        everything = [(score, label, index) for label, entries in found.items() for score, index in entries]
        everything.sort(key=lambda entry: -entry[0])
        best: Found = {}
        for score, label, index in islice(everything, most):
            best.setdefault(label, []).append((score, index))
        return best


def decode(
    offsets: torch.Tensor, priors: torch.Tensor, variances: torch.Tensor, code_type: int, *, is_scaled: bool
) -> torch.Tensor:
    """Prior boxes moved by offsets. ``is_scaled``: the offsets are already multiplied by the variances."""
    moves = offsets if is_scaled else offsets * variances
    low, high = priors[..., :2], priors[..., 2:]
    size = high - low
    if code_type == CORNER:
        return priors + moves
    if code_type == CORNER_SIZE:
        return priors + moves * torch.cat([size, size], -1)
    centre = (low + high) / 2 + moves[..., :2] * size
    half = size * moves[..., 2:].exp() / 2
    return torch.cat([centre - half, centre + half], -1)


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
            self.require_image(shape)
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

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """For each image: decode the boxes, sort by score, suppress."""
        pictures = bottoms[0].shape[0]
        rows = [row for picture in range(pictures) for row in self._picture(bottoms, picture)]
        return [detections(rows, pictures)]

    def _picture(self, bottoms: Tensors, picture: int) -> list[list[float]]:
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
