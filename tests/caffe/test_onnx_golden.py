"""The ONNX form of every recorded layer and net: onnxruntime and the engine compute the same."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from caffe_cases import LAYER_CASES, NET_CASES
from onnx_running import case_net, compare, feed, has_open_batch, is_test_phase, run

from amct.caffe.onnx.graph import float_onnx
from amct.errors import ExportError

CASES = [case for case in LAYER_CASES + NET_CASES if is_test_phase(case)]
ONLY_FOR_TRAINING = (
    "accuracy", "contrastive", "euclidean", "hinge", "multinomial", "sigmoidce", "silence", "softmaxloss",
)  # fmt: skip
"""Cases of which nothing is left: the file ends before their only layer."""
EMPTY = [case for case in CASES if case.name.startswith(ONLY_FOR_TRAINING)]
EXPORTED = [case for case in CASES if case not in EMPTY]


def test_every_case_is_compared():
    assert (len(EXPORTED), len(EMPTY)) == (176, 22)


@pytest.mark.parametrize("case", EXPORTED, ids=str)
def test_onnxruntime_computes_what_the_engine_computes(case):
    net, feeds = case_net(case)
    exported = float_onnx(net)
    onnx.checker.check_model(exported.model, full_check=True)
    net.forward()
    compare(net, exported, run(exported.model, feeds))


@pytest.mark.parametrize("case", EMPTY, ids=str)
def test_nothing_is_left_of_a_loss(case):
    with pytest.raises(ExportError, match="no outputs that ONNX can compute"):
        float_onnx(case_net(case)[0])


@pytest.mark.parametrize("opset", [16, 17, 19, 20, 21])
def test_other_opsets(opset):
    """One case of each layer type whose operators changed, and the nets."""
    wanted = (
        "reduction",
        "mvn",
        "batchnorm_test_batchstats",
        "slice_axis_neg1",
        "argmax_maxval",
        "lstm",
        "pool_ave_k3s2",
    )
    checked = 0
    for case in EXPORTED:
        if not case.name.startswith(wanted) and case not in NET_CASES:
            continue
        net, feeds = case_net(case)
        exported = float_onnx(net, opset=opset)
        assert exported.model.opset_import[0].version == opset
        net.forward()
        compare(net, exported, run(exported.model, feeds))
        checked += 1
    assert checked == 23


def test_an_open_batch_size_can_be_used():
    """Files whose batch size is open, fed with one sample more."""
    checked = 0
    for case in EXPORTED:
        net, feeds = case_net(case)
        exported = float_onnx(net)
        if not feeds or not has_open_batch(exported.model):
            continue
        more = {name: np.concatenate([value, value[:1]]) for name, value in feeds.items()}
        fresh, _ = case_net(case)
        feed(fresh, more)
        fresh.forward()
        compare(fresh, exported, run(exported.model, more))
        checked += 1
    assert checked == 162
