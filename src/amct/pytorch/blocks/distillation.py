"""Distillation: groups of layers of a model in training learn to compute what they do in the float model.

Group after group in the order of the network, each on the batches of the user: the target is what the float group
computes, the input what the student computes in front of it, unless that is too far from what the float model does.
Only the parameters of one group move at a time. A group that ends with a larger error than it began with gets its
parameters back.
"""

from __future__ import annotations

import copy
import logging
import tempfile
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from amct import log
from amct.errors import ConfigError, TrainingError
from amct.pytorch.blocks.regions import RegionProgram
from amct.pytorch.capture.layer_types import BATCH_NORMS
from amct.pytorch.folding import Fused
from amct.pytorch.qat.layers import QuantizedLayer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from amct.model import Graph
    from amct.pipeline.blocks.regions import Constants, Region, Values
    from amct.pytorch.blocks.regions import NodeStep
    from amct.pytorch.capture.trace import Traced
    from amct.pytorch.layer_hooks import Arguments
    from amct.pytorch.qat.model import QatModel

logger = logging.getLogger(__name__)

CLIP_RATE, MOST_CLIP_RATE = 2e-3, 0.1
"""How far a step moves a clip, in parts of its range, and AMCT's own rate, which is the most."""
SCALE_RATE = 1e-4
_ACTIVATIONS = frozenset({"relu", "leaky_relu", "sigmoid", "tanh", "softmax"})
_TOO_FAR = 0.5
_MOST_BYTES = 2 << 30


# -- groups ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unit:
    """A layer with the batch norm and the activation behind it.

    Attributes:
        layer: The layer.
        nodes: The names of its nodes.
        following: The layer that alone reads what it computes; "" if none does.
    """

    layer: str
    nodes: tuple[str, ...]
    following: str


def units_of(traced: Traced, layers: Iterable[str]) -> dict[str, Unit]:
    """The units of a model, by layer in execution order."""
    if traced.graph is None:
        raise TrainingError(f"the model cannot be captured, so its groups are unknown: {traced.failure}")
    chosen = set(layers)
    return {name: _unit(traced.graph, name, chosen) for name in traced.layers if name in chosen}


def _unit(graph: Graph, layer: str, layers: set[str]) -> Unit:
    nodes = [graph[layer]]
    after = graph.sole_consumer(nodes[-1])
    if after is not None and after.op in BATCH_NORMS and after.attributes["calls"] == 1:
        nodes.append(after)
        after = graph.sole_consumer(after)
    if after is not None and after.op in _ACTIVATIONS and len(after.inputs) == 1:
        nodes.append(after)
        after = graph.sole_consumer(after)
    following = after.name if after is not None and after.name in layers else ""
    return Unit(layer, tuple(node.name for node in nodes), following)


def find_groups(
    units: Mapping[str, Unit], size: int, wanted: Sequence[Sequence[str]] = (), source: str = "config"
) -> list[list[str]]:
    """The groups: those that the user wants, and of all other layers ``size`` that read each other.

    Args:
        units: The units of the model.
        size: How many layers a group has.
        wanted: By group the names of its layers; the first and the last are enough.
        source: The config, for messages.

    Raises:
        ConfigError: A wanted group is no single path, or shares a layer with another one.
    """
    found: dict[str, list[str]] = {}
    taken: dict[str, str] = {}
    for names in wanted:
        inner = [name for name in names if name in units]
        group = _path(units, names, inner, source)
        for name in group:
            if name in taken:
                raise ConfigError(
                    f'{source}: distill_group: "{name}" is in the group that starts at "{taken[name]}" and in the one '
                    f'that starts at "{group[0]}". Let each layer be in one group.'
                )
            taken[name] = group[0]
        found[group[0]] = group
    for name in units:
        if name not in taken:
            group = [name]
            while len(group) < size and (after := units[group[-1]].following) and after not in taken:
                group.append(after)
            taken |= dict.fromkeys(group, name)
            found[name] = group
    return [found[name] for name in units if name in found]


def _path(units: Mapping[str, Unit], names: Sequence[str], inner: Sequence[str], source: str) -> list[str]:
    """The layers from the first to the last of a group."""
    if not inner or names[0] not in units:
        raise ConfigError(
            f'{source}: distill_group: "{names[0]}" is no Conv2d or Linear layer that is called once. A group starts '
            "and ends at such layers."
        )
    group = [inner[0]]
    while group[-1] != inner[-1]:
        after = units[group[-1]].following
        if not after:
            raise ConfigError(
                f'{source}: distill_group: there is no single path from "{inner[0]}" to "{inner[-1]}": what '
                f'"{group[-1]}" computes is read by something else than one Conv2d or Linear layer (behind a batch '
                "norm and an activation). End the group there."
            )
        group.append(after)
    return group


# -- learning ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DistillSettings:
    """How groups learn.

    Attributes:
        epochs: How often each group sees the data.
        rate: The learning rate of weights, biases and batch norms.
        loss: Of what a group computes and what it should compute.
        optimizer: Makes the optimizer of groups of parameters.
        on_disk: Whether what is kept of a batch lies in files.
    """

    epochs: int
    rate: float
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
    on_disk: bool = False


def distill_groups(
    teacher: nn.Module,
    student: QatModel,
    traced: Traced,
    groups: Sequence[Sequence[str]],
    batches: Sequence[Arguments],
    settings: DistillSettings,
) -> list[tuple[float, float]]:
    """Let the groups learn, one after the other; returns the error of each before and after.

    Args:
        teacher: The float model, in eval mode.
        student: The model with quantizers, whose clips are known.
        traced: The trace of the float model.
        groups: Their layers.
        batches: The data.
        settings: How they learn.

    Raises:
        TrainingError: A loss is not finite, or the model cannot be divided.
    """
    units = units_of(traced, {name for group in groups for name in group})
    norms = [node for unit in units.values() for node in unit.nodes[1:] if node in traced.module_types]
    program = RegionProgram(traced, Fused.unchanged(teacher, (), ""), [*traced.layers, *norms])
    steps = [[step for name in group for step in _steps(program, units[name])] for group in groups]
    order = program.between(steps)
    constants = program.constants(teacher), program.constants(student)
    modules = {name: student.get_submodule(name) for name in (*traced.layers, *norms)}
    errors = []
    was_training = student.training
    student.eval()
    with ExitStack() as stack:
        kept = _Kept(on_disk=settings.on_disk, stack=stack)
        for arguments in batches:
            kept.add(program.given(arguments))
        advance = stack.enter_context(log.bar("distillation", len(groups)))
        for place, (region, number) in enumerate(order):
            needed = {node for later, _ in order[place + 1 :] for node in later.inputs}
            runs = _Runs(program, region, constants, modules)
            if number is not None and _trained(runs.learned):
                advance(0, description=f"distillation {groups[number][0]}")
                errors.append(_learn(runs, kept, settings, groups[number][0]))
            if number is not None:
                advance()
            for index in range(len(kept)):
                kept.put(index, runs.both(*kept.get(index)), needed)
    student.train(was_training)
    return errors


def _steps(program: RegionProgram, unit: Unit) -> list[NodeStep]:
    chosen = set(unit.nodes)  # of a layer whose forward pads first, all that its module does
    return [step for step in program.steps if chosen & {step.layer, step.module, step.node.name}]


class _Runs:
    """One region in both models.

    Args:
        program: The program.
        region: The region.
        constants: What the program does not compute, of the float and of the quantized model.
        modules: The modules of the student.
    """

    def __init__(
        self,
        program: RegionProgram,
        region: Region,
        constants: tuple[Constants, Constants],
        modules: Mapping[str, nn.Module],
    ) -> None:
        self._program, self._region, self._modules = program, region, modules
        self._teacher, self._student = constants
        self.learned = [modules[name] for name in region.layers]

    def teacher(self, given: Sequence[Tensor]) -> list[Tensor]:
        """What the float model computes."""
        with torch.no_grad():
            return self._program.run(self._region, self._teacher, self._values(given))

    def student(self, given: Sequence[Tensor]) -> list[Tensor]:
        """What the student computes, with gradients if they are on."""
        return self._program.run(self._region, self._student, self._values(given), self._call)

    def _values(self, given: Sequence[Tensor]) -> Values:
        return dict(zip(self._region.inputs, given, strict=True))

    def _call(self, step: NodeStep, operation: Callable[..., Tensor], x: Tensor) -> Tensor:
        module: Any = self._modules[step.layer]
        if isinstance(module, QuantizedLayer):
            x, weight = module.quantized_input(x), module.quantized_weight()
            return operation(x, weight, module.bias) if step.reads_weight else operation(x)
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            result: Tensor = module(x)
            return result
        return operation(x, module.weight, module.bias) if step.reads_weight else operation(x)

    def given(self, exact: Values, own: Values) -> tuple[list[Tensor], list[Tensor]]:
        """What the float model and the student give the region."""
        nodes = self._region.inputs
        return [exact[node] for node in nodes], [own[node] for node in nodes]

    def both(self, exact: Values, own: Values) -> tuple[Values, Values]:
        """The values with what both models compute."""
        of_teacher, of_student = self.given(exact, own)
        with torch.no_grad():
            made = self.teacher(of_teacher), self.student(of_student)
        outputs = self._region.outputs
        return {**exact, **dict(zip(outputs, made[0], strict=True))}, {
            **own,
            **dict(zip(outputs, made[1], strict=True)),
        }


class _Kept:
    """What is computed so far, batch by batch, of both models: in memory, or in files of a folder that is removed."""

    def __init__(self, *, on_disk: bool, stack: ExitStack) -> None:
        self._held: list[tuple[Values, Values] | Path] = []
        self._stack = stack
        self._folder: Path | None = None
        self._nodes: dict[str, Any] = {}
        self._bytes: list[int] = []
        if on_disk:
            self._use_disk()

    def __len__(self) -> int:
        return len(self._held)

    def add(self, values: Values) -> None:
        """Add the inputs of a batch."""
        self._held.append(({}, {}))
        self._bytes.append(0)
        self._set(len(self._held) - 1, (dict(values), dict(values)))

    def get(self, index: int) -> tuple[Values, Values]:
        """The values of a batch: of the float model and of the student."""
        found = self._held[index]
        if not isinstance(found, Path):
            return found
        exact, own = torch.load(found, weights_only=True)
        return self._by_node(exact), self._by_node(own)

    def _by_node(self, values: Mapping[str, Any]) -> Values:
        return {self._nodes[name]: value for name, value in values.items()}

    def put(self, index: int, values: tuple[Values, Values], needed: set[Any]) -> None:
        """Replace the values of a batch by those of them that are needed."""
        exact, own = ({node: value for node, value in each.items() if node in needed} for each in values)
        self._set(index, (exact, own))

    def _set(self, index: int, values: tuple[Values, Values]) -> None:
        tensors = [value for each in values for value in each.values() if isinstance(value, Tensor)]
        self._bytes[index] = sum(each.nbytes for each in tensors)
        if self._folder is None and sum(self._bytes) > _MOST_BYTES:
            logger.info(
                "distillation keeps what it computes in files, because it takes more than %d MB", _MOST_BYTES >> 20
            )
            self._use_disk()
        self._held[index] = values if self._folder is None else self._written(index, values)

    def _use_disk(self) -> None:
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="amct_distill_")))
        for index, values in enumerate(self._held):
            if not isinstance(values, Path):
                self._held[index] = self._written(index, values)

    def _written(self, index: int, values: tuple[Values, Values]) -> Path:
        assert self._folder is not None
        path = self._folder / f"{index}.pt"
        self._nodes |= {node.name: node for each in values for node in each}
        torch.save([{node.name: value for node, value in each.items()} for each in values], path)
        return path


def _trained(modules: Sequence[nn.Module]) -> bool:
    """Whether a group has a layer with quantizers."""
    return any(isinstance(module, QuantizedLayer) for module in modules)


def _learn(runs: _Runs, kept: _Kept, settings: DistillSettings, name: str) -> tuple[float, float]:
    """Let one group learn; returns its error before and after."""
    modules = nn.ModuleList(runs.learned)
    before, start = _error(runs, kept, settings, name), copy.deepcopy(modules.state_dict())
    chosen = list(_parameters(runs.learned, settings.rate))
    optimizer = settings.optimizer(chosen)
    tensors = [each for group in chosen for each in group["params"]]
    for module in runs.learned:
        module.train(isinstance(module, QuantizedLayer))  # batch norms keep their statistics
    with _requiring(tensors), torch.enable_grad():
        for _ in range(settings.epochs):
            for index in range(len(kept)):
                exact, own = runs.given(*kept.get(index))
                wanted = runs.teacher(exact)
                found = runs.student([_near(*pair) for pair in zip(exact, own, strict=True)])
                loss = settings.loss(found[0], wanted[0])
                _check_finite(loss, name)
                for tensor, slope in zip(tensors, torch.autograd.grad(loss, tensors, allow_unused=True), strict=True):
                    tensor.grad = slope
                optimizer.step()
    modules.eval()
    after = _error(runs, kept, settings, name)
    if not after <= before:
        modules.load_state_dict(start)
        logger.info('group "%s": its error would be %g instead of %g, so it stays as it was', name, after, before)
        return before, before
    return before, after


def _near(exact: Tensor, own: Tensor) -> Tensor:
    """The student's value, or the float one where the student's is too far from it."""
    if not exact.is_floating_point():
        return own
    least = torch.minimum(exact.square().mean(), own.square().mean())
    return exact if bool((exact - own).square().mean() > _TOO_FAR * least) else own


def _error(runs: _Runs, kept: _Kept, settings: DistillSettings, name: str) -> float:
    total = 0.0
    with torch.no_grad():
        for index in range(len(kept)):
            exact, own = runs.given(*kept.get(index))
            loss = settings.loss(runs.student(own)[0], runs.teacher(exact)[0])
            total += _check_finite(loss, name)
    return total


def _check_finite(loss: Any, name: str) -> float:  # noqa: ANN401  what the user's loss returns
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TrainingError(f"loss: expected a tensor with one number, got {found}")
    value = float(loss.detach())
    if value - value != 0:
        raise TrainingError(
            f'group "{name}": the loss is {value}; look for NaN or huge values in the data, or lower the learning rate'
        )
    return value


def _parameters(modules: Sequence[nn.Module], rate: float) -> Iterator[dict[str, Any]]:
    """The parameters of a group with their learning rates; neither clips nor scales decay."""
    known: set[int] = set()
    weights: list[Tensor] = []
    scales: list[Tensor] = []
    for module in modules:
        weights += [
            each for name, each in module._parameters.items() if each is not None and name in ("weight", "bias")
        ]
        if not isinstance(module, QuantizedLayer):
            continue
        scales += [each for each in module.weight_quantizer.parameters() if id(each) not in known]
        quantizer = module.activation
        low, high = quantizer.clips
        clips = [each for each in quantizer.parameters() if id(each) not in known]
        known.update(map(id, clips))
        if clips:
            yield {"params": clips, "lr": min(MOST_CLIP_RATE, CLIP_RATE * (high - low)), "weight_decay": 0.0}
    if weights:
        yield {"params": weights, "lr": rate}
    if scales:
        yield {"params": scales, "lr": SCALE_RATE, "weight_decay": 0.0}


@contextmanager
def _requiring(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Let tensors have gradients; afterwards all is as before."""
    before = [each.requires_grad for each in tensors]
    for each in tensors:
        each.requires_grad = True
    try:
        yield
    finally:
        for each, flag in zip(tensors, before, strict=True):
            each.grad = None
            each.requires_grad = flag
