"""The names scripts import: amct_caffe.caffe, hotwheels.amct_caffe, and ``import caffe`` after install_as_caffe."""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys

import pytest
import torch

import amct_caffe
from amct.caffe import pycaffe
from amct.caffe.engine.blob import current_device
from amct.errors import ArgumentError

MEMBERS = """
AdaDeltaSolver AdaGradSolver AdamSolver Blob Classifier Detector NesterovSolver Net NetSpec RMSPropSolver SGDSolver TEST
TRAIN get_solver has_nccl init_log io layer_type_list layers log params proto set_device set_mode_cpu set_mode_gpu
set_random_seed solver_count solver_rank to_proto Timer set_multiprocess set_solver_count set_solver_rank Layer
"""


def test_the_module_has_pycaffes_members():
    assert [name for name in MEMBERS.split() if not hasattr(pycaffe, name)] == []
    assert pycaffe.__version__ == "1.0.0"
    assert (pycaffe.TRAIN, pycaffe.TEST) == (0, 1)
    assert (pycaffe.has_nccl(), pycaffe.solver_count(), pycaffe.solver_rank()) == (False, 1, 0)


CAFFES_TYPES = """
AbsVal Accuracy ArgMax BNLL BatchNorm BatchReindex Bias Clip Concat ContrastiveLoss Convolution Crop Data Deconvolution
Dropout DummyData ELU Eltwise Embed EuclideanLoss Exp Filter Flatten HDF5Data HDF5Output HingeLoss Im2col InfogainLoss
InnerProduct Input LRN LSTM LSTMUnit Log MVN MemoryData MultinomialLogisticLoss PReLU Parameter Pooling Power Python RNN
ReLU Reduction Reshape SPP Scale Sigmoid SigmoidCrossEntropyLoss Silence Slice Softmax SoftmaxWithLoss Split Swish TanH
Threshold Tile
"""


def test_one_solver_in_one_process():
    pycaffe.set_solver_count(1)
    pycaffe.set_solver_rank(0)
    pycaffe.set_multiprocess(False)
    with pytest.raises(ArgumentError, match="several solvers"):
        pycaffe.set_solver_count(2)
    with pytest.raises(ArgumentError, match="rank 0, got 1"):
        pycaffe.set_solver_rank(1)
    with pytest.raises(ArgumentError, match="several processes"):
        pycaffe.set_multiprocess(True)


def test_timer():
    timer = pycaffe.Timer()
    assert timer.ms == 0
    timer.start()
    timer.stop()
    first = timer.ms
    assert first > 0
    timer.stop()
    assert timer.ms == first


def test_every_layer_type_of_caffe_is_known():
    assert set(CAFFES_TYPES.split()) - set(pycaffe.layer_type_list()) == set()


def test_compatible_names():
    caffe = importlib.import_module("amct_caffe.caffe")
    assert caffe.Net is pycaffe.Net
    assert (
        importlib.import_module("amct_caffe.caffe.proto.caffe_pb2").NetParameter is pycaffe.proto.caffe_pb2.NetParameter
    )
    hotwheels = importlib.import_module("hotwheels.amct_caffe")
    assert hotwheels.install_as_caffe is amct_caffe.install_as_caffe
    assert importlib.import_module("hotwheels").__file__ is None
    assert importlib.import_module("hotwheels.amct_caffe.caffe").Net is pycaffe.Net


def test_caffe_pb2_serves_messages_and_enum_values():
    from amct.caffe.pycaffe.proto import caffe_pb2

    assert (caffe_pb2.TRAIN, caffe_pb2.TEST) == (0, 1)
    assert caffe_pb2.V1LayerParameter.CONVOLUTION == 4
    assert "NetParameter" in dir(caffe_pb2)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = caffe_pb2.Nothing


SCRIPT = """
import amct_caffe
amct_caffe.install_as_caffe()
import caffe
import caffe.io
from caffe.proto import caffe_pb2
from caffe import layers as L, params as P
import amct.caffe.pycaffe as ours
assert caffe is ours and caffe.io is ours.io and caffe_pb2 is ours.proto.caffe_pb2
amct_caffe.install_as_caffe()
"""


def run(script, folder):
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=folder, check=False)


def test_import_caffe_after_installing(tmp_path):
    done = run(SCRIPT, tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_real_caffe_is_not_hidden_by_accident(tmp_path):
    (tmp_path / "caffe").mkdir()
    (tmp_path / "caffe" / "__init__.py").write_text("real = True")
    done = run(f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{SCRIPT}", tmp_path)
    assert "ArgumentError" in done.stderr
    assert "install_as_caffe(force=True)" in done.stderr
    forced = "import caffe\nassert caffe.real\n" + SCRIPT.replace("install_as_caffe()", "install_as_caffe(force=True)")
    done = run(f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{forced}", tmp_path)
    assert done.returncode == 0, done.stderr


def test_gpu_mode_says_so_when_there_is_none(caplog):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with caplog.at_level(logging.WARNING):
        pycaffe.set_mode_gpu()
    assert "no usable CUDA device" in caplog.text
    assert current_device() == torch.device("cpu")
    pycaffe.set_mode_cpu()
    with pytest.raises(ArgumentError, match="got index -1"):
        pycaffe.set_device(-1)


def test_names_of_pycaffes_modules():
    """``caffe.io.caffe_pb2`` and the compiled module, which scripts import directly."""
    caffe = importlib.import_module("amct_caffe.caffe")
    compiled = importlib.import_module("amct_caffe.caffe._caffe")
    assert caffe.io.caffe_pb2 is pycaffe.proto.caffe_pb2
    assert compiled.Net is pycaffe.Net
    assert issubclass(compiled.SGDSolver, compiled.Solver)
    names = """Blob Layer LayerParameter SolverParameter Timer get_solver has_nccl init_log layer_type_list log
        set_device
        set_mode_cpu set_mode_gpu set_multiprocess set_random_seed solver_count solver_rank __version__"""
    assert [name for name in names.split() if not hasattr(compiled, name)] == []
