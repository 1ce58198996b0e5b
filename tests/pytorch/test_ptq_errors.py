"""Bad input to AMCT's functions: the exception types that scripts catch, and messages that say what to do."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from ptq_helpers import Flow, Small, images, small
from torch import nn

import amct_pytorch as amct
from amct.errors import AmctError, ModelError
from amct.pytorch import quantize
from amct.record import read_record, write_record


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def model():
    """One model for all tests that do not change it, so that it is looked at once."""
    return small()


@pytest.fixture
def flow(tmp_path, model):
    return Flow(tmp_path, model)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, model):
    flow = Flow(tmp_path_factory.mktemp("finished"), model).configure()
    flow.quantize()(flow.example)
    return flow


@pytest.fixture
def calibrated(finished, flow):
    """All that stands before save_model, in a folder of its own."""
    for source, target in ((finished.config, flow.config), (finished.onnx, flow.onnx), (finished.record, flow.record)):
        shutil.copyfile(source, target)
    return flow


def refuses(kind, match, function, *args, **kwargs):
    """The call raises ``kind`` (what AMCT raises there) and one of our errors, with this message."""
    with pytest.raises(AmctError, match=match) as caught:
        function(*args, **kwargs)
    assert isinstance(caught.value, kind)
    assert str(caught.value)


# -- arguments -----------------------------------------------------------------------------------------------------


CALLS = {
    "create_quant_config": {"config_file": "c.json", "model": None, "input_data": None},
    "quantize_preprocess": {"config_file": "c.json", "record_file": "r.txt", "model": None, "input_data": None},
    "quantize_model": {
        "config_file": "c.json",
        "modfied_onnx_file": "m.onnx",
        "record_file": "r.txt",
        "model": None,
        "input_data": None,
    },
    "save_model": {"modfied_onnx_file": "m.onnx", "record_file": "r.txt", "save_path": "q"},
}


@pytest.mark.parametrize(
    ("function", "argument", "value"),
    [
        (function, argument, 5)
        for function, arguments in CALLS.items()
        for argument in arguments
        if argument != "input_data"
    ]
    + [
        ("create_quant_config", "skip_layers", "c"),
        ("create_quant_config", "batch_num", 2.0),
        ("create_quant_config", "batch_num", True),
        ("create_quant_config", "activation_offset", 1),
        ("create_quant_config", "config_defination", 1),
    ],
)
def test_a_wrong_type_names_function_and_argument(function, argument, value):
    arguments = dict(CALLS[function])
    if "model" in arguments:
        arguments.update(model=small(), input_data=images())
    arguments[argument] = value
    refuses(
        TypeError,
        rf"{function}: {argument} must be .*, got {type(value).__name__}",
        getattr(amct, function),
        **arguments,
    )


@pytest.mark.parametrize("name", ["", "folder/", "a" * 255, ".."])
def test_impossible_file_names(name, flow):
    refuses(ValueError, "config_file: ", amct.create_quant_config, name, flow.model, flow.example)
    flow.configure()
    refuses(ValueError, "record_file: ", amct.quantize_model, flow.config, flow.onnx, name, flow.model, flow.example)
    refuses(
        ValueError, "modfied_onnx_file: ", amct.quantize_model, flow.config, name, flow.record, flow.model, flow.example
    )


def test_a_prefix_that_is_too_long(calibrated):
    refuses(ValueError, "the prefix may have 241 characters, got 242", calibrated.save, "a" * 242)


@pytest.mark.parametrize("data", [np.zeros((2, 3, 8, 8)), None, 3, (), [], "x", {}])
def test_example_inputs_without_a_tensor(data, flow):
    refuses(RuntimeError, "input_data: expected a tensor", amct.create_quant_config, flow.config, flow.model, data)


def test_example_inputs_of_a_wrong_shape(flow):
    refuses(
        RuntimeError,
        r"fails on the example input: .*expected input\[2, 5, 8, 8\] to have 3 channels.*shapes \[\[2, 5, 8, 8\]\]",
        amct.create_quant_config,
        flow.config,
        flow.model,
        torch.zeros(2, 5, 8, 8),
    )


def test_more_example_inputs_than_the_forward_takes(flow):
    refuses(
        RuntimeError,
        r"input_data does not fit Small.forward\(x",
        amct.create_quant_config,
        flow.config,
        flow.model,
        (images(), images()),
    )


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"input_names": "x"}, "input_names: expected a list of strings"),
        ({"output_names": [1]}, "output_names: expected a list of strings"),
        ({"dynamic_axes": {"x": {-1: "n"}}}, "dynamic_axes: expected"),
        ({"dynamic_axes": {"nope": [0]}}, 'no input or output is named "nope"'),
    ],
)
def test_names_and_axes_that_make_no_sense(arguments, match, flow):
    flow.configure()
    refuses(RuntimeError, match, flow.quantize, **arguments)


# -- create_quant_config -------------------------------------------------------------------------------------------


def test_skip_layers_argument(flow):
    refuses(ValueError, r'"nope".*unknown|"nope".*not in', flow.configure, skip_layers=["nope"])
    refuses(ValueError, '"bn"', flow.configure, skip_layers=["bn"])
    refuses(ValueError, '"c"', flow.configure, skip_layers=["c", "c"])
    refuses(TypeError, "each name in skip_layers must be str, got int", flow.configure, skip_layers=["c", 1, "c2"])
    refuses(ValueError, "switch off every layer", flow.configure, skip_layers=["c", "c2", "fc"])


def test_batch_num_argument(flow):
    refuses(ValueError, "batch_num must be at least 1, got 0", flow.configure, batch_num=0)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('skip_layers: "nope"', "nope"),
        ('override_layer_configs { layer_name: "nope" calibration_config { } }', "nope"),
        ('override_layer_types { layer_type: "Conv9d" calibration_config { } }', "Conv9d"),
        ("batch_nums: 2", "batch_nums"),
        ('batch_num: "two"', "batch_num"),
        ("batch_num: 0", "batch_num must be at least 1"),
        ("common_config { arq_quantize { quant_bits: 5 } }", "weights can have 4, 6, 7, 8 bits, got 5"),
        ("common_config { hfmg_quantize { num_of_bins: 1000 } }", "1024, 2048, 4096"),
        ("common_config { dmq_balancer { migration_strength: 1.5 } }", "migration_strength must be at least 0.2"),
        ('override_layer_configs { layer_name: "bn" calibration_config { } }', "bn"),
    ],
)
def test_mistakes_in_a_simple_config_have_file_and_line(text, match, flow):
    refuses(ValueError, rf"(?s)q\.cfg:1:\d+: .*{match}", flow.simple, text)
    assert not flow.config.exists()


def test_skip_layers_besides_a_simple_config_are_ignored_with_a_warning(flow, caplog):
    (flow.folder / "q.cfg").write_text("batch_num: 3")
    flow.configure(config_defination=str(flow.folder / "q.cfg"), skip_layers=["c"])
    assert "skip_layers is ignored" in caplog.text
    assert json.loads(flow.config.read_text())["c"]["quant_enable"] is True


def test_a_model_with_nothing_to_quantize(tmp_path):
    flow = Flow(tmp_path, nn.Sequential(nn.ReLU()), torch.zeros(1, 3))
    refuses(ValueError, "the model has no layer that can be quantized", flow.configure)


# -- files ---------------------------------------------------------------------------------------------------------


def test_files_that_do_not_exist(flow):
    refuses(OSError, "x.cfg", flow.configure, config_defination="/nonexistent/x.cfg")
    refuses(OSError, "c.json", flow.quantize)
    refuses(OSError, "c.json", amct.quantize_preprocess, flow.config, flow.record, flow.model, flow.example)
    refuses(ValueError, r'modfied_onnx_file: ".*m.onnx" does not exist', flow.save)
    flow.configure()
    flow.quantize()
    flow.record.unlink()
    refuses(OSError, "r.txt", flow.save)


@pytest.mark.parametrize("path", ["/proc/amct_x/file", "/sys/kernel/file"])
def test_folders_that_cannot_be_written_are_told_before_any_work(path, flow, monkeypatch):
    def no_work(*_args, **_kwargs):
        raise AssertionError("work was done before the folder was checked")

    flow.configure()
    monkeypatch.setattr("amct.pytorch.amct_api.cached_trace", no_work)
    monkeypatch.setattr("amct.pytorch.amct_api.read_modified", no_work)
    refuses(OSError, "cannot write", amct.create_quant_config, path, flow.model, flow.example)
    refuses(OSError, "cannot write", amct.quantize_preprocess, flow.config, path, flow.model, flow.example)
    for modified, record in ((path, flow.record), (flow.onnx, path)):
        refuses(OSError, "cannot write", amct.quantize_model, flow.config, modified, record, flow.model, flow.example)
    refuses(OSError, "cannot write", amct.save_model, flow.onnx, flow.record, path)


def test_a_folder_where_a_file_should_be(flow):
    refuses(OSError, "is a folder", amct.create_quant_config, flow.folder, flow.model, flow.example)


# -- the JSON config -----------------------------------------------------------------------------------------------


def test_a_truncated_config(flow):
    flow.configure()
    flow.config.write_text('{"version": 1,')
    refuses(ValueError, r"c\.json:1:\d+", flow.quantize)


@pytest.mark.parametrize(
    ("change", "kind", "match"),
    [
        ({"c": {"activation_quant_params": {"search_step": 0.0}}}, ValueError, "search_step"),
        ({"c": {"activation_quant_params": {"search_range": [1.3, 0.7]}}}, ValueError, "search_range"),
        ({"c": {"activation_quant_params": {"max_percentile": 1.5}}}, ValueError, "max_percentile"),
        ({"c": {"weight_quant_params": {"num_bits": 5}}}, ValueError, "num_bits|bits"),
        ({"c": {"weight_quant_params": {"num_bits": "8"}}}, TypeError, "num_bits"),
        ({"c": {"foo": 1}}, ValueError, "foo"),
        ({"c": {"dmq_balancer_param": 1}}, TypeError, "dmq_balancer_param"),
        ({"zzz": {"quant_enable": True}}, ValueError, "zzz"),
        ({"fc": {"weight_quant_params": {"channel_wise": True}}}, ValueError, "channel_wise"),
    ],
)
def test_mistakes_in_the_json_config_have_file_and_line(change, kind, match, flow):
    flow.configure()
    config = json.loads(flow.config.read_text())
    for name, block in change.items():
        for key, value in block.items():
            layer = config.setdefault(name, {})
            layer[key] = {**layer.get(key, {}), **value} if isinstance(value, dict) else value
    flow.config.write_text(json.dumps(config, indent=1))
    refuses(kind, rf"c\.json:\d+:\d+: .*({match})", flow.quantize)


def test_nothing_enabled(flow):
    flow.configure()
    config = json.loads(flow.config.read_text())
    for name in ("c", "c2", "fc"):
        config[name]["quant_enable"] = False
    flow.config.write_text(json.dumps(config))
    refuses(RuntimeError, "no layer is to be quantized", flow.quantize)


# -- weights and data ----------------------------------------------------------------------------------------------


def test_weights_that_are_not_finite(tmp_path):
    flow = Flow(tmp_path)
    with torch.no_grad():
        flow.model.c2.weight[0, 0, 0, 0] = torch.nan
    flow.configure()
    refuses(RuntimeError, r'layer "c2": 1 of 576 values of weight are NaN or infinite', flow.quantize)


def test_all_zero_weights_get_scale_one(tmp_path):
    flow = Flow(tmp_path)
    nn.init.zeros_(flow.model.c2.weight)
    flow.configure()
    flow.quantize()(flow.example)
    flow.save()
    assert set(read_record(flow.record)["c2"].scale_w) == {1.0}


def test_complex_weights_cannot_be_quantized():
    model = nn.Sequential(nn.Linear(3, 2, dtype=torch.cfloat))
    with pytest.raises(TypeError, match="got complex64; compute with its real and imaginary part"):
        quantize(model, [torch.randn(4, 3, dtype=torch.cfloat)])


def test_weights_of_a_type_that_cannot_be_quantized(tmp_path):
    flow = Flow(tmp_path, small().double(), images().double()).configure()
    refuses(
        TypeError, r'layer "c": only weights of float32 and float16.*got float64; .*model\.float\(\)', flow.quantize
    )


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_activations_that_are_not_finite(bad, flow):
    flow.configure(batch_num=2)
    calibrating = flow.quantize()
    x = images()
    x[0, 0, 0, 0] = bad
    refuses(RuntimeError, 'layer "c", batch 1: the activation holds', calibrating, x)
    calibrating(images(1))
    refuses(RuntimeError, 'layer "c", batch 2: the activation holds', calibrating, x)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda x: x.to("meta"), RuntimeError, "a tensor on the meta device cannot be observed"),
        (lambda x: x.to_sparse(), RuntimeError, "a tensor in sparse or nested form cannot be observed"),
        (
            lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged),
            RuntimeError,
            "a tensor in sparse or nested form",
        ),
        (lambda x: x.double(), RuntimeError, "should be the same"),
        (lambda _: "abc", TypeError, "invalid combination of arguments"),
        (lambda _: torch.tensor(1.0), RuntimeError, r"got input of size: \[\]"),
    ],
    ids=["meta", "sparse", "nested", "type", "word", "number"],
)
def test_what_is_no_batch_is_refused_by_name_or_by_the_model_itself(change, kind, message, flow):
    flow.configure()
    calibrating = flow.quantize()
    with pytest.raises(kind, match=message):
        calibrating(change(images()))
    calibrating(images())
    flow.save()


def test_a_wrong_shape_during_calibration_is_the_users_own_error_and_changes_nothing(flow):
    flow.configure()
    calibrating = flow.quantize()
    with pytest.raises(RuntimeError, match="to have 3 channels, but got 5 channels"):
        calibrating(torch.zeros(2, 5, 8, 8))
    assert torch.is_grad_enabled()
    record = flow.record.read_bytes()
    calibrating(images(3))
    assert flow.record.read_bytes() != record


# -- save_model ----------------------------------------------------------------------------------------------------


def test_saving_before_calibration_says_which_layers_need_how_many_batches(flow):
    flow.configure(batch_num=2)
    calibrating = flow.quantize()
    refuses(RuntimeError, r"(?s)layer 'c' .*seen 0 of 2 batches; run 2 more.*'c2'.*'fc'", flow.save)
    calibrating(images(1))
    refuses(RuntimeError, r"(?s)layer 'c' .*seen 1 of 2 batches; run 1 more forward pass ", flow.save)
    calibrating(images(2))
    flow.save()


def test_an_empty_record(calibrated):
    calibrated.record.write_text("")
    refuses(RuntimeError, "is empty", calibrated.save)


def test_a_layer_without_an_entry_in_the_record_stays_float(calibrated, caplog):
    record = read_record(calibrated.record)
    write_record(replace(record, layers={name: record[name] for name in record if name != "c2"}), calibrated.record)
    calibrated.save()
    assert 'layer "c2": the record has no entry for it, so it stays float' in caplog.text
    content = json.loads((calibrated.folder / "out" / "q_quant.json").read_text())
    assert "c2" not in str(content["layers"])
    assert "the record has no entry for it" in str(content)


@pytest.mark.parametrize(
    ("old", "new", "kind", "match"),
    [
        ("scale_d", None, RuntimeError, "Cannot find scale_d of layer 'c'"),
        ("scale_d", "scale_d: 0", ValueError, "scale_d must be greater than 0"),
        ("scale_d", "scale_d: -1", ValueError, "scale_d must be greater than 0"),
        ("offset_d", "offset_d: 300", ValueError, r"offset_d must lie in \[-128, 127\]"),
        ("scale_w", None, RuntimeError, "7 scale_w but 8 offset_w"),
        ("key", 'key: "zz"', RuntimeError, '"zz": the model has no such layer'),
        ("scale_w", "scale_w: 0.5 shift_bit: 3", RuntimeError, "shift_bit is not supported"),
        ("act_type", 'act_type: "INT3"', RuntimeError, "act_type must be one of"),
    ],
)
def test_records_that_are_wrong(old, new, kind, match, calibrated):
    lines = calibrated.record.read_text().splitlines()
    place = next(index for index, line in enumerate(lines) if line.strip().startswith(old))
    lines[place : place + 1] = [] if new is None else [new]
    calibrated.record.write_text("\n".join(lines))
    refuses(kind, match, calibrated.save)
    assert not (calibrated.folder / "out").exists()


def test_a_record_that_is_none(calibrated):
    calibrated.record.write_text("garbage")
    refuses(RuntimeError, r"r\.txt:1:\d+", calibrated.save)


def test_a_balance_factor_of_a_wrong_length(calibrated):
    record = read_record(calibrated.record)
    write_record(record.with_layers({"c": replace(record["c"], tensor_balance_factor=(1.0,))}), calibrated.record)
    refuses(
        ValueError, "tensor_balance_factor must have one value per input channel, that is 3, got 1", calibrated.save
    )


def test_a_modified_file_that_is_no_onnx(calibrated):
    calibrated.onnx.write_bytes(b"\xff\xfe not a model")
    refuses(ValueError, "is not an ONNX model", calibrated.save)


def changed(path, change):
    model = onnx.load(path)
    change(model)
    onnx.save(model, path)


def test_a_modified_file_without_nodes_or_with_notes_that_cannot_be_read(calibrated):
    changed(calibrated.onnx, lambda model: model.metadata_props[0].__setattr__("value", '{"layers": 3}'))
    refuses(ValueError, r'm\.onnx": its metadata "amct" cannot be read', calibrated.save)
    calibrated.onnx.write_bytes(b"")
    refuses(ValueError, "it has no nodes", calibrated.save)


def test_a_modified_file_whose_input_has_no_type(calibrated):
    changed(calibrated.onnx, lambda model: model.graph.input[0].type.tensor_type.ClearField("elem_type"))
    refuses(RuntimeError, "does not say the type of its input", calibrated.save)


def test_a_modified_file_whose_large_tensors_are_lost(calibrated):
    model = onnx.load(calibrated.onnx)
    onnx.save_model(model, calibrated.onnx, save_as_external_data=True, location="large.bin", size_threshold=0)
    calibrated.save()
    (calibrated.folder / "large.bin").unlink()
    refuses(OSError, r"\"c.weight\" is kept in \"large.bin\", which does not exist", calibrated.save)


def test_an_operation_that_onnx_lacks(tmp_path, monkeypatch):
    export, with_gradients = torch.onnx.export, []

    def watched(*args, **kwargs):
        with_gradients.append(torch.is_grad_enabled())
        return export(*args, **kwargs)

    monkeypatch.setattr(torch.onnx, "export", watched)

    class Lacking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            return torch.special.bessel_j0(self.fc(x))

    flow = Flow(tmp_path, Lacking().eval(), torch.ones(2, 3)).configure()
    refuses(RuntimeError, "torch.onnx cannot export the model", flow.quantize)
    assert with_gradients
    assert not any(with_gradients)  # they forbid some views ("Cannot view a tensor")


def test_strange_characters_in_the_save_path_are_fine(calibrated):
    calibrated.save(calibrated.folder / "q*?:")
    assert (calibrated.folder / "q*?:_deploy_model.onnx").exists()


# -- DMQ -----------------------------------------------------------------------------------------------------------


def test_dmq_asked_for_but_not_prepared(flow):
    flow.simple("common_config { dmq_balancer { } }")
    refuses(RuntimeError, r"dmq_balancer, but the record .* does not exist; run quantize_preprocess", flow.quantize)
    amct.quantize_preprocess(flow.config, flow.record, flow.model, flow.example)
    refuses(RuntimeError, r"dmq_balancer, but the record .* is empty; run quantize_preprocess", flow.quantize)


def test_dmq_of_a_layer_without_factors(flow):
    flow.simple("common_config { dmq_balancer { } }")
    amct.quantize_preprocess(flow.config, flow.record, flow.model, flow.example)(flow.example)
    record = read_record(flow.record)
    write_record(type(record)({name: entry for name, entry in record.items() if name != "fc"}), flow.record)
    refuses(ValueError, 'layer "fc": .* has no tensor_balance_factor', flow.quantize)


def test_preprocessing_without_dmq(flow):
    flow.configure()
    refuses(
        RuntimeError,
        "no layer that is quantized has dmq_balancer_param",
        amct.quantize_preprocess,
        flow.config,
        flow.record,
        flow.model,
        flow.example,
    )


# -- models that cannot be copied or run ---------------------------------------------------------------------------


class Guarded(Small):
    """Holds something that cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.stream = (value for value in ())


def test_a_model_that_cannot_be_copied_is_refused_with_the_attribute(tmp_path):
    flow = Flow(tmp_path, Guarded().eval())
    refuses(RuntimeError, r'Guarded cannot be copied \(attribute "stream"\)', flow.configure)


def test_a_log_level_that_does_not_exist(flow, monkeypatch):
    monkeypatch.setenv("AMCT_LOG_LEVEL", "LOUD")
    refuses(ValueError, "AMCT_LOG_LEVEL", flow.configure)


@pytest.mark.parametrize("compile_model", [torch.jit.script, lambda model: torch.jit.trace(model, torch.zeros(2, 8))])
@pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated", "ignore::torch.jit.TracerWarning")
def test_a_script_module_is_refused_with_the_remedy(compile_model, tmp_path):
    compiled = compile_model(nn.Sequential(nn.Linear(8, 8)).eval())
    with pytest.raises(ModelError, match=r"is a ScriptModule.*give the nn\.Module that it was made from"):
        amct.create_quant_config(tmp_path / "config.json", compiled, torch.randn(2, 8))
    assert list(tmp_path.iterdir()) == []
