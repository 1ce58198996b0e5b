"""Small things that a user meets in the first hour: help, names, short texts, what Ctrl-C leaves, other data."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from torch import nn

import amct.pytorch
from amct.cli import main
from amct.cli.app import app
from amct.cli.quantize import _telling_of
from amct.model.calibration_data import CalibrationData
from amct.pipeline.flow import CalibrationFile
from amct.printable import counted

ROOT = Path(__file__).parents[2]


def make():
    """A network for ``amct inspect``: containers, a batch norm that folds, layers that only arrange."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout())
    return nn.Sequential(body, nn.Flatten(), nn.Linear(288, 5)).eval()


REFERENCE = f"{__file__}:make"
BATCH = torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def data(tmp_path):
    np.save(tmp_path / "data.npy", BATCH.numpy())
    return tmp_path / "data.npy"


def test_without_a_command_there_is_the_help_and_no_error(capsys):
    assert main([]) == 0
    found = capsys.readouterr()
    assert found.out.startswith("Usage: amct")
    assert "quantize" in found.out
    assert found.err == ""


def test_the_name_of_an_onnx_file_is_understood_as_output(data, tmp_path, capsys):
    command = f"quantize {REFERENCE} --data {data} --no-check --formats qdq -o {tmp_path}/out/small.onnx"
    assert main(command.split()) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["small_qdq_model.onnx", "small_quant.json"]
    assert f"{tmp_path}/out/small_qdq_model.onnx and so on" in capsys.readouterr().err


def test_inspect_counts_only_what_computes(capsys):
    assert main(f"inspect {REFERENCE} --input-shape 1,3,8,8".split()) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "2 of 3 layers quantized by default"


def test_an_interrupted_calibration_says_how_to_go_on(tmp_path, capsys):
    state = CalibrationFile(path=tmp_path / "net.calibration.npz")
    for exists in (False, True):
        if exists:
            state.path.touch()
        with pytest.raises(KeyboardInterrupt), _telling_of(state):
            raise KeyboardInterrupt
        assert ("--resume goes on with it" in capsys.readouterr().err) is exists


def test_pruned_and_trained_models_are_short_in_a_console_and_whole_in_a_notebook():
    pruned = amct.pytorch.prune(make(), BATCH, ratio=0.25, align=1)
    trained = amct.pytorch.prepare_qat(make(), BATCH)
    for model in (pruned, trained):
        assert len(repr(model)) < 100
        assert "\n" not in repr(model)
        assert model._repr_html_().startswith("<pre>")
    assert "layers pruned" in repr(pruned)
    assert "parameters" in pruned._repr_html_()
    assert repr(trained) == "<QuantizedSequential: 2 layers in training with quantizers>"
    assert "clips of activations" in trained._repr_html_()


def test_layers_of_which_the_same_is_said_share_a_line(caplog):
    torch.manual_seed(0)
    model = nn.Sequential(*(part for _ in range(5) for part in (nn.Linear(8, 8), nn.ReLU()))).eval()
    weights = amct.pytorch.AdaRoundSettings(num_iteration=2)
    config = amct.pytorch.QuantConfig(common=amct.pytorch.LayerConfig(weights=weights))
    with caplog.at_level(logging.INFO):
        amct.pytorch.quantize(model, torch.rand(8, 8), config, adaround="fast")
    lines = [record.getMessage() for record in caplog.records if "fast mode learned without" in record.getMessage()]
    assert len(lines) == 1
    assert lines[0].startswith('layers "0", "2", "4" and 2 more: ')
    caplog.clear()
    with torch.no_grad():
        for number in range(0, 8, 2):
            model[number].weight.zero_()
            model[number].bias.zero_()
    amct.pytorch.quantize(model, torch.rand(8, 8))
    lines = [record.getMessage() for record in caplog.records if "as good as" in record.getMessage()]
    assert len(lines) == 1


def test_runs_on_different_data_are_not_judged(tmp_path, capsys):
    for name, count in (("a", 2), ("b", 3), ("c", 3)):
        quantized = amct.pytorch.quantize(make(), BATCH)
        files = quantized.save(tmp_path / name, ("qdq",))
        quantized.report(tmp_path / f"{name}.html", [BATCH[:2]] * count, files=files)
    pair = [str(tmp_path / f"{name}_quant.json") for name in ("a", "b")]
    assert main(["report", "--compare", *pair, "-o", str(tmp_path / "diff.html")]) == 0
    said = capsys.readouterr().out
    assert "not judged: measured on different data: 2 batches, 3 batches" in said
    assert "better" not in said
    page = (tmp_path / "diff.html").read_text()
    assert "measured on different data" in page
    assert 'class="gain' not in page
    same = [str(tmp_path / f"{name}_quant.json") for name in ("b", "c")]
    assert main(["report", "--compare", *same, "-o", str(tmp_path / "diff.html")]) == 0
    assert "layers better in c than in b: 0; worse: 0" in capsys.readouterr().out


def test_every_option_says_what_happens_without_it():
    commands = typer.main.get_command(app).commands
    silent = []
    for name in ("quantize", "prune", "compare"):
        for option in commands[name].params:
            needs_none = option.param_type_name == "argument" or option.required or option.is_flag
            if not needs_none and option.default is None:
                told = any(words in option.help for words in ("unless given", "default", "Without"))
                silent += [] if told else [f"{name} {option.opts[0]}"]
    assert silent == []


def test_numbers_of_things_have_a_singular():
    """What a user reads never says "1 layers": numbers in messages go through ``counted``."""
    things = "layers|batches|samples|tensors|files|outputs|inputs|pictures|channels|labels|pairs"
    pattern = re.compile(rf"(\{{len\([^{{}}]*\)\}}|(?<!/)%d)( more)? ({things})\\b")
    found = [
        f"{path.name}: {match[0]}"
        for path in sorted((ROOT / "src" / "amct").rglob("*.py"))
        for match in pattern.finditer(path.read_text())
    ]
    assert found == []
    assert [counted(1, "batch"), counted(2, "batch"), counted(1, "layer"), counted(0, "layer")] == [
        "1 batch",
        "2 batches",
        "1 layer",
        "0 layers",
    ]
    told = [CalibrationData(used=1), CalibrationData(used=1, of=1, unit="pictures"), CalibrationData(used=2, of=3)]
    assert [str(each) for each in told] == ["1 batch", "1 of 1 picture", "2 of 3 batches"]
