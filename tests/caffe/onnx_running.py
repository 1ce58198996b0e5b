"""Run ONNX models in onnxruntime, on one thread, and the golden cases they come from."""

from __future__ import annotations

import json

import numpy as np
import onnxruntime

from amct.caffe.engine.net import Net

RTOL, ATOL = 1e-4, 1e-5


def session(model):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    content = model if isinstance(model, bytes) else model.SerializeToString()
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def run(model, feeds):
    running = session(model)
    wanted = {value.name for value in running.get_inputs()}
    names = [value.name for value in running.get_outputs()]
    return dict(zip(names, running.run(None, {name: feeds[name] for name in wanted}), strict=True))


def case_net(case):
    data = np.load(case.stem.with_suffix(".npz"))
    net = Net.from_file(case.stem.with_suffix(".prototxt"))
    weights = case.stem.with_suffix(".caffemodel")
    if weights.exists():
        net.load_weights(weights)
    feeds = {key[3:]: data[key] for key in data.files if key.startswith("in:")}
    feed(net, feeds)
    return net, feeds


def feed(net, feeds):
    for name, value in feeds.items():
        blob = net.blob(name)
        blob.reshape(*value.shape)
        blob.data[...] = value


def is_test_phase(case):
    return json.loads(str(np.load(case.stem.with_suffix(".npz"))["meta"])).get("phase") != "TRAIN"


def compare(net, exported, results):
    """What onnxruntime computed against what the engine's blobs hold."""
    assert results
    for name, value in results.items():
        blob = name.removesuffix(".output")
        blob = exported.blobs.get(blob, blob)
        want = net.blob(blob).data
        assert value.shape == want.shape
        np.testing.assert_allclose(value, want, rtol=RTOL, atol=ATOL)


def has_open_batch(model):
    return all(value.type.tensor_type.shape.dim[0].dim_param == "batch" for value in model.graph.input)
