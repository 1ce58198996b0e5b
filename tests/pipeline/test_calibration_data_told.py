"""How much of which data a calibration used, and how pictures were prepared, is told wherever a user looks."""

from __future__ import annotations

import json
import logging

import numpy as np
import onnx
import pytest
import torch
from PIL import Image
from torch import nn

import amct.pytorch
from amct.cli import main
from amct.data import Preparation, StoredBatches
from amct.pytorch.door import reference_onnx


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two classes of ten pictures, and the network as a file."""
    root = tmp_path_factory.mktemp("told")
    random = np.random.default_rng(0)
    for number in range(20):
        path = root / "pictures" / "ab"[number // 10] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (9, 8, 3), np.uint8)).save(path)
    onnx.save(reference_onnx(network().eval(), np.zeros((1, 3, 9, 8), np.float32)), root / "net.onnx")
    return root


def quantized(data, config=None):
    return amct.pytorch.quantize(network(), data, config)


def cfg(tmp_path, text):
    (tmp_path / "a.cfg").write_text(text)
    return tmp_path / "a.cfg"


def test_data_that_tells_its_length_is_counted_in_samples(caplog, tmp_path):
    images = torch.rand(10, 3, 9, 8)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images), batch_size=4)
    with caplog.at_level(logging.INFO):
        assert str(quantized(loader).calibration) == "10 of 10 samples"
        assert "calibrated on 10 of 10 samples" in caplog.text
    two = quantized(loader, cfg(tmp_path, "batch_num: 2"))
    assert str(two.calibration) == "8 of 10 samples"
    assert "calibrated on 8 of 10 samples" in two.summary()
    assert str(quantized(images).calibration) == "10 of 10 samples"
    assert str(quantized([images[:3], images[3:]]).calibration) == "2 of 2 batches"
    assert str(quantized(iter([images[:3]])).calibration) == "1 batch"
    assert str(quantized((images[:5] for _ in range(3)), cfg(tmp_path, "batch_num: 2")).calibration) == "2 batches"


@pytest.mark.parametrize("config", ["", "activation_offset: false"])
def test_a_config_without_batch_num_means_all_the_data(config, tmp_path):
    batches = [torch.rand(2, 3, 9, 8) for _ in range(5)]
    assert str(quantized(batches, cfg(tmp_path, config)).calibration) == "5 of 5 batches"


def test_the_command_counts_pictures_and_says_what_was_done_to_them(folder, tmp_path, capsys):
    command = f"quantize {folder}/net.onnx --data {folder}/pictures --scale 0.5 --no-check -o {tmp_path}/out"
    assert main(command.split()) == 0
    assert capsys.readouterr().out.splitlines()[0] == "calibrated  on 20 of 20 pictures"
    assert main([*command.split(), "--batches", "6", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["calibrated"] == "6 of 20 pictures"
    document = json.loads((tmp_path / "out_quant.json").read_text())
    expected = {"used": 6, "of": 20, "unit": "pictures", "preparation": "RGB, resized to 9 x 8, times 0.5"}
    assert document["calibration"] == expected


def test_a_comparison_with_another_preparation_warns(folder, tmp_path, capsys):
    data = f"--data {folder}/pictures --scale 0.5"
    assert main(f"quantize {folder}/net.onnx {data} --no-check -o {tmp_path}/out".split()) == 0
    capsys.readouterr()
    assert main(f"compare {folder}/net.onnx {tmp_path}/out {data}".split()) == 0
    assert "otherwise" not in capsys.readouterr().err
    assert main(f"compare {folder}/net.onnx {tmp_path}/out {data} --color bgr".split()) == 0
    assert (
        "prepared otherwise than for calibration: BGR, resized to 9 x 8, times 0.5 here, RGB,"
        in capsys.readouterr().err
    )
    np.save(tmp_path / "other.npy", np.ones((2, 3, 9, 8), np.float32))  # arrays have no colours
    assert main(f"compare {folder}/net.onnx {tmp_path}/out --data {tmp_path}/other.npy".split()) == 0
    assert "otherwise" not in capsys.readouterr().err


def test_pictures_without_a_chosen_color_have_that_of_the_models(folder):
    from amct.caffe.model import caffe_batches
    from amct.pytorch.inputs import torch_batches

    data = StoredBatches(folder / "pictures", 1)
    rgb, bgr = torch_batches(network(), data).first()[0][0].numpy(), caffe_batches(data).first()
    np.testing.assert_array_equal(rgb, bgr[:, ::-1])
    chosen = StoredBatches(folder / "pictures", 1, prepare=Preparation(color="bgr"))
    np.testing.assert_array_equal(torch_batches(network(), chosen).first()[0][0].numpy(), bgr)


@pytest.mark.parametrize(
    ("preparation", "text"),
    [
        (Preparation(), "RGB"),
        (Preparation(color="gray", size=(3, 4), crop=(2, 2)), "gray, resized to 3 x 4, cropped to 2 x 2"),
        (Preparation(color="bgr", mean=np.float32([104, 117, 123.5])), "BGR, minus 104,117,123.5"),
        (
            Preparation(mean=np.ones((3, 2, 2), np.float32), scale=(1.0, 0.5)),
            "RGB, minus a mean of 3 x 2 x 2, times 1,0.5",
        ),
    ],
)
def test_a_preparation_in_words(preparation, text):
    assert preparation.text(pictures=True) == text
