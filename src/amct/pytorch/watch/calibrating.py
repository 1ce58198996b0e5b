"""The calibration model: a folded copy with quantized weights whose layers show their inputs to a session."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from amct.calibration import CalibrationSession, RecordFiles
from amct.calibration.layer_records import plan_streams
from amct.export.qdq.tensor_factors import observed_factors, tensor_factors_path, tensor_factors_text
from amct.pytorch.capture.operators import MARK
from amct.pytorch.watch.layer_hooks import Balance, observe_inputs, run_inside

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch.utils.hooks import RemovableHandle

    from amct.calibration import CalibrationResult
    from amct.pytorch.preparation import TorchPreparation
    from amct.pytorch.watch.intermediate_tensors import TensorWatch
    from amct.pytorch.watch.layer_hooks import Arguments

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class CalibrationModel:
    """A model to be run on calibration data, and the session that watches it."""

    model: nn.Module
    session: CalibrationSession


def start_calibration(
    preparation: TorchPreparation, *, record_file: Path | None = None, between: TensorWatch | None = None
) -> CalibrationModel:
    """Make the calibration model.

    Args:
        preparation: the model with its plan and quantized weights.
        record_file: where the record is written: the weights' factors now, the rest when calibration ends.
        between: what to observe between the layers.

    Raises:
        FileError: the record cannot be written.
    """
    model = preparation.quantized_copy()
    files = None
    if record_file is not None:
        files = RecordFiles(record_file, stale=[tensor_factors_path(record_file)])
    cleanup: list[Callable[[], None]] = []

    def end(result: CalibrationResult) -> None:
        if files is not None:
            text = tensor_factors_text(observed_factors(result.tensors)) if between is not None else None
            beside = {tensor_factors_path(files.record): text} if text is not None else {}
            files.complete(preparation.complete_record(result), beside)
        for undo in cleanup:
            undo()

    recurrent = [
        name for name in preparation.weights if isinstance(preparation.fused.model.get_submodule(name), nn.RNNBase)
    ]
    session = CalibrationSession(
        plan_streams(preparation.layer_plans, recurrent),
        tensors=between.observers() if between is not None else None,
        on_progress=files.note if files is not None else None,
        on_end=end,
    )
    cleanup += _attach(model, preparation, session, between)
    if files is not None:
        files.begin(preparation.record(), session.progress)
    return CalibrationModel(model=model, session=session)


def _attach(
    model: nn.Module, preparation: TorchPreparation, session: CalibrationSession, between: TensorWatch | None
) -> list[Callable[[], None]]:
    """Hook the session up; returns what unhooks it."""
    handles: list[RemovableHandle] = []
    for name, weights in preparation.weights.items():
        module = model.get_submodule(name)
        setattr(module, MARK, True)
        if weights.balance is not None:  # stays when calibration is over: the weights are balanced
            module.register_forward_pre_hook(Balance(weights.balance, weights.channel_axis), with_kwargs=True)
        handles += observe_inputs(session, name, module)
    watching = between.attach(model, session) if between is not None else None

    @contextmanager
    def surroundings(arguments: Arguments) -> Iterator[None]:
        with session.batch():
            if watching is None:
                yield
            else:
                with watching.forward(arguments):
                    yield

    undo = [handle.remove for handle in handles]
    if watching is not None:
        undo.append(watching.detach)
    return [*undo, run_inside(model, surroundings)]
