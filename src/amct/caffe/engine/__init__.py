"""Runs and trains Caffe nets on torch: prototxt and caffemodel in, blobs out; Caffe need not be installed.

From file to running net::

    prototxt text                messages.py     text or binary to protobuf messages
      │ build/upgrade.py         V0 and V1 layers, ``input:`` fields, old BatchNorm: converted to the current format
      │ build/filter_rules.py    include/exclude by phase, level, stage
      │ build/insert_splits.py   a blob with several readers gets a Split layer, named as in Caffe
      ▼
    build/graph.py               creates layers (registry.py), shapes, shared parameters, gradient flags
      ▼
    net.py                       Net: forward/backward over a range of layers; plan.py decides fusing and freeing;
                                 backward.py keeps one autograd graph per layer; weights.py reads and writes caffemodels

A new layer type is one class in ``layers/`` (see ``layer.py``).
"""
