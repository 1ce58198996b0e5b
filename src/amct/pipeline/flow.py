"""Post-training quantization in one call, for every front door: config, preparation, calibration, record."""

from __future__ import annotations

import os
import time
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from amct import log
from amct.calibration import all_ranks
from amct.export.check.batch import KeptBatches
from amct.memory import give_back_freed
from amct.pipeline.passes import CALIBRATION, CalibrationFile, Interim, Passes, bound_to, fingerprint
from amct.pipeline.quantized_model import QuantizedModel

if TYPE_CHECKING:
    from amct.config.plan import Plan
    from amct.config.python_config import AnyConfig
    from amct.pipeline.batches import Batches, BatchInputs
    from amct.pipeline.door import Door

AnyResume = str | os.PathLike[str] | CalibrationFile | None
"""The file that keeps what a calibration has observed so far."""


@log.screen_only()
def quantize(
    door: Door,
    data: object,
    config: AnyConfig,
    inputs: BatchInputs | None = None,
    resume: AnyResume = None,
) -> QuantizedModel:
    """Quantize the model behind a front door with calibration data.

    If several processes do so together under ``torch.distributed``, with the same data in each, every process runs its
    share of the batches, and all get the same result.

    Args:
        door: The model.
        data: The calibration data, in a form that the door takes.
        config: A simple config (``.cfg``), a full config (``.json``, or its content as a dict), a ``QuantConfig``, or
            None for the defaults of the door's dialect.
        inputs: Turns a batch into the model's inputs, where its form does not tell them.
        resume: The file that keeps what was observed so far, to go on after a kill; None: nothing is kept.

    Raises:
        AmctError: A subclass says what is wrong: config, model, data or files.
    """
    ranks = all_ranks()
    begin = time.process_time()
    weight_bytes = door.weight_bytes  # now: a door may free weights that it folds
    with closing(door.batches(data, inputs)) as batches:
        example = batches.first()
        plan, open_ended = door.plan(config, example, batches.length)
        if door.reads_data_first(plan):
            batches.keep()
        file = None if resume is None else CalibrationFile.of(resume)
        interim = None
        if file is not None:
            model = door.fingerprint()  # now: a door may free weights that it folds
            interim = Interim(file, ranks, lambda: bound_to(_parts(model, plan, batches, example), ranks), begin)
        passes = Passes(batches, None if open_ended else plan.batch_num, ranks, interim)
        prepared = door.prepare(plan, passes, ranks)
        give_back_freed()  # copies of weights that were folded
        calibration = prepared.start_calibration(ranks)
        seen = KeptBatches()
        with closing(calibration.session):
            calibration.run(passes.observed(CALIBRATION, calibration.session, seen))
            calibration.session.finish(complete=not open_ended)
            result = calibration.session.result
    tensors = result.tensors if calibration.observes_tensors else None
    del calibration  # a caught error may keep this frame, and with it a copy of the model
    give_back_freed()
    layers = prepared.quantized_layers(result)
    if file is not None and not file.removed_by_caller:
        file.remove(ranks)
    seconds = time.process_time() - begin + (0.0 if interim is None else interim.seconds_before)
    return QuantizedModel(prepared, layers, tensors, seen.kept, seconds, weight_bytes)


def _parts(model: str, plan: Plan, batches: Batches, example: object) -> dict[str, str]:
    """Fingerprints of what the result depends on; ``model`` is that of the model."""
    settings = replace(plan, source="", warnings=())
    return {
        "model": model,
        "data": batches.fingerprint(example),
        "config": fingerprint([repr(settings)]),
    }
