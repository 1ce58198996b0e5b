"""A calibration that is killed, wherever it is, can start again and ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from ptq_caffe_flow import golden_flow

MOMENTS = 12


def test_killed_at_any_moment(golden, tmp_path):
    flow = golden_flow("legacy_v0", golden, tmp_path)
    script = Path(__file__).with_name("ptq_caffe_killed.py")
    done = subprocess.run(
        [sys.executable, str(script), str(flow.model), str(flow.weights), str(tmp_path), str(MOMENTS)],
        env=os.environ | {"AMCT_LOG_LEVEL": "error", "PYTHONPATH": str(script.parent), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert {"record.txt", "config.json", "modified.caffemodel", "out/net_deploy_weights.caffemodel"} <= set(
        result["files"]
    )
    assert len(result["killed"]) == MOMENTS
    assert len({each["event"] for each in result["killed"]}) == MOMENTS
    # in writing the config, in the record while calibrating, and in the results
    for place in ("config.json", "record.txt", "modified"):
        assert place in done.stdout
    assert [each for each in result["killed"] if each["status"] or each["different"]] == []
