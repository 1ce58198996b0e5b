"""convert_model from a user's record, and the one-call way."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import numpy as np
import pytest
from ptq_caffe_flow import Flow, batch, cosine, golden_flow, prototxt, text_flow
from test_ptq_caffe_flow import BRANCHES, RECURRENT

import amct_caffe as amct
from amct.atomic import FileGroup
from amct.caffe import QuantConfig, quantize
from amct.caffe.model import write_model
from amct.errors import (
    ArgumentError,
    ArgumentTypeError,
    CalibrationError,
    ConfigError,
    FileError,
    ModelError,
    RecordError,
    RecordParseError,
)
from amct.record import CaffeRecord, format_record, read_caffe_record, write_record


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    monkeypatch.setenv("AMCT_LOG_LEVEL", "error")
    monkeypatch.chdir(tmp_path)


def convert(flow, record, prefix=None):
    amct.convert_model(str(flow.model), str(flow.weights), str(record), str(prefix or flow.folder / "conv" / "net"))
    return Flow(
        flow.folder / "x",
        flow.folder / "conv" / "net_deploy_model.prototxt",
        flow.folder / "conv" / "net_deploy_weights.caffemodel",
    )


def test_converting_with_a_calibrated_record_gives_the_same_models(golden, tmp_path):
    flow = golden_flow("mini_resnet", golden, tmp_path).configure()
    flow.run()
    convert(flow, flow.out("quant_param_record.txt"))
    for name in (
        "deploy_model.prototxt",
        "deploy_weights.caffemodel",
        "fake_quant_weights.caffemodel",
        "quant_param_record.txt",
    ):
        assert (tmp_path / "conv" / f"net_{name}").read_bytes() == flow.out(name).read_bytes()


CONVOLUTION = """
layer { name: "data" type: "Input" top: "x" input_param { shape { dim: 1 dim: 3 dim: 6 dim: 6 } } }
layer { name: "conv" type: "Convolution" bottom: "x" top: "y" convolution_param { num_output: 3 kernel_size: 3 } }
layer { name: "bn" type: "BatchNorm" bottom: "y" top: "y" }
layer { name: "pool" type: "Pooling" bottom: "y" top: "z" pooling_param { pool: AVE kernel_size: 2 } }
"""
OLD = """
record { key: "conv" value {
  scale_d: 0.03 offset_d: 2 scale_w: 0.011 scale_w: 0.012 scale_w: 0.013 offset_w: 0 offset_w: 0 offset_w: 0
  shift_bit: 1 shift_bit: 1 shift_bit: 1 %s } }
record { key: "pool" value { scale_w: 1.0 offset_w: 0 record_d { scale_d: 0.05 offset_d: -3 index: 0 num_bits_d: 8 } } }
"""


@pytest.mark.parametrize("skip", [False, True])
def test_older_dialect_and_skip_fusion(skip, tmp_path, caplog):
    flow = text_flow(CONVOLUTION, tmp_path)
    (tmp_path / "r.txt").write_text(OLD % ("skip_fusion: true" if skip else ""))
    with caplog.at_level(logging.INFO, "amct"):
        converted = convert(flow, tmp_path / "r.txt")
    assert "shift_bit is not used" in caplog.text
    kinds = [layer.type for layer in prototxt(converted.model).layer]
    assert ("BatchNorm" in kinds) is skip
    record = read_caffe_record(tmp_path / "conv" / "net_quant_param_record.txt")
    assert record["conv"].record_d[0].scale == np.float32(0.03)
    assert record["conv"].scale_w == tuple(np.float32([0.011, 0.012, 0.013]).astype(float))
    assert not record["pool"].scale_w
    net = flow.net(converted.model, converted.weights)
    data = batch(net, 0)
    assert cosine(net.forward(**data)["z"], flow.original().forward(**data)["z"]) > 0.99


def with_skipping(record, names):
    """A record whose entries of these layers say skip_fusion."""
    entries = {name: replace(entry, skip_fusion=name in names) for name, entry in record.items()}
    return CaffeRecord(entries)


TWO = """
layer { name: "data" type: "Input" top: "x" input_param { shape { dim: 2 dim: 3 dim: 8 dim: 8 } } }
layer { name: "first" type: "Convolution" bottom: "x" top: "a" convolution_param { num_output: 4 kernel_size: 3 } }
layer { name: "bn1" type: "BatchNorm" bottom: "a" top: "a" }
layer { name: "scale1" type: "Scale" bottom: "a" top: "a" scale_param { bias_term: true } }
layer { name: "relu" type: "ReLU" bottom: "a" top: "a" }
layer { name: "second" type: "Convolution" bottom: "a" top: "b" convolution_param { num_output: 5 kernel_size: 3 } }
layer { name: "bn2" type: "BatchNorm" bottom: "b" top: "b" }
layer { name: "fc" type: "InnerProduct" bottom: "b" top: "fc" inner_product_param { num_output: 3 } }
"""
SAME = (
    "deploy_model.prototxt",
    "deploy_weights.caffemodel",
    "fake_quant_model.prototxt",
    "fake_quant_weights.caffemodel",
)


@pytest.mark.parametrize(
    ("skipped", "standing"),
    [
        ((), set()),
        (("first",), {"bn1", "scale1"}),
        (("second",), {"bn2"}),
        (("first", "second"), {"bn1", "scale1", "bn2"}),
    ],
    ids=["all fused", "the second fused", "the first fused", "nothing fused"],
)
def test_fused_and_unfused_records(skipped, standing, tmp_path):
    """A flow that leaves some layers unfused, and its record with skip_fusion for these: the same models."""

    def change(config):
        config["skip_fusion_layers"] = list(skipped)

    flow = text_flow(TWO, tmp_path).configure(change=change)
    flow.run()
    record = with_skipping(read_caffe_record(flow.out("quant_param_record.txt")), skipped)
    write_record(record, tmp_path / "given.txt")
    converted = convert(flow, tmp_path / "given.txt")
    names = {layer.name for layer in prototxt(converted.model).layer}
    assert names & {"bn1", "scale1", "bn2"} == standing
    for name in SAME:
        assert (tmp_path / "conv" / f"net_{name}").read_bytes() == flow.out(name).read_bytes()


def test_a_model_that_the_user_has_fused(tmp_path):
    """The guide's rule: factors of fused layers go with a fused model. It has nothing to fold and gives the same."""
    flow = text_flow(TWO, tmp_path).configure()
    graph = flow.run()
    (tmp_path / "fused").mkdir()
    fused = Flow(tmp_path / "fused", tmp_path / "fused" / "net.prototxt", tmp_path / "fused" / "net.caffemodel")
    with FileGroup() as group:
        write_model(group, graph.model, fused.model, fused.weights)
    assert {layer.type for layer in prototxt(fused.model).layer} == {"Input", "Convolution", "ReLU", "InnerProduct"}
    convert(fused, flow.out("quant_param_record.txt"))
    for name in SAME:
        assert (fused.folder / "conv" / f"net_{name}").read_bytes() == flow.out(name).read_bytes()


def test_factors_of_unfused_layers_do_not_go_with_fusion(tmp_path):
    """The record of the unfused net without skip_fusion: the factors are taken for those of the fused weights."""
    flow = text_flow(TWO, tmp_path).configure(change=lambda config: config.update(do_fusion=False))
    flow.run()
    converted = convert(flow, flow.out("quant_param_record.txt"))
    assert not {"bn1", "scale1", "bn2"} & {layer.name for layer in prototxt(converted.model).layer}
    given = read_caffe_record(flow.out("quant_param_record.txt"))
    written = read_caffe_record(tmp_path / "conv" / "net_quant_param_record.txt")
    assert written["first"].scale_w == given["first"].scale_w


def test_older_dialect_equals_todays(tmp_path):
    """scale_d and offset_d directly in value are those of input 0, whatever comes with them."""
    flow = text_flow(CONVOLUTION, tmp_path)
    old = tmp_path / "old.txt"
    old.write_text(OLD % "")
    convert(flow, old)
    before = {name: (tmp_path / "conv" / f"net_{name}").read_bytes() for name in (*SAME, "quant_param_record.txt")}
    today = (
        (OLD % "")
        .replace("scale_d: 0.03 offset_d: 2", "")
        .replace("shift_bit: 1 shift_bit: 1 shift_bit: 1", "record_d { scale_d: 0.03 offset_d: 2 index: 0 }")
    )
    old.write_text(today)
    convert(flow, old)
    assert before == {name: (tmp_path / "conv" / f"net_{name}").read_bytes() for name in before}
    # the guide's sample has both forms in one entry: the one with the index counts
    old.write_text(today.replace('key: "conv" value {', 'key: "conv" value { scale_d: 0.5 offset_d: 7'))
    convert(flow, old)
    assert before == {name: (tmp_path / "conv" / f"net_{name}").read_bytes() for name in before}


def test_convert_refuses(tmp_path):
    flow = text_flow(CONVOLUTION, tmp_path)
    record = tmp_path / "r.txt"

    def refuses(text, kind, message):
        record.write_text(text)
        with pytest.raises(kind, match=message):
            convert(flow, record)
        assert not (tmp_path / "conv").exists()

    refuses((OLD % "").replace('"conv"', '"cnv"'), RecordError, 'no such layer. Did you mean "conv"')
    refuses((OLD % "").replace("scale_w: 0.013 ", ""), RecordError, "2 scale_w but 3 offset_w")
    refuses((OLD % "num_bits_w: 4"), RecordError, "num_bits_w 4 cannot be converted")
    refuses((OLD % "").replace("offset_d: -3", "offset_d: -300"), ValueError, r"offset_d.*\[-128, 127\]")
    refuses((OLD % "").replace("scale_d: 0.05 ", ""), RecordError, "Cannot find scale_d of layer 'pool'")
    refuses(
        OLD % "" + 'record { key: "bn" value { record_d { scale_d: 1 offset_d: 0 index: 0 } } }',
        RecordError,
        "fused into",
    )
    refuses((OLD % "")[:-3], RecordParseError, r"r\.txt:\d+:\d+")
    refuses(
        (OLD % "").replace("scale_d: 0.03", "scale_d: 1e-6").replace("0.011", "1e-6"),
        CalibrationError,
        'layer "conv": the bias does not fit',
    )
    with pytest.raises(ArgumentTypeError, match="convert_model: save_path must be str"):
        amct.convert_model(str(flow.model), str(flow.weights), str(record), None)
    with pytest.raises(FileError, match="scale_offset_record_file"):
        convert(flow, tmp_path / "nothing.txt")


def test_convert_has_the_shorter_list_of_types(tmp_path):
    flow = text_flow(RECURRENT % "LSTM", tmp_path).configure(batch_num=1)
    (tmp_path / "r.txt").write_text('record { key: "rec" value { record_d { scale_d: 1 offset_d: 0 index: 0 } } }')
    with pytest.raises(RecordError, match="type LSTM cannot be quantized here"):
        convert(flow, tmp_path / "r.txt")


REGIONS = """
layer { name: "in" type: "Input" top: "x" top: "rois"
  input_param { shape { dim: 2 dim: 3 dim: 8 dim: 8 } shape { dim: 5 dim: 5 } } }
layer { name: "conv" type: "Convolution" bottom: "x" top: "y" convolution_param { num_output: 3 kernel_size: 1 } }
layer { name: "roi" type: "ROIPooling" bottom: "y" bottom: "rois" top: "z"
  roi_pooling_param { pooled_h: 2 pooled_w: 2 } }
"""


def test_factors_of_regions_are_not_used(tmp_path, caplog, monkeypatch):
    """A record of the patched Caffe has factors for both bottoms of ROIPooling; rounded regions would be others."""
    monkeypatch.setenv("AMCT_LOG_LEVEL", "warning")
    flow = text_flow(REGIONS, tmp_path)
    data = "scale_d: 0.5 offset_d: 3 num_bits_d: 8"
    (tmp_path / "record.txt").write_text(
        f'record {{ key: "conv" value {{ scale_w: 0.01 offset_w: 0 record_d {{ {data} index: 0 }} }} }}\n'
        f'record {{ key: "roi" value {{ record_d {{ {data} index: 0 }} record_d {{ {data} index: 1 }} }} }}\n'
    )
    convert(flow, tmp_path / "record.txt")
    assert 'layer "roi" has factors in' in caplog.text
    assert 'stays float: its bottom "rois" holds coordinates or indices' in caplog.text
    net = prototxt(tmp_path / "conv" / "net_fake_quant_model.prototxt")
    assert [layer.quant_param.object_layer for layer in net.layer if layer.type == "Quant"] == ["conv"]
    written = json.loads((tmp_path / "conv" / "net_quant.json").read_text())
    assert "coordinates" in json.dumps(written)


def test_convert_refuses_quantized_models(golden, tmp_path):
    flow = golden_flow("legacy_v0", golden, tmp_path).configure()
    flow.run()
    for kind in ("deploy", "fake_quant"):
        again = Flow(tmp_path, *flow.result_files(kind))
        with pytest.raises(ModelError, match="quantized already"):
            convert(again, flow.record)


def test_batch_norm_without_global_statistics_is_refused(tmp_path):
    flow = text_flow(CONVOLUTION, tmp_path)
    flow.model.write_text(
        CONVOLUTION.replace(
            'top: "y" }\nlayer { name: "pool"',
            'top: "y" batch_norm_param { use_global_stats: false } }\nlayer { name: "pool"',
        )
    )
    (tmp_path / "r.txt").write_text(OLD % "")
    with pytest.raises(ModelError, match="use_global_stats"):
        convert(flow, tmp_path / "r.txt")


# ------------------------------------------------------------------ one call


def test_one_call_equals_the_flow(golden, tmp_path):
    flow = golden_flow("mini_resnet", golden, tmp_path).configure()
    flow.run()
    data = [batch(flow.original(), seed) for seed in range(2)]
    as_amct = QuantConfig(bias_correction=False)  # AMCT's functions leave biases
    model = quantize(flow.model, flow.weights, data, as_amct)
    assert format_record(model.record) == flow.out("quant_param_record.txt").read_text()
    model.save(tmp_path / "one" / "net")
    for name in ("deploy_model.prototxt", "deploy_weights.caffemodel", "fake_quant_model.prototxt"):
        assert (tmp_path / "one" / f"net_{name}").read_bytes() == flow.out(name).read_bytes()
    np.testing.assert_array_equal(model(data[0], deploy=True)["prob"], flow.result("deploy").forward(**data[0])["prob"])
    np.testing.assert_array_equal(model(data[0]["data"])["prob"], flow.result("fake_quant").forward(**data[0])["prob"])
    summary = model.summary()
    assert f"{len(model.layers)} layers quantized" in summary
    assert "with int8 activations, int8 weights" in summary
    compared = {each.layer: each for each in model.compare(data)}
    assert tuple(compared) == model.layers
    assert compared[model.layers[-1]].cosine > 0.999
    assert "conv1" in model.layers


def test_one_call_with_configs(tmp_path):
    flow = text_flow(BRANCHES, tmp_path)
    data = [batch(flow.original(), seed)["data"] for seed in range(3)]
    (tmp_path / "q.cfg").write_text('batch_num: 2 skip_layers: "fc"')
    assert "fc" not in quantize(flow.model, flow.weights, data, tmp_path / "q.cfg").layers
    flow.configure(batch_num=3)
    full = quantize(flow.model, flow.weights, iter(data), flow.config)
    assert full.record == quantize(flow.model, flow.weights, data).record
    assert quantize(flow.model, flow.weights, data, json.loads(flow.config.read_text())).record == full.record


def test_one_call_mistakes(tmp_path):
    flow = text_flow(BRANCHES, tmp_path).configure(batch_num=3)
    data = [batch(flow.original(), 0)["data"]]
    with pytest.raises(CalibrationError, match="calibration_data is empty"):
        quantize(flow.model, flow.weights, [])
    with pytest.raises(CalibrationError, match="calibration_data is empty"):
        quantize(flow.model, flow.weights, iter([]))
    with pytest.raises(CalibrationError, match="2 more batches needed for"):
        quantize(flow.model, flow.weights, data, flow.config)
    with pytest.raises(ArgumentTypeError, match="a dict, a QuantConfig or None, got int"):
        quantize(flow.model, flow.weights, data, 3)
    with pytest.raises(ArgumentError, match=r"inputs \['data'\], got \['x'\]"):
        quantize(flow.model, flow.weights, [{"x": data[0]}])
    with pytest.raises(FileError, match="weights: "):
        quantize(flow.model, tmp_path / "nothing", data)
    (tmp_path / "q.cfg").write_text("update_bn: true")
    with pytest.raises(ConfigError, match="update_bn needs two rounds"):
        quantize(flow.model, flow.weights, data, tmp_path / "q.cfg")
