"""Boxes (xmin, ymin, xmax, ymax): overlap and non-maximum suppression."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

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
