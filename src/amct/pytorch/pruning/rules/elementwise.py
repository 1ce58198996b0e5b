"""Rules of operations that leave every element at its place: arithmetic, activations, copies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amct.pytorch.pruning.rules.registry import Flow, argument, positive, rule

if TYPE_CHECKING:
    from amct.pytorch.capture.program_reader import Operation
    from amct.pytorch.pruning.channel_sets import Axes, Axis


@rule("copy", "divide", "floor_divide", "hardswish", "log_sigmoid", "multiply", "subtract", "true_divide")
def broadcast(flow: Flow, operation: Operation) -> Axes:
    """Operands of any shapes, broadcast against each other: axes of equal size are coupled.

    It is the rule of every operation that torch marks as pointwise, and of those that it forgot.
    """
    operands = [value for value in operation.operands if value.shape is not None]
    result = operation.results[0].shape
    assert result is not None
    found: list[Axis] = []
    for back in range(len(result), 0, -1):
        size = result[-back]
        facing = [value for value in operands if len(value.shape or ()) >= back]
        whole = [flow.of(value)[-back] for value in facing if value.shape is not None and value.shape[-back] == size]
        found.append(flow.join(whole, operation) if whole else None)
    return tuple(found)


@rule(
    "alias", "alpha_dropout", "clone", "contiguous", "detach", "dropout", "empty_like", "feature_dropout", "full_like",
    "lift_fresh_copy", "native_dropout", "ones_like", "rand_like", "randn_like", "rrelu", "to", "type_as", "zeros_like",
    "_to_copy", "dropout2d", "requires_grad",
)  # fmt: skip
def same(flow: Flow, operation: Operation) -> Axes:
    """The result has the channels of the first operand."""
    return flow.of(operation.operands[0])


@rule("new_empty", "new_full", "new_ones", "new_zeros")
def new(flow: Flow, operation: Operation) -> Axes:
    """A tensor of a size of its own."""
    del flow
    return (None,) * len(operation.results[0].shape or ())


@rule("prelu")
def prelu(flow: Flow, operation: Operation) -> Axes:
    """A slope for all channels, or one for each of axis 1."""
    axes = list(flow.of(operation.operands[0]))
    slopes = operation.operands[1]
    if slopes.shape and slopes.shape[0] != 1:
        axes[1] = flow.join([axes[1], flow.of(slopes)[0]], operation)
        flow.normalizes(operation, axes[1], slopes.parameter)
    return tuple(axes)


@rule("softmax", "log_softmax", "_softmax", "_log_softmax", "softmin", "cumsum", "cumprod", "normalize")
def along_axis(flow: Flow, operation: Operation) -> Axes:
    """Every value depends on all others along one axis, which is kept."""
    axes = list(flow.of(operation.operands[0]))
    axis = positive(argument(operation, 1, -1), len(axes))
    flow.keep([axes[axis]], operation, "mixes the channels")
    axes[axis] = None
    return tuple(axes)


@rule("glu")
def glu(flow: Flow, operation: Operation) -> Axes:
    """One half of the channels is multiplied by the sigmoid of the other half."""
    axes = list(flow.of(operation.operands[0]))
    axis = positive(argument(operation, 1, -1), len(axes))
    labels = axes[axis]
    if labels is not None:
        first, second = labels[: len(labels) // 2], labels[len(labels) // 2 :]
        axes[axis] = flow.join([first, second], operation)
    return tuple(axes)
