"""The names that scripts take from pycaffe's compiled module, ``caffe._caffe``."""

from __future__ import annotations

from amct.caffe.engine.blob import Blob, set_device, set_mode_cpu, set_mode_gpu
from amct.caffe.engine.layer import layer_types as layer_type_list
from amct.caffe.engine.layers.python_layer import PythonLayer as Layer
from amct.caffe.pycaffe.net import Net
from amct.caffe.pycaffe.proto.caffe_pb2 import LayerParameter, SolverParameter
from amct.caffe.pycaffe.runtime import (
    Timer,
    has_nccl,
    init_log,
    log,
    set_multiprocess,
    set_random_seed,
    set_solver_count,
    set_solver_rank,
    solver_count,
    solver_rank,
)
from amct.caffe.pycaffe.solver import (
    AdaDeltaSolver,
    AdaGradSolver,
    AdamSolver,
    NesterovSolver,
    RMSPropSolver,
    SGDSolver,
    Solver,
    get_solver,
)

__version__ = "1.0.0"

__all__ = [
    "AdaDeltaSolver",
    "AdaGradSolver",
    "AdamSolver",
    "Blob",
    "Layer",
    "LayerParameter",
    "NesterovSolver",
    "Net",
    "RMSPropSolver",
    "SGDSolver",
    "Solver",
    "SolverParameter",
    "Timer",
    "get_solver",
    "has_nccl",
    "init_log",
    "layer_type_list",
    "log",
    "set_device",
    "set_mode_cpu",
    "set_mode_gpu",
    "set_multiprocess",
    "set_random_seed",
    "set_solver_count",
    "set_solver_rank",
    "solver_count",
    "solver_rank",
]
