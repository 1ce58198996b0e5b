"""pycaffe's interface: the module that scripts get from ``import caffe``.

Names, arguments and results are those of pycaffe. Where Caffe's C++ would abort the process, an ``AmctError`` is raised
with the same information. ``amct_caffe.caffe`` re-exports this package; after ``amct_caffe.install_as_caffe()`` it is
imported by ``import caffe``.
"""

from __future__ import annotations

from amct.caffe.engine.blob import Blob, set_device, set_mode_cpu, set_mode_gpu
from amct.caffe.engine.layer import layer_types as layer_type_list
from amct.caffe.engine.layers.python_layer import PythonLayer as Layer
from amct.caffe.engine.layers.python_layer import allow_python_layers
from amct.caffe.pycaffe import io, proto
from amct.caffe.pycaffe.classifier import Classifier
from amct.caffe.pycaffe.detector import Detector
from amct.caffe.pycaffe.net import Net
from amct.caffe.pycaffe.net_spec import NetSpec, layers, params, to_proto
from amct.caffe.pycaffe.runtime import (
    TEST,
    TRAIN,
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
    get_solver,
)

__version__ = "1.0.0"

__all__ = [
    "TEST",
    "TRAIN",
    "AdaDeltaSolver",
    "AdaGradSolver",
    "AdamSolver",
    "Blob",
    "Classifier",
    "Detector",
    "Layer",
    "NesterovSolver",
    "Net",
    "NetSpec",
    "RMSPropSolver",
    "SGDSolver",
    "Timer",
    "__version__",
    "allow_python_layers",
    "get_solver",
    "has_nccl",
    "init_log",
    "io",
    "layer_type_list",
    "layers",
    "log",
    "params",
    "proto",
    "set_device",
    "set_mode_cpu",
    "set_mode_gpu",
    "set_multiprocess",
    "set_random_seed",
    "set_solver_count",
    "set_solver_rank",
    "solver_count",
    "solver_rank",
    "to_proto",
]
