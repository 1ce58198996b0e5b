"""Observes the outputs of layers of the user's own model while the user's loop runs it.

The model is not copied: models with a key/value cache are large. It is the same model as before, with hooks until the
calibration has ended. A copy of the model, or a pickled one, does not take part in the calibration.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import finalize

from torch import Tensor, nn

from amct.calibration import ALONE, CalibrationSession
from amct.calibration.layer_records import kv_cache_stream
from amct.calibration.session import OUTPUT
from amct.errors import CalibrationError
from amct.pytorch.layer_hooks import hidden_from_modes, run_own_model_in_context

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from amct.calibration import CalibrationResult, Ranks
    from amct.config.ptq.kv_cache import KvCachePlan
    from amct.pytorch.layer_hooks import Arguments
    from amct.record import Progress

logger = logging.getLogger(__name__)


def watch_outputs(
    model: nn.Module,
    plan: KvCachePlan,
    *,
    record: str,
    on_progress: Callable[[Mapping[str, Progress]], None],
    on_end: Callable[[CalibrationResult], None],
    ranks: Ranks = ALONE,
) -> CalibrationSession:
    """Observe the outputs of the planned layers in each forward of the model, until each has its batches.

    Args:
        model: the user's model; its hooks are removed when the calibration ends.
        plan: the layers and their settings.
        record: the name of the record file, for messages.
        on_progress: called after each forward except the last, with (observed, needed) batches of every layer.
        on_end: called once, with the result.
        ranks: the processes that calibrate together.
    """
    undo: list[Callable[[], None]] = []

    def end(result: CalibrationResult) -> None:
        on_end(result)
        for step in undo:
            step()

    session = CalibrationSession(map(kv_cache_stream, plan.layers), on_progress=on_progress, on_end=end, ranks=ranks)
    watch = _Watch(session)
    for layer in plan.layers:
        hook = _OutputHook(watch, layer.name)
        undo.append(model.get_submodule(layer.name).register_forward_hook(hook).remove)
    undo.append(run_own_model_in_context(model, watch.forward))
    finalize(model, warn_if_incomplete, session, record)
    return session


def warn_if_incomplete(session: CalibrationSession, record: str) -> None:
    """Log the layers that still need batches; called when the model is deleted or the program ends."""
    session.close()
    if missing := session.missing():
        logger.warning(
            "%s: the calibration of the key/value cache is incomplete: %s; run more data, or lower batch_num",
            record,
            missing,
        )


class _Watch:
    """The connection of hooks to a session, which copies of the model do not have."""

    def __init__(self, session: CalibrationSession | None = None) -> None:
        self.session = session

    def __deepcopy__(self, _: object) -> _Watch:
        return _Watch()

    def __reduce__(self) -> tuple[type[_Watch], tuple[()]]:
        return _Watch, ()

    @contextmanager
    def forward(self, _: Arguments) -> Iterator[None]:
        """Enclose one forward of the model: a layer that it calls several times observes one batch."""
        if self.session is None:
            yield
        else:
            with self.session.batch():
                yield


class _OutputHook:
    """A forward hook that observes the output of a layer."""

    def __init__(self, watch: _Watch, layer: str) -> None:
        self.watch = watch
        self.layer = layer

    def __call__(self, _: nn.Module, args: tuple[Any, ...], output: object) -> None:
        """Observe the output; a forward hook."""
        del args
        if self.watch.session is None:
            return
        if not isinstance(output, Tensor):
            raise CalibrationError(
                f'layer "{self.layer}": the output is a {type(output).__name__}, expected a tensor; call a '
                "QuantCalibrationOp on the tensor that goes to the cache instead"
            )
        with hidden_from_modes():
            observe_output(self.watch.session, self.layer, output)


def observe_output(session: CalibrationSession, layer: str, output: Tensor) -> None:
    """Pass one tensor on its way to the cache to a session."""
    session.observe(layer, output.detach(), OUTPUT)
