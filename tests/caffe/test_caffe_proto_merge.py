"""custom.proto: the guide's four scenarios on its literal texts, the reader against protoc, nets with own messages."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool

import amct_caffe
from amct.caffe import proto_merge
from amct.caffe import pycaffe as caffe
from amct.caffe.engine.layer import register
from amct.caffe.engine.layers.activations import Elementwise
from amct.caffe.engine.messages import read_net_message
from amct.caffe.proto_merge import descriptor_of, read_proto
from amct.caffe.prototxt import layer_list
from amct.errors import AmctError, ConfigError, FileError, ParseError
from amct.schema import file_protos
from caffe_patch.merge_proto import merge

SOURCES = Path(__file__).parent.parent.parent / "src"
OURS = SOURCES / "amct" / "schema" / "caffe.proto"
RESERVED = [
    "QuantParameter", "DeQuantParameter", "IFMRParameter", "LSTMQuantParameter", "SearchNParameter",
    "RetrainDataQuantParameter", "RetrainWeightQuantParameter", "SingleLayerRecord", "ScaleOffsetRecord",
]  # fmt: skip

TEXTS = Path(__file__).parent.parent / "golden" / "caffe_proto"
SCENARIO_1, SCENARIO_2, SCENARIO_3, SCENARIO_4 = ((TEXTS / f"scenario{n}.proto").read_text() for n in (1, 2, 3, 4))


def merged(tmp_path, text, **options):
    custom = tmp_path / "custom.proto"
    custom.write_text(text)
    return proto_merge.merge_files(custom, tmp_path / "out.proto", **options)


def test_scenario_1_message_name_of_ours(tmp_path):
    with pytest.raises(ConfigError, match=r"message QuantParameter clashes with AMCT's own message QuantParameter"):
        merged(tmp_path, SCENARIO_1)
    assert not (tmp_path / "out.proto").exists()


def test_scenario_2_field_of_ours(tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"LayerParameter field quant_param = 208 clashes with AMCT's own field quant_param = 200000: give yours "
        "another name",
    ):
        merged(tmp_path, SCENARIO_2)
    number = SCENARIO_2.replace("QuantParameter quant_param = 208", "ReLU6Parameter mine = 200000")
    with pytest.raises(ConfigError, match=r"mine = 200000 clashes with AMCT's own field quant_param .* another number"):
        merged(tmp_path, number)


def test_scenario_3_number_of_caffe(tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"relu6_param = 206 has the number of caffe\.proto's field norm_param = 206: give yours another number",
    ):
        merged(tmp_path, SCENARIO_3)


def test_scenario_4_message_name_of_caffe_the_users_wins(tmp_path):
    result = merged(tmp_path, SCENARIO_4.replace("eps = 4 [default = 1e-10]", "eps = 4 [default = 0.5]"))
    assert "message NormalizeParameter of the custom proto replaces the one in caffe.proto" in result.notes
    schema = proto_merge.load_custom_schema(tmp_path / "custom.proto")
    assert schema.new_message("NormalizeParameter").eps == 0.5
    assert schema.new_message("LayerParameter").norm_param.channel_shared is True
    again = read_and_resolve((tmp_path / "out.proto").read_text())
    assert {message.name for message in again.message_type} == {message.name for message in result.file.message_type}


def test_all_clashes_are_told_at_once(tmp_path):
    with pytest.raises(ConfigError, match="2 mistakes") as caught:
        merged(tmp_path, SCENARIO_1)
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize("name", RESERVED)
def test_reserved_names(tmp_path, name):
    with pytest.raises(ConfigError, match=f"message {name} clashes"):
        merged(tmp_path, f"message {name} {{ optional int32 a = 1; }}")


def test_recommended_and_unusual_numbers_are_both_fine(tmp_path):
    text = SCENARIO_3.replace("206", "2060")
    assert "relu6_param = 2060" in merged(tmp_path, text).notes[0]
    written = (tmp_path / "out.proto").read_text()
    assert "optional ReLU6Parameter relu6_param = 2060;" in written
    assert "relu6_param = 1000000" not in written


def test_somebody_elses_caffe_proto_gets_our_layers(tmp_path):
    (tmp_path / "caffe.proto").write_text(
        'syntax = "proto2"; package caffe; message NetParameter { repeated LayerParameter layer = 100; } '
        "message LayerParameter { optional string name = 1; optional FooParameter foo_param = 300; } "
        "message FooParameter { optional int32 x = 1; }"
    )
    result = merged(
        tmp_path,
        "message LayerParameter { optional Bar bar_param = 301; } message Bar { }",
        caffe=tmp_path / "caffe.proto",
    )
    layer = next(message for message in result.file.message_type if message.name == "LayerParameter")
    assert {"foo_param", "bar_param", "quant_param"} <= {field.name for field in layer.field}
    with pytest.raises(ConfigError, match=r"bar_param = 300 has the number of caffe\.proto's field foo_param"):
        merged(
            tmp_path,
            "message LayerParameter { optional Bar bar_param = 300; } message Bar { }",
            caffe=tmp_path / "caffe.proto",
        )
    (tmp_path / "other.proto").write_text("message Something { }")
    with pytest.raises(ConfigError, match=r"not a caffe\.proto: it has no message LayerParameter"):
        merged(tmp_path, "message Bar { }", caffe=tmp_path / "other.proto")


def test_without_a_custom_proto_a_plain_caffe_proto_gets_all_that_is_ours(tmp_path):
    plain = tmp_path / "caffe.proto"
    plain.write_text(
        "message LayerParameter { optional string name = 1; } message BlobProto { repeated float data = 5; } "
        "message BatchNormParameter { optional float eps = 3; }"
    )
    result = proto_merge.merge_files(None, tmp_path / "out.proto", plain)
    assert result.notes == []
    fields = {
        message.name: {field.name: field.number for field in message.field} for message in result.file.message_type
    }
    assert fields["BlobProto"] == {"data": 5, "int8_data": 10, "int32_data": 11}
    assert fields["BatchNormParameter"] == {"eps": 3, "update_iterations": 200000, "dump_dir": 200001}
    assert {*RESERVED} <= {*fields}


def test_a_message_of_the_user_that_replaces_one_keeps_our_fields(tmp_path):
    result = merged(tmp_path, "message BlobProto { repeated float data = 5; optional int32 mine = 12; }")
    (blob,) = (message for message in result.file.message_type if message.name == "BlobProto")
    assert [field.name for field in blob.field] == ["data", "mine", "int8_data", "int32_data"]
    with pytest.raises(ConfigError, match=r"BlobProto field mine = 10 clashes with AMCT's own field int8_data = 10"):
        merged(tmp_path, "message BlobProto { optional int32 mine = 10; }")


def test_a_required_field_of_layers_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"custom\.proto: LayerParameter field a = 4 is required: .* write optional"):
        merged(tmp_path, "message LayerParameter { required int32 a = 4; }")


def test_a_file_that_is_replaced_is_kept(tmp_path):
    (tmp_path / "out.proto").write_text("before")
    merged(tmp_path, MINE)
    assert (tmp_path / "out.proto.bak").read_text() == "before"


def test_the_merger_runs_on_python_3_6_without_amct(tmp_path):
    source = Path(merge.__file__)
    tree = ast.parse(source.read_text(), feature_version=(3, 6))
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported <= set(sys.stdlib_module_names)
    (tmp_path / "custom.proto").write_text(SCENARIO_1)
    command = [sys.executable, "-I", str(source), "--caffe_proto", str(OURS)]
    done = subprocess.run(
        [*command, "--custom_proto", str(tmp_path / "custom.proto"), str(tmp_path / "out.proto")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "[ERROR]" in done.stderr
    assert "message QuantParameter clashes" in done.stderr
    subprocess.run([*command, str(tmp_path / "out.proto")], check=True)
    assert "IFMRParameter ifmr_param = 200002" in (tmp_path / "out.proto").read_text()


def test_amct_custom_proto_says_what_caffe_proto_says():
    (ours,) = file_protos("caffe")
    (record,) = (
        file
        for file in file_protos("caffe_config")
        if file.package == "AMCTCaffeProto" and file.message_type[0].name == "ActivationQuantParam"
    )
    known = {message.name: message for message in (*ours.message_type, *record.message_type)}
    own = read_proto((SOURCES / "caffe_patch/merge_proto/amct_custom.proto").read_text(), "amct_custom.proto")
    for message in own.messages:
        by_name = {field.name: field for field in known[message.name].field}
        for field in message.fields:
            assert by_name[field.name].number == field.number, (message.name, field.name)
            assert field.kind in (by_name[field.name].type_name.rpartition(".")[2], *merge.SCALARS)


# ---------------------------------------------------------------------------------------------------- the reader


def normal(file: FileDescriptorProto) -> FileDescriptorProto:
    """What a descriptor pool makes of a file: the form in which two descriptions of it can be compared."""
    pool = DescriptorPool()
    copy = FileDescriptorProto()
    copy.CopyFrom(file)
    copy.name = "x.proto"
    pool.AddSerializedFile(copy.SerializeToString())
    result = FileDescriptorProto()
    pool.FindFileByName("x.proto").CopyToProto(result)
    for message in result.message_type:
        _plain(message)
    result.ClearField("syntax")
    return result


def _plain(message):
    for field in message.field:
        field.ClearField("json_name")
        if field.HasField("default_value") and field.type in (field.TYPE_FLOAT, field.TYPE_DOUBLE):
            field.default_value = repr(float(np.float32(field.default_value)))
    for nested in message.nested_type:
        _plain(nested)


def test_our_reader_agrees_with_protoc_on_all_of_caffe_proto():
    (compiled,) = file_protos("caffe")
    assert normal(read_and_resolve(OURS.read_text())) == normal(compiled)


def test_writing_and_reading_again_changes_nothing():
    (compiled,) = file_protos("caffe")
    assert normal(read_and_resolve(merge.to_text(read_proto(OURS.read_text(), "caffe.proto")))) == normal(compiled)


def test_everything_a_message_can_hold():
    file = read_proto(
        """
        // comment
        syntax = 'proto2'; package a.b; /* more
        comment */ option java_package = "x";
        message M {
          reserved 4, 5; extensions 100 to 199; option deprecated = true; ;
          message N { required bytes data = 1 [default = "a\\n\\"b", deprecated = true]; }
          enum E { X = 0 [deprecated = true]; Y = -2; option allow_alias = false; }
          repeated .a.b.M.N n = 1 [(custom) = 3, packed = false];
          optional E e = 2 [default = Y];
          oneof choice { int32 one = 6; M.N two = 7; }
          optional sint64 hex = 0x10 [default = -0x1F];
          optional double inf = 11 [default = -inf];
        }
        """,
        "m.proto",
    )
    message = descriptor_of(file, "m.proto").message_type[0]
    fields = {field.name: field for field in message.field}
    assert fields["n"].type_name == ".a.b.M.N"
    assert fields["two"].type_name == ".a.b.M.N"
    assert fields["e"].type == fields["e"].TYPE_ENUM
    assert (fields["hex"].number, fields["hex"].default_value) == (16, "-31")
    assert fields["inf"].default_value == "-inf"
    assert message.nested_type[0].field[0].default_value == 'a\n"b'
    assert [value.number for value in message.enum_type[0].value] == [0, -2]
    assert fields["one"].HasField("oneof_index")
    assert normal(read_and_resolve(merge.to_text(file))) == normal(descriptor_of(file, "m.proto"))


def read_and_resolve(text):
    return descriptor_of(read_proto(text, "again.proto"), "again.proto")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("message M {", r"c\.proto:1:12: expected \}, found the end of the file"),
        ("message M { optional int32 x = 1 }", r"c\.proto:1:34: expected ;, found '}'"),
        ("message M {\n  int32 x = 1;\n}", r"c\.proto:2:3: a field starts with optional, required or repeated"),
        ("message M { optional int32 x = 0; }", "a field number is 1 to"),
        ("message M { optional int32 x = 19500; }", "not 19000 to 19999"),
        ("message M { optional int32 x = 1.5; }", "expected a whole number"),
        ("message M { optional int32 x = 1; optional int32 y = 1; }", "field y = 1 has the name or number of x = 1"),
        ("message M { optional int32 x = 1 [default = ]; }", "expected a value"),
        ('syntax = "proto3";', "only proto2, which Caffe uses, is supported"),
        ('import "other.proto";', '"import" is not supported'),
        ("message M { optional group G = 1 { } }", '"group" is not supported'),
        ("message M { map<int32, int32> m = 1; }", '"map" is not supported'),
        ("hello", 'expected message, enum, package or syntax, found "hello"'),
        ("message M { } #", "unexpected character '#'"),
        ("enum E { }", "enum E has no values"),
        ("option x", "expected ;"),
        ("message M { " * 200, "nested more than 50 deep"),
        ('message M { optional string x = 1 [default = "abc', "unexpected character"),
    ],
)
def test_mistakes_have_their_place(text, message):
    with pytest.raises(ParseError, match=message):
        read_proto(text, "c.proto")


def test_a_type_nobody_defines(tmp_path):
    with pytest.raises(ConfigError, match=r'the type FilerParameter is not defined\. Did you mean "FillerParameter"'):
        merged(tmp_path, "message My { optional FilerParameter f = 1; }")
    with pytest.raises(FileError, match=r"none\.proto"):
        proto_merge.load_custom_schema(tmp_path / "none.proto")


# ---------------------------------------------------------------------------------------------------- nets that use it

MINE = """
message LayerParameter { optional TimesParameter times_param = 4321; }
message TimesParameter { optional float factor = 1 [default = 2]; }
"""
NET = """
input: "d" input_dim: 1 input_dim: 2 input_dim: 1 input_dim: 1
layer { name: "t" type: "TestTimes" bottom: "d" top: "t" times_param { factor: 5 } }
layer { name: "u" type: "TestTimes" bottom: "t" top: "u" }
layer { name: "v" type: "ReLU" bottom: "t" top: "v" }
"""


def test_a_net_with_messages_of_its_own(write):
    from amct.caffe.engine import layer as layers

    class TestTimes(Elementwise):
        """Times a factor."""

        def function(self, bottom):
            return bottom * self.parameter.times_param.factor

    register("TestTimes")(TestTimes)
    try:
        net = caffe.Net(write(NET), caffe.TEST, custom_proto=write(MINE, "custom.proto"))
        out = net.forward(d=np.array([1.0, -2.0]).reshape(1, 2, 1, 1))
        assert out["u"].ravel().tolist() == [10, -20]
        assert out["v"].ravel().tolist() == [5, 0]
    finally:
        del layers._registered["TestTimes"]
    with pytest.raises(ParseError, match="times_param"):
        caffe.Net(write(NET), caffe.TEST)


def test_on_the_command_line(tmp_path):
    from typer.testing import CliRunner

    from amct.cli.caffe import app

    out = tmp_path / "out.proto"
    done = CliRunner().invoke(app, ["merge-proto", "--custom", str(TEXTS / "scenario4.proto"), "-o", str(out)])
    assert done.exit_code == 0
    assert "note: message NormalizeParameter of the custom proto replaces the one in caffe.proto" in done.output
    assert "message NormalizeParameter {" in out.read_text()
    done = CliRunner().invoke(app, ["merge-proto", "--custom", str(TEXTS / "scenario3.proto"), "-o", str(out)])
    assert "relu6_param = 206 has the number" in str(done.exception)


# ------------------------------------------------------------------ quantization with messages of one's own


NET_TO_QUANTIZE = """
layer { name: "d" type: "Input" top: "d" input_param { shape { dim: 1 dim: 3 dim: 8 dim: 8 } } }
layer { name: "c" type: "Convolution" bottom: "d" top: "c" convolution_param { num_output: 4 kernel_size: 3
  weight_filler { type: "xavier" } } }
layer { name: "t" type: "TestTimes" bottom: "c" top: "t" times_param { factor: 5 } }
layer { name: "fc" type: "InnerProduct" bottom: "t" top: "fc" inner_product_param { num_output: 5
  weight_filler { type: "xavier" } } }
"""


@pytest.fixture
def own_net(write, tmp_path, monkeypatch):
    """Prototxt, caffemodel, custom.proto, data; the layer's class is registered meanwhile."""
    from amct.caffe.engine import layer as layers

    class TestTimes(Elementwise):
        """Times a factor."""

        def function(self, bottom):
            return bottom * self.parameter.times_param.factor

        def to_onnx(self, place):
            place.top("Mul", place.bottom, place.value("factor", float(self.parameter.times_param.factor)))

    register("TestTimes")(TestTimes)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AMCT_LOG_LEVEL", "error")
    model, custom = write(NET_TO_QUANTIZE), write(MINE, "custom.proto")
    caffe.Net(model, caffe.TEST, custom_proto=custom).save("own.caffemodel")
    yield model, "own.caffemodel", custom, np.random.default_rng(0).normal(size=(1, 3, 8, 8)).astype(np.float32)
    layers.unregister("TestTimes")


def test_quantize_compare_and_export_with_messages_of_ones_own(own_net):
    import onnxruntime

    import amct.caffe

    model, weights, custom, x = own_net
    wanted = caffe.Net(model, weights, caffe.TEST, custom_proto=custom).forward(d=x)["fc"].copy()
    with pytest.raises(ParseError, match="times_param"):
        amct.caffe.quantize(model, weights, [x])
    quantized = amct.caffe.quantize(model, weights, [x], custom_proto=custom)
    quantized.save("out/own")
    assert np.abs(quantized(x)["fc"] - wanted).max() < 0.05 * np.abs(wanted).max()
    pair = "out/own_deploy_model.prototxt", "out/own_deploy_weights.caffemodel"
    assert min(each.sqnr for each in amct.caffe.compare((model, weights), pair, x, custom_proto=custom)) > 25
    deploy = caffe.Net(*pair, caffe.TEST, custom_proto=custom)
    np.testing.assert_array_equal(deploy.forward(d=x)["fc"], quantized(x, deploy=True)["fc"])
    amct.caffe.export_onnx(model, weights, "own.onnx", custom_proto=custom)
    for path, allowed in (("own.onnx", 1e-5), ("out/own_qdq_model.onnx", 0.05)):
        (found,) = onnxruntime.InferenceSession(path).run(None, {"d": x})
        assert np.abs(found - wanted).max() < allowed * np.abs(wanted).max()


def test_the_guides_flow_with_messages_of_ones_own(own_net):
    import amct_caffe

    model, weights, custom, x = own_net
    amct_caffe.create_quant_config("config.json", model, weights, custom_proto=custom)
    graph = amct_caffe.init("config.json", model, weights, "record.txt", custom_proto=custom)
    amct_caffe.weights_quantize_model(graph, "modified.prototxt", "modified.caffemodel")
    amct_caffe.activation_quantize_model(graph, "modified.prototxt", "modified.caffemodel")
    caffe.Net("modified.prototxt", "modified.caffemodel", caffe.TEST, custom_proto=custom).forward(d=x)
    amct_caffe.save_model(graph, "Both", "out/own")
    amct_caffe.convert_model(model, weights, "out/own_quant_param_record.txt", "again/own", custom_proto=custom)
    amct_caffe.uninplace_model(model, "uninplaced.prototxt", custom_proto=custom)
    for name in ("out/own", "again/own"):
        net = caffe.Net(
            f"{name}_fake_quant_model.prototxt",
            f"{name}_fake_quant_weights.caffemodel",
            caffe.TEST,
            custom_proto=custom,
        )
        assert net.forward(d=x)["fc"].shape == (1, 5)


def test_commands_with_messages_of_ones_own(own_net, capsys):
    from amct.cli import main

    model, weights, custom, x = own_net
    np.save("x.npy", x)
    assert main(["inspect", model]) == 2
    assert 'layer "t" of type "TestTimes"' in capsys.readouterr().err
    assert main(["inspect", model, "--custom-proto", custom]) == 0
    assert "stays float: this type cannot be quantized" in capsys.readouterr().out
    own = ["--custom-proto", custom]
    assert main(["quantize", model, weights, "--data", "x.npy", "-o", "out/own", *own]) == 0
    assert main(["compare", model, weights, "out/own", "--data", "x.npy", *own]) == 0
    onnx = ["--model", model, "--weights", weights, "-o", "own.onnx"]
    assert main(["caffe", "to-onnx", *onnx, *own]) == 0
    assert main(["quantize", "own.onnx", "--data", "x.npy", "-o", "out/own", *own]) == 2
    assert "--custom-proto is for Caffe models" in capsys.readouterr().err


def test_inspect_does_not_call_a_layer_float_that_cannot_be_built(write, capsys):
    from amct.cli import main

    model = write('layer { name: "a" type: "NoSuchLayer" top: "a" } layer { name: "b" type: "Silence" bottom: "a" }')
    assert main(["inspect", model]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert "cannot be built: unknown layer type" in first
    assert "stays float" in second


def test_configs_and_reports_with_messages_of_ones_own(own_net):
    from typer.testing import CliRunner

    from amct.cli.app import app

    model, weights, custom, x = own_net
    np.save("data.npy", x)
    commands = [
        ["config", "init", "--model", model, "-o", "full.json"],
        ["config", "check", "full.json", "--model", model],
        ["config", "explain", "full.json", "--model", model],
        ["quantize", model, weights, "--data", "data.npy", "-o", "out/own"],
        ["report", model, weights, "out/own", "--data", "data.npy", "-o", "report.html"],
    ]
    for arguments in commands:
        done = CliRunner().invoke(app, [*arguments, "--custom-proto", custom])
        assert done.exit_code == 0, (arguments, done.output)
    without = CliRunner().invoke(app, ["config", "check", "full.json", "--model", model])
    assert "times_param" in str(without.exception)


WHOLE = OURS.read_text()
"""A whole caffe.proto, to which users add messages of their own before they build it."""
COMPILED = {
    "protobuf 4": "DESCRIPTOR = _descriptor_pool.Default().AddSerializedFile({content!r})",
    "protobuf 3": "DESCRIPTOR = _descriptor.FileDescriptor(package='caffe', serialized_pb={content!r})",
    "protobuf 2 and 3": "DESCRIPTOR = _descriptor.FileDescriptor(name='caffe.proto', serialized_pb=_b({text!r}))",
}
OWN_NET = """
layer { name: "in" type: "Input" top: "data" input_param { shape { dim: 1 dim: 2 dim: 4 dim: 4 } } }
layer { name: "own" type: "Own" bottom: "data" top: "own" own_param { factor: 3 mode: LOUD } }
layer { name: "roi" type: "ROIPooling" bottom: "own" top: "roi" roi_pooling_param { pooled_w: 2 turned: true } }
"""


def rebuilt(folder, form, text=WHOLE):
    """Write a caffe_pb2.py as protoc does, of a caffe.proto with two messages of the user's own."""
    text = text.replace(
        "message LayerParameter {", "message LayerParameter {\n  optional OwnParameter own_param = 206;", 1
    )
    text = text.replace("message ROIPoolingParameter {", "message ROIPoolingParameter {\n optional bool turned = 1;", 1)
    text = text.replace("optional uint32 pooled_h = 1", "optional uint32 pooled_h = 9")
    text += """
message OwnParameter { enum Mode { QUIET = 0; LOUD = 1; } optional float factor = 1; optional Mode mode = 2; }
"""
    content = read_and_resolve(text.replace("norm_param = 206", "norm_param = 4206")).SerializeToString()
    folder.mkdir(parents=True, exist_ok=True)
    code = COMPILED[form].format(content=content, text=content.decode("latin1"))
    (folder / "caffe_pb2.py").write_text(f"raise SystemExit('this file was run')\n{code}\n")


@pytest.mark.parametrize("form", COMPILED)
@pytest.mark.parametrize("place", ["", "caffe/proto"])
def test_a_rebuilt_caffe_pb2_in_the_python_path_is_enough_to_parse(form, place, tmp_path, monkeypatch):
    (tmp_path / "net.prototxt").write_text(OWN_NET)
    with pytest.raises(ParseError, match=r"own_param belongs to another Caffe .* caffe_pb2.py in PYTHONPATH"):
        read_net_message(tmp_path / "net.prototxt")
    rebuilt(tmp_path / "path" / place, form)
    monkeypatch.syspath_prepend(tmp_path / "path")
    net = read_net_message(tmp_path / "net.prototxt")
    assert (net.layer[1].own_param.factor, net.layer[1].own_param.mode) == (3, 1)
    assert net.layer[2].roi_pooling_param.turned is True
    assert [layer.name for layer in layer_list(tmp_path / "net.prototxt")] == ["in", "own", "roi"]


def test_a_caffe_pb2_without_the_field_or_without_messages_leaves_the_error(tmp_path, monkeypatch):
    (tmp_path / "net.prototxt").write_text(OWN_NET.replace("own_param", "other_param"))
    monkeypatch.syspath_prepend(tmp_path / "path")
    for text in ("x = (", "import caffe", "AddSerializedFile(b'no file')", "pool.AddSerializedFile(17)"):
        (tmp_path / "path").mkdir(exist_ok=True)
        (tmp_path / "path" / "caffe_pb2.py").write_text(text)
        with pytest.raises(ParseError, match="has no field"):
            read_net_message(tmp_path / "net.prototxt")
    rebuilt(tmp_path / "path", "protobuf 4")
    with pytest.raises(ParseError, match=r"net.prototxt:3:.*has no field other_param"):
        read_net_message(tmp_path / "net.prototxt")


def test_a_net_with_layers_of_a_rebuilt_caffe_pb2_is_configured_by_amct_functions(tmp_path, monkeypatch):
    rebuilt(tmp_path / "path", "protobuf 4")
    monkeypatch.syspath_prepend(tmp_path / "path")
    text = OWN_NET.partition('layer { name: "roi"')[0]
    text += """layer { name: "fc" type: "InnerProduct" bottom: "own" top: "fc"
      inner_product_param { num_output: 2 } }"""
    (tmp_path / "net.prototxt").write_text(text)
    plain = text.replace('type: "Own"', 'type: "Scale"').replace("own_param { factor: 3 mode: LOUD }", "")
    (tmp_path / "plain.prototxt").write_text(plain)
    caffe.Net(str(tmp_path / "plain.prototxt"), caffe.TEST).save(str(tmp_path / "net.caffemodel"))
    pair = tmp_path / "net.prototxt", tmp_path / "net.caffemodel"
    amct_caffe.create_quant_config(tmp_path / "config.json", *pair)
    graph = amct_caffe.init(tmp_path / "config.json", *pair, tmp_path / "record.txt")
    modified = tmp_path / "modified.prototxt", tmp_path / "modified.caffemodel"
    amct_caffe.weights_quantize_model(graph, *modified)
    amct_caffe.activation_quantize_model(graph, *modified)
    assert read_net_message(modified[0]).layer[1].own_param.factor == 3
    with pytest.raises(
        AmctError, match=r'Unknown layer type: "Own".*amct.extend.register_caffe_layer\("Own"\).*--import'
    ):
        caffe.Net(str(modified[0]), str(modified[1]), caffe.TEST)
