"""The names that scripts take from pycaffe's compiled module, ``caffe._caffe``."""

from __future__ import annotations

from amct.caffe.pycaffe import *  # noqa: F403 - the package has them, too
from amct.caffe.pycaffe import __version__ as __version__
from amct.caffe.pycaffe.proto.caffe_pb2 import LayerParameter as LayerParameter
from amct.caffe.pycaffe.proto.caffe_pb2 import SolverParameter as SolverParameter
from amct.caffe.pycaffe.solver import Solver as Solver
