"""``caffe.SGDSolver`` and the other solver classes, and ``caffe.get_solver``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from amct.caffe.engine.solvers.definition import read_solver
from amct.caffe.engine.solvers.rules import rule_of
from amct.caffe.engine.solvers.solver import EngineSolver
from amct.caffe.pycaffe.net import Net
from amct.errors import ArgumentTypeError

if TYPE_CHECKING:
    from amct.atomic import AnyPath
    from amct.caffe.engine.messages import ProtoMessage


class Solver(EngineSolver):
    """A solver with pycaffe's interface: created from a prototxt file, its nets are ``caffe.Net``.

    Each class uses its own rule, whatever the file's ``type``; ``get_solver`` uses the file's.

    Args:
        solver_file: The solver prototxt.
        allow_python: Allow Python layers in its nets (they execute code); Caffe always does.
    """

    solver_type: ClassVar[str] = "SGD"
    net: Net
    test_nets: list[Net]  # type: ignore[assignment]  # the engine's nets, made by pycaffe's class

    def __init__(self, solver_file: AnyPath, *, allow_python: bool = False) -> None:
        self._init_from(_read(solver_file), allow_python=allow_python)

    def _init_from(self, parameter: ProtoMessage, *, allow_python: bool) -> None:
        super().__init__(
            parameter, solver_type=self.solver_type, make_net=Net.from_parameter, allow_python=allow_python
        )

    def step(self, iterations: int) -> None:
        """Make ``iterations`` updates.

        Raises:
            ArgumentTypeError: The number is not an integer.
        """
        if isinstance(iterations, bool) or not hasattr(iterations, "__index__"):
            raise ArgumentTypeError(f"step takes a whole number of iterations, got {iterations!r}")
        super().step(int(iterations))


class SGDSolver(Solver):
    """Stochastic gradient descent with momentum."""

    solver_type = "SGD"


class NesterovSolver(Solver):
    """Momentum whose gradient is taken ahead, where the momentum leads."""

    solver_type = "Nesterov"


class AdaGradSolver(Solver):
    """The rate of each weight falls with the sum of its squared gradients."""

    solver_type = "AdaGrad"


class RMSPropSolver(Solver):
    """The rate of each weight follows a moving mean of its squared gradients."""

    solver_type = "RMSProp"


class AdaDeltaSolver(Solver):
    """Each update is as large as those before it, by moving means of squares; needs no rate."""

    solver_type = "AdaDelta"


class AdamSolver(Solver):
    """Moving means of each weight's gradient and of its square."""

    solver_type = "Adam"


_CLASSES = {
    solver_class.solver_type: solver_class
    for solver_class in (SGDSolver, NesterovSolver, AdaGradSolver, RMSPropSolver, AdaDeltaSolver, AdamSolver)
}


def get_solver(solver_file: AnyPath, *, allow_python: bool = False) -> Solver:
    """The solver of a prototxt, by its ``type`` (or the old ``solver_type``).

    Raises:
        ConfigError: The type is unknown.
    """
    parameter = _read(solver_file)
    solver_class = _CLASSES[rule_of(parameter.type).name]
    solver = solver_class.__new__(solver_class)
    solver._init_from(parameter, allow_python=allow_python)
    return solver


def _read(solver_file: AnyPath) -> ProtoMessage:
    if not isinstance(solver_file, (str, Path)):
        raise ArgumentTypeError(
            f"a solver is created from the path of a solver prototxt, got {type(solver_file).__name__}"
        )
    return read_solver(solver_file)
