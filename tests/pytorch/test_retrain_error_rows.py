"""Mistakes in pruning and training that were tried with the reference, by number: the same exceptions, own messages."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import amct_pytorch as amct

PRUNING = "prune_config {{ filter_pruner {{ balanced_l2_norm_filter_prune {{ prune_ratio: {} }} }} }}"
EXAMPLE = torch.zeros(1, 3, 8, 8)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 3)).eval()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(PRUNING.format(0), r"prune\.cfg:1:\d+: .*prune_ratio must be greater than 0, got 0", id="row 53"),
        pytest.param(PRUNING.format(1.0), r"prune\.cfg:1:\d+: .*prune_ratio must be less than 1, got 1", id="row 54"),
        pytest.param("retrain_data_quant_config { ulq_quantize { } }", r"Add prune_config", id="row 55"),
    ],
)
def test_configs_of_pruning(model, tmp_path, text, message):
    (tmp_path / "prune.cfg").write_text(text)
    with pytest.raises(ValueError, match=message):
        amct.create_prune_retrain_model(model, EXAMPLE, "prune.cfg", "record.txt")
    assert not (tmp_path / "record.txt").exists()


def test_saving_before_any_training_step(model, tmp_path):
    """Row 56."""
    amct.create_quant_retrain_config("config.json", model, EXAMPLE)
    trainable = amct.create_quant_retrain_model("config.json", model, "record.txt", EXAMPLE)
    with pytest.raises(RuntimeError, match=r'layer "0": the range of its input is not known yet; run at least 1 batch'):
        amct.save_quant_retrain_model("config.json", trainable, "record.txt", "out/net", EXAMPLE)
    assert not list(tmp_path.glob("out/*"))


def test_restoring_from_the_state_of_another_model(model):
    """Row 57."""
    amct.create_quant_retrain_config("config.json", model, EXAMPLE)
    torch.save(nn.Linear(2, 2).state_dict(), "other.pth")
    with pytest.raises(RuntimeError, match=r'does not fit .*it lacks "0\.weight".*the model has no "weight"'):
        amct.restore_quant_retrain_model("config.json", model, "record.txt", EXAMPLE, "other.pth")
