"""The package as users get it: a wheel, installed into an empty environment, quantizes outside of the source tree."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import amct

ROOT = Path(__file__).parent.parent.parent
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from the tracked files only, as from a fresh clone."""
    folder = tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "src", "pyproject.toml", "setup.py", "README.md", "LICENSE"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    for name in listed:
        if (ROOT / name).is_file():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / "source" / name)
    built = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, folder / "source"]
    subprocess.run(built, check=True, capture_output=True)
    (path,) = folder.glob("amct-*.whl")
    return path


@pytest.fixture(scope="module")
def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def test_the_wheel_says_what_an_index_shows(metadata):
    assert metadata["Version"] == amct.__version__ == "0.2.0"
    classifiers = metadata.get_all("Classifier")
    promised = {
        line.rpartition(" ")[2] for line in classifiers if line.startswith("Programming Language :: Python :: 3.")
    }
    (tried,) = re.findall(r"^Linux, .* Tried on \S+ with Python ([\d., and]+):$", metadata.get_payload(), re.MULTILINE)
    assert promised == set(re.findall(r"[\d.]+", tried))
    assert metadata["Requires-Python"] == ">=3.10"
    labels = {line.partition(",")[0] for line in metadata.get_all("Project-URL")}
    assert labels == {"Homepage", "Documentation", "Changelog"}


def test_the_readme_renders_away_from_the_repository(metadata):
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = metadata.get_payload()
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) > 10
    assert [link for link in links if not link.startswith("https://")] == []
    assert "# amct" in text


def test_types_templates_and_schemas_are_in_the_wheel(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    wanted = {"amct/py.typed", "amct_pytorch/py.typed", "amct/schema/descriptors.binpb", "amct/report/page.html.j2"}
    assert wanted | {"amct/report/runs.html.j2", "amct/report/page.js", "amct/report/page.css"} <= names
    assert [name for name in names if name.startswith(("tests/", "examples/"))] == []


def test_the_wheel_writes_the_patch_of_a_real_caffe(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "packages")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "packages")}
    command = [sys.executable, "-m", "amct", "caffe", "patch", "export", tmp_path / "patch"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    written = {path.relative_to(tmp_path / "patch") for path in (tmp_path / "patch").rglob("*") if path.is_file()}
    sources = [
        path for path in (ROOT / "src/caffe_patch").rglob("*") if path.is_file() and "__pycache__" not in path.parts
    ]
    wanted = {path.relative_to(ROOT / "src/caffe_patch") for path in sources if path.name != "py.typed"}
    assert written == wanted | {Path("merge_proto/caffe.proto")}
    assert {path.suffix for path in written} == {".cpp", ".hpp", ".patch", ".proto", ".py", ".sh"}


def test_an_installed_wheel_quantizes_outside_of_the_source_tree(wheel, tmp_path):
    home = tmp_path / "venv"
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    subprocess.run([*PIP, "--python", python, "install", "--no-deps", "--no-index", wheel], check=True)
    (packages,) = (home / "lib").glob("python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")  # after the wheel's own files
    weight = np.random.default_rng(0).normal(size=(4, 3, 3, 3)).astype(np.float32)
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Conv", ["x", "w"], ["y"], name="conv")],
        "net",
        [value("x", TensorProto.FLOAT, [1, 3, 8, 8])],
        [value("y", TensorProto.FLOAT, [1, 4, 6, 6])],
        [numpy_helper.from_array(weight, "w")],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), tmp_path / "net.onnx"
    )
    np.save(tmp_path / "data.npy", np.random.default_rng(1).normal(size=(2, 3, 8, 8)).astype(np.float32))
    environment = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}
    place = [python, "-c", "import amct; print(amct.__file__)"]
    found = subprocess.run(place, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    assert Path(found.strip()).is_relative_to(home)
    command = [home / "bin" / "amct", *["quantize", "net.onnx", "--data", "data.npy", "-o", "out/", "--report"]]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"qdq_model.onnx", "quant.json", "report.html"}
