"""AMCT's functions from the first to the last: files, fresh processes, several processes, and every mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
import torch
from qat_helpers import Flow, Net, evaluate, images, net, run_onnx, train
from torch import nn

import amct_pytorch as amct
from amct.errors import AmctError
from amct.record import read_record

HERE = Path(__file__).parent
ULQ = "retrain_weight_quant_config { ulq_retrain { dst_type: INT8 } }"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model after three steps, its checkpoint, and what it computes."""
    flow = Flow(tmp_path_factory.mktemp("flow"), ULQ)
    model = flow.create()
    train(model, range(3))
    torch.save(model.state_dict(), flow.state)
    return flow, model


def in_fresh_process(code: str, folder: Path) -> str:
    """Run code in a new interpreter, in a folder; what it prints."""
    paths = os.pathsep.join([str(HERE), str(HERE.parents[2] / "src")])
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def test_create_makes_an_empty_record_and_changes_nothing_else(tmp_path):
    flow = Flow(tmp_path)
    flow.create()
    assert read_record(flow.record).is_empty


def test_a_checkpoint_of_other_bits_than_the_config_is_refused(trained, tmp_path):
    """Names and shapes are the same, so that without a word the model would compute something else."""
    flow, model = trained
    narrow = Flow(tmp_path, "retrain_weight_quant_config { arq_retrain { dst_type: INT4 } }")
    trained_narrow = narrow.create()
    train(trained_narrow, range(2))
    torch.save(trained_narrow.state_dict(), narrow.state)
    assert narrow.restore().c2.weight_quantizer.bits == 4
    wide = Flow(tmp_path, "retrain_weight_quant_config { arq_retrain { dst_type: INT8 } }")
    with pytest.raises(
        RuntimeError, match=r'"c2\.weight_quantizer" was trained with 4 bits, the config has 8'
    ) as caught:
        wide.restore()
    assert isinstance(caught.value, AmctError)
    older = {key: value for key, value in model.state_dict().items() if not key.endswith("trained_bits")}
    torch.save(older, tmp_path / "older.pth")
    restored = flow.restore(state=tmp_path / "older.pth")  # it does not tell its bits
    assert torch.equal(evaluate(restored, images()), evaluate(model, images()))


def test_restored_clips_are_the_trained_ones(trained):
    flow, model = trained
    restored = flow.restore()
    assert torch.equal(evaluate(restored, images(5)), evaluate(model, images(5)))
    restored.train()(images(6))  # more training forwards do not determine the clips anew
    assert restored.c1.input_quantizer.clips == model.c1.input_quantizer.clips


def test_prefixes_of_parallel_training_and_names_of_entries_are_understood(trained, tmp_path):
    flow, model = trained
    state = {f"module.{key}": value for key, value in model.state_dict().items()}
    torch.save({"epoch": 3, "net": state}, tmp_path / "more.pth")
    restored = flow.restore("net", tmp_path / "more.pth")
    assert torch.equal(evaluate(restored, images()), evaluate(model, images()))


@pytest.mark.parametrize("batch_num", [1, 3])
def test_a_fresh_process_restores_continues_and_saves_bit_by_bit(tmp_path, batch_num):
    """Two steps, a checkpoint with the optimizer, two steps more: the same in one process and in two.

    With ``batch_num`` 3 the checkpoint falls between the batches that determine the clips.
    """
    flow = Flow(tmp_path, f"batch_num: {batch_num} {ULQ}")
    flow.model.drop.p = 0.0
    model = flow.create()
    torch.save(flow.model.state_dict(), tmp_path / "float.pth")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    train(model, range(2), optimizer)
    assert any("observed" in name for name in model.state_dict()) == (batch_num == 3)
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}, flow.state
    )
    train(model, [2, 3], optimizer)
    expected = model.state_dict()
    in_fresh_process(
        """
        import torch
        from qat_helpers import Net, evaluate, images, train
        import amct_pytorch as amct
        model = Net()
        model.drop.p = 0.0
        model.load_state_dict(torch.load("float.pth", weights_only=True))
        model = amct.restore_quant_retrain_model("c.json", model, "r.txt", images(), "state.pth", "model")
        state = torch.load("state.pth", weights_only=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        train(model, [2, 3], optimizer)
        torch.save({"state": model.state_dict(), "output": evaluate(model, images(9))}, "end.pth")
        amct.save_quant_retrain_model("c.json", model, "r.txt", "out/net", images())
        """,
        tmp_path,
    )
    end = torch.load(tmp_path / "end.pth", weights_only=True)
    assert list(end["state"]) == list(expected)
    assert not any("observed" in name for name in expected)
    assert all(torch.equal(end["state"][key], expected[key]) for key in expected)
    assert torch.equal(end["output"], evaluate(model, images(9)))
    found = run_onnx(tmp_path / "out" / "net_fake_quant_model.onnx", images(9))
    assert abs(found - end["output"].numpy()).max() < 0.02


def test_all_ranks_have_the_same_clips_from_the_first_batch_on(tmp_path):
    flow = Flow(tmp_path, f"batch_num: 2 {ULQ}")
    torch.save(flow.model.state_dict(), tmp_path / "float.pth")
    code = f"""
        import os, sys, torch
        import torch.distributed as dist
        import torch.multiprocessing as mp
        sys.path.insert(0, {str(HERE)!r})
        from qat_helpers import Net, images, labels
        import amct_pytorch as amct

        def run(rank):
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(PORT))
            dist.init_process_group("gloo", rank=rank, world_size=2)
            torch.manual_seed(0)
            model = Net()
            model.load_state_dict(torch.load("float.pth", weights_only=True))
            model = amct.create_quant_retrain_model("c.json", model, f"r{{rank}}.txt", images())
            parallel = torch.nn.parallel.DistributedDataParallel(model.train())
            optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05)
            seen = []
            for step in range(4):
                optimizer.zero_grad()
                x = images(10 * rank + step) * (1 + rank)
                torch.nn.functional.cross_entropy(parallel(x), labels(step)).backward()
                optimizer.step()
                state = model.state_dict()
                clips = [name for name in state if "quantizer" in name and "observed" not in name]
                seen.append({{name: state[name].clone() for name in clips}})
            torch.save(seen, f"seen{{rank}}.pth")
            dist.destroy_process_group()

        if __name__ == "__main__":
            import socket
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                PORT = free.getsockname()[1]
            processes = []
            for rank in range(2):
                child = os.fork()
                if child == 0:
                    try:
                        run(rank)
                        os._exit(0)
                    except BaseException:
                        import traceback
                        traceback.print_exc()
                        os._exit(1)
                processes.append(child)
            codes = [os.waitpid(child, 0)[1] for child in processes]
            sys.exit(any(codes))
        """
    in_fresh_process(code, tmp_path)
    first, second = (torch.load(tmp_path / f"seen{rank}.pth", weights_only=True) for rank in range(2))
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)
    assert first[-1]["c1.input_quantizer.clip_max"] != first[1]["c1.input_quantizer.clip_max"]  # and they are trained


# -- mistakes ----------------------------------------------------------------------------------------------------------


def test_saving_before_training_says_what_to_do(tmp_path):
    flow = Flow(tmp_path)
    with pytest.raises(
        RuntimeError, match=r'layer "c1": the range of its input is not known yet; run at least 1 batches'
    ):
        flow.save(flow.create())
    model = flow.create()
    evaluate(model, images())
    with pytest.raises(RuntimeError, match="a forward in eval mode does not initialize the clips, as it does in AMCT"):
        flow.save(model)
    assert not (tmp_path / "out" / "net_quant.json").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda _: {"weight": torch.ones(2)}, 'lacks "c1.weight".*the model has no "weight"'),
        (
            lambda _: net().state_dict(),
            "the state_dict of the float model, not of the trainable one: it lacks",
        ),
        (lambda model: {**model.state_dict(), "c1.weight": torch.ones(2)}, r'"c1.weight" has shape \[2\]'),
        (lambda _: {"epoch": 3}, "holds no state_dict; it has epoch"),
        (lambda _: [1, 2], "holds no state_dict"),
        (lambda model: {**model.state_dict(), 5: torch.ones(2)}, "holds no state_dict: 5 is no name of a tensor"),
        (lambda model: {**model.state_dict(), "c1.weight": 3}, '"c1.weight" is no tensor'),
        (lambda model: {**model.state_dict(), "c1.input_quantizer.clip_min": None}, 'clip_min" is no tensor'),
        (lambda model: {**model.state_dict(), "c1.input_quantizer.clip_min": torch.ones(2)}, r"has shape \[2\]"),
        (
            lambda model: {**model.state_dict(), "c1.bias": torch.ones(1).to_sparse()},
            "'c1.bias' is no name of a tensor",
        ),
        (lambda model: {key: value + 1j for key, value in model.state_dict().items()}, "has the type torch.complex64"),
        (lambda model: {**model.state_dict(), "c1.input_quantizer.observed_seen": "3"}, "does not fit"),
        (lambda _: {"c1.replaced_module.weight": torch.ones(2), "c1.cur_batch": "x"}, "a checkpoint of AMCT"),
        (lambda _: {"c1.replaced_module.weight": 2, "c1.cur_batch": torch.ones(3)}, "a checkpoint of AMCT"),
    ],
)
@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants:UserWarning")  # newer torch reads them so
def test_a_checkpoint_that_does_not_fit_is_refused(trained, tmp_path, content, message):
    flow, model = trained
    torch.save(content(model), tmp_path / "wrong.pth")
    with pytest.raises(RuntimeError, match=message):
        flow.restore(state=tmp_path / "wrong.pth")


def test_saving_before_batch_num_batches_is_an_error(tmp_path):
    flow = Flow(tmp_path, "batch_num: 3")
    model = flow.create()
    train(model, [0, 1])
    with pytest.raises(RuntimeError, match=r'layer "c1".* 3 batches in train mode .*has seen 2; a forward in eval'):
        flow.save(model)
    assert not (tmp_path / "out").exists()
    train(model, [2])
    flow.save(model)


def test_damaged_observations_in_a_checkpoint_are_refused(tmp_path):
    flow = Flow(tmp_path, "batch_num: 3")
    model = flow.create()
    train(model, [0])
    state = model.state_dict()
    for damaged in (torch.zeros(2), torch.zeros(5, dtype=torch.int64), torch.tensor([-1, 5])):
        torch.save({**state, "c1.input_quantizer.observed_seen": damaged}, flow.state)
        with pytest.raises(RuntimeError, match=r'layer "c1": the state of an observer does not fit.*load another'):
            flow.restore()


def test_other_wrong_checkpoints(trained, tmp_path):
    flow, _ = trained
    with pytest.raises(KeyError, match='no entry "nope"'):
        flow.restore("nope")
    (tmp_path / "text.pth").write_text("hello")
    torch.save(net(), tmp_path / "whole.pth")
    for name in ("text.pth", "whole.pth"):
        with pytest.raises(RuntimeError, match=f"{name} is no checkpoint that can be read safely"):
            flow.restore(state=tmp_path / name)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        flow.restore(state=tmp_path / "missing.pth")


def test_a_checkpoint_that_grows_in_memory_is_refused(trained, tmp_path, monkeypatch):
    flow, _ = trained
    with zipfile.ZipFile(flow.state) as archive, zipfile.ZipFile(tmp_path / "bomb.pth", "w", 8) as bomb:
        for entry in archive.namelist():
            bomb.writestr(entry, archive.read(entry))
        bomb.writestr("bomb/data/1000", bytes(4 << 20))
    monkeypatch.setattr(torch, "load", None)
    with pytest.raises(RuntimeError, match=r"it would take .* of memory"):
        flow.restore(state=tmp_path / "bomb.pth")


def test_a_checkpoint_of_the_old_format_that_claims_more_than_its_file_is_refused(trained, tmp_path, monkeypatch):
    flow, _ = trained
    elements = 1_234_567
    torch.save({"w": torch.zeros(elements)}, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    claim = b"J" + elements.to_bytes(4, "little")
    content = (tmp_path / "old.pth").read_bytes()
    assert claim in content[:600]
    (tmp_path / "old.pth").write_bytes(content[:600].replace(claim, b"J" + (2**31 - 1).to_bytes(4, "little")))
    monkeypatch.setattr(torch, "load", None)
    with pytest.raises(RuntimeError, match=r"it would take 2\.0 GiB of memory"):
        flow.restore(state=tmp_path / "old.pth")


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_checkpoint_that_makes_an_array_by_its_length_is_refused(trained, tmp_path, monkeypatch, is_zip):
    flow, _ = trained
    torch.save({"w": bytearray(b"ab")}, tmp_path / "array.pth", _use_new_zipfile_serialization=is_zip)
    monkeypatch.setattr(torch, "load", None)
    with pytest.raises(RuntimeError, match=r"it holds a bytearray, which may be of any size"):
        flow.restore(state=tmp_path / "array.pth")


def test_a_checkpoint_of_the_old_format_is_loaded(trained, tmp_path):
    flow, _ = trained
    content = torch.load(flow.state, weights_only=True)
    whole = {"seed": 2**62, "state": content}
    torch.save(whole, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    restored, same = flow.restore("state", state=tmp_path / "old.pth"), flow.restore()
    for name, value in same.state_dict().items():
        assert torch.equal(restored.state_dict()[name], value)


def test_another_architecture_is_refused(trained):
    flow, _ = trained
    other = net()
    other.c2 = nn.Conv2d(8, 8, 5, padding=2)
    with pytest.raises(RuntimeError, match=r'"c2.weight" has shape \[8, 8, 3, 3\], expected \[8, 8, 5, 5\]'):
        amct.restore_quant_retrain_model(flow.config, other, flow.record, flow.example, flow.state)


def test_another_config_at_save_is_refused(trained, tmp_path):
    flow, model = trained
    config = json.loads(flow.config.read_text())
    config["c2"]["retrain_data_config"]["dst_type"] = "INT16"
    (tmp_path / "other.json").write_text(json.dumps(config))
    with pytest.raises(RuntimeError, match='trained with another config; the layers "c2" differ'):
        amct.save_quant_retrain_model(
            tmp_path / "other.json", model, tmp_path / "r.txt", tmp_path / "net", flow.example
        )
    assert not (tmp_path / "r.txt").exists()


def test_a_missing_or_edited_record_is_written_anew(trained):
    flow, model = trained
    flow.save(model)
    expected = read_record(flow.record)
    for content in (None, 'record { key: "x" }', "garbage"):
        if content is None:
            flow.record.unlink()
        else:
            flow.record.write_text(content)
        flow.save(model)
        assert read_record(flow.record) == expected


def test_a_loss_that_is_not_finite_is_reported_at_the_next_forward_and_nothing_is_saved(tmp_path):
    flow = Flow(tmp_path, ULQ)
    model = flow.create()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    train(model, [0], optimizer)
    flow.save(model)
    before = flow.record.read_bytes()
    optimizer.zero_grad()
    (model(images()).sum() * float("inf")).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r'layer "c\d": the trained clips are .*not finite.*checkpoint'):
        model(images())
    with pytest.raises(RuntimeError, match="not finite"):
        flow.save(model)
    assert flow.record.read_bytes() == before


def test_a_model_that_is_not_in_training_cannot_be_saved(trained):
    flow, _ = trained
    with pytest.raises(RuntimeError, match="Net has no trained quantizers"):
        flow.save(net())


def test_a_model_in_training_is_not_created_again(trained):
    flow, model = trained
    with pytest.raises(RuntimeError, match="already contains"):
        amct.create_quant_retrain_model(flow.config, model, flow.record, flow.example)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        ("create_quant_retrain_config", {"config_file": 3}, "config_file"),
        ("create_quant_retrain_config", {"model": "net"}, "model"),
        ("create_quant_retrain_config", {"config_defination": 4}, "config_defination"),
        ("create_quant_retrain_model", {"record_file": None}, "record_file"),
        ("restore_quant_retrain_model", {"pth_file": 5}, "pth_file"),
        ("restore_quant_retrain_model", {"state_dict_name": 5}, "state_dict_name"),
        ("save_quant_retrain_model", {"save_path": 5}, "save_path"),
    ],
)
def test_wrong_types_name_the_argument(function, arguments, message):
    names = {
        "create_quant_retrain_config": ("config_file", "model", "input_data", "config_defination"),
        "create_quant_retrain_model": ("config_file", "model", "record_file", "input_data"),
        "restore_quant_retrain_model": ("config_file", "model", "record_file", "input_data", "pth_file"),
        "save_quant_retrain_model": ("config_file", "model", "record_file", "save_path", "input_data"),
    }[function]
    good = {"model": Net(), "input_data": images(), "config_defination": None}
    given = {name: good.get(name, "file") for name in names} | arguments
    with pytest.raises(TypeError, match=message):
        getattr(amct, function)(**given)


def test_a_missing_config_is_a_missing_file(tmp_path):
    with pytest.raises(OSError, match=r"nothing\.json"):
        amct.create_quant_retrain_model(tmp_path / "nothing.json", net(), tmp_path / "r.txt", images())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('skip_layers: "nope"', "nope"),
        ("batch_num: 0", "batch_num"),
        ("prune_config { filter_pruner { balanced_l2_norm_filter_prune { prune_ratio: 0.5 } } }", "pruning"),
        ('skip_layer_types: "Conv2d" skip_layer_types: "Linear"', "switched off"),
    ],
)
def test_mistakes_in_a_config_are_value_errors(tmp_path, text, message):
    with pytest.raises(ValueError, match=message) as caught:
        Flow(tmp_path, text)
    assert isinstance(caught.value, AmctError)
