"""A network as regions that are run one after the other, each alone: residual blocks, else single layers.

A region ends where a single tensor leads on, so that what it computes depends on what it reads only. Neighbours of one
module with few layers are joined (the three convolutions of an inverted bottleneck without a sum), a region with many
layers is divided again. What a step is, and how it is run, a front door knows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from amct.numerics.integer import ConvolutionGeometry

Values = dict[Any, Any]
"""Tensors by what names them in a program."""

MOST_JOINED, MOST_LAYERS = 4, 12


@dataclass(frozen=True, eq=False, kw_only=True)
class Step:
    """One operation of a program.

    Attributes:
        given: The tensors that it reads.
        made: The tensors that it makes.
        layer: The quantized layer whose input it reads; "" for all else.
        index: The number of that input.
        reads_weight: Whether its operation takes an input, the layer's own weight, and a bias or None.
        is_layer: Whether it computes the layer, not only rounds one of its inputs.
        module: The path of the module that called it.
        size: The number of values that it makes of each sample, if that is known.
    """

    given: Sequence[Hashable]
    made: Sequence[Hashable]
    layer: str = ""
    index: int = 0
    reads_weight: bool = False
    is_layer: bool = False
    module: str = ""
    size: object = None


@dataclass(frozen=True, eq=False)
class Region:
    """Neighbouring operations.

    Attributes:
        steps: Them, in order.
        inputs: The tensors that they read and others made.
        outputs: The tensors that they make and others read, or that the model returns.
        shared: The inputs that other regions read, too.
    """

    steps: Sequence[Any]
    inputs: Sequence[Any]
    outputs: Sequence[Any]
    shared: Collection[Any] = ()

    @property
    def layers(self) -> list[str]:
        """The quantized layers."""
        return list(dict.fromkeys(step.layer for step in self.steps if step.layer))

    @property
    def name(self) -> str:
        """Its layers, for people."""
        names = self.layers or [self.steps[0].module or str(self.steps[0].made[0])]
        return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"


@dataclass(frozen=True, eq=False)
class Constants:
    """What a program does not compute of its inputs.

    Attributes:
        values: Parameters, buffers, and what is computed of them alone.
        biases: By layer: its bias, which it may have got when a batch norm was folded into it.
    """

    values: Values
    biases: Mapping[str, Tensor | None]


LayerCall = Callable[[Any, Callable[..., Tensor], Tensor], Tensor]
"""Called with a step that reads the input of a layer, its operation and this input, in place of the operation.

The operation takes an input and, if the step reads its own weight, also a weight and a bias.
"""


class Program(ABC):
    """A model in steps.

    Attributes:
        steps: What it computes of its inputs, in order.
        inputs: What is given.
        outputs: What it returns.
    """

    steps: list[Any]
    inputs: Sequence[Any]
    outputs: Sequence[Any]

    @abstractmethod
    def given(self, arguments: Any) -> Values:  # noqa: ANN401  the door's own
        """The inputs of the program."""

    @abstractmethod
    def run(self, region: Region, constants: Constants, given: Values, call: LayerCall | None = None) -> list[Any]:
        """What a region computes of its inputs; ``call`` is called for quantized layers, without it they are float."""

    @abstractmethod
    def is_by_sample(self, region: Region, constants: Constants, given: Values) -> bool:
        """Whether the first axis of all that a region reads and makes is that of the samples, of any number."""

    def geometry(self, step: Any) -> tuple[bool, ConvolutionGeometry | None]:  # noqa: ANN401, ARG002  the door's own
        """Whether a step is a plain 2-D convolution or product, and which convolution; by default it is not known."""
        return False, None

    def is_tensor(self, key: Any) -> bool:  # noqa: ANN401, ARG002  the door's own; everything, by default
        """Whether what a step makes is one tensor."""
        return True

    def regions(self, *, alone: bool = False) -> list[Region]:
        """The regions, in the order in which they are run; those that follow the last layer are part of the last.

        Args:
            alone: Whether each layer has a region of its own.
        """
        last = {key: place for place, step in enumerate(self.steps) for key in step.given}
        last |= dict.fromkeys(self.outputs, len(self.steps))
        parts: list[list[Step]] = [[]]
        alive = set(self.inputs)
        for place, step in enumerate(self.steps):
            parts[-1].append(step)
            alive = {key for key in (*alive, *step.made) if last.get(key, -1) > place}
            if len(alive) == 1 and all(map(self.is_tensor, alive)):
                parts.append([])
        joined = parts if alone else _joined(parts)
        divided = [piece for part in joined if part for piece in _divided(part, 1 if alone else MOST_LAYERS)]
        return [self._region(part) for part in divided]

    def between(self, chosen: Sequence[Collection[Step]]) -> list[tuple[Region, int | None]]:
        """Regions for chosen steps and all that lies between them, in an order in which they can be run.

        Args:
            chosen: For each wanted region its steps, none of which reads a step behind its first one but its own.

        Returns:
            The regions, each with its number among the chosen ones; None: it lies between.
        """
        owner = {step: number for number, steps in enumerate(chosen) for step in steps}
        parts: list[tuple[list[Step], int | None]] = []
        begun: dict[int, list[Step]] = {}
        for step in self.steps:
            number = owner.get(step)
            if number is None:
                if not parts or parts[-1][1] is not None:
                    parts.append(([], None))
                parts[-1][0].append(step)
            elif number in begun:
                begun[number].append(step)
            else:
                begun[number] = [step]
                parts.append((begun[number], number))
        return [(self._region(steps), number) for steps, number in parts]

    def _region(self, steps: list[Step]) -> Region:
        made = {key for step in steps for key in step.made}
        changing = {*self.inputs, *(key for step in self.steps for key in step.made)}
        read = dict.fromkeys(key for step in steps for key in step.given)
        inputs = [key for key in read if key in changing and key not in made]
        own = set(steps)
        others = {key for step in self.steps if step not in own for key in step.given} | {*self.outputs}
        return Region(
            steps=steps,
            inputs=inputs,
            outputs=[key for step in steps for key in step.made if key in others],
            shared=others.intersection(inputs),
        )


@dataclass(frozen=True, eq=False)
class Parts:
    """A folded model that can be run in parts.

    Attributes:
        program: Its parts.
        exact: The parameters of the float model.
        rounded: Those for layers that do not read their weight as it is.
    """

    program: Program
    exact: Constants
    rounded: Constants


def _count(part: Sequence[Step]) -> int:
    return sum(1 for step in part if step.is_layer)


def _parent(part: Sequence[Step]) -> str:
    """The module that calls the layers of a part; its only layer's own parent."""
    paths = [step.module.split(".")[:-1] for step in part if step.is_layer]
    same = [each[0] for each in zip(*paths, strict=False) if len(set(each)) == 1]
    return ".".join(same)


def _joined(parts: list[list[Step]]) -> list[list[Step]]:
    """Join each part without layers with a neighbour, and neighbours of one module that have few layers.

    What keeps the number of values, such as an activation, belongs to the part before, a pooling to the one behind.
    """
    found: list[list[Step]] = []
    waiting: list[Step] = []
    for part in filter(None, parts):
        if not _count(part) and found and not waiting and part[-1].size == found[-1][-1].size:
            found[-1] += part
        elif not _count(part):
            waiting += part
        else:
            found.append([*waiting, *part])
            waiting = []
            if len(found) > 1 and _belong_together(*found[-2:]):
                found[-2:] = [found[-2] + found[-1]]
    if waiting:
        found[-1:] = [[*(found[-1] if found else []), *waiting]]
    return found


def _belong_together(first: list[Step], second: list[Step]) -> bool:
    parent = _parent(first)
    return parent != "" and parent == _parent(second) and _count(first) + _count(second) <= MOST_JOINED


def _divided(part: list[Step], most: int) -> list[list[Step]]:
    """Divide a part with many layers in front of each of them."""
    if _count(part) <= most:
        return [part]
    found: list[list[Step]] = [[]]
    for step in part:
        if step.is_layer and _count(found[-1]):
            found.append([])
        found[-1].append(step)
    return found
