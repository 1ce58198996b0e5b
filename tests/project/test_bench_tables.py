"""The tables of docs/benchmarks.md are made from what the benchmarks wrote."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import bench_tables  # noqa: E402  scripts are no package

PAGE = """# Page
before
<!-- rows of first -->
| old |
<!-- end -->
between
<!-- rows of second -->
| kept |
<!-- end -->
after
"""
ROWS = [
    {"what": "time | of it", "measured": "3 s", "wanted": "≤ 2 s", "kept": False},
    {"what": "size", "measured": "1 MB", "wanted": "≤ 2 MB", "kept": True},
    {"what": "yardstick", "measured": "5 s", "wanted": "", "kept": None},
]


def results(tmp_path, **documents):
    for name, document in documents.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    return bench_tables.read_results(tmp_path)


def test_a_benchmark_replaces_its_own_table_only(tmp_path):
    found = results(tmp_path, first={"rows": ROWS}, other={"lines": []}, a_list=[1])
    page = bench_tables.with_tables(PAGE, found)
    table = page.split("<!-- rows of first -->\n")[1].split("<!-- end -->")[0].splitlines()
    assert table[2:] == [
        "| time \\| of it | 3 s | ≤ 2 s | **missed** |",
        "| size | 1 MB | ≤ 2 MB | yes |",
        "| yardstick | 5 s |  |  |",
    ]
    assert page.replace("\n".join(table), "| old |") == PAGE
    assert bench_tables.with_tables(page, found) == page


def test_a_run_of_some_parts_keeps_the_table(tmp_path):
    found = results(tmp_path, first={"rows": ROWS[:1], "partial": True})
    assert bench_tables.with_tables(PAGE, found) == PAGE


def test_rows_without_a_place_are_an_error(tmp_path):
    with pytest.raises(ValueError, match='no "<!-- rows of third -->"'):
        bench_tables.with_tables(PAGE, results(tmp_path, third={"rows": ROWS}))


@pytest.mark.parametrize(("rows", "code"), [(ROWS, 1), (ROWS[1:], 0)])
def test_missed_rows_are_marked_and_fail(rows, code, tmp_path, monkeypatch, capsys):
    results(tmp_path, first={"rows": rows})
    monkeypatch.setattr(bench_tables, "RESULTS", tmp_path)
    monkeypatch.setattr(bench_tables, "GOALS", (bench_tables.Goal("first", ("size",)),))
    monkeypatch.setattr(sys, "argv", ["bench_tables.py"])
    assert bench_tables.main() == code
    printed = capsys.readouterr().out
    assert ("MISSED  time | of it: 3 s   wanted ≤ 2 s" in printed) == bool(code)
    assert printed.splitlines()[-1] == f"{code} missed, 0 not measured"


def test_goals_that_nothing_has_measured_are_listed(tmp_path, monkeypatch, capsys):
    goals = (bench_tables.Goal("first", ("size",)), bench_tables.Goal("first", ("size", "of both")))
    monkeypatch.setattr(bench_tables, "GOALS", (*goals, bench_tables.Goal("second", ("time",))))
    monkeypatch.setattr(bench_tables, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["bench_tables.py"])
    results(tmp_path, first={"rows": ROWS[1:]})
    assert bench_tables.main() == 1
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "NOT MEASURED  size, of both: python benchmarks/first.py",
        "NOT MEASURED  time: python benchmarks/second.py",
        "0 missed, 2 not measured",
    ]


def test_every_goal_is_that_of_a_benchmark_whose_table_is_in_the_page():
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    places = {match["name"] for match in bench_tables.BLOCK.finditer(page)}
    assert {goal.benchmark for goal in bench_tables.GOALS} <= places


def test_every_goal_is_a_row_of_the_page():
    """The page has the rows as the benchmarks name them: a goal with other words would never count as measured."""
    tables = {
        found["name"]: found["table"]
        for found in bench_tables.BLOCK.finditer((ROOT / "docs" / "benchmarks.md").read_text())
    }
    for goal in bench_tables.GOALS:
        rows = tables[goal.benchmark].splitlines()
        assert any(all(word in row for word in goal.words) for row in rows), goal


def test_every_place_in_the_page_is_that_of_a_benchmark_that_writes_rows():
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    names = [match["name"] for match in bench_tables.BLOCK.finditer(page)]
    assert len(names) == len(set(names)) == len(re.findall("<!-- rows of", page)) >= 5
    for name in names:
        assert '"rows":' in (ROOT / "benchmarks" / f"{name}.py").read_text()


def test_the_hint_for_a_missing_peer_names_that_peer(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "pytorch"))
    for name in ("AMCT_LOG_LEVEL", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # the benchmark sets them; afterwards they are as before
    import ptq_pytorch

    absent = {"nncf", "aimet_onnx"}
    monkeypatch.setattr(ptq_pytorch.importlib.util, "find_spec", lambda name: None if name in absent else object())
    monkeypatch.setattr(ptq_pytorch, "job", lambda name, *_: {"ran": name})
    monkeypatch.setattr(ptq_pytorch, "cifar_resnet", lambda *_: None)
    monkeypatch.setattr(ptq_pytorch, "cifar_images", lambda *_: ())
    monkeypatch.setattr(ptq_pytorch, "torch_top1", lambda *_: 0.0)
    found = ptq_pytorch.jobs(Path())
    assert found["NNCF"] == {"failed": "NNCF is not installed (pip install nncf)"}
    assert found["aimet-onnx"] == {"failed": "aimet-onnx is not installed (pip install aimet-onnx)"}
    assert found["ours"] == {"ran": "ours"}
