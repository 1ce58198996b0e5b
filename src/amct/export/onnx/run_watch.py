"""Stops a run of onnxruntime that takes too long or too much memory, such as that of a Loop without end."""

from __future__ import annotations

import time
from pathlib import Path
from threading import TIMEOUT_MAX, Event, Thread
from typing import TYPE_CHECKING

from amct.export.onnx.messages import subgraphs
from amct.export.onnx.sizes import MODEL_LIMIT_VARIABLE, model_limit
from amct.memory import gibibytes, number_from_environment, process_bytes

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto
    from onnxruntime import RunOptions

SECONDS_VARIABLE = "AMCT_ONNX_RUN_SECONDS"
"""Environment variable with the longest time of one batch."""
DEFAULT_SECONDS = 600
LOOP_SECONDS = 60
"""The longest time of one batch of a model with a Loop, the only operator that may never end."""
_POLL_SECONDS = 0.1


def longest_run(model: ModelProto | Path) -> int:
    """The seconds that one batch may take; a file is one of ours and is not searched for a Loop.

    Raises:
        ModelError: the environment variable is not a number.
    """
    default = LOOP_SECONDS if not isinstance(model, Path) and _has_loop(model.graph) else DEFAULT_SECONDS
    return min(number_from_environment(SECONDS_VARIABLE, default, "seconds"), int(TIMEOUT_MAX))


def _has_loop(graph: GraphProto) -> bool:
    return any(node.op_type == "Loop" or any(map(_has_loop, subgraphs(node))) for node in graph.node)


class RunWatch:
    """Watches one run while the ``with`` block is active; it ends between two nodes or two repetitions of a Loop.

    Attributes:
        reason: Why the run was stopped, with what to do; empty if it was not.
    """

    def __init__(self, options: RunOptions, seconds: int) -> None:
        self.reason = ""
        self._options, self._seconds = options, seconds
        self._done = Event()
        self._thread = Thread(target=self._watch, daemon=True)

    def __enter__(self) -> RunWatch:
        self._limit, self._before = model_limit(), process_bytes()
        self._deadline = time.monotonic() + self._seconds
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(min(_POLL_SECONDS, self._seconds)):
            if time.monotonic() > self._deadline:
                self._stop(
                    f"the model does not finish one batch in {self._seconds} seconds: does it have a Loop that never "
                    f"ends? If it needs more time, set {SECONDS_VARIABLE}"
                )
            elif process_bytes() - self._before > self._limit:
                self._stop(
                    f"one batch of the model needs more than {gibibytes(self._limit)} of memory: does it have a Loop "
                    f"that never ends? Use a smaller batch; or, if this is intended, set {MODEL_LIMIT_VARIABLE} to a "
                    "larger number of bytes"
                )

    def _stop(self, reason: str) -> None:
        self.reason, self._options.terminate = reason, True
        self._done.set()
