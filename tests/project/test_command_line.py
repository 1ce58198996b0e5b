"""The command itself: version, help, exit codes, and that it answers without loading torch."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

import amct
from amct.cli import main

AMCT = Path(sys.executable).with_name("amct")


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"amct {amct.__version__}\n"


def test_installed_command_answers():
    result = subprocess.run([AMCT, "--version"], capture_output=True, text=True, check=True)
    assert result.stdout == f"amct {amct.__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["config", "--help"],
        ["record", "--help"],
        ["compare", "--help"],
        ["report", "--help"],
        ["quantize", "--help"],
    ],
    ids=" ".join,
)
def test_help_needs_no_torch(arguments):
    code = f"import sys; from amct.cli import main; main({arguments!r}); sys.stderr.write(str('torch' in sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Usage: amct" in result.stdout
    assert result.stderr == "False"


@pytest.mark.parametrize("arguments", [["--version"], ["nothing"]])
def test_a_command_leaves_the_collector_as_it_was(arguments):
    before = gc.get_threshold(), gc.isenabled()
    main(arguments)
    assert (gc.get_threshold(), gc.isenabled()) == before


def test_unknown_command_is_one_line_and_exit_code_2(capsys):
    assert main(["quantise"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert "quantise" in error


def test_error_of_ours_is_one_line_and_exit_code_2(capsys, tmp_path):
    assert main(["record", "show", str(tmp_path / "missing.txt")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "missing.txt" in error


@pytest.mark.parametrize("command", [[AMCT], [sys.executable, "-m", "amct"]], ids=["amct", "python -m amct"])
def test_files_of_the_working_folder_do_not_replace_packages(tmp_path, command):
    for name in ("torch", "numpy", "typer"):
        (tmp_path / f"{name}.py").write_text('raise SystemExit("the file of the working folder was run")')
    (tmp_path / "ournet.py").write_text("import torch\ndef net(): return torch.nn.Sequential(torch.nn.Conv2d(4, 4, 1))")
    arguments = ["prune", "ournet:net", "--sparse", "--input-shape", "1,4,8,8", "-o", "out/net"]
    result = subprocess.run([*command, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
