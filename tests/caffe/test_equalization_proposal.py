"""Equalization is proposed where it was tried and helps, and only there; numbers are those of the file asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from amct.caffe import pycaffe as caffe
from amct.cli import main
from amct.model.quant_json import read_quant_json

NET = """\
name: "uneven"
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 4 dim: 3 dim: 12 dim: 12 } } }
layer { name: "conv1" type: "Convolution" bottom: "data" top: "conv1"
  convolution_param { num_output: 16 kernel_size: 3 } }
layer { name: "relu1" type: "ReLU" bottom: "conv1" top: "conv1" }
%s
layer { name: "conv2" type: "Convolution" bottom: "%s" top: "conv2" convolution_param { num_output: 8 kernel_size: 3 } }
"""
CHAIN = NET % ("", "conv1")
SUM = NET % (
    'layer { name: "other" type: "Convolution" bottom: "data" top: "other"\n'
    "  convolution_param { num_output: 16 kernel_size: 3 } }\n"
    'layer { name: "sum" type: "Eltwise" bottom: "conv1" bottom: "other" top: "sum" }',
    "sum",
)
COMMAND = ["quantize", "net.prototxt", "net.caffemodel", "--data", "data.npy", "--batch-size", "4", "--report"]


def make(text, *, spread):
    """A net whose channels between the convolutions have sizes that differ by up to ``spread``."""
    Path("net.prototxt").write_text(text)
    net = caffe.Net("net.prototxt", caffe.TEST)
    random = np.random.default_rng(0)
    sizes = np.geomspace(1, spread, 16).reshape(-1, 1, 1, 1)
    for name, blobs in net.params.items():
        weight = random.normal(size=blobs[0].shape)
        weight = weight / sizes.reshape(1, -1, 1, 1) if name == "conv2" else weight * sizes
        blobs[0].data[...] = weight
        blobs[1].data[...] = 0
    net.save("net.caffemodel")
    np.save("data.npy", random.normal(size=(16, 3, 12, 12)).astype(np.float32))


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AMCT_LOG_LEVEL", "error")


def quantized(name, *options):
    assert main([*COMMAND, "-o", f"out/{name}", *options]) == 0
    return read_quant_json(Path(f"out/{name}_quant.json"))


def deployed_sqnr(document, name):
    return document.files[f"{name}_deploy_model.prototxt"].check.sqnr


def test_what_helps_is_proposed_on_screen_and_in_the_report(capsys):
    make(CHAIN, spread=1000)
    plain = quantized("plain", "--formats", "deploy")
    (proposal,) = plain.proposals
    assert proposal.startswith("equalize=True (--equalize): SQNR ")
    assert f"would help  {proposal}" in capsys.readouterr().out
    assert proposal in Path("out/plain_report.html").read_text()
    equal = quantized("equal", "--formats", "deploy", "--equalize")
    assert equal.proposals == ()
    promised = float(proposal.split()[3])
    assert deployed_sqnr(plain, "plain") < 20
    assert deployed_sqnr(equal, "equal") == pytest.approx(promised, abs=2)
    assert "would help" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "spread"),
    [(CHAIN, 1), (SUM, 1000)],
    ids=["the channels are of one size, and the result is Good", "a sum reads the channels"],
)
def test_what_does_not_help_is_not_proposed(text, spread, capsys):
    make(text, spread=spread)
    document = quantized("net", "--formats", "deploy")
    assert (document.verdict.level == "good") == (spread == 1)
    assert document.proposals == ()
    assert "would help" not in capsys.readouterr().out


def test_with_deploy_alone_every_number_is_the_deploy_models(capsys):
    make(CHAIN, spread=4)
    document = quantized("net", "--formats", "deploy")
    names = [path.name for path in Path("out").iterdir()]
    assert sorted(names) == [
        "net_deploy_model.prototxt",
        "net_deploy_weights.caffemodel",
        "net_quant.json",
        "net_quant_param_record.bin",
        "net_quant_param_record.txt",
        "net_report.html",
    ]
    shown = capsys.readouterr().out
    assert "of net_deploy_model.prototxt" in shown
    assert document.verdict.of == document.measured.of == "net_deploy_model.prototxt"
    assert "All numbers are those of net_deploy_model.prototxt." in Path("out/net_report.html").read_text()
    # the same by hand: the pair in the engine, the float net beside it
    images = np.load("data.npy")
    nets = [caffe.Net("net.prototxt", "net.caffemodel", caffe.TEST)]
    nets.append(caffe.Net("out/net_deploy_model.prototxt", "out/net_deploy_weights.caffemodel", caffe.TEST))
    exact, got = (
        np.concatenate([net.forward(data=images[at : at + 4])["conv2"].copy() for at in range(0, 16, 4)]).astype(float)
        for net in nets
    )
    sqnr = 10 * np.log10((exact**2).sum() / ((exact - got) ** 2).sum())
    assert document.measured.outputs["conv2"] == pytest.approx(sqnr, abs=0.01)
    quantized("wide", "--formats", "deploy,qdq")
    assert main(["report", "--compare", "out/net_quant.json", "out/wide_quant.json", "-o", "both.html"]) == 0
    page = Path("both.html").read_text()
    assert "net_deploy_model.prototxt, 4 batches" in page
    assert "wide_qdq_model.onnx, 4 batches" in page
