"""Broken and malicious files: our error, quickly, and never a crash or an exhausted machine."""

from __future__ import annotations

import contextlib
import random

import numpy as np
import pytest
from caffe_nets import filled
from hypothesis import given
from hypothesis import strategies as st

from amct.caffe import pycaffe as caffe
from amct.caffe.engine import plan
from amct.caffe.engine.net import Net
from amct.caffe.engine.wire import read_weights
from amct.caffe.pycaffe.proto import caffe_pb2
from amct.errors import AmctError, ModelError, ParseError

INPUT = 'layer { name: "in" type: "Input" top: "d" input_param { shape { dim: 1 dim: 8 dim: 4 dim: 4 } } } '


def caffemodel(net, tmp_path):
    path = tmp_path / "good.caffemodel"
    net.save(str(path))
    return path.read_bytes()


def test_every_truncation_is_noticed_or_harmless(a, tmp_path):
    net = filled(a)
    good = caffemodel(net, tmp_path)
    layers_found = [len(read_weights(good[:length], "cut")) for length in _whole_layer_ends(good)]
    assert layers_found == list(range(len(layers_found)))
    ends = set(_whole_layer_ends(good)) | {3}  # 3: behind the net's name, before any layer
    for length in range(1, len(good)):
        if length in ends:
            continue
        with pytest.raises(ParseError, match=r"cut: not a caffemodel, or damaged: .* at byte \d+"):
            read_weights(good[:length], "cut")


def _whole_layer_ends(data):
    """Where a file may end without cutting a layer: found by protobuf itself."""
    ends, message = [], caffe_pb2.NetParameter.FromString(data)
    for count in range(len(message.layer)):
        part = caffe_pb2.NetParameter(name=message.name)
        part.layer.extend(message.layer[:count])
        ends.append(len(part.SerializeToString()))
    return ends


def test_bit_flips_load_or_raise(a, tmp_path):
    net = filled(a)
    good = caffemodel(net, tmp_path)
    path = tmp_path / "flipped.caffemodel"
    generator = random.Random(0)
    outcomes = set()
    for _ in range(400):
        flipped = bytearray(good)
        for _ in range(generator.choice([1, 1, 3, 20])):
            flipped[generator.randrange(len(good))] ^= 1 << generator.randrange(8)
        path.write_bytes(flipped)
        try:
            caffe.Net(a, caffe.TEST, weights=str(path))
            outcomes.add("loaded")
        except AmctError as error:
            outcomes.add(type(error).__name__)
    assert outcomes == {"loaded", "ParseError", "ModelError"}


@given(data=st.binary(max_size=200))
def test_any_bytes_are_weights_or_a_parse_error(data):
    with contextlib.suppress(ParseError):
        assert isinstance(read_weights(data, "fuzz"), list)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"hello world", "wire type"),
        (b"\xff" * 50, "too long"),
        (b"\xa2\x06\xff\xff\xff\xff\x0f", "a field of 4294967295 bytes where only 0 are left"),
        (b"\xa2\x06\x05\x3a\x03\x2a\x01\x00", "1 bytes are not a whole number of 4-byte values"),
        (b"\x00\x01", "field number 0"),
        (b"\xa2\x06\x0e\x3a\x0c\x3a\x0a\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff", "it ends inside a number|only"),
    ],
)
def test_junk_says_what_and_where(tmp_path, a, data, why):
    path = tmp_path / "junk.caffemodel"
    path.write_bytes(data)
    with pytest.raises(ParseError, match=rf"junk\.caffemodel: not a caffemodel, or damaged: .*({why})"):
        caffe.Net(a, caffe.TEST, weights=str(path))


def test_damaged_hdf5(a, tmp_path):
    pytest.importorskip("h5py")
    net = filled(a)
    good = tmp_path / "good.h5"
    net.save_hdf5(str(good))
    data = good.read_bytes()
    path = tmp_path / "bad.h5"
    for length in (8, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(AmctError, match=r"bad\.h5"):
            caffe.Net(a, caffe.TEST, weights=str(path))


# ---------------------------------------------------------------------------------------------------- prototxt


def test_a_cycle_is_an_unknown_blob(write):
    text = """
layer { name: "x" type: "ReLU" bottom: "b" top: "a" }
layer { name: "y" type: "ReLU" bottom: "a" top: "b" }
"""
    with pytest.raises(ModelError, match=r"Unknown bottom blob 'b' \(layer 'x', bottom index 0\)"):
        caffe.Net(write(text), caffe.TEST)


@pytest.mark.parametrize(
    "text",
    [
        'layer { name: "in" type: "Input" top: "d" input_param { shape { dim: 1000000000 } } }',
        'layer { name: "in" type: "Input" top: "d" input_param { shape { dim: 1000000000 dim: 1000000000 } } }',
        'input: "d" input_dim: 1000 input_dim: 1000 input_dim: 1000 input_dim: 1000',
        'layer { name: "in" type: "DummyData" top: "d" dummy_data_param { shape { dim: 1000000000 } } }',
        'layer { name: "in" type: "Input" top: "d" input_param { shape { dim: 1 dim: 8 } } }'
        'layer { name: "ip" type: "InnerProduct" bottom: "d" top: "y" inner_product_param { num_output: 1000000000 } }',
        INPUT + 'layer { name: "c" type: "Convolution" bottom: "d" top: "y" '
        "convolution_param { num_output: 4294967295 kernel_size: 3 } }",
        INPUT + 'layer { name: "c" type: "Convolution" bottom: "d" top: "y" '
        "convolution_param { num_output: 1 kernel_size: 1 pad: 1000000 } }",
        'layer { name: "in" type: "Input" top: "d" input_param { shape { dim: 1 dim: 8 } } }'
        'layer { name: "t" type: "Tile" bottom: "d" top: "y" tile_param { tiles: 2147483647 } }',
        'layer { name: "p" type: "Parameter" top: "y" parameter_param { shape { dim: 1000000000 } } }',
    ],
)
def test_sizes_of_a_billion_are_refused_before_anything_is_allocated(write, text):
    with pytest.raises(ModelError, match=r"the limit is 2\.0 GiB.*AMCT_CAFFE_MAX_BLOB_BYTES|exceeds INT_MAX"):
        caffe.Net(write(text), caffe.TEST)


def test_the_limit_can_be_raised(write, monkeypatch):
    path = write('layer { name: "in" type: "Input" top: "d" input_param { shape { dim: 1000000000 } } }')
    monkeypatch.setenv("AMCT_CAFFE_MAX_BLOB_BYTES", "5000000000")
    monkeypatch.setenv("AMCT_CAFFE_MAX_NET_BYTES", "5000000000")
    assert caffe.Net(path, caffe.TEST).blobs["d"].shape == (10**9,)
    monkeypatch.setenv("AMCT_CAFFE_MAX_BLOB_BYTES", "100")
    with pytest.raises(ModelError, match="limit is"):
        caffe.Net(path, caffe.TEST)
    monkeypatch.setenv("AMCT_CAFFE_MAX_BLOB_BYTES", "lots")
    with pytest.raises(ModelError, match="must be a number of bytes, got 'lots'"):
        caffe.Net(path, caffe.TEST)


MEGABYTE = 'layer { name: "in" type: "Input" top: "b0" input_param { shape { dim: 1 dim: 262144 } } }'


def tiles(count, readers="b{}"):
    """Layers with a top of one megabyte each."""
    return MEGABYTE + "".join(
        f'layer {{ name: "t{i}" type: "Power" bottom: "{readers.format(i)}" top: "b{i + 1}" }}' for i in range(count)
    )


@pytest.fixture
def ten_megabytes(monkeypatch):
    monkeypatch.setenv("AMCT_CAFFE_MAX_NET_BYTES", str(10 * 2**20))


TOO_MUCH = r"the net holds .* GiB of parameters and blobs at the same time; .*smaller batch; .*AMCT_CAFFE_MAX_NET_BYTES"


@pytest.mark.usefixtures("ten_megabytes")
def test_all_blobs_of_a_net_together_are_limited(write):
    caffe.Net(write(tiles(9)), caffe.TEST).forward()
    with pytest.raises(ModelError, match=rf'layer "t9" \(Power\).*{TOO_MUCH}'):
        caffe.Net(write(tiles(20)), caffe.TEST)
    # In-place layers, splits and reshapes have no memory of their own; freed blobs do not count.
    caffe.Net(write(tiles(4, readers="b0") + 'layer { name: "f" type: "Flatten" bottom: "b1" top: "f" }'), caffe.TEST)
    Net.from_file(write(tiles(20)), keep_blobs=False).forward()
    bottoms = " ".join(f'bottom: "b{i + 1}"' for i in range(20))
    text = tiles(20, readers="b0") + f'layer {{ name: "all" type: "Eltwise" {bottoms} top: "all" }}'
    with pytest.raises(ModelError, match=rf'layer "t9" \(Power\).*{TOO_MUCH}'):  # all are held for the last layer
        Net.from_file(write(text), keep_blobs=False)


@pytest.mark.usefixtures("ten_megabytes")
def test_all_parameters_of_a_net_together_are_limited(write):
    def text(name):
        return 'layer { name: "in" type: "Input" top: "d" input_param { shape { dim: 1 dim: 512 } } }' + "".join(
            f'layer {{ name: "p{i}" type: "InnerProduct" bottom: "d" top: "p{i}" {name} inner_product_param '
            "{ num_output: 512 bias_term: false } }"
            for i in range(20)
        )

    with pytest.raises(ModelError, match=rf'layer "p9" \(InnerProduct\).*{TOO_MUCH}'):
        caffe.Net(write(text("")), caffe.TEST)
    caffe.Net(write(text('param { name: "shared" }')), caffe.TEST)


@pytest.mark.usefixtures("ten_megabytes")
@pytest.mark.parametrize("keep_blobs", [True, False])
def test_a_larger_batch_is_checked_before_each_layer(write, keep_blobs):
    net = Net.from_file(write(tiles(4)), keep_blobs=keep_blobs)
    net.forward()
    net.blob("b0").reshape(6, 262144)
    for _ in range(2):  # the second time, too
        with pytest.raises(ModelError, match=rf'layer "t0" \(Power\).*{TOO_MUCH}'):
            net.forward()


def test_growing_at_run_time_is_checked_too(write):
    text = """
layer { name: "in" type: "Input" top: "d" input_param { shape { dim: 1 dim: 1000 } } }
layer { name: "t" type: "Tile" bottom: "d" top: "y" tile_param { tiles: 100000 } }
"""
    net = caffe.Net(write(text), caffe.TEST)
    net.blobs["d"].reshape(20, 1000)
    with pytest.raises(ModelError, match=r'blob "y" of layer "t" would have shape \(20, 100000000\)'):
        net.reshape()


@pytest.mark.parametrize("size", [-1, -(10**9)])
def test_negative_sizes(write, size):
    path = write(f'layer {{ name: "in" type: "Input" top: "d" input_param {{ shape {{ dim: {size} }} }} }}')
    with pytest.raises(ModelError, match="a size cannot be negative"):
        caffe.Net(path, caffe.TEST)


@pytest.mark.parametrize("kind", ["Slice", "Concat"])
def test_a_layer_that_shares_memory_with_itself(write, kind):
    """It once ended in an endless loop over the blobs that share memory."""
    net = caffe.Net(write(INPUT + f'layer {{ name: "s" type: "{kind}" bottom: "d" top: "d" }}'), caffe.TEST)
    assert net.forward(d=np.ones((1, 8, 4, 4)))["d"].sum() == 128


def test_ten_thousand_layers(write):
    layers = "".join(f'layer {{ name: "r{i}" type: "ReLU" bottom: "b{i}" top: "b{i + 1}" }}\n' for i in range(10_000))
    text = 'layer { name: "in" type: "Input" top: "b0" input_param { shape { dim: 1 dim: 4 } } }\n' + layers
    net = caffe.Net(write(text), caffe.TEST)
    out = net.forward(b0=np.array([[-1.0, 0.0, 2.0, 3.0]]))
    assert out["b10000"].tolist() == [[0, 0, 2, 3]]


def test_ten_thousand_readers_of_one_blob(write):
    layers = "".join(f'layer {{ name: "r{i}" type: "ReLU" bottom: "d" top: "b{i}" }}\n' for i in range(10_000))
    text = 'layer { name: "in" type: "Input" top: "d" input_param { shape { dim: 1 dim: 4 } } }\n' + layers
    net = caffe.Net(write(text), caffe.TEST)
    assert len(net.top_names["d_in_0_split"]) == 10_000
    assert len(net.forward()) == 10_000


def test_deep_nesting_is_a_parse_error(write):
    with pytest.raises(ParseError, match="net\\.prototxt:1"):
        caffe.Net(write("layer { " * 100_000), caffe.TEST)


def test_a_layer_cannot_be_fed_more_axes_than_there_are(write):
    dims = " ".join("dim: 1" for _ in range(33))
    path = write(f'layer {{ name: "in" type: "Input" top: "d" input_param {{ shape {{ {dims} }} }} }}')
    with pytest.raises(AmctError, match="at most 32 axes"):
        caffe.Net(path, caffe.TEST)


def test_python_layers_are_refused_unless_allowed(write):
    text = 'layer { name: "p" type: "Python" top: "p" python_param { module: "os" layer: "system" param_str: "echo" } }'
    with pytest.raises(AmctError, match="Python"):
        caffe.Net(write(text), caffe.TEST)


PICTURE = 'layer { name: "in" type: "Input" top: "d" input_param { shape { dim: 8 dim: 4 dim: 2000 dim: 2000 } } }'
WORK = r"with this layer a pass over the net takes .* operations; the limit is 2e\+12.*AMCT_CAFFE_MAX_NET_OPERATIONS"


@pytest.mark.parametrize(
    "text",
    [
        PICTURE + 'layer { name: "big" type: "Convolution" bottom: "d" top: "y" '
        "convolution_param { num_output: 4 kernel_size: 999 pad: 499 } }",
        PICTURE + 'layer { name: "big" type: "Deconvolution" bottom: "d" top: "y" '
        "convolution_param { num_output: 4 kernel_size: 999 pad: 999 } }",
        PICTURE + 'layer { name: "big" type: "Pooling" bottom: "d" top: "y" pooling_param { kernel_size: 999 } }',
        PICTURE + 'layer { name: "big" type: "LRN" bottom: "d" top: "y" '
        "lrn_param { local_size: 999 norm_region: WITHIN_CHANNEL } }",
        'layer { name: "in" type: "Input" top: "d" input_param { shape { dim: 20000 dim: 20000 } } }'
        'layer { name: "big" type: "InnerProduct" bottom: "d" top: "y" inner_product_param { num_output: 20000 } }',
        'layer { name: "in" type: "Input" top: "d" top: "c" input_param '
        "{ shape { dim: 1000000 dim: 1 dim: 4 } shape { dim: 1000000 dim: 1 } } }"
        'layer { name: "big" type: "LSTM" bottom: "d" bottom: "c" top: "y" recurrent_param { num_output: 4 } }',
    ],
    ids=["convolution", "deconvolution", "pooling", "lrn", "inner product", "lstm"],
)
def test_work_of_minutes_in_a_small_net_is_refused_before_it_begins(write, text):
    with pytest.raises(ModelError, match=rf'layer "big".*{WORK}'):
        caffe.Net(write(text), caffe.TEST)


def test_the_limit_of_work_can_be_raised_and_is_checked_for_a_larger_batch(write, monkeypatch):
    text = (
        INPUT + 'layer { name: "big" type: "InnerProduct" bottom: "d" top: "y" inner_product_param { num_output: 4 } }'
    )
    net = caffe.Net(write(text), caffe.TEST)
    monkeypatch.setattr(plan, "DEFAULT_WORK", 1000)
    net.blobs["d"].reshape(3, 8, 4, 4)
    with pytest.raises(ModelError, match=r"a pass over the net takes .* operations; the limit is 1e"):
        net.forward()
    monkeypatch.setenv("AMCT_CAFFE_MAX_NET_OPERATIONS", "100000")
    assert net.forward()["y"].shape == (3, 4)
