"""Solvers: train a net from a solver prototxt, as Caffe does.

``definition.py`` reads the prototxt and finds the nets, ``rules.py`` has the update rules and learning rates,
``solver.py`` the loop, ``snapshot.py`` the files. A new solver type is one ``Rule`` in ``rules.py``.
"""

from __future__ import annotations

from amct.caffe.engine.blob import choose_device
from amct.caffe.engine.solvers.definition import read_solver
from amct.caffe.engine.solvers.rules import RULES
from amct.caffe.engine.solvers.solver import (
    Action,
    EngineSolver,
    Evaluation,
    MeanScores,
    Score,
    evaluate,
    scores,
    signal_actions,
)

__all__ = [
    "RULES",
    "Action",
    "EngineSolver",
    "Evaluation",
    "MeanScores",
    "Score",
    "choose_device",
    "evaluate",
    "read_solver",
    "scores",
    "signal_actions",
]
