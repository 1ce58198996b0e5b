"""Several quantizations of one model side by side, from their quant.json files."""

from __future__ import annotations

import pytest

from amct.cli import main
from amct.model import Skip
from amct.model.quant_json import (
    FileCheck,
    FileEntry,
    LayerEntry,
    Measurement,
    MetricValues,
    QuantJson,
    quant_json_text,
)
from amct.report.runs import compare_runs

CHECK = FileCheck(cosine=0.99, sqnr=20.0, speed=2.0)
HOSTILE = "<script>window.harm=1</script>"


def document(layers, *, config="batch_num: 1", skipped=(), metric=None, size=1000):
    entry = LayerEntry(type="Conv2d", quantized=True, original_layers=("a",))
    return QuantJson(
        version=2,
        model="net",
        layers=dict.fromkeys(layers, entry),
        skipped=tuple(Skip(name, "switched off") for name in skipped),
        files={"net_qdq_model.onnx": FileEntry(format="qdq", size=size, check=CHECK)},
        config=config,
        measured=Measurement(
            of="net_qdq_model.onnx",
            on="4 batches",
            layers=layers,
            outputs={"y": next(iter(layers.values()))},
            metric=None if metric is None else MetricValues(name="top1", float_model=0.99, quantized=metric),
        ),
    )


@pytest.fixture
def files(tmp_path):
    first = document({"a": 20.0, HOSTILE: 31.0, "c": 25.0, "d": None}, metric=0.95)
    second = document(
        {"a": 26.5, HOSTILE: 30.0, "d": 40.0}, config="batch_num: 8\n<b>", skipped=["c"], metric=0.98, size=2000
    )
    for name, content in (("a", first), ("b", second)):
        (tmp_path / f"{name}_quant.json").write_text(quant_json_text(content))
    return [tmp_path / "a_quant.json", tmp_path / "b_quant.json"]


def test_layers_are_lined_up_with_their_gain(files):
    runs = compare_runs(files)
    assert runs.names == ("a", "b")
    cells = {row.name: [(cell.text, cell.change) for cell in row.cells] for row in runs.layers}
    assert cells["a"] == [("20.0 dB", ""), ("26.5 dB", "+6.5")]
    assert cells[HOSTILE] == [("31.0 dB", ""), ("30.0 dB", "−1.0")]
    assert cells["c"] == [("25.0 dB", ""), ("–", "")]
    assert cells["d"][0] == ("no error", "")
    assert next(row.name for row in runs.layers) == "a"  # the largest change first
    assert (runs.gained, runs.lost) == (1, 1)


def test_metric_files_config_and_layers_left_float(files):
    runs = compare_runs(files)
    summary = {row.name: [cell.text for cell in row.cells] for row in runs.summary}
    assert summary["top1"] == ["99.00 % → 95.00 % (−4.00)", "99.00 % → 98.00 % (−1.00)"]
    assert summary["qdq file"][1] == "2 kB, cosine 0.9900  SQNR 20.0 dB  2.0x float"
    assert summary["SQNR of y"] == ["20.0 dB", "26.5 dB"]
    assert runs.differences == (("b", "-batch_num: 1\n+batch_num: 8\n+<b>"),)
    assert [(row.name, [cell.text for cell in row.cells]) for row in runs.kept_float] == [
        ("c", ["quantized", "switched off"])
    ]


def test_the_command_writes_a_page_with_every_name_escaped(files, tmp_path, capsys):
    assert main(["report", "--compare", *map(str, files), "-o", str(tmp_path / "diff.html")]) == 0
    assert "layers better in b than in a: 1; worse: 1" in capsys.readouterr().out
    page = (tmp_path / "diff.html").read_text()
    assert HOSTILE not in page
    assert "&lt;script&gt;" in page
    assert "▲ +6.5" in page
    assert "<script" not in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compare", "{0}", "-o", "{2}/diff.html"], "two or more"),
        (["--compare", "{0}", "none_quant.json", "-o", "{2}/diff.html"], '"none_quant.json" does not exist'),
        (["--compare", "{0}", "{1}", "-o", "{2}/diff.txt"], "HTML file"),
        (["net.onnx", "out", "-o", "{2}/r.html"], "--data"),
    ],
)
def test_mistakes_are_one_line(files, tmp_path, capsys, arguments, message):
    assert main(["report", *(word.format(*files, tmp_path) for word in arguments)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
