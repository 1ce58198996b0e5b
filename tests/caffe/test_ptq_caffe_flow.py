"""Post-training quantization of Caffe models, the guide's flow from config to saved models."""

from __future__ import annotations

import json
import logging
import shutil

import numpy as np
import pytest
from ptq_caffe_flow import NETS, Flow, batch, cosine, forward, golden_flow, prototxt, text_flow

import amct_caffe as amct
from amct.caffe.pycaffe.proto import caffe_pb2
from amct.errors import (
    ArgumentError,
    ArgumentTypeError,
    CalibrationError,
    ConfigError,
    FileError,
    ModelError,
    RecordError,
)
from amct.record import read_caffe_record


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    monkeypatch.setenv("AMCT_LOG_LEVEL", "error")
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def resnet(golden, tmp_path_factory):
    folder = tmp_path_factory.mktemp("resnet")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AMCT_LOG_LEVEL", "error")
        patch.chdir(folder)
        flow = golden_flow("mini_resnet", golden, folder).configure()
        flow.graph = flow.run()
    return flow


# ------------------------------------------------------------------ the whole flow


@pytest.mark.parametrize("name", NETS)
def test_flow_on_golden_nets(name, golden, tmp_path):
    flow = golden_flow(name, golden, tmp_path).configure()
    flow.run()
    config = json.loads(flow.config.read_text())
    standing = {layer.name for layer in prototxt(flow.result_files("deploy")[0]).layer}
    enabled = {key for key, value in config.items() if isinstance(value, dict) and value.get("quant_enable")}
    record = read_caffe_record(flow.out("quant_param_record.txt"))
    assert set(record) == enabled & standing == enabled
    assert read_caffe_record(flow.out("quant_param_record.bin")) == record
    data = batch(flow.original(), 7)
    real, fake, deploy = (
        net.forward(**data) for net in (flow.original(), flow.result("fake_quant"), flow.result("deploy"))
    )
    assert list(real) == list(fake) == list(deploy)
    for key, value in real.items():
        # tiny nets with random weights; 8 bits leave about 1 % of noise, an ArgMax mask may flip at its borders
        assert cosine(value, fake[key]) > 0.97
        assert cosine(fake[key], deploy[key]) > 0.9999


def test_files_of_save_type(resnet, tmp_path):
    for kind, others in (("Fakequant", "deploy"), ("Deploy", "fake_quant")):
        amct.save_model(resnet.graph, kind, str(tmp_path / kind / "m"))
        names = sorted(path.name for path in (tmp_path / kind).iterdir() if not path.name.startswith("."))
        assert len(names) == 5
        assert not any(others in name for name in names)
    amct.save_model(resnet.graph, "Both", str(tmp_path / "plain") + "/")
    assert (tmp_path / "plain" / "quant_param_record.txt").is_file()


def test_calibration_model_is_fused_and_has_ifmr_before_every_quantized_input(resnet):
    net = prototxt(resnet.modified[0])
    types = {layer.type for layer in net.layer}
    assert "IFMR" in types
    assert not types & {"BatchNorm", "Scale", "Quant"}
    makers = {top: layer for layer in net.layer for top in layer.top}
    for layer in net.layer:
        if layer.name in resnet.graph.plans():
            for index, blob in enumerate(layer.bottom):
                ifmr = makers[blob]
                assert ifmr.type == "IFMR"
                assert layer.name in ifmr.ifmr_param.object_layer
                assert ifmr.ifmr_param.index == index
    modified, original = resnet.net(*resnet.modified), resnet.original()
    for name in ("conv1",):
        values = modified.params[name][0].data[0].ravel()
        scale = np.abs(values).max() / 127
        np.testing.assert_allclose(np.rint(values / scale) * scale, values, atol=1e-6 * np.abs(values).max())
    assert (
        cosine(modified.forward(**batch(original, 3))["prob"], original.forward(**batch(original, 3))["prob"]) > 0.999
    )


def test_record_factors_follow_the_formula(resnet):
    """scale_w is max|w| / 127 of the fused weight; scale and offset of data put zero on the grid."""
    record = read_caffe_record(resnet.record)
    model = resnet.graph.model
    for name, entry in record.items():
        for data in entry.record_d:
            assert -128 <= data.offset <= 127
            assert data.num_bits == 8
        if entry.scale_w:
            weight = model.weights[name][0].numpy()
            rows = weight.reshape(weight.shape[0], -1) if len(entry.scale_w) > 1 else weight.reshape(1, -1)
            expected = (np.abs(rows.astype(np.float64)).max(1) / 127).astype(np.float32)
            np.testing.assert_array_equal(np.float32(entry.scale_w), np.where(expected < 2**-23, 1, expected))
            assert entry.num_bits_w == 8
    assert record["conv1"].record_d[0].channels == 3


def test_quant_json_names_layers_of_both_nets(resnet):
    document = json.loads(resnet.out("quant.json").read_text())
    for kind in ("fake_quant", "deploy"):
        net = prototxt(resnet.result_files(kind)[0])
        names, blobs = {layer.name for layer in net.layer}, {blob for layer in net.layer for blob in layer.top}
        for name, entry in document["layers"].items():
            assert name in names
            assert set(entry["files"][kind].get("inserted", [])) <= names
            assert set(entry["output"]) <= blobs
    folded = [name for entry in document["layers"].values() for name in entry["original_layers"][1:]]
    original = prototxt(resnet.model)
    assert {layer.type for layer in original.layer if layer.name in folded} == {"BatchNorm", "Scale"}


def test_the_guides_skip_layers(golden, tmp_path):
    """Lines 639 and 651 of the guide: an argument of create_quant_config, which stands for skip_layers of a .cfg."""
    flow = golden_flow("legacy_v0", golden, tmp_path)
    plain = json.loads(flow.configure().config.read_text())
    flow.configure(skip_layers=[])
    assert json.loads(flow.config.read_text()) == plain
    flow.configure(skip_layers=["conv1"])
    by_argument = flow.config.read_text()
    assert json.loads(by_argument)["conv1"]["quant_enable"] is False
    flow.configure(text='batch_num: 2 skip_layers: "conv1"')
    assert flow.config.read_text() == by_argument
    with pytest.raises(ConfigError, match='skip_layers: the layer "conv" is unknown'):
        flow.configure(skip_layers=["conv"])
    with pytest.raises(ArgumentTypeError, match="skip_layers"):
        flow.configure(skip_layers="conv1")


def test_the_log_files_of_layers(golden, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "amct_log"
    flow = golden_flow("legacy_v0", golden, tmp_path).configure()
    sizes = {}
    for level in ("DEBUG", "INFO", "error"):
        monkeypatch.setenv("AMCT_LOG_FILE_LEVEL", level)
        flow.run()
        text = (folder / "amct_caffe_conv1.log").read_text() if level != "error" else ""
        sizes[level] = sum(path.stat().st_size for path in folder.glob("amct_caffe_*"))
        if text:
            entry = read_caffe_record(flow.record)["conv1"]
            (data,), weights = entry.record_d, entry.scale_w
            assert f"INFO - input 0: 8 bits, scale {data.scale:.9g}, offset {data.offset}, range" in text
            scales = ", ".join(f"{each:.9g}" for each in weights)
            assert (f"DEBUG - weight 0: scales {scales}\n" in text) == (level == "DEBUG")
            assert {path.name for path in folder.glob("amct_caffe_*")} == {
                f"amct_caffe_{name}.log" for name in read_caffe_record(flow.record)
            }
            for path in folder.glob("amct_caffe_*"):
                path.unlink()
    assert sizes["DEBUG"] > sizes["INFO"] > sizes["error"] == 0


def test_log_lines_of_the_guide(golden, tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("AMCT_LOG_FILE_LEVEL", "info")
    flow = golden_flow("legacy_v0", golden, tmp_path).configure(batch_num=2)
    flow.prepare()
    net = flow.net(*flow.modified)
    with caplog.at_level(logging.INFO, "amct"):
        forward(net, 1)
        assert "calibration: 1/2 batches" in caplog.text
        assert "conv1 (input 0)" not in caplog.text  # one line for all layers
        assert "calibration success" not in caplog.text
        forward(net, 1, 1)
        assert "Do layer conv1 activation calibration success!" in caplog.text
        count = len(caplog.records)
        forward(net, 1, 2)
        assert len(caplog.records) == count
    assert "Do layer conv1 activation calibration success!" in (tmp_path / "amct_log" / "amct_caffe.log").read_text()


def test_a_weighted_layer_that_stays_float_is_logged_with_its_reason(golden, tmp_path, caplog):
    flow = golden_flow("legacy_v0", golden, tmp_path).configure()
    config = json.loads(flow.config.read_text())
    config["conv1"]["quant_enable"] = False
    flow.config.write_text(json.dumps(config))
    with caplog.at_level(logging.INFO, "amct"):
        flow.prepare()
    assert 'left as it is: "conv1": switched off' in caplog.text


def test_same_calibration_twice_gives_identical_files(golden, tmp_path):
    flow = golden_flow("mini_resnet", golden, tmp_path).configure()
    contents = []
    for _ in range(2):
        flow.run()
        files = [flow.record, *flow.modified, *sorted(path for path in flow.prefix.parent.iterdir() if path.is_file())]
        contents.append({path.name: path.read_bytes() for path in files if not path.name.startswith(".")})
    assert len(contents[0]) == 10
    assert contents[0] == contents[1]


def test_two_models_in_turn_do_not_disturb_each_other(golden, tmp_path, resnet):
    flows = []
    for name in ("mini_resnet", "mini_inception"):
        (tmp_path / name).mkdir()
        flows.append(golden_flow(name, golden, tmp_path / name).configure())
    graphs = [flow.prepare() for flow in flows]
    nets = [flow.net(*flow.modified) for flow in flows]
    for seed in range(2):
        for net in nets:
            forward(net, 1, seed)
    for flow, graph in zip(flows, graphs, strict=True):
        amct.save_model(graph, "Both", str(flow.prefix))
    assert flows[0].out("quant_param_record.txt").read_bytes() == resnet.out("quant_param_record.txt").read_bytes()


# ------------------------------------------------------------------ settings

BRANCHES = """
name: "branches"
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 2 dim: 3 dim: 9 dim: 9 } } }
layer { name: "left" type: "Convolution" bottom: "data" top: "left" convolution_param { num_output: 4 kernel_size: 3 } }
layer { name: "right" type: "Convolution" bottom: "data" top: "right"
  convolution_param { num_output: 4 kernel_size: 3 } }
layer { name: "relu" type: "ReLU" bottom: "right" top: "right" }
layer { name: "sum" type: "Eltwise" bottom: "left" bottom: "right" top: "sum" }
layer { name: "both" type: "Concat" bottom: "sum" bottom: "left" top: "both" }
layer { name: "max" type: "Pooling" bottom: "both" top: "max" pooling_param { pool: MAX kernel_size: 2 stride: 2 } }
layer { name: "cut" type: "Slice" bottom: "max" top: "a" top: "b" slice_param { slice_point: 3 } }
layer { name: "fc" type: "InnerProduct" bottom: "a" top: "fc" inner_product_param { num_output: 5 transpose: true } }
layer { name: "up" type: "Deconvolution" bottom: "b" top: "up"
  convolution_param { num_output: 6 kernel_size: 3 stride: 2 pad: 1 group: 1 } }
"""


def test_several_bottoms_have_factors_by_index(tmp_path):
    flow = text_flow(BRANCHES, tmp_path).configure()
    flow.run()
    record = read_caffe_record(flow.out("quant_param_record.txt"))
    assert [data.index for data in record["sum"].record_d] == [0, 1]
    left, right = (record["sum"].input(index) for index in (0, 1))
    assert right.offset == -128  # behind ReLU there are no negative values
    assert left.offset != -128
    layers = {layer.name: layer for layer in prototxt(flow.modified[0]).layer}
    # one IFMR for both convolutions that read "data"
    assert list(layers["left_ifmr"].ifmr_param.object_layer) == ["left", "right"]
    assert record["left"].record_d == record["right"].record_d


@pytest.mark.parametrize("bits", [9, 12, 16])
def test_wider_data_is_nearer_to_float(bits, tmp_path):
    def widen(config):
        for value in config.values():
            if isinstance(value, dict) and "activation_quant_params" in value:
                blocks = value["activation_quant_params"]
                for block in blocks if isinstance(blocks, list) else [blocks]:
                    block["num_bits"] = bits

    flow = text_flow(BRANCHES, tmp_path).configure(change=widen)
    flow.run()
    record = read_caffe_record(flow.out("quant_param_record.txt"))
    assert {data.num_bits for entry in record.values() for data in entry.record_d} == {bits}
    deploy = flow.result("deploy")
    data = batch(deploy, 0)
    result, real = deploy.forward(**data), flow.original().forward(**data)
    integers = deploy.blobs["left_quant"].data
    assert np.abs(integers).max() <= 2 ** (bits - 1)
    assert np.abs(integers).max() > 2 ** (bits - 2)
    for key in real:
        assert cosine(real[key], result[key]) > 0.9995


def test_without_offset(tmp_path):
    flow = text_flow(BRANCHES, tmp_path).configure(activation_offset=False)
    flow.run()
    record = read_caffe_record(flow.out("quant_param_record.txt"))
    assert {data.offset for entry in record.values() for data in entry.record_d} == {0}
    largest = np.abs(np.concatenate([batch(flow.original(), seed)["data"].ravel() for seed in (0, 1)])).max()
    assert 0.7 <= record["left"].record_d[0].scale / (largest / 127) <= 1.3


def test_with_offset_per_layer(tmp_path):
    def change(config):
        config["left"]["activation_quant_params"]["with_offset"] = False

    flow = text_flow(BRANCHES, tmp_path).configure(change=change)
    flow.run()
    record = read_caffe_record(flow.out("quant_param_record.txt"))
    assert record["left"].record_d[0].offset == 0
    assert record["right"].record_d[0].offset != 0


def test_layers_left_out_of_the_config_stay_float(tmp_path):
    def change(config):
        del config["left"]
        config["fc"]["quant_enable"] = False

    flow = text_flow(BRANCHES, tmp_path).configure(change=change)
    flow.run()
    names = {layer.name for layer in prototxt(flow.result_files("deploy")[0]).layer}
    assert "right_quant" in names
    assert not names & {"left_quant", "fc_quant"}
    np.testing.assert_array_equal(flow.result("deploy").params["left"][0].data, flow.original().params["left"][0].data)


def test_default_off_types_can_be_switched_on(tmp_path):
    def change(config):
        assert config["relu"]["quant_enable"] is False
        config["relu"]["quant_enable"] = True

    flow = text_flow(BRANCHES, tmp_path).configure(change=change)
    flow.run()
    deploy = flow.result("deploy")
    data = batch(deploy, 0)
    real, fake, result = (
        flow.original().forward(**data),
        flow.result("fake_quant").forward(**data),
        deploy.forward(**data),
    )
    assert "relu_quant" in deploy.blobs
    for key in real:
        assert cosine(fake[key], result[key]) > 0.99999
        assert cosine(real[key], result[key]) > 0.995


RECURRENT = """
layer { name: "x" type: "Input" top: "x" input_param { shape { dim: 6 dim: 2 dim: 5 } } }
layer { name: "cont" type: "Input" top: "cont" input_param { shape { dim: 6 dim: 2 } } }
layer { name: "rec" type: "%s" bottom: "x" bottom: "cont" top: "h" recurrent_param { num_output: 7 } }
layer { name: "fc" type: "InnerProduct" bottom: "h" top: "fc" inner_product_param { num_output: 3 axis: 2 } }
"""


@pytest.mark.parametrize("kind", ["LSTM", "RNN", "GRU"])
def test_recurrent_layers(kind, tmp_path):
    flow = text_flow(RECURRENT % kind, tmp_path).configure(batch_num=1)
    graph = flow.prepare()
    random = np.random.default_rng(0)
    data = {"x": random.standard_normal((6, 2, 5)).astype(np.float32), "cont": np.ones((6, 2), np.float32)}
    data["cont"][0] = 0
    flow.net(*flow.modified).forward(**data)
    amct.save_model(graph, "Both", str(flow.prefix))
    entry = read_caffe_record(flow.out("quant_param_record.txt"))["rec"]
    assert len(entry.scale_w) == {"LSTM": 2, "RNN": 3, "GRU": 2}[kind]
    real, fake, deploy = (
        net.forward(**data)["fc"] for net in (flow.original(), flow.result("fake_quant"), flow.result("deploy"))
    )
    assert cosine(real, fake) > 0.998
    np.testing.assert_allclose(deploy, fake, atol=1e-2 * np.abs(fake).max())
    stored = caffe_pb2.NetParameter()
    stored.ParseFromString(flow.result_files("deploy")[1].read_bytes())
    blobs = next(layer.blobs for layer in stored.layer if layer.name == "rec")
    assert all(len(blob.data) == 0 and (blob.int8_data or blob.int32_data) for blob in blobs)


# ------------------------------------------------------------------ mistakes


def test_save_before_calibration_says_what_is_missing(golden, tmp_path):
    flow = golden_flow("legacy_v0", golden, tmp_path).configure(batch_num=3)
    graph = flow.prepare()
    with pytest.raises(RecordError, match=r"Cannot find scale_d of layer 'conv1' in record file.*seen 0 of 3"):
        amct.save_model(graph, "Both", str(flow.prefix))
    forward(flow.net(*flow.modified), 2)
    with pytest.raises(RuntimeError, match=r"seen 2 of 3 batches; run 1 more"):
        amct.save_model(graph, "Both", str(flow.prefix))
    assert not flow.prefix.parent.exists()


def test_nan_names_layer_index_and_range(tmp_path):
    flow = text_flow(BRANCHES, tmp_path).configure()
    flow.prepare()
    net = flow.net(*flow.modified)
    data = batch(net, 0)
    data["data"][0, 0, 0, 0] = np.nan
    with pytest.raises(
        CalibrationError, match=r'layer "left", input 0, batch 1: IfmrQuantWithOffset scale is illegal.*1 NaN'
    ):
        net.forward(**data)
    data["data"][0, 0, 0, 0] = np.inf
    with pytest.raises(CalibrationError, match=r"scale is illegal.*1 infinite.*minimum"):
        flow.net(*flow.modified).forward(**data)


def test_range_too_large(tmp_path):
    flow = text_flow(BRANCHES, tmp_path).configure(batch_num=1)
    flow.prepare()
    net = flow.net(*flow.modified)
    with pytest.raises(CalibrationError, match=r"IfmrQuantWithOffset scale is illegal.*too large"):
        net.forward(data=batch(net, 0)["data"] * np.float32(1e12))


def test_zero_data_warns(tmp_path, caplog):
    flow = text_flow(BRANCHES, tmp_path).configure(batch_num=1)
    graph = flow.prepare()
    net = flow.net(*flow.modified)
    with caplog.at_level(logging.WARNING, "amct"):
        net.forward(data=batch(net, 0)["data"] * 0)
    told = 'layer "left", input 0, layer "right", input 0: all values are (as good as) zero, so the scale is 1'
    assert told in caplog.text
    amct.save_model(graph, "Deploy", str(flow.prefix))


def test_calls_out_of_order(golden, tmp_path):
    flow = golden_flow("legacy_v0", golden, tmp_path).configure()
    graph = flow.init()
    with pytest.raises(CalibrationError, match="activation_quantize_model: call weights_quantize_model"):
        amct.activation_quantize_model(graph, *map(str, flow.modified))
    with pytest.raises(CalibrationError, match="save_model: call activation_quantize_model"):
        amct.save_model(graph, "Both", str(flow.prefix))
    amct.weights_quantize_model(graph, *map(str, flow.modified))
    with pytest.raises(CalibrationError, match="save_model: call activation_quantize_model"):
        amct.save_model(graph, "Both", str(flow.prefix))


def test_wrong_arguments(golden, tmp_path):
    flow = golden_flow("legacy_v0", golden, tmp_path).configure()
    with pytest.raises(ArgumentTypeError, match="create_quant_config: batch_num must be int, got str"):
        flow.configure(batch_num="2")
    with pytest.raises(ConfigError, match="batch_num"):
        flow.configure(batch_num=0)
    with pytest.raises(ArgumentTypeError, match="activation_offset must be bool, got int"):
        flow.configure(activation_offset=1)
    with pytest.raises(ArgumentTypeError, match="init: model_file must be str"):
        amct.init(str(flow.config), 3, str(flow.weights), str(flow.record))
    with pytest.raises(FileError, match=r'weights_file: ".*nothing.caffemodel" does not exist'):
        amct.init(str(flow.config), str(flow.model), str(tmp_path / "nothing.caffemodel"), str(flow.record))
    with pytest.raises(FileError, match=r"scale_offset_record_file: .* is a folder"):
        amct.init(str(flow.config), str(flow.model), str(flow.weights), str(tmp_path))
    with pytest.raises(ArgumentTypeError, match="weights_quantize_model: graph must be what init returned, got str"):
        amct.weights_quantize_model("graph", *map(str, flow.modified))
    with pytest.raises(ArgumentTypeError, match="modified_model_file must be str"):
        amct.weights_quantize_model(flow.init(), None, None)
    with pytest.raises(ArgumentError, match="modified_model_file: expected the name of a file"):
        amct.weights_quantize_model(flow.init(), "folder/", "w")
    graph = flow.prepare()
    with pytest.raises(ArgumentError, match="save_type must be Fakequant, Deploy, Both, got 'both'"):
        amct.save_model(graph, "both", str(flow.prefix))
    with pytest.raises(ArgumentTypeError, match="save_path must be str"):
        amct.save_model(graph, "Both", 3)
    forward(flow.net(*flow.modified), 2)
    with pytest.raises(ArgumentError, match="save_path"):
        amct.save_model(graph, "Both", "")


def test_unwritable_folder(golden, tmp_path):
    """Nobody, not even root, can make a file or a folder there."""
    flow = golden_flow("legacy_v0", golden, tmp_path).configure()
    closed = "/proc/closed"
    with pytest.raises(FileError, match=closed):
        amct.weights_quantize_model(flow.init(), f"{closed}/m", f"{closed}/w")
    graph = flow.prepare()
    forward(flow.net(*flow.modified), 2)
    with pytest.raises(FileError, match=closed):
        amct.save_model(graph, "Both", f"{closed}/net")


def test_unknown_layer_in_config(tmp_path):
    def change(config):
        config["lefft"] = config.pop("left")

    with pytest.raises(ConfigError, match=r'lefft.*Did you mean "left"'):
        text_flow(BRANCHES, tmp_path).configure(change=change).init()


def test_inner_product_per_channel_is_refused(tmp_path):
    def change(config):
        config["fc"]["weight_quant_params"]["channel_wise"] = True

    with pytest.raises(ConfigError, match='layer "fc": channel_wise must be false'):
        text_flow(BRANCHES, tmp_path).configure(change=change).init()


NORMALIZED = """
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 2 dim: 3 dim: 6 dim: 6 } } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv" convolution_param { num_output: 4 kernel_size: 3 } }
layer { name: "bn" type: "BatchNorm" bottom: "conv" top: "conv" batch_norm_param { use_global_stats: %s } }
"""


def test_batch_norm_without_global_statistics(tmp_path):
    flow = text_flow(NORMALIZED % "true", tmp_path).configure()
    flow.model.write_text(NORMALIZED % "false")
    with pytest.raises(ModelError, match=r'layer "bn" .*use_global_stats: false'):
        flow.init()


def test_record_of_another_model(golden, tmp_path, resnet):
    flow = golden_flow("legacy_v0", golden, tmp_path).configure()
    graph = flow.prepare()
    forward(flow.net(*flow.modified), 2)
    shutil.copy(resnet.record, flow.record)
    with pytest.raises(RecordError, match="the model has no such layer"):
        amct.save_model(graph, "Both", str(flow.prefix))


def test_weights_of_another_model(golden, tmp_path):
    flow = golden_flow("legacy_v0", golden, tmp_path)
    flow.weights = golden_flow("mini_caffenet", golden, tmp_path).weights
    with pytest.raises(ModelError, match="Do model and weights belong together"):
        flow.configure()


def test_quantized_models_are_refused(resnet, tmp_path):
    for kind in ("fake_quant", "deploy"):
        flow = Flow(tmp_path, *resnet.result_files(kind))
        with pytest.raises(ModelError, match="quantized already"):
            flow.configure()
    flow = Flow(tmp_path, resnet.model, resnet.result_files("deploy")[1])
    with pytest.raises(ModelError, match="holds int8 integers: this model is quantized already"):
        flow.configure()


def test_bias_that_does_not_fit_raises_its_channels_scale(tmp_path, caplog):
    flow = text_flow(BRANCHES, tmp_path)
    net = flow.original()
    net.params["left"][0].data[1] *= 1e-3
    net.params["left"][1].data[1] = 1000.0
    net.save(str(flow.weights))
    flow.configure()
    with caplog.at_level(logging.WARNING, "amct"):
        flow.run()
    assert 'layer "left": the bias does not fit int32; the weight scale of 1 channel(s) is raised: 1' in caplog.text
    before, after = (
        read_caffe_record(flow.record)["left"],
        read_caffe_record(flow.out("quant_param_record.txt"))["left"],
    )
    changed = [a != b for a, b in zip(before.scale_w, after.scale_w, strict=True)]
    assert changed == [False, True, False, False]
    assert 1000.0 / (after.scale_w[1] * after.record_d[0].scale) <= 2**31 - 1
    data = batch(net, 9)
    deploy = flow.result("deploy")
    deploy.forward(**data)
    np.testing.assert_allclose(deploy.blobs["left"].data[:, 1], 1000.0, rtol=1e-3)


def test_wide_sums_are_reported(tmp_path, caplog):
    text = """
    layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 1 dim: 600 } } }
    layer { name: "fc" type: "InnerProduct" bottom: "data" top: "fc" inner_product_param { num_output: 2 } }
    """

    def change(config):
        config["fc"]["activation_quant_params"]["num_bits"] = 16

    flow = text_flow(text, tmp_path)
    net = flow.original()
    net.params["fc"][0].data[...] = 1.0
    net.save(str(flow.weights))
    with caplog.at_level(logging.WARNING, "amct"):
        flow.configure(change=change).run()
    assert 'layer "fc": with 16-bit data its sums could leave int32' in caplog.text
    deploy = flow.result("deploy")
    ones = {"data": np.full((1, 600), 9.0, np.float32)}
    assert np.abs(deploy.forward(**ones)["fc"]).max() > 0
    sums = deploy.layers[list(deploy._layer_names).index("fc")].top_blobs[0].tensor
    assert not sums.is_floating_point()


def test_names_of_the_package():
    import hotwheels.amct_caffe
    from amct_caffe import amct as sample

    names = {"set_gpu_mode", "set_cpu_mode", "uninplace_model", "create_quant_config", "init", "weights_quantize_model",
             "activation_quantize_model", "save_model", "convert_model"}  # fmt: skip
    for module in (amct, sample, hotwheels.amct_caffe):
        assert names <= set(dir(module))
    amct.set_cpu_mode()


def test_layers_in_place_on_an_input_leave_its_name(tmp_path):
    """A script fills inputs by name, so the calibration model and the results must have the same ones."""
    text = """
    layer { name: "in" type: "Input" top: "data" input_param { shape { dim: 1 dim: 2 dim: 5 dim: 5 } } }
    layer { name: "norm" type: "Scale" bottom: "data" top: "data" }
    layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
      convolution_param { num_output: 3 kernel_size: 3 } }
    layer { name: "relu" type: "ReLU" bottom: "conv" top: "conv" }
    """
    flow = text_flow(text, tmp_path).configure()
    flow.run()
    data = batch(flow.original(), 0)
    for net in (flow.net(*flow.modified), flow.result("fake_quant"), flow.result("deploy")):
        assert net.inputs == ["data"]
        assert cosine(net.forward(**data)["conv"], flow.original().forward(**data)["conv"]) > 0.999
