"""The files of a calibration: the record, the files beside it, and the progress of an unfinished one."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
import torch

from amct.calibration import BalanceSession, RecordFiles, read_progress
from amct.calibration.record_files import progress_path
from amct.errors import CalibrationError, FileError
from amct.record import CaffeLayerRecord, CaffeRecord, LayerRecord, Record, read_caffe_record, read_record

BEGUN = Record({"a": LayerRecord(scale_w=(0.5,), offset_w=(0,))})
DONE = Record({"a": LayerRecord(scale_w=(0.5,), offset_w=(0,), scale_d=0.25, offset_d=-3)})


def test_the_record_fills_up_and_the_progress_goes(tmp_path):
    path = tmp_path / "new" / "record.txt"
    stale, beside = tmp_path / "old.json", tmp_path / "beside.json"
    stale.write_text("of an earlier calibration")
    files = RecordFiles(path, stale=[stale, tmp_path / "absent"])
    files.check()
    files.begin(BEGUN, {"a": (0, 2)})
    assert not stale.exists()
    assert read_record(path) == BEGUN
    assert read_progress(path) == {"a": (0, 2)}
    files.note({"a": (1, 2)})
    assert json.loads((tmp_path / "new" / "record.txt.progress.json").read_text()) == {
        "version": 1,
        "layers": {"a": [1, 2]},
    }
    assert read_progress(path) == {"a": (1, 2)}
    files.complete(DONE, {beside: "{}"})
    assert read_record(path) == DONE
    assert beside.read_text() == "{}"
    assert read_progress(path) == {}
    assert sorted(file.name for file in path.parent.iterdir()) == ["record.txt"]
    (tmp_path / "usual").touch()
    assert path.stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_a_record_named_bin_is_binary_and_caffe_records_work_too(tmp_path):
    record = CaffeRecord({"conv": CaffeLayerRecord(scale_w=(1.0,), offset_w=(0,))})
    files = RecordFiles(tmp_path / "record.bin")
    files.begin(record, {"conv": (0, 1)})
    files.complete(record)
    assert b"record {" not in (tmp_path / "record.bin").read_bytes()
    assert read_caffe_record(tmp_path / "record.bin") == record


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"version": 2, "layers": {}}', '{"version": 1, "layers": {"a": [1]}}']
)
def test_a_progress_file_that_cannot_be_read_counts_as_none(tmp_path, text):
    progress_path(tmp_path / "record.txt").write_text(text)
    assert read_progress(tmp_path / "record.txt") == {}


def test_a_folder_is_no_record(tmp_path):
    with pytest.raises(FileError, match="is a folder; expected the name of a record file"):
        RecordFiles(tmp_path).check()


def test_an_impossible_folder_is_told_before_any_work():
    with pytest.raises(FileError, match="/proc/amct"):
        RecordFiles("/proc/amct/record.txt").check()


def test_a_failed_end_leaves_the_old_record(tmp_path):
    files = RecordFiles(tmp_path / "record.txt")
    files.begin(BEGUN, {"a": (0, 1)})
    (tmp_path / "beside").mkdir()
    with pytest.raises(FileError):
        files.complete(DONE, {tmp_path / "beside": "a folder stands there"})
    assert read_record(tmp_path / "record.txt") == BEGUN
    assert read_progress(tmp_path / "record.txt") == {"a": (0, 1)}


# -- DMQ ---------------------------------------------------------------------------------------------------------


def test_balance_collects_the_largest_value_of_every_channel_over_all_batches():
    told = []
    session = BalanceSession(["a", "b"], lambda maxima: told.append({k: v.tolist() for k, v in maxima.items()}))
    with session.batch():
        session.observe("a", torch.tensor([[1.0, -5.0], [2.0, 3.0]]), 1)
    with session.batch():
        session.observe("a", torch.tensor([[4.0, 0.5]]), -1)
        session.observe("b", torch.tensor([[[1.0, -7.0]]]), 1)
    with session.batch():
        pass
    assert told == [{"a": [2.0, 5.0]}, *[{"a": [4.0, 5.0], "b": [7.0]}] * 2]


def test_balance_says_nothing_before_anything_was_seen_and_after_a_failed_batch():
    told = []
    session = BalanceSession(["a"], told.append)
    with session.batch():
        pass
    with suppress(ZeroDivisionError), session.batch():
        session.observe("a", torch.ones(1, 1), 1)
        _ = 1 / 0
    assert told == []


@pytest.mark.parametrize("x", [torch.tensor([[torch.nan]]), torch.tensor([[torch.inf]]), torch.empty(0, 1)])
def test_balance_names_the_layer_of_data_that_cannot_be_used(x):
    session = BalanceSession(["conv"], lambda _: None)
    with pytest.raises(CalibrationError, match='layer "conv": '):
        session.observe("conv", x, 1)
