"""Solvers: train a net from a solver prototxt, as Caffe does.

``definition.py`` reads the prototxt and finds the nets, ``learning_rate.py`` has the policies, ``rules.py`` the update
rules, ``solver.py`` the loop, ``outputs.py`` the log lines of outputs, ``snapshot.py`` the files, ``interrupts.py``
Ctrl-C. A new solver type is one ``Rule`` in ``rules.py``.
"""

from __future__ import annotations

from amct.caffe.engine.solvers.definition import read_solver
from amct.caffe.engine.solvers.evaluation import Evaluation, evaluate
from amct.caffe.engine.solvers.interrupts import Action, signal_actions
from amct.caffe.engine.solvers.mode import choose_device
from amct.caffe.engine.solvers.outputs import MeanScores, Score, scores
from amct.caffe.engine.solvers.rules import RULES
from amct.caffe.engine.solvers.solver import Solver

__all__ = [
    "RULES",
    "Action",
    "Evaluation",
    "MeanScores",
    "Score",
    "Solver",
    "choose_device",
    "evaluate",
    "read_solver",
    "scores",
    "signal_actions",
]
