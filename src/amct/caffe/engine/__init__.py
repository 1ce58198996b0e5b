"""Runs and trains Caffe nets on torch: prototxt and caffemodel in, blobs out, no Caffe installed.

How a net comes to life, and which module does it::

    prototxt text        messages.py     text or binary to protobuf messages
      │ upgrade.py       V0 and V1 layers, ``input:`` fields, old BatchNorm, all to today's form
      │ filter_rules.py  include/exclude by phase, level, stage
      │ insert_splits.py a blob read twice gets a Split layer, named as Caffe names it
      ▼
    graph.py             layers made (registry.py), shapes known, parameters shared, who needs gradients
      ▼
    net.py               Net: forward/backward over a range of layers; plan.py decides how (fusing, freeing);
                         backward.py keeps one small autograd graph per layer; weights.py reads and writes caffemodels

A new layer type is one class in ``layers/`` (see ``layer.py``), nothing else.
"""
