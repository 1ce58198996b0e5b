"""Finds what a forward does that a file cannot do in the same way: it draws random numbers, or keeps a state."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import fx

from amct.pytorch.capture.program_reader import place_in_code

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.export import ExportedProgram

_RANDOM = frozenset(
    {
        "bernoulli", "exponential", "geometric", "multinomial", "normal", "poisson", "rand", "rand_like", "randint",
        "randint_like", "randn", "randn_like", "randperm", "uniform",
    }
)  # fmt: skip
"""Operators that draw numbers; dropout draws none in eval mode."""


def side_effects(program: ExportedProgram) -> Iterator[str]:
    """What the user should know of a model before its outputs are compared with those of a file."""
    nodes = [node for node in program.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    drawn = next((node for node in nodes if _operator(node).removesuffix("_") in _RANDOM), None)
    if drawn is not None:
        yield (
            f"the forward draws random numbers ({_operator(drawn)}{_place(drawn)}), so simulation and files differ "
            "from run to run; make these numbers an input of the model"
        )
    buffers = program.graph_signature.inputs_to_buffers
    writes = {buffers[base.name]: node for node in nodes for base in _written(node) if base.name in buffers}
    for name, node in writes.items():
        yield (
            f'the forward writes to the buffer "{name}"{_place(node)}, but a file keeps nothing from one run to the '
            "next: each run starts with the value of now; make the buffer an input and an output of the model"
        )


def _operator(node: fx.Node) -> str:
    assert isinstance(node.target, torch._ops.OpOverload)
    return node.target._schema.name.partition("::")[2]


def _place(node: fx.Node) -> str:
    place = place_in_code(node)
    return f" at {place}" if place else ""


def _written(node: fx.Node) -> Iterator[fx.Node]:
    """The tensors of which an operation writes a part."""
    assert isinstance(node.target, torch._ops.OpOverload)
    for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
        if isinstance(value, fx.Node) and argument.alias_info is not None and argument.alias_info.is_write:
            yield _base(value)


def _base(node: fx.Node) -> fx.Node:
    """The tensor of which a tensor is a view, or that it is after a write."""
    while isinstance(node.target, torch._ops.OpOverload) and node.args and isinstance(node.args[0], fx.Node):
        if node.target._schema.arguments[0].alias_info is None:
            return node
        node = node.args[0]
    return node
