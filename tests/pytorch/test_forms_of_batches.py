"""Batches as users have them: arrays, other floating types, lists of pictures; errors name the user's argument."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import amct.pytorch
from amct.errors import AmctError, ArgumentTypeError, CalibrationError, ModelError


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())


BATCH = torch.rand(4, 3, 8, 9, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "data",
    [
        BATCH.double(),
        BATCH.numpy(),
        [BATCH.double().numpy()],
        [(BATCH.numpy(), np.arange(4))],
        [[BATCH.double(), torch.arange(4)]],
        [{"input": BATCH.numpy().astype(">f4")}],
    ],
    ids=["float64", "array", "list of arrays", "with labels", "a loader's list", "by name, big endian"],
)
def test_the_same_numbers_in_any_form_give_the_same_parameters(data):
    expected = amct.pytorch.quantize(network(), BATCH).record.layers
    quantized = amct.pytorch.quantize(network(), data)
    assert quantized.record.layers == expected
    assert [each.sqnr for each in quantized.compare(data)]


def test_half_batches_for_a_float_model_and_float_batches_for_a_half_one():
    halves = BATCH.half()
    assert amct.pytorch.quantize(network(), halves).record.layers == (
        amct.pytorch.quantize(network(), halves.float()).record.layers
    )
    assert amct.pytorch.quantize(network().half(), BATCH).layers == ("0", "2")


class Detector(nn.Module):
    """Takes a list of pictures of different sizes, as torchvision's detectors do."""

    def __init__(self):
        super().__init__()
        self.backbone = network()

    def forward(self, images, targets=None):
        assert targets is None
        assert isinstance(images, list)
        return self.backbone(torch.stack([image[:, :8, :9] for image in images]))


def test_a_list_of_pictures_is_one_argument_of_a_detector():
    pictures = [torch.rand(3, 8 + number, 10) for number in range(4)]
    for data in ([pictures[:2], pictures[2:]], [[picture.numpy() for picture in pictures]]):
        assert amct.pytorch.quantize(Detector(), data, part="backbone").layers == ("0", "2")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda data: amct.pytorch.quantize(network(), data), ModelError, "^calibration_data: expected batches"),
        (lambda data: amct.pytorch.quantize(network(), BATCH).compare(data), ModelError, "^data: expected batches"),
        (lambda data: amct.pytorch.prepare_qat(network(), data), ModelError, "^batches: expected batches"),
    ],
    ids=["quantize", "compare", "prepare_qat"],
)
def test_errors_name_the_argument_that_was_given(call, error, message):
    with pytest.raises(error, match=message):
        call([["a", "b"]])


def test_errors_of_the_whole_data_name_the_argument_too(tmp_path):
    quantized = amct.pytorch.quantize(network(), BATCH)
    with pytest.raises(ArgumentTypeError, match=r"^data: expected a tensor, .* got int"):
        quantized.compare(5)
    with pytest.raises(CalibrationError, match=r"^data is empty"):
        quantized.report(tmp_path / "r.html", [])
    with pytest.raises(AmctError, match=r"^calibration_data does not fit Sequential.forward\(input\)"):
        amct.pytorch.quantize(network(), [(BATCH, {"image": BATCH})])
