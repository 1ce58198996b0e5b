"""``caffe.Net`` as scripts use it; expected values are what a real pycaffe printed for the same calls."""

from __future__ import annotations

import numpy as np
import pytest
from caffe_nets import A, filled

from amct.caffe import pycaffe as caffe
from amct.caffe.pycaffe.proto import caffe_pb2
from amct.errors import ArgumentError, ModelError


def test_names_order_and_splits(a):
    net = caffe.Net(a, caffe.TEST)
    assert list(net._layer_names) == ["in", "conv", "relu", "conv_relu_0_split", "ip", "zz", "aux"]
    assert [layer.type for layer in net.layers] == [
        "Input",
        "Convolution",
        "ReLU",
        "Split",
        "InnerProduct",
        "Softmax",
        "Sigmoid",
    ]
    assert [(name, blob.data.shape) for name, blob in net.blobs.items()] == [
        ("data", (2, 3, 5, 5)),
        ("conv", (2, 4, 3, 3)),
        ("conv_relu_0_split_0", (2, 4, 3, 3)),
        ("conv_relu_0_split_1", (2, 4, 3, 3)),
        ("ip", (2, 3)),
        ("zz", (2, 3)),
        ("aux", (2, 4, 3, 3)),
    ]
    assert [(name, [b.data.shape for b in blobs]) for name, blobs in net.params.items()] == [
        ("conv", [(4, 3, 3, 3), (4,)]),
        ("ip", [(3, 36), (3,)]),
    ]
    assert net.inputs == ["data"]
    assert net.outputs == ["aux", "zz"]
    assert net.bottom_names["aux"] == ["conv_relu_0_split_1"]
    assert net.top_names["conv_relu_0_split"] == ["conv_relu_0_split_0", "conv_relu_0_split_1"]
    assert net.blobs is net.blobs
    assert net.params is net.params
    assert net.layer_dict["conv"].type == "Convolution"


def test_blob_members(a):
    blob = caffe.Net(a, caffe.TEST).blobs["data"]
    assert (blob.num, blob.channels, blob.height, blob.width, blob.count) == (2, 3, 5, 5, 150)
    assert list(blob.shape) == [2, 3, 5, 5]
    assert blob.data.dtype == np.float32
    assert blob.data.flags.c_contiguous
    assert blob.data.flags.writeable
    assert not blob.data.flags.owndata


def test_split_names_with_in_place_writers_losses_and_repeats(write):
    net = caffe.Net(
        write("""
layer { name: "in" type: "Input" top: "data" input_param { shape { dim: 1 dim: 2 } } }
layer { name: "i/p" type: "InnerProduct" bottom: "data" top: "a" inner_product_param { num_output: 2 } }
layer { name: "r1" type: "ReLU" bottom: "a" top: "a" }
layer { name: "b" type: "ReLU" bottom: "a" top: "b" }
layer { name: "c" type: "ReLU" bottom: "a" top: "c" }
layer { name: "s" type: "Slice" bottom: "data" top: "x" top: "y" }
layer { name: "d" type: "Eltwise" bottom: "y" bottom: "y" top: "d" }
layer { name: "l" type: "Reduction" bottom: "b" top: "l" loss_weight: 2 }
layer { name: "m" type: "TanH" bottom: "l" top: "m" }
"""),
        caffe.TRAIN,
    )
    assert net.top_names["a_r1_0_split"] == ["a_r1_0_split_0", "a_r1_0_split_1"]
    assert net.bottom_names["d"] == ["y_s_1_split_0", "y_s_1_split_1"]
    assert net.bottom_names["m"] == ["l_l_0_split_1"]
    assert net.blob_loss_weights["l_l_0_split_0"] == 2.0
    assert net.blob_loss_weights["l"] == 0.0
    assert net.outputs == ["c", "d", "l_l_0_split_0", "m", "x"]


RULES = """
layer { name: "in" type: "Input" top: "d" input_param { shape { dim: 1 dim: 2 } } }
layer { name: "tr" type: "ReLU" bottom: "d" top: "tr" include { phase: TRAIN } }
layer { name: "te" type: "ReLU" bottom: "d" top: "te" include { phase: TEST } }
layer { name: "st" type: "ReLU" bottom: "d" top: "st" include { stage: "a" } }
layer { name: "nst" type: "ReLU" bottom: "d" top: "nst" include { not_stage: "a" } }
layer { name: "ab" type: "ReLU" bottom: "d" top: "ab" include { stage: "a" stage: "b" } }
layer { name: "aorb" type: "ReLU" bottom: "d" top: "aorb" include { stage: "a" } include { stage: "b" } }
layer { name: "lv" type: "ReLU" bottom: "d" top: "lv" include { min_level: 1 max_level: 2 } }
layer { name: "ex" type: "ReLU" bottom: "d" top: "ex" exclude { phase: TRAIN } }
layer { name: "exa" type: "ReLU" bottom: "d" top: "exa" exclude { stage: "a" } }
"""


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"phase": caffe.TRAIN}, "in tr nst exa"),
        ({"phase": caffe.TEST}, "in te nst ex exa"),
        ({"phase": caffe.TEST, "stages": ["a"]}, "in te st aorb ex"),
        ({"phase": caffe.TEST, "stages": ["b"]}, "in te nst aorb ex exa"),
        ({"phase": caffe.TEST, "stages": ["a", "b"]}, "in te st ab aorb ex"),
        ({"phase": caffe.TEST, "level": 1}, "in te nst lv ex exa"),
        ({"phase": caffe.TEST, "level": 3}, "in te nst ex exa"),
    ],
)
def test_include_and_exclude_rules(write, options, names):
    net = caffe.Net(write(RULES), **options)
    assert [name for name in net._layer_names if "split" not in name] == names.split()


def test_phase_argument_beats_state_and_layer_phase_beats_both(write):
    net = caffe.Net(write('state { phase: TRAIN stage: "q" }' + RULES), caffe.TEST)
    assert "te" in net._layer_names
    net = caffe.Net(
        write("""
layer { name: "in" type: "Input" top: "d" input_param { shape { dim: 1 dim: 1000 } } }
layer { name: "dr" type: "Dropout" bottom: "d" top: "o" phase: TRAIN }
"""),
        caffe.TEST,
    )
    net.blobs["d"].data[...] = 1
    net.forward()
    assert set(np.unique(net.blobs["o"].data)) == {0.0, 2.0}


def test_duplicate_layer_names_keep_the_last_in_dictionaries(write):
    net = caffe.Net(
        write("""
layer { name: "in" type: "Input" top: "d" input_param { shape { dim: 1 dim: 2 } } }
layer { name: "x" type: "InnerProduct" bottom: "d" top: "a" inner_product_param { num_output: 3 } }
layer { name: "x" type: "InnerProduct" bottom: "a" top: "b" inner_product_param { num_output: 4 } }
"""),
        caffe.TEST,
    )
    assert list(net._layer_names) == ["in", "x", "x"]
    assert [blob.data.shape for blob in net.params["x"]] == [(4, 3), (4,)]
    assert net.top_names["x"] == ["b"]


def test_empty_prototxt_is_an_empty_net(write):
    net = caffe.Net(write(""), caffe.TEST)
    assert (list(net.blobs), net.inputs, net.outputs) == ([], [], [])
    assert net.forward() == {}


def test_loss_without_a_top_gets_one(write):
    net = caffe.Net(
        write("""
layer { name: "in" type: "Input" top: "d" top: "l" input_param { shape { dim: 1 dim: 3 } shape { dim: 1 } } }
layer { name: "x" type: "SoftmaxWithLoss" bottom: "d" bottom: "l" }
"""),
        caffe.TEST,
    )
    assert (list(net.blobs), net.outputs) == (["d", "l", "(automatic)"], [])
    assert net.blob_loss_weights["(automatic)"] == 1.0
    assert net._forward(0, 1) == pytest.approx(np.log(3), rel=1e-6)


def test_constructor_forms(a, tmp_path):
    net = filled(a)
    weights = str(tmp_path / "a.caffemodel")
    net.save(weights)
    for made in (
        caffe.Net(a, caffe.TEST, weights=weights),
        caffe.Net(a, weights, caffe.TEST),
        caffe.Net(network_file=a, phase=caffe.TEST, weights=weights),
        caffe.Net(a, caffe.TEST, 0, ["s"], weights),
        caffe.Net(a, 7, weights=weights),
    ):
        np.testing.assert_array_equal(made.params["ip"][0].data, net.params["ip"][0].data)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        (("a",), {}),
        (("a",), {"phase": "TEST"}),
        (("a", 1), {"weight": "x"}),
        (("a", 1, 0, None, None, 3), {}),
    ],
)
def test_constructor_refuses_what_pycaffe_refuses(args, kwargs):
    with pytest.raises(TypeError, match=r"Net\(network_file, phase"):
        caffe.Net(*args, **kwargs)


def test_missing_files_are_runtime_errors(a):
    with pytest.raises(RuntimeError, match=r"Could not open file missing\.prototxt"):
        caffe.Net("missing.prototxt", caffe.TEST)
    with pytest.raises(RuntimeError, match=r"Could not open file missing\.caffemodel"):
        caffe.Net(a, "missing.caffemodel", caffe.TEST)


def test_forward_returns_views_of_what_was_asked_for(a):
    net = filled(a)
    x = np.random.RandomState(0).randn(2, 3, 5, 5)
    out = net.forward(data=x)
    assert sorted(out) == ["aux", "zz"]
    assert np.shares_memory(out["zz"], net.blobs["zz"].data)
    assert sorted(net.forward(blobs=["ip", "data"])) == ["aux", "data", "ip", "zz"]
    assert sorted(net.forward(end="ip")) == ["ip"]
    assert sorted(net.forward(start="ip")) == ["aux", "zz"]
    assert sorted(net.forward(start="ip", end="zz", blobs=["conv"])) == ["conv", "zz"]
    assert sorted(net.forward(start="zz", end="conv")) == ["conv"]
    assert net._forward(0, len(net.layers) - 1) == 0.0


def test_an_array_taken_once_shows_every_later_forward(a):
    net = filled(a)
    random = np.random.RandomState(0)
    array = net.forward(data=random.randn(2, 3, 5, 5))["aux"]
    before = array.copy()
    conv = net.blobs["conv"].data
    net.forward(data=random.randn(2, 3, 5, 5))
    assert not np.array_equal(array, before)
    assert array is net.blobs["aux"].data
    assert conv is net.blobs["conv"].data
    np.testing.assert_allclose(array, 1 / (1 + np.exp(-conv)), rtol=1e-6)


def test_writes_reach_the_next_layer(a):
    net = filled(a)
    net.blobs["conv_relu_0_split_0"].data[...] = 1
    out = net.forward(start="ip", end="ip")["ip"]
    want = net.params["ip"][0].data.sum(1) + net.params["ip"][1].data
    np.testing.assert_allclose(out, np.stack([want, want]), rtol=1e-5, atol=1e-5)


def test_edited_parameters_count_at_once_whoever_holds_the_array(a):
    net = filled(a)
    x = np.random.RandomState(0).randn(2, 3, 5, 5)
    held = net.params["conv"][0].data
    first = net.forward(data=x, blobs=["conv"])["conv"].copy()
    held *= 2
    net.params["conv"][1].data[...] *= 2
    np.testing.assert_allclose(net.forward(data=x, blobs=["conv"])["conv"], 2 * first, rtol=1e-5)
    held /= 2
    net.params["conv"][1].data[...] /= 2
    np.testing.assert_allclose(net.forward(data=x, blobs=["conv"])["conv"], first, rtol=1e-5)


def test_forward_arguments_are_checked(a):
    net = filled(a)
    x = np.zeros((2, 3, 5, 5))
    for wrong in ({"foo": x}, {"data": x, "foo": x}):
        with pytest.raises(ArgumentError, match=r"Input blob arguments do not match net inputs\."):
            net.forward(**wrong)
    with pytest.raises(ArgumentError, match="Input is not batch sized"):
        net.forward(data=x[:1])
    with pytest.raises(ValueError, match="could not broadcast"):
        net.forward(data=np.zeros((2, 3, 4, 4)))
    with pytest.raises(ValueError, match="'nope' is not in list"):
        net.forward(end="nope")
    with pytest.raises(KeyError, match="nope"):
        net.forward(blobs=["nope"])


def test_forward_all_batches_and_cuts(a):
    net = filled(a)
    x = np.random.RandomState(0).randn(5, 3, 5, 5)
    out = net.forward_all(blobs=["ip"], data=x)
    assert {name: value.shape for name, value in out.items()} == {"zz": (5, 3), "aux": (5, 4, 3, 3), "ip": (5, 3)}
    np.testing.assert_allclose(out["zz"][4], net.forward(data=np.stack([x[4], x[4]]))["zz"][0], rtol=1e-5)
    with pytest.raises(RuntimeError, match="at least one input"):
        net.forward_all()


def test_backward_needs_a_loss_or_force_backward(write, a):
    x = np.random.RandomState(0).randn(2, 3, 5, 5)
    net = filled(a)
    net.forward(data=x)
    found = net.backward(zz=np.ones((2, 3)), aux=np.ones((2, 4, 3, 3)))
    assert sorted(found) == ["data"]
    assert not found["data"].any()
    assert not net.params["ip"][0].diff.any()

    net = filled(write("force_backward: true\n" + A))
    net.forward(data=x)
    found = net.backward(zz=np.eye(3)[:2], aux=np.zeros((2, 4, 3, 3)))
    assert found["data"].any()
    once = net.params["ip"][0].diff.copy()
    assert once.any()
    net.backward(zz=np.eye(3)[:2], aux=np.zeros((2, 4, 3, 3)))
    np.testing.assert_allclose(net.params["ip"][0].diff, 2 * once, rtol=1e-6)
    net.clear_param_diffs()
    assert not net.params["ip"][0].diff.any()
    assert sorted(net.backward(diffs=["ip"])) == ["data", "ip"]
    assert sorted(net.backward(start="ip", end="conv")) == ["data"]
    with pytest.raises(ArgumentError, match=r"Top diff arguments do not match net outputs\."):
        net.backward(zz=np.ones((2, 3)))
    with pytest.raises(ArgumentError, match="Diff is not batch sized"):
        net.backward(zz=np.ones((1, 3)), aux=np.ones((2, 4, 3, 3)))


def test_forward_backward_all(write):
    net = filled(write("force_backward: true\n" + A))
    x = np.random.RandomState(0).randn(3, 3, 5, 5)
    zz, aux = np.random.RandomState(1).randn(3, 3), np.random.RandomState(2).randn(3, 4, 3, 3)
    outputs, gradients = net.forward_backward_all(diffs=["ip"], data=x, zz=zz, aux=aux)
    assert outputs["zz"].shape == (3, 3)
    assert gradients["data"].shape == x.shape
    net.forward(data=x[1:])
    net.backward(zz=zz[1:], aux=aux[1:])
    np.testing.assert_allclose(gradients["data"][1:], net.blobs["data"].diff, rtol=1e-4, atol=1e-6)


def test_propagate_down_and_frozen_layers(write):
    net = caffe.Net(
        write("""
layer { name: "in" type: "Input" top: "d" top: "l" input_param { shape { dim: 2 dim: 3 } shape { dim: 2 } } }
layer { name: "f" type: "InnerProduct" bottom: "d" top: "f" param { lr_mult: 0 } param { lr_mult: 0 }
  inner_product_param { num_output: 3 weight_filler { type: "xavier" } } }
layer { name: "g" type: "InnerProduct" bottom: "f" top: "g"
  inner_product_param { num_output: 3 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "g" bottom: "l" top: "loss" }
"""),
        caffe.TRAIN,
    )
    net.blobs["d"].data[...] = 1
    net.forward()
    net.backward()
    assert net.params["g"][0].diff.any()
    assert not net.params["f"][0].diff.any()
    assert [node.needs_backward for node in net.graph.nodes] == [False, False, True, True]


def test_shared_parameters(write, tmp_path):
    net = caffe.Net(
        write("""
force_backward: true
layer { name: "in" type: "Input" top: "d" input_param { shape { dim: 1 dim: 3 } } }
layer { name: "x" type: "InnerProduct" bottom: "d" top: "a" param { name: "w" lr_mult: 2 }
  inner_product_param { num_output: 3 weight_filler { type: "xavier" } } }
layer { name: "y" type: "InnerProduct" bottom: "a" top: "b" param { name: "w" } inner_product_param { num_output: 3 } }
"""),
        caffe.TEST,
    )
    x, y = net.params["x"], net.params["y"]
    assert np.shares_memory(x[0].data, y[0].data)
    assert np.shares_memory(x[0].diff, y[0].diff)
    assert not np.shares_memory(x[1].data, y[1].data)
    assert [(p.layer, p.index, p.rate) for p in net.learnable] == [("x", 0, 2.0), ("x", 1, 1.0), ("y", 1, 1.0)]
    net.forward(d=np.ones((1, 3)))
    net.blobs["b"].diff[...] = 1
    net.backward()
    w, ones = x[0].data.astype(np.float64), np.ones(3)
    want = np.outer(ones, w @ ones) + np.outer(w.T @ ones, ones)  # b = W (W d): both uses add up
    np.testing.assert_allclose(x[0].diff, want, rtol=1e-5)

    net.save(str(tmp_path / "s.caffemodel"))
    stored = caffe_pb2.NetParameter.FromString((tmp_path / "s.caffemodel").read_bytes())
    assert [(layer.name, len(layer.blobs)) for layer in stored.layer] == [("in", 0), ("x", 2), ("y", 2)]
    net.save_hdf5(str(tmp_path / "s.h5"))
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "s.h5") as file:
        assert {name: list(group) for name, group in file["data"].items()} == {"in": [], "x": ["0", "1"], "y": ["1"]}
    again = caffe.Net(
        write((tmp_path / "net.prototxt").read_text(), "again.prototxt"), caffe.TEST, weights=str(tmp_path / "s.h5")
    )
    np.testing.assert_array_equal(again.params["y"][0].data, x[0].data)


def test_callbacks_see_every_layer(write):
    net = filled(write("force_backward: true\n" + A))
    events = []
    net.before_forward(lambda index: events.append(("bf", index)))
    net.after_forward(lambda index: events.append(("af", index)))
    net.before_backward(lambda index: events.append(("bb", index)))
    net.after_backward(lambda index: events.append(("ab", index)))
    net.forward()
    assert events == [(kind, index) for index in range(7) for kind in ("bf", "af")]
    events.clear()
    net.backward()
    assert events == [(kind, index) for index in range(6, -1, -1) for kind in ("bb", "ab")]


def test_reshape_by_net_or_by_forward(a):
    net = filled(a)
    net.blobs["data"].reshape(1, 3, 5, 5)
    assert net.blobs["data"].data.shape == (1, 3, 5, 5)
    assert net.blobs["conv"].data.shape == (2, 4, 3, 3)
    net.reshape()
    assert net.blobs["conv"].data.shape == (1, 4, 3, 3)
    net.blobs["data"].reshape(4, 3, 5, 5)
    net.forward()
    assert net.blobs["zz"].data.shape == (4, 3)
    net.blobs["data"].reshape(1, 3, 6, 6)
    with pytest.raises(ModelError, match=r"Input size incompatible with inner product parameters: 64 .* expect 36"):
        net.reshape()


def test_input_without_shape_can_be_reshaped(write):
    net = caffe.Net(
        write('layer { name: "in" type: "Input" top: "d" } layer { name: "r" type: "ReLU" bottom: "d" top: "r" }'),
        caffe.TEST,
    )
    net.blobs["d"].reshape(2, 3)
    net.reshape()
    assert net.blobs["r"].data.shape == (2, 3)
