"""Nets written in Python; expected texts are those a real pycaffe prints."""

from __future__ import annotations

import numpy as np
import pytest

from amct.caffe import pycaffe as caffe
from amct.caffe.pycaffe import layers as L  # noqa: N812 - how every script imports it
from amct.caffe.pycaffe import params as P  # noqa: N812 - how every script imports it

WANTED = """layer {
  name: "data"
  type: "DummyData"
  top: "data"
  top: "label"
  dummy_data_param {
    shape {
      dim: 2
      dim: 3
      dim: 8
      dim: 8
    }
    shape {
      dim: 2
    }
  }
}
layer {
  name: "conv"
  type: "Convolution"
  bottom: "data"
  top: "conv"
  convolution_param {
    num_output: 4
    kernel_size: 3
    weight_filler {
      type: "xavier"
    }
  }
}
layer {
  name: "relu"
  type: "ReLU"
  bottom: "conv"
  top: "conv"
}
layer {
  name: "pool"
  type: "Pooling"
  bottom: "conv"
  top: "pool"
  pooling_param {
    pool: MAX
    kernel_size: 2
    stride: 2
  }
}
layer {
  name: "fc"
  type: "InnerProduct"
  bottom: "pool"
  top: "fc"
  inner_product_param {
    num_output: 3
  }
}
layer {
  name: "loss"
  type: "SoftmaxWithLoss"
  bottom: "fc"
  bottom: "label"
  top: "loss"
}
"""


@pytest.fixture
def spec():
    n = caffe.NetSpec()
    n.data, n.label = L.DummyData(shape=[{"dim": [2, 3, 8, 8]}, {"dim": [2]}], ntop=2)
    n.conv = L.Convolution(n.data, num_output=4, kernel_size=3, weight_filler={"type": "xavier"})
    n.relu = L.ReLU(n.conv, in_place=True)
    n.pool = L.Pooling(n.relu, pool=P.Pooling.MAX, kernel_size=2, stride=2)
    n.fc = L.InnerProduct(n.pool, num_output=3)
    n.loss = L.SoftmaxWithLoss(n.fc, n.label)
    return n


def test_text(spec):
    assert str(spec.to_proto()) == WANTED


def test_it_runs(spec, write):
    net = caffe.Net(write(str(spec.to_proto())), caffe.TEST)
    assert net.forward()["loss"] == pytest.approx(np.log(3), rel=1e-5)


def test_made_up_names(spec):
    proto = caffe.to_proto(spec.fc)
    assert [layer.name for layer in proto.layer] == ["DummyData1", "Convolution1", "ReLU1", "Pooling1", "InnerProduct1"]
    assert spec.fc.to_proto() == proto


def test_fields_of_the_layer_itself_and_of_other_messages():
    n = caffe.NetSpec()
    n.data = L.Input(input_param={"shape": {"dim": [1, 2]}})
    n.ip = L.InnerProduct(n.data, num_output=2, param=[{"lr_mult": 1}, {"lr_mult": 2}], name="other", loss_weight=2.0)
    n["quiet"] = L.Silence(n.ip, ntop=0, include={"phase": caffe.TEST})
    layers = n.to_proto().layer
    assert layers[1].name == "other"
    assert [spec.lr_mult for spec in layers[1].param] == [1, 2]
    assert list(layers[1].loss_weight) == [2.0]
    assert layers[2].include[0].phase == caffe.TEST
    assert list(layers[2].top) == []
    assert n.keys() == ["data", "ip", "quiet"]
    del n["quiet"]
    assert len(n.to_proto().layer) == 2


def test_mistakes(spec):
    with pytest.raises(AttributeError, match=r"kernel_siz.*Did you mean"):
        caffe.to_proto(L.Convolution(spec.data, convolution_param={"kernel_siz": 4}))
    with pytest.raises(AttributeError, match="nout"):
        caffe.to_proto(L.Convolution(spec.data, nout=4))
    with pytest.raises(TypeError, match="is not a Top"):
        L.ReLU("conv")
    with pytest.raises(AttributeError, match="no top 'con'"):
        _ = spec.con


def test_enum_values():
    assert (P.Pooling.MAX, P.Pooling.AVE, P.Eltwise.SUM, P.LRN.WITHIN_CHANNEL, P.Data.LMDB) == (0, 1, 1, 1, 1)
