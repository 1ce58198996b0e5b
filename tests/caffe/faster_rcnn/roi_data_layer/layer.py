"""RoIDataLayer: always the same picture of noise with two bright squares."""

from __future__ import annotations

import ast

import numpy as np

import caffe

HEIGHT, WIDTH = 128, 160
BOXES = [[16, 16, 79, 79, 3], [96, 32, 143, 95, 7]]


class RoIDataLayer(caffe.Layer):
    def setup(self, bottom, top):
        del bottom
        assert ast.literal_eval(f"{{{self.param_str}}}") == {"num_classes": 21}
        assert self.phase == caffe.TRAIN
        top[0].reshape(1, 3, HEIGHT, WIDTH)
        top[1].reshape(1, 3)
        top[2].reshape(1, 5)

    def reshape(self, bottom, top):
        pass

    def forward(self, bottom, top):
        del bottom
        picture = np.random.RandomState(1).uniform(-1, 1, (1, 3, HEIGHT, WIDTH))
        for x1, y1, x2, y2, label in BOXES:
            picture[:, :, y1:y2, x1:x2] += 0.5 * label
        boxes = np.array(BOXES, np.float32)
        for blob, value in zip(top, (picture, [[HEIGHT, WIDTH, 1]], boxes), strict=True):
            blob.reshape(*np.shape(value))
            blob.data[...] = value

    def backward(self, top, propagate_down, bottom):
        pass
