"""Python layers: refused unless allowed, then pycaffe's protocol."""

from __future__ import annotations

import sys
import textwrap

import numpy as np
import pytest

from amct.caffe import pycaffe as caffe
from amct.caffe.pycaffe.runtime import install_as_caffe
from amct.errors import ModelError

pytestmark = pytest.mark.usefixtures("layers")

NET = """
force_backward: true
layer {{ name: "in" type: "Input" top: "x" input_param {{ shape {{ dim: 2 dim: 3 }} }} }}
layer {{ name: "own" type: "Python" bottom: "x" top: "y" {extra}
  python_param {{ module: "{module}" layer: "{layer}" param_str: "{text}" }} }}
"""

MODULE = """
    import caffe

    CALLS = []

    class Times(caffe.Layer):
        def setup(self, bottom, top):
            CALLS.append("setup")
            self.factor = float(self.param_str)
            assert self.param_str_ == self.param_str

        def reshape(self, bottom, top):
            CALLS.append("reshape")
            top[0].reshape(*bottom[0].shape)

        def forward(self, bottom, top):
            CALLS.append("forward")
            top[0].data[...] = self.factor * bottom[0].data

        def backward(self, top, propagate_down, bottom):
            assert propagate_down == [True]
            bottom[0].diff[...] = self.factor * top[0].diff

    class Learned(caffe.Layer):
        def setup(self, bottom, top):
            self.blobs.add_blob(1, bottom[0].channels)
            self.blobs[0].data[...] = 3

        def reshape(self, bottom, top):
            top[0].reshape(*bottom[0].data.shape)

        def forward(self, bottom, top):
            top[0].data[...] = bottom[0].data * self.blobs[0].data

        def backward(self, top, propagate_down, bottom):
            self.blobs[0].diff[...] += (top[0].diff * bottom[0].data).sum(0)
            if propagate_down[0]:
                bottom[0].diff[...] = top[0].diff * self.blobs[0].data

    class Phase(caffe.Layer):
        def setup(self, bottom, top):
            top[0].reshape(1)

        def forward(self, bottom, top):
            top[0].data[()] = self.phase

    class Growing(caffe.Layer):
        '''As data layers do: the shape is decided in forward.'''
        count = 0

        def setup(self, bottom, top):
            top[0].reshape(1, 3)

        def forward(self, bottom, top):
            self.count += 1
            top[0].reshape(self.count, 3)
            top[0].data[...] = self.count

    class Loss(caffe.Layer):
        def reshape(self, bottom, top):
            top[0].reshape(1)

        def forward(self, bottom, top):
            top[0].data[...] = (bottom[0].data ** 2).sum() / 2

        def backward(self, top, propagate_down, bottom):
            bottom[0].diff[...] = bottom[0].data * top[0].diff[0]

    class FailsInSetup(caffe.Layer):
        def setup(self, bottom, top):
            raise KeyError("feat_stride")

    class FailsInForward(Times):
        def forward(self, bottom, top):
            raise ZeroDivisionError("no pictures")

    class NoForward(caffe.Layer):
        def reshape(self, bottom, top):
            top[0].reshape(1)

    class NoBackward(NoForward):
        def forward(self, bottom, top):
            pass

    def function(parameter):
        return Times(parameter)
"""


@pytest.fixture
def layers(tmp_path, monkeypatch):
    """A module of Python layers, as a user has it beside the prototxt."""
    had = {name: module for name, module in sys.modules.items() if name == "caffe" or name.startswith("caffe.")}
    install_as_caffe(force=True)
    (tmp_path / "own_layers.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name in ("caffe", "own_layers") or name.startswith("caffe.")]:
        del sys.modules[name]
    sys.modules.update(had)


def prototxt(write, layer="Times", module="own_layers", text="2.5", extra=""):
    return write(NET.format(module=module, layer=layer, text=text, extra=extra))


def test_refused_by_default_without_importing_anything(write):
    told = r'layer "own" \(Python\).*class \'Times\' of module \'own_layers\'.*allow_python=True'
    with pytest.raises(ModelError, match=told):
        caffe.Net(prototxt(write), caffe.TEST)
    assert "own_layers" not in sys.modules


def test_protocol(write):
    net = caffe.Net(prototxt(write), caffe.TEST, allow_python=True)
    calls = sys.modules["own_layers"].CALLS
    assert calls == ["setup", "reshape"]
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(net.forward(x=x)["y"], 2.5 * x)
    np.testing.assert_array_equal(net.forward(x=2 * x)["y"], 5 * x)
    assert calls == ["setup", "reshape", "reshape", "forward", "reshape", "forward"]
    np.testing.assert_array_equal(net.backward(y=x)["x"], 2.5 * x)
    net.blobs["x"].reshape(4, 3)
    net.blobs["x"].data[...] = 1
    assert net.forward()["y"].shape == (4, 3)


def test_allowed_by_context(write):
    path = prototxt(write)
    with caffe.allow_python_layers():
        net = caffe.Net(path, caffe.TEST)
    assert net.forward(x=np.ones((2, 3)))["y"].max() == 2.5
    with pytest.raises(ModelError, match="not allowed by default"):
        caffe.Net(path, caffe.TEST)


def test_own_parameters_are_learned_and_saved(write, tmp_path):
    net = caffe.Net(prototxt(write, "Learned"), caffe.TEST, allow_python=True)
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(net.forward(x=x)["y"], 3 * x)
    net.backward(y=np.ones((2, 3), np.float32))
    np.testing.assert_array_equal(net.params["own"][0].diff, x.sum(0, keepdims=True))
    net.params["own"][0].data[...] = 5
    net.save(str(tmp_path / "own.caffemodel"))
    other = caffe.Net(
        prototxt(write, "Learned"), caffe.TEST, weights=str(tmp_path / "own.caffemodel"), allow_python=True
    )
    np.testing.assert_array_equal(other.forward(x=x)["y"], 5 * x)


@pytest.mark.parametrize("phase", [caffe.TRAIN, caffe.TEST])
def test_phase(write, phase):
    net = caffe.Net(prototxt(write, "Phase"), phase, allow_python=True)
    assert net.forward(x=np.zeros((2, 3)))["y"] == [phase]


@pytest.mark.parametrize("keep_blobs", [True, False])
def test_shape_from_forward(write, keep_blobs):
    net = caffe.Net(
        write(
            NET.format(module="own_layers", layer="Growing", text="", extra="")
            + 'layer { name: "after" type: "Power" bottom: "y" top: "z" power_param { scale: 2 } }'
        ),
        caffe.TEST,
        allow_python=True,
        keep_blobs=keep_blobs,
    )
    for count in (1, 2, 3):
        np.testing.assert_array_equal(net.forward(x=np.zeros((2, 3)))["z"], np.full((count, 3), 2.0 * count))


def test_loss_weight(write):
    net = caffe.Net(prototxt(write, "Loss", extra="loss_weight: 3"), caffe.TRAIN, allow_python=True)
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    net.blobs["x"].data[...] = x
    assert net._forward(0, len(net.layers) - 1) == pytest.approx(3 * (x**2).sum() / 2)
    net.backward()
    np.testing.assert_array_equal(net.blobs["x"].diff, 3 * x)


def test_trained_by_a_solver(write):
    net = write(
        """
        layer { name: "data" type: "DummyData" top: "x" dummy_data_param { shape { dim: 1 dim: 2 }
          data_filler { type: "constant" value: 1 } } }
        layer { name: "ip" type: "InnerProduct" bottom: "x" top: "ip" inner_product_param { num_output: 1
          weight_filler { type: "constant" value: 1 } } }
        layer { name: "loss" type: "Python" bottom: "ip" top: "loss" loss_weight: 1
          python_param { module: "own_layers" layer: "Loss" } }
        """
    )
    solver_text = f'net: "{net}" base_lr: 0.1 lr_policy: "fixed" max_iter: 5'
    with caffe.allow_python_layers():
        solver = caffe.SGDSolver(write(solver_text, "solver.prototxt"))
    solver.step(1)
    # ip = w1 + w2 + b = 2, its gradient 2 for each of the three: 2 - 0.1 * 2 * 3
    solver.net.forward()
    assert float(solver.net.blobs["ip"].data.item()) == pytest.approx(1.4)


@pytest.mark.parametrize(
    ("layer", "module", "message"),
    [
        ("Times", "nowhere_at_all", "cannot import module 'nowhere_at_all'.*sys.path"),
        ("Time", "own_layers", "no class 'Time'.*Did you mean \"Times\""),
        ("function", "own_layers", "must be a class derived from caffe.Layer.*install_as_caffe"),
        ("FailsInSetup", "own_layers", "own_layers.FailsInSetup.setup raised KeyError: 'feat_stride'"),
    ],
)
def test_mistakes_while_building(write, layer, module, message):
    with pytest.raises(ModelError, match=message):
        caffe.Net(prototxt(write, layer, module), caffe.TEST, allow_python=True)


def test_module_that_wants_caffe(write, monkeypatch):
    monkeypatch.setitem(sys.modules, "caffe", None)
    with pytest.raises(ModelError, match=r"imports the module caffe: call amct_caffe.install_as_caffe"):
        caffe.Net(prototxt(write), caffe.TEST, allow_python=True)


def test_module_that_fails(write, tmp_path):
    (tmp_path / "broken_layers.py").write_text("1 / 0")
    with pytest.raises(ModelError, match="importing module 'broken_layers' raised ZeroDivisionError: division by zero"):
        caffe.Net(prototxt(write, module="broken_layers"), caffe.TEST, allow_python=True)


def test_mistakes_while_running(write, caplog):
    net = caffe.Net(prototxt(write, "FailsInForward"), caffe.TEST, allow_python=True)
    with pytest.raises(ZeroDivisionError, match="no pictures"):
        net.forward()
    assert 'layer "own" (Python): own_layers.FailsInForward.forward failed' in caplog.text
    net = caffe.Net(prototxt(write, "NoForward"), caffe.TEST, allow_python=True)
    with pytest.raises(NotImplementedError, match="NoForward defines no forward"):
        net.forward()
    net = caffe.Net(prototxt(write, "NoBackward"), caffe.TEST, allow_python=True)
    net.forward()
    with pytest.raises(NotImplementedError, match="NoBackward defines no backward"):
        net.backward()
