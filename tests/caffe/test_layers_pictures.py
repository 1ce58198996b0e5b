"""Layers that rearrange, enlarge or convolve pictures, and GRU: against loops and formulas in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from layer_checks import check_gradients, net_of, run
from onnx import helper
from onnx.reference import ReferenceEvaluator
from scipy import signal

from amct.caffe import pycaffe as caffe
from amct.caffe.engine.layer import layer_types
from amct.config.layers import CAFFE_TYPES
from amct.errors import ModelError, UnsupportedLayerError

random = np.random.RandomState(11)


@pytest.fixture(autouse=True)
def _same_values_in_every_order():
    """Each test draws from the beginning, whichever tests ran before it."""
    random.seed(11)


def rand(*shape):
    return random.uniform(-2, 2, shape).astype(np.float32)


def test_every_type_of_the_guides_table_runs_here():
    assert len(CAFFE_TYPES) == 78  # 71 that only carry data, Convolution, DepthwiseConv, InnerProduct, ...
    assert set(CAFFE_TYPES) <= set(layer_types())


def test_an_unknown_type_names_the_nearest_and_how_to_add_one():
    with pytest.raises(
        UnsupportedLayerError, match=r'"ShufleChannel".*Did you mean "ShuffleChannel".*register_caffe_layer'
    ):
        net_of("ShufleChannel", "", [(1, 4, 2, 2)])


# ------------------------------------------------------------------ only moving values


def blocks(x, height, width):
    """Pixel (i, j) of a block goes to channels from (i * width + j) * C on."""
    batch, channels, rows, columns = x.shape
    y = np.zeros((batch, channels * height * width, rows // height, columns // width), x.dtype)
    for i in range(height):
        for j in range(width):
            start = (i * width + j) * channels
            y[:, start : start + channels] = x[:, :, i::height, j::width]
    return y


def test_reorg_and_back():
    x = rand(2, 3, 4, 6)
    y = blocks(x, 2, 2)
    np.testing.assert_array_equal(run("Reorg", "", x), y)
    np.testing.assert_array_equal(run("Reorg", "reorg_param { stride: 2 reverse: true }", y), x)
    check_gradients("Reorg", "", x[:1])
    check_gradients("Reorg", "reorg_param { reverse: true }", y[:1])


def test_pass_through():
    x = rand(2, 3, 4, 6)
    np.testing.assert_array_equal(run("PassThrough", "", x), blocks(x, 2, 2))
    text = "pass_through_param { block_height: 2 block_width: 3 num_output: 18 }"
    np.testing.assert_array_equal(run("PassThrough", text, x), blocks(x, 2, 3))
    np.testing.assert_array_equal(run("PassThrough", "reorg_param { stride: 2 }", x), blocks(x, 2, 2))


def test_shuffle_channel():
    x = rand(2, 6, 2, 2)
    y = run("ShuffleChannel", "shuffle_channel_param { group: 3 }", x)
    np.testing.assert_array_equal(y, x[:, [0, 2, 4, 1, 3, 5]])
    check_gradients("ShuffleChannel", "shuffle_channel_param { group: 2 }", x)


def test_reverse():
    x = rand(2, 3, 4)
    np.testing.assert_array_equal(run("Reverse", "", x), x[::-1])
    np.testing.assert_array_equal(run("Reverse", "reverse_param { axis: 1 axis: -1 }", x), x[:, ::-1, ::-1])
    check_gradients("Reverse", "reverse_param { axis: 1 }", x)


@pytest.mark.parametrize(
    ("parameters", "sides", "options"),
    [
        ("pads: [0, 0, 1, 2, 0, 1, 3, 4] value: 1.5", [(0, 0), (0, 1), (1, 3), (2, 4)], {"constant_values": 1.5}),
        ("pads: [1, 2] axes: 1", [(0, 0), (1, 2), (0, 0), (0, 0)], {}),
        ("pads: [2, 1, 1, 2] axes: [2, 3] mode: REFLECT", [(0, 0), (0, 0), (2, 1), (1, 2)], {"mode": "reflect"}),
        ("pads: [2, 1, 1, 2] axes: [-2, -1] mode: EDGE", [(0, 0), (0, 0), (2, 1), (1, 2)], {"mode": "edge"}),
        ("pads: [2, 1, 1, 2] axes: [-2, -1] mode: WRAP", [(0, 0), (0, 0), (2, 1), (1, 2)], {"mode": "wrap"}),
    ],
)
def test_pad(parameters, sides, options):
    x = rand(1, 2, 3, 4)
    text = f"pad_param {{ {parameters} }}"
    np.testing.assert_array_equal(run("Pad", text, x), np.pad(x, sides, **options))
    check_gradients("Pad", text, x)


def test_negative_pads_cut_off():
    x = rand(1, 2, 5)
    np.testing.assert_array_equal(run("Pad", "pad_param { axes: 2 pads: [-1, -2] }", x), x[:, :, 1:-2])


# ------------------------------------------------------------------ larger and smaller


@pytest.mark.parametrize(
    ("parameters", "vertical", "horizontal", "times"),
    [
        ("", 2, 2, 1),
        ("scale: 3", 3, 3, 1),
        ("scale: 0.5 stride: 2", 2, 2, 0.5),
        ("stride_h: 1 stride_w: 3 stride: 2", 1, 3, 1),
    ],
)
def test_upsample_repeats(parameters, vertical, horizontal, times):
    x = rand(2, 3, 2, 3)
    text = f"upsample_param {{ {parameters} }}"
    np.testing.assert_array_equal(run("Upsample", text, x), times * x.repeat(vertical, 2).repeat(horizontal, 3))
    check_gradients("Upsample", text, x[:1])


POOLED = """
force_backward: true
layer { name: "in" type: "Input" top: "x" input_param { shape { dim: 2 dim: 3 dim: 5 dim: 6 } } }
layer { name: "pool" type: "Pooling" bottom: "x" top: "p" top: "mask" pooling_param { kernel_size: 2 stride: 2 } }
layer { name: "back" type: "%s" bottom: "p" bottom: "mask" top: "y" %s }
"""


@pytest.mark.parametrize(
    ("kind", "parameters"),
    [
        ("Upsample", "upsample_param { scale: 2 upsample_h: 5 upsample_w: 6 }"),
        ("Unpooling", "unpooling_param { kernel_size: 2 stride: 2 unpool_h: 5 unpool_w: 6 }"),
    ],
)
def test_values_go_back_to_where_pooling_found_them(write, kind, parameters):
    net = caffe.Net(write(POOLED % (kind, parameters)), caffe.TEST)
    x = random.permutation(180).reshape(2, 3, 5, 6).astype(np.float32) + 1
    y = net.forward(x=x)["y"]
    expected = np.zeros_like(x)
    for n, c, i, j in np.ndindex(2, 3, 3, 3):
        window = x[n, c, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2]
        a, b = np.unravel_index(window.argmax(), window.shape)
        expected[n, c, 2 * i + a, 2 * j + b] = window.max()
    np.testing.assert_array_equal(y, expected)
    weights = rand(*y.shape)
    net.backward(y=weights)
    np.testing.assert_array_equal(net.blobs["x"].diff, np.where(expected > 0, weights, 0))


def test_unpooling_without_mask():
    x = rand(1, 2, 2, 3)
    y = run("Unpooling", "unpooling_param { kernel_size: 2 stride: 2 }", x)
    expected = np.zeros((1, 2, 4, 6), np.float32)
    expected[:, :, ::2, ::2] = x
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize(
    ("parameters", "kernel", "stride", "pad", "size"),
    [
        ("kernel_size: 2 stride: 2", (2, 2), (2, 2), 0, (4, 6)),
        ("kernel_size: 3 stride: 2 pad: 1", (3, 3), (2, 2), 1, (3, 5)),
        ("kernel_h: 3 kernel_w: 2 stride_h: 1 stride_w: 2 unpool_h: 5 unpool_w: 6", (3, 2), (1, 2), 0, (5, 6)),
        ("kernel_size: 3 stride: 2 unpool_size: 4", (3, 3), (2, 2), 0, (4, 4)),
    ],
)
def test_average_unpooling(parameters, kernel, stride, pad, size):
    x = rand(1, 2, 2, 3) if size != (4, 4) else rand(1, 2, 2, 2)
    expected = np.zeros((1, 2, *size))
    for i, j in np.ndindex(*x.shape[2:]):
        rows = range(max(i * stride[0] - pad, 0), min(i * stride[0] - pad + kernel[0], size[0]))
        columns = range(max(j * stride[1] - pad, 0), min(j * stride[1] - pad + kernel[1], size[1]))
        for a in rows:
            for b in columns:
                expected[:, :, a, b] += x[:, :, i, j] / (len(rows) * len(columns))
    text = f"unpooling_param {{ unpool: AVE {parameters} }}"
    np.testing.assert_allclose(run("Unpooling", text, x), expected, rtol=1e-5, atol=1e-6)
    check_gradients("Unpooling", text, x)


def corner_to_corner(x, height, width):
    """Bilinear interpolation, the corner pixels of both pictures on each other."""

    def weights(size, wanted):
        places = np.arange(wanted) * ((size - 1) / (wanted - 1) if wanted > 1 else 0)
        return np.maximum(1 - np.abs(places[:, None] - np.arange(size)), 0)

    return np.einsum("ph,nchw,qw->ncpq", weights(x.shape[2], height), x, weights(x.shape[3], width))


@pytest.mark.parametrize(
    ("parameters", "size", "crop"),
    [
        ("height: 7 width: 5", (7, 5), (0, 0)),
        ("height: 2 width: 1", (2, 1), (0, 0)),
        ("zoom_factor: 3", (10, 13), (0, 0)),
        ("shrink_factor: 2", (2, 3), (0, 0)),
        ("shrink_factor: 2 zoom_factor: 4", (5, 9), (0, 0)),
        ("zoom_factor: 2 pad_beg: -1", (5, 7), (1, 0)),
        ("height: 6 width: 6 pad_beg: -1 pad_end: -1", (6, 6), (1, 1)),
        ("height: 4 width: 5", (4, 5), (0, 0)),
    ],
)
def test_interp(parameters, size, crop):
    x = rand(2, 2, 4, 5)
    inner = x[:, :, crop[0] : 4 - crop[1], crop[0] : 5 - crop[1]].astype(np.float64)
    text = f"interp_param {{ {parameters} }}"
    y = run("Interp", text, x)
    assert y.shape[2:] == size
    np.testing.assert_allclose(y, corner_to_corner(inner, *size), rtol=1e-5, atol=1e-5)
    check_gradients("Interp", text, x[:1])


CUSTOM = """
message LayerParameter {
  optional UpsampleParameter upsample_param = 160;
  optional ReverseParameter reverse_param = 157;
}
message UpsampleParameter { optional int32 scale = 1 [default = 1]; }
message ReverseParameter { optional int32 axis = 1 [default = 0]; }
"""
FORK = """
layer { name: "in" type: "Input" top: "x" input_param { shape { dim: 1 dim: 2 dim: 2 dim: 3 } } }
layer { name: "up" type: "Upsample" bottom: "x" top: "up" upsample_param { scale: 2 } }
layer { name: "back" type: "Reverse" bottom: "up" top: "y" reverse_param { axis: 3 } }
"""


def test_messages_of_other_forks(write):
    net = caffe.Net(write(FORK), caffe.TEST, custom_proto=write(CUSTOM, "custom.proto"))
    x = rand(1, 2, 2, 3)
    np.testing.assert_array_equal(net.forward(x=x)["y"], x.repeat(2, 2).repeat(2, 3)[..., ::-1])


# ------------------------------------------------------------------ a net of the YOLO family

YOLO = """
layer { name: "in" type: "Input" top: "x" input_param { shape { dim: 1 dim: 3 dim: 32 dim: 32 } } }
layer { name: "c1" type: "Convolution" bottom: "x" top: "c1" convolution_param { num_output: 8 kernel_size: 3 pad: 1
  stride: 2 bias_term: false weight_filler { type: "msra" } } }
layer { name: "bn" type: "BatchNorm" bottom: "c1" top: "c1" batch_norm_param { use_global_stats: false } }
layer { name: "leaky" type: "ReLU" bottom: "c1" top: "c1" relu_param { negative_slope: 0.1 } }
layer { name: "dw" type: "DepthwiseConv" bottom: "c1" top: "dw" convolution_param { kernel_size: 3 pad: 1 stride: 2
  weight_filler { type: "msra" } } }
layer { name: "six" type: "ReLU6" bottom: "dw" top: "dw" }
layer { name: "shuffle" type: "ShuffleChannel" bottom: "dw" top: "s" shuffle_channel_param { group: 2 } }
layer { name: "reorg" type: "Reorg" bottom: "c1" top: "r" reorg_param { stride: 2 } }
layer { name: "route" type: "Concat" bottom: "s" bottom: "r" top: "route" }
layer { name: "up" type: "Upsample" bottom: "route" top: "up" upsample_param { scale: 2 } }
layer { name: "route2" type: "Concat" bottom: "up" bottom: "c1" top: "route2" }
layer { name: "head" type: "Convolution" bottom: "route2" top: "head" convolution_param { num_output: 18 kernel_size: 1
  weight_filler { type: "msra" } } }
layer { name: "last" type: "Permute" bottom: "head" top: "y" permute_param { order: 0 order: 2 order: 3 order: 1 } }
"""


def test_a_net_of_the_yolo_family(write):
    """Routes, reorg, upsampling: merged and freed it gives what it gives layer by layer."""
    path = write(YOLO)
    caffe.set_random_seed(1)
    net = caffe.Net(path, caffe.TEST)
    lean = caffe.Net(path, caffe.TEST, keep_blobs=False, runtime="torch")
    lean.share_with(net)
    x = rand(1, 3, 32, 32)
    y = net.forward(x=x)["y"]
    assert y.shape == (1, 16, 16, 18)
    assert np.ptp(y) > 0
    np.testing.assert_allclose(lean.forward(x=x)["y"], y, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(net.blobs["r"].data, blocks(net.blobs["c1"].data, 2, 2))


# ------------------------------------------------------------------ DepthwiseConv


@pytest.mark.parametrize("kind", ["DepthwiseConv", "ConvolutionDepthwise", "DepthwiseConvolution"])
@pytest.mark.parametrize("given", ["", "num_output: 3 group: 3"])
def test_depthwise(kind, given):
    x, weight, bias = rand(2, 3, 5, 5), rand(3, 1, 3, 3), rand(3)
    text = f"convolution_param {{ {given} kernel_size: 3 pad: 1 }}"
    expected = np.stack(
        [
            np.stack([signal.correlate2d(x[n, c], weight[c, 0], mode="same") + bias[c] for c in range(3)])
            for n in range(2)
        ]
    )
    np.testing.assert_allclose(run(kind, text, x, blobs=[weight, bias]), expected, rtol=1e-4, atol=1e-5)
    if not given:
        check_gradients(kind, text, x[:1, :, :3, :3], blobs=[weight, bias])


def test_depthwise_with_several_outputs_per_channel():
    net = net_of("DepthwiseConv", "convolution_param { num_output: 6 kernel_size: 1 }", [(1, 3, 2, 2)])
    assert net.params["layer"][0].shape == (6, 1, 1, 1)


# ------------------------------------------------------------------ GRU


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gru(x, cont, weight, bias, recurrent, first):
    size = recurrent.shape[1]
    h, outputs = first, []
    for step in range(len(x)):
        h = cont[step][:, None] * h
        drive = x[step] @ weight.T + bias
        z = sigmoid(drive[:, :size] + h @ recurrent[:size].T)
        r = sigmoid(drive[:, size : 2 * size] + h @ recurrent[size : 2 * size].T)
        new = np.tanh(drive[:, 2 * size :] + (r * h) @ recurrent[2 * size :].T)
        h = (1 - z) * new + z * h
        outputs.append(h)
    return np.array(outputs)


def test_gru():
    x, W, b, R = rand(4, 2, 3), rand(9, 3), rand(9), rand(9, 3)
    cont = np.array([[0, 0], [1, 1], [1, 0], [1, 1]], np.float32)
    text = "recurrent_param { num_output: 3 }"
    expected = gru(x.astype(np.float64), cont, W, b, R, np.zeros((2, 3)))
    np.testing.assert_allclose(run("GRU", text, x, cont, blobs=[W, b, R]), expected, rtol=1e-4, atol=1e-5)
    check_gradients("GRU", text, x, cont, blobs=[W, b, R], bottoms=[0])


def test_gru_is_onnx_gru():
    x, W, b, R = rand(3, 2, 4), rand(6, 4), rand(6), rand(6, 2)
    node = helper.make_node("GRU", ["x", "w", "r", "b"], ["y"], hidden_size=2)
    graph = helper.make_graph(
        [node],
        "gru",
        [helper.make_tensor_value_info(name, 1, None) for name in "xwrb"],
        [helper.make_tensor_value_info("y", 1, None)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    bias = np.concatenate([b, np.zeros(6, np.float32)])[None]
    (y,) = ReferenceEvaluator(model).run(None, {"x": x, "w": W[None], "r": R[None], "b": bias})
    cont = np.array([[0, 0], [1, 1], [1, 1]], np.float32)
    found = run("GRU", "recurrent_param { num_output: 2 }", x, cont, blobs=[W, b, R])
    np.testing.assert_allclose(found, y[:, 0], rtol=1e-4, atol=1e-5)


def test_gru_goes_on_and_takes_a_static_input_and_exposed_states():
    x, static, W, b, S, R = rand(2, 1, 3), rand(1, 2), rand(6, 3), rand(6), rand(6, 2), rand(6, 2)
    cont, first = np.ones((2, 1), np.float32), rand(1, 1, 2)
    text = "recurrent_param { num_output: 2 expose_hidden: true }"
    outputs, last = run("GRU", text, x, cont, static, first, tops=2, blobs=[W, b, S, R])
    expected = gru(x.astype(np.float64), cont, W, b + static @ S.T, R, first[0])
    np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(last[0], outputs[-1])

    net = net_of("GRU", "recurrent_param { num_output: 2 }", [x.shape, cont.shape])
    run("GRU", "", x, cont, blobs=[W, b, R], net=net)
    second = run("GRU", "", x, cont, net=net)
    both = gru(np.concatenate([x, x]).astype(np.float64), np.ones((4, 1)), W, b, R, np.zeros((1, 2)))
    np.testing.assert_allclose(second, both[2:], rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("kind", "parameters", "shapes", "message"),
    [
        ("Reorg", "", [(1, 2, 3, 4)], r"an image of \(3, 4\) cannot be split into blocks of 2 x 2"),
        ("Reorg", "reorg_param { reverse: true }", [(1, 6, 3, 4)], "6 channels cannot become blocks of 2 x 2 pixels"),
        ("Reorg", "reorg_param { stride: 0 }", [(1, 6, 3, 4)], "must not be empty"),
        ("Reorg", "", [(1, 6, 3)], "expected a blob of 4 axes"),
        ("PassThrough", "pass_through_param { num_output: 5 }", [(1, 2, 4, 4)], "num_output is 5, but.*give 8"),
        ("ShuffleChannel", "shuffle_channel_param { group: 4 }", [(1, 6)], "group 4 does not divide the channels"),
        ("Reverse", "reverse_param { axis: 4 }", [(1, 6)], "axis 4 is out of range"),
        ("Pad", "pad_param { pads: 1 }", [(1, 6)], "pads must hold 2 numbers for each of 2 axes, got 1"),
        ("Pad", "pad_param { axes: 1 pads: [1, -1] mode: EDGE }", [(1, 6)], "negative pads.*need mode CONSTANT"),
        ("Pad", "pad_param { axes: 1 pads: [-4, -4] }", [(1, 6)], "do not fit"),
        ("Upsample", "upsample_param { scale: 1.5 }", [(1, 1, 2, 2)], "must be a whole number of at least 1"),
        ("Upsample", "upsample_param { stride: 0 }", [(1, 1, 2, 2)], "must be a whole number of at least 1"),
        ("Upsample", "", [(1, 1, 2, 2), (1, 1, 2, 3)], "the mask must have the shape of the first bottom"),
        ("Unpooling", "", [(1, 1, 2, 2)], "kernel and stride must be > 0"),
        (
            "Unpooling",
            "unpooling_param { kernel_size: 2 pad: 2 }",
            [(1, 1, 2, 2)],
            "pad must be smaller than the kernel",
        ),
        (
            "Unpooling",
            "unpooling_param { unpool: AVE kernel_size: 2 }",
            [(1, 1, 2, 2), (1, 1, 2, 2)],
            "only MAX unpooling takes a mask",
        ),
        ("Interp", "", [(1, 1, 2, 2)], "needs shrink_factor, zoom_factor, or height and width"),
        ("Interp", "interp_param { zoom_factor: 2 pad_beg: 1 }", [(1, 1, 2, 2)], "only supports cropping"),
        ("Interp", "interp_param { zoom_factor: 0 }", [(1, 1, 2, 2)], "must be positive, got 1, 0"),
        ("Interp", "interp_param { zoom_factor: 2 pad_beg: -2 }", [(1, 1, 2, 2)], "no pixels are left"),
        ("DepthwiseConv", "convolution_param { group: 2 kernel_size: 1 }", [(1, 4, 2, 2)], "group must be.*4, got 2"),
        ("GRU", "", [(2, 1, 3), (2, 1)], "num_output must be positive"),
    ],
)
def test_mistakes(kind, parameters, shapes, message):
    with pytest.raises(ModelError, match=message):
        net_of(kind, parameters, shapes)


def test_a_mask_that_points_outside():
    with pytest.raises(ModelError, match="the mask holds an index outside the 4 x 4 image"):
        run("Upsample", "", np.ones((1, 1, 2, 2)), np.full((1, 1, 2, 2), 16))
