"""Nets of the small Caffe of these tests, with the layers of the patch, through ctypes."""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_int, c_void_p

import numpy as np
from google.protobuf import text_format

from amct.caffe.pycaffe.proto import caffe_pb2

TRAIN, TEST = 0, 1


class SmallCaffe:
    """The compiled layers; errors are ValueErrors with the words of the layer."""

    def __init__(self, path):
        self.lib = ctypes.CDLL(str(path))
        for name in ("last_error", "take_log", "net_saved"):
            getattr(self.lib, name).restype = c_char_p
        self.lib.net_new.restype = c_void_p
        self.lib.net_new.argtypes = [c_char_p, c_int, c_int]
        for name in ("net_free", "net_load", "net_share", "net_run", "net_reshape", "net_access", "net_saved"):
            getattr(self.lib, name).argtypes = None

    def check(self, failed):
        """Raise what the layers said."""
        if failed:
            raise ValueError(self.lib.last_error().decode())

    def log(self):
        """The lines that were logged since the last call."""
        return self.lib.take_log().decode().splitlines()

    def net(self, prototxt, weights=None, phase=TEST, *, double=False):
        """A net of a prototxt and a caffemodel."""
        return SmallNet(self, prototxt, weights, phase, double)


class SmallNet:
    """One net."""

    def __init__(self, caffe, prototxt, weights, phase, double):
        self.caffe, self.lib = caffe, caffe.lib
        self.net = None
        made = self.lib.net_new(prototxt.read_bytes(), phase, int(double))
        caffe.check(made is None)
        self.net = c_void_p(made)
        if weights is not None:
            self.load(weights)

    def __del__(self):
        if self.net is not None:
            self.lib.net_free(self.net)

    def load(self, weights):
        """Load a caffemodel."""
        stored = caffe_pb2.NetParameter.FromString(weights.read_bytes())
        given = caffe_pb2.NetParameter()
        for layer in stored.layer:
            given.layer.add(name=layer.name).blobs.extend(layer.blobs)
        self.caffe.check(self.lib.net_load(self.net, text_format.MessageToString(given).encode()))

    def share(self, other):
        """Use the weights of another net, as a solver lets its test net do."""
        self.caffe.check(self.lib.net_share(self.net, other.net))

    def forward(self, **inputs):
        """Run; ``inputs`` are arrays."""
        for name, values in inputs.items():
            shape = (c_int * values.ndim)(*values.shape)
            self.caffe.check(self.lib.net_reshape(self.net, name.encode(), shape, values.ndim))
            self.put(name, values)
        self.caffe.check(self.lib.net_run(self.net, 0))
        return self

    def backward(self, **gradients):
        """Run backward from gradients of blobs."""
        for name, values in gradients.items():
            self.put(name, values, gradient=True)
        self.caffe.check(self.lib.net_run(self.net, 1))

    def put(self, name, values, index=-1, *, gradient=False):
        """Set a blob, or a parameter of a layer."""
        given = np.ascontiguousarray(values, np.float64)
        assert self._access(name, index, gradient, 0, None) == given.size, self.lib.last_error()
        self._access(name, index, gradient, 1, given.ctypes.data_as(c_void_p))

    def get(self, name, index=-1, *, gradient=False):
        """The numbers of a blob, or of a parameter of a layer, flat."""
        found = np.empty(self._access(name, index, gradient, 0, None))
        self._access(name, index, gradient, 0, found.ctypes.data_as(c_void_p))
        return found

    def _access(self, name, index, gradient, writes, place):
        return self.lib.net_access(self.net, name.encode(), index, int(gradient), writes, place)

    def saved(self):
        """The net as it would be saved, as text."""
        return self.lib.net_saved(self.net).decode()
