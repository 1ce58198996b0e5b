"""``amct caffe install-alias`` in a new environment: ``python3 old.py`` with ``import caffe``; what is left alone."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import venv
from pathlib import Path
from types import SimpleNamespace

import pytest

import amct

SCRIPT = """
import caffe
import caffe.io
from caffe.proto import caffe_pb2
from caffe import layers as L
print(caffe.__name__, caffe.TEST, caffe.io.Transformer.__name__, caffe_pb2.NetParameter.__name__)
"""
OURS = "amct.caffe.pycaffe 1 Transformer NetParameter\n"


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A new environment that finds the installed packages: its Python, its site-packages and how to run it."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(f"{Path(amct.__file__).parent.parent}\n{sysconfig.get_path('purelib')}\n")
    (folder / "old.py").write_text(SCRIPT)
    plain = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}

    def run(*arguments, code=0, **variables):
        done = subprocess.run(
            [python, *arguments], env={**plain, **variables}, cwd=folder, capture_output=True, text=True
        )
        assert done.returncode == code, done.stderr
        return done.stdout if code == 0 else done.stderr

    return SimpleNamespace(folder=folder, site=site, run=run)


def alias(environment, *words, code=0):
    return environment.run("-m", "amct", "caffe", "install-alias", *words, code=code)


def test_an_old_script_runs_until_the_alias_is_removed(environment):
    before = set(environment.folder.rglob("*"))
    assert "No module named 'caffe'" in environment.run("old.py", code=1)
    assert str(environment.site / "caffe.py") in alias(environment)
    assert set(environment.folder.rglob("*")) - before == {environment.site / "caffe.py"}
    assert environment.run("old.py") == OURS
    alias(environment)  # again changes nothing
    assert (
        environment.run("-c", "import amct_caffe; amct_caffe.install_as_caffe(); exec(open('old.py').read())") == OURS
    )
    assert "removed" in alias(environment, "--remove")
    assert set(environment.folder.rglob("*")) - before <= {environment.site / "__pycache__"}
    assert "No module named 'caffe'" in environment.run("old.py", code=1)
    assert "nothing to remove" in alias(environment, "--remove")


@pytest.mark.parametrize("place", ["before", "beside", "behind"])
def test_a_real_caffe_goes_first(place, environment, tmp_path):
    alias(environment)
    real = (environment.site if place == "beside" else tmp_path) / "caffe"
    real.mkdir()
    (real / "__init__.py").write_text("import sys\nassert sys.modules['caffe'].__file__ == __file__\nTEST = 'real'\n")
    (real / "io.py").write_text("")
    code = "import caffe, caffe.io; print(caffe.TEST, caffe.io.__file__)"
    try:
        if place == "behind":
            code = f"import sys; sys.path.append({str(tmp_path)!r}); {code}"
        variables = {"PYTHONPATH": str(tmp_path)} if place == "before" else {}
        assert environment.run("-c", code, **variables) == f"real {real / 'io.py'}\n"
    finally:
        for file in real.rglob("*.p*"):
            file.unlink() if file.is_file() else None
        for folder in (real / "__pycache__", real):
            folder.rmdir() if folder.exists() else None
        alias(environment, "--remove")


def test_a_caffe_of_somebody_else_is_left_alone(environment):
    foreign = environment.site / "caffe.py"
    foreign.write_text("TEST = 'foreign'\n")
    try:
        assert f'"{foreign}" is called caffe already' in alias(environment, code=2)
        assert "nothing to remove" in alias(environment, "--remove")
        assert foreign.read_text() == "TEST = 'foreign'\n"
    finally:
        foreign.unlink()
    elsewhere = environment.folder / "target.py"
    elsewhere.write_text("")
    foreign.symlink_to(elsewhere)
    try:
        assert "is called caffe already" in alias(environment, code=2)
        assert elsewhere.read_text() == ""
    finally:
        foreign.unlink()
