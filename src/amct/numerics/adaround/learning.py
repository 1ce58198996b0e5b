"""AdaRound: learn for every weight whether to round it down or up, so that the layer's output changes least.

The rounding of one layer is learned from its inputs in the quantized network and its outputs in the float network; the
following activation is applied to both outputs. The returned weight is fully rounded. (AMCT keeps the soft rounding and
rounds to nearest when saving, which can undo the learning.)

The fast mode ignores the activation, so that the error is quadratic in the weights (see ``gram``): an iteration costs
one small matrix product over all data. At the end single weights are switched while that lowers the error. If the
learned rounding has a larger error on the data than rounding to nearest, the latter is returned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from amct.errors import ArgumentError, CalibrationError
from amct.numerics.adaround.loop import Progress, RoundedWeight, finite, follow_gradient
from amct.numerics.adaround.rounding import Learning, SoftRounding, steps_for
from amct.numerics.adaround.scale import initial_scale
from amct.numerics.arq import WeightKind, channels_first, from_channels_first
from amct.numerics.gram import GramStatistics, Unfolding, as_pair, improve_rounding

if TYPE_CHECKING:
    from amct.numerics.integer import ConvolutionGeometry
    from amct.numerics.qparams import QParams

Activation = Callable[[Tensor], Tensor]
_LARGEST_GRAM = 1 << 26  # entries of G; 512 MB
_SWEEPS = 20
_REPORTS = 100
_DEFAULT = Learning()
_ROWS = 16


@dataclass(frozen=True)
class CachedData:
    """Inputs (quantized network) and target outputs (float layer, before the activation), sample by sample."""

    inputs: Tensor
    outputs: Tensor

    def __len__(self) -> int:
        return self.inputs.shape[0]

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs and outputs of the samples at ``indices``."""
        indices = indices.to(self.inputs.device)
        return self.inputs.index_select(0, indices), self.outputs.index_select(0, indices)


@dataclass(frozen=True)
class RowShare:
    """The output channels of a layer that one of several processes learns.

    Attributes:
        index: The number of the process.
        count: How many there are.
        gather: Exchanges the tensors of all processes: returns them in the order of the processes.
    """

    index: int
    count: int
    gather: Callable[[Tensor], list[Tensor]]

    def rows(self, rows: int, inputs: int, groups: int) -> slice:
        """Return the rows of this process: whole blocks, so that every row has the same bits as when all are learned.

        Matrix products treat rows in blocks and the rows of an incomplete last block differently; so do operations on
        each element, in blocks of 32 numbers.
        """
        block = _ROWS if inputs % 2 == 0 else 2 * _ROWS
        if groups > 1:
            block = math.lcm(block, rows // groups)
        blocks = -(-rows // block)
        begin, end = (min(rows, blocks * index // self.count * block) for index in (self.index, self.index + 1))
        return slice(begin, end)

    def join(self, learned: Tensor) -> Tensor:
        """Return the rows of all processes."""
        return torch.cat(self.gather(learned))


@dataclass(frozen=True, kw_only=True)
class AdaRoundLayer:
    """A Conv2d or ConvTranspose2d (any groups) or, without geometry, Linear layer, and the following activation."""

    weight: Tensor
    bias: Tensor | None = None
    geometry: ConvolutionGeometry | None = None
    activation: Activation | None = None
    table: Tensor | None = None
    """The integers that a weight can become, as ``SoftRounding`` takes them; None: all that have so many bits."""

    def __post_init__(self) -> None:
        expected = 2 if self.geometry is None else 4
        if self.weight.ndim != expected:
            layer = "Linear" if self.geometry is None else "Conv2d or ConvTranspose2d"
            raise ArgumentError(
                f"AdaRound of a {layer} layer expects a weight with {expected} dimensions, got shape "
                f"{list(self.weight.shape)}"
            )

    @property
    def kind(self) -> WeightKind:
        """Layout of the weight."""
        if self.geometry is None:
            return WeightKind.LINEAR
        return WeightKind.CONV_TRANSPOSE if self.geometry.transposed else WeightKind.CONV

    @property
    def groups(self) -> int:
        """Groups of the convolution."""
        return self.geometry.groups if self.geometry else 1

    def rows(self) -> Tensor:
        """Return the weight as ``[Cout, K]``, float32."""
        return channels_first(self.weight.detach().float(), self.kind, self.groups)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the output of the layer with the given weight, before the activation."""
        bias = None if self.bias is None else self.bias.detach().float()
        if self.geometry is None:
            return functional.linear(x, weight, bias)
        geometry = self.geometry
        stride, padding, dilation = as_pair(geometry.stride), as_pair(geometry.padding), as_pair(geometry.dilation)
        if geometry.transposed:
            extra = as_pair(geometry.output_padding)
            return functional.conv_transpose2d(x, weight, self.bias, stride, padding, extra, geometry.groups, dilation)
        return functional.conv2d(x, weight, bias, stride, padding, dilation, geometry.groups)

    def loss(self, output: Tensor, wanted: Tensor) -> Tensor:
        """Return the squared error after the activation, summed over channels and averaged over all other axes."""
        if self.activation is not None:
            output, wanted = self.activation(output), self.activation(wanted)
        channels = wanted.shape[-1 if self.geometry is None else 1]
        return functional.mse_loss(output, wanted) * channels

    def rounded(self, rounding: SoftRounding) -> RoundedWeight:
        """The weight with its rounding."""
        return RoundedWeight(rounding=rounding, shape=self.weight.shape, kind=self.kind, groups=self.groups)

    def restore(self, rows: Tensor) -> Tensor:
        """Convert rows ``[Cout, K]`` to the shape of the weight."""
        return from_channels_first(rows, self.weight.shape, self.kind, self.groups)


@dataclass(frozen=True, kw_only=True)
class AdaRoundResult:
    """The rounded weight and its loss on the data."""

    integers: Tensor
    """int8, in the shape of the weight."""
    weight: Tensor
    """The integers times the scale, in the dtype of the weight."""
    qparams: QParams
    initial_loss: float
    """Loss of rounding to nearest."""
    final_loss: float
    notes: tuple[str, ...]
    """Deviations from the settings, for the log."""


@torch.no_grad()
def adaround(
    layer: AdaRoundLayer,
    data: CachedData,
    settings: Learning = _DEFAULT,
    *,
    qparams: QParams | None = None,
    generator: torch.Generator | None = None,
    progress: Progress | None = None,
    share: RowShare | None = None,
) -> AdaRoundResult:
    """Round the weight of a layer so that its output on the data changes least.

    Args:
        layer: weight, geometry and the following activation.
        data: inputs and target outputs.
        settings: how it learns.
        qparams: with the scale, ``[1]`` or ``[Cout]``; chosen by ``initial_scale`` when None.
        generator: random generator of the mini-batches.
        progress: called about a hundred times during the learning.
        share: the output channels that this process learns in the fast mode; None: all.

    Raises:
        CalibrationError: there is no data, or the loss is not finite.
        ArgumentError: the shapes do not fit together.
    """
    if len(data) == 0:
        raise CalibrationError("AdaRound needs at least one sample of the layer's input, got none")
    if qparams is None:
        qparams = initial_scale(
            layer.weight,
            kind=layer.kind,
            bits=settings.num_bits,
            channel_wise=settings.channel_wise,
            groups=layer.groups,
        )
    rows = layer.rows()
    rounding = SoftRounding(rows, qparams.per_row(rows.shape[0]).scale, settings.num_bits, layer.table)
    initial_loss = _loss_on(layer, data, rounding, rounding.nearest, settings.batch_size)
    obstacle = _reason_against_gram(layer, data, settings) if settings.fast else "fast mode is off"
    if obstacle:
        learned = _learn_by_forwards(layer, data, rounding, settings, generator, progress)
    else:
        learned = _learn_by_gram(layer, data, rounding, settings, progress, share)
    final_loss = _loss_on(layer, data, rounding, learned, settings.batch_size)
    notes = _notes(layer, settings, obstacle, worse=final_loss > initial_loss)
    if final_loss > initial_loss:
        learned, final_loss = rounding.nearest, initial_loss
    return AdaRoundResult(
        integers=layer.restore(learned.to(torch.int8)),
        weight=layer.restore(learned * rounding.scale).to(layer.weight.dtype),
        qparams=qparams,
        initial_loss=initial_loss,
        final_loss=final_loss,
        notes=notes,
    )


def _notes(layer: AdaRoundLayer, settings: Learning, obstacle: str, *, worse: bool) -> tuple[str, ...]:
    notes = []
    if settings.fast and obstacle:
        notes.append(f"the fast mode was not used: {obstacle}")
    elif settings.fast and layer.activation is not None:
        notes.append("the fast mode learned without the activation that follows the layer")
    if worse:
        notes.append("the learned rounding was worse on the data than rounding to nearest, which was kept")
    return tuple(notes)


def _batches(data: CachedData, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    for begin in range(0, len(data), size):
        yield data.batch(torch.arange(begin, min(begin + size, len(data))))


def _loss_on(layer: AdaRoundLayer, data: CachedData, rounding: SoftRounding, steps: Tensor, size: int) -> float:
    """Return the loss of a rounding (in integer steps, ``[Cout, K]``) over all data."""
    weight = layer.restore(steps * rounding.scale)
    total = sum(
        float(layer.loss(layer.forward(x.float(), weight), y.float())) * len(x) for x, y in _batches(data, size)
    )
    return finite(total / len(data), "over all data")


def _learn_by_forwards(
    layer: AdaRoundLayer,
    data: CachedData,
    rounding: SoftRounding,
    settings: Learning,
    generator: torch.Generator | None,
    progress: Progress | None,
) -> Tensor:
    """Learn mini-batch by mini-batch with forwards of the layer, as AMCT does; return integer steps ``[Cout, K]``."""

    def loss_of(weights: list[Tensor]) -> Tensor:
        indices = torch.randperm(len(data), generator=generator)[: settings.batch_size]
        x, wanted = data.batch(indices)
        return layer.loss(layer.forward(x.float(), weights[0]), wanted.float())

    follow_gradient(loss_of, [layer.rounded(rounding)], settings, progress=progress)
    return rounding.hard()


def _reason_against_gram(layer: AdaRoundLayer, data: CachedData, settings: Learning) -> str:
    """Return why the Gram matrix would be slower or too large; empty when it is not."""
    inputs = layer.rows().shape[1]
    entries = layer.groups * inputs * inputs
    if entries > _LARGEST_GRAM:
        return f"its Gram matrix would have {entries} entries (at most {_LARGEST_GRAM})"
    _, wanted = data.batch(torch.zeros(1, dtype=torch.long))
    positions = wanted.numel() // wanted.shape[-1 if layer.geometry is None else 1]
    # Forward and backward of a mini-batch cost about two products per output value and input, the Gram matrix one.
    forward_cost = 2 * min(settings.batch_size, len(data)) * positions
    if inputs > forward_cost:
        return f"with {inputs} inputs per output value, forwards of {settings.batch_size} samples are cheaper"
    return ""


def _learn_by_gram(
    layer: AdaRoundLayer,
    data: CachedData,
    rounding: SoftRounding,
    settings: Learning,
    progress: Progress | None,
    share: RowShare | None,
) -> Tensor:
    """Learn from the Gram matrix of all data; return integer steps ``[Cout, K]``."""
    statistics = _statistics(layer, data, rounding, settings.batch_size)
    if share is None:
        return _learn_rows(statistics, rounding, settings, progress)
    outputs, inputs = rounding.floor.shape
    rows = share.rows(outputs, inputs, layer.groups)
    if rows.start == rows.stop:
        return share.join(rounding.floor[rows])
    return share.join(_learn_rows(statistics.part(rows), rounding.part(rows), settings, progress))


def _learn_rows(
    statistics: GramStatistics, rounding: SoftRounding, settings: Learning, progress: Progress | None
) -> Tensor:
    """Learn the rounding of the rows of some output channels."""
    gram = (2 * statistics.gram / statistics.positions).float()
    double_cross = (2 * statistics.cross / statistics.positions).float()
    steps = steps_for(rounding, statistics.unfolding, settings)
    slope = torch.empty_like(double_cross)
    report_every = max(1, settings.num_iteration // _REPORTS)
    for iteration in range(settings.num_iteration):
        torch.baddbmm(double_cross, steps.weight, gram, beta=-1, out=slope)
        if progress is not None and (iteration + 1) % report_every == 0:
            # w·G w - 2 w·C is the loss without its constant part, which does not depend on the weight.
            progress(iteration + 1, settings.num_iteration, float((steps.weight * (slope - double_cross)).sum()) / 2)
        steps.step(slope, settings.beta_at(iteration))
    steps.finish()
    return _switch_greedily(statistics, rounding)


def _statistics(layer: AdaRoundLayer, data: CachedData, rounding: SoftRounding, size: int) -> GramStatistics:
    kernel = (1, 1) if layer.geometry is None else (layer.weight.shape[2], layer.weight.shape[3])
    outputs, inputs = rounding.floor.shape
    statistics = GramStatistics(Unfolding(layer.geometry, kernel), outputs, inputs, layer.weight.device)
    for x, wanted in _batches(data, size):
        if layer.bias is not None:
            bias = layer.bias.detach().float()
            wanted = wanted - (bias if layer.geometry is None else bias[:, None, None])
        statistics.add(x, wanted)
    return statistics


def _switch_greedily(statistics: GramStatistics, rounding: SoftRounding) -> Tensor:
    """Return the hard rounding, with single weights switched while that lowers the error."""
    unfolding = statistics.unfolding
    hard = rounding.hard()
    weight, alternative = (
        unfolding.group_rows(steps * rounding.scale).double().contiguous() for steps in (hard, rounding.other(hard))
    )
    slope = statistics.half_gradient(weight)
    gram, slopes, used, unused = (t.cpu().numpy() for t in (statistics.gram, slope, weight, alternative))
    for group in range(unfolding.groups):
        improve_rounding(gram[group], slopes[group], used[group], unused[group], _SWEEPS)
    improved = torch.from_numpy(used).to(rounding.scale.device)
    return (unfolding.ungroup_rows(improved) / rounding.scale).round().float()
