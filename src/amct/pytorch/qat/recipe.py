"""How to train a model with quantizers, proposed from one batch: optimizer, rates, schedule, epochs, and a loss.

Rates are measured in steps of the grids. What quantization has broken can be mended by choosing other integers near
those of the start, so no parameter has to go further than a few steps of its grid, however many bits it has, whatever
its values are. Adam moves a parameter by about its rate in each step: the rate is a share of the step of the grid.
"""

from __future__ import annotations

import copy
import logging
import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from amct.errors import ArgumentError, TrainingError
from amct.export.check.batch import batch_size
from amct.numerics.training.losses import as_strong, balanced, class_rows, teacher_distance
from amct.printable import counted
from amct.pytorch.inputs import tensors_in, torch_batches
from amct.pytorch.qat.layers import QuantizedCall, quantized_layers, trained_parts
from amct.pytorch.qat.operations import operation_quantizers
from amct.pytorch.user_model import copy_in_its_mode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from amct.pipeline.batches import BatchInputs
    from amct.pytorch.layer_hooks import Arguments
    from amct.pytorch.qat.layers import QuantizedLayer
    from amct.pytorch.qat.model import QatModel
    from amct.pytorch.qat.quantizers import ActivationQuantizer

logger = logging.getLogger(__name__)

SHARE = 1 / 64
"""Of a step of the grid: how far a parameter moves in one step of the optimizer, at the beginning."""
FEW_BITS = 8
_STEPS_FEW_BITS, _STEPS = 300, 100
_TRIALS, _TRIED_STEPS = 7, 8
_SMALL_CHANGE = 0.01
_SURE = 3
"""Standard errors."""
_UNKNOWN = "other parameters"
_KINDS = ("weights", "weight scales", "clips", "biases", "norms", _UNKNOWN)


@dataclass(eq=False)
class Recipe:
    """What ``QatModel.recipe`` proposes: plain objects of torch, to be used in the user's own loop or changed.

    Attributes:
        model: The model to train.
        optimizer: With a group of parameters for each kind and layer; "name" of a group tells it.
        schedule: To be stepped once for each step of the optimizer.
        epochs: How often to go through the data.
        steps_per_epoch: The number of batches of an epoch.
        pace: What all rates are multiplied by.
        notes: How the choices came about.
    """

    model: QatModel
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    epochs: int
    steps_per_epoch: int
    pace: float
    notes: tuple[str, ...] = ()
    _progress: _Progress = field(default_factory=lambda: _Progress())

    def loss(
        self, inputs: object, outputs: object, labels: Tensor | None = None, *, own: Tensor | None = None
    ) -> Tensor:
        """The loss of a batch, which balances teacher and labels by itself.

        With p the probability that the teacher gives the label of a sample: p · T² · KL(teacher, model) + (1 - p) ·
        cross-entropy, the mean over the samples. Without labels, and for outputs they do not belong to, it is
        ``distillation_loss``; without a teacher the cross-entropy.

        Args:
            inputs: What the model was called with: a tensor, a tuple of arguments, or a dict of keyword arguments.
            outputs: What it returned.
            labels: Classes: ``[N]`` for scores ``[N, C]``, ``[N, H, W]`` for ``[N, C, H, W]``, ``[N, L]`` for ``[N, L,
                C]``; negative ones are left out. Or the share of each class, in the form of the scores.
            own: In place of labels: the loss of a task of another kind. Beside a teacher it is scaled down where it
                would pull at the outputs harder than the teacher does.

        Raises:
            TrainingError: There is neither a teacher nor labels nor a loss.
            ArgumentError: The labels belong to no output, or the teacher's outputs have another form.
        """
        value = _loss(self.model, inputs, outputs, labels, own)
        if self.model.training and torch.is_grad_enabled():
            self._progress.add_loss(value.detach(), self)
        return value

    def epoch_ended(self, metric: float, *, higher_is_better: bool = True) -> bool:
        """Tell what an epoch has reached, or, before the first step, where training starts.

        After the last epoch the model goes back to the best of what was told, so that training does not end worse than
        it began. A copy of the state of that epoch is kept.

        Args:
            metric: Of the model in eval mode, such as its accuracy, on data that it does not learn from.
            higher_is_better: Whether more is better.

        Returns:
            Whether it is as good as at the start, and has kept half of what was gained; the first time that it is not,
            a warning says what to do.
        """
        return self._progress.add_metric(float(metric), self, 1 if higher_is_better else -1)

    def __str__(self) -> str:
        """What was chosen and why, for people."""
        rates = defaultdict(list)
        for group in self.optimizer.param_groups:
            rates[group["name"].partition(" of ")[0]].append(group["initial_lr"])
        rows = [
            f"  {kind + ':':<18}{_between(rates[kind])} in {counted(len(rates[kind]), 'group')}"
            for kind in _KINDS
            if kind in rates
        ]
        optimizer, schedule = type(self.optimizer).__name__, type(self.schedule).__name__
        steps = self.epochs * self.steps_per_epoch
        head = f"{counted(self.epochs, 'epoch')} of {counted(self.steps_per_epoch, 'step')}"
        return "\n".join(
            [
                f"{head}: {optimizer}, {schedule} over {counted(steps, 'step')}",
                "rates at the beginning:",
                *rows,
                *self.notes,
            ]
        )

    __repr__ = __str__


def propose(
    model: QatModel,
    data: object,
    *,
    epochs: int | None,
    steps_per_epoch: int | None,
    pace: float,
    inputs: BatchInputs | None,
) -> Recipe:
    """A recipe for a model; arguments and errors are those of ``QatModel.recipe``."""
    for name, number in (("epochs", epochs), ("steps_per_epoch", steps_per_epoch), ("pace", pace)):
        if number is not None and not 0 < number < math.inf:
            raise ArgumentError(f"{name}: expected a number above 0, got {number!r}")
    for layer in quantized_layers(model).values():
        if not layer.activation.has_clips():
            raise TrainingError(
                f'layer "{layer.activation.layer}": the range of its input is not known yet, which rates are measured '
                "by; run the first batches in train mode before"
            )
    batches = torch_batches(model, [data] if isinstance(data, tuple) else data, inputs)
    single = isinstance(data, (Tensor, tuple))
    wanted = _STEPS_FEW_BITS if _has_few_bits(model) else _STEPS
    per_epoch = steps_per_epoch or (None if single else batches.length) or wanted
    epochs = epochs or max(1, round(wanted / per_epoch))
    notes = []
    if single and steps_per_epoch is None:
        notes.append(f"  {counted(wanted, 'step')} are enough; a DataLoader or steps_per_epoch tells the epochs")
    notes += [_settle_norms(model), _without_dropout(model)]
    original, arguments = next(batches.with_originals())
    tried, note = _tried(model, arguments, _labels_of(original, arguments), pace)
    notes.append(f"  a rate is 1/{1 / (SHARE * tried):.3g} of a step of the grid of its layer")
    optimizer = _optimizer(model, tried)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * per_epoch)
    return Recipe(model, optimizer, schedule, epochs, per_epoch, tried, (*filter(None, notes), note))


# -- rates -------------------------------------------------------------------------------------------------------------


def _has_few_bits(model: QatModel) -> bool:
    return any(
        min(layer.weight_quantizer.bits + 1, layer.activation.bits) < FEW_BITS
        for layer in quantized_layers(model).values()
    )


def _settle_norms(model: QatModel) -> str:
    """The statistics of single batches differ more from the model's than what quantization does."""
    if not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        return ""
    state = model._qat
    if state.freeze_norms is None:
        state.freeze_norms = True
        model.train(model.training)
    return f"  batch norms {'keep their statistics' if state.freeze_norms else 'go on measuring their statistics'}"


def _without_dropout(model: QatModel) -> str:
    """In so few steps nothing is learned by heart, and what dropout changes is more than what quantization does."""
    chosen = [each for each in model.modules() if isinstance(each, nn.modules.dropout._DropoutNd) and each.p]
    for module in chosen:
        module.p = 0.0
    return f"  dropout is off (p = 0 in {counted(len(chosen), 'module')})" if chosen else ""


def _optimizer(model: QatModel, pace: float) -> torch.optim.Optimizer:
    groups = [
        {"params": [parameter], "lr": SHARE * pace * step, "name": name} for name, parameter, step in _steps(model)
    ]
    return torch.optim.Adam(groups)


def _steps(model: QatModel) -> Iterator[tuple[str, nn.Parameter, float]]:
    """Every parameter that is trained, with its kind and layer, and what is for it a step of the grid."""
    known: dict[nn.Parameter, tuple[str, float]] = {}
    for name, parameter, step in (*_steps_of_layers(model), *_steps_of_modules(model)):
        if isinstance(parameter, nn.Parameter) and step > 0:
            before = known.setdefault(parameter, (name, step))
            if not name.startswith(_UNKNOWN):
                known[parameter] = before[0], min(step, before[1])
    smallest = min((step for _, step in known.values()), default=1.0)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found, step = known.get(parameter, (f"{_UNKNOWN} of {name}", smallest))
            yield found, parameter, step


def _steps_of_layers(model: QatModel) -> Iterator[tuple[str, object, float]]:
    for name, layer in quantized_layers(model).items():
        for parameter, kind, step in _layer_steps(layer):
            yield f"{kind} of {name}", parameter, step
    for quantizer in operation_quantizers(model):
        for clip in quantizer.parameters():
            yield f"clips of {quantizer.layer}", clip, _clip_step(quantizer)


def _steps_of_modules(model: QatModel) -> Iterator[tuple[str, object, float]]:
    """Parameters of modules without quantizers: as the gamma of a batch norm, by the largest mean of the module."""
    edge = 2.0 ** (min(layer.weight_quantizer.bits for layer in quantized_layers(model).values()) - 1)
    owners = {parameter for layer in quantized_layers(model).values() for parameter in layer.parameters()}
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        size = max((each.detach().abs().mean().item() for each in own), default=0.0)
        yield from ((f"{_UNKNOWN} of {name}", each, size / edge) for each in own if each not in owners)


def _layer_steps(layer: QuantizedLayer) -> Iterator[tuple[object, str, float]]:
    """The parameters of a layer, their kinds, and their steps.

    A scale moves the outermost integers by a step when it changes by a 2^(bits-1)-th of itself, and so does the gamma
    of a batch norm behind the layer. A bias has the step of one weight times the largest input.
    """
    activation, reach = layer.activation, max(map(abs, layer.activation.clips))
    parts = dict(zip(("weight_quantizer", "state_weight_quantizer"), trained_parts(layer), strict=False))
    steps = []
    for name, part in parts.items():
        quantizer = getattr(layer, name)
        step, edge = quantizer.scales(part.tensor).float().mean().item(), 2.0 ** (quantizer.bits - 1)
        steps.append(step)
        yield quantizer._parameters.get("scale"), "weight scales", step / edge
        if quantizer.norm is not None:
            gamma = quantizer.norm.weight
            size = 1.0 if gamma is None else gamma.detach().abs().mean().item()
            for parameter in quantizer.norm.parameters(recurse=False):
                yield parameter, "norms", size / edge
    if isinstance(layer, QuantizedCall):
        yield getattr(layer._holder[0], layer.source.parameter.rpartition(".")[2]), "weights", min(steps)
    for name, parameter in layer.named_parameters(recurse=False):
        if "bias" in name:
            yield parameter, "biases", min(steps) * reach
        else:
            yield parameter, "weights", min(steps)
    for clip in activation.parameters(recurse=False):
        yield clip, "clips", _clip_step(activation)


def _clip_step(quantizer: ActivationQuantizer) -> float:
    low, high = quantizer.clips
    return (high - low) / float(2**quantizer.bits - 1)


def _between(rates: list[float]) -> str:
    low, high = min(rates), max(rates)
    return f"{low:.2g}" if high <= 1.01 * low else f"{low:.2g} to {high:.2g}"


# -- the batch ---------------------------------------------------------------------------------------------------------


def _labels_of(original: object, arguments: Arguments) -> Tensor | None:
    """The labels at the end of a batch, if its form tells them."""
    if not isinstance(original, (tuple, list)) or len(original) < 2 or isinstance(original[-1], dict):
        return None
    last = torch.as_tensor(original[-1]) if hasattr(original[-1], "shape") else None
    if last is None or len(original) <= len(arguments[0]) or last.is_floating_point():
        return None
    return last


def _tried(model: QatModel, arguments: Arguments, labels: Tensor | None, pace: float) -> tuple[float, str]:
    """Half of the pace that gets furthest: steps on one half of the batch, judged by the other; on copies.

    A step of Adam moves all weights of an output together, which errors of rounding do not do: it can do harm long
    before it is a step of the grid. A run is longer than the trial, and its batches differ, hence the half.
    """
    if labels is not None:
        labels = labels.to(next(model.parameters()).device)
    train, test = _halves(model, (arguments, labels))
    best: tuple[float, tuple[float, float]] | None = None
    for _ in range(_TRIALS):
        try:
            losses = _losses_of_trial(model, train, test, pace)
        except (TrainingError, ArgumentError):
            return pace, "  not tried on the batch: without a teacher or labels it has no loss"
        if best is not None and losses[1] >= best[1][1] and math.isfinite(best[1][1]):
            break
        best = pace, losses
        pace /= 2
    assert best is not None
    pace, (before, after) = best
    steps = counted(_TRIED_STEPS, "step")
    told = f"  {steps} on half of this batch changed the loss of the other half from {before:.4g} to {after:.4g}"
    return pace / 2, f"{told}; rates are half of those that got furthest"


def _halves(model: QatModel, batch: tuple[Arguments, Tensor | None]) -> list[tuple[Arguments, Tensor | None]]:
    """The samples of a batch in two parts; both are all of it if the model cannot run on a part."""
    size = batch_size(batch[0])[0]

    def part(which: slice) -> tuple[Arguments, Tensor | None]:
        def cut(tensor: Tensor) -> Tensor:
            return tensor[which] if tensor.ndim and tensor.shape[0] == size else tensor

        found: tuple[Arguments, Tensor | None] = pytree.tree_map_only(Tensor, cut, batch)
        return found

    parts = [part(slice(size // 2)), part(slice(size // 2, None))]
    trial = copy_in_its_mode(model).train()
    try:
        with torch.random.fork_rng(), torch.no_grad():
            for (args, kwargs), _ in parts if size > 1 else ():
                trial(*args, **kwargs)
    except Exception:  # noqa: BLE001  whatever the user's forward raises on another size
        return [batch, batch]
    return parts if size > 1 else [batch, batch]


def _losses_of_trial(
    model: QatModel, train: tuple[Arguments, Tensor | None], test: tuple[Arguments, Tensor | None], pace: float
) -> tuple[float, float]:
    """The loss of ``test`` before and after some steps on ``train``; infinite where they have spoilt the model."""
    trial = cast("QatModel", copy_in_its_mode(model).train())
    optimizer = _optimizer(trial, pace)

    def loss_of(batch: tuple[Arguments, Tensor | None]) -> Tensor:
        (args, kwargs), labels = batch
        torch.manual_seed(0)  # what is random in a forward is the same in each
        return _loss(trial, kwargs or args, trial(*args, **kwargs), labels, None)

    with torch.random.fork_rng():
        with torch.no_grad():
            before = loss_of(test).item()
        try:
            for _ in range(_TRIED_STEPS):
                with torch.enable_grad():
                    optimizer.zero_grad()
                    loss_of(train).backward()  # type: ignore[no-untyped-call]  # torch's own
                optimizer.step()
            with torch.no_grad():
                after = loss_of(test).item()
        except TrainingError:  # clips that are not finite any more
            return before, math.inf
    return before, after if math.isfinite(after) else math.inf


def teacher_outputs(model: QatModel, inputs: object, found: list[Tensor]) -> list[Tensor]:
    """What the teacher returns for the inputs of a forward, beside the model's own floating-point outputs.

    Raises:
        ArgumentError: They have another form.
    """
    teacher = model._qat.teacher[0]
    device = next(iter(model.parameters())).device
    if next(iter(teacher.parameters())).device != device:
        teacher.to(device)
    with torch.no_grad():
        args = inputs if isinstance(inputs, tuple) else () if isinstance(inputs, dict) else (inputs,)
        expected = teacher(*args, **(inputs if isinstance(inputs, dict) else {}))
    wanted = [leaf for leaf in tensors_in(expected) if leaf.is_floating_point()]
    shapes = [tuple(tensor.shape) for tensor in found], [tuple(tensor.shape) for tensor in wanted]
    if not found or shapes[0] != shapes[1]:
        raise ArgumentError(f"outputs: expected tensors like the teacher's, {shapes[1]}, got {shapes[0]}")
    return wanted


def _loss(model: QatModel, inputs: object, outputs: object, labels: Tensor | None, own: Tensor | None) -> Tensor:
    """The loss as ``Recipe.loss`` tells it."""
    state = model._qat
    found = [leaf for leaf in tensors_in(outputs) if leaf.is_floating_point()]
    if not state.teacher and labels is None and own is None:
        raise TrainingError(
            "there is nothing to learn from: give the loss labels or own, or give prepare_qat teacher=float_model"
        )
    wanted = teacher_outputs(model, inputs, found) if state.teacher else [None] * len(found)
    parts, to_label = [], labels
    for output, target in zip(found, wanted, strict=True):
        rows = None if to_label is None else class_rows(output, to_label)
        if rows is not None and to_label is not None:
            rows_of_target = None if target is None else class_rows(target, to_label)
            parts.append(balanced(rows[0], rows_of_target and rows_of_target[0], rows[1], state.temperature))
            to_label = None
        elif target is not None:
            parts.append(teacher_distance(output, target, state.temperature))
    if to_label is not None:
        shapes = ", ".join(str(list(output.shape)) for output in found)
        raise ArgumentError(
            f"labels: {list(to_label.shape)} of {to_label.dtype} belong to no output; the outputs are {shapes}. Give "
            "one class for each row of scores, or your own loss as own="
        )
    if own is not None:
        return torch.stack([*parts, as_strong(own, torch.stack(parts).sum(), found)]).sum() if parts else own
    return torch.stack(parts).sum()


# -- whether it gets better --------------------------------------------------------------------------------------------


class _Progress:
    """Sees the losses of the steps and the metrics of the epochs; says once that a run gets worse."""

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self._epochs = 0
        self._metrics: list[float] = []
        self._best: dict[str, Any] = {}
        self._said = False

    def add_loss(self, loss: Tensor, recipe: Recipe) -> None:
        """At the end of an epoch of losses, compare its last quarter with its first."""
        self._losses.append(loss)
        if len(self._losses) < recipe.steps_per_epoch:
            return
        self._epochs += 1
        values = torch.stack(self._losses).double().cpu()
        self._losses = []
        quarter = len(values) // 4
        if quarter < 2:
            return
        first, last = values[:quarter], values[-quarter:]
        noise = ((first.var() + last.var()) / quarter).sqrt().item()
        if not last.mean().item() <= first.mean().item() + _SURE * noise:
            self._say(f"the loss rose from {first.mean():.4g} to {last.mean():.4g} in epoch {self._epochs}", recipe)

    def add_metric(self, metric: float, recipe: Recipe, sign: int) -> bool:
        """Compare with the start, and with the best so far; a change of less than 1 % is none."""
        seen = self._metrics
        if not seen or sign * metric > max(sign * each for each in seen):
            self._best = copy.deepcopy(recipe.model.state_dict())
        seen.append(metric)
        gains = [sign * (each - seen[0]) for each in seen]
        if recipe.schedule.last_epoch >= recipe.epochs * recipe.steps_per_epoch and not gains[-1] >= max(gains):
            recipe.model.load_state_dict(self._best)
            best = seen[0] + sign * max(gains)
            logger.info("the metric is %.4g in the end: the model goes back to its best, %.4g", metric, best)
        least = _SMALL_CHANGE * abs(seen[0])
        if gains[-1] >= -least and gains[-1] >= max(gains) / 2 - least:
            return True
        self._say(f"the metric went from {seen[-2]:.4g} to {metric:.4g} in an epoch, {seen[0]:.4g} at first", recipe)
        return False

    def _say(self, what: str, recipe: Recipe) -> None:
        if self._said:
            return
        self._said = True
        logger.warning(
            "%s: training does harm. Begin anew (prepare_qat, or a checkpoint) with smaller steps: "
            "recipe(..., pace=%g); a teacher helps too: prepare_qat(..., teacher=float_model)",
            what,
            recipe.pace / 4,
        )
