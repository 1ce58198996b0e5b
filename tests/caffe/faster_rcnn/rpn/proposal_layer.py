"""ProposalLayer: anchors moved, limited to the picture, the best kept."""

from __future__ import annotations

import ast

import numpy as np

import caffe
from rpn import boxes

BEFORE, AFTER, THRESHOLD, SMALLEST = 300, 40, 0.7, 16


class ProposalLayer(caffe.Layer):
    def setup(self, bottom, top):
        del bottom
        self.stride = ast.literal_eval(f"{{{self.param_str_}}}")["feat_stride"]
        top[0].reshape(1, 5)

    def reshape(self, bottom, top):
        pass

    def forward(self, bottom, top):
        scores = bottom[0].data[0, 9:].transpose(1, 2, 0).reshape(-1)
        offsets = bottom[1].data[0].transpose(1, 2, 0).reshape(-1, 4)
        height, width, scale = bottom[2].data[0]
        found = boxes.move(boxes.all_anchors(*bottom[0].data.shape[2:], self.stride), offsets)
        found = np.clip(found, 0, [width - 1, height - 1, width - 1, height - 1])
        large = np.flatnonzero((boxes.sizes(found) >= SMALLEST * scale).all(1))
        order = large[np.argsort(-scores[large], kind="stable")][:BEFORE]
        found = found[order][boxes.suppress(found[order], THRESHOLD)[:AFTER]]
        top[0].reshape(len(found), 5)
        top[0].data[...] = np.concatenate([np.zeros((len(found), 1)), found], 1)

    def backward(self, top, propagate_down, bottom):
        pass
