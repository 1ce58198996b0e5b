"""A block of a network that learns: roundings, clips of activations and biases, from the error of what it computes.

What it reads is at random that of the quantized and that of the float network, and so are the values behind its own
quantizers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from amct.errors import AmctError
from amct.numerics.adaround.learning import AdaRoundLayer, CachedData, adaround
from amct.numerics.adaround.loop import (
    Clips,
    Moved,
    RoundedWeight,
    by_chance,
    finite,
    follow_gradient,
    output_error,
    quantized_as,
)
from amct.numerics.adaround.rounding import SoftRounding
from amct.numerics.adaround.scale import least_error_scale
from amct.numerics.qparams import QParams
from amct.numerics.settings import FEW_BITS, WeightKind
from amct.pipeline.weights import corrected_bias, layer_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from amct.numerics.adaround.rounding import Learning
    from amct.numerics.integer import ConvolutionGeometry
    from amct.numerics.qparams import LayerQParams
    from amct.pipeline.blocks.regions import Constants, Program, Region, Step
    from amct.pipeline.weights import QuantizedWeights

    Sample = tuple[list[Tensor], list[Tensor], list[Tensor]]
    """What the quantized and what the float network give a block, and what it should compute."""

_KEPT = 0.5
"""The share of values that are quantized while a block is learned."""
_BIAS_RATE = 2e-3
"""How far a step moves a bias, in parts of the deviation of what its layer computes."""
_WEIGHT = 2e-5
"""What the error that a block begins with counts, by number of weights, beside the regularizer of their roundings."""
_AT_ONCE = 64
_POSITIONS, _FEWEST_SAMPLES = 32 * 1024, 4
"""Positions of an image that an iteration needs; of large images fewer samples have them."""


@dataclass(eq=False)
class LearnedLayer:
    """What is known of a layer: where it began, or what it has learned.

    Attributes:
        name: The layer.
        weights: Its quantized weights.
        qparams: Its parameters.
        bias: Its bias, corrected; None: it has none.
    """

    name: str
    weights: QuantizedWeights
    qparams: LayerQParams
    bias: Tensor | None

    def weight(self) -> Tensor:
        """The weight on its grid."""
        return self.weights.weights[0].real()

    def corrects_bias(self) -> bool:
        """Whether the files of this layer have a bias that can be learned."""
        mean, source = self.qparams.mean, self.weights.sources[0]
        if mean is None or self.bias is None or source.kind is WeightKind.CONV_TRANSPOSE:
            return False
        return self.qparams.corrects_bias and mean.numel() == source.tensor.shape[1] * source.groups


class BlockSamples:
    """What a block reads and should compute: any of its samples, or the user's own batches.

    Args:
        parts: By batch.
        by_sample: Whether the first axis of every tensor is that of the samples.
    """

    def __init__(self, parts: Sequence[Sample], *, by_sample: bool) -> None:
        shapes = {tuple(tensor.shape[1:] for tensors in part for tensor in tensors) for part in parts}
        self._by_sample = by_sample and len(shapes) == 1
        self._parts = [self._joined(parts)] if self._by_sample else list(parts)
        self._count = self._parts[0][2][0].shape[0] if self._by_sample else len(parts)
        self._positions = max((math.prod(tensor.shape[2:]) for tensor in self._parts[0][2]), default=1) or 1

    @staticmethod
    def _joined(parts: Sequence[Sample]) -> Sample:
        quantized, exact, wanted = (
            [torch.cat(each) for each in zip(*kind, strict=True)] for kind in zip(*parts, strict=True)
        )
        return quantized, exact, wanted

    def draw(self, size: int, generator: torch.Generator) -> Sample:
        """Some samples, or a batch."""
        if not self._by_sample:
            return self._parts[int(torch.randint(self._count, (1,), generator=generator))]
        enough = max(_FEWEST_SAMPLES, _POSITIONS // self._positions)
        return self._take(torch.randperm(self._count, generator=generator)[: min(size, enough)])

    def __iter__(self) -> Iterator[Sample]:
        if not self._by_sample:
            return iter(self._parts)
        return (self._take(places) for places in torch.split(torch.arange(self._count), _AT_ONCE))

    def _take(self, places: Tensor) -> Sample:
        quantized, exact, wanted = (
            [tensor.index_select(0, places.to(tensor.device)) for tensor in each] for each in self._parts[0]
        )
        return quantized, exact, wanted


class Block:
    """A region with quantized layers.

    Args:
        program: The program.
        region: The region.
        constants: For all that is not quantized, and for layers that do not read their weight as it is.
        layers: The layers as they are now.
        fp16: The layers whose activation scales are rounded to half precision.
    """

    def __init__(
        self,
        program: Program,
        region: Region,
        constants: Constants,
        layers: Mapping[str, LearnedLayer],
        fp16: set[str],
    ) -> None:
        self._program, self._region, self._constants = program, region, constants
        self._layers = {name: layers[name] for name in region.layers}
        self._fp16 = fp16
        self._weights: dict[LearnedLayer, Tensor] = {}

    def _weight(self, layer: LearnedLayer) -> Tensor:
        """The weight of a layer on its grid; it is computed once."""
        if layer not in self._weights:
            self._weights[layer] = layer.weight()
        return self._weights[layer]

    def outputs(self, given: Sequence[Tensor], layers: Mapping[str, LearnedLayer]) -> list[Tensor]:
        """What the block computes with quantized layers."""
        with torch.no_grad():
            return self._run(given, self._quantized_call(layers))

    def _quantized_call(
        self, layers: Mapping[str, LearnedLayer], watched: Step | None = None, read: list[Tensor] | None = None
    ) -> Callable[..., Tensor]:
        """Computes a quantized layer; what the watched one reads is noted."""

        def call(step: Step, operation: Callable[..., Tensor], x: Tensor) -> Tensor:
            layer = layers[step.layer]
            x = quantized_as(layer.weights.balanced_input(x), layer.qparams.inputs[step.index])
            if step is watched and read is not None:
                read.append(x)
            return operation(x, self._weight(layer), layer.bias) if step.reads_weight else operation(x)

        return call

    def error(self, samples: BlockSamples, layers: Mapping[str, LearnedLayer]) -> float:
        """The squared error over all samples."""
        total = count = 0.0
        for given, _, wanted in samples:
            found = self.outputs(given, layers)
            total += sum(float(output_error(*pair)) for pair in zip(found, wanted, strict=True)) * len(wanted[0])
            count += len(wanted[0])
        return finite(total / max(count, 1), "over all data")

    def _run(self, given: Sequence[Tensor], call: Callable[..., Tensor]) -> list[Tensor]:
        values = dict(zip(self._region.inputs, given, strict=True))
        return self._program.run(self._region, self._constants, values, call)

    def learn(
        self,
        samples: BlockSamples,
        settings: Learning,
        generator: torch.Generator,
        before: float,
        progress: Callable[[int, int, float], None],
    ) -> dict[str, LearnedLayer]:
        """Learn from the samples; returns the layers as they are then.

        Errors count in parts of the one ``before``, so that the regularizer of the roundings weighs alike in any block.
        """
        steps = [step for step in self._region.steps if step.layer]
        weights = {step.layer: self._rounded(step.layer) for step in steps if self._can_learn(step)}
        clips = self._clips()
        biases = self._biases(samples, weights)

        unit = (before or 1.0) / (_WEIGHT * max(1, sum(each.rounding.alpha.numel() for each in weights.values())))

        def loss_of(soft: list[Tensor]) -> Tensor:
            own = dict(zip(weights, soft, strict=True))
            given, exact, wanted = samples.draw(settings.batch_size, generator)
            mixed = [by_chance(each, other, _KEPT, generator) for each, other in zip(given, exact, strict=True)]

            def call(step: Step, operation: Callable[..., Tensor], x: Tensor) -> Tensor:
                layer = self._layers[step.layer]
                x = layer.weights.balanced_input(x)
                x = by_chance(clips[step.layer, step.index](x), x, _KEPT, generator)
                if not step.reads_weight:
                    return operation(x)
                bias = biases.get(step.layer)
                weight = own[step.layer] if step.layer in own else self._weight(layer)
                return operation(x, weight.to(x.dtype), layer.bias if bias is None else bias.tensor)

            found = self._run(mixed, call)
            return torch.stack([output_error(*pair) for pair in zip(found, wanted, strict=True)]).sum() / unit

        moved = [each for clip in dict.fromkeys(clips.values()) for each in clip.moved]
        follow_gradient(loss_of, list(weights.values()), settings, moved=[*moved, *biases.values()], progress=progress)
        inputs: dict[str, dict[int, QParams]] = {name: {} for name in self._layers}
        for (name, index), clip in clips.items():
            inputs[name][index] = clip.qparams()
        return {name: self._after(name, weights.get(name), inputs[name], biases.get(name)) for name in self._layers}

    def round_alone(
        self,
        samples: BlockSamples,
        settings: Learning,
        generator: torch.Generator,
        biases: Mapping[str, Tensor | None],
        progress: Callable[[int, int, float], None],
    ) -> dict[str, LearnedLayer]:
        """AdaRound of the layers, each from its own inputs; returns those that could be learned."""
        found = {}
        for step in self._region.steps:
            is_plain, geometry = self._program.geometry(step)
            if not is_plain or not self._can_learn(step) or step.index:
                continue
            before, start = self._layers[step.layer], self._rounded(step.layer)
            (weight,), bias = before.weights.weights, biases[step.layer]
            table = None if weight.clusters is None else weight.clusters.table
            described = AdaRoundLayer(weight=weight.source.balanced(), bias=bias, geometry=geometry, table=table)
            bits = weight.qparams.bits
            made = adaround(
                described,
                self._pairs(samples, step, geometry),
                replace(settings, num_bits=bits),
                qparams=QParams.symmetric(start.rounding.scale.reshape(-1)[: weight.qparams.scale.numel()], bits),
                generator=generator,
                progress=progress,
            )
            weights = with_learned(before.weights, made.qparams.scale, made.weight.float())
            qparams = replace(before.qparams, weights=weights.qparams().weights, cancels_errors=False)
            own = None if bias is None else corrected_bias(qparams, weights, bias)
            found[step.layer] = LearnedLayer(step.layer, weights, qparams, own)
        return found

    def _pairs(self, samples: BlockSamples, wanted: Step, geometry: ConvolutionGeometry | None) -> CachedData:
        """What a layer reads in the quantized network, and what it computes in the float one."""
        read: list[Tensor] = []
        made: list[Tensor] = []

        def note(step: Step, operation: Callable[..., Tensor], x: Tensor) -> Tensor:
            result = operation(x)
            if step is wanted:
                made.append(result)
            return result

        with torch.no_grad():
            for given, exact, _ in samples:
                self._run(given, self._quantized_call(self._layers, wanted, read))
                self._run(exact, note)
        inputs = torch.cat(read)
        return CachedData(inputs if geometry is not None else inputs.flatten(1), torch.cat(made))

    # -- what is learned of a layer ------------------------------------------------------------------------------------

    def _can_learn(self, step: Step) -> bool:
        return step.reads_weight and len(self._layers[step.layer].weights.weights) == 1

    def _rounded(self, name: str) -> RoundedWeight:
        """The rounding of a layer's weight: to its table, or on the grid with the least error."""
        (weight,) = self._layers[name].weights.weights
        source, bits, clusters = weight.source, weight.qparams.bits, weight.clusters
        rows = source.rows()
        scale = weight.qparams
        if clusters is None:
            is_wise = scale.scale.numel() > 1
            try:
                scale = least_error_scale(
                    source.balanced(), kind=source.kind, bits=bits, channel_wise=is_wise, groups=source.groups
                )
            except AmctError as error:
                raise layer_error(name, error) from error
        table = None if clusters is None else clusters.table
        rounding = SoftRounding(rows, scale.per_row(rows.shape[0]).scale, bits, table)
        return RoundedWeight(rounding=rounding, shape=source.tensor.shape, kind=source.kind, groups=source.groups)

    def _clips(self) -> dict[tuple[str, int], Clips]:
        """The clips of each layer's input; layers that read one tensor alike share them."""
        known: dict[object, Clips] = {}
        found = {}
        for step in self._region.steps:
            if step.layer:
                qparams = self._layers[step.layer].qparams.inputs[step.index]
                # A tensor that an earlier block made may be read, and quantized alike, by another block too.
                moves = qparams.bits < FEW_BITS and step.given[0] not in self._region.shared
                made = Clips(qparams, moves=moves, fp16=step.layer in self._fp16)
                found[step.layer, step.index] = known.setdefault((step.given[0], qparams), made)
        return found

    def _biases(self, samples: BlockSamples, names: Mapping[str, object]) -> dict[str, Moved]:
        """The biases that files can have corrected; each moves in parts of what its layer computes."""
        found: dict[str, Moved] = {}

        def call(step: Step, operation: Callable[..., Tensor], x: Tensor) -> Tensor:
            layer = self._layers[step.layer]
            result = operation(x, self._weight(layer), layer.bias) if step.reads_weight else operation(x)
            if step.layer in names and layer.corrects_bias():
                assert layer.bias is not None
                found[step.layer] = Moved(layer.bias.clone().requires_grad_(), _BIAS_RATE * float(result.std()))
            return result

        with torch.no_grad():
            self._run(next(iter(samples))[1], call)
        return found

    def _after(
        self, name: str, weight: RoundedWeight | None, inputs: Mapping[int, QParams], bias: Moved | None
    ) -> LearnedLayer:
        """A layer with what it has learned."""
        before = self._layers[name]
        weights, qparams = before.weights, before.qparams
        if weight is not None:
            (own,) = weights.weights
            scale = weight.rounding.scale.reshape(-1)[: own.qparams.scale.numel()].clone()
            weights = with_learned(weights, scale, weight.hard())
            qparams = replace(qparams, weights=weights.qparams().weights, cancels_errors=False)
        qparams = replace(qparams, inputs={**qparams.inputs, **inputs})
        return LearnedLayer(name, weights, qparams, before.bias if bias is None else bias.tensor.detach())


def with_learned(weights: QuantizedWeights, scale: Tensor, values: Tensor) -> QuantizedWeights:
    """A weight on another grid, with values of its own."""
    (own,) = weights.weights
    return replace(weights, weights=(own.on_grid(values, scale),), custom_rounding=True)
