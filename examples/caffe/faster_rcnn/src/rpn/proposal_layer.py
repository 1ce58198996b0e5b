"""ProposalLayer, as ``faster_rcnn_test.pt`` names it: anchors moved by the net, the best of them kept.

``param_str`` holds ``'feat_stride': 16`` and, where they differ from those of Faster R-CNN, ``'scales'``, ``'ratios'``
and ``'min_size'``.
"""

from __future__ import annotations

import ast
from itertools import islice

import numpy as np
import torch

import caffe
from amct.caffe.engine.layers.detection import suppress
from amct.caffe.engine.layers.regions import all_anchors, anchors, apply_offsets

BEFORE_SUPPRESSION, AFTER_SUPPRESSION, LARGEST_OVERLAP = 6000, 300, 0.7
DEFAULTS = {"feat_stride": 16, "scales": (8, 16, 32), "ratios": (0.5, 1, 2), "min_size": 16}


class ProposalLayer(caffe.Layer):
    """Bottoms: scores, offsets, height-width-scale of the picture. Top: regions (0, x1, y1, x2, y2)."""

    def setup(self, bottom: list[caffe.Blob], top: list[caffe.Blob]) -> None:
        """Read the options."""
        del bottom
        options = DEFAULTS | ast.literal_eval(f"{{{self.param_str}}}")
        self.stride, self.smallest = options["feat_stride"], options["min_size"]
        self.anchors = anchors(self.stride, options["ratios"], options["scales"])
        top[0].reshape(1, 5)

    def reshape(self, bottom: list[caffe.Blob], top: list[caffe.Blob]) -> None:
        """The number of regions is known only in ``forward``."""

    def forward(self, bottom: list[caffe.Blob], top: list[caffe.Blob]) -> None:
        """Move the anchors, drop small ones, keep the best that do not overlap."""
        scores = bottom[0].data[0, len(self.anchors) :].transpose(1, 2, 0).reshape(-1)
        offsets = torch.from_numpy(bottom[1].data[0].transpose(1, 2, 0).reshape(-1, 4).copy())
        height, width, scale = bottom[2].data[0]
        boxes = apply_offsets(all_anchors(self.anchors, *bottom[0].data.shape[2:], self.stride), offsets).numpy()
        boxes = np.clip(boxes, 0, [width - 1, height - 1, width - 1, height - 1])
        sides = boxes[:, 2:] - boxes[:, :2] + 1
        large = np.flatnonzero((sides >= self.smallest * scale).all(1))
        order = large[np.argsort(-scores[large], kind="stable")][:BEFORE_SUPPRESSION]
        kept = list(islice(suppress(torch.from_numpy(boxes[order]), LARGEST_OVERLAP, pixel=1), AFTER_SUPPRESSION))
        top[0].reshape(len(kept), 5)
        top[0].data[...] = np.concatenate([np.zeros((len(kept), 1)), boxes[order][kept]], 1)

    def backward(self, top: list[caffe.Blob], propagate_down: list[bool], bottom: list[caffe.Blob]) -> None:
        """Regions have no gradient."""
