"""caffe.draw and caffe.coord_map: pictures of nets, and crops that align the tops of a NetSpec."""

from __future__ import annotations

import re
import shutil

import numpy as np
import pytest

from amct.caffe import pycaffe as caffe
from amct.caffe.engine.messages import parse_message
from amct.caffe.pycaffe import NetSpec, draw
from amct.caffe.pycaffe import layers as L  # noqa: N812  the name that scripts give it
from amct.caffe.pycaffe.coord_map import (
    AxisMismatchException,
    UndefinedMapException,
    compose,
    coord_map_from_to,
    crop,
    inverse,
)
from amct.errors import ArgumentError

NET = r"""
name: "a \"net\""
layer { name: "data" type: "Data" top: "x" top: "y" include { phase: TRAIN } }
layer { name: "in" type: "Input" top: "x" include { phase: TEST } }
layer { name: "conv" type: "Convolution" bottom: "x" top: "c" param { lr_mult: 2 }
  convolution_param { num_output: 5 kernel_size: 3 } }
layer { name: "relu" type: "ReLU" bottom: "c" top: "c" }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "c" bottom: "y" top: "loss" include { phase: TRAIN } }
"""


def edges(text):
    return re.findall(r'^"(.+?)" -> "(.+?)"( \[label="5"\])?;$', text, re.MULTILINE)


def test_a_net_as_text(tmp_path):
    net = parse_message(NET, "NetParameter")
    text = draw.get_pydot_graph(net, "LR", phase=caffe.TEST).to_string()
    assert edges(text) == [
        ("layer in", "blob x", ""),
        ("blob x", "layer conv", ""),
        ("layer conv", "blob c", ' [label="5"]'),
        ("blob c", "layer relu", ""),
    ]
    assert r'digraph "a \"net\"" {' in text
    assert r"conv (Convolution)\nkernel_size: 3\nstride: 1\npad: 0" in text
    both = draw.draw_net(net, "TB", ext="dot", display_lrm=True).decode()
    assert len(edges(both)) == 9
    assert "lr_mult: 2" in both
    draw.draw_net_to_file(net, tmp_path / "net.dot", phase=caffe.TEST)
    assert (tmp_path / "net.dot").read_text() == text


def test_a_picture_needs_graphviz(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(ArgumentError, match="needs the program dot of Graphviz"):
        draw.draw_net_to_file(parse_message(NET, "NetParameter"), tmp_path / "net.png")
    assert not (tmp_path / "net.png").exists()


def test_a_picture_is_what_graphviz_makes_of_the_text(monkeypatch, tmp_path):
    program = tmp_path / "dot"
    program.write_text('#!/bin/sh\nprintf %s: "$1"; cat\n')
    program.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda _: str(program))
    net = parse_message(NET, "NetParameter")
    assert draw.draw_net(net, "LR", "svg") == b"-Tsvg:" + draw.draw_net(net, "LR", "dot")
    program.write_text("#!/bin/sh\ncat > /dev/null; echo bad >&2; exit 1\n")
    with pytest.raises(ArgumentError, match="dot failed: bad"):
        draw.draw_net(net, "LR", "svg")


def fully_convolutional(pad):
    """Eight times down, and up again: where the first value of the result lies is not obvious."""
    net = NetSpec()
    net.data = L.Input(input_param={"shape": {"dim": [1, 1, 41, 41]}})
    net.conv = L.Convolution(net.data, kernel_size=3, num_output=2, pad=pad)
    net.relu = L.ReLU(net.conv, in_place=True)
    net.pool = L.Pooling(net.relu, kernel_size=2, stride=2)
    net.more = L.Convolution(net.pool, kernel_size=3, dilation=2, stride=4, num_output=2)
    net.up = L.Deconvolution(net.more, convolution_param={"num_output": 2, "kernel_size": 16, "stride": 8})
    return net


def test_the_map_of_a_net_is_that_of_receptive_fields(tmp_path):
    """A value lies at the middle of all inputs that change it, found by asking the engine."""
    net = fully_convolutional(pad=40)
    axis, scale, offset = coord_map_from_to(net.more, net.data)
    (tmp_path / "net.prototxt").write_text(str(net.to_proto()))
    running = caffe.Net(str(tmp_path / "net.prototxt"), caffe.TEST)
    for blobs in running.params.values():
        blobs[0].data[...] = 1
    changes = []
    for place in range(41):
        data = np.zeros((1, 1, 41, 41), np.float32)
        data[..., place, 20] = 1
        running.forward(data=data)
        changes.append(running.blobs["more"].data[0, 0].any(axis=1))
    rows = [row for row in range(len(changes[0])) if np.sum([each[row] for each in changes]) == 12]  # whole fields
    assert len(rows) > 1
    for row in rows:
        fields = [place for place, each in enumerate(changes) if each[row]]
        assert axis == 1
        assert scale[0] * row + offset[0] == pytest.approx((fields[0] + fields[-1]) / 2)


def test_crops_align():
    net = fully_convolutional(pad=40)
    _, scale, offset = coord_map_from_to(net.up, net.data)
    assert scale == 1
    assert offset == np.round(offset) < 0
    score = crop(net.up, net.data)
    assert score.fn.params == {"crop_param": {"axis": 2, "offset": [int(-offset[0])]}}
    assert coord_map_from_to(score, net.data)[1:] == (1, 0)
    with pytest.raises(UndefinedMapException, match="a Crop cannot change the scale"):
        crop(net.more, net.data)
    with pytest.raises(UndefinedMapException, match="a Crop cannot add an edge"):
        crop(net.data, net.up)


def test_maps_compose_and_invert():
    first, second = (1, 2.0, 3.0), (1, 0.5, -1.0)
    assert compose(first, second) == (1, 1.0, 1.0)
    assert compose(first, inverse(first)) == (1, 1.0, 0.0)
    assert compose((None, 1, 0), first) == first
    with pytest.raises(AxisMismatchException, match="from 1 on, the other for those from 2 on"):
        compose(first, (2, 1, 0))
    data = L.Input(input_param={"shape": {"dim": [1, 3]}})
    with pytest.raises(RuntimeError, match="do not depend on a common one"):
        coord_map_from_to(L.InnerProduct(data, num_output=2), data)
