"""What the written files are compared with: calibration batches in the front door's own float model and simulation."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from amct.export.check.batch import CALIBRATION, LARGEST_BATCH, MOST_SAMPLES
from amct.export.check.reference import Reference

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from amct.ptq.door import ComparedModel, PreparedModel
    from amct.record import AnyRecord


def reference(prepared: PreparedModel, record: AnyRecord, examples: Sequence[Any]) -> Reference:
    """Run the float model and the simulation on calibration batches, or on first samples if their number may vary.

    Args:
        prepared: The model.
        record: Its factors.
        examples: The batches as arguments of the model; of the further ones those count that have the shapes of the
            first, up to ``LARGEST_BATCH`` bytes of outputs.
    """
    models = prepared.compared_models(record)
    first = _reference(prepared, examples[0], models)
    shapes = _shapes(first.inputs)
    further: list[Reference] = []
    size = _output_bytes(first)
    for example in examples[1:]:
        if size < LARGEST_BATCH and _shapes(prepared.onnx_inputs(example)) == shapes:
            further.append(_reference(prepared, example, models))
            size += _output_bytes(further[-1])
    return replace(first, further=tuple(further))


def _reference(prepared: PreparedModel, example: Any, models: tuple[ComparedModel, ComparedModel]) -> Reference:  # noqa: ANN401  the door's arguments
    batch = _first_samples(example) if prepared.any_batch_size else example
    expected, simulated = (_outputs(model, batch) for model in models)
    return Reference(inputs=prepared.onnx_inputs(batch), origin=CALIBRATION, expected=expected, simulated=simulated)


def _shapes(inputs: Mapping[str, NDArray[Any]]) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in inputs.items()}


def _output_bytes(batch: Reference) -> int:
    return sum(array.nbytes for outputs in (batch.expected, batch.simulated) for _, array in outputs or ())


def _outputs(model: ComparedModel, arguments: Any) -> list[tuple[str, NDArray[Any]]]:  # noqa: ANN401  the door's own
    with model.watch(outputs=lambda _layer, _tensor: None) as run:
        return [(name, np.asarray(tensor.detach().cpu())) for name, tensor in run(arguments).tensors]


def _first_samples(arguments: Any) -> Any:  # noqa: ANN401  the door's arguments
    """The arguments with at most ``MOST_SAMPLES`` samples, where all their arrays have the same number of them."""
    leaves = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, (torch.Tensor, np.ndarray))]
    counts = {leaf.shape[0] if leaf.ndim else 0 for leaf in leaves}
    if len(counts) != 1 or min(counts) <= MOST_SAMPLES:
        return arguments
    return pytree.tree_map_only((torch.Tensor, np.ndarray), lambda leaf: leaf[:MOST_SAMPLES], arguments)
