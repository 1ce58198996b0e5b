"""A report of ONNX files: grids from the file or its record, numbers as in memory."""

from __future__ import annotations

import shutil

import numpy as np
import onnx
import pytest
import torch
from onnx_nets import Residual, exported, images, seeded

import amct.onnx_model as amct
from amct.errors import FileError, ModelError
from amct.onnx_model.file_report import files_report


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("file_report")
    onnx.save(exported(seeded(Residual), torch.from_numpy(images())), folder / "float.onnx")
    config = amct.QuantConfig(layers={"/pointwise/Conv": amct.LayerConfig(migration_strength=0.5)})
    quantized = amct.quantize(folder / "float.onnx", [images(0), images(1)], config)
    quantized.save(folder / "q")
    return folder, quantized


def in_memory(quantized, data):
    return quantized.report_content(data)


def test_a_fake_quant_file_tells_what_the_model_in_memory_tells(saved):
    folder, quantized = saved
    data = [images(4), images(5, count=2)]
    expected = in_memory(quantized, data)
    found = files_report(
        folder / "float.onnx", folder / "q_fake_quant_model.onnx", data, files=[folder / "q_quant.json"]
    )
    content = found.content
    assert (content.model, content.measured_on) == ("float", "2 batches")
    assert content.figures == expected.figures
    assert (content.fused, content.skipped, content.config) == (expected.fused, expected.skipped, expected.config)
    assert [layer.name for layer in content.layers] == [layer.name for layer in expected.layers]
    for mine, other in zip(content.layers, expected.layers, strict=True):
        assert (mine.type, mine.inputs, mine.weight_bits) == (other.type, other.inputs, other.weight_bits)
        assert (mine.sqnr, mine.weights) == (other.sqnr, other.weights)
    assert [file.name for file in content.files] == ["q_quant.json"]
    assert found.measured.batches == 2


def test_grids_of_a_qdq_file_stand_in_the_file(saved, tmp_path):
    folder, quantized = saved
    shutil.copy(folder / "q_qdq_model.onnx", tmp_path / "alone.onnx")
    content = files_report(folder / "float.onnx", tmp_path / "alone.onnx", images(4)).content
    # What the balanced layer's input was divided by is told by the record only, which is not beside this file.
    assert [layer.name for layer in content.layers] == [name for name in quantized.layers if name != "/pointwise/Conv"]
    for layer in content.layers:
        entry = quantized.record[layer.name]
        (given,) = layer.inputs
        assert given.scale == pytest.approx(entry.scale_d, rel=1e-6)
        assert (given.offset, given.bits) == (entry.offset_d, 8)
    assert content.config == "not known: there is no quant.json beside the model"
    beside = files_report(folder / "float.onnx", folder / "q_qdq_model.onnx", images(4)).content
    assert [layer.name for layer in beside.layers] == list(quantized.layers)
    # The balanced layer's maker has its channels divided in this file: other values, but no harm.
    assert [layer.name for layer in beside.layers if layer.sqnr is None] == ["/depthwise/Conv"]
    assert min(layer.sqnr for layer in beside.layers if layer.sqnr is not None) > 20
    balanced = next(layer for layer in beside.layers if layer.name == "/pointwise/Conv")
    expected = next(layer for layer in in_memory(quantized, images(4)).layers if layer.name == "/pointwise/Conv")
    assert balanced.inputs == expected.inputs
    assert {layer.weight_bits for layer in beside.layers if layer.weights is not None} == {8}
    assert beside.figures[-1] == in_memory(quantized, images(4)).figures[-1]  # they are stored in 8 bits all the same


def test_the_metric_judges_both_files(saved):
    folder, _ = saved
    data = [(images(4), np.zeros(4, np.int64)), (images(5, count=1), np.zeros(1, np.int64))]

    def first_class(output, batch):
        return (output.argmax(1) == batch[1]).mean()

    found = files_report(folder / "float.onnx", folder / "q_qdq_model.onnx", data, metric=first_class)
    with torch.no_grad():
        scores = seeded(Residual)(torch.from_numpy(np.concatenate([values for values, _ in data])))
    assert found.measured.metric[0] == pytest.approx((scores.argmax(1) == 0).double().mean())
    assert found.content.figures[0].label == "first class"


def test_what_cannot_be_reported(saved, tmp_path):
    folder, _ = saved
    shutil.copy(folder / "q_fake_quant_model.onnx", tmp_path / "q_fake_quant_model.onnx")
    with pytest.raises(ModelError, match=r"quantizes no layer of the float model.*no q_record\.txt beside it"):
        files_report(folder / "float.onnx", tmp_path / "q_fake_quant_model.onnx", images(4))
    (tmp_path / "q_record.txt").write_text((folder / "q_record.txt").read_text().replace('key: "/', 'key: "other/'))
    with pytest.raises(ModelError, match=r"q_record\.txt beside it has none either"):
        files_report(folder / "float.onnx", tmp_path / "q_fake_quant_model.onnx", images(4))
    with pytest.raises(FileError, match="cannot be read"):
        files_report(folder / "float.onnx", folder / "q_qdq_model.onnx", images(4), files=["nothing"])
    with pytest.raises(ModelError, match="already quantized"):
        files_report(folder / "q_qdq_model.onnx", folder / "q_qdq_model.onnx", images(4))
