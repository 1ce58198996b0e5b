"""What the written files are compared with: calibration batches in the front door's own float model and simulation."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from amct.export.check.batch import CALIBRATION, LARGEST_BATCH, MOST_SAMPLES
from amct.export.check.reference import SHARE, Outputs, Reference, fewest_batches

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from amct.pipeline.door import ComparedModel, PreparedModel
    from amct.record import AnyRecord


def reference(
    prepared: PreparedModel, record: AnyRecord, examples: Sequence[Any], seconds: float = math.inf
) -> Reference:
    """Run the float model and the simulation on calibration batches, or on first samples if their number may vary.

    Args:
        prepared: The model.
        record: Its factors.
        examples: The batches as arguments of the model; of the further ones those count that have the shapes of the
            first, up to ``LARGEST_BATCH`` bytes of outputs.
        seconds: The CPU time of the job so far.
    """
    first = _sample(prepared, examples[0])
    shapes = _shapes(first[1])
    further = (_sample(prepared, example) for example in examples[1:])
    samples = [first, *(each for each in further if _shapes(each[1]) == shapes)]
    batches, fewest = [batch for batch, _ in samples], fewest_batches(first[1])
    models = prepared.models_to_check(record)
    expected = _outputs(models[0], batches, fewest, SHARE * seconds)
    simulated = _outputs(models[1], batches[: len(expected)], fewest, SHARE * seconds)
    found = [
        Reference(inputs=inputs, origin=CALIBRATION, expected=exact, simulated=rounded)
        for (_, inputs), exact, rounded in zip(samples, expected, simulated, strict=False)
    ]
    return replace(found[0], further=tuple(found[1:]), seconds=seconds)


def _sample(prepared: PreparedModel, example: Any) -> tuple[Any, dict[str, NDArray[Any]]]:  # noqa: ANN401  the door's own
    """A batch, or its first samples, as arguments of the model and by the input names of the files."""
    batch = _first_samples(example) if prepared.any_batch_size else example
    return batch, prepared.onnx_inputs(batch)


def _shapes(inputs: Mapping[str, NDArray[Any]]) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in inputs.items()}


def _outputs(
    model: ComparedModel | None, batches: Sequence[Any], fewest: int, seconds: float
) -> Sequence[Outputs | None]:
    if model is None:
        return [None] * len(batches)
    with model.watch() as run:  # once: loading a small model takes longer than all its runs

        def arrays(batch: Any) -> Outputs:  # noqa: ANN401  the door's own
            return [(name, np.asarray(tensor.detach().cpu()).copy()) for name, tensor in run(batch).tensors]

        return first_outputs(arrays, batches, fewest, seconds)


def first_outputs(run: Callable[[Any], Outputs], batches: Sequence[Any], fewest: int, seconds: float) -> list[Outputs]:
    """The outputs of the fewest batches, of more up to half of ``LARGEST_BATCH`` bytes and up to so many seconds."""
    found: list[Outputs] = []
    size, end = 0, time.process_time() + seconds
    for batch in batches:
        late = len(found) >= fewest and time.process_time() > end
        if found and (late or size >= LARGEST_BATCH // 2):
            break
        found.append(run(batch))
        size += sum(array.nbytes for _, array in found[-1])
    return found


def _first_samples(arguments: Any) -> Any:  # noqa: ANN401  the door's arguments
    """The arguments with at most ``MOST_SAMPLES`` samples, where all their arrays have the same number of them."""
    leaves = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, (torch.Tensor, np.ndarray))]
    counts = {leaf.shape[0] if leaf.ndim else 0 for leaf in leaves}
    if len(counts) != 1 or min(counts) <= MOST_SAMPLES:
        return arguments
    return pytree.tree_map_only((torch.Tensor, np.ndarray), lambda leaf: leaf[:MOST_SAMPLES], arguments)
