"""Boxes as Faster R-CNN has them: the last pixel is inside."""

from __future__ import annotations

import numpy as np

CLASSES = 21


def anchors(base=16, ratios=(0.5, 1, 2), scales=(8, 16, 32)):
    found = []
    for ratio in ratios:
        width = np.round(np.sqrt(base * base / ratio))
        height = np.round(width * ratio)
        for scale in scales:
            w, h, middle = width * scale, height * scale, (base - 1) / 2
            found.append([middle - (w - 1) / 2, middle - (h - 1) / 2, middle + (w - 1) / 2, middle + (h - 1) / 2])
    return np.array(found)


def all_anchors(height, width, stride):
    x, y = np.meshgrid(np.arange(width) * stride, np.arange(height) * stride)
    shifts = np.stack([x, y, x, y], -1).reshape(-1, 1, 4)
    return (shifts + anchors()).reshape(-1, 4)


def sizes(boxes):
    return boxes[:, 2:4] - boxes[:, :2] + 1


def move(boxes, offsets):
    size = sizes(boxes)
    centre = boxes[:, :2] + 0.5 * size + offsets[:, :2] * size
    half = 0.5 * size * np.exp(offsets[:, 2:])
    return np.concatenate([centre - half, centre + half], 1)


def offsets(boxes, targets):
    size, wanted = sizes(boxes), sizes(targets)
    distance = targets[:, :2] + 0.5 * wanted - boxes[:, :2] - 0.5 * size
    return np.concatenate([distance / size, np.log(wanted / size)], 1)


def overlaps(boxes, others):
    low = np.maximum(boxes[:, None, :2], others[None, :, :2])
    high = np.minimum(boxes[:, None, 2:4], others[None, :, 2:4])
    common = np.clip(high - low + 1, 0, None).prod(2)
    return common / (sizes(boxes).prod(1)[:, None] + sizes(others).prod(1)[None] - common)


def suppress(boxes, threshold):
    left, kept = list(range(len(boxes))), []
    while left:
        best, *rest = left
        kept.append(best)
        left = [index for index in rest if overlaps(boxes[[best]], boxes[[index]])[0, 0] <= threshold]
    return kept
