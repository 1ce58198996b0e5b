"""A small net that many tests use: a convolution, two readers of it, two outputs."""

from __future__ import annotations

import numpy as np

from amct.caffe import pycaffe as caffe

A = """
name: "a"
layer { name: "in" type: "Input" top: "data" input_param { shape { dim: 2 dim: 3 dim: 5 dim: 5 } } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv" convolution_param { num_output: 4 kernel_size: 3 } }
layer { name: "relu" type: "ReLU" bottom: "conv" top: "conv" }
layer { name: "ip" type: "InnerProduct" bottom: "conv" top: "ip" inner_product_param { num_output: 3 } }
layer { name: "zz" type: "Softmax" bottom: "ip" top: "zz" }
layer { name: "aux" type: "Sigmoid" bottom: "conv" top: "aux" }
"""


def filled(path, **options):
    """A net with weights that are not all zero."""
    net = caffe.Net(path, caffe.TEST, **options)
    random = np.random.RandomState(3)
    for blobs in net.params.values():
        for blob in blobs:
            blob.data[...] = random.randn(*blob.shape)
    return net
