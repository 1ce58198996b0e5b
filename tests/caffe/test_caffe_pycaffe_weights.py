"""Weights in and out through ``caffe.Net``: files of every age, matching by name, views, net surgery."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from caffe_nets import A, filled

from amct.caffe import pycaffe as caffe
from amct.caffe.pycaffe.proto import caffe_pb2
from amct.errors import FileError, ModelError, ParseError


def test_save_writes_every_layer_and_round_trips(a, tmp_path):
    net = filled(a)
    net.save(str(tmp_path / "a.caffemodel"))
    stored = caffe_pb2.NetParameter.FromString((tmp_path / "a.caffemodel").read_bytes())
    assert stored.name == "a"
    assert [(layer.name, layer.type, list(layer.bottom), list(layer.top), layer.phase) for layer in stored.layer] == [
        ("in", "Input", [], ["data"], 1),
        ("conv", "Convolution", ["data"], ["conv"], 1),
        ("relu", "ReLU", ["conv"], ["conv"], 1),
        ("conv_relu_0_split", "Split", ["conv"], ["conv_relu_0_split_0", "conv_relu_0_split_1"], 1),
        ("ip", "InnerProduct", ["conv_relu_0_split_0"], ["ip"], 1),
        ("zz", "Softmax", ["ip"], ["zz"], 1),
        ("aux", "Sigmoid", ["conv_relu_0_split_1"], ["aux"], 1),
    ]
    assert [list(blob.shape.dim) for blob in stored.layer[1].blobs] == [[4, 3, 3, 3], [4]]
    assert [field.name for field, _ in stored.layer[1].blobs[0].ListFields()] == ["data", "shape"]
    np.testing.assert_array_equal(np.array(stored.layer[4].blobs[0].data, np.float32), net.params["ip"][0].data.ravel())
    again = caffe.Net(a, caffe.TEST, weights=str(tmp_path / "a.caffemodel"))
    for name, blobs in net.params.items():
        for ours, theirs in zip(again.params[name], blobs, strict=True):
            np.testing.assert_array_equal(ours.data, theirs.data)


def test_copy_from_matches_by_name(a, write, tmp_path):
    net = filled(a)
    net.save(str(tmp_path / "a.caffemodel"))
    other = caffe.Net(write(A.replace('name: "ip"', 'name: "ip_new"')), caffe.TEST)
    other.copy_from(str(tmp_path / "a.caffemodel"))
    np.testing.assert_array_equal(other.params["conv"][0].data, net.params["conv"][0].data)
    assert not other.params["ip_new"][0].data.any()


def stored_net(tmp_path, **blobs):
    """A caffemodel with one layer "ip" whose blobs are given as BlobProto fields."""
    message = caffe_pb2.NetParameter()
    layer = message.layer.add(name="ip", type="InnerProduct")
    for fields in blobs.values():
        layer.blobs.add(**fields)
    path = tmp_path / "stored.caffemodel"
    path.write_bytes(message.SerializeToString())
    return str(path)


def test_old_and_double_blobs(a, tmp_path):
    net = caffe.Net(a, caffe.TEST)
    legacy = {"num": 1, "channels": 1, "height": 3, "width": 36, "data": range(108)}
    net.copy_from(
        stored_net(tmp_path, w=legacy, b={"num": 1, "channels": 1, "height": 1, "width": 3, "data": range(3)})
    )
    assert net.params["ip"][0].data[1, :3].tolist() == [36, 37, 38]
    double = {"shape": {"dim": [3, 36]}, "double_data": [0.5] * 108}
    net.copy_from(stored_net(tmp_path, w=double, b={"shape": {"dim": [3]}, "double_data": [0.25] * 3}))
    assert net.params["ip"][0].data[0, :3].tolist() == [0.5] * 3


def test_v1_and_v0_caffemodels(a, tmp_path):
    message = caffe_pb2.NetParameter()
    layer = message.layers.add(name="ip", type=caffe_pb2.V1LayerParameter.INNER_PRODUCT)
    layer.blobs.add(num=1, channels=1, height=3, width=36, data=[2.0] * 108)
    layer.blobs.add(num=1, channels=1, height=1, width=3, data=[2.0] * 3)
    (tmp_path / "v1.caffemodel").write_bytes(message.SerializeToString())
    net = caffe.Net(a, caffe.TEST, weights=str(tmp_path / "v1.caffemodel"))
    assert net.params["ip"][0].data[0, :2].tolist() == [2, 2]
    old = caffe_pb2.NetParameter()
    inner = old.layers.add().layer
    inner.name = "ip"
    inner.blobs.add(num=1, channels=1, height=3, width=36, data=[3.0] * 108)
    inner.blobs.add(num=1, channels=1, height=1, width=3, data=[3.0] * 3)
    (tmp_path / "v0.caffemodel").write_bytes(old.SerializeToString())
    net.copy_from(str(tmp_path / "v0.caffemodel"))
    assert net.params["ip"][1].data.tolist() == [3, 3, 3]


def test_wrong_weights_name_both_shapes(a, write, tmp_path):
    net = filled(a)
    path = str(tmp_path / "a.caffemodel")
    net.save(path)
    with pytest.raises(
        ModelError,
        match=r"Cannot copy param 0 weights from layer 'conv'; shape mismatch\.  "
        r"Source param shape is 4 3 3 3 \(108\); target param shape is 5 3 3 3 \(135\)",
    ):
        caffe.Net(write(A.replace("num_output: 4", "num_output: 5")), caffe.TEST, weights=path)
    with pytest.raises(ModelError, match=r"Incompatible number of blobs for layer conv: the net has 1, the file 2"):
        caffe.Net(write(A.replace("num_output: 4", "num_output: 4 bias_term: false")), caffe.TEST, weights=path)
    with pytest.raises(ModelError, match=r"Source param shape is 36 3 \(108\); target param shape is 3 36 \(108\)"):
        net.copy_from(
            stored_net(
                tmp_path,
                w={"shape": {"dim": [36, 3]}, "data": [0.0] * 108},
                b={"shape": {"dim": [3]}, "data": [0.0] * 3},
            )
        )
    with pytest.raises(ParseError, match=r"shape 3 36 \(108\) but 107 values"):
        net.copy_from(
            stored_net(
                tmp_path,
                w={"shape": {"dim": [3, 36]}, "data": [0.0] * 107},
                b={"shape": {"dim": [3]}, "data": [0.0] * 3},
            )
        )


def test_empty_file_copies_nothing_missing_file_is_an_error(a, tmp_path):
    net = filled(a)
    before = net.params["ip"][0].data.copy()
    (tmp_path / "empty.caffemodel").write_bytes(b"")
    net.copy_from(str(tmp_path / "empty.caffemodel"))
    np.testing.assert_array_equal(net.params["ip"][0].data, before)
    with pytest.raises(FileError, match="missing"):
        net.copy_from(str(tmp_path / "missing.caffemodel"))
    with pytest.raises(FileError, match="missing"):
        net.load_hdf5(str(tmp_path / "missing.h5"))


def test_hdf5_is_found_by_content(a, tmp_path):
    pytest.importorskip("h5py")
    net = filled(a)
    path = str(tmp_path / "weights.bin")
    net.save_hdf5(path)
    for again in (caffe.Net(a, caffe.TEST, weights=path), caffe.Net(a, caffe.TEST)):
        again.load_hdf5(path)
        np.testing.assert_array_equal(again.params["ip"][0].data, net.params["ip"][0].data)
    wrong = caffe.Net(a, caffe.TEST)
    import h5py

    with h5py.File(tmp_path / "other.h5", "w") as file:
        file.create_group("something")
    with pytest.raises(ParseError, match='no group "data"'):
        wrong.copy_from(str(tmp_path / "other.h5"))


def test_share_with_shares_values_not_gradients(a, write):
    net, other = filled(a), caffe.Net(a, caffe.TEST)
    other.share_with(net)
    net.params["ip"][0].data[...] = 7
    assert other.params["ip"][0].data[0, 0] == 7
    assert not np.shares_memory(other.params["ip"][0].diff, net.params["ip"][0].diff)
    wide = caffe.Net(write(A.replace("num_output: 4", "num_output: 5")), caffe.TEST)
    with pytest.raises(ModelError, match=r"Cannot share param 0 weights from layer 'conv'; shape mismatch"):
        wide.share_with(net)


def test_params_are_views_that_live_on(a):
    net = filled(a)
    net.params["ip"][0].data[0, 0] = 42
    assert net.params["ip"][0].data[0, 0] == 42
    assert [blob.data.shape for blob in net.layers[1].blobs] == [(4, 3, 3, 3), (4,)]
    with pytest.raises(IndexError, match="Index out of range"):
        net.params["ip"][2]
    with pytest.raises(KeyError):
        net.params["relu"]
    with pytest.raises(AttributeError):
        net.blobs["data"].data = 1
    with pytest.raises(AttributeError):
        net.blobs = {}
    array = net.blobs["data"].data
    array[...] = 5
    del net
    gc.collect()
    assert array.sum() == 5 * 150


def test_net_surgery(a, write):
    """The well-known recipe: make a fully convolutional net out of a classifier by reshaping its weights."""
    net = filled(a)
    convolutional = A.replace(
        'type: "InnerProduct" bottom: "conv" top: "ip" inner_product_param { num_output: 3 }',
        'type: "Convolution" bottom: "conv" top: "ip" convolution_param { num_output: 3 kernel_size: 3 }',
    ).replace('name: "ip"', 'name: "ip-conv"')
    full = caffe.Net(write(convolutional), caffe.TEST)
    full.params["conv"][0].data[...] = net.params["conv"][0].data
    full.params["conv"][1].data[...] = net.params["conv"][1].data
    full.params["ip-conv"][0].data.flat = net.params["ip"][0].data.flat
    full.params["ip-conv"][1].data[...] = net.params["ip"][1].data
    x = np.random.RandomState(0).randn(2, 3, 5, 5)
    small = net.forward(data=x)["zz"]
    np.testing.assert_allclose(full.forward(data=x)["zz"][:, :, 0, 0], small, rtol=1e-4, atol=1e-6)
    full.blobs["data"].reshape(1, 3, 9, 9)
    assert full.forward()["zz"].shape == (1, 3, 5, 5)
