"""What a network of the zoo is: a name, and a function that builds what the measurement runs."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import numpy as np
    import onnx

    from amct.pipeline.quantized_model import QuantizedModel

    Outputs = list[np.ndarray]
    Feeds = Mapping[str, np.ndarray]

CALIBRATION, TEST = 8, 12  # batches


class Subject(Protocol):
    """A network with its data, ready to be quantized.

    Attributes:
        calibration: The batches that both quantizers see.
        test: Other batches of the same kind, on which they are compared.
    """

    calibration: Sequence[Any]
    test: Sequence[Any]

    def quantize(self, config: Any = None, **options: Any) -> QuantizedModel:  # noqa: ANN401
        """Quantize it, with the defaults of its door unless something else is given."""

    def file_reference(self, batch: Any, names: Sequence[str]) -> Outputs:  # noqa: ANN401
        """What the user's float model computes for the outputs of a file."""

    def simulated_outputs(self, quantized: QuantizedModel, batch: Any, names: Sequence[str]) -> Outputs:  # noqa: ANN401
        """What the simulation computes for the outputs of a file."""

    def float_onnx(self, quantized: QuantizedModel) -> onnx.ModelProto:
        """The float file against which speed is measured, and which the other quantizer gets."""

    def feeds(self, batch: Any, names: Sequence[str]) -> Feeds:  # noqa: ANN401
        """A batch as inputs of an ONNX file whose inputs have these names."""


@dataclass(frozen=True)
class Network:
    """A network of the zoo.

    Attributes:
        name: ``group/name``.
        build: Makes it, in the folder for temporary files.
        package: What must be importable for it, or the file that must exist.
    """

    name: str
    build: Callable[[Path], Subject]
    package: str = "torch"

    @property
    def group(self) -> str:
        """The part in front of the slash."""
        return self.name.partition("/")[0]

    @property
    def is_installed(self) -> bool:
        """Whether its package is there."""
        return importlib.util.find_spec(self.package) is not None
