"""Rules of operations that compute: with weights, normalizations, products, arithmetic, pooling, means."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from torch import nn

from amct.pytorch.pruning.channels import ChannelMap, argument, positive, rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amct.pytorch.capture.program_reader import Operation, ProgramTensor
    from amct.pytorch.pruning.channels import Axes, Axis, Labels


CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
MANY_GROUPS = 8
"""A convolution with so many groups can lose some of them and keep about the fraction of channels that is wanted."""
_SPATIAL_MIXING = "mixes the positions of this axis"


@rule("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def convolution(channels: ChannelMap, operation: Operation) -> Axes:
    """A convolution with any number of groups; its filters make the output channels.

    The weight of a transposed one has the input channels first.
    """
    given, weight, bias = operation.operand(0), operation.operand(1), operation.operand(2)
    assert given is not None
    assert given.shape is not None
    assert weight is not None
    assert weight.shape is not None
    transposed = "transpose" in operation.kind
    groups = int(argument(operation, 6, 1))
    spatial = len(weight.shape) - 2
    channel = len(given.shape) - spatial - 1
    input_axes, weight_axes = list(channels.of(given)), channels.of(weight)
    channels.keep(input_axes[channel + 1 :], operation, _SPATIAL_MIXING)
    channels.keep(weight_axes[2:], operation, _SPATIAL_MIXING)
    inputs = channels.labelled(input_axes[channel], int(given.shape[channel] or 0))
    in_axis, out_axis = (0, 1) if transposed else (1, 0)
    if groups == 1:
        channels.join([inputs, weight_axes[in_axis]], operation)
        outputs = channels.labelled(weight_axes[out_axis], int(weight.shape[out_axis] or 0))
    else:
        outputs = _grouped(channels, operation, inputs, weight_axes, groups, transposed=transposed)
    if bias is not None:
        channels.join([outputs, channels.of(bias)[0]], operation)
    channels.add_layer(
        operation,
        weight.parameter,
        inputs=inputs,
        outputs=outputs,
        produces=groups == 1 or len(inputs) != groups,  # a depthwise one does not
        axes=(in_axis, out_axis),
        kinds=TRANSPOSED if transposed else CONVOLUTIONS,
    )
    axes = input_axes[:channel] + [outputs] + [None] * spatial
    return tuple(axes)


def _grouped(
    channels: ChannelMap, operation: Operation, inputs: Labels, weight_axes: Axes, groups: int, *, transposed: bool
) -> Labels:
    """Couple the channels of a grouped convolution; returns its output channels.

    One with many groups loses whole groups, so that a depthwise one loses single channels: kernels compute group by
    group, and are not faster with thinner ones. With few groups every group must lose as many channels; the same ones
    if it is a function, whose weight is cut as a whole.
    """
    is_module = channels.owner_of_call(operation, nn.modules.conv._ConvNd) is not None
    if not is_module:
        channels.follows_sizes(inputs, operation)  # the number of groups
    per_group = len(inputs) // groups
    first, second = channels.labelled(weight_axes[0], 0), weight_axes[1]
    if transposed:
        outputs = channels.sets.new(groups * (0 if second is None else len(second)))
        channels.join([inputs, first], operation)
    else:
        outputs = first
    each = len(outputs) // groups
    if per_group == 1 or (groups >= MANY_GROUPS and not channels.sets.is_kept(inputs).any()):
        if second is not None:
            channels.sets.keep(second, "the filters of a group stay as they are")
        channels.sets.join_rows(inputs.reshape(groups, per_group).T, "a group goes as a whole")
        channels.join([np.repeat(inputs[::per_group], each), outputs], operation)
        return outputs
    rows = [inputs.reshape(groups, per_group), outputs.reshape(groups, each)]
    for labels in rows:
        channels.lose_alike(labels, "each group must keep as many channels", same=not is_module)
    if second is not None:
        channels.join([second, rows[transposed][0]], operation)
    return outputs


@rule("lstm", "gru", "rnn_tanh", "rnn_relu")
def recurrent(channels: ChannelMap, operation: Operation) -> list[Axes]:
    """A recurrent layer keeps its input and its hidden size: each hidden value feeds every gate of the next step."""
    for value in operation.operands:
        channels.keep(
            channels.of(value), operation, "has a fixed size: its hidden values feed all gates of the next step"
        )
    return [(None,) * len(value.shape or ()) for value in operation.results]


@rule("linear")
def linear(channels: ChannelMap, operation: Operation) -> Axes:
    """A product with a weight along the last axis; its rows make the output channels."""
    given, weight, bias = operation.operand(0), operation.operand(1), operation.operand(2)
    assert given is not None
    assert weight is not None
    assert given.shape is not None
    input_axes, weight_axes = channels.of(given), channels.of(weight)
    if len(weight_axes) != 2:
        return unknown(channels, operation)
    inputs = channels.labelled(input_axes[-1], int(given.shape[-1] or 0))
    channels.join([inputs, weight_axes[1]], operation)
    outputs = weight_axes[0]
    if outputs is None:
        return (*input_axes[:-1], None)
    if bias is not None:
        channels.join([outputs, channels.of(bias)[0]], operation)
    channels.add_layer(operation, weight.parameter, inputs=inputs, outputs=outputs, produces=True, kinds=(nn.Linear,))
    return (*input_axes[:-1], outputs)


def _affine(channels: ChannelMap, operation: Operation, axis: int, places: tuple[int, int]) -> tuple[list[Axis], Axis]:
    """Couple an axis with the parameters of a normalization, which are its arguments at these places.

    Returns:
        The axes of the result, and the labels of this one.
    """
    axes = list(channels.of(operation.operands[0]))
    tensors = [value for value in operation.arguments[slice(*places)] if hasattr(value, "parameter")]
    axes[axis] = channels.join([axes[axis], *(channels.of(value)[0] for value in tensors)], operation)
    channels.normalizes(operation, axes[axis], tensors[0].parameter if tensors else None)
    return axes, axes[axis]


@rule("batch_norm", "instance_norm")
def batch_norm(channels: ChannelMap, operation: Operation) -> Axes:
    """Statistics and an affine function per channel of axis 1."""
    return tuple(_affine(channels, operation, 1, (1, 5))[0])


@rule("layer_norm", "rms_norm")
def layer_norm(channels: ChannelMap, operation: Operation) -> Axes:
    """Normalization over the last axes; over one axis its channels can be removed."""
    many = len(argument(operation, 1, []))
    if many != 1:
        whole = channels.of(operation.operands[0])
        tensors = [value for value in operation.arguments[2:4] if hasattr(value, "parameter")]
        own = (labels for value in tensors for labels in channels.of(value))
        channels.keep([*whole[-many:], *own], operation, _SPATIAL_MIXING)
        return (*whole[:-many], *(None,) * many)
    axes, labels = _affine(channels, operation, -1, (2, 4))
    if channels.owner_of_call(operation, nn.LayerNorm) is None:
        channels.follows_sizes(labels, operation)
    return tuple(axes)


@rule("group_norm")
def group_norm(channels: ChannelMap, operation: Operation) -> Axes:
    """Normalization over groups of channels: every group must lose as many."""
    groups = int(operation.arguments[1])
    axes, labels = _affine(channels, operation, 1, (2, 4))
    if labels is not None and groups > 1:
        if len(labels) == groups:
            channels.keep([labels], operation, "has as many groups as channels")
        channels.lose_alike(labels.reshape(groups, -1), "each group of a group norm must keep as many channels")
    return tuple(axes)


@rule("embedding")
def embedding(channels: ChannelMap, operation: Operation) -> Axes:
    """Rows of a table: its columns are channels, its rows stay."""
    table, index = operation.operands[0], operation.arguments[1]
    rows, columns = channels.of(table)
    channels.keep([rows], operation, "looks its rows up")
    if columns is not None:
        channels.normalizes(operation, columns, table.parameter)
    return (*(None,) * len(index.shape), columns)


@rule("matmul", "bmm", "mm")
def product(channels: ChannelMap, operation: Operation) -> Axes:
    """A product of activations: the contracted axes are coupled."""
    first, second = operation.arguments[:2]
    one, other = channels.of(first), channels.of(second)
    if len(one) < 2 or len(other) < 2:
        return unknown(channels, operation)
    _sums_over(channels, operation, [channels.join([one[-1], other[-2]], operation)], [other[-1]])
    if len(other) == 2:
        _makes(channels, operation, second, (0, 1))
    return (*_facing(channels, operation, [first, second], -2), one[-2], other[-1])


@rule("scaled_dot_product_attention")
def attention(channels: ChannelMap, operation: Operation) -> Axes:
    """Attention: the width of query and key is kept, because the scale of the scores depends on it; heads may go."""
    query, key, value = (channels.of(each) for each in operation.arguments[:3])
    channels.keep([query[-1], key[-1]], operation, "scales by the number of channels")
    channels.keep([query[-2], key[-2], value[-2]], operation, _SPATIAL_MIXING)
    channels.head_widths += [labels for labels in (query[-1], value[-1]) if labels is not None]
    given = list(operation.arguments[:3])
    mask = operation.operand(3)
    if mask is not None:
        channels.keep(channels.of(mask)[-2:], operation, _SPATIAL_MIXING)
        given.append(mask)
    return (*_facing(channels, operation, given, -2), None, value[-1])


def _sums_over(channels: ChannelMap, operation: Operation, contracted: list[Axis], widths: list[Axis]) -> None:
    """Note a product of activations; of an attention with values the widths of its heads."""
    if any(id(value) in channels.attentions for value in operation.operands):
        channels.head_widths += [labels for labels in widths if labels is not None]
    channels.contracted[id(operation.results[0])] = [labels for labels in contracted if labels is not None]


def _makes(channels: ChannelMap, operation: Operation, weight: ProgramTensor, axes: tuple[int, int]) -> None:
    """Note a parameter of the user's own that a product with it makes channels with; ``axes`` are read and made."""
    if isinstance(channels.tensors.get(weight.parameter or ""), nn.Parameter):
        inputs, outputs = (channels.labelled(channels.of(weight)[axis], 0) for axis in axes)
        channels.add_layer(
            operation, weight.parameter, inputs=inputs, outputs=outputs, produces=True, kinds=(), axes=axes
        )


@rule("einsum")
def einsum(channels: ChannelMap, operation: Operation) -> Axes:
    """A product of tensors whose axes have letters: axes of the same letter are coupled."""
    equation, values = str(operation.arguments[0]).replace(" ", ""), operation.arguments[1]
    inputs, arrow, output = equation.partition("->")
    letters = inputs.split(",")
    if not arrow or "." in equation or any(len(set(each)) < len(each) for each in (*letters, output)):
        return unknown(channels, operation)
    axes: dict[str, list[Axis]] = {}
    for own, value in zip(letters, values, strict=True):
        for letter, labels in zip(own, channels.of(value), strict=True):
            axes.setdefault(letter, []).append(labels)
    found = {letter: channels.join(each, operation) for letter, each in axes.items()}
    summed = [labels for letter, labels in found.items() if letter not in output]
    _sums_over(channels, operation, summed, [found[letter] for letter in output if len(axes[letter]) == 1])
    for own, value in zip(letters, values, strict=True):
        read = [place for place, letter in enumerate(own) if letter not in output]
        made = [place for place, letter in enumerate(own) if letter in output and len(axes[letter]) == 1]
        if read and made:
            _makes(channels, operation, value, (read[0], made[0]))
    return tuple(found[letter] for letter in output)


@rule("index")
def index(channels: ChannelMap, operation: Operation) -> Axes:
    """Positions along one axis looked up by number: the other axes stay as they are."""
    axes, places = list(channels.of(operation.arguments[0])), operation.arguments[1]
    looked_up = [place for place, each in enumerate(places) if each is not None]
    if len(looked_up) != 1:
        return unknown(channels, operation)
    place = looked_up[0]
    channels.keep([axes[place]], operation, "ends the chain: its channels are looked up")
    return (*axes[:place], *(None,) * len(places[place].shape), *axes[place + 1 :])


def unknown(channels: ChannelMap, operation: Operation) -> Axes:
    """Keep everything that an operation without a rule reads."""
    for value in operation.operands:
        channels.keep(channels.of(value), operation, "ends the chain: its channels cannot be followed")
    shape = operation.results[0].shape if operation.results else ()
    return (None,) * len(shape or ())


@rule("copy", "divide", "floor_divide", "hardswish", "log_sigmoid", "multiply", "subtract", "true_divide")
def broadcast(channels: ChannelMap, operation: Operation) -> Axes:
    """Operands of any shapes, broadcast against each other: axes of equal size are coupled.

    It is the rule of every operation that torch marks as pointwise, and of those that it forgot.
    """
    found = _facing(channels, operation, operation.operands)
    numbers = [each for each in operation.settings if isinstance(each, (int, float))]
    if numbers and operation.where in channels.sizes.literal:  # they may be numbers of channels
        summed = (labels for value in operation.operands for labels in channels.contracted.get(id(value), ()))
        channels.keep([*found, *summed], operation, "computes with a number of channels")
    return found


def _facing(channels: ChannelMap, operation: Operation, given: Sequence[ProgramTensor], end: int | None = None) -> Axes:
    """The axes of tensors that are broadcast against each other, of each those in front of ``end``."""
    tensors = [(channels.of(value)[:end], value.shape[:end]) for value in given if value.shape is not None]
    found: list[Axis] = []
    for back in range(max(len(axes) for axes, _ in tensors), 0, -1):
        facing = [(axes[-back], shape[-back] or 0) for axes, shape in tensors if len(axes) >= back]
        size = max(length for _, length in facing)
        found.append(channels.join([labels for labels, length in facing if length == size], operation))
        channels.keep([labels for labels, length in facing if 1 < length < size], operation, "repeats them")
    return tuple(found)


@rule(
    "alias", "alpha_dropout", "clone", "contiguous", "detach", "dropout", "empty_like", "feature_dropout", "full_like",
    "lift_fresh_copy", "native_dropout", "ones_like", "rand_like", "randn_like", "rrelu", "to", "type_as", "zeros_like",
    "_to_copy", "dropout2d", "requires_grad",
)  # fmt: skip
def same(channels: ChannelMap, operation: Operation) -> Axes:
    """The result has the channels of the first operand."""
    return channels.of(operation.operands[0])


@rule("new_empty", "new_full", "new_ones", "new_zeros")
def new(channels: ChannelMap, operation: Operation) -> Axes:
    """A tensor of a size of its own."""
    del channels
    return (None,) * len(operation.results[0].shape or ())


@rule("prelu")
def prelu(channels: ChannelMap, operation: Operation) -> Axes:
    """A slope for all channels, or one for each of axis 1."""
    axes = list(channels.of(operation.operands[0]))
    slopes = operation.operands[1]
    if slopes.shape and slopes.shape[0] != 1:
        axes[1] = channels.join([axes[1], channels.of(slopes)[0]], operation)
        channels.normalizes(operation, axes[1], slopes.parameter)
    return tuple(axes)


@rule("softmax", "log_softmax", "_softmax", "_log_softmax", "softmin", "cumsum", "cumprod", "normalize")
def along_axis(channels: ChannelMap, operation: Operation) -> Axes:
    """Every value depends on all others along one axis, which is kept."""
    axes = list(channels.of(operation.operands[0]))
    axis = positive(argument(operation, 1, -1), len(axes))
    if "softmax" in operation.kind and (summed := channels.contracted.get(id(operation.operands[0]))) is not None:
        channels.head_widths += summed
        channels.attentions.add(id(operation.results[0]))
    channels.keep([axes[axis]], operation, "mixes the channels")
    axes[axis] = None
    return tuple(axes)


@rule("glu")
def glu(channels: ChannelMap, operation: Operation) -> Axes:
    """One half of the channels is multiplied by the sigmoid of the other half."""
    axes = list(channels.of(operation.operands[0]))
    axis = positive(argument(operation, 1, -1), len(axes))
    labels = axes[axis]
    if labels is not None:
        first, second = labels[: len(labels) // 2], labels[len(labels) // 2 :]
        axes[axis] = channels.join([first, second], operation)
    return tuple(axes)


_SPATIAL = {
    name: rank
    for rank in (1, 2, 3)
    for name in (
        f"max_pool{rank}d", f"avg_pool{rank}d", f"adaptive_avg_pool{rank}d", f"adaptive_max_pool{rank}d",
        f"lp_pool{rank}d", f"max_pool{rank}d_with_indices", f"upsample_nearest{rank}d",
        f"upsample_nearest_exact{rank}d", f"_upsample_nearest_exact{rank}d", f"reflection_pad{rank}d",
        f"replication_pad{rank}d", f"fractional_max_pool{rank}d",
    )
} | {
    "upsample_linear1d": 1, "upsample_bilinear2d": 2, "upsample_bicubic2d": 2, "upsample_trilinear3d": 3,
    "_upsample_bilinear2d_aa": 2, "_upsample_bicubic2d_aa": 2,
}  # fmt: skip


@rule(*_SPATIAL)
def over_positions(channels: ChannelMap, operation: Operation) -> Axes | list[Axes]:
    """Every channel by itself, over the last axes."""
    rank = _SPATIAL[operation.kind]
    axes = channels.of(operation.operands[0])
    channels.keep(axes[-rank:], operation, "mixes the positions of this axis")
    found = (*axes[:-rank], *(None,) * rank)
    return [found, found] if operation.items else found


@rule(
    "mean", "amax", "amin", "sum", "var", "std", "prod", "logsumexp", "norm", "linalg_vector_norm", "argmax", "argmin",
    "any", "all",
)  # fmt: skip
def reduction(channels: ChannelMap, operation: Operation) -> Axes:
    """One value for whole axes. Only a sum stays right when channels are removed."""
    axes = list(channels.of(operation.operands[0]))
    place = 2 if operation.kind in ("norm", "linalg_vector_norm") else 1
    given = argument(operation, place)
    chosen = [given] if isinstance(given, int) and not isinstance(given, bool) else given
    chosen = range(len(axes)) if not isinstance(chosen, (list, tuple)) or not chosen else chosen
    gone = {positive(axis, len(axes)) for axis in chosen}
    if operation.kind != "sum":
        channels.keep([axes[axis] for axis in gone], operation, "reduces over all channels")
    result = operation.results[0].shape or ()
    if len(result) == len(axes):
        return tuple(None if axis in gone else labels for axis, labels in enumerate(axes))
    return tuple(labels for axis, labels in enumerate(axes) if axis not in gone)
