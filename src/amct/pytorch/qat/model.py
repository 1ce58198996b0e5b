"""The trainable model: the user's own class, with methods to summarize, save and report what was trained."""

from __future__ import annotations

import functools
import logging
import types
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from markupsafe import Markup
from torch import Tensor, nn

from amct import log
from amct.errors import AmctError, ArgumentError, TrainingError
from amct.export.check.batch import batch_size, copied, first_samples
from amct.export.request import DEFAULT_FORMATS, Placement, Target
from amct.numerics.training.losses import teacher_distance
from amct.pipeline.quantized_model import QuantizedModel
from amct.printable import counted
from amct.pytorch.inputs import IoOptions, tensors_in, torch_batches
from amct.pytorch.pruning.sparse import make_plain, sparse_layers
from amct.pytorch.qat.deployment import (
    as_float_model,
    check_trained,
    prepare_trained,
    tensors_between_layers,
    trained_layers,
)
from amct.pytorch.qat.layers import quantized_layers
from amct.pytorch.qat.operations import has_operations, inside, operation_quantizers, quantized_inputs
from amct.pytorch.qat.original import MetricBefore, Original, runner_of
from amct.pytorch.qat.recipe import Recipe, propose, teacher_outputs
from amct.pytorch.user_model import copy_model
from amct.report.content import TrainedClips, TrainingContent
from amct.report.measuring import metric_name

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from amct.config.plan import RetrainPlan
    from amct.model import Skip
    from amct.model.calibration_data import CalibrationData
    from amct.pipeline.batches import BatchInputs
    from amct.pipeline.door import ModelOutput
    from amct.pytorch.capture.cached_trace import KnownTrace
    from amct.pytorch.layer_hooks import Arguments
    from amct.pytorch.preparation import TorchPreparation
    from amct.report.measuring import Metric

logger = logging.getLogger(__name__)

MOST_SAMPLES = 64
"""Samples of a batch that the model keeps: to be traced with, and to observe the tensors between layers."""
_LARGEST_BYTES = 1 << 26
BEFORE = "Outputs and metric before are those of the float model that was handed in, on the same data."
KEPT = "The verdict compares with outputs of the float model that was handed in, which were kept before training."
AT_PREPARATION = "The metric before is that of the float model that was handed in, measured then on {}."
WITHOUT_QUANTIZERS = (
    "The metric before is that of the trained weights without quantizers: the float model that was handed in is gone, "
    "or was changed. Give prepare_qat data and metric, or keep the float model while training, or give it as teacher."
)


@dataclass(kw_only=True, eq=False)
class QatState:
    """What a trainable model knows besides its parameters.

    Attributes:
        plan: How its layers are quantized.
        origin: The trace of the model it was made of; it serves as long as nothing but values has changed.
        not_folded: The batch norms that will not be folded, with the reasons.
        io: Names and dynamic axes of the exported models.
        example: Arguments of one forward, from the data it was prepared with.
        seen: Arguments of the first forward in eval mode after training.
        start: By layer: the clips before training.
        calibration: The data that they come from.
        teacher: The float model to learn from, inside a tuple.
        teaches_itself: Whether the teacher is the model that was handed in.
        temperature: How much the teacher's probabilities are softened.
        all_layers: Whether functional calls and modules called several times can be layers; not in AMCT's functions.
        any_batch: Whether files take batches of any size.
        target: The QDQ file that it is trained for.
        freeze_norms: Whether batch norms use and keep their running statistics in train mode too; None: as a recipe
            says.
        original: The float model that was handed in.
        metric_before: What was measured of it, and of the model with quantizers, before training.
    """

    plan: RetrainPlan
    origin: KnownTrace | None = None
    not_folded: tuple[Skip, ...] = ()
    io: IoOptions = field(default_factory=IoOptions)
    example: Arguments | None = None
    seen: Arguments | None = None
    start: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    calibration: CalibrationData | None = None
    teacher: tuple[nn.Module, ...] = ()
    teaches_itself: bool = False
    temperature: float = 4.0
    all_layers: bool = False
    any_batch: bool = False
    target: str = Target.EXACT8.value
    freeze_norms: bool | None = None
    original: Original | None = None
    metric_before: MetricBefore | None = None

    def __deepcopy__(self, _: dict[int, Any]) -> QatState:
        """A copy of the model shares what is never changed: plan, trace, batches and teacher."""
        return replace(self)

    def __getstate__(self) -> dict[str, Any]:
        """A pickled model has no teacher and no trace."""
        return {**vars(self), "origin": None, "teacher": ()}


class QatModel(nn.Module):
    """A model in quantization-aware training, of a class derived from the user's.

    It is trained like any module. In eval mode it computes what is deployed.
    """

    amct_operator = True
    float_class: ClassVar[type[nn.Module]]
    _qat: QatState

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  the user's own forward
        """The user's forward; a batch in eval mode is kept, to observe the tensors between layers when saving."""
        if not self.training and not torch.compiler.is_compiling() and self._qat.seen is None:
            self._qat.seen = kept_batch((args, kwargs), self._qat)
        if not has_operations(self):
            return super().forward(*args, **kwargs)
        args, kwargs = quantized_inputs(self, (args, kwargs))
        with inside(self):
            return super().forward(*args, **kwargs)

    def train(self, mode: bool = True) -> QatModel:
        """Switch between training and evaluation; frozen batch norms stay in eval mode."""
        super().train(mode)
        if mode and "_qat" in vars(self):
            self._qat.seen = None
            if self._qat.freeze_norms:
                keep_statistics(self)
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:  # noqa: ANN401  the pickle protocol
        """Pickle the class as what it is made of: classes that are made while a program runs have no name."""
        return (_empty_model, (self.float_class,), *super().__reduce_ex__(protocol)[2:])

    def __repr__(self) -> str:
        """The class, and how much is trained with quantizers; the modules are those of ``float_class``."""
        return f"<{type(self).__name__}: {counted(len(quantized_layers(self)), 'layer')} in training with quantizers>"

    def _repr_html_(self) -> str:
        """The summary in a notebook, as soon as there is one."""
        try:
            text = self.summary()
        except (AmctError, RuntimeError) as error:
            text = f"{self!r}\n{error}"
        return str(Markup("<pre>{}</pre>").format(text))

    # -- results -------------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> RetrainPlan:
        """How each layer is quantized."""
        return self._qat.plan

    def quantized(self, data: object = None, *, inputs: BatchInputs | None = None) -> QuantizedModel:
        """What was trained so far, as a quantized model: to run, compare, report or save.

        Args:
            data: Batches on which the tensors between layers are observed; None: the first batch of the last forward
                in eval mode, or of the data that the model was prepared with.
            inputs: Turns a batch into the model's inputs.

        Raises:
            TrainingError: The model was not trained long enough to know its ranges, or has diverged.
        """
        state = self._qat
        example, batches = state.seen or state.example, None
        if data is not None:
            batches = torch_batches(self, data, inputs)
            example = batches.first()
        if example is None:
            raise ArgumentError("data: a batch is needed to trace the model; give data, or run the model in eval mode")
        preparation = self.preparation(example, state.io)
        tensors = tensors_between_layers(self, preparation, [example] if batches is None else batches)
        layers = trained_layers(preparation, self, tensors)
        original = state.original
        kept = () if original is None else original.batches
        examples = [each for each in kept if preparation.any_batch_size or preparation.is_like_example(each)]
        found = QuantizedModel(preparation, layers, tensors, examples or [example], calibration=state.calibration)
        found.handed_in = original.kept if original is not None and examples else None
        return found

    def preparation(self, example: Arguments, io: IoOptions) -> TorchPreparation:
        """The folded model with the trained integers, as exports read it.

        Raises:
            TrainingError: The model was not trained long enough to know its ranges, or has diverged.
        """
        check_trained(self)
        trained: nn.Module = self
        if sparse_layers(self):
            trained = copy_model(self)
            make_plain(trained)
        plain = copy_model(trained)
        del plain._qat
        plain.__class__ = self.float_class
        as_float_model(plain)
        return prepare_trained(trained, plain, self._qat, example, io)

    @property
    def not_folded(self) -> tuple[Skip, ...]:
        """The batch norms that will not be folded, with the reasons."""
        return self._qat.not_folded

    def summary(self) -> str:
        """What is quantized, what will be folded, what stays float and why, and how the clips moved, as text."""
        text = self.quantized().summary()
        rows = [
            f"  {clips.layer}: {_range(clips.before)} -> {_range(clips.after)}"
            for clips in self._clips()
            if clips.before
        ]
        if self._qat.metric_before is not None:
            text += f"\n{self._qat.metric_before}"
        return "\n".join([text, "clips of activations, before training -> now:", *rows]) if rows else text

    @log.screen_only()
    def save(  # noqa: PLR0913  those of QuantizedModel.save, and the data
        self,
        path: str | os.PathLike[str],
        formats: Iterable[str] = DEFAULT_FORMATS,
        *,
        data: object = None,
        inputs: BatchInputs | None = None,
        placement: str = Placement.FAST.value,
        target: str | None = None,
        opset: int | None = None,
        batch_size: int | None = None,
        check: bool = True,
    ) -> list[Path]:
        """Write the trained model; arguments, files and errors are those of ``QuantizedModel.save``.

        ``data`` and ``inputs`` are those of ``quantized``. The default of ``target`` is the one that the model was
        prepared for, or "portable".
        """
        quantized = self.quantized(data, inputs=inputs)
        if target is None:
            target = Target.PORTABLE.value if self._qat.target == Target.EXACT8.value else self._qat.target
        options: dict[str, Any] = {"target": target, "opset": opset, "batch_size": batch_size, "check": check}
        return quantized.save(path, formats, placement=placement, **options)

    @log.screen_only()
    def report(
        self,
        path: str | os.PathLike[str],
        data: object = None,
        metric: Metric | None = None,
        *,
        losses: Sequence[float] = (),
        inputs: BatchInputs | None = None,
        files: Iterable[str | os.PathLike[str]] = (),
    ) -> Path:
        """Write an HTML report as ``QuantizedModel.report`` does, with the clips before and after and the losses.

        ``losses`` are those of the training steps or epochs, in order.
        """
        before, text = self._before(metric)
        training = TrainingContent(
            before=text, losses=tuple(float(loss) for loss in losses), clips=tuple(self._clips())
        )
        return self.quantized().report(path, data, metric, inputs=inputs, files=files, training=training, before=before)

    def _before(self, metric: Metric | None) -> tuple[Callable[[Arguments], ModelOutput] | float | None, str]:
        """How a report gets outputs and metric before training, and what it says of them."""
        runner, known = self._float_runner(), self._qat.metric_before
        if runner is not None:
            return runner, BEFORE
        if metric is None:
            return None, KEPT if self._qat.original is not None else ""
        if known is not None and known.name == metric_name(metric):
            return known.float_model, AT_PREPARATION.format(counted(known.batches, "batch"))
        logger.warning("%s", WITHOUT_QUANTIZERS)
        return None, WITHOUT_QUANTIZERS

    def _float_runner(self) -> Callable[[Arguments], ModelOutput] | None:
        """Runs the float model that was handed in, or the teacher if that is a copy of it; None: both are gone."""
        state = self._qat
        found = None if state.original is None else state.original.runner()
        if found is None and state.teacher and state.teaches_itself:
            return runner_of(state.teacher[0])
        return found

    def _clips(self) -> Iterator[TrainedClips]:
        for name, layer in quantized_layers(self).items():
            yield TrainedClips(layer=name, before=self._qat.start.get(name), after=layer.activation.clips)
        for quantizer in operation_quantizers(self):
            name = quantizer.layer
            yield TrainedClips(layer=name, before=self._qat.start.get(name), after=quantizer.clips)

    # -- training ------------------------------------------------------------------------------------------------------

    def recipe(
        self,
        data: object,
        *,
        epochs: int | None = None,
        steps_per_epoch: int | None = None,
        pace: float = 1.0,
        inputs: BatchInputs | None = None,
    ) -> Recipe:
        """Propose how to train: optimizer, rates, schedule and epochs as plain objects of torch, and a loss.

        Adam moves a parameter by about its rate in each step. Rates begin at 1/64 of a step of the grid of the layer:
        of a weight, of a clip; of a scale or the gamma of a batch norm what moves the largest weight by that much. All
        are halved while that gets further in a few steps on the first batch, on a copy, and then once more. The
        schedule is a cosine down to 0 over about 300 steps, 100 where all layers have 8 bits, but whole epochs. From
        here on the model trains without dropout, and its batch norms keep their statistics, unless ``prepare_qat`` was
        told otherwise.

        Args:
            data: The training data, of which the first batch and the length are looked at, or one batch, as a tensor or
                a tuple. Labels behind the inputs are found.
            epochs: How often to go through the data; None: as few as make 300 or 100 steps.
            steps_per_epoch: The number of batches, for data without a length.
            pace: Multiplies all rates.
            inputs: Turns a batch into the model's inputs, for batches in other forms.

        Raises:
            AmctError: The subclass tells whether data or a number are invalid.
        """
        return propose(self, data, epochs=epochs, steps_per_epoch=steps_per_epoch, pace=pace, inputs=inputs)

    def distillation_loss(self, inputs: object, outputs: object) -> Tensor:
        """How far outputs are from those of the teacher: a loss to add to, or to use in place of, the user's own.

        For scores ``[N, C]`` the Kullback-Leibler divergence of the softened probabilities, for other tensors the mean
        squared difference relative to the teacher's mean square; the sum over all output tensors.

        Args:
            inputs: What the model was called with: a tensor, a tuple of arguments, or a dict of keyword arguments.
            outputs: What it returned.

        Raises:
            TrainingError: The model has no teacher.
            ArgumentError: The teacher's outputs have another form.
        """
        if not self._qat.teacher:
            raise TrainingError("the model has no teacher; give prepare_qat teacher=float_model")
        found = [leaf for leaf in tensors_in(outputs) if leaf.is_floating_point()]
        pairs = zip(found, teacher_outputs(self, inputs, found), strict=True)
        return torch.stack([teacher_distance(own, target, self._qat.temperature) for own, target in pairs]).sum()


def _range(clips: tuple[float, float] | None) -> str:
    return "" if clips is None else f"[{clips[0]:.4g}, {clips[1]:.4g}]"


# -- classes -----------------------------------------------------------------------------------------------------------


@functools.cache
def _qat_class(model_class: type[nn.Module]) -> type[QatModel]:
    """The class of the trainable form of a class of models; its forward has the signature of the user's."""

    def forward(self: QatModel, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  the user's own forward
        return QatModel.forward(self, *args, **kwargs)

    members = {
        "float_class": model_class,
        "forward": functools.wraps(model_class.forward)(forward),
        "__doc__": model_class.__doc__,
    }
    made = types.new_class(
        f"Quantized{model_class.__name__}", (QatModel, model_class), {}, lambda ns: ns.update(members)
    )
    return cast("type[QatModel]", made)


def _empty_model(model_class: type[nn.Module]) -> QatModel:
    made = _qat_class(model_class)  # type: ignore[arg-type]  # torch's stubs hide that classes have a hash
    return made.__new__(made)


def as_qat_model(model: nn.Module, state: QatState) -> QatModel:
    """Make a model with quantized layers a trainable one, in place."""
    model.__class__ = _qat_class(type(model))  # type: ignore[arg-type]  # as above
    assert isinstance(model, QatModel)
    model._qat = state
    return model


def kept_batch(arguments: Arguments, state: QatState) -> Arguments | None:
    """A copy of the first samples of a batch, of all where their number may not vary; None if it is too large."""
    is_fixed = state.all_layers and not state.any_batch
    small = first_samples(arguments, most=None if is_fixed else MOST_SAMPLES)
    return copied(small) if batch_size(small)[1] <= _LARGEST_BYTES else None


def keep_statistics(model: nn.Module) -> None:
    """Let the batch norms of a model use their running statistics, whatever mode the model is in."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.training = False


def with_state(model: QatModel, **changes: Any) -> QatModel:  # noqa: ANN401  fields of QatState
    """The model, with other values in its state."""
    model._qat = replace(model._qat, **changes)
    return model
