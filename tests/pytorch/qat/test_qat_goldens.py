"""Configs, records and outputs of AMCT for PyTorch 9.0.0, trained on the same batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from qat_helpers import GOLDEN, Flow, evaluate
from torch import nn
from torch.nn import functional

from amct.pytorch import prepare_qat
from amct.record import read_record


class Retrain(nn.Module):
    """The network of the cases."""

    def __init__(self) -> None:
        super().__init__()
        self.c1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.b1 = nn.BatchNorm2d(16)
        self.c2 = nn.Conv2d(16, 32, 3, padding=1)
        self.b2 = nn.BatchNorm2d(32)
        self.c3 = nn.Conv2d(32, 32, 3, padding=1, stride=2)
        self.dw = nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.pool = nn.AvgPool2d(4)
        self.fc1 = nn.Linear(128, 48)
        self.fc = nn.Linear(48, 10)

    def forward(self, x):
        x = torch.relu(self.b1(self.c1(x)))
        x = torch.relu(self.b2(self.c2(x)))
        x = torch.relu(self.dw(torch.relu(self.c3(x))))
        return self.fc(torch.relu(self.fc1(self.pool(x).flatten(1))))


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN / "retrain.npz") as archive:
        return {name: torch.from_numpy(archive[name]) for name in archive.files}


def trained(folder, case, golden):
    model = Retrain()
    model.load_state_dict({key[8:]: value for key, value in golden.items() if key.startswith("weights/")})
    cfg = GOLDEN / case / "quant.cfg"
    flow = Flow(folder, cfg.read_text() if cfg.exists() else None, model, golden["inputs/b0"])
    created = flow.create().train()
    optimizer = torch.optim.SGD(created.parameters(), lr=0.01)
    losses = []
    for batch in range(3):
        target = torch.from_numpy(np.random.RandomState(50 + batch).randint(0, 10, 8))
        optimizer.zero_grad()
        loss = functional.cross_entropy(created(golden[f"inputs/b{batch}"]), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return flow, created, losses


# The same bits on the machine of the goldens but for float sums of another order; a sum that turns one rounded value of
# an activation over changes the loss in its fifth digit (qat_default, second step).
CASES = [("qat_default", [2.33249, 2.30075, 2.26269]), ("qat_int4_w", [2.33079, 2.29885, 2.26408])]


@pytest.mark.parametrize(("case", "losses"), CASES)
def test_training_gives_amcts_losses_factors_and_outputs(tmp_path, case, losses, golden):
    flow, created, found = trained(tmp_path, case, golden)
    np.testing.assert_allclose(found, losses, rtol=0, atol=1e-4)
    output = evaluate(created, golden["inputs/b0"])
    expected = golden[f"outputs/{case}"]
    assert (output - expected).abs().max() < 0.01 * expected.abs().max()
    assert_records_agree(flow, created, case, tolerance=1e-4)


def assert_records_agree(flow, model, case, tolerance):
    flow.save(model)
    record, reference = read_record(flow.record), read_record(GOLDEN / case / "record.txt")
    assert list(record) == list(reference)
    for name, entry in reference.items():
        own = record[name]
        assert (own.act_type, own.wts_type, own.offset_d) == (entry.act_type, entry.wts_type, entry.offset_d)
        assert own.offset_w == entry.offset_w
        np.testing.assert_allclose(own.scale_d, entry.scale_d, rtol=tolerance)
        np.testing.assert_allclose(own.scale_w, entry.scale_w, rtol=tolerance)
        assert own.dst_type == (entry.act_type if entry.act_type == entry.wts_type else None)


@pytest.fixture(scope="module")
def amct_state():
    """The checkpoint that AMCT wrote after training."""
    with np.load(GOLDEN / "qat_int4_w" / "amct_state.npz") as archive:
        return {name: torch.from_numpy(archive[name]) for name in archive.files}


def restorable(folder, state, golden):
    model = Retrain()
    flow = Flow(folder, (GOLDEN / "qat_int4_w" / "quant.cfg").read_text(), model, golden["inputs/b0"])
    torch.save(state, flow.state)
    return flow


@pytest.mark.parametrize("prefix", ["", "module."])
def test_amcts_own_checkpoint_is_restored_and_saved(tmp_path, prefix, golden, amct_state):
    flow = restorable(tmp_path, {prefix + name: value for name, value in amct_state.items()}, golden)
    restored = flow.restore()
    expected = golden["outputs/qat_int4_w"]
    assert (evaluate(restored, golden["inputs/b0"]) - expected).abs().max() < 1e-5 * expected.abs().max()
    assert_records_agree(flow, restored, "qat_int4_w", tolerance=1e-6)
    # AMCT trains the lower clip behind pooling: so it goes on
    assert isinstance(restored.fc1.input_quantizer.clip_min, nn.Parameter)
    assert restored.fc1.input_quantizer.clip_min < 0


def test_amcts_checkpoint_in_the_middle_of_the_first_batches_begins_them_anew(tmp_path, golden, amct_state):
    flow = restorable(tmp_path, {**amct_state, "c2.quant_module.cur_batch": torch.tensor(0.0)}, golden)
    restored = flow.restore()
    assert not restored.c2.input_quantizer.has_clips()
    assert restored.c3.input_quantizer.has_clips()


def test_amcts_checkpoint_of_another_model_is_refused(tmp_path, golden, amct_state):
    state = {name.replace("fc1.", "other."): value for name, value in amct_state.items()}
    flow = restorable(tmp_path, state, golden)
    with pytest.raises(RuntimeError, match=r'a checkpoint of AMCT\) does not fit .*lacks "fc1\.weight".*no "other\.'):
        flow.restore()


@pytest.mark.parametrize("case", ["qat_default", "qat_int4_w"])
def test_the_config_is_amcts(tmp_path, case, golden):
    flow, _, _ = trained(tmp_path, case, golden)
    assert flow.config.read_text() == (GOLDEN / case / "config.json").read_text()


def test_the_lower_clip_stays_zero_where_amct_keeps_it_there(tmp_path, golden):
    _, created, _ = trained(tmp_path, "qat_default", golden)
    assert created.c2.input_quantizer.fixed_min
    assert not created.fc1.input_quantizer.fixed_min  # pooling and flattening in between
    assert not created.c1.input_quantizer.fixed_min


def test_prepare_qat_keeps_the_lower_clip_at_zero_behind_pooling_and_flattening_too(golden, caplog):
    caplog.set_level("INFO", "amct")
    made = prepare_qat(Retrain(), golden["inputs/b0"])
    fixed = [name for name in ("c1", "c2", "c3", "dw", "fc1", "fc") if getattr(made, name).input_quantizer.fixed_min]
    assert fixed == ["c2", "c3", "dw", "fc1", "fc"]
    (line,) = [record.message for record in caplog.records if "fixed_min" in record.message]
    assert line.startswith('fixed_min: the lower clip of "c2", "c3", "dw", "fc1", "fc" stays at 0')


@pytest.mark.parametrize("as_amct", [True, False])
def test_given_clips_are_used_behind_a_relu_too(as_amct, tmp_path, golden, caplog):
    caplog.set_level("INFO", "amct")
    clips = "retrain_data_quant_config { ulq_quantize { clip_max_min { clip_max: 2.0 clip_min: -0.5 } } }"
    if as_amct:
        made = Flow(tmp_path, clips, Retrain(), golden["inputs/b0"]).create()
    else:
        (tmp_path / "quant.cfg").write_text(clips)
        made = prepare_qat(Retrain(), golden["inputs/b0"], config=tmp_path / "quant.cfg")
    for name in ("c1", "c2", "c3", "fc1"):
        quantizer = getattr(made, name).input_quantizer
        assert quantizer.clips == (-0.5, 2.0)
        assert isinstance(quantizer.clip_min, nn.Parameter)
    assert "fixed_min" not in caplog.text


def test_int4_activations_which_amct_refuses_are_trained_and_saved(tmp_path, golden):
    flow, created, losses = trained(tmp_path, "qat_int4_arq", golden)
    assert losses[-1] < losses[0]
    flow.save(created)
    record = read_record(flow.record)
    assert (record["c2"].dst_type, record["c2"].act_type, record["c2"].wts_type) == ("INT4", "INT4", "INT4")
    # an odd number of channels, or several groups, cannot be packed: 8-bit weights
    assert (record["c1"].dst_type, record["c1"].act_type, record["c1"].wts_type) == (None, "INT4", "INT8")
