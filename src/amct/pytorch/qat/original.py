"""The float model that was handed in for training: what "before" means in a summary and a report.

The trained weights without their quantizers are another model, often a worse one. No copy of the user's model is kept:
its outputs on a first batch, its metric if that was asked for, and a weak reference to it, by which it is run again
while it lives and is unchanged.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from amct.pipeline.door import ModelOutput
from amct.printable import counted
from amct.pytorch.inputs import samples_in
from amct.pytorch.layer_hooks import torch_output
from amct.pytorch.user_model import copy_model
from amct.report.filling import metric_figure
from amct.report.measuring import Measuring

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from amct.pipeline.batches import Batches
    from amct.pytorch.layer_hooks import Arguments
    from amct.report.measuring import Metric


@dataclass(frozen=True, eq=False)
class Original:
    """The float model that was handed in.

    Attributes:
        batches: Arguments of some forwards.
        outputs: What it returned for each.
        model: The model; None when it is gone, or was not copied with a pickle.
        state: Of each of its tensors: which one it is, and how often it was changed.
    """

    batches: Sequence[Arguments]
    outputs: Sequence[ModelOutput]
    model: weakref.ref[nn.Module] | None
    state: object

    @classmethod
    def of(cls, model: nn.Module, batches: Sequence[Arguments]) -> Original:
        """Run a model on batches; it is not changed."""
        results = map(runner_of(model), batches)
        tensors = [[(name, each.detach().cpu().clone()) for name, each in result.tensors] for result in results]
        outputs = [ModelOutput(value=None, tensors=each) for each in tensors]
        return cls(batches, outputs, weakref.ref(model), _state(model))

    def __getstate__(self) -> dict[str, Any]:
        """A pickle has the outputs only."""
        return {**vars(self), "model": None, "state": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def kept(self, batch: Arguments) -> ModelOutput:
        """What it returned for one of its batches."""
        return next(found for own, found in zip(self.batches, self.outputs, strict=True) if own is batch)

    def runner(self) -> Callable[[Arguments], ModelOutput] | None:
        """Runs the model, if it lives and has the values that it was handed in with."""
        model = None if self.model is None else self.model()
        if model is None or _state(model) != self.state:
            return None
        return runner_of(model)


@dataclass(frozen=True, kw_only=True)
class MetricBefore:
    """A metric that was measured before training.

    Attributes:
        name: Of the metric.
        float_model: That of the float model that was handed in.
        start: That of the model with quantizers.
        batches: On how many batches.
    """

    name: str
    float_model: float
    start: float
    batches: int

    @classmethod
    def measured(cls, model: nn.Module, start: nn.Module, data: Batches, metric: Metric) -> MetricBefore:
        """Run both models on data.

        Raises:
            ArgumentTypeError: The metric returns no number.
            CalibrationError: There is no data.
        """
        measuring, runs = Measuring({}, metric), (runner_of(model), runner_of(start))
        for batch, arguments in data.with_originals():
            measuring.add(())
            of_float, of_start = (run(arguments).value for run in runs)
            measuring.score(of_float, of_start, batch, samples_in(batch))
        found = measuring.result()
        assert found.metric is not None
        return cls(name=found.metric_name, float_model=found.metric[0], start=found.metric[1], batches=found.batches)

    def __str__(self) -> str:
        """One line of a summary."""
        figure = metric_figure(self.name, self.float_model, self.start)
        on = counted(self.batches, "batch")
        return (
            f"{self.name} before training, on {on}: {figure.before} of the float model, {figure.after} with quantizers"
        )


def runner_of(model: nn.Module) -> Callable[[Arguments], ModelOutput]:
    """Runs a model in eval mode; the model itself keeps its mode."""
    plain = copy_model(model, share_tensors=True).eval()

    def run(arguments: Arguments) -> ModelOutput:
        args, kwargs = arguments
        with torch.no_grad():
            return torch_output(plain(*args, **kwargs))

    return run


def _state(model: nn.Module) -> object:
    return [(name, id(tensor), tensor._version) for name, tensor in _tensors(model)]


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]
