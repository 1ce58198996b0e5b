"""``amct config``: a full config, its mistakes with their lines, and where each setting comes from."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from amct.cli import main

CFG = """\
batch_num: 2
common_config {
  ifmr_quantize { search_step: 0.02 }
}
override_layer_configs {
  layer_name: "conv1"
  calibration_config { arq_quantize { channel_wise: false } }
}
skip_layers: "fc"
"""
PROTOTXT = """\
name: "tiny"
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 1 dim: 3 dim: 8 dim: 8 } } }
layer { name: "conv1" type: "Convolution" bottom: "data" top: "conv1"
  convolution_param { num_output: 4 kernel_size: 3 } }
layer { name: "pool" type: "Pooling" bottom: "conv1" top: "pool" pooling_param { pool: AVE kernel_size: 2 stride: 2 } }
layer { name: "fc" type: "InnerProduct" bottom: "pool" top: "fc" inner_product_param { num_output: 2 } }
"""
FACTORY = """\
from torch import nn
def build():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
not_a_model = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quant.cfg").write_text(CFG)
    (tmp_path / "net.prototxt").write_text(PROTOTXT)
    (tmp_path / "layers.txt").write_text("conv1 Conv2d\nconv2 Conv2d  # the second\n\nfc Linear\nrelu ReLU\n")
    (tmp_path / "my_nets_of_config_test.py").write_text(FACTORY)
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("model", ["layers.txt", "net.prototxt"])
def test_explain_names_the_line_that_decides(capsys, model):
    assert main(["config", "explain", "quant.cfg", "--model", model]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "channel_wise=false" in lines[0]
    assert lines[0].endswith("override of this layer (quant.cfg:5:1)")
    assert "common block (quant.cfg:2:1)" in lines[1]
    fc = next(line for line in lines if line.startswith("fc"))
    assert "left float" in fc
    assert fc.endswith("global field (quant.cfg:9:1)")


@pytest.mark.parametrize("kind", ["ptq", "qat"])
def test_explain_shows_which_layers_cannot_be_quantized_and_why(folder, capsys, kind):
    rows = """layer { name: "rows" type: "Input" top: "rows" input_param { shape { dim: 5 dim: 5 } } }
layer { name: "roi" type: "ROIPooling" bottom: "conv1" bottom: "rows" top: "roi"
  roi_pooling_param { pooled_h: 2 pooled_w: 2 } }
"""
    (folder / "net.prototxt").write_text(PROTOTXT + rows)
    (folder / "empty.cfg").write_text("")
    assert main(["config", "explain", "empty.cfg", "--model", "net.prototxt", "--kind", kind]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("roi")]
    assert re.fullmatch('roi +ROIPooling +left float +its bottom "rows" holds coordinates or indices, .*', line)
    assert not any(line.startswith("data") for line in lines)


@pytest.mark.usefixtures("folder")
def test_explain_one_layer_shows_every_setting(capsys):
    assert main(["config", "explain", "quant.cfg", "--model", "layers.txt", "--layer", "conv2"]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert rows["activation_quant_params.search_step"].split()[1] == "0.02"
    assert rows["activation_quant_params.search_step"].endswith("(quant.cfg:3:19)")
    assert rows["weight_quant_params.channel_wise"].endswith("built-in default")


@pytest.mark.usefixtures("folder")
def test_explain_as_json(capsys):
    assert main(["config", "explain", "quant.cfg", "--model", "layers.txt", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    (batch_num,) = [row for row in rows if row["key"] == "batch_num"]
    place = {"from": "global", "file": "quant.cfg", "line": 1, "column": 1}
    assert batch_num == {"layer": "", "type": "", "key": "batch_num", "value": 2, **place}


def test_init_writes_a_config_that_check_accepts(folder, capsys):
    assert main(["config", "init", "--model", "net.prototxt", "--cfg", "quant.cfg", "-o", "out/config.json"]) == 0
    config = json.loads((folder / "out/config.json").read_text())
    assert list(config)[-3:] == ["conv1", "pool", "fc"]
    assert config["fc"]["quant_enable"] is False
    capsys.readouterr()
    assert main(["config", "check", "out/config.json", "--model", "net.prototxt"]) == 0
    assert "2 of 4 layers compressed" in capsys.readouterr().out


def test_init_says_that_a_config_without_batch_num_takes_one_batch(folder, capsys):
    (folder / "silent.cfg").write_text(SILENT_CFG)
    for given in ([], ["--cfg", "silent.cfg"]):
        assert main(["config", "init", "--model", "net.prototxt", *given, "-o", "c.json"]) == 0
        assert json.loads((folder / "c.json").read_text())["batch_num"] == 1
        assert "calibration takes 1 batch, however many there are; change it in c.json" in capsys.readouterr().out


@pytest.mark.usefixtures("folder")
def test_init_is_quiet_about_a_batch_num_that_was_given(capsys):
    assert main(["config", "init", "--model", "net.prototxt", "--cfg", "quant.cfg", "-o", "c.json"]) == 0
    assert "takes 1 batch" not in capsys.readouterr().out


def test_init_for_a_torch_model_through_its_factory(folder):
    arguments = [
        "config",
        "init",
        "--model",
        "my_nets_of_config_test:build",
        "--input-shape",
        "1,3,8,8",
        "-o",
        "c.json",
    ]
    code = f"from amct.cli import main; raise SystemExit(main({arguments!r}))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=folder, capture_output=True)
    assert [key for key in json.loads((folder / "c.json").read_text()) if key.isdecimal()] == ["0", "3"]


SILENT_CFG = 'skip_layers: "fc"\n'
QAT_CFG = """\
retrain_data_quant_config { ulq_quantize { dst_type: INT8 } }
retrain_weight_quant_config { arq_retrain { channel_wise: true } }
quant_skip_layers: "fc"
"""
PRUNE_CFG = """\
prune_config { filter_pruner { balanced_l2_norm_filter_prune { prune_ratio: 0.3 } } }
regular_prune_skip_layers: "conv2"
"""
KINDS = {
    "qat": (QAT_CFG, "layers.txt", ["arq_retrain", "channel_wise=true", "retrain.cfg:1:1"]),
    "compress": (PRUNE_CFG, "layers.txt", ["balanced_l2_norm_filter_prune", "prune_ratio=0.3", "retrain.cfg:1:1"]),
}
LEFT = {"qat": "left float", "compress": "not pruned"}


@pytest.mark.parametrize("kind", KINDS)
def test_explain_other_kinds_of_config(folder, capsys, kind):
    text, model, expected = KINDS[kind]
    (folder / "retrain.cfg").write_text(text)
    assert main(["config", "explain", "retrain.cfg", "--model", model, "--kind", kind]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(part in lines[0] for part in expected), lines[0]
    assert sum(LEFT[kind] in line for line in lines) == 1


SKIPS = {
    "ptq": ('skip_layers: "conv2"\nskip_layer_types: "Linear"\n', {"conv2": (1, 1), "fc": (2, 2)}),
    "qat": ('quant_skip_layers: "conv2"\nskip_layer_types: "Linear"\n', {"conv2": (1, 1), "fc": (2, 2)}),
    "compress": (
        'regular_prune_skip_layers: "conv2"\nskip_layers: "fc"\n' + PRUNE_CFG.splitlines()[0] + QAT_CFG.splitlines()[0],
        {"conv2": (None, 1), "fc": (2, 2)},
    ),
}


@pytest.mark.parametrize("kind", SKIPS)
def test_explain_shows_what_is_skipped_and_the_line_that_skips_it(folder, capsys, kind):
    """By layer: the lines that keep it float and unpruned; in one kind of config one of these has to do for both."""
    text, expected = SKIPS[kind]
    (folder / "skip.cfg").write_text(text)
    assert main(["config", "explain", "skip.cfg", "--model", "layers.txt", "--kind", kind]) == 0
    rows = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    for layer, places in expected.items():
        effects = [effect for name, _, effect in rows if name == layer]
        assert len(effects) == (2 if kind == "compress" else 1)
        for effect, place in zip(effects, places, strict=False):
            assert (place is None) == effect.startswith("ulq_quantize")
            origin = rf" +global field \(skip.cfg:{place}:1\)"
            assert place is None or re.fullmatch("(left float|not pruned)" + origin, effect)
    assert main(["config", "explain", "skip.cfg", "--model", "layers.txt", "--kind", kind, "--layer", "fc"]) == 0
    settings = capsys.readouterr().out.splitlines()
    assert all(re.search(r"_enable +false +global field \(skip.cfg:2:1\)", line) for line in settings)
    assert len(settings) == (2 if kind == "compress" else 1)


BAD = {
    "unknown layer": (["check", "bad.cfg", "--model", "layers.txt"], 'bad.cfg:1:1: .*"conv3".* Did you mean "conv'),
    "no such config": (["check", "none.cfg", "--model", "layers.txt"], '"none.cfg" does not exist'),
    "no such model": (["check", "quant.cfg", "--model", "none.prototxt"], "none.prototxt"),
    "no model at all": (["check", "quant.cfg", "--model", "layers"], "package.module:factory"),
    "no such layer list": (["check", "quant.cfg", "--model", "none.txt"], "none.txt: cannot be read"),
    "no such module": (["check", "quant.cfg", "--model", "nope_nope:build", "--input-shape", "1"], '"nope_nope"'),
    "no such factory": (
        ["check", "quant.cfg", "--model", "my_nets_of_config_test:buidl", "--input-shape", "1"],
        'Did you mean "build"',
    ),
    "no model made": (
        ["check", "quant.cfg", "--model", "my_nets_of_config_test:not_a_model", "--input-shape", "1"],
        "gives a int, expected a torch.nn.Module",
    ),
    "no shape": (["check", "quant.cfg", "--model", "my_nets_of_config_test:build"], "--input-shape"),
    "bad shape": (["check", "quant.cfg", "--model", "my_nets_of_config_test:build", "--input-shape", "a,b"], '"a,b"'),
    "bad list": (["check", "quant.cfg", "--model", "bad.txt"], "bad.txt:1:1: expected two words"),
    "layer of no model": (["explain", "quant.cfg", "--model", "layers.txt", "--layer", "con1"], 'Did you mean "conv1"'),
    "layer never quantized": (["explain", "quant.cfg", "--model", "layers.txt", "--layer", "relu"], '"ReLU" cannot be'),
    "no full form": (["check", "c.json", "--model", "layers.txt", "--kind", "compress"], "simple form only"),
    "kv-cache of Caffe": (["check", "quant.cfg", "--model", "net.prototxt", "--kind", "kv-cache"], "PyTorch models"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_one_error_and_writes_nothing(folder, capsys, arguments, message):
    (folder / "bad.cfg").write_text('skip_layers: "conv3"\n')
    (folder / "bad.txt").write_text("one\n")
    (folder / "c.json").write_text("{}")
    before = sorted(folder.iterdir())
    assert main(["config", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert re.search(message, error)
    assert sorted(path for path in folder.iterdir() if path.name != "__pycache__") == before
