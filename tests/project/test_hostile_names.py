"""Names of layers that control a terminal: no command prints them as they are, nor writes them to its log."""

from __future__ import annotations

import re
import shutil

import numpy as np
import pytest
from test_hostile_folders import (
    CAFFE_PAIR,
    DATA,
    FACTORY,
    NETS,
    PROTOTXT,
    READING_COMMANDS,
    TRAINED,
    WRITING_COMMANDS,
    onnx_model,
    write_files,
)

from amct.cli import main
from test_printable import CONTROLS

NAME = "c\x1b[31m\x9b2J\r\u202ex"
SHOWN = re.compile(r"c\\(u00|x)1b\[31m\\(u00|x)9b2J")
IN_PROTOTXT = "c\\033[31m\\302\\2332J\\r\\342\\200\\256x"
OWN_NETS = "nets_of_hostile_names"


def hostile_onnx():
    """The model with names of nodes and tensors, inputs and outputs that control a terminal."""
    model = onnx_model()
    for node in model.graph.node:
        node.name += NAME
        node.input[:] = [name + NAME for name in node.input]
        node.output[:] = [name + NAME for name in node.output]
    for each in (*model.graph.input, *model.graph.output, *model.graph.initializer):
        each.name += NAME
    return model


def hostile_text(text: str) -> str:
    """A prototxt whose layers and blobs have such names, without those that data is fed to by name."""
    for name in ("conv", "relu", "fc", "loss", "label"):
        text = text.replace(f'"{name}"', f'"{name}{IN_PROTOTXT}"')
    return text


NAMED = f"""\
from collections import OrderedDict
def named(*layers):
    return nn.Sequential(OrderedDict((str(index) + {NAME!r}, layer) for index, layer in enumerate(layers)))
"""
HOSTILE_FACTORY = FACTORY.replace("nn.Sequential(", "named(") + NAMED


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("names")
    write_files(folder, hostile_text(PROTOTXT), hostile_text(TRAINED), hostile_onnx(), HOSTILE_FACTORY, OWN_NETS)
    np.save(folder / "wrong.npy", np.zeros((4, 2, 8, 8), np.float32))
    (folder / "unknown.json").write_text((folder / "caffe.json").read_text().replace("fc", "fd"))
    record = (folder / "caffe_quant_param_record.txt").read_text()
    (folder / "twice.txt").write_text(record + record)
    (folder / "damaged.txt").write_text(record.replace("scale_w", "scale_x", 1))
    (folder / f"{NAME}.onnx").write_bytes(b"no model")
    (folder / f"{NAME}.prototxt").write_text("no prototxt")
    return folder


MISTAKES = {
    "wrong data Caffe": ["quantize", *CAFFE_PAIR, "--data", "wrong.npy", "-o", "x"],
    "wrong data ONNX": ["quantize", "net.onnx", "--data", "wrong.npy", "-o", "x"],
    "wrong data PyTorch": ["quantize", f"{NETS}:build", "--data", "wrong.npy", "-o", "x"],
    "unknown layer": ["config", "check", "unknown.json", "--model", "net.prototxt"],
    "layer twice": ["record", "show", "twice.txt"],
    "unknown field": ["record", "show", "damaged.txt"],
    "ONNX file": ["inspect", f"{NAME}.onnx"],
    "prototxt": ["inspect", f"{NAME}.prototxt"],
    "record of other layers": ["record", "diff", "caffe_quant_param_record.txt", "r.txt"],
    "compare other models": ["compare", "net.onnx", "torch", *DATA],
    "no such option": ["inspect", "net.onnx", f"--{NAME}"],
}
TABLES = {f"{name} --json": [*words, "--json"] for name, words in READING_COMMANDS.items() if words[0] != "caffe"}
SILENT = {
    "record diff", "record diff --json", "config check", "config check --json", "record convert", "config init",
    "record show --json --json", "caffe train", "caffe train on", "caffe merge-proto", "caffe to-onnx", "caffe run",
    "report Caffe", "report ONNX", "prune", "wrong data PyTorch", "unknown field", "record of other layers",
    "caffe patch export", "caffe patch install", "caffe install-alias", "wrong data Caffe", "certificate check",
    "certificate check --json",
}  # fmt: skip
"""Commands that print no name of a layer here."""
COMMANDS = {**READING_COMMANDS, **TABLES, **WRITING_COMMANDS, **MISTAKES}


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_prints_controls(files, name, tmp_path, monkeypatch, capfd):
    folder = shutil.copytree(files, tmp_path / "files")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("AMCT_LOG_LEVEL", "debug")
    words = [word.replace(NETS, OWN_NETS) for word in COMMANDS[name]]
    main(words)
    shown = "".join(capfd.readouterr())
    logs = "".join(path.read_text() for path in (folder / "amct_log").glob("*"))
    assert "Traceback" not in shown
    for text in (shown, logs):
        assert not CONTROLS.search(text), text
    assert bool(SHOWN.search(shown)) == (name not in SILENT), shown
