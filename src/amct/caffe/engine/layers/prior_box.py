"""PriorBox: SSD's prior boxes, several at each position of a feature map."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from amct.caffe.engine.layer import Layer
from amct.caffe.engine.registry import register
from amct.caffe.engine.shapes import require_image

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amct.caffe.engine.blob import Shape

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
            require_image(shape, self.name)
        height, width = bottoms[0][2:]
        return [(1, 2, height * width * len(self.shapes) * CORNERS)]

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
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
