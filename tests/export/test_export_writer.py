"""Names, groups of files, tensors in files of their own, opset."""

from __future__ import annotations

import hashlib
import json
import logging

import numpy as np
import onnx
import pytest
from export_nets import calibrate, residual, run
from onnx import TensorProto, helper, numpy_helper

from amct.arguments import check_file_name
from amct.errors import ArgumentError, ArgumentTypeError, ExportError, FileError, ParseError
from amct.export import formats
from amct.export.deploy import ascend_model, fake_quant_model
from amct.export.formats import ExportedFiles, ExportedModel, file_name, save_model
from amct.export.onnx.messages import model_opset
from amct.export.onnx.runtimes import count_integer_kernels
from amct.export.qdq.exporter import qdq_model
from amct.export.request import SavePath, SaveRequest, check_opset
from amct.export.saving import OnnxFiles, save_files
from amct.model import Skip
from amct.model.quant_json import VERSION, QuantJson, quant_json_text, read_quant_json

DEPLOY, FAKE_QUANT, QDQ = (file_name(name) for name in ("deploy", "fake_quant", "qdq"))
DOCUMENT = QuantJson(version=VERSION, model="net", layers={}, skipped=(), files={})


class Files(OnnxFiles):
    """Ready models, written as they are."""

    def __init__(self, where, results, **others):
        names = {output.removesuffix("_model.onnx"): result for output, result in results.items()}
        super().__init__(request=SaveRequest(where=where, formats=tuple(names)), layers={}, **others)
        object.__setattr__(self, "results", names)

    def export(self, name):
        return self.results[name]


def save_models(where, models, record=None):
    results = {output: ExportedModel(model=model) for output, model in models.items()}
    if record is not None:
        results["record"] = ExportedFiles(files={"record.txt": [record]})
    return save_files(Files(where, results, model=next(iter(models.values())))).paths


def listed(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def exported():
    net, model = residual()
    factors, tensors = calibrate(net, model)
    return {
        DEPLOY: ascend_model(model, net.bindings(), factors),
        FAKE_QUANT: fake_quant_model(model, net.bindings(), factors),
        QDQ: qdq_model(model, net.bindings(), factors, tensors=tensors),
    }


@pytest.fixture
def models(exported):
    return {output: result.model for output, result in exported.items()}


# -- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("save_path", "deploy", "report"),
    [
        ("out/net", "out/net_deploy_model.onnx", "out/net_quant.json"),
        ("net", "net_deploy_model.onnx", "net_quant.json"),
        ("out/", "out/deploy_model.onnx", "out/quant.json"),
        ("", "deploy_model.onnx", "quant.json"),
        ("/a/b.c", "/a/b.c_deploy_model.onnx", "/a/b.c_quant.json"),
    ],
)
def test_files_are_named_after_the_save_path(save_path, deploy, report):
    path = SavePath.parse(save_path)
    assert str(path.file(DEPLOY)) == deploy
    assert str(path.quant_json) == report


def test_all_models_have_their_names():
    names = [SavePath.parse("p").file(file_name(name)).name for name in ("deploy", "fake_quant", "qdq")]
    assert names == ["p_deploy_model.onnx", "p_fake_quant_model.onnx", "p_qdq_model.onnx"]


def test_a_prefix_may_have_241_characters():
    assert SavePath.parse("out/" + "p" * 241).prefix == "p" * 241
    with pytest.raises(ArgumentError, match="may have 241 characters, got 242"):
        SavePath.parse("out/" + "p" * 242)


@pytest.mark.parametrize("save_path", ["out/..", ".", "a\0b"])
def test_a_prefix_that_is_no_file_name_is_refused(save_path):
    with pytest.raises(ArgumentError, match='save_path: expected "folder/prefix"'):
        SavePath.parse(save_path)


def test_save_path_must_be_text():
    with pytest.raises(ArgumentTypeError, match="save_path: expected text or a path, got int"):
        SavePath.parse(7)


def test_file_names_are_checked():
    check_file_name("a/" + "n" * 254, "config_file")
    for name in ("", "folder/", "a/.."):
        with pytest.raises(ArgumentError, match="config_file: expected the name of a file"):
            check_file_name(name, "config_file")
    with pytest.raises(ArgumentError, match="may have 254 characters, got 255"):
        check_file_name("n" * 255, "config_file")
    with pytest.raises(ArgumentTypeError, match="config_file: expected the name of a file, got NoneType"):
        check_file_name(None, "config_file")


# -- files -----------------------------------------------------------------------------------------------------------


def test_models_and_report_are_written_and_run(tmp_path, models):
    target = SavePath.parse(str(tmp_path / "new" / "folder" / "net"))
    written = save_models(target, models)
    assert [path.name for path in written] == [
        "net_deploy_model.onnx",
        "net_fake_quant_model.onnx",
        "net_qdq_model.onnx",
        "net_quant.json",
    ]
    assert listed(written[0].parent) == sorted(path.name for path in written)
    (tmp_path / "usual").mkdir()
    (tmp_path / "usual" / "file").touch()  # the umask decides, as for any file
    assert written[0].stat().st_mode == (tmp_path / "usual" / "file").stat().st_mode
    assert written[0].parent.stat().st_mode == (tmp_path / "usual").stat().st_mode
    for output, path in zip(models, written, strict=False):
        assert onnx.load(path) == models[output]
    net, _ = residual()
    assert run(str(written[2]), net.data())["y"].shape == (2, 5)


def test_overwriting_only_warns(tmp_path, models, caplog):
    target = SavePath.parse(str(tmp_path / "net"))
    save_models(target, models)
    target.quant_json.unlink()
    with caplog.at_level(logging.WARNING):
        save_models(target, models)
    names = ", ".join(target.file(output).name for output in models)
    assert [each.message for each in caplog.records if each.levelno > logging.INFO] == [
        f"{tmp_path}: {names} exist and are replaced"
    ]


def test_a_folder_that_cannot_be_is_said(tmp_path, models):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="one part of the path is a file"):
        save_models(SavePath.parse(str(tmp_path / "file" / "net")), models)


def test_a_name_that_is_a_folder_is_said_and_nothing_is_written(tmp_path, models):
    (tmp_path / "net_qdq_model.onnx").mkdir()
    with pytest.raises(FileError, match="it is a folder"):
        save_models(SavePath.parse(str(tmp_path / "net")), models)
    assert listed(tmp_path) == ["net_qdq_model.onnx"]


def test_opsets_that_can_be_asked_for():
    for opset in (16, 21):
        check_opset(opset)
    for opset in (11, 15, 22):
        with pytest.raises(ArgumentError, match=rf"opset: expected 16\.\.21, got {opset}"):
            check_opset(opset)


def test_opset_of_a_model():
    graph = helper.make_graph([], "g", [], [])
    opsets = [helper.make_opsetid("com.microsoft", 1), helper.make_opsetid("", 19)]
    assert model_opset(helper.make_model(graph, opset_imports=opsets)) == 19


# -- large models ----------------------------------------------------------------------------------------------------


def split_from(monkeypatch, size):
    monkeypatch.setattr(formats, "EXTERNAL_THRESHOLD", size)


def test_large_tensors_move_to_files_of_their_own_largest_first(tmp_path, models, monkeypatch):
    target = SavePath.parse(str(tmp_path / "net"))
    model = {FAKE_QUANT: models[FAKE_QUANT]}
    size = len(model[FAKE_QUANT].SerializeToString())
    before = model[FAKE_QUANT].SerializeToString()
    split_from(monkeypatch, size - 3000)
    written = save_models(target, model)
    # first.w and second.w (2304 bytes each) are the largest; two are needed to save 3000 bytes.
    assert sorted(path.name for path in written[1:-1]) == ["first.w_fakequant.external", "second.w_fakequant.external"]
    assert {path.stat().st_size for path in written[1:-1]} == {2304}
    assert written[0].stat().st_size < size - 3000
    assert model[FAKE_QUANT].SerializeToString() == before
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(written[0]).graph.initializer}
    expected = {tensor.name: numpy_helper.to_array(tensor) for tensor in model[FAKE_QUANT].graph.initializer}
    assert stored.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(stored[name], value)
    net, _ = residual()
    np.testing.assert_array_equal(run(str(written[0]), net.data())["y"], run(model[FAKE_QUANT], net.data())["y"])


def test_small_models_stay_whole(tmp_path, models, monkeypatch):
    model = models[QDQ]
    size = len(model.SerializeToString())
    split_from(monkeypatch, size + 8)
    assert len(save_model(tmp_path / "whole.onnx", model)) == 1
    split_from(monkeypatch, size - 8)
    assert len(save_model(tmp_path / "split.onnx", model)) == 2


def test_file_names_of_tensors_are_safe_and_different(tmp_path, monkeypatch):
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [64]) for name in "xy"]
    weights = [numpy_helper.from_array(np.full(64, i, np.float32), name) for i, name in enumerate(("a/w", "a:w"))]
    weights.append(helper.make_tensor("typed", TensorProto.FLOAT, [64], np.arange(64.0)))  # not stored as raw bytes
    nodes = [helper.make_node("Sum", ["x", "a/w", "a:w", "typed"], ["y"], name="sum")]
    model = helper.make_model(
        helper.make_graph(nodes, "g", values[:1], values[1:], weights),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=10,
    )
    split_from(monkeypatch, 320)
    written = save_model(tmp_path / "m.onnx", model)
    assert {path.name for path in written} == {"m.onnx", "a_w.external", "a_w_1.external", "typed.external"}
    np.testing.assert_array_equal(run(str(written[0]), {"x": np.zeros(64, np.float32)})["y"], np.arange(64) + 1)


def test_a_model_that_cannot_be_split_is_refused(tmp_path, models, monkeypatch):
    split_from(monkeypatch, 100)
    with pytest.raises(
        ExportError, match="bytes remain besides the tensors that can be stored apart; the limit is 100"
    ):
        save_model(tmp_path / "m.onnx", models[QDQ])
    assert listed(tmp_path) == []


# -- <prefix>_quant.json ---------------------------------------------------------------------------------------------


def test_quant_json_tells_layers_nodes_fusions_and_reasons(exported, tmp_path):
    net, model = residual()
    factors, tensors = calibrate(net, model)
    del tensors["second_out"]
    results = {**exported, QDQ: qdq_model(model, net.bindings(), factors, tensors=tensors)}
    where = SavePath.parse(tmp_path / "net")
    skipped = [Skip("norm", "LayerNorm is not quantizable")]
    save_files(Files(where, results, model=model, folded={"stem": ["bn1"]}, skipped=skipped))
    document = json.loads(where.quant_json.read_text())
    assert document["version"] == 2
    assert list(document["layers"]) == ["stem", "first", "second", "fc"]
    stem = document["layers"]["stem"]
    assert (stem["type"], stem["kind"], stem["data_bits"]) == ("Conv2d", "conv", [8])
    assert stem["original_layers"] == ["stem", "bn1"]
    assert stem["files"]["deploy"] == {
        "node": "stem",
        "operator": "Conv",
        "weight_bits": 8,
        "inserted": ["stem.quant", "stem.dequant"],
    }
    assert stem["files"]["qdq"]["weight_bits"] == 8
    assert document["layers"]["fc"]["original_layers"] == ["fc"]
    assert document["skipped"] == [{"layer": "norm", "reason": "LayerNorm is not quantizable"}]
    assert [skip["layer"] for skip in document["files"]["net_qdq_model.onnx"]["skipped"]] == ["second_out"]
    nodes = {node.name for node in exported[DEPLOY].model.graph.node}
    assert all(set(entry["files"]["deploy"]["inserted"]) <= nodes for entry in document["layers"].values())


def test_quant_json_lists_the_files_and_refuses_those_of_another_save(tmp_path, models):
    target = SavePath.parse(tmp_path / "net")
    written = save_models(target, models, record=b"record")
    document = read_quant_json(target.quant_json)
    assert set(document.files) == {path.name for path in written} - {"net_quant.json"}
    record = document.files["net_record.txt"]
    assert (record.format, record.size, record.sha256) == ("txt", 6, hashlib.sha256(b"record").hexdigest())
    (tmp_path / "net_deploy_model.onnx").unlink()
    read_quant_json(target.quant_json)
    (tmp_path / "net_record.txt").write_bytes(b"Record")
    with pytest.raises(FileError, match=r'net_record\.txt" is not the file that "net_quant\.json" was written with'):
        read_quant_json(target.quant_json)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda content: {**content, "version": 1}, "at version"),
        (lambda content: {**content, "surprise": 1}, "at surprise"),
        (lambda content: {**content, "skipped": [{"layer": 3, "reason": "x"}]}, r"at skipped\.0\.layer"),
        (lambda content: [content], "at the whole file"),
    ],
)
def test_a_quant_json_of_another_shape_is_refused(tmp_path, change, place):
    path = tmp_path / "net_quant.json"
    path.write_text(json.dumps(change(json.loads(quant_json_text(DOCUMENT)))))
    with pytest.raises(ParseError, match=rf"expected what quantization wrote.*version 2.*{place}"):
        read_quant_json(path)


def test_kernels_of_a_float_model_are_counted_as_float(tmp_path):
    _, model = residual()
    onnx.save(model, tmp_path / "float.onnx")
    count = count_integer_kernels(tmp_path / "float.onnx")
    assert (count.integer, count.total, count.share) == (0, 4, 0.0)


def test_a_model_without_products_counts_as_all_integer(tmp_path):
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in "xy"]
    model = helper.make_model(
        helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", values[:1], values[1:]),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=10,
    )
    onnx.save(model, tmp_path / "relu.onnx")
    assert count_integer_kernels(tmp_path / "relu.onnx").share == 1
