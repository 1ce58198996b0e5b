"""The demo: it runs quietly from start to end, and what its table says is measured, not written down."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from filelock import FileLock
from PIL import Image

ROOT = Path(__file__).parent.parent.parent
CHANCE = 25.0  # percent; ten classes, and a damaged net may favour a frequent one


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The output of the whole demo in an empty folder, as someone would pipe it, and the folder.

    It runs once, even when several processes share the tests of this file.
    """
    common = tmp_path_factory.getbasetemp()
    folder = (common.parent if "PYTEST_XDIST_WORKER" in os.environ else common) / "demo"
    with FileLock(folder.with_suffix(".lock")):
        if not folder.exists():
            folder.mkdir()
            run_demo(folder)
    said = {stream: (folder / stream).read_text() for stream in ("stdout", "stderr")}
    return SimpleNamespace(**said), folder


def run_demo(folder: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("AMCT_", "PYTEST_"))}
    program = [sys.executable, ROOT / "examples" / "demo.py"]
    result = subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True)
    (folder / "stdout").write_text(result.stdout)
    (folder / "stderr").write_text(result.stderr)
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.fixture
def examples(monkeypatch, tmp_path):
    """The example modules, importable as the demo imports them; their logs go elsewhere."""
    names = ("caffe_lenet", "pytorch_cnn", "digits", "measuring")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.chdir(tmp_path)
    yield
    for name in names:
        sys.modules.pop(name, None)


def row(output: str, name: str) -> list[str]:
    (line,) = [line for line in output.splitlines() if line.strip().startswith(name)]
    return line.strip().removeprefix(name).split()


def test_the_demo_says_what_it_does_and_nothing_else(demo):
    result, _ = demo
    assert result.stderr == ""
    assert "\x1b" not in result.stdout  # no colours in a pipe
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_one_table_for_both_networks(demo):
    result, folder = demo
    for name in ("accuracy, float", "accuracy, INT8 (QDQ)"):
        lenet, _, cnn, _ = row(result.stdout, name)
        assert float(lenet) > 95
        assert float(cnn) > 95
    for unit, name in (("kB", "file"), ("ms", "64 images")):
        before, after = row(result.stdout, f"{name}, float"), row(result.stdout, f"{name}, INT8 (QDQ)")
        assert before[1::2] == after[1::2] == [unit, unit]
    sizes = [row(result.stdout, f"file, {kind}")[::2] for kind in ("float", "INT8 (QDQ)")]
    assert all(int(small) < 0.3 * int(large) for large, small in zip(*sizes, strict=True))
    for report in row(result.stdout, "report"):
        assert "<html" in (folder / report).read_text()


def test_the_table_and_the_pages_agree(demo):
    """They are measured apart: the table in onnxruntime on all images at once, the page batch by batch."""
    result, folder = demo
    before, after = (row(result.stdout, f"accuracy, {kind}") for kind in ("float", "INT8 (QDQ)"))
    harmed = row(result.stdout, "most harmed layer")
    for place, page in enumerate(("lenet", "cnn")):
        text = (folder / "out/demo" / f"{page}.html").read_text()
        assert f'<span class="before">{before[2 * place]} %</span>' in text
        assert f'<span class="after">{after[2 * place]} %</span>' in text
        assert f"{harmed[3 * place + 1].strip('(')} dB" in text.partition('class="bars"')[2].partition("</li>")[0]
        assert f"{page}_qdq_model.onnx, layers those of the simulation" in text


def test_both_readmes_show_the_same_table():
    tables = [re.search(r"```text\n(.*?)```", page.read_text(), re.DOTALL)[1] for page in ROOT.glob("README*.md")]
    assert len(tables) == 2
    assert tables[0] == tables[1]


def test_the_table_shows_the_sizes_of_the_files(demo):
    result, folder = demo
    lenet, _, cnn, _ = row(result.stdout, "file, INT8 (QDQ)")
    assert int(lenet) == round((folder / "out/demo/lenet_qdq_model.onnx").stat().st_size / 1000)
    assert int(cnn) == round((folder / "out/demo/cnn_qdq_model.onnx").stat().st_size / 1000)


@pytest.mark.usefixtures("examples")
def test_damaged_weights_of_lenet_change_its_accuracies(demo, tmp_path):
    import caffe_lenet
    from measuring import measure

    from amct_caffe import caffe

    _, folder = demo
    net = caffe.Net(str(caffe_lenet.DEPLOY), str(folder / "out/demo/lenet.caffemodel"), caffe.TEST)
    weights = net.params["ip2"][0].data
    weights[...] = np.roll(weights, 1, axis=0)  # every digit is taken for its neighbour
    net.save("damaged.caffemodel")
    example = caffe_lenet.quantize(Path("damaged.caffemodel"), caffe_lenet.load_digits(), tmp_path)
    before, after = measure(example)
    assert before.accuracy < CHANCE
    assert after.accuracy < CHANCE
    assert "top1 accuracy" in example.report.read_text()


@pytest.mark.usefixtures("examples")
def test_damaged_weights_in_the_files_of_the_cnn_change_its_accuracies(demo, tmp_path):
    import pytorch_cnn
    from measuring import Example, measure

    _, folder = demo
    for name in ("cnn_float.onnx", "cnn_qdq_model.onnx"):
        model = onnx.load(folder / "out/demo" / name)
        (weights,) = [tensor for tensor in model.graph.initializer if sorted(tensor.dims) == [10, 128]]
        array = onnx.numpy_helper.to_array(weights)
        damaged = np.roll(array, 1, axis=array.shape.index(10))  # every digit is taken for its neighbour
        weights.CopyFrom(onnx.numpy_helper.from_array(damaged, weights.name))
        onnx.save(model, tmp_path / name)
    files = {"float_file": tmp_path / "cnn_float.onnx", "int8_file": tmp_path / "cnn_qdq_model.onnx"}
    data = pytorch_cnn.load_digits()
    before, after = measure(Example(title="", data=data, report=tmp_path, most_harmed="", **files))
    assert before.accuracy < CHANCE
    assert after.accuracy < CHANCE


IMAGES = ROOT / "docs" / "images"


def pictures(folder: Path) -> dict[str, Image.Image]:
    found = {}
    for path in folder.glob("*.png"):
        with Image.open(path) as image:
            found[path.name] = image.convert("RGB")
    return found


@pytest.mark.browser
def test_pictures_of_the_documents_are_taken_from_these_reports(demo, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "report"))  # where its browser is
    import photograph_reports

    _, folder = demo
    monkeypatch.setattr(photograph_reports, "IMAGES", tmp_path)
    readme = tmp_path / "README.md"
    readme.write_text("before\n```text\nold\n```\n```text\nkept\n```\n")
    monkeypatch.setattr(photograph_reports, "READMES", [readme])
    monkeypatch.setattr(sys, "argv", ["photograph_reports.py", "--demo", str(folder / "out/demo")])
    assert photograph_reports.main() == 0
    assert re.fullmatch(
        r"before\n```text\n +Caffe LeNet +PyTorch CNN\n.*cnn\.html\n```\n```text\nkept\n```\n",
        readme.read_text(),
        re.DOTALL,
    )
    taken, kept = pictures(tmp_path), pictures(IMAGES)
    assert {name: image.width for name, image in taken.items()} == {name: image.width for name, image in kept.items()}
    for image in taken.values():
        assert len(image.getcolors(2**20)) > 20  # something was drawn


def test_pictures_are_small():
    sizes = {path.name: path.stat().st_size for path in IMAGES.iterdir()}
    assert len(sizes) >= 4
    assert max(sizes.values()) <= 200 * 1024
