"""Runs and trains Caffe nets on torch: prototxt and caffemodel in, blobs out; Caffe need not be installed.

From file to running net::

    prototxt text       messages.py: text or binary to protobuf messages
      │                 upgrade.py: V0 and V1 layers, ``input:`` fields, old BatchNorm become the current format
      ▼
    graph.py            include and exclude rules, Split layers, then layers (layer.py), shapes, gradient flags
      ▼
    net.py              Net: forward and backward over a range of layers; plan.py decides fusing and freeing;
                        weights.py reads and writes caffemodels

A new layer type is one class in ``layers/`` (see ``layer.py``).
"""
