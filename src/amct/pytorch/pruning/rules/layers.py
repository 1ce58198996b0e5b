"""Rules of operations with weights, of normalizations, and of products of activations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from torch import nn

from amct.pytorch.pruning.rules.registry import Flow, argument, rule

if TYPE_CHECKING:
    from amct.pytorch.capture.program_reader import Operation, Value
    from amct.pytorch.pruning.channel_sets import Axes, Axis, Labels

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
MANY_GROUPS = 8
"""A convolution with so many groups can lose some of them and keep about the fraction of channels that is wanted."""
_SPATIAL_MIXING = "mixes the positions of this axis"


@rule("conv1d", "conv2d", "conv3d")
def convolution(flow: Flow, operation: Operation) -> Axes:
    """A convolution with any number of groups; its filters make the output channels."""
    given, weight, bias = operation.operand(0), operation.operand(1), operation.operand(2)
    assert given is not None
    assert weight is not None
    groups = int(argument(operation, 6, 1))
    return _convolved(flow, operation, (given, weight, bias), groups, transposed=False)


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def transposed_convolution(flow: Flow, operation: Operation) -> Axes:
    """A transposed convolution; its weight has the input channels first."""
    given, weight, bias = operation.operand(0), operation.operand(1), operation.operand(2)
    assert given is not None
    assert weight is not None
    groups = int(argument(operation, 6, 1))
    return _convolved(flow, operation, (given, weight, bias), groups, transposed=True)


def _convolved(
    flow: Flow,
    operation: Operation,
    tensors: tuple[Value, Value, Value | None],
    groups: int,
    *,
    transposed: bool,
) -> Axes:
    given, weight, bias = tensors
    assert given.shape is not None
    assert weight.shape is not None
    spatial = len(weight.shape) - 2
    channel = len(given.shape) - spatial - 1
    input_axes, weight_axes = list(flow.of(given)), flow.of(weight)
    flow.keep(input_axes[channel + 1 :], operation, _SPATIAL_MIXING)
    flow.keep(weight_axes[2:], operation, _SPATIAL_MIXING)
    inputs = flow.labelled(input_axes[channel], int(given.shape[channel] or 0))
    if groups == 1:
        in_axis, out_axis = (0, 1) if transposed else (1, 0)
        flow.join([inputs, weight_axes[in_axis]], operation)
        outputs = flow.labelled(weight_axes[out_axis], int(weight.shape[out_axis] or 0))
    else:
        outputs = _grouped(flow, operation, inputs, weight_axes, groups, transposed=transposed)
    if bias is not None:
        flow.join([outputs, flow.of(bias)[0]], operation)
    depthwise = groups > 1 and len(inputs) == groups
    flow.add_layer(
        operation,
        weight.parameter,
        inputs=inputs,
        outputs=outputs,
        produces=not depthwise,
        axes=(0, 1) if transposed else (1, 0),
        kinds=TRANSPOSED if transposed else CONVOLUTIONS,
    )
    axes = input_axes[:channel] + [outputs] + [None] * spatial
    return tuple(axes)


def _grouped(
    flow: Flow, operation: Operation, inputs: Labels, weight_axes: Axes, groups: int, *, transposed: bool
) -> Labels:
    """Couple the channels of a grouped convolution; returns its output channels.

    One with many groups loses whole groups, so that a depthwise one loses single channels: kernels compute group by
    group, and are not faster with thinner ones. With few groups every group must lose the same channels.
    """
    per_group = len(inputs) // groups
    first, second = flow.labelled(weight_axes[0], 0), weight_axes[1]
    if transposed:
        outputs = flow.sets.new(groups * (0 if second is None else len(second)))
        flow.join([inputs, first], operation)
    else:
        outputs = first
    each = len(outputs) // groups
    if per_group == 1 or (groups >= MANY_GROUPS and not flow.sets.is_kept(inputs).any()):
        if second is not None:
            flow.sets.keep(second, "the filters of a group stay as they are")
        flow.sets.join_rows(inputs.reshape(groups, per_group).T, "a group goes as a whole")
        flow.join([np.repeat(inputs[::per_group], each), outputs], operation)
        return outputs
    why = "each group must keep as many channels"
    coupled_in = flow.sets.join_rows(inputs.reshape(groups, per_group), why)
    coupled_out = flow.sets.join_rows(outputs.reshape(groups, each), why)
    if second is not None:
        flow.join([second, coupled_out if transposed else coupled_in], operation)
    return outputs


@rule("linear")
def linear(flow: Flow, operation: Operation) -> Axes:
    """A product with a weight along the last axis; its rows make the output channels."""
    given, weight, bias = operation.operand(0), operation.operand(1), operation.operand(2)
    assert given is not None
    assert weight is not None
    assert given.shape is not None
    input_axes, weight_axes = flow.of(given), flow.of(weight)
    if len(weight_axes) != 2:
        return unknown(flow, operation)
    inputs = flow.labelled(input_axes[-1], int(given.shape[-1] or 0))
    flow.join([inputs, weight_axes[1]], operation)
    outputs = flow.labelled(weight_axes[0], len(flow.stored.get(weight.parameter or "", (0,))))
    if weight_axes[0] is None:
        return (*input_axes[:-1], None)
    if bias is not None:
        flow.join([outputs, flow.of(bias)[0]], operation)
    flow.add_layer(operation, weight.parameter, inputs=inputs, outputs=outputs, produces=True, kinds=(nn.Linear,))
    return (*input_axes[:-1], outputs)


@rule("batch_norm", "instance_norm")
def batch_norm(flow: Flow, operation: Operation) -> Axes:
    """Statistics and an affine function per channel of axis 1."""
    axes = list(flow.of(operation.operands[0]))
    tensors = [value for value in operation.arguments[1:5] if hasattr(value, "parameter")]
    labels = flow.join([axes[1], *(flow.of(value)[0] for value in tensors)], operation)
    axes[1] = labels
    flow.normalizes(operation, labels, tensors[0].parameter if tensors else None)
    return tuple(axes)


@rule("layer_norm", "rms_norm")
def layer_norm(flow: Flow, operation: Operation) -> Axes:
    """Normalization over the last axes; over one axis its channels can be removed."""
    axes = list(flow.of(operation.operands[0]))
    sizes = argument(operation, 1, [])
    tensors = [value for value in operation.arguments[2:4] if hasattr(value, "parameter")]
    if len(sizes) != 1:
        flow.keep([*axes[-len(sizes) :], *(a for value in tensors for a in flow.of(value))], operation, _SPATIAL_MIXING)
        return (*axes[: -len(sizes)], *(None,) * len(sizes))
    labels = flow.join([axes[-1], *(flow.of(value)[0] for value in tensors)], operation)
    axes[-1] = labels
    if flow.owner_of_call(operation, nn.LayerNorm) is None:
        flow.follows_sizes(labels, operation)
    flow.normalizes(operation, labels, tensors[0].parameter if tensors else None)
    return tuple(axes)


@rule("group_norm")
def group_norm(flow: Flow, operation: Operation) -> Axes:
    """Normalization over groups of channels: every group must lose as many."""
    axes = list(flow.of(operation.operands[0]))
    groups = int(operation.arguments[1])
    tensors = [value for value in operation.arguments[2:4] if hasattr(value, "parameter")]
    labels = flow.join([axes[1], *(flow.of(value)[0] for value in tensors)], operation)
    if labels is not None and groups > 1:
        if len(labels) == groups:
            flow.keep([labels], operation, "has as many groups as channels")
        flow.sets.join_rows(labels.reshape(groups, -1), "each group of a group norm must keep as many channels")
    axes[1] = labels
    flow.normalizes(operation, labels, tensors[0].parameter if tensors else None)
    return tuple(axes)


@rule("embedding")
def embedding(flow: Flow, operation: Operation) -> Axes:
    """Rows of a table: its columns are channels, its rows stay."""
    table, index = operation.operands[0], operation.arguments[1]
    rows, columns = flow.of(table)
    flow.keep([rows], operation, "looks its rows up")
    if columns is not None:
        flow.normalizes(operation, columns, table.parameter)
    return (*(None,) * len(index.shape), columns)


@rule("matmul", "bmm", "mm")
def product(flow: Flow, operation: Operation) -> Axes:
    """A product of activations: the contracted axes are coupled."""
    first, second = operation.arguments[:2]
    one, other = flow.of(first), flow.of(second)
    if len(one) < 2 or len(other) < 2:
        return unknown(flow, operation)
    flow.join([one[-1], other[-2]], operation)
    batch: list[Axis] = []
    for back in range(max(len(one), len(other)), 2, -1):
        facing = [
            (axes[-back], value.shape[-back]) for axes, value in ((one, first), (other, second)) if len(axes) >= back
        ]
        size = max(size for _, size in facing)
        batch.append(flow.join([labels for labels, length in facing if length == size], operation))
    return (*batch, one[-2], other[-1])


@rule("scaled_dot_product_attention")
def attention(flow: Flow, operation: Operation) -> Axes:
    """Attention: the width of query and key is kept, because the scale of the scores depends on it."""
    query, key, value = (flow.of(each) for each in operation.arguments[:3])
    flow.keep([query[-1], key[-1]], operation, "scales by the number of channels")
    flow.keep([query[-2], key[-2], value[-2]], operation, _SPATIAL_MIXING)
    mask = argument(operation, 3)
    if mask is not None and hasattr(mask, "shape"):
        flow.keep(flow.of(mask), operation, "has a mask of fixed size")
    batch = [flow.join(list(axes), operation) for axes in zip(query[:-2], key[:-2], value[:-2], strict=False)]
    return (*batch, None, value[-1])


def unknown(flow: Flow, operation: Operation) -> Axes:
    """Keep everything that an operation without a rule reads."""
    for value in operation.operands:
        flow.keep(flow.of(value), operation, "ends the chain: its channels cannot be followed")
    shape = operation.results[0].shape if operation.results else ()
    return (None,) * len(shape or ())
