"""A written file in other runtimes: what each computes, in which kernels, and the command that compares them."""

from __future__ import annotations

import json
import sys

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import amct.onnx_model
import amct.pytorch
from amct.cli import main
from amct.errors import AmctError, ArgumentError, ModelError
from amct.export.onnx.runtimes import OPENVINO, PLAIN, RUNTIMES, check_runtime, count_integer_kernels, load
from amct.onnx_model.comparing import measure_runtime
from amct.pytorch.door import reference_onnx


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Files of a small network, its float form, and data."""
    folder = tmp_path_factory.mktemp("runtimes")
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.ReLU6(), nn.Flatten(), nn.Linear(288, 10)
    ).eval()
    data = np.random.default_rng(0).normal(size=(8, 3, 10, 10)).astype(np.float32)
    np.save(folder / "data.npy", data)
    quantized = amct.pytorch.quantize(model, [torch.from_numpy(data[:4]), torch.from_numpy(data[4:])])
    quantized.save(folder / "net", ["qdq", "fake_quant", "deploy"], check=False)
    onnx.save(reference_onnx(model, data), folder / "float.onnx")
    return folder, data


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_file_computes_the_same_in_every_runtime(saved, runtime):
    folder, data = saved
    model = onnx.load(folder / "net_qdq_model.onnx")
    integers = [node.output[0] for node in model.graph.node if node.op_type == "QuantizeLinear"]
    expected = load(model, PLAIN, integers).run({"input": data})
    found = load(model, runtime, ["input", *integers]).run({"input": data})
    assert found.keys() == {"input", *expected}
    np.testing.assert_array_equal(found["input"], data)
    for name in integers:  # a tie may be rounded to the other side
        assert np.abs(found[name].astype(int) - expected[name].astype(int)).max() <= 1
    (output,) = (value.name for value in model.graph.output)
    np.testing.assert_allclose(found[output], expected[output], rtol=0.02, atol=0.02 * np.abs(expected[output]).max())


def test_what_runs_in_integers_is_counted(saved):
    folder, _ = saved
    found = {name: count_integer_kernels(folder / "net_qdq_model.onnx", name) for name in RUNTIMES}
    assert {name: each.total for name, each in found.items()} == dict.fromkeys(RUNTIMES, 3)
    assert found[PLAIN].integer == found["onnxruntime-basic"].integer == 0
    assert found["onnxruntime-extended"].share == found["onnxruntime"].share == found[OPENVINO].share == 1
    assert count_integer_kernels(folder / "net_fake_quant_model.onnx", OPENVINO).share == 0


def test_one_file_is_compared_tensor_by_tensor(saved):
    folder, data = saved
    measured = measure_runtime(folder / "net_qdq_model.onnx", data, OPENVINO)
    model = onnx.load(folder / "net_qdq_model.onnx")
    quantized = [node.input[0] for node in model.graph.node if node.op_type == "QuantizeLinear"]
    assert list(measured.layers) == quantized
    assert all(each.largest_error <= 1 for each in measured.layers.values())
    assert measured.outputs[0].sqnr > 40


def test_the_first_tensor_that_differs_is_named(saved, monkeypatch, capsys):
    """A runtime that multiplies a tensor by two parts there, not before."""
    folder, _ = saved
    from amct.export.onnx import runtimes
    from amct.onnx_model import comparing

    file = folder / "net_qdq_model.onnx"
    names = [node.input[0] for node in onnx.load(file).graph.node if node.op_type == "QuantizeLinear"]

    def wrong(model, runtime, watched=()):
        if runtime == "onnxruntime":
            changed = onnx.ModelProto()
            changed.CopyFrom(model)
            node = next(each for each in changed.graph.node if each.input and each.input[0] == names[2])
            changed.graph.node.insert(0, helper.make_node("Add", [names[2], names[2]], ["twice"]))
            node.input[0] = "twice"
            return runtimes.load(changed, runtime, watched)
        return runtimes.load(model, runtime, watched)

    monkeypatch.setattr(comparing, "load", wrong)
    arguments = ["compare", str(file), "--runtime", "onnxruntime", "--data", str(folder / "data.npy"), "--json"]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parts_at"] == names[2]
    assert (found["runtime"], found["integer"], found["products"]) == ("onnxruntime", 3, 3)
    assert main(arguments[:-1]) == 0
    assert f"first at {names[2]} (40 dB)" in capsys.readouterr().out


@pytest.mark.parametrize("runtime", ["openvino", "onnxruntime-none"])
def test_the_command_runs_the_quantized_file_in_a_runtime(saved, runtime, tmp_path, capsys):
    folder, data = saved
    files = [str(folder / "float.onnx"), str(folder / "net_qdq_model.onnx")]
    arguments = ["compare", *files, "--runtime", runtime, "--data", str(folder / "data.npy"), "--batch-size", "8"]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    compared = amct.onnx_model.compare(*files, data, runtime=runtime)
    assert [row["sqnr"] for row in found["layers"]] == pytest.approx([each.sqnr for each in compared])
    assert found["integer"] == (3 if runtime == OPENVINO else 0)
    report = tmp_path / "report.html"
    assert main([*arguments, "--report", str(report)]) == 0
    assert f"integers   {found['integer']} of 3" in capsys.readouterr().out
    assert f"net_qdq_model.onnx in {runtime}" in report.read_text()


def test_a_file_with_several_inputs_takes_arrays_of_their_names(tmp_path, capsys):
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in ("a", "b", "c")]
    graph = helper.make_graph([helper.make_node("Add", ["a", "b"], ["c"])], "sum", values[:2], values[2:])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), tmp_path / "sum.onnx"
    )
    np.savez(tmp_path / "data.npz", a=np.ones((3, 4), np.float32), b=np.ones((3, 4), np.float32))
    files = [str(tmp_path / "sum.onnx"), "--data", str(tmp_path / "data.npz")]
    assert main(["compare", *files, "--runtime", "openvino", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["output"] for row in found["outputs"]] == ["c"]
    assert (found["products"], found["parts_at"]) == (0, None)


def test_mistakes_have_one_clear_error(saved, monkeypatch, capsys):
    folder, _ = saved
    with pytest.raises(ArgumentError, match=r'got "openvinno"\. Did you mean "openvino"'):
        check_runtime("openvinno")
    data = ["--data", str(folder / "data.npy")]
    file = str(folder / "net_qdq_model.onnx")
    assert main(["compare", file, "--runtime", "onnxruntime", "--top1", *data]) == 2
    assert "--top1: it needs a float model" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(AmctError, match=r"openvino package, which is not installed: pip install amct\[bench\]"):
        check_runtime(OPENVINO)
    assert main(["compare", file, "--runtime", "openvino", "--data", "absent.npy"]) == 2
    told = capsys.readouterr().err
    assert "pip install amct[bench]" in told
    assert told.count("\n") == 1


def test_a_model_that_openvino_cannot_load_is_one_line():
    node = helper.make_node("Nonsense", ["x"], ["y"], domain="of.nobody")
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 2]) for name in "xy"]
    weights = [numpy_helper.from_array(np.zeros(1, np.float32), "unused")]
    graph = helper.make_graph([node], "net", value[:1], value[1:], weights)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("of.nobody", 1)]
    with pytest.raises(ModelError, match=r"^OpenVINO cannot load the model: .*Nonsense[^\n]*$"):
        load(helper.make_model(graph, opset_imports=opsets), OPENVINO)
