"""What the written files are compared with: a calibration batch in the front door's own float model and simulation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from amct.export.check.batch import CALIBRATION, MOST_SAMPLES
from amct.export.check.reference import Reference

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from amct.ptq.door import ComparedModel, PreparedModel
    from amct.record import AnyRecord


def reference(prepared: PreparedModel, record: AnyRecord, example: Any) -> Reference:  # noqa: ANN401  the door's arguments
    """Run the float model and the simulation on a calibration batch, or on its first samples if their number may vary.

    Args:
        prepared: The model.
        record: Its factors.
        example: The batch as arguments of the model.
    """
    batch = _first_samples(example) if prepared.any_batch_size else example
    float_model, simulation = prepared.compared_models(record)
    return Reference(
        inputs=prepared.onnx_inputs(batch),
        origin=CALIBRATION,
        expected=_outputs(float_model, batch),
        simulated=_outputs(simulation, batch),
    )


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
