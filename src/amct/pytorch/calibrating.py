"""The calibration model, whose layer inputs a session observes, and the model that measures the factors of DMQ."""

from __future__ import annotations

import logging
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from amct.calibration import ALONE, BalanceSession, CalibrationSession, RecordFiles
from amct.calibration.streams import plan_streams
from amct.export.check.batch import batch_path, encode_batch, kept_inputs
from amct.pipeline.flow import BALANCE
from amct.pipeline.weights import layer_balance
from amct.pytorch.capture.functional_layers import layer_module
from amct.pytorch.capture.layer_types import float_weights
from amct.pytorch.folding import fuse
from amct.pytorch.layer_hooks import observe_inputs, on_input, run_in_context
from amct.pytorch.user_model import MARK
from amct.record.conversion import tensor_qparams_path, tensor_qparams_text

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import Tensor
    from torch.utils.hooks import RemovableHandle

    from amct.calibration import CalibrationResult, Ranks
    from amct.config.plan import Plan
    from amct.pipeline.flow import Passes
    from amct.pytorch.capture.trace import Traced
    from amct.pytorch.intermediate_tensors import TensorWatch
    from amct.pytorch.layer_hooks import Arguments
    from amct.pytorch.preparation import TorchPreparation

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class CalibrationModel:
    """A model to run on calibration data, and the session that observes it."""

    model: nn.Module
    session: CalibrationSession


def start_calibration(
    preparation: TorchPreparation,
    *,
    record_file: Path | None = None,
    intermediate: TensorWatch | None = None,
    ranks: Ranks = ALONE,
    called_once: Callable[[Arguments], Collection[str]] = lambda _: (),
) -> CalibrationModel:
    """Create the calibration model.

    Args:
        preparation: the model with its plan and quantized weights.
        record_file: the record file: weight factors are written at once, the others when calibration ends.
        intermediate: the intermediate tensors to observe.
        ranks: the processes that calibrate together; the first one writes.
        called_once: returns the layers that a forward with some arguments certainly calls once.

    Raises:
        FileError: the record cannot be written.
    """
    model = preparation.quantized_copy(is_private=record_file is None)
    files = None
    if record_file is not None:
        stale = [tensor_qparams_path(record_file), batch_path(record_file)]
        files = RecordFiles(record_file, stale=stale, writes=ranks.is_first)
    kept = _FirstBatch(preparation) if record_file is not None else None
    cleanup: list[Callable[[], None]] = []

    def end(result: CalibrationResult) -> None:
        if files is not None:
            beside: dict[Path, str | Callable[[bytes], bytes]] = {}
            if intermediate is not None:
                beside[tensor_qparams_path(files.record)] = tensor_qparams_text(result.tensors)
            if kept is not None and (inputs := kept.inputs) is not None:
                beside[batch_path(files.record)] = lambda record: encode_batch(inputs, record)
            files.complete(preparation.record_of(preparation.with_inputs(result)), beside)
        for undo in cleanup:
            undo()
        cleanup.clear()  # they refer to the model, whose weights should be freed with the last other reference

    recurrent = [
        name for name in preparation.weights if isinstance(layer_module(preparation.fused.model, name), nn.RNNBase)
    ]
    session = CalibrationSession(
        plan_streams(preparation.layer_plans, recurrent),
        tensors=intermediate.observers() if intermediate is not None else None,
        on_progress=files.note if files is not None else None,
        on_end=end,
        ranks=ranks,
    )
    cleanup += _attach(model, preparation, session, intermediate, kept, called_once)
    if files is not None:
        files.begin(preparation.record_of(preparation.weight_qparams()), session.progress)
    return CalibrationModel(model=model, session=session)


class _FirstBatch:
    """The inputs of the first batch by the names of the ONNX files, kept for the check of the saved files."""

    def __init__(self, preparation: TorchPreparation) -> None:
        self._preparation: TorchPreparation | None = preparation
        self.inputs: dict[str, NDArray[Any]] | None = None

    def see(self, arguments: Arguments) -> None:
        """Keep the first batch, or its first samples."""
        if self._preparation is not None:
            with suppress(TypeError, ValueError, RuntimeError):  # no inputs of the model, as its forward will say
                found = self._preparation.onnx_inputs(arguments)
                self.inputs = kept_inputs(found, divisible=self._preparation.any_batch_size)
            self._preparation = None


def _attach(
    model: nn.Module,
    preparation: TorchPreparation,
    session: CalibrationSession,
    intermediate: TensorWatch | None,
    kept: _FirstBatch | None,
    called_once: Callable[[Arguments], Collection[str]],
) -> list[Callable[[], None]]:
    """Add the hooks of the session; returns functions that remove them."""
    handles: list[RemovableHandle] = []
    for name in preparation.weights:
        handles += observe_inputs(session, name, layer_module(model, name))
    attached = intermediate.attach(model, session) if intermediate is not None else None

    @contextmanager
    def forward_context(arguments: Arguments) -> Iterator[None]:
        if kept is not None:
            kept.see(arguments)
        with session.batch(called_once(arguments)):
            if attached is None:
                yield
            else:
                with attached.forward(arguments):
                    yield

    undo = [handle.remove for handle in handles]
    if attached is not None:
        undo.append(attached.detach)
    return [*undo, run_in_context(model, forward_context)]


# -- balancing (DMQ) ---------------------------------------------------------------------------------------------------


def balancing_model(
    traced: Traced,
    plan: Plan,
    on_factors: Callable[[Mapping[str, Tensor]], None],
    *,
    ranks: Ranks = ALONE,
    batch_num: int | None = None,
) -> tuple[nn.Module, BalanceSession]:
    """A folded copy whose balanced layers a session observes; ``on_factors`` gets the factors after each forward.

    They are computed from the largest activation of each channel over all forwards. Of several processes that calibrate
    together each gets the factors once, after its share of ``batch_num`` batches or at the end of the session.
    """
    model = fuse(traced, do_fusion=plan.do_fusion, skip=plan.skip_fusion_layers).model
    plans = {layer.name: layer for layer in plan.balanced}
    order = [name for name in traced.layers if name in plans]
    parts = {name: float_weights(layer_module(model, name))[0] for name in order}

    def update(maxima: Mapping[str, Tensor]) -> None:
        found = [name for name in order if name in maxima]
        on_factors({name: layer_balance(plans[name], parts[name], maxima[name]) for name in found})

    session = BalanceSession(order, update, ranks=ranks, batch_num=batch_num)
    for name in order:
        module = layer_module(model, name)
        setattr(module, MARK, True)
        on_input(module, partial(_observe, session, name, parts[name].kind.channel_axis))
    run_in_context(model, lambda _: session.batch())
    return model, session


def _observe(session: BalanceSession, name: str, axis: int, x: Tensor) -> None:
    session.observe(name, x, axis)


def balance_of(traced: Traced, plan: Plan, data: Passes, ranks: Ranks = ALONE) -> dict[str, Tensor]:
    """Compute the factors of all layers that the plan balances; without such layers nothing is run.

    Of several processes each runs its share of the batches, and all get the same factors.
    """
    found: dict[str, Tensor] = {}
    if plan.balanced:
        model, session = balancing_model(traced, plan, found.update, ranks=ranks)
        for args, kwargs in data.observed(BALANCE, session):
            model(*args, **kwargs)
        session.finish()
    return found
