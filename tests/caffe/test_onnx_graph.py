"""Names, ends and refusals of the ONNX file of a Caffe net."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx_running import feed, run

from amct.caffe.engine.layer import TRAIN, Layer, register
from amct.caffe.engine.messages import parse_message
from amct.caffe.engine.net import Net
from amct.caffe.onnx.graph import export_onnx, float_onnx
from amct.errors import ArgumentError, ExportError, FileError

INPUT = 'layer { name: "in" type: "Input" top: "data" input_param { shape { dim: 2 dim: 3 dim: 6 dim: 6 } } }\n'
CONV = """
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
  convolution_param { num_output: 4 kernel_size: 3 weight_filler { type: 'xavier' } } }
"""
IN_PLACE = (
    INPUT
    + CONV
    + """
layer { name: "bn" type: "BatchNorm" bottom: "conv" top: "conv" }
layer { name: "relu" type: "ReLU" bottom: "conv" top: "conv" }
layer { name: "drop" type: "Dropout" bottom: "conv" top: "conv" }
layer { name: "ip" type: "InnerProduct" bottom: "conv" top: "ip" inner_product_param { num_output: 3 } }
"""
)


def net_of(text, **options):
    return Net(parse_message(text, "NetParameter", "test"), **options)


def data(shape=(2, 3, 6, 6)):
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


def names(values):
    return [value.name for value in values]


@pytest.fixture
def new_type():
    """A layer type of a user, with and without an ONNX form."""

    class Doubled(Layer):
        def reshape(self, bottoms):
            return [bottoms[0]]

        def forward(self, bottoms, parameters):
            del parameters
            return [bottoms[0] * 2]

    class Exportable(Doubled):
        def to_onnx(self, place):
            place.top("Mul", place.bottom, place.value("two", 2.0))

    from amct.caffe.engine import layer as layers

    layers.layer_types()  # loads all others
    register("Doubled")(Doubled)
    register("Exportable")(Exportable)
    yield
    del layers._registered["Doubled"], layers._registered["Exportable"]


def test_nodes_are_layers_and_tensors_are_blobs():
    exported = float_onnx(net_of(IN_PLACE))
    graph = exported.model.graph
    assert names(graph.node) == ["conv", "bn", "relu", "ip.flat", "ip"]
    assert [node.output[0] for node in graph.node] == ["conv.conv", "conv.bn", "conv", "ip.flat.output0", "ip"]
    assert names(graph.input) == ["data"]
    assert names(graph.output) == ["ip"]
    assert exported.nodes["drop"] == ()
    assert exported.nodes["ip"] == ("ip.flat", "ip")
    assert exported.bottoms["ip"] == ("conv",)
    assert exported.blobs["conv.bn"] == "conv"
    assert exported.blobs["conv"] == "conv"


def test_shapes_are_declared():
    exported = float_onnx(net_of(IN_PLACE))
    shape = exported.model.graph.value_info[0].type.tensor_type.shape
    assert [dim.dim_param or dim.dim_value for dim in shape.dim] == ["batch", 4, 4, 4]
    fixed = float_onnx(net_of(IN_PLACE), dynamic_batch=False)
    assert [dim.dim_value for dim in fixed.model.graph.input[0].type.tensor_type.shape.dim] == [2, 3, 6, 6]


def test_shapes_of_the_net_are_as_before():
    """Asking for the shapes of a larger batch leaves no trace in the layers."""
    net = net_of(IN_PLACE + 'layer { name: "flat" type: "Flatten" bottom: "ip" top: "flat" }')
    feed(net, {"data": data()})
    net.forward()
    before = net.blob("flat").data.copy()
    float_onnx(net)
    net.forward()
    np.testing.assert_array_equal(net.blob("flat").data, before)


def test_an_input_changed_in_place():
    net = net_of(INPUT + 'layer { name: "relu" type: "ReLU" bottom: "data" top: "data" }')
    results = run(float_onnx(net).model, {"data": data()})
    assert list(results) == ["data.output"]
    np.testing.assert_array_equal(results["data.output"], np.maximum(data(), 0))


def test_outputs_that_are_copies():
    """A blob that is an output under two names, and an input that is one."""
    text = INPUT + 'layer { name: "split" type: "Split" bottom: "data" top: "a" top: "b" }'
    results = run(float_onnx(net_of(text)).model, {"data": data()})
    assert sorted(results) == ["a", "b"]
    for value in results.values():
        np.testing.assert_array_equal(value, data())


def test_outputs_can_be_chosen():
    exported = float_onnx(net_of(IN_PLACE), outputs=["conv"])
    assert names(exported.model.graph.output) == ["conv"]
    assert "ip" not in exported.nodes
    with pytest.raises(ArgumentError, match=r'no blob "convs"\. Did you mean "conv"'):
        float_onnx(net_of(IN_PLACE), outputs=["convs"])


def test_shared_weights_are_stored_once():
    text = INPUT + "".join(
        f'layer {{ name: "c{i}" type: "Convolution" bottom: "data" top: "c{i}" '
        'param { name: "w" } param { name: "b" } '
        "convolution_param { num_output: 4 kernel_size: 3 } }"
        for i in (1, 2)
    )
    model = float_onnx(net_of(text)).model
    assert names(model.graph.initializer) == ["c1.weight", "c1.bias"]
    assert [list(node.input) for node in model.graph.node] == [["data", "c1.weight", "c1.bias"]] * 2


def test_the_file_ends_before_losses():
    text = (
        IN_PLACE
        + 'layer { name: "label" type: "Input" top: "label" input_param { shape { dim: 2 } } }'
        + 'layer { name: "accuracy" type: "Accuracy" bottom: "ip" bottom: "label" top: "accuracy" }'
        + 'layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }'
    )
    exported = float_onnx(net_of(text))
    assert names(exported.model.graph.input) == ["data"]
    assert names(exported.model.graph.output) == ["ip"]
    assert any('ends before layer "loss" (SoftmaxWithLoss), which is for training' in note for note in exported.notes)


def test_what_reads_a_layer_that_was_left_out():
    text = (
        IN_PLACE
        + 'layer { name: "label" type: "Input" top: "label" input_param { shape { dim: 2 } } }'
        + 'layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" top: "prob" }'
        + 'layer { name: "after" type: "Power" bottom: "prob" top: "after" }'
    )
    with pytest.raises(ExportError, match=r'layer "after" \(Power\) reads blob "prob"'):
        float_onnx(net_of(text))


def test_data_layers_are_inputs(tmp_path):
    import h5py

    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["data"] = data()
    (tmp_path / "list.txt").write_text(str(tmp_path / "data.h5"))
    text = (
        f'layer {{ name: "in" type: "HDF5Data" top: "data" hdf5_data_param {{ source: "{tmp_path / "list.txt"}" '
        "batch_size: 2 } }" + CONV
    )
    exported = float_onnx(net_of(text))
    assert names(exported.model.graph.input) == ["data"]
    assert "data become ONNX inputs" in exported.notes[0]


@pytest.mark.usefixtures("new_type")
def test_a_layer_of_ones_own():
    text = INPUT + 'layer { name: "it" type: "Exportable" bottom: "data" top: "y" }'
    results = run(float_onnx(net_of(text)).model, {"data": data()})
    np.testing.assert_array_equal(results["y"], 2 * data())


@pytest.mark.usefixtures("new_type")
def test_a_layer_without_a_form():
    text = INPUT + 'layer { name: "it" type: "Doubled" bottom: "data" top: "y" }'
    with pytest.raises(ExportError, match=r'layer "it" \(Doubled\): there is no ONNX form.*outputs=.*to_onnx'):
        float_onnx(net_of(text))


def test_random_data_and_average_unpooling_are_refused():
    random = (
        'layer { name: "r" type: "DummyData" top: "r" '
        'dummy_data_param { shape { dim: 2 } data_filler { type: "uniform" } } }'
    )
    with pytest.raises(ExportError, match=r'"r" \(DummyData\): its data is random'):
        float_onnx(net_of(random))
    unpool = (
        INPUT
        + 'layer { name: "u" type: "Unpooling" bottom: "data" top: "u" unpooling_param { unpool: AVE kernel_size: 2 } }'
    )
    with pytest.raises(ExportError, match="AVE unpooling"):
        float_onnx(net_of(unpool))


def test_wrapping_pads_need_a_new_opset():
    text = (
        INPUT
        + 'layer { name: "p" type: "Pad" bottom: "data" top: "p" pad_param { pads: 1 pads: 1 axes: 2 mode: WRAP } }'
    )
    with pytest.raises(ExportError, match="mode WRAP needs opset 19, got 18"):
        float_onnx(net_of(text))


def test_stochastic_windows_outside():
    text = INPUT + (
        'layer { name: "p" type: "Pooling" bottom: "data" top: "p" '
        "pooling_param { pool: STOCHASTIC kernel_size: 2 stride: 3 } }"
    )
    net = net_of(text)
    net.blob("data").reshape(2, 3, 9, 9)
    with pytest.raises(ExportError, match="windows lie outside"):
        float_onnx(net)


def test_train_nets_and_opsets_are_refused():
    with pytest.raises(ArgumentError, match="built for the TRAIN phase"):
        float_onnx(net_of(IN_PLACE, phase=TRAIN))
    for opset in (15, 22):
        with pytest.raises(ArgumentError, match=r"opset: expected 16\.\.21"):
            float_onnx(net_of(IN_PLACE), opset=opset)


def test_a_batch_size_that_a_layer_needs():
    """Weights along the batch: the file has the batch size of the net."""
    text = INPUT + ('layer { name: "s" type: "Scale" bottom: "data" top: "s" scale_param { axis: 0 num_axes: 2 } }')
    exported = float_onnx(net_of(text))
    assert exported.model.graph.input[0].type.tensor_type.shape.dim[0].dim_value == 2


@pytest.fixture
def files(tmp_path):
    prototxt = tmp_path / "net.prototxt"
    prototxt.write_text(IN_PLACE)
    net = net_of(IN_PLACE)
    net.save_weights(tmp_path / "net.caffemodel")
    return prototxt, tmp_path / "net.caffemodel", net


def test_a_file_is_written(files, tmp_path):
    prototxt, caffemodel, net = files
    assert export_onnx(prototxt, caffemodel, tmp_path / "net.onnx", opset=17) == ()
    model = onnx.load(tmp_path / "net.onnx")
    assert model.opset_import[0].version == 17
    feed(net, {"data": data()})
    net.forward()
    np.testing.assert_allclose(run(model, {"data": data()})["ip"], net.blob("ip").data, rtol=1e-4, atol=1e-5)


def test_files_that_cannot_be_read_or_written(files, tmp_path):
    prototxt, caffemodel, _ = files
    with pytest.raises(FileError, match=r"missing\.prototxt"):
        export_onnx(tmp_path / "missing.prototxt", caffemodel, tmp_path / "net.onnx")
    with pytest.raises(ArgumentError, match="path: expected the name of a file"):
        export_onnx(prototxt, caffemodel, f"{tmp_path}/")
    assert not (tmp_path / "net.onnx").exists()
