"""Faster R-CNN as its authors published it: prototxts with Python layers build, run and train."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from amct.caffe import pycaffe as caffe
from amct.caffe.pycaffe.runtime import install_as_caffe
from amct.errors import ModelError

pytestmark = [pytest.mark.assets, pytest.mark.usefixtures("python_layers")]

OWN = ("caffe", "rpn", "roi_data_layer")
NATIVE = """
layer { name: "proposal" type: "Proposal" bottom: "rpn_cls_prob_reshape" bottom: "rpn_bbox_pred" bottom: "im_info"
  top: "rois" proposal_param { pre_nms_topn: 300 post_nms_topn: 40 } }
"""


@pytest.fixture
def python_layers(monkeypatch):
    had = {name: module for name, module in sys.modules.items() if name.split(".")[0] in OWN}
    install_as_caffe(force=True)
    monkeypatch.syspath_prepend(Path(__file__).parent / "faster_rcnn")
    yield
    for name in [name for name in sys.modules if name.split(".")[0] in OWN]:
        del sys.modules[name]
    sys.modules.update(had)


@pytest.fixture
def prototxts(assets):
    return assets / "caffe_prototxt_only"


def randomize(net):
    """He's initialization where the prototxt gives no filler: values keep their size from layer to layer."""
    random = np.random.default_rng(2)
    for blobs in net.params.values():
        weight = blobs[0]
        if weight.data.any():
            continue
        fan_in = weight.count / weight.shape[0]
        weight.data[...] = random.standard_normal(weight.shape, np.float32) * np.float32(np.sqrt(2 / fan_in))


def set_inputs(net, height=160, width=208):
    net.blobs["data"].reshape(1, 3, height, width)
    net.blobs["data"].data[...] = np.random.RandomState(3).uniform(-1, 1, (1, 3, height, width))
    net.blobs["im_info"].data[...] = [[height, width, 1]]


def test_refused_by_default(prototxts):
    with pytest.raises(ModelError, match=r"rpn.proposal_layer.*allow_python=True"):
        caffe.Net(str(prototxts / "faster_rcnn_ZF_test.prototxt"), caffe.TEST)


@pytest.mark.parametrize("kind", ["ZF", "VGG16"])
def test_detects(prototxts, kind):
    net = caffe.Net(str(prototxts / f"faster_rcnn_{kind}_test.prototxt"), caffe.TEST, allow_python=True)
    randomize(net)
    set_inputs(net)
    outputs = net.forward()
    regions = net.blobs["rois"].data
    count = len(regions)
    assert 1 < count <= 40
    assert net.blobs["pool5" if kind == "VGG16" else "roi_pool_conv5"].shape[0] == count
    assert outputs["cls_prob"].shape == (count, 21)
    assert outputs["bbox_pred"].shape == (count, 84)
    np.testing.assert_allclose(outputs["cls_prob"].sum(1), 1, rtol=1e-5)
    assert np.isfinite(outputs["bbox_pred"]).all()
    assert np.ptp(outputs["bbox_pred"]) > 0


def test_native_proposal_layer_gives_the_same(prototxts, write):
    text = (prototxts / "faster_rcnn_ZF_test.prototxt").read_text()
    native, changed = re.subn(r"layer \{\s*name: 'proposal'.*?\n\}", NATIVE, text, flags=re.DOTALL)
    assert changed == 1
    slow = caffe.Net(write(text, "python.prototxt"), caffe.TEST, allow_python=True)
    fast = caffe.Net(write(native, "native.prototxt"), caffe.TEST, keep_blobs=["rois"])
    randomize(slow)
    fast.share_with(slow)
    for height, width in ((160, 208), (128, 144)):
        for net in (slow, fast):
            set_inputs(net, height, width)
            net.forward()
        np.testing.assert_allclose(fast.blobs["rois"].data, slow.blobs["rois"].data, rtol=1e-4, atol=1e-3)
        np.testing.assert_allclose(fast.blobs["cls_prob"].data, slow.blobs["cls_prob"].data, rtol=1e-3, atol=1e-5)


def test_trains(prototxts, write):
    solver_text = (
        f'net: "{prototxts / "faster_rcnn_ZF_train.prototxt"}" base_lr: 0.0001 momentum: 0.5 lr_policy: "fixed"'
    )
    caffe.set_random_seed(5)
    solver = caffe.SGDSolver(write(solver_text, "solver.prototxt"), allow_python=True)
    randomize(solver.net)
    losses = []
    for _ in range(3):
        solver.step(1)
        names = ("rpn_cls_loss", "rpn_loss_bbox", "cls_loss", "bbox_loss")
        losses.append([float(solver.net.blobs[name].data) for name in names])
    assert np.isfinite(losses).all()
    assert (np.array(losses[0]) > 0).all()
    assert sum(losses[-1]) < 0.9 * sum(losses[0])
    assert solver.net.blobs["data"].shape == (1, 3, 128, 160)
    assert solver.net.params["rpn_conv/3x3"][0].diff.any()


def test_vgg16_trains_one_step(prototxts):
    net = caffe.Net(str(prototxts / "faster_rcnn_VGG16_train.prototxt"), caffe.TRAIN, allow_python=True)
    randomize(net)
    net.forward()
    net.backward()
    for name in ("conv3_1", "rpn_conv/3x3", "fc6", "cls_score", "bbox_pred"):
        gradient = net.params[name][0].diff
        assert np.isfinite(gradient).all()
        assert gradient.any()
    assert not net.params["conv1_1"][0].diff.any()  # lr_mult 0: nothing is computed for it
