"""The time of a pruned model in onnxruntime, beside that of the whole one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amct.export.check.running import LoadedModel, median_seconds
from amct.pytorch.pruning.saving import float_model, onnx_feeds, traced_plain

if TYPE_CHECKING:
    from onnx import ModelProto
    from torch import nn

    from amct.pytorch.capture.trace import Traced
    from amct.pytorch.inputs import IoOptions

BUDGET = 1.0
"""CPU seconds of one comparison."""


class Stopwatch:
    """Times models beside the whole one, on the example input.

    Args:
        traced: The whole model.
        io: Names and dynamic axes of its files.
    """

    def __init__(self, traced: Traced, io: IoOptions) -> None:
        self._traced, self._io = traced, io
        self._whole: LoadedModel | None = None

    def _exported(self, model: nn.Module) -> ModelProto:
        inputs = self._traced.inputs
        return float_model(traced_plain(model, (*inputs.args, inputs.kwargs), self._io))[0]

    def _loaded(self, exported: ModelProto) -> LoadedModel:
        self._feeds = onnx_feeds(self._traced, exported)
        loaded = LoadedModel(exported)
        loaded.run(self._feeds)
        return loaded

    def seconds(self, model: nn.Module) -> tuple[float, float]:
        """Seconds of one run of the whole model and of another one.

        Raises:
            ExportError: One of them cannot be exported.
        """
        return self.seconds_of(self._exported(model))

    def seconds_of(self, exported: ModelProto) -> tuple[float, float]:
        """Seconds of one run of the whole model and of a file that takes the same inputs."""
        self._whole = self._whole or self._loaded(self._exported(self._traced.model))
        whole, pruned = self._whole, self._loaded(exported)
        times = median_seconds(
            {"whole": lambda: whole.run(self._feeds), "pruned": lambda: pruned.run(self._feeds)}, budget=BUDGET
        )
        pruned.close()
        return times["whole"], times["pruned"]
