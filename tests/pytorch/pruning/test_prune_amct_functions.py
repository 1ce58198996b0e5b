"""AMCT's pruning functions: arguments, restoring in other processes, mistakes in configs and records."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from prune_nets import GOLDEN, filters, masks, retrain_net, train_three_steps
from torch import nn

import amct_pytorch
from amct.record import Record, parse_record, read_record, write_record

SEED_SAMPLE = """prune_record {
  producer { name: "c1" attr { name: "type" type: STRING s: "Conv2d" } attr { name: "begin" type: INT i: 0 }
    attr { name: "end" type: INT i: 16 } }
  consumer { name: "b1" attr { name: "type" type: STRING s: "FusedBatchNormV3" } attr { name: "begin" type: INT i: 0 }
    attr { name: "end" type: INT i: 16 } }
}"""


@pytest.fixture
def flow(tmp_path):
    return Flow(tmp_path)


class Flow:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config, self.record = str(folder / "prune.cfg"), str(folder / "record.txt")
        self.state = str(folder / "state.pth")
        self.model, self.batches = retrain_net()

    def create(self, config: str) -> nn.Module:
        Path(self.config).write_text(config)
        return amct_pytorch.create_prune_retrain_model(self.model, self.batches[0], self.config, self.record)

    def trained(self, config: str) -> nn.Module:
        trained = train_three_steps(self.create(config), self.batches)
        torch.save(trained.state_dict(), self.state)
        return trained

    def restore(self, **changes: object) -> nn.Module:
        given = {"record_file": self.record, "config_defination": self.config, "pth_file": self.state, **changes}
        return amct_pytorch.restore_prune_retrain_model(self.model, self.batches[0], **given)


MIXED = filters(0.3, more=f'override_layer_configs {{ layer_name: "c3" {masks()} }}')


@pytest.mark.parametrize("config", [filters(0.3), masks(), MIXED])
def test_restored_model_continues_as_the_trained_one(flow, config):
    trained = flow.trained(config)
    restored = flow.restore()
    assert restored.training
    torch.testing.assert_close(restored.eval()(flow.batches[0]), trained(flow.batches[0]), rtol=0, atol=0)
    again, continued = (train_three_steps(model.train(), flow.batches) for model in (restored, trained))
    torch.testing.assert_close(again(flow.batches[1]), continued(flow.batches[1]), rtol=0, atol=0)


def test_a_checkpoint_of_amct_itself_is_restored(flow):
    flow.create((GOLDEN / "sparse_42" / "quant.cfg").read_text())
    with np.load(GOLDEN / "sparse_42" / "amct_state.npz") as archive:
        torch.save({name: torch.from_numpy(archive[name]) for name in archive.files}, flow.state)
    restored = flow.restore(record_file=str(GOLDEN / "sparse_42" / "record.txt")).eval()
    with np.load(GOLDEN / "prune.npz") as outputs:
        expected = torch.from_numpy(outputs["sparse_42/after"])
    torch.testing.assert_close(restored(flow.batches[0]), expected, rtol=1e-5, atol=1e-6)


def test_the_users_model_stays(flow):
    before = {name: value.clone() for name, value in flow.model.state_dict().items()}
    flow.trained(filters(0.3))
    assert before.keys() == flow.model.state_dict().keys()
    assert all(torch.equal(value, before[name]) for name, value in flow.model.state_dict().items())


def test_saved_files_compute_the_model(flow):
    trained = flow.trained(masks())
    where = flow.folder / "out" / "net"
    amct_pytorch.save_prune_retrain_model(trained, str(where), flow.batches[0], input_names=["image"])
    expected = trained(flow.batches[0]).detach().numpy()
    for kind in ("deploy", "fake_quant"):
        session = onnxruntime.InferenceSession(f"{where}_{kind}_model.onnx")
        assert [value.name for value in session.get_inputs()] == ["image"]
        (found,) = session.run(None, {"image": flow.batches[0].numpy()})
        assert abs(found - expected).max() < 1e-5


def best_of_four(weight: np.ndarray) -> np.ndarray:
    """The two largest absolute values of each four along the input channels, the earlier one of equals."""
    rows = np.moveaxis(np.abs(weight), 1, -1)
    fours = np.pad(rows, [*[(0, 0)] * (rows.ndim - 1), (0, -rows.shape[-1] % 4)]).reshape(-1, 4)
    kept = np.zeros(fours.shape, bool)
    np.put_along_axis(kept, np.argsort(-fours, axis=1, kind="stable")[:, :2], True, axis=1)
    return np.moveaxis(kept.reshape(*rows.shape[:-1], -1)[..., : rows.shape[-1]], -1, 1)


@pytest.mark.parametrize("again", [False, True], ids=["created", "restored"])
def test_the_record_has_the_masks_that_training_chose(flow, again):
    """The weights turn around: what was least is now largest, so that every mask that is chosen anew changes."""
    model = flow.create(masks(update_freq=1, more='regular_prune_skip_layers: "c1"'))
    before = read_record(flow.record)
    if again:
        torch.save(model.state_dict(), flow.state)
        model = flow.restore()
    with torch.no_grad():
        for layer in (model.c2, model.c3, model.fc):
            layer.weight.copy_(1 / layer.weight)
    model(flow.batches[0])
    assert read_record(flow.record) == before
    amct_pytorch.save_prune_retrain_model(model, str(flow.folder / "out" / "net"), flow.batches[0])
    record = read_record(flow.record)
    assert [chain.selective.name for chain in record.prune] == [chain.selective.name for chain in before.prune]
    for old, new in zip(before.prune, record.prune, strict=True):
        name, mask = new.selective.name, new.selective.mask()
        assert np.array_equal(mask, best_of_four(model.get_submodule(name).weight.detach().numpy()))
        assert np.array_equal(mask, old.selective.mask()) == (name not in ("c2", "c3", "fc"))
    torch.save(model.state_dict(), flow.state)
    restored = flow.restore().eval()
    torch.testing.assert_close(restored(flow.batches[1]), model.eval()(flow.batches[1]), rtol=0, atol=0)


def test_a_warning_about_the_config_is_logged_once(flow, caplog):
    Path(flow.config).write_text(filters(0.3, more="retrain_weight_quant_config { } batch_num: 1 batch_num: 1"))
    amct_pytorch.create_compressed_retrain_model(flow.model, flow.batches[0], flow.config, flow.record)
    assert caplog.text.count("batch_num is given again") == 1


def test_a_record_of_another_model_gets_no_masks(flow, caplog):
    model = flow.create(masks())
    write_record(Record(), flow.record)
    amct_pytorch.save_prune_retrain_model(model, str(flow.folder / "out" / "net"), flow.batches[0])
    assert read_record(flow.record).is_empty
    assert "record.txt is no longer the record of this model" in caplog.text


def test_restore_and_save_in_another_process(flow):
    trained = flow.trained(masks(update_freq=2))
    torch.save(flow.batches, flow.folder / "batches.pt")
    script = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch, amct_pytorch
from prune_nets import retrain_net
model, batches = retrain_net()
restored = amct_pytorch.restore_prune_retrain_model(model, batches[0], {flow.record!r}, {flow.config!r}, {flow.state!r})
torch.save(restored.eval()(batches[0]), {str(flow.folder / "out.pt")!r})
"""
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
    found = torch.load(flow.folder / "out.pt", weights_only=True)
    torch.testing.assert_close(found, trained(flow.batches[0]), rtol=0, atol=0)


def test_wrong_argument_types(flow):
    with pytest.raises(TypeError, match="create_prune_retrain_model: model"):
        amct_pytorch.create_prune_retrain_model("net", flow.batches[0], flow.config, flow.record)
    with pytest.raises(TypeError, match="state_dict_name"):
        flow.restore(state_dict_name=3)


@pytest.mark.parametrize("ratio", [0, 1.0])
def test_ratio_out_of_range(flow, ratio):
    with pytest.raises(ValueError, match=r"prune_ratio"):
        flow.create(filters(ratio))


def test_config_without_pruning(flow):
    with pytest.raises(ValueError, match="prune_config"):
        flow.create("batch_num: 1")


def test_unknown_layer_in_the_skip_list(flow):
    with pytest.raises(ValueError, match='"nope"'):
        flow.create(filters(0.3, more='regular_prune_skip_layers: "nope"'))


def test_a_pruned_model_cannot_be_made_sparse_twice(flow):
    sparse = flow.create(masks())
    with pytest.raises(RuntimeError, match="already contains 6 AMCT operators"):
        amct_pytorch.create_prune_retrain_model(sparse, flow.batches[0], flow.config, flow.record)


def test_record_without_indices_like_the_sample(flow):
    flow.trained(filters(0.3))
    Path(flow.record).write_text(SEED_SAMPLE)
    with pytest.raises(RuntimeError, match=r'no prune_index of layer "c1", of whose 16 channels the config removes 5'):
        flow.restore()


def test_record_without_masks_like_the_sample(flow):
    flow.trained(masks())
    entry = 'attr { name: "mask_shape" type: INTS ints: 16 ints: 3 ints: 3 ints: 3 }'
    Path(flow.record).write_text(f'prune_record {{ selective_prune {{ name: "c1" {entry} }} }}')
    with pytest.raises(RuntimeError, match=r'no selective_mask of layer "c1"'):
        flow.restore()


def edited(record: str, old: str, new: str) -> Record:
    text = Path(record).read_text()
    assert old in text
    return parse_record(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name: "c1"', 'name: "c9"', r'no prune_index of layer "c1"'),
        ('name: "b1"', 'name: "b9"', r'consumer "b9": the model has no such layer'),
        ("ints: 14", "ints: 99", r"differs from|is not within"),
        ("ints: 14", "ints: 13", r"differs from"),
        ('s: "BatchNormalization"', 's: "Gemm"', r"the record says Gemm, the model has BatchNorm2d"),
        ("i: 16", "i: 99", r"are not within its 16"),
    ],
)
def test_edited_record_is_one_clear_error(flow, old, new, message):
    flow.trained(filters(0.3))
    write_record(edited(flow.record, old, new), flow.record)
    with pytest.raises(RuntimeError, match=message):
        flow.restore()


@pytest.mark.parametrize("types", [("Conv2d", "BatchNorm2d", "Linear"), ("Conv2D", "FusedBatchNormV3", "MatMul")])
def test_records_with_type_names_of_other_frameworks(flow, types):
    trained = flow.trained(filters(0.3))
    text = Path(flow.record).read_text()
    for old, new in zip(("Conv", "BatchNormalization", "Gemm"), types, strict=True):
        text = text.replace(f's: "{old}"', f's: "{new}"')
    Path(flow.record).write_text(text)
    torch.testing.assert_close(flow.restore().eval()(flow.batches[0]), trained(flow.batches[0]), rtol=0, atol=0)


def test_checkpoint_of_another_model(flow):
    flow.trained(filters(0.3))
    torch.save(nn.Linear(2, 2).state_dict(), flow.state)
    with pytest.raises(RuntimeError, match="does not fit"):
        flow.restore()
    with pytest.raises(KeyError, match="model"):
        flow.restore(state_dict_name="model")


def test_combined_config_prunes_and_quantizes(flow):
    quantization = "retrain_data_quant_config { ulq_quantize { } } retrain_weight_quant_config { arq_retrain { } }"
    Path(flow.config).write_text(filters(0.3, more=quantization + ' quant_skip_types: "Linear"'))
    created = amct_pytorch.create_compressed_retrain_model(flow.model, flow.batches[0], flow.config, flow.record)
    assert [created.c1.out_channels, created.c2.out_channels, created.fc1.out_features] == [11, 22, 34]
    trained = train_three_steps(created, flow.batches)
    trained(flow.batches[0])
    amct_pytorch.save_compressed_retrain_model(trained, flow.record, str(flow.folder / "net"), flow.batches[0])
    record = read_record(flow.record)
    assert list(record) == ["c1", "c2", "c3", "dw"]
    assert len(record.prune) == 3
    assert [len(record[name].scale_w) for name in record] == [11, 22, 32, 32]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"names no pruned layer, but the model has some \(see"),
        (SEED_SAMPLE, "is of another network or config"),
    ],
)
@pytest.mark.parametrize("quantization", ["", "retrain_data_quant_config { ulq_quantize { } }"])
def test_saving_with_another_record_is_a_clear_error(flow, content, message, quantization):
    Path(flow.config).write_text(filters(0.3, more=quantization))
    created = amct_pytorch.create_compressed_retrain_model(flow.model, flow.batches[0], flow.config, flow.record)
    Path(flow.record).write_text(content)
    with pytest.raises(RuntimeError, match=message):
        amct_pytorch.save_compressed_retrain_model(created, flow.record, str(flow.folder / "net"), flow.batches[0])
    assert not list(flow.folder.glob("net*"))


def test_a_layer_that_keeps_all_channels_is_told_what_would_prune_it(flow, caplog):
    caplog.set_level("INFO")
    flow.create(filters(0.3, ascend=True))
    reason = "prune_ratio 0.3 leaves all of its 32 channels, because ascend_optimized rounds their number up to a "
    assert f"{reason}multiple of 16; prune_ratio 0.5 or ascend_optimized: false would prune it" in caplog.text
    flow.create(filters(0.5, ascend=True))
    assert "leaves all of its 32" not in caplog.text.rpartition(reason)[2]


def test_a_model_that_was_never_compressed_is_not_saved_with_a_record_of_pruning(flow, caplog):
    flow.trained(filters(0.3))
    before = Path(flow.record).read_text()
    with pytest.raises(RuntimeError, match="names pruned layers, but the model was not created or restored with it"):
        amct_pytorch.save_compressed_retrain_model(flow.model, flow.record, str(flow.folder / "net"), flow.batches[0])
    assert Path(flow.record).read_text() == before
    assert not list(flow.folder.glob("net*"))
    Path(flow.record).write_text("")
    amct_pytorch.save_compressed_retrain_model(flow.model, flow.record, str(flow.folder / "net"), flow.batches[0])
    assert "neither pruned nor quantized it; it is saved as is" in caplog.text


@pytest.mark.parametrize("config", [filters(0.3), MIXED])
def test_a_record_serves_a_second_save(flow, config):
    trained = flow.trained(config)
    for _ in range(2):
        amct_pytorch.save_compressed_retrain_model(trained, flow.record, str(flow.folder / "net"), flow.batches[0])
    restored = flow.restore()
    amct_pytorch.save_compressed_retrain_model(restored, flow.record, str(flow.folder / "net"), flow.batches[0])


def test_saving_an_unpruned_model_warns(flow, caplog):
    amct_pytorch.save_prune_retrain_model(flow.model, str(flow.folder / "net"), flow.batches[0])
    assert "restore_prune_retrain_model did not prune it" in caplog.text
    caplog.clear()
    amct_pytorch.save_prune_retrain_model(flow.trained(filters(0.3)), str(flow.folder / "net"), flow.batches[0])
    assert "did not prune it" not in caplog.text


def test_saving_a_combined_model_as_pruned_or_quantized_names_the_right_function(flow, caplog):
    Path(flow.config).write_text(filters(0.3, more="retrain_data_quant_config { ulq_quantize { } }"))
    created = amct_pytorch.create_compressed_retrain_model(flow.model, flow.batches[0], flow.config, flow.record)
    with pytest.raises(RuntimeError, match="with save_compressed_retrain_model"):
        amct_pytorch.save_prune_retrain_model(created, str(flow.folder / "net"), flow.batches[0])
    created(flow.batches[0])
    config = str(flow.folder / "quant.json")
    amct_pytorch.create_quant_retrain_config(config, flow.model, flow.batches[0])
    amct_pytorch.save_quant_retrain_model(config, created, flow.record, str(flow.folder / "net"), flow.batches[0])
    assert "it is pruned too; its record says so only if save_compressed_retrain_model saves it" in caplog.text


def test_golden_record_restores_to_the_same_channels(flow):
    flow.trained(filters(0.3))
    restored = flow.restore(record_file=str(GOLDEN / "prune_03_plain" / "record.txt"))
    assert restored.c2.weight.shape == (22, 11, 3, 3)
