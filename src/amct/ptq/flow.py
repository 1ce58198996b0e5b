"""Post-training quantization in one call, for every front door: config, preparation, calibration, record."""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING

from amct import log
from amct.calibration import all_ranks
from amct.export.qdq.tensor_factors import observed_factors
from amct.ptq.batches import KeptBatches
from amct.ptq.quantized_model import QuantizedModel

if TYPE_CHECKING:
    from amct.config.ptq.quant_config import AnyConfig
    from amct.ptq.batches import BatchInputs
    from amct.ptq.door import Door


@log.screen_only()
def quantize(door: Door, data: object, config: AnyConfig, inputs: BatchInputs | None = None) -> QuantizedModel:
    """Quantize the model behind a front door with calibration data.

    If several processes do so together under ``torch.distributed``, with the same data in each, every process runs its
    share of the batches, and all get the same result.

    Args:
        door: The model.
        data: The calibration data, in a form that the door takes.
        config: A simple config (``.cfg``), a full config (``.json``, or its content as a dict), a ``QuantConfig``, or
            None for the defaults of the door's dialect.
        inputs: Turns a batch into the model's inputs, where its form does not tell them.

    Raises:
        AmctError: A subclass says what is wrong: config, model, data or files.
    """
    ranks = all_ranks()
    begin = time.process_time()
    batches = door.batches(data, inputs)
    plan, open_ended = door.plan(config, batches.first(), batches.length)
    limit = None if open_ended else plan.batch_num
    if door.reads_data_first(plan):
        batches.keep()
    prepared = door.prepare(plan, lambda readers: batches.limited(limit, readers), ranks)
    calibration = prepared.start_calibration(ranks)
    seen = KeptBatches()
    with closing(calibration.session):
        calibration.run(seen.passing(batches.limited(limit, ranks)))
        if open_ended or not ranks.is_alone:
            calibration.session.finish(complete=not open_ended)
        result = calibration.session.result
    tensors = observed_factors(result.tensors) if calibration.observes_tensors else None
    record = prepared.complete_record(result)
    return QuantizedModel(prepared, record, tensors, seen.kept, time.process_time() - begin)
