"""Damaged files, found by mutating inputs of every reader: each gives an error of this package that names the place.

``files`` has one file for each place where such a file once caused an exception of another library, a crash of the
process, a very large allocation, or a wait of several seconds. The first word of a name is the kind of the file.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import amct.caffe
import amct.onnx_model
import amct_caffe
import amct_pytorch
from amct.caffe import pycaffe as caffe
from amct.caffe.engine.data_layers.hdf5 import read_datasets
from amct.caffe.engine.solvers.snapshot import read_state
from amct.caffe.engine.wire import read_weights
from amct.caffe.proto_merge import load_custom_schema
from amct.data import open_samples, read_image
from amct.data.samples import read_mean
from amct.errors import AmctError, FileError, ModelError, ParseError, RecordError
from amct.model.quant_json import read_quant_json

FILES = Path(__file__).parent / "files"
NET = """
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 2 dim: 3 dim: 8 dim: 8 } } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
  convolution_param { num_output: 4 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "bn" type: "BatchNorm" bottom: "conv" top: "conv" }
layer { name: "scale" type: "Scale" bottom: "conv" top: "conv" scale_param { bias_term: true } }
layer { name: "relu" type: "ReLU" bottom: "conv" top: "conv" }
layer { name: "pool" type: "Pooling" bottom: "conv" top: "pool" pooling_param { pool: AVE kernel_size: 2 stride: 2 } }
layer { name: "fc" type: "InnerProduct" bottom: "pool" top: "fc"
  inner_product_param { num_output: 10 weight_filler { type: "xavier" } } }
layer { name: "prob" type: "Softmax" bottom: "fc" top: "prob" }
"""


def names(kind):
    return sorted(path.name for path in FILES.glob(f"{kind}_[0-9]*"))


def test_every_file_has_a_test():
    kinds = "caffeflow caffemodel custproto hdf5 image lists lmdb mean modified npy onnx protostruct prototxt quantjson"
    covered = {name for kind in (*kinds.split(), "solver", "state") for name in names(kind)}
    assert len(covered) == 63
    assert {path.name for path in FILES.iterdir()} - covered == {
        "modified_record.txt",
        "modified_tensor_factors.json",
    }


# ---------------------------------------------------------------------- data


@pytest.mark.parametrize("name", [*names("npy"), *names("lmdb")])
def test_arrays_and_databases(name):
    with pytest.raises(ParseError, match=rf"{name}.*(Save the array|create it) again"):
        list(open_samples(FILES / name))


def test_a_mean_file():
    (name,) = names("mean")
    with pytest.raises(ParseError, match=rf"{name}: not an array file of NumPy"):
        read_mean(FILES / name)


def test_a_picture_of_156_million_pixels_in_411_bytes():
    (name,) = names("image")
    with pytest.raises(ParseError, match=rf"{name}: a picture of 15112 x 10315 pixels; .* Make it smaller"):
        read_image(FILES / name)


def test_a_list_of_images_with_a_nul_character():
    (name,) = names("lists")
    with pytest.raises(FileError, match=r"Could not load .*conv1 Convolutionx# .*: the picture cannot be read"):
        list(open_samples(FILES / name))


# ---------------------------------------------------------------------- HDF5 and caffemodels


def hdf5_readers(path, tmp_path):
    prototxt = tmp_path / "net.prototxt"
    layers = ["conv1", "conv", "ip", "fc", "layer0", "data", "history"]
    prototxt.write_text(
        'layer { name: "in" type: "Input" top: "x" input_param { shape { dim: 1 dim: 3 dim: 8 dim: 8 } } }'
        + "".join(
            f'layer {{ name: "{name}" type: "Convolution" bottom: "x" top: "{name}" '
            "convolution_param { num_output: 4 kernel_size: 3 } }"
            for name in layers
        )
    )
    yield lambda: read_state(str(path))
    yield lambda: read_datasets(str(path), ["data", "label"])
    yield lambda: caffe.Net(str(prototxt), caffe.TEST, weights=str(path))
    yield lambda: amct.caffe.quantize(prototxt, path, np.zeros((1, 3, 8, 8), np.float32))


@pytest.mark.parametrize("name", [*names("hdf5"), *names("state")])
def test_hdf5_files(name, tmp_path):
    for read in hdf5_readers(FILES / name, tmp_path):
        with pytest.raises(AmctError, match=name.replace(".", r"\.")):
            read()


@pytest.mark.parametrize("name", names("caffemodel"))
def test_caffemodels_that_took_long(name):
    assert len(read_weights((FILES / name).read_bytes(), name)) > 10


# ---------------------------------------------------------------------- Caffe nets


@pytest.fixture
def weights(tmp_path):
    (tmp_path / "good.prototxt").write_text(NET)
    net = caffe.Net(str(tmp_path / "good.prototxt"), caffe.TEST)
    for scale in (net.params["bn"][1], net.params["bn"][2], net.params["scale"][0]):
        scale.data[...] = 1
    net.save(str(tmp_path / "good.caffemodel"))
    return tmp_path / "good.caffemodel"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("caffeflow_00.prototxt", r'layer "fc" \(InnerProduct\): the weights have shapes \[\(10, 36\), \(10,\)\], this '
         r"net needs \[\(10, 16\), \(10,\)\] for inputs of shape \[\(2, 4, 2, 2\)\].*the kernels and strides"),
        ("caffeflow_01.prototxt", r'layer "conv" \(Convolution\): the weights have shapes \[\(4, 3, 3, 3\), \(4,\)\], '
         r"this net needs \[\(4, 1, 3, 3\), \(4,\)\] for inputs of shape \[\(2, 1, 8, 8\)\]"),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit_the_net(name, message, weights):
    with pytest.raises(ModelError, match=message):
        amct.caffe.quantize(FILES / name, weights, np.ones((2, 3, 8, 8), np.float32)).save(weights.parent / "out")


def test_a_net_with_a_space_more(weights, tmp_path):
    quantized = amct.caffe.quantize(FILES / "caffeflow_02.prototxt", weights, np.ones((2, 3, 8, 8), np.float32))
    assert quantized.save(tmp_path / "out" / "net")
    assert "conv" in quantized.layers


def test_a_record_with_a_renamed_key(weights, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record = FILES / "caffeflow_03.txt"
    with pytest.raises(RecordError, match=r'caffeflow_03\.txt: the key "<b>" is no layer .* object_layer is "conv"'):
        amct_caffe.convert_model("good.prototxt", str(weights), str(record), "out/net")


@pytest.mark.parametrize("name", [*names("prototxt"), *names("protostruct")])
def test_pooling_with_a_stride_far_beyond_the_image(name, tmp_path):
    """The windows are those of a stride just beyond the image, which need no memory."""
    text = (FILES / name).read_text()
    found = caffe.Net(str(FILES / name), caffe.TEST)
    start = text.index("stride: ") + len("stride: ")
    digits = len(text[start:]) - len(text[start:].lstrip("0123456789"))
    (tmp_path / "near.prototxt").write_text(text[:start] + "20" + text[start + digits :])
    expected = caffe.Net(str(tmp_path / "near.prototxt"), caffe.TEST)
    data = np.random.default_rng(0).normal(size=found.blobs["x"].shape)
    np.testing.assert_array_equal(found.forward(x=data)["y"], expected.forward(x=data)["y"])


def test_a_solver_with_a_nul_character_in_a_path():
    (name,) = names("solver")
    with pytest.raises(FileError, match=r"the net of the solver .* cannot be read: .*null byte"):
        caffe.get_solver(str(FILES / name))


def test_a_custom_proto_with_a_number_above_32_bits():
    (name,) = names("custproto")
    with pytest.raises(ParseError, match=rf"{name}:1:\d+: expected a number of 32 bits, found 4294967296"):
        load_custom_schema(FILES / name)


# ---------------------------------------------------------------------- ONNX


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("onnx_40.onnx", r'tensor "w" is kept in .*null'),
        ("onnx_41.onnx", "is not UTF-8 text: b'"),
        ("onnx_42.onnx", "is not UTF-8 text: b'"),
    ],
)
def test_onnx_models(name, message):
    with pytest.raises(AmctError, match=rf"{name}.*{message}"):
        amct.onnx_model.quantize(FILES / name, np.zeros((1, 3, 4, 4), np.float32))


@pytest.mark.parametrize("name", names("modified"))
def test_modified_onnx_files(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(FILES / "modified_record.txt", tmp_path / "record.txt")
    shutil.copy(FILES / "modified_tensor_factors.json", tmp_path / "record.txt.qdq.json")
    with pytest.raises(ParseError, match=rf"{name}.* is (not an? (valid )?ONNX model|damaged)"):
        amct_pytorch.save_model(str(FILES / name), "record.txt", "out/net")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", names("quantjson"))
def test_quant_json_of_another_shape(name):
    with pytest.raises(ParseError, match=rf"{name}: expected .* got at .*quantize and save the model again"):
        read_quant_json(FILES / name)
