"""Boxes from the outputs of the face detectors among the real models: the ultralight nets and the MTCNN cascade.

A box is a row x1, y1, x2, y2; scores stand beside. Both decoders follow the models' published code.
"""

from __future__ import annotations

import numpy as np
from PIL import Image


def overlaps(box, others):
    """Intersection over union with each of the others."""
    low, high = np.maximum(box[:2], others[:, :2]), np.minimum(box[2:], others[:, 2:])
    both = np.prod(np.clip(high - low, 0, None), axis=1)
    return both / (np.prod(box[2:] - box[:2]) + np.prod(others[:, 2:] - others[:, :2], axis=1) - both)


def suppressed(boxes, scores, threshold):
    """The places of the boxes that no better one overlaps by more, best first."""
    left = np.argsort(-scores, kind="stable")
    kept = []
    while len(left):
        best, left = left[0], left[1:]
        kept.append(best)
        left = left[overlaps(boxes[best], boxes[left]) <= threshold]
    return np.array(kept, int)


def found_again(boxes, scores, others, other_scores, least=0.5):
    """Of the boxes above a score: how many there are, and how many are among the others (IoU 0.9, score ± 0.05)."""
    chosen = scores > least
    found = sum(
        bool(((overlaps(box, others) >= 0.9) & (np.abs(other_scores - score) <= 0.05)).any())
        for box, score in zip(boxes[chosen], scores[chosen], strict=True)
    )
    return int(chosen.sum()), found


# ------------------------------------------------------------------ ultralight: 320 x 240, four grids of anchors

GRIDS = (((10, 16, 24), 30, 40, 8), ((32, 48), 15, 20, 16), ((64, 96), 8, 10, 32), ((128, 192, 256), 4, 5, 64))


def anchors():
    rows = [
        ((x + 0.5) * step / 320, (y + 0.5) * step / 240, size / 320, size / 240)
        for sizes, height, width, step in GRIDS
        for y in range(height)
        for x in range(width)
        for size in sizes
    ]
    return np.clip(np.array(rows), 0, 1)


def ultralight_boxes(outputs, least):
    """Decoded and suppressed boxes above a score, in pixels of 320 x 240, and their scores."""
    offsets, scores, anchor = outputs["boxes"].reshape(-1, 4), outputs["scores"].reshape(-1, 2)[:, 1], anchors()
    centre = offsets[:, :2] * 0.1 * anchor[:, 2:] + anchor[:, :2]
    size = np.exp(offsets[:, 2:] * 0.2) * anchor[:, 2:]
    boxes = np.concatenate([centre - size / 2, centre + size / 2], axis=1) * (320, 240, 320, 240)
    above = scores > least
    boxes, scores = boxes[above], scores[above]
    kept = suppressed(boxes, scores, 0.3)
    return boxes[kept], scores[kept]


# ------------------------------------------------------------------ MTCNN: each net refines the boxes of the last

SMALLEST, SHRINK = 24, 0.709


class Cascade:
    """P-Net, R-Net and O-Net; each is a function from a batch to its outputs. ``seen`` keeps what each was given."""

    def __init__(self, *nets):
        self.nets = nets
        self.seen = ([], [], [])

    def ask(self, stage, batch):
        self.seen[stage].append(batch)
        return self.nets[stage](batch)

    def __call__(self, picture):
        """Boxes of faces in an RGB picture, and their scores."""
        boxes, _ = self.propose(picture)
        for stage, size, least in ((1, 24, 0.7), (2, 48, 0.3)):
            if not len(boxes):
                return np.zeros((0, 4)), np.zeros(0)
            outputs = self.ask(stage, np.concatenate([crop(picture, box, size) for box in boxes]))
            scores = outputs["prob1"].reshape(len(boxes), -1)[:, 1]
            offsets = outputs["conv5-2" if stage == 1 else "conv6-2"].reshape(len(boxes), 4)
            boxes, scores = refined(boxes, offsets)[scores > least], scores[scores > least]
            kept = suppressed(boxes, scores, 0.7 if stage == 1 else 0.5)
            boxes, scores = boxes[kept], scores[kept]
            if stage == 1:
                boxes = squared(boxes)
        return boxes, scores

    def propose(self, picture):
        found, found_scores = [np.zeros((0, 4))], [np.zeros(0)]
        scale = 12 / SMALLEST
        while min(picture.shape[:2]) * scale >= 12:
            width, height = (int(np.ceil(side * scale)) for side in picture.shape[1::-1])
            outputs = self.ask(0, prepared(np.asarray(Image.fromarray(picture).resize((width, height)))))
            scores, offsets = outputs["prob1"][0, 1], outputs["conv4-2"][0]
            x, y = np.nonzero(scores > 0.6)
            corners = np.stack([x * 2, y * 2, x * 2 + 12, y * 2 + 12], axis=1) / scale
            boxes = refined(corners, offsets[:, x, y].T)
            kept = suppressed(boxes, scores[x, y], 0.5)
            found.append(boxes[kept])
            found_scores.append(scores[x, y][kept])
            scale *= SHRINK
        boxes, scores = np.concatenate(found), np.concatenate(found_scores)
        kept = suppressed(boxes, scores, 0.7)
        return squared(boxes[kept]), scores[kept]


def prepared(picture):
    """One RGB picture as the nets want it: (1, 3, width, height)."""
    return ((picture.astype(np.float32) - 127.5) / 128).transpose(2, 1, 0)[None]


def crop(picture, box, size):
    """What is in a box, black outside the picture."""
    return prepared(np.asarray(Image.fromarray(picture).crop(tuple(np.rint(box).astype(int))).resize((size, size))))


def refined(boxes, offsets):
    sizes = np.tile(boxes[:, 2:] - boxes[:, :2], 2)
    return boxes + offsets * sizes


def squared(boxes):
    centre, side = (boxes[:, :2] + boxes[:, 2:]) / 2, (boxes[:, 2:] - boxes[:, :2]).max(1, keepdims=True)
    return np.concatenate([centre - side / 2, centre + side / 2], axis=1)
