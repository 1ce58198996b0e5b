"""AnchorTargetLayer: which anchors are an object, which are not, and how far off they are."""

from __future__ import annotations

import ast

import numpy as np

import caffe
from rpn import boxes

ANCHORS = 9


class AnchorTargetLayer(caffe.Layer):
    def setup(self, bottom, top):
        self.stride = ast.literal_eval(f"{{{self.param_str}}}")["feat_stride"]
        self.shape_tops(bottom, top)

    def shape_tops(self, bottom, top):
        height, width = bottom[0].data.shape[2:]
        top[0].reshape(1, 1, ANCHORS * height, width)
        for blob in top[1:]:
            blob.reshape(1, 4 * ANCHORS, height, width)

    def reshape(self, bottom, top):
        self.shape_tops(bottom, top)

    def forward(self, bottom, top):
        height, width = bottom[0].data.shape[2:]
        truth = bottom[1].data
        places = boxes.all_anchors(height, width, self.stride)
        shared = boxes.overlaps(places, truth[:, :4])
        labels = np.full(len(places), -1.0)
        labels[shared.max(1) < 0.3] = 0
        labels[shared.max(1) >= 0.5] = 1
        labels[shared.argmax(0)] = 1
        wanted = boxes.offsets(places, truth[shared.argmax(1), :4])
        positive = (labels == 1).astype(np.float32)[:, None].repeat(4, 1)

        def picture(values, columns):
            return values.reshape(1, height, width, columns).transpose(0, 3, 1, 2)

        top[0].data[...] = picture(labels, ANCHORS).reshape(1, 1, ANCHORS * height, width)
        top[1].data[...] = picture(wanted, 4 * ANCHORS)
        top[2].data[...] = picture(positive, 4 * ANCHORS)
        top[3].data[...] = picture(positive / max((labels >= 0).sum(), 1), 4 * ANCHORS)

    def backward(self, top, propagate_down, bottom):
        pass
