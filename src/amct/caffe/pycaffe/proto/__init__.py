"""``caffe.proto``: the message types, as ``caffe.proto.caffe_pb2``."""

from __future__ import annotations

from amct.caffe.pycaffe.proto import caffe_pb2

__all__ = ["caffe_pb2"]
