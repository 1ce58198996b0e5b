"""A torch network of the zoo with its data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

import amct.pytorch
from zoo_networks.network import CALIBRATION, TEST
from zoo_networks.weights import settle

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import onnx
    from torch import nn

    from amct.pipeline.quantized_model import QuantizedModel

Inputs = dict[str, np.ndarray] | tuple[np.ndarray, ...]


class TorchSubject:
    """A module in eval mode; a batch is a tuple or a dict of tensors."""

    def __init__(self, model: nn.Module, make: Callable[[int, int], Inputs], *, trained: bool = False) -> None:
        """Make the data of a model, and settle its weights unless they are trained.

        Args:
            model: Just initialized, or trained.
            make: ``make(samples, seed)`` returns the inputs of a batch.
            trained: Leave the weights as they are.
        """
        self.model = model if trained else settle(model, lambda settled: call(settled, tensors(make(8, 1))))
        self.calibration = [tensors(make(1, 100 + index)) for index in range(CALIBRATION)]
        self.test = [tensors(make(1, 900 + index)) for index in range(TEST)]

    def quantize(self, config: Any = None, **options: Any) -> QuantizedModel:  # noqa: ANN401
        """Quantize it, with the defaults unless something else is given."""
        return amct.pytorch.quantize(self.model, self.calibration, config, **options)

    def file_reference(self, batch: Any, _: Sequence[str]) -> list[np.ndarray]:  # noqa: ANN401
        """The outputs of the module as the user has it."""
        return flat(call(self.model, batch))

    def simulated_outputs(self, quantized: QuantizedModel, batch: Any, _: Sequence[str]) -> list[np.ndarray]:  # noqa: ANN401
        """The outputs of the simulation."""
        return flat(quantized(batch))

    def float_onnx(self, quantized: QuantizedModel) -> onnx.ModelProto:
        """The exported float model, batch norms folded."""
        return quantized.prepared.float_model(None)

    def feeds(self, batch: Any, names: Sequence[str]) -> dict[str, np.ndarray]:  # noqa: ANN401
        """By name, or in the order of the arguments."""
        if isinstance(batch, dict):
            return {name: batch[name].numpy() for name in names}
        return {name: item.numpy() for name, item in zip(names, batch, strict=True)}


def tensors(inputs: Inputs) -> Any:  # noqa: ANN401
    """The arrays as tensors."""
    if isinstance(inputs, dict):
        return {name: torch.from_numpy(array) for name, array in inputs.items()}
    return tuple(torch.from_numpy(array) for array in inputs)


def call(model: nn.Module, batch: Any) -> object:  # noqa: ANN401
    """Run a module on a batch."""
    with torch.no_grad():
        return model(**batch) if isinstance(batch, dict) else model(*batch)


def flat(outputs: object) -> list[np.ndarray]:
    """The tensors of any nested output, in the order in which torch flattens them."""
    return [leaf.detach().numpy() for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
