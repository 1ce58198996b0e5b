"""Processes that die, leave, or never begin: the others end with a message that names them, and nothing is torn."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LOST = "is lost to the calibration"
BEGUN = ["record.txt", "record.txt.progress.json"]


def scenario(folder, *arguments):
    """How each process ended; one that hangs is a timeout here."""
    done = subprocess.run(
        [sys.executable, HERE / "rank_failures.py", folder, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_a_calibration_that_the_others_never_begin(tmp_path):
    found = scenario(tmp_path, "only_first")
    assert found["codes"] == [1, 0, 0]
    assert f"rank 1, 2 of 3 {LOST}" in found["outputs"][0]
    assert "has not begun this calibration" in found["outputs"][0]
    assert "AMCT_LOCAL_CALIBRATION=1" in found["outputs"][0]
    assert found["record"] == ""


def test_a_process_that_leaves_in_the_middle(tmp_path):
    found = scenario(tmp_path, "leaves_early")
    assert found["codes"] == [1, 0, 1]
    for rank in (0, 2):
        assert f"rank 1 of 3 {LOST}" in found["outputs"][rank]
    assert (found["left"], found["record"]) == (BEGUN, "")


def test_bad_data_in_one_process_ends_all_with_its_message(tmp_path):
    found = scenario(tmp_path, "bad_data")
    assert found["codes"] == [1, 1, 1]
    assert 'layer "a", batch 5: the activation holds 1 NaN' in found["outputs"][1]
    for rank in (0, 2):
        assert 'rank 1: layer "a", batch 5: the activation holds 1 NaN' in found["outputs"][rank]
    assert found["record"] == ""


def test_processes_with_different_configs_do_not_merge(tmp_path):
    found = scenario(tmp_path, "other_config")
    assert found["codes"] == [1, 1, 1]
    assert (
        "rank 1 of 3 is lost to the calibration (rank 1 has not begun this calibration, or calibrates another model"
        in (found["outputs"][0])
    )


def test_fewer_batches_than_processes(tmp_path):
    found = scenario(tmp_path, "too_few_batches")
    assert found["codes"] == [1, 1, 1]
    for output in found["outputs"]:
        assert "batch_num is 2, but 3 processes calibrate together" in output
    assert found["left"] == []


def test_the_switch_keeps_calibration_local(tmp_path):
    found = scenario(tmp_path, "local")
    assert found["codes"] == [0, 0, 0], found["outputs"]
    assert 'key: "a"' in found["record"]


@pytest.mark.parametrize("seed", ["1"])
def test_kills_at_random_moments(tmp_path, seed):
    """The others end with the name of the killed process, or all had ended; the record is whole or empty."""
    found = scenario(tmp_path, "kills", seed)
    whole = found["whole"]["record"]
    assert found["whole"]["codes"] == [0, 0, 0]
    assert 'key: "b"' in whole
    for kill in found["kills"]:
        others = [rank for rank in range(3) if rank != kill["victim"]]
        for rank in others:
            code, output = kill["codes"][rank], kill["outputs"][rank]
            assert code == 0 or f"rank {kill['victim']}" in output, (kill["victim"], kill["moment"], output[-2000:])
        assert kill["record"] in (None, "", whole), kill["moment"]
        if all(kill["codes"][rank] == 0 for rank in others):
            assert kill["record"] == whole
