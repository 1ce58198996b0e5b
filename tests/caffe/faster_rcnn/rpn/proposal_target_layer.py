"""ProposalTargetLayer: the class of every proposed region and how far off it is."""

from __future__ import annotations

import ast

import numpy as np

import caffe
from rpn import boxes


class ProposalTargetLayer(caffe.Layer):
    def setup(self, bottom, top):
        del bottom
        self.classes = ast.literal_eval(f"{{{self.param_str}}}")["num_classes"]
        self.shape_tops(top, 1)

    def shape_tops(self, top, count):
        top[0].reshape(count, 5)
        top[1].reshape(count, 1)
        for blob in top[2:]:
            blob.reshape(count, 4 * self.classes)

    def reshape(self, bottom, top):
        pass

    def forward(self, bottom, top):
        truth = bottom[1].data
        own = np.concatenate([np.zeros((len(truth), 1)), truth[:, :4]], 1)
        regions = np.concatenate([bottom[0].data, own])
        shared = boxes.overlaps(regions[:, 1:], truth[:, :4])
        nearest = shared.argmax(1)
        labels = np.where(shared.max(1) >= 0.5, truth[nearest, 4], 0).astype(int)
        wanted = boxes.offsets(regions[:, 1:], truth[nearest, :4])
        self.shape_tops(top, len(regions))
        top[0].data[...] = regions
        top[1].data[...] = labels[:, None]
        for blob in top[2:]:
            blob.data[...] = 0
        for row in np.flatnonzero(labels):
            columns = slice(4 * labels[row], 4 * labels[row] + 4)
            top[2].data[row, columns] = wanted[row]
            top[3].data[row, columns] = 1
            top[4].data[row, columns] = 1

    def backward(self, top, propagate_down, bottom):
        pass
