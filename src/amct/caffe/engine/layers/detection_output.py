"""DetectionOutput: SSD's last layer; decodes boxes and applies non-maximum suppression."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, TypeAlias

import torch

from amct.caffe.engine.boxes import suppress
from amct.caffe.engine.layer import Layer
from amct.caffe.engine.registry import register
from amct.caffe.engine.shapes import count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amct.caffe.engine.blob import Shape

CORNER, CENTER_SIZE, CORNER_SIZE = 1, 2, 3
CORNERS = 4
COLUMNS = 7
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

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
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
        if not rows:
            rows = [[picture] + [-1.0] * (COLUMNS - 1) for picture in range(pictures)]
        return [torch.tensor(rows, dtype=torch.float32).reshape(1, 1, -1, COLUMNS)]

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
