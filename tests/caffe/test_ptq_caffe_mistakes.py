"""What a user sees who makes a mistake: the guide's FAQ and its rules, entry by entry; nothing half-written stays.

The proto merger's four mistakes of the FAQ are in ``test_caffe_proto_merge.py``; installing Caffe, Tkinter and
Matplotlib are no matter here, since none of them is needed.
"""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest
from ptq_caffe_flow import Flow, batch, forward, text_flow

import amct_caffe as amct
from amct.caffe import pycaffe as caffe
from amct.caffe.engine.layers import ifmr
from amct.caffe.engine.layers.ifmr import check_named_record
from amct.errors import (
    ArgumentError,
    ArgumentTypeError,
    CalibrationError,
    ConfigError,
    FileError,
    ModelError,
    ParseError,
    RecordError,
    RecordParseError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

NET = """
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 2 dim: 3 dim: 8 dim: 8 } } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv" convolution_param { num_output: 4 kernel_size: 3 } }
layer { name: "bn" type: "BatchNorm" bottom: "conv" top: "conv" batch_norm_param { use_global_stats: true } }
layer { name: "sum" type: "Eltwise" bottom: "conv" bottom: "conv" top: "sum" }
layer { name: "pool" type: "Pooling" bottom: "sum" top: "pool" pooling_param { pool: AVE kernel_size: 2 stride: 2 } }
layer { name: "fc" type: "InnerProduct" bottom: "pool" top: "fc" inner_product_param { num_output: 5 } }
"""
RECORD = """
record { key: "conv" value {
  scale_w: 0.01 scale_w: 0.01 scale_w: 0.01 scale_w: 0.01 offset_w: 0 offset_w: 0 offset_w: 0 offset_w: 0
  record_d { scale_d: 0.03 offset_d: -3 index: 0 } } }
record { key: "pool" value { record_d { scale_d: 0.05 offset_d: -128 index: 0 } } }
record { key: "fc" value { scale_w: 0.006 offset_w: 0 record_d { scale_d: 0.03 offset_d: -128 index: 0 } } }
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The files of the net, made once."""
    folder = tmp_path_factory.mktemp("net")
    text_flow(NET, folder)
    return folder


@pytest.fixture
def flow(made, tmp_path, monkeypatch):
    monkeypatch.setenv("AMCT_LOG_LEVEL", "error")
    monkeypatch.chdir(tmp_path)
    for name in ("net.prototxt", "net.caffemodel"):
        shutil.copy(made / name, tmp_path / name)
    return Flow(tmp_path, tmp_path / "net.prototxt", tmp_path / "net.caffemodel")


@dataclass(frozen=True)
class Mistake:
    """One entry: what the user does, and what is then said.

    ``prepare`` runs before (it may succeed in writing files), ``do`` must fail and write nothing.
    """

    name: str
    do: Callable
    error: type[Exception]
    says: str
    prepare: Callable | None = None

    def __str__(self):
        return self.name


def config(change):
    """A generated config, changed by hand."""
    return lambda flow: flow.configure(change=change)


def setting(layer, value, *keys):
    def change(content):
        place = content[layer]
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value

    return change


def without(text, instead=""):
    def write(flow):
        flow.configure()
        flow.model.write_text(flow.model.read_text().replace(text, instead))

    return write


def from_cfg(text):
    """Making a config from this simple one."""
    return lambda flow, _: flow.configure(text=text)


def override(kind, name, block):
    """A simple config that overrides one layer or one type."""
    fields = {"layer": ("override_layer_configs", "layer_name"), "type": ("override_layer_types", "layer_type")}[kind]
    return from_cfg(f'{fields[0]} {{ {fields[1]}: "{name}" calibration_config {{ {block} }} }}')


def init(flow, _):
    flow.init()


def configure(flow, _):
    flow.configure()


# ------------------------------------------------------------------ files, folders, types of arguments

CLOSED = "/proc/closed/file"  # nobody, not even root, can make a file or a folder there
FUNCTIONS = {
    "create_quant_config": (
        "config_file",
        "model_file",
        "weights_file",
        "batch_num",
        "activation_offset",
        "config_defination",
    ),
    "init": ("config_file", "model_file", "weights_file", "scale_offset_record_file"),
    "convert_model": ("model_file", "weights_file", "scale_offset_record_file", "save_path"),
    "uninplace_model": ("model_file", "uninplaced_model_file"),
}
OUTPUTS = ("uninplaced_model_file", "save_path")


def call(name, flow, **changed):
    """Call one of the functions on files with right arguments, but for those given."""
    (flow.folder / "quant.cfg").write_text("batch_num: 1")
    (flow.folder / "given.txt").write_text(RECORD)
    arguments = {
        "model_file": str(flow.model),
        "weights_file": str(flow.weights),
        "config_file": str(flow.config),
        "scale_offset_record_file": str(flow.folder / "given.txt" if name == "convert_model" else flow.record),
        "save_path": str(flow.prefix),
        "uninplaced_model_file": str(flow.folder / "out" / "plain.prototxt"),
        "batch_num": 1,
        "activation_offset": True,
        "config_defination": str(flow.folder / "quant.cfg"),
    }
    chosen = {key: arguments[key] for key in FUNCTIONS[name]} | changed
    return getattr(amct, name)(**chosen)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_argument_of_each_function(name, flow):
    """A wrong type, a missing file, a folder, a folder that cannot be written: each names function or argument."""
    flow.configure()
    before = contents(flow)
    for argument in FUNCTIONS[name]:
        wrong = None if argument != "config_defination" else 3
        with pytest.raises(ArgumentTypeError, match=f"{name}: {argument} must be .*, got {type(wrong).__name__}"):
            call(name, flow, **{argument: wrong})
        if argument in ("batch_num", "activation_offset"):
            continue
        is_output = (
            argument in OUTPUTS
            or (name, argument) == ("create_quant_config", "config_file")
            or (name, argument) == ("init", "scale_offset_record_file")
        )
        if is_output:
            with pytest.raises(FileError, match="/proc/closed"):
                call(name, flow, **{argument: CLOSED})
            with pytest.raises((ArgumentError, FileError), match=argument):
                call(name, flow, **{argument: ""})
        else:
            with pytest.raises(FileError, match=rf"{argument}.*nothing.*does not exist|.*nothing.*No such file"):
                call(name, flow, **{argument: str(flow.folder / "nothing")})
            with pytest.raises(FileError, match=r"folder|directory"):
                call(name, flow, **{argument: str(flow.folder)})
    assert set(contents(flow)) - set(before) <= {"quant.cfg", "given.txt"}


def contents(flow):
    ignored = ("amct_log",)
    return {
        str(path.relative_to(flow.folder)): path.read_bytes()
        for path in sorted(flow.folder.rglob("*"))
        if path.is_file() and path.relative_to(flow.folder).parts[0] not in ignored and path.suffix != ".lock"
    }


# ------------------------------------------------------------------ the table


def calibrate(batches, **options):
    """Everything up to the forwards; hands on the graph."""

    def prepare(flow):
        flow.configure(batch_num=2, **options)
        graph = flow.prepare()
        if batches:
            forward(flow.net(*flow.modified), batches)
        return graph

    return prepare


def save(flow, graph):
    amct.save_model(graph, "Both", str(flow.prefix))


def feed(change):
    """Data that cannot be calibrated."""

    def do(flow, graph):
        del graph
        net = flow.net(*flow.modified)
        data = batch(net, 0)
        data["data"][...] = change(data["data"])
        forward_twice(net, data)

    return do


def forward_twice(net, data):
    net.forward(**data)
    net.forward(**data)


def spoiled(place, value):
    def change(x):
        x.flat[place] = value
        return x

    return change


def wrong_weights(flow):
    net = flow.original()
    net.params["conv"][0].data[2, 0, 0, 0] = np.nan
    net.save(str(flow.weights))
    return only_init(flow)


def record(old, new, count=-1):
    """Converting with the record above, in which something is replaced."""
    assert old in RECORD
    return convert(RECORD.replace(old, new, count))


def convert(text):
    def do(flow, _):
        (flow.folder / "given.txt").write_text(text)
        amct.convert_model(str(flow.model), str(flow.weights), str(flow.folder / "given.txt"), str(flow.prefix))

    return do


def quantized(kind):
    def prepare(flow):
        calibrate(2)(flow)
        amct.save_model(calibrate(2)(flow), "Both", str(flow.folder / "done" / "net"))
        flow.model = flow.folder / "done" / f"net_{kind}_model.prototxt"
        flow.weights = flow.folder / "done" / f"net_{kind}_weights.caffemodel"

    return prepare


def calibration_model_again(flow):
    calibrate(0)(flow)
    flow.model, flow.weights = flow.modified


def integers_as_weights(flow):
    model = flow.model
    quantized("deploy")(flow)
    flow.model = model


def record_of_another_model(flow):
    graph = calibrate(2)(flow)
    flow.record.write_text(RECORD.replace('"conv"', '"convolution"'))
    return graph


def config_of_another_model(flow):
    other = NET.replace('"conv"', '"c"').replace('"fc"', '"f"')
    (flow.folder / "other").mkdir()
    text_flow(other, flow.folder / "other").configure()
    shutil.copy(flow.folder / "other" / "config.json", flow.config)


def write_config(text):
    def prepare(flow):
        flow.configure()
        flow.config.write_text(text(flow.config.read_text()))

    return prepare


def only_init(flow):
    flow.configure()
    return flow.init()


def only_weights(flow):
    graph = only_init(flow)
    amct.weights_quantize_model(graph, *map(str, flow.modified))
    return graph


def activation(flow, graph):
    amct.activation_quantize_model(graph, *map(str, flow.modified))


ACTIVATION, WEIGHT = "activation_quant_params", "weight_quant_params"
GUIDE_RECORD = """record {
    key: "conv"
    value: {
        scale_d: 0.01424
        offset_d: -128
        scale_w: 0.43213
        offset_w: 0
        num_bits_w: 8        record_d {
          scale_d: 1.554879
          offset_d: -49
          index: 0
          num_bits_d: 8
        }
} record {
  key: "pool"
  value {
    record_d { scale_d: 0.05 offset_d: -128 index: 0 }
  }
}
"""
MISTAKES = [
    # FAQ: Cannot find scale_d of layer '**' in record file
    Mistake(
        "save without any forward",
        save,
        RecordError,
        r"Cannot find scale_d of layer 'conv' in record file.*seen 0 of 2",
        calibrate(0),
    ),
    Mistake(
        "save after too few batches",
        save,
        RecordError,
        r"Cannot find scale_d of layer 'conv' in record file.*seen 1 of 2 batches; run 1 more",
        calibrate(1),
    ),
    Mistake("the same, for scripts that catch RuntimeError", save, RuntimeError, r"Cannot find scale_d", calibrate(1)),
    Mistake(
        "inference itself fails",
        lambda flow, _: flow.net(*flow.modified).forward(data=np.zeros((2, 4, 8, 8))),
        Exception,
        r"data|channels|shape",
        calibrate(0),
    ),
    Mistake(
        "no calibration model",
        lambda flow, _: flow.net(flow.folder / "nothing.prototxt", flow.modified[1]),
        FileError,
        "nothing.prototxt",
        calibrate(0),
    ),
    # FAQ: IfmrQuantWithOffset scale is illegal
    Mistake(
        "data with NaN",
        feed(spoiled(5, np.nan)),
        CalibrationError,
        r'layer "conv", input 0, batch 1: IfmrQuantWithOffset scale is illegal: .*1 NaN',
        calibrate(0),
    ),
    Mistake(
        "data with +inf",
        feed(spoiled(5, np.inf)),
        CalibrationError,
        r'layer "conv", input 0, batch 1: IfmrQuantWithOffset scale is illegal: .*1 infinite',
        calibrate(0),
    ),
    Mistake(
        "data with -inf",
        feed(spoiled(5, -np.inf)),
        CalibrationError,
        r"IfmrQuantWithOffset scale is illegal: .*1 infinite.*minimum",
        calibrate(0),
    ),
    Mistake(
        "range above 255 / FLT_EPSILON",
        feed(lambda x: x * np.float32(2e9)),
        CalibrationError,
        r'layer "conv", input 0.*IfmrQuantWithOffset scale is illegal: .*too large',
        calibrate(0),
    ),
    Mistake(
        "the same without offset",
        feed(lambda x: x * np.float32(2e9)),
        CalibrationError,
        r"IfmrQuantWithoutOffset scale is illegal: .*too large",
        calibrate(0, activation_offset=False),
    ),
    # numbers
    Mistake(
        "NaN among the weights",
        lambda flow, graph: amct.weights_quantize_model(graph, *map(str, flow.modified)),
        (CalibrationError, ModelError),
        r'layer "conv".*(NaN|finite)',
        wrong_weights,
    ),
    Mistake(
        "7-bit data",
        init,
        ConfigError,
        r"conv.activation_quant_params: activations can have 8 to 16 bits, got 7",
        config(setting("conv", 7, ACTIVATION, "num_bits")),
    ),
    Mistake(
        "17-bit data", init, ConfigError, r"8 to 16 bits, got 17", config(setting("conv", 17, ACTIVATION, "num_bits"))
    ),
    Mistake(
        "data of one input of two with 20 bits",
        init,
        ConfigError,
        r"sum.activation_quant_params.1.: .* 8 to 16 bits, got 20",
        config(lambda content: content["sum"][ACTIVATION][1].update(num_bits=20)),
    ),
    Mistake(
        "16-bit weights",
        init,
        ConfigError,
        r"conv.weight_quant_params: arq_quantize gives weights 8 bits, got 16",
        config(setting("conv", 16, WEIGHT, "num_bits")),
    ),
    Mistake(
        "InnerProduct channel by channel, its layer",
        init,
        ConfigError,
        r'layer "fc": channel_wise must be false',
        config(setting("fc", True, WEIGHT, "channel_wise")),
    ),
    Mistake(
        "InnerProduct channel by channel, by name in the cfg",
        override("layer", "fc", "arq_quantize { channel_wise: true }"),
        ConfigError,
        r"InnerProduct|fc.*channel_wise",
    ),
    Mistake(
        "InnerProduct channel by channel, by type in the cfg",
        override("type", "InnerProduct", "arq_quantize { channel_wise: true }"),
        ConfigError,
        r"InnerProduct.*channel_wise|channel_wise.*InnerProduct",
    ),
    Mistake(
        "clustered InnerProduct channel by channel",
        override("layer", "fc", "snq_quantize { channel_wise: true }"),
        ConfigError,
        r"channel_wise",
    ),
    Mistake(
        "AVE pooling channel by channel, by name in the cfg",
        override("layer", "pool", "arq_quantize { channel_wise: true }"),
        ConfigError,
        r"pool.*channel_wise|channel_wise.*pool",
    ),
    # order of calls
    Mistake(
        "activation before weights",
        activation,
        CalibrationError,
        "activation_quantize_model: call weights_quantize_model with this graph first",
        only_init,
    ),
    Mistake(
        "save after init",
        save,
        CalibrationError,
        "save_model: call activation_quantize_model with this graph first",
        only_init,
    ),
    Mistake(
        "save after weights",
        save,
        CalibrationError,
        "save_model: call activation_quantize_model with this graph first",
        only_weights,
    ),
    Mistake(
        "no graph",
        lambda flow, _: amct.save_model("graph", "Both", str(flow.prefix)),
        ArgumentTypeError,
        "save_model: graph must be what init returned, got str",
    ),
    Mistake(
        "no such save_type",
        lambda flow, graph: amct.save_model(graph, "deploy", str(flow.prefix)),
        ArgumentError,
        "save_type must be Fakequant, Deploy, Both, got 'deploy'",
        calibrate(2),
    ),
    Mistake("batch_num 0", lambda flow, _: flow.configure(batch_num=0), ConfigError, "batch_num"),
    Mistake("batch_num below 0", lambda flow, _: flow.configure(batch_num=-1), ConfigError, "batch_num"),
    Mistake(
        "batch_num true",
        lambda flow, _: flow.configure(batch_num=True),
        ArgumentTypeError,
        "batch_num must be int, got bool",
    ),
    # configs
    Mistake(
        "unknown layer in the JSON",
        init,
        ConfigError,
        r'convv.*Did you mean "conv"',
        config(lambda content: content.update(convv=content.pop("conv"))),
    ),
    Mistake("config of another model", init, ConfigError, r'"c"|"f"', config_of_another_model),
    Mistake("unknown layer in skip_layers", from_cfg('skip_layers: "covn"'), ConfigError, r'covn.*Did you mean "conv"'),
    Mistake(
        "unknown layer in override_layer_configs",
        override("layer", "covn", ""),
        ConfigError,
        r'covn.*Did you mean "conv"',
    ),
    Mistake(
        "unknown layer in skip_fusion_layers",
        from_cfg('skip_fusion_layers: "covn"'),
        ConfigError,
        r'covn.*Did you mean "conv"',
    ),
    Mistake(
        "unknown type in skip_layer_types",
        from_cfg('skip_layer_types: "Convolutoin"'),
        ConfigError,
        r'Convolutoin.*Did you mean "Convolution"',
    ),
    Mistake(
        "unknown type in override_layer_types",
        override("type", "Convolutoin", ""),
        ConfigError,
        r'Convolutoin.*Did you mean "Convolution"',
    ),
    Mistake(
        "a layer that cannot be quantized",
        init,
        ConfigError,
        r"data.*(cannot|not).*quantize",
        config(lambda content: content.update(data={"quant_enable": True})),
    ),
    Mistake(
        "unknown field in the cfg", from_cfg("batch_nmu: 2"), (ConfigError, ParseError), r"quant.cfg:1:1.*batch_nmu"
    ),
    Mistake(
        "unknown key in the JSON",
        init,
        ConfigError,
        r"quant_enabled",
        config(lambda content: content["conv"].update(quant_enabled=True)),
    ),
    Mistake("another version", init, ConfigError, r"version.*2", config(lambda content: content.update(version=2))),
    Mistake(
        "percentile above 1",
        init,
        ConfigError,
        r"max_percentile.*1.5",
        config(setting("conv", 1.5, ACTIVATION, "max_percentile")),
    ),
    Mistake(
        "search range the wrong way round",
        init,
        ConfigError,
        r"search_range",
        config(setting("conv", [1.3, 0.7], ACTIVATION, "search_range")),
    ),
    Mistake("search step 0", init, ConfigError, r"search_step", config(setting("conv", 0, ACTIVATION, "search_step"))),
    Mistake(
        "three blocks for two bottoms",
        init,
        ConfigError,
        r"sum.*activation_quant_params.*(3|2)",
        config(lambda content: content["sum"][ACTIVATION].append(content["sum"][ACTIVATION][0])),
    ),
    Mistake(
        "too few iterations for SNQ",
        from_cfg("common_config { snq_quantize { max_iteration: 400 } }"),
        ConfigError,
        r"max_iteration.*400",
    ),
    Mistake(
        "min_distance out of range",
        from_cfg("common_config { snq_quantize { min_distance: 0.1 } }"),
        ConfigError,
        r"min_distance.*0.1",
    ),
    Mistake(
        "unknown init_algo",
        from_cfg("common_config { snq_quantize { init_algo: 'kmeans' } }"),
        ConfigError,
        r"init_algo.*kmeans",
    ),
    Mistake(
        "guide's slip: { { in the JSON",
        init,
        (ConfigError, ParseError),
        r"config.json:1:\d+",
        write_config(lambda text: "{ " + text),
    ),
    Mistake(
        "guide's slip: a comma at the end",
        init,
        (ConfigError, ParseError),
        r"config.json:\d+:\d+",
        write_config(lambda text: text.rstrip()[:-1] + ",}"),
    ),
    Mistake(
        "nothing is switched on",
        save,
        RecordError,
        "no layer is quantized",
        calibrate(
            2,
            change=lambda content: [
                value.update(quant_enable=False) for value in content.values() if isinstance(value, dict)
            ],
        ),
    ),
    # models
    Mistake(
        "BatchNorm without global statistics",
        init,
        ModelError,
        r'layer "bn" \(BatchNorm\) has use_global_stats: false.*Set it to true',
        without("use_global_stats: true", "use_global_stats: false"),
    ),
    Mistake(
        "the same in convert_model",
        convert(RECORD),
        ModelError,
        r'layer "bn" .*use_global_stats: false',
        without("use_global_stats: true", "use_global_stats: false"),
    ),
    Mistake(
        "a net without layers", configure, ModelError, "no layer", lambda flow: flow.model.write_text('name: "nothing"')
    ),
    Mistake(
        "no prototxt", configure, ParseError, r"net.prototxt:1:\d+", lambda flow: flow.model.write_text("not a net")
    ),
    Mistake(
        "no caffemodel",
        configure,
        (ParseError, FileError),
        r"net.caffemodel",
        lambda flow: flow.weights.write_text("not weights"),
    ),
    Mistake(
        "a caffemodel that ends too early",
        configure,
        ParseError,
        r"net.caffemodel",
        lambda flow: flow.weights.write_bytes(flow.weights.read_bytes()[:-20]),
    ),
    Mistake(
        "weights of another model",
        configure,
        ModelError,
        "Do model and weights belong together",
        lambda flow: flow.model.write_text(NET.replace("num_output: 4", "num_output: 5")),
    ),
    Mistake(
        "fake-quant model again",
        configure,
        ModelError,
        "quantized already; give the original float model",
        quantized("fake_quant"),
    ),
    Mistake(
        "deploy model again",
        configure,
        ModelError,
        "quantized already; give the original float model",
        quantized("deploy"),
    ),
    Mistake(
        "calibration model again",
        configure,
        ModelError,
        "quantized already; give the original float model",
        calibration_model_again,
    ),
    Mistake(
        "integer weights in a float net",
        configure,
        ModelError,
        "int8 integers: this model is quantized already",
        integers_as_weights,
    ),
    Mistake("convert a fake-quant model", convert(RECORD), ModelError, "quantized already", quantized("fake_quant")),
    Mistake("convert a deploy model", convert(RECORD), ModelError, "quantized already", quantized("deploy")),
    # records
    Mistake(
        "record of another model",
        save,
        RecordError,
        r"(?s)convolution.*no such layer.*Cannot find scale_d of layer 'conv'",
        record_of_another_model,
    ),
    Mistake(
        "record of another model, convert_model",
        record('"pool"', '"poll"'),
        RecordError,
        r'poll.*no such layer.*Did you mean "pool"',
    ),
    Mistake(
        "factors of a folded layer",
        convert(RECORD + 'record { key: "bn" value { record_d { scale_d: 1 offset_d: 0 index: 0 } } }'),
        RecordError,
        'layer "bn" has factors.*fused into',
    ),
    Mistake("the guide's sample record lacks a brace", convert(GUIDE_RECORD), RecordParseError, r"given.txt:\d+:\d+"),
    Mistake("empty record", convert(""), RecordError, "empty"),
    Mistake("no scale_d", record("scale_d: 0.05", ""), RecordError, "Cannot find scale_d of layer 'pool'"),
    Mistake(
        "no offset_d",
        record("scale_d: 0.05 offset_d: -128", "scale_d: 0.05"),
        RecordError,
        "Cannot find offset_d of layer 'pool'",
    ),
    Mistake("no scale_w", record("scale_w: 0.006 offset_w: 0", ""), RecordError, r'layer "fc": scale_w is missing'),
    Mistake(
        "scale_w and offset_w of different number",
        record("scale_w: 0.01 scale_w: 0.01 scale_w", "scale_w: 0.01 scale_w", 1),
        RecordError,
        "3 scale_w but 4 offset_w",
    ),
    Mistake(
        "scale_w for half of the channels",
        record(
            "scale_w: 0.01 scale_w: 0.01 scale_w: 0.01 scale_w: 0.01 offset_w: 0 offset_w: 0 offset_w: 0 offset_w: 0",
            "scale_w: 0.01 scale_w: 0.01 offset_w: 0 offset_w: 0",
        ),
        RecordError,
        r"scale_w must have 1 or 4 values",
    ),
    Mistake(
        "InnerProduct channel by channel in a record",
        record("scale_w: 0.006 offset_w: 0", "scale_w: 0.006 " * 5 + "offset_w: 0 " * 5),
        RecordError,
        "InnerProduct is not quantized channel by channel",
    ),
    Mistake(
        "weights with an offset",
        record("scale_w: 0.006 offset_w: 0", "scale_w: 0.006 offset_w: 3"),
        RecordError,
        r"offset_w.*0",
    ),
    Mistake("offset below -128", record("offset_d: -3", "offset_d: -129"), ValueError, r"offset_d.*\[-128, 127\]"),
    Mistake("scale below FLT_EPSILON", record("scale_d: 0.05", "scale_d: 1e-8"), ValueError, r"scale_d.*must lie in"),
    Mistake(
        "scale above 1 / FLT_EPSILON", record("scale_d: 0.05", "scale_d: 1e8"), ValueError, r"scale_d.*must lie in"
    ),
    Mistake("scale 0", record("scale_d: 0.05", "scale_d: 0"), ValueError, r"scale_d.*must lie in"),
    Mistake(
        "an input the layer does not have",
        record(
            "scale_d: 0.05 offset_d: -128 index: 0",
            "scale_d: 0.05 offset_d: -128 index: 0 } record_d { scale_d: 0.05 offset_d: -128 index: 1",
        ),
        RecordError,
        "index 1, but the layer has 1 input",
    ),
    Mistake(
        "an input without an index",
        record('index: 0 } } }\nrecord { key: "fc"', '} } }\nrecord { key: "fc"'),
        (RecordError, RecordParseError),
        "index",
    ),
    Mistake(
        "weight factors of a layer without weights",
        record('{ key: "pool" value {', '{ key: "pool" value { scale_w: 0.5 offset_w: 0'),
        RecordError,
        "Pooling has no weights",
    ),
    Mistake(
        "9-bit factors outside 8..16",
        record("scale_d: 0.05", "num_bits_d: 17 scale_d: 0.05"),
        RecordError,
        "num_bits_d.*8..16, got 17",
    ),
    Mistake(
        "4-bit weights without a table",
        record("scale_w: 0.006", "num_bits_w: 4 scale_w: 0.006"),
        RecordError,
        "num_bits_w 4 cannot be converted",
    ),
    Mistake(
        "a bias that does not fit int32",
        convert(
            RECORD.replace("scale_d: 0.03 offset_d: -3", "scale_d: 2e-7 offset_d: -3").replace(
                "scale_w: 0.01", "scale_w: 2e-7"
            )
        ),
        CalibrationError,
        'layer "conv": the bias does not fit',
    ),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_mistake(mistake, flow):
    handed_on = mistake.prepare(flow) if mistake.prepare else None
    before = contents(flow)
    with pytest.raises(mistake.error, match=mistake.says):
        mistake.do(flow, handed_on)
    written_by_the_test = {"given.txt", "quant.cfg", "record.txt.progress.json"}
    after = contents(flow)
    assert {name for name in after if name not in before} - written_by_the_test == set()
    assert not flow.prefix.parent.exists()


# ------------------------------------------------------------------ what is told and goes on


def test_common_config_asking_for_channels_of_an_inner_product_only_warns(flow, caplog):
    with caplog.at_level(logging.WARNING, "amct"):
        flow.configure(text="common_config { arq_quantize { channel_wise: true } }")
    assert "channel_wise does not apply to these layers, they are quantized per tensor: pool, fc" in caplog.text
    content = json.loads(flow.config.read_text())
    assert content["fc"][WEIGHT]["channel_wise"] is False
    assert content["conv"][WEIGHT]["channel_wise"] is True


def test_a_constant_input_warns_and_has_scale_one(flow, caplog):
    """Scale below FLT_EPSILON: scale 1 and the lowest offset."""
    graph = calibrate(0)(flow)
    net = flow.net(*flow.modified)
    with caplog.at_level(logging.WARNING, "amct"):
        forward_twice(net, {"data": np.full((2, 3, 8, 8), 1e-9, np.float32)})
    assert 'layer "conv", input 0: all values are (as good as) zero' in caplog.text
    save(flow, graph)
    from amct.record import read_caffe_record

    found = read_caffe_record(flow.record)["conv"].record_d[0]
    assert (found.scale, found.offset) == (1.0, -128)


def test_joint_quant_is_accepted_and_never_written(flow):
    flow.configure(change=lambda content: content.update(joint_quant=False))
    flow.init()
    flow.configure()
    assert "joint_quant" not in json.loads(flow.config.read_text())


def test_one_block_for_several_bottoms_counts_for_all(flow):
    def change(content):
        content["sum"][ACTIVATION] = content["sum"][ACTIVATION][0] | {"num_bits": 9}

    flow.configure(batch_num=1, change=change)
    plan = flow.init().plans()["sum"]
    assert [each.num_bits for each in plan.activations] == [9, 9]


def test_gpu_mode_without_a_gpu_says_so(caplog):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with caplog.at_level(logging.WARNING, "amct"):
        amct.set_gpu_mode()
    amct.set_cpu_mode()
    assert "GPU" in caplog.text or "CUDA" in caplog.text
    caffe.set_mode_cpu()


CHANGES = {
    "nothing": ("", ""),
    "another layout": ("  value {", "  value  {"),
    "words": ("}\n}\n", "}\n}\nwords"),
    "an unknown field": ("scale_w", "scale_x"),
    "no number": ("scale_w: 0", "scale_w: zero"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_only_a_record_is_written_to(what, flow):
    """What our writer wrote is recognized without parsing; all else is parsed, and refused if it is no record."""
    flow.configure(batch_num=1)
    flow.prepare()
    before, after = CHANGES[what]
    text = flow.record.read_text()
    assert before in text
    flow.record.write_text(text.replace(before, after, 1))
    assert bool(ifmr._WEIGHTS.fullmatch(flow.record.read_bytes())) is (what == "nothing")
    if what in ("nothing", "another layout"):
        check_named_record(str(flow.record))
        return
    with pytest.raises(RecordParseError):
        check_named_record(str(flow.record))
