"""The training loop, in Caffe's order, with Caffe's log lines.

One iteration: clear the gradients; test if due; forward and backward ``iter_size`` times; learning rate; clip; divide
by ``iter_size``; weight decay; the rule of the solver type (``rules.py``); subtract; count; snapshot if due. After a
step a parameter's ``diff`` holds the value that was subtracted, not the gradient.
"""

from __future__ import annotations

import logging
import math
import signal
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
import torch

from amct.caffe.engine.net import Net
from amct.caffe.engine.solvers import snapshot as snapshots
from amct.caffe.engine.solvers.definition import test_definitions, train_definition, upgrade_type
from amct.caffe.engine.solvers.rules import float32, learning_rate, rule_of
from amct.caffe.engine.wire import StoredBlob, StoredState
from amct.errors import ArgumentError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import FrameType

    from amct.atomic import AnyPath
    from amct.caffe.engine.messages import ProtoMessage
    from amct.caffe.engine.solvers.definition import NetDefinition


logger = logging.getLogger(__name__)


class Action(Enum):
    """A request to a running solver."""

    NONE = "none"
    STOP = "stop"
    SNAPSHOT = "snapshot"


@contextmanager
def signal_actions(effects: Mapping[signal.Signals, Action]) -> Iterator[Callable[[], Action]]:
    """Convert signals to requests inside the block; yields the function for ``EngineSolver.action_source``.

    A second stop signal is not caught and ends the program at once.
    """
    pending: list[Action] = []
    previous: dict[signal.Signals, object] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        kind = signal.Signals(number)
        action = effects[kind]
        pending.append(action)
        if action is Action.STOP:
            signal.signal(kind, previous[kind])  # type: ignore[arg-type]  # what signal.signal returned
            logger.info("%s: stopping after this iteration; send it again to stop at once", kind.name)

    def next_action() -> Action:
        return pending.pop(0) if pending else Action.NONE

    try:
        for kind, action in effects.items():
            if action is not Action.NONE:
                previous[kind] = signal.signal(kind, handle)
        yield next_action
    finally:
        for kind, handler in previous.items():
            signal.signal(kind, handler)  # type: ignore[arg-type]  # what signal.signal returned


@dataclass(frozen=True)
class Score:
    """One value of one output blob."""

    name: str
    value: float
    loss_weight: float

    def __str__(self) -> str:
        """The form that Caffe prints: ``loss = 0.5 (* 2 = 1 loss)``."""
        loss = f" (* {self.loss_weight:g} = {self.loss_weight * self.value:g} loss)" if self.loss_weight else ""
        return f"{self.name} = {self.value:g}{loss}"


def scores(net: Net) -> list[Score]:
    """All values of all outputs, in order."""
    graph = net.graph
    return [
        Score(graph.blob_names[index], value, graph.loss_weights[index])
        for index in graph.outputs
        for value in graph.blobs[index].tensor.reshape(-1).tolist()
    ]


def added(totals: list[Score], net: Net) -> list[Score]:
    """The sums of scores with those of one more pass; surplus values (of a batch of another size) are ignored."""
    pairs = zip(totals, scores(net), strict=False)
    sums = [replace(total, value=float(np.float32(total.value) + np.float32(new.value))) for total, new in pairs]
    return sums if totals else scores(net)


def divided(totals: list[Score], passes: int) -> list[Score]:
    """The mean of each value."""
    return [replace(total, value=total.value / passes) for total in totals]


@dataclass(frozen=True)
class Evaluation:
    """The mean loss and the mean of each output."""

    loss: float
    scores: Sequence[Score]

    def lines(self) -> list[str]:
        """The lines that Caffe prints."""
        return [f"Loss: {self.loss:g}", *(str(score) for score in self.scores)]


def evaluate(net: Net, iterations: int) -> Evaluation:
    """Run a net ``iterations`` times and log each batch.

    Raises:
        ArgumentError: The number of iterations is not positive.
    """
    if iterations < 1:
        raise ArgumentError(f"iterations must be at least 1, got {iterations}")
    logger.info("Running for %d iterations.", iterations)
    totals: list[Score] = []
    loss = 0.0
    for batch in range(iterations):
        loss += Net.forward(net)
        for score in scores(net):
            logger.info("Batch %d, %s = %g", batch, score.name, score.value)
        totals = added(totals, net)
    return Evaluation(loss / iterations, divided(totals, iterations))


class EngineSolver:
    """Trains a net by a SolverParameter.

    Args:
        parameter: The solver; later changes take effect (``solver.param.base_lr = 0.01``).
        solver_type: The rule; None uses ``parameter.type``.
        make_net: Creates a net from a NetParameter; by default the engine's Net.
        allow_python: Allow Python layers.

    Raises:
        ConfigError: The solver's settings are invalid.
        FileError, ParseError, ModelError: A net or its weights cannot be read or built.
    """

    def __init__(
        self,
        parameter: ProtoMessage,
        *,
        solver_type: str | None = None,
        make_net: Callable[..., Net] = Net,
        allow_python: bool = False,
    ) -> None:
        upgrade_type(parameter, "solver")
        self.param = parameter
        self.rule = rule_of(solver_type or parameter.type)
        self.rule.check(parameter)
        if parameter.average_loss < 1:
            raise ConfigError(f"average_loss should be at least 1, got {parameter.average_loss}")
        if parameter.iter_size < 1:
            raise ConfigError(f"iter_size should be at least 1, got {parameter.iter_size}")
        snapshots.check_snapshots(parameter)
        if parameter.random_seed >= 0:
            torch.manual_seed(parameter.random_seed)
        self._make_net = make_net
        self._allow_python = allow_python
        self.net: Net = self._build(train_definition(parameter), "Creating training net from %s", trains=True)
        for layer in self.net.layers:
            layer.check_solver(parameter)
        self.test_nets: list[Net] = [
            self._build(definition, f"Creating test net (#{index}) specified by %s", trains=False)
            for index, definition in enumerate(test_definitions(parameter))
        ]
        self._iteration = 0
        self._current_step = 0
        self._stopped = False
        self._losses: deque[float] = deque(maxlen=parameter.average_loss)
        self._displayed = (time.monotonic(), 0)
        self._callbacks: list[tuple[Callable[[], object], Callable[[], object]]] = []
        self._history = [torch.zeros(shape) for shape in self._history_shapes()]
        self.action_source: Callable[[], Action] = lambda: Action.NONE
        """Called after every iteration and every test batch; returns a request to stop or to write a snapshot."""
        logger.info("Solver scaffolding done.")

    # ------------------------------------------------------------------ state

    @property
    def iter(self) -> int:
        """The number of updates made."""
        return self._iteration

    @property
    def lr(self) -> float:
        """The learning rate of the next update; as in Caffe, reading it may advance ``multistep``.

        Raises:
            ConfigError: The policy is unknown, or its numbers are out of range.
        """
        rate, self._current_step = learning_rate(self.param, self._iteration, self._current_step)
        return rate

    @property
    def last_loss(self) -> float:
        """The loss of the last iteration; NaN before the first one."""
        return self._losses[-1] if self._losses else math.nan

    @property
    def stopped_early(self) -> bool:
        """Whether the last ``step`` or ``solve`` ended on a stop request."""
        return self._stopped

    @property
    def history(self) -> list[torch.Tensor]:
        """The history tensors of the rule: one per parameter, then (AdaDelta, Adam) a second one per parameter."""
        return self._history

    # ------------------------------------------------------------------ training

    def solve(self, resume_file: AnyPath | None = None) -> None:
        """Train up to ``max_iter``, write a snapshot, and test once more.

        Args:
            resume_file: A solver state to resume from.
        """
        logger.info("Solving %s", self.net.name)
        logger.info("Learning Rate Policy: %s", self.param.lr_policy)
        if resume_file is not None:
            logger.info("Restoring previous solver status from %s", resume_file)
            self.restore(resume_file)
        self.step(self.param.max_iter - self._iteration)
        if self.param.snapshot_after_train and not self._is_due(self.param.snapshot):
            self.snapshot()
        if self._stopped:
            logger.info("Optimization stopped early.")
            return
        if self._is_due(self.param.display):
            self._losses.append(Net.forward(self.net))
            logger.info("Iteration %d, loss = %g", self._iteration, self._mean_loss())
        if self._is_due(self.param.test_interval):
            self.test_all()
        logger.info("Optimization Done.")

    def step(self, iterations: int) -> None:
        """Make ``iterations`` updates, regardless of ``max_iter``; none if the number is not positive."""
        end = self._iteration + iterations
        self._stopped = False
        self._losses.clear()
        self._displayed = (time.monotonic(), self._iteration)
        while self._iteration < end:
            self.net.clear_parameter_gradients()
            if self._is_due(self.param.test_interval) and (self._iteration > 0 or self.param.test_initialization):
                self.test_all()
                if self._stopped:
                    break
            self._iterate()
            request = self.action_source()
            if self._is_due(self.param.snapshot) or request is Action.SNAPSHOT:
                self.snapshot()
            if request is Action.STOP:
                self._stopped = True
                break

    def apply_update(self) -> None:
        """Compute the update from the gradients in the parameters' ``diff``, and apply it."""
        rate = self.lr
        if self._is_due(self.param.display):
            logger.info("Iteration %d, lr = %g", self._iteration, rate)
        parameters = self.net.learnable
        scale = self._clip_factor() / self.param.iter_size
        decay_rate, is_l1 = self._weight_decay()
        blocks = self.rule.histories
        for index, parameter in enumerate(parameters):
            blob = parameter.blob
            gradient, values = blob.gradient, blob.tensor
            if scale != 1.0:
                gradient = gradient * scale
            decay = float32(decay_rate * parameter.decay)
            if decay:
                gradient = gradient.add(values.sign() if is_l1 else values, alpha=decay)
            indices = [index + block * len(parameters) for block in range(blocks)]
            for slot in indices:
                self._history[slot] = self._history[slot].to(gradient.device)
            histories = [self._history[slot] for slot in indices]
            update = self.rule.update(gradient, histories, float32(rate * parameter.rate), self.param, self._iteration)
            blob.set_tensor(values - update)
            blob.set_gradient(update)
        self._iteration += 1

    def _iterate(self) -> None:
        for on_start, _ in self._callbacks:
            on_start()
        total = 0.0
        for _ in range(self.param.iter_size):
            total += Net.forward(self.net)  # the engine's: pycaffe's has other arguments
            Net.backward(self.net)
        self._losses.append(total / self.param.iter_size)
        if self._is_due(self.param.display):
            self._display()
        for _, on_gradients_ready in self._callbacks:
            on_gradients_ready()
        self.apply_update()

    def _clip_factor(self) -> float:
        limit = self.param.clip_gradients
        if limit < 0:
            return 1.0
        squares = sum(float(parameter.blob.gradient.square().sum()) for parameter in self.net.learnable)
        norm = math.sqrt(squares)
        if norm <= limit:
            return 1.0
        factor = float32(limit / norm)
        logger.info(
            "Gradient clipping: scaling down gradients (L2 norm %g > %g) by scale factor %g", norm, limit, factor
        )
        return factor

    def _weight_decay(self) -> tuple[float, bool]:
        """The rate of weight decay, and whether it is L1."""
        kind, rate = self.param.regularization_type, self.param.weight_decay
        if rate and kind not in ("L1", "L2"):
            raise ConfigError(f'Unknown regularization type: "{kind}". Set regularization_type to "L1" or "L2"')
        return rate, kind == "L1"

    # ------------------------------------------------------------------ testing

    def test_all(self) -> list[list[Score]]:
        """Test each test net on its ``test_iter`` batches; returns the mean outputs of each net."""
        results = []
        for index in range(len(self.test_nets)):
            if self._stopped:
                break
            results.append(self._test(index))
        return results

    def _test(self, index: int) -> list[Score]:
        logger.info("Iteration %d, Testing net (#%d)", self._iteration, index)
        net = self.test_nets[index]
        net.share_weights(self.net)
        totals: list[Score] = []
        passes, loss = self.param.test_iter[index], 0.0
        for _ in range(passes):
            self._handle_requests()
            if self._stopped:
                logger.info("Test interrupted.")
                return []
            loss += Net.forward(net)
            totals = added(totals, net)
        if self.param.test_compute_loss and passes:
            logger.info("Test loss: %g", loss / passes)
        results = divided(totals, passes)
        for number, score in enumerate(results):
            logger.info("    Test net output #%d: %s", number, score)
        return results

    def _handle_requests(self) -> None:
        while (request := self.action_source()) is not Action.NONE:
            if request is Action.SNAPSHOT:
                self.snapshot()
            else:
                self._stopped = True

    # ------------------------------------------------------------------ snapshots, callbacks, sharing

    def snapshot(self) -> None:
        """Write the caffemodel and the solver state of this iteration.

        Raises:
            ConfigError: ``snapshot_prefix`` is missing or names a folder that does not exist.
            FileError: A file cannot be written.
        """
        history = [_stored(tensor) for tensor in self._history]
        state = StoredState(iteration=self._iteration, history=history, current_step=self._current_step)
        snapshots.write_snapshot(self.net.graph, state, self.param)

    def restore(self, path: AnyPath) -> None:
        """Resume from a snapshot: iteration, weights, history. Nothing changes if the state does not fit.

        Raises:
            FileError: The state, or the caffemodel it names, cannot be read.
            ParseError: It is not a solver state.
            ConfigError: It belongs to another solver type or net.
            ModelError: The weights do not fit.
        """
        state = snapshots.read_state(str(path))
        history = snapshots.history_tensors(state, self._history_shapes(), str(path))
        if state.learned_net:
            self.net.load_weights(snapshots.find_learned_net(state, str(path)))
        self._history = history
        self._iteration, self._current_step = state.iteration, state.current_step

    def add_callback(self, on_start: Callable[[], object], on_gradients_ready: Callable[[], object]) -> None:
        """Call two functions in each iteration: before the first forward pass, and after backward."""
        self._callbacks.append((on_start, on_gradients_ready))

    def share_weights(self, net: Net) -> None:
        """Let another net share the weights that are trained here."""
        net.share_weights(self.net)

    # ------------------------------------------------------------------ internals

    def _build(self, definition: NetDefinition, message: str, *, trains: bool) -> Net:
        logger.info(message, definition.source)
        net = self._make_net(
            definition.parameter,
            phase=definition.phase,
            level=definition.level,
            stages=definition.stages,
            allow_python=self._allow_python,
            with_gradients=trains,
        )
        logger.info("Network initialization done.")
        for entry in self.param.weights:
            for path in entry.split(","):
                logger.info("Finetuning from %s", path.strip())
                net.load_weights(path.strip())
        return net

    def _history_shapes(self) -> list[tuple[int, ...]]:
        return [parameter.blob.shape for parameter in self.net.learnable] * self.rule.histories

    def _is_due(self, every: int) -> bool:
        return bool(every) and self._iteration % every == 0

    def _mean_loss(self) -> float:
        return sum(self._losses) / len(self._losses)

    def _display(self) -> None:
        now, (before, iteration) = time.monotonic(), self._displayed
        lapse = now - before
        self._displayed = (now, self._iteration)
        rate = (self._iteration - iteration) / (lapse or 1.0)
        logger.info(
            "Iteration %d (%g iter/s, %gs/%d iters), loss = %g",
            self._iteration,
            rate,
            lapse,
            self.param.display,
            self._mean_loss(),
        )
        for number, score in enumerate(scores(self.net)):
            logger.info("    Train net output #%d: %s", number, score)


def _stored(tensor: torch.Tensor) -> StoredBlob:
    return StoredBlob(tuple(tensor.shape), tensor.detach().to("cpu").contiguous().numpy())
