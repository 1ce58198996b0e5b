"""Records, shapes and trained outputs of AMCT for PyTorch 9.0.0."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from prune_nets import GOLDEN, retrain_net, train_three_steps

import amct_pytorch
from amct.record import read_record


@pytest.mark.parametrize("case", ["prune_03_plain", "prune_03_ascend", "sparse_42"])
def test_same_record_and_same_training(case, tmp_path):
    model, batches = retrain_net()
    record = tmp_path / "record.txt"
    created = amct_pytorch.create_prune_retrain_model(model, batches[0], str(GOLDEN / case / "quant.cfg"), str(record))
    assert record.read_text() == (GOLDEN / case / "record.txt").read_text()
    assert created.training
    with np.load(GOLDEN / "prune.npz") as outputs:
        expected = {name: torch.from_numpy(outputs[f"{case}/{name}"]) for name in ("pruned_before_train", "after")}
    # float32 sums of up to 288 products in another order, through three steps of training
    torch.testing.assert_close(created.eval()(batches[0]), expected["pruned_before_train"], rtol=1e-5, atol=1e-6)
    trained = train_three_steps(created.train(), batches)
    torch.testing.assert_close(trained(batches[0]), expected["after"], rtol=1e-4, atol=1e-5)


def test_combined_record_has_the_same_structure(tmp_path):
    model, batches = retrain_net()
    config, record = str(GOLDEN / "compressed_42_int8" / "quant.cfg"), tmp_path / "record.txt"
    created = amct_pytorch.create_compressed_retrain_model(model, batches[0], config, str(record))
    trained = train_three_steps(created, batches)
    torch.save({"state": trained.state_dict()}, tmp_path / "state.pth")
    restored = amct_pytorch.restore_compressed_retrain_model(
        model, batches[0], config, str(record), str(tmp_path / "state.pth"), "state"
    ).eval()
    torch.testing.assert_close(restored(batches[0]), trained(batches[0]), rtol=0, atol=0)
    amct_pytorch.save_compressed_retrain_model(restored, str(record), str(tmp_path / "out" / "net"), batches[0])
    written = read_record(record)
    golden = read_record(GOLDEN / "compressed_42_int8" / "record.txt")
    assert list(written) == list(golden)
    assert written.prune == golden.prune
    for name in golden:
        assert len(written[name].scale_w) == len(golden[name].scale_w)
        np.testing.assert_allclose(written[name].scale_w, golden[name].scale_w, rtol=2e-3)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"net_deploy_model.onnx", "net_fake_quant_model.onnx", "net_qdq_model.onnx"} <= names
