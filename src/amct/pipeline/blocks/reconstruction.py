"""Reconstruction: every block of a network learns, without labels, to compute what it does in the float network.

Block after block. A block reads what the blocks before it, already quantized, compute. One that ends with a larger
error than it began with stays as it was. Held are the samples that the block in question reads, once from each network,
and what it should compute.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from amct import log
from amct.errors import ArgumentError, ArgumentTypeError, CalibrationError, ModelError
from amct.numerics.adaround.rounding import Learning
from amct.pipeline.blocks.block import Block, BlockSamples, LearnedLayer, with_learned
from amct.pipeline.weights import corrected_bias, layer_error
from amct.printable import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from amct.config.plan import LayerPlan
    from amct.numerics.qparams import LayerQParams
    from amct.pipeline.blocks.block import Sample
    from amct.pipeline.blocks.regions import Parts, Region, Values
    from amct.pipeline.flow import Passes, Refine
    from amct.pipeline.weights import QuantizedWeights

logger = logging.getLogger(__name__)

Reconstruct = Literal["blocks"]
AdaRoundMode = Literal["plain", "fast"]
ALONE = Learning(num_iteration=1000, learning_rate=1e-2)
"""The settings of AdaRound where a config has none."""
SETTINGS = Learning(num_iteration=300, learning_rate=2e-2, batch_size=32)
RECONSTRUCTION = "reconstruction"
"""The name of the pass."""
_SEED = 0
_MOST_BYTES = 2 << 30
_FEWEST = 20
"""Iterations that a block is learned at least, also without time."""


def refinement(reconstruct: object, seconds: object, alone: object = None) -> Refine | None:
    """What a flow does after calibration, as the user asks for it; None: nothing.

    Args:
        reconstruct: "blocks", or None.
        seconds: How long that may take.
        alone: How AdaRound learns the rounding of each layer for itself; None: it does not.

    Raises:
        ArgumentError, ArgumentTypeError: It cannot be used.
    """
    if reconstruct not in (None, "blocks"):
        raise ArgumentError(f'reconstruct: expected "blocks" or None, got {reconstruct!r}')
    if seconds is not None:
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
            raise ArgumentTypeError(f"reconstruct_seconds: expected a number, got {type(seconds).__name__}")
        if not 0 < seconds < float("inf"):
            raise ArgumentError(f"reconstruct_seconds: expected a positive number, got {seconds:g}")
        if reconstruct is None:
            raise ArgumentError(
                'reconstruct_seconds: nothing is reconstructed; add reconstruct="blocks", or leave it out'
            )
    if alone not in (None, "plain", "fast"):
        raise ArgumentError(f'adaround: expected "plain", "fast" or None, got {alone!r}')
    if reconstruct is not None:
        return partial(reconstructed, seconds=seconds)
    return None if alone is None else partial(reconstructed, alone=alone)


class Learnable(Protocol):
    """A prepared model whose blocks can learn."""

    @property
    def name(self) -> str:
        """The model's name."""

    @property
    def weights(self) -> Mapping[str, QuantizedWeights]:
        """The quantized weights by layer, also of layers that have none."""

    @property
    def layer_plans(self) -> Sequence[LayerPlan]:
        """The plans of the quantized layers."""

    def bias(self, layer: str) -> Tensor | None:
        """The folded bias of a layer, if it has one."""

    def parts(self) -> Parts:
        """The folded model in parts.

        Raises:
            ModelError: It cannot be divided.
        """

    def float_outputs(self, arguments: Any) -> Sequence[object]:  # noqa: ANN401  the door's own
        """What the folded float model returns."""

    def with_learned(
        self, weights: Mapping[str, QuantizedWeights], layers: Mapping[str, LayerQParams]
    ) -> tuple[Any, Mapping[str, LayerQParams]]:
        """The model with learned weights and the parameters of its layers, which say what biases make up for."""


@dataclass(eq=False)
class Reconstruction:
    """Reconstruction of a whole model, block after block; it can be kept between two blocks.

    Attributes:
        preparation: The model with quantized weights.
        layers: Its layers, by now.
        seconds: How long may be learned, by the clock; None: as long as it takes.
        alone: How AdaRound learns the rounding of each layer for itself; None: blocks learn.
        errors: By block in which something could be learned: its error before and after.
    """

    preparation: Learnable
    layers: dict[str, LearnedLayer]
    seconds: float | None = None
    alone: AdaRoundMode | None = None
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)

    is_observing = True
    without_state = ""

    @classmethod
    def of(
        cls,
        preparation: Learnable,
        qparams: Mapping[str, LayerQParams],
        seconds: float | None = None,
        alone: AdaRoundMode | None = None,
    ) -> Reconstruction:
        """Begin with a calibrated model."""
        layers = {}
        for name, weights in preparation.weights.items():
            bias = preparation.bias(name)
            own = None if bias is None else corrected_bias(qparams[name], weights, bias.detach())
            layers[name] = LearnedLayer(name, weights, qparams[name], own)
        return cls(preparation, layers, seconds, alone)

    def run(self, data: Passes) -> None:
        """Learn all blocks.

        Raises:
            ModelError: The model cannot be divided into blocks; nothing is learned.
            CalibrationError: An error is not finite; the message names the layer.
        """
        network = _Network(self.preparation, list(data.all()), alone=self.alone is not None)
        self._clock = _Clock(self.seconds, network.seconds)
        regions = network.regions
        with log.bar("reconstruction", len(regions)) as advance:
            done = 0
            for number in data.blocks(RECONSTRUCTION, self, len(regions)):
                for earlier in regions[done:number]:  # learned before a kill
                    network.go_on(earlier, self.layers)
                advance(number - done, description=f"reconstruction {regions[number].name}")
                self._learn(network, number)
                done = number + 1
                advance()
        better = [after / before for before, after in self.errors.values() if before]
        if better:
            middle = sorted(better)[len(better) // 2]
            what = "block" if self.alone is None else "layer"
            logger.info("%s learned: the error is %.2f of what it was (median)", counted(len(better), what), middle)

    def _learn(self, network: _Network, number: int) -> None:
        region = network.regions[number]
        samples = network.samples(region)
        if region.layers:
            block = network.block(region, self.layers)
            begin = time.monotonic()
            settings = replace(SETTINGS, num_iteration=self._clock.iterations(number))
            if self.alone is not None:
                settings = replace(ALONE, fast=self.alone == "fast")
            try:
                with log.bar(f"  {region.name}", settings.num_iteration) as advance:
                    before = block.error(samples, self.layers)
                    generator, report = torch.Generator().manual_seed(_SEED + number), _advancing(advance)
                    if self.alone is None:
                        found = block.learn(samples, settings, generator, before, report)
                    else:
                        biases = {name: self.preparation.bias(name) for name in region.layers}
                        found = block.round_alone(samples, settings, generator, biases, report)
                    after = block.error(samples, {**self.layers, **found})
            except CalibrationError as error:
                raise layer_error(region.name, error) from error
            except (RuntimeError, NotImplementedError) as error:  # an operation without gradients
                logger.warning('block "%s" stays as it is, because it cannot learn: %s', region.name, error)
            else:
                if after <= before:
                    self.layers.update(found)
                if found:
                    self.errors[region.name] = before, min(before, after)
                logger.debug('block "%s": error %g, was %g', region.name, after, before)
                self._clock.note(number, settings.num_iteration, time.monotonic() - begin)
        network.go_on(region, self.layers)

    def result(self) -> tuple[Any, Mapping[str, LayerQParams]]:
        """The model with what was learned, and the parameters of its layers."""
        found = {}
        for name, layer in self.layers.items():
            bias, qparams = self.preparation.bias(name), layer.qparams
            if bias is not None and layer.bias is not None and layer.weights.custom_rounding:
                qparams = replace(qparams, lost=layer.bias.double() - bias.detach().double())
            found[name] = qparams
        return self.preparation.with_learned({name: each.weights for name, each in self.layers.items()}, found)

    # -- between two blocks --------------------------------------------------------------------------------------------

    def state(self) -> dict[str, NDArray[Any]]:
        """What was learned so far."""
        arrays: dict[str, Tensor] = {}
        for name, layer in self.layers.items():
            if layer.weights.custom_rounding:
                (weight,) = layer.weights.weights
                arrays |= {f"{name}/weight": weight.real(), f"{name}/steps": weight.qparams.scale}
            if layer.bias is not None:
                arrays[f"{name}/bias"] = layer.bias
            arrays[f"{name}/scale"], arrays[f"{name}/offset"] = layer.qparams.input.scale, layer.qparams.input.offset
        return {name: tensor.detach().cpu().numpy() for name, tensor in arrays.items()}

    def restore(self, state: Mapping[str, NDArray[Any]], batches: int) -> None:
        """Replace what was learned by a state.

        Raises:
            CalibrationError: It is that of another model.
        """
        del batches
        given = {name: torch.from_numpy(array.copy()) for name, array in state.items()}
        for name, layer in self.layers.items():
            weights, qparams, device = layer.weights, layer.qparams, layer.qparams.input.scale.device
            scale, offset = (given[f"{name}/{what}"].to(device) for what in ("scale", "offset"))
            if f"{name}/weight" in given:
                place = weights.sources[0].tensor
                stored, steps = (given[f"{name}/{what}"].to(place.device) for what in ("weight", "steps"))
                if stored.shape != place.shape:
                    raise CalibrationError(f'"{name}" has a weight {list(stored.shape)}, expected {list(place.shape)}')
                weights = with_learned(weights, steps, stored)
                qparams = replace(qparams, weights=weights.qparams().weights, cancels_errors=False)
            data = replace(qparams.input, scale=scale, offset=offset)
            bias = None if layer.bias is None else given[f"{name}/bias"].to(layer.bias.device)
            self.layers[name] = LearnedLayer(name, weights, replace(qparams, inputs={**qparams.inputs, 0: data}), bias)


def reconstructed(
    preparation: Learnable,
    layers: Mapping[str, LayerQParams],
    data: Passes,
    *,
    seconds: float | None = None,
    alone: AdaRoundMode | None = None,
) -> tuple[Any, Mapping[str, LayerQParams]]:
    """A calibrated model whose blocks are reconstructed; one that cannot be divided stays as it is, with a warning.

    Raises:
        CalibrationError: An error is not finite; the message names the layer.
    """
    reconstruction = Reconstruction.of(preparation, layers, seconds, alone)
    try:
        reconstruction.run(data)
    except ModelError as error:
        logger.warning("%s: no block is reconstructed: %s", preparation.name, error)
        return preparation, layers
    return reconstruction.result()


def _advancing(advance: Callable[[float], None]) -> Callable[[int, int, float], None]:
    done = 0

    def report(iteration: int, _: int, __: float) -> None:
        nonlocal done
        advance(iteration - done)
        done = iteration

    return report


class _Clock:
    """Divides the seconds that the user gives: each block gets its share by what a forward of it costs.

    Args:
        seconds: Of all blocks together; None: every block has all its iterations.
        costs: By block: the seconds of a forward of one batch.
    """

    def __init__(self, seconds: float | None, costs: Sequence[float]) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds
        self._costs = costs
        self._factor = 10.0
        """What an iteration costs in forwards of a batch; a guess until the first block is learned."""

    def iterations(self, number: int) -> int:
        """How often a block is learned."""
        most = SETTINGS.num_iteration
        if self._end is None:
            return most
        left = self._end - time.monotonic()
        return max(_FEWEST, min(most, int(left / max(self._factor * sum(self._costs[number:]), 1e-9))))

    def note(self, number: int, iterations: int, seconds: float) -> None:
        """Note what a block has taken."""
        self._factor = seconds / iterations / max(self._costs[number], 1e-9)


class _Network:
    """The float and the quantized network, computed up to the same block.

    Args:
        preparation: The model.
        batches: The data.
        alone: Whether each layer is a block.

    Raises:
        ModelError: It cannot be divided, or its program does not compute what it does.
    """

    def __init__(self, preparation: Learnable, batches: Sequence[Any], *, alone: bool = False) -> None:
        parts = preparation.parts()
        self._program, self._constants, self._rounded = parts.program, parts.exact, parts.rounded
        self.regions = self._program.regions(alone=alone)
        self._fp16 = {layer.name for layer in preparation.layer_plans if layer.force_fp16}
        self.seconds: list[float] = []
        """By region: what a forward of the first batch takes."""
        most = self._tried(preparation, batches[0])
        kept = max(1, min(len(batches), _MOST_BYTES // max(most, 1)))
        if kept < len(batches):
            logger.warning(
                "reconstruction learns from %d of %s: what it keeps of a batch takes %d MB",
                kept,
                counted(len(batches), "batch"),
                most >> 20,
            )
        self._exact = [self._program.given(each) for each in batches[:kept]]
        self._given = [dict(each) for each in self._exact]

    def _tried(self, preparation: Learnable, arguments: Any) -> int:  # noqa: ANN401  the door's own
        """Run the float network region by region, to see that it is the model; returns the most bytes of a batch."""
        try:
            with torch.no_grad():
                wanted = preparation.float_outputs(arguments)
                values, most = self._program.given(arguments), 0
                for number, region in enumerate(self.regions):
                    begin = time.monotonic()
                    made = self._float_outputs(region, values)
                    self.seconds.append(time.monotonic() - begin)
                    values |= dict(zip(region.outputs, made, strict=True))
                    held = [each for each in values.values() if isinstance(each, Tensor)]
                    most = max(most, 3 * sum(each.nbytes for each in held))
                    self._forget(values, number)
        except (RuntimeError, ValueError, TypeError, KeyError) as error:  # of any operation
            raise ModelError(f"its captured program cannot be run in parts: {error}") from error
        self._check(wanted, list(values.values()))
        return most

    def _check(self, wanted: Sequence[object], found: Sequence[object]) -> None:
        tensors = [each for each in wanted if isinstance(each, Tensor)]
        alike = [each for each in tensors if any(_is_close(each, other) for other in found)]
        if len(alike) < len(tensors):
            raise ModelError("its captured program does not compute what the model does")

    def _float_outputs(self, region: Region, values: Values) -> list[Tensor]:
        with torch.no_grad():
            given = {node: values[node] for node in region.inputs}
            return self._program.run(region, self._constants, given)

    def _forget(self, values: Values, number: int) -> None:
        needed = {node for later in self.regions[number + 1 :] for node in later.inputs} | {*self._program.outputs}
        for node in [node for node in values if node not in needed]:
            del values[node]

    def samples(self, region: Region) -> BlockSamples:
        """What a region reads and should compute; the float network has computed it then."""
        parts: list[Sample] = []
        for given, exact in zip(self._given, self._exact, strict=True):
            wanted = self._float_outputs(region, exact)
            parts.append(([given[node] for node in region.inputs], [exact[node] for node in region.inputs], wanted))
            exact |= dict(zip(region.outputs, wanted, strict=True))
        read = dict(zip(region.inputs, parts[0][1], strict=True))
        return BlockSamples(parts, by_sample=self._program.is_by_sample(region, self._constants, read))

    def block(self, region: Region, layers: Mapping[str, LearnedLayer]) -> Block:
        """A region with its layers as they are."""
        return Block(self._program, region, self._rounded, layers, self._fp16)

    def go_on(self, region: Region, layers: Mapping[str, LearnedLayer]) -> None:
        """Compute a region in both networks, the quantized one with these layers."""
        number, block = self.regions.index(region), self.block(region, layers)
        for given, exact in zip(self._given, self._exact, strict=True):
            if not all(node in exact for node in region.outputs):
                exact |= dict(zip(region.outputs, self._float_outputs(region, exact), strict=True))
            made = block.outputs([given[node] for node in region.inputs], layers)
            given |= dict(zip(region.outputs, made, strict=True))
            self._forget(given, number)
            self._forget(exact, number)


def _is_close(one: Tensor, other: object) -> bool:
    if not isinstance(other, Tensor) or one.shape != other.shape:
        return False
    wide, found = one.double(), other.double()
    return bool((wide - found).norm() <= 1e-3 * wide.norm() + 1e-6)
