"""The same network through PyTorch, Caffe and ONNX gives the same factors, integers and QDQ outputs."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from three_doors import LAYERS, caffe_pair, onnx_file, torch_network

import amct.caffe
import amct.caffe.pycaffe as caffe
import amct.onnx_model
import amct.pytorch
from amct.config.plan import config_text
from amct.errors import AmctError

BATCHES = [np.random.default_rng(seed).normal(0.2, 1.0, (4, 3, 8, 8)).astype(np.float32) for seed in (1, 2, 3)]
SETTINGS = {"weight_rounding": "nearest", "weight_scale": "full_range"}
CAFFE_ONLY = ("Eltwise", "Concat", "Pooling")  # data-only layers, which the PyTorch dialect does not quantize
TIE = 1e-4


# Caffe's InnerProduct has one weight scale; the other doors are set to the same.
LINEAR = {"Linear": amct.pytorch.LayerConfig(weights=amct.pytorch.ArqSettings(channel_wise=False))}


def config():
    return amct.pytorch.QuantConfig(**SETTINGS, types=LINEAR)


@pytest.fixture(scope="module")
def doors(tmp_path_factory):
    folder = tmp_path_factory.mktemp("three_doors")
    model = torch_network()
    caffe_config = amct.caffe.QuantConfig(**SETTINGS, skip_layer_types=CAFFE_ONLY)
    return {
        "pytorch": amct.pytorch.quantize(model, [torch.from_numpy(batch) for batch in BATCHES], config()),
        "onnx": amct.onnx_model.quantize(onnx_file(model, folder), BATCHES, config()),
        "caffe": amct.caffe.quantize(*caffe_pair(model, folder), BATCHES, caffe_config),
    }


def factors(quantized):
    """By layer: scale and offset of the input, scales of the weight."""
    found = {}
    for name, entry in quantized.record.layers.items():
        data = entry.record_d[0] if hasattr(entry, "record_d") else None
        scale, offset = (data.scale, data.offset) if data is not None else (entry.scale_d, entry.offset_d)
        found[name] = (scale, offset, np.array(entry.scale_w))
    return found


def test_the_float_nets_are_the_same(tmp_path):
    model = torch_network()
    expected = model(torch.from_numpy(BATCHES[0])).detach().numpy()
    session = onnxruntime.InferenceSession(onnx_file(model, tmp_path))
    np.testing.assert_allclose(session.run(None, {"data": BATCHES[0]})[0], expected, atol=1e-5)
    net = caffe.Net(*map(str, caffe_pair(model, tmp_path)), caffe.TEST)
    np.testing.assert_allclose(net.forward(data=BATCHES[0])["fc"], expected, atol=1e-5)


@pytest.mark.parametrize("other", ["onnx", "caffe"])
def test_scales_agree_and_offsets_are_equal(doors, other):
    expected, got = factors(doors["pytorch"]), factors(doors[other])
    assert set(expected) == set(got) == set(LAYERS)
    for name, (scale, offset, weight_scales) in expected.items():
        assert got[name][0] == pytest.approx(scale, rel=1e-5), name
        assert got[name][1] == offset, name
        np.testing.assert_allclose(got[name][2], weight_scales, rtol=1e-5, err_msg=name)


def weight_integers(quantized, folder):
    """By layer: the integer weights of the exact QDQ file, with the scales of each, as [Cout, ...]."""
    path = folder / "q"
    quantized.save(path, formats=("qdq",), placement="exact", target="exact8")
    proto = onnx.load(folder / "q_qdq_model.onnx")
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    producers = {name: node for node in proto.graph.node for name in node.output}
    found = {}
    for node in proto.graph.node:
        if node.name in LAYERS:
            weight = producers[node.input[1]]
            while weight.op_type != "DequantizeLinear":
                weight = producers[weight.input[0]]
            found[node.name] = stored[weight.input[0]]
    return found, folder / "q_qdq_model.onnx"


@pytest.fixture(scope="module")
def files(doors, tmp_path_factory):
    return {name: weight_integers(quantized, tmp_path_factory.mktemp(name)) for name, quantized in doors.items()}


def rows(integers, name):
    if name == "fc" and integers.shape[0] != 5:
        integers = integers.T
    return integers.astype(np.int64).reshape(integers.shape[0], -1)


@pytest.mark.parametrize("other", ["onnx", "caffe"])
def test_weight_integers_are_equal_but_for_ties(doors, files, other):
    expected, got = files["pytorch"][0], files[other][0]
    prepared = doors["pytorch"].prepared
    for name in LAYERS:
        real = prepared.weights[name].sources[0].tensor.numpy().astype(np.float64)
        steps = real.reshape(real.shape[0], -1) / factors(doors["pytorch"])[name][2].reshape(-1, 1)
        near_tie = np.abs(np.abs(steps - np.floor(steps)) - 0.5) < TIE
        differ = rows(expected[name], name) != rows(got[name], name)
        assert not (differ & ~near_tie).any(), name


@pytest.mark.parametrize("other", ["onnx", "caffe"])
def test_qdq_outputs_agree_to_one_step(doors, files, other):
    outputs = {}
    for name in ("pytorch", other):
        session = onnxruntime.InferenceSession(files[name][1])
        outputs[name] = session.run(None, {session.get_inputs()[0].name: BATCHES[0]})[0]
    scale, _, weight_scales = factors(doors["pytorch"])["fc"]
    # The last layer adds integers: its outputs lie scale_d * scale_w apart, and that is the one step.
    step = scale * weight_scales.max()
    assert np.abs(outputs["pytorch"] - outputs[other]).max() <= step


def test_data_of_unknown_length_is_used_to_its_end(doors, tmp_path):
    stream = amct.onnx_model.quantize(onnx_file(torch_network(), tmp_path), iter(BATCHES), config())
    assert stream.record == doors["onnx"].record
    assert "batch_num: all" in config_text(stream.prepared.plan)


@pytest.fixture(scope="module")
def calibrating(tmp_path_factory):
    folder = tmp_path_factory.mktemp("odd_batches")
    model = torch_network()
    onnx_path, pair = onnx_file(model, folder), caffe_pair(model, folder)
    return {
        "pytorch": lambda batch: amct.pytorch.quantize(model, [batch]),
        "onnx": lambda batch: amct.onnx_model.quantize(onnx_path, [batch]),
        "caffe": lambda batch: amct.caffe.quantize(*pair, [batch]),
    }


@pytest.mark.parametrize("door", ["pytorch", "onnx", "caffe"])
@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.to("meta"),
        lambda x: x.to(torch.complex64),
        lambda x: x.to_sparse(),
        lambda x: x.to_mkldnn(),
        lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged),
        lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        lambda x: x[:0],
        lambda _: torch.tensor(1.0),
        lambda _: "abc",
        lambda _: [[1, 2], [3]],
        lambda _: np.array(["a", "b"]),
        lambda _: None,
        lambda _: {},
    ],
    ids=[
        "meta",
        "complex",
        "sparse",
        "mkldnn",
        "nested",
        "quantized",
        "empty",
        "number",
        "word",
        "ragged",
        "words",
        "none",
        "dict",
    ],
)
@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor.*:UserWarning")
def test_what_is_no_batch_ends_in_an_error_of_ours(calibrating, change, door):
    with pytest.raises(AmctError):
        calibrating[door](change(torch.from_numpy(BATCHES[0])))


@pytest.mark.parametrize("door", ["onnx", "caffe"])
def test_doors_that_read_arrays_refuse_bfloat16_which_numpy_lacks(calibrating, door):
    with pytest.raises(AmctError, match=r"cannot be read from a tensor of torch\.bfloat16"):
        calibrating[door](torch.from_numpy(BATCHES[0]).bfloat16())
