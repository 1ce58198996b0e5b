"""A part of a model is quantized by name, on what the whole model gives it, and the whole runs with it."""

import json

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import amct.pytorch
from amct.errors import ArgumentError, ExportError, ModelError


class Detector(nn.Module):
    """Scales each picture, and keeps as many boxes as there are scores above a limit."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 5, 3, padding=1))
        self.head = nn.Linear(5, 5)
        self.unused = nn.Linear(2, 2)

    def forward(self, pictures):
        batch = torch.stack([picture * 2 - 1 for picture in pictures])
        rows = self.head(self.backbone(batch).flatten(2).transpose(1, 2))
        found = []
        for each in rows:
            boxes = [row[:4] for row in each if float(row[4]) > 0]
            found.append(torch.stack(boxes) if boxes else each[:0, :4])
        return found


@pytest.fixture
def detector():
    torch.manual_seed(0)
    return Detector().eval()


@pytest.fixture
def pictures():
    generator = torch.Generator().manual_seed(1)
    return [[torch.rand(3, 6, 6, generator=generator) for _ in range(2)] for _ in range(3)]


def as_argument(batch):
    return (batch,)


def quantized_part(detector, pictures, **options):
    return amct.pytorch.quantize(detector, pictures, inputs=as_argument, **options)


def test_the_part_is_exported_and_the_model_runs_with_it(detector, pictures, tmp_path):
    quantized = quantized_part(detector, pictures, part="backbone")
    assert quantized.layers == ("0", "2")
    quantized.save(tmp_path / "backbone", formats=["qdq", "fake_quant"])

    given = torch.stack([picture * 2 - 1 for picture in pictures[0]])
    session = onnxruntime.InferenceSession(tmp_path / "backbone_fake_quant_model.onnx")
    features = session.run(None, {session.get_inputs()[0].name: given.numpy()})[0]
    with torch.no_grad():
        np.testing.assert_allclose(quantized.model.backbone(given).numpy(), features, atol=1e-5)
        expected = detector.backbone(given)
        assert not torch.equal(detector.backbone(given), quantized.model.backbone(given))
    assert np.square(features - expected.numpy()).mean() < 0.001 * float(expected.square().mean())

    found = quantized(pictures[0], inputs=as_argument)
    with torch.no_grad():
        assert [len(boxes) for boxes in found] == [len(boxes) for boxes in quantized.model(pictures[0])]
    assert isinstance(quantized.model, Detector)
    assert quantized.compare(pictures, inputs=as_argument)[0].sqnr > 30
    assert quantized.report(tmp_path / "page.html", pictures, inputs=as_argument).exists()
    assert json.loads((tmp_path / "backbone_quant.json").read_text())["files"]


def test_a_detector_as_a_whole_is_offered_its_parts_before_calibration(detector, pictures, tmp_path, caplog):
    quantized = quantized_part(detector, pictures)
    first = next(record for record in caplog.records if "no file can hold it" in record.getMessage())
    assert 'part="backbone"' in first.getMessage()
    assert "head" not in first.getMessage()
    assert caplog.records.index(first) < [record.getMessage()[:10] for record in caplog.records].index("calibrated")
    with pytest.raises(ExportError, match='part="backbone"'):
        quantized.save(tmp_path / "whole")


def test_a_part_that_is_not_there_or_not_called_is_refused(detector, pictures):
    with pytest.raises(ArgumentError, match=r'a module of Detector, got "backbon".*backbone'):
        quantized_part(detector, pictures, part="backbon")
    with pytest.raises(ModelError, match='does not call "unused"'):
        quantized_part(detector, pictures, part="unused")
