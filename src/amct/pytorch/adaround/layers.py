"""AdaRound over a whole model, layer after layer.

The inputs of a layer come from the model whose earlier layers are quantized, its target outputs from the float model.
Inputs and outputs of one layer are held at a time, and the outputs of the next few layers as long as they are small. A
forward stops at the layer that is being learned; outputs of finished modules are cached (``output_cache``).
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from amct import progress
from amct.calibration import ALONE
from amct.calibration.ranks import Meeting, fingerprint
from amct.errors import AmctError, CalibrationError
from amct.numerics.adaround.learning import AdaRoundLayer, AdaRoundResult, CachedData, RowShare, adaround
from amct.numerics.adaround.soft_rounding import AdaRoundSettings as LearningSettings
from amct.numerics.integer import ConvolutionGeometry
from amct.numerics.settings import AdaRoundSettings
from amct.pipeline.weights import layer_error
from amct.pytorch.adaround.activation_after import activation_after
from amct.pytorch.adaround.output_cache import OutputCache
from amct.pytorch.functional.layers import layer_module
from amct.pytorch.layer_weights import put_weights
from amct.pytorch.watch.layer_hooks import Balance, given_input

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from amct.calibration import Ranks
    from amct.config.plan import LayerPlan
    from amct.pipeline.weights import LayerWeights
    from amct.pytorch.preparation import TorchPreparation
    from amct.pytorch.watch.layer_hooks import Arguments

logger = logging.getLogger(__name__)

_LOOKAHEAD_BYTES = 256 << 20
_SEED = 0


def learn_rounding(
    preparation: TorchPreparation, data: Callable[[], Iterable[Arguments]], *, fast: bool, ranks: Ranks = ALONE
) -> dict[str, LayerWeights]:
    """Learn the rounding of every layer that the plan gives to AdaRound.

    Args:
        preparation: the model with ARQ's weights everywhere.
        data: returns the batches to learn from.
        fast: learn from the Gram matrix of the layer's input.
        ranks: the processes that do so together: in the fast mode each learns some output channels of every layer.

    Raises:
        CalibrationError: no data reaches a layer, or its loss is not finite; the message names the layer.
    """
    layers = [layer for layer in preparation.layer_plans if isinstance(layer.weight, AdaRoundSettings)]
    batches = list(data())  # read once: a loader may shuffle, and inputs and target outputs must match
    quantized = preparation.quantized_copy()
    for name, weights in preparation.weights.items():
        module = layer_module(quantized, name)
        if weights.balance is not None:
            module.register_forward_pre_hook(Balance(weights.balance, weights.channel_axis), with_kwargs=True)
    cache = OutputCache(quantized, [layer.name for layer in layers])
    outputs = _FloatOutputs(preparation.fused.model, [layer.name for layer in layers], batches)
    learned: dict[str, LayerWeights] = {}
    with progress.bar("AdaRound", len(layers)) as advance:
        for layer in layers:
            advance(0, description=f"AdaRound {layer.name}")
            target = outputs.of(layer.name)
            inputs = _collect(quantized, [layer.name], batches, inputs=True, begin=cache.begin)[layer.name]
            found = _learn_layer(layer, preparation, inputs, target, _Division(ranks, fast=fast))
            put_weights(layer_module(quantized, layer.name), found.rounded)
            cache.finish(layer.name)
            learned[layer.name] = found
            advance()
    return learned


def _learn_layer(
    layer: LayerPlan, preparation: TorchPreparation, inputs: list[Tensor], target: list[Tensor], division: _Division
) -> LayerWeights:
    before = preparation.weights[layer.name]
    module = layer_module(preparation.fused.model, layer.name)
    if not inputs:
        raise CalibrationError(f'layer "{layer.name}": no data reaches it, so AdaRound cannot learn; use ARQ for it')
    pairs, notes = _merged(module, inputs, target)
    part = before.parts[0]
    bias = getattr(module, "bias", None)
    described = AdaRoundLayer(
        weight=part.with_balance(before.balance),
        bias=bias.detach().float() if isinstance(bias, Tensor) else None,
        geometry=_geometry(module),
        activation=activation_after(layer.name, preparation.traced, preparation.fused),
    )
    result = _learn(layer, described, pairs, division)
    for note in (*notes, *result.notes):
        logger.info('layer "%s": %s', layer.name, note)
    logger.debug('layer "%s": loss %g, was %g', layer.name, result.final_loss, result.initial_loss)
    return replace(
        before, rounded={part.name: result.weight}, factors={part.name: result.factors}, custom_rounding=True
    )


@dataclass(frozen=True)
class _Division:
    """How the work is done: in the fast mode or not, by which processes."""

    ranks: Ranks
    fast: bool

    def meeting(self, layer: str) -> Meeting | None:
        """The meeting of the processes after they have learned a layer; None if there are no others."""
        if self.ranks.is_alone or not self.fast:
            return None
        return Meeting(self.ranks, fingerprint(["AdaRound", layer]))

    def share(self, meeting: Meeting | None) -> RowShare | None:
        """The output channels of this process."""
        if meeting is None:
            return None

        def gather(rows: Tensor) -> list[Tensor]:
            found = meeting.exchange({"rows": rows.cpu().numpy()})
            return [torch.from_numpy(each["rows"]).to(rows.device) for each in found]

        return RowShare(self.ranks.rank, self.ranks.size, gather)


def _learn(layer: LayerPlan, described: AdaRoundLayer, pairs: CachedData, division: _Division) -> AdaRoundResult:
    settings = layer.weight
    assert isinstance(settings, AdaRoundSettings)
    learning = LearningSettings(
        bits=settings.num_bits,
        num_iteration=settings.num_iteration,
        reg_param=settings.reg_param,
        beta_range=settings.beta_range,
        warm_start=settings.warm_start,
        fast=division.fast,
    )
    meeting = division.meeting(layer.name)
    with progress.bar(f"  {layer.name}", max(settings.num_iteration, 1)) as advance:
        done = 0

        def report(iteration: int, _: int, __: float) -> None:
            nonlocal done
            advance(iteration - done)
            done = iteration
            if meeting is not None:
                meeting.beat(f'AdaRound of layer "{layer.name}", {iteration} iterations')

        try:
            return adaround(
                described,
                pairs,
                learning,
                channel_wise=settings.channel_wise,
                generator=torch.Generator().manual_seed(_SEED),
                progress=report,
                share=division.share(meeting),
            )
        except AmctError as error:
            raise layer_error(layer.name, error) from error


def _geometry(module: nn.Module) -> ConvolutionGeometry | None:
    """Stride, padding and so on of a convolution; padding given as a word is applied to the data (``_padded``)."""
    if isinstance(module, nn.Linear):
        return None
    assert isinstance(module, (nn.Conv2d, nn.ConvTranspose2d))
    transposed = isinstance(module, nn.ConvTranspose2d)
    return ConvolutionGeometry(
        stride=module.stride,
        padding=0 if isinstance(module.padding, str) else module.padding,
        dilation=module.dilation,
        groups=module.groups,
        transposed=transposed,
        output_padding=module.output_padding if transposed else 0,
    )


def _padded(module: nn.Module, x: Tensor) -> Tensor:
    if isinstance(module, nn.Conv2d) and isinstance(module.padding, str):
        return functional.pad(x, module._reversed_padding_repeated_twice)
    return x


def _merged(module: nn.Module, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[CachedData, list[str]]:
    """Concatenate all batches; if shapes differ, linear layers get rows, others only batches of the first shape."""
    inputs = [_padded(module, x) for x in inputs]
    if len({x.shape[1:] for x in inputs}) > 1 or any(x.ndim < 2 for x in inputs):
        if isinstance(module, nn.Linear):
            inputs = [x.reshape(-1, x.shape[-1]) for x in inputs]
            outputs = [y.reshape(-1, y.shape[-1]) for y in outputs]
        else:
            first = inputs[0].shape[1:]
            kept = [index for index, x in enumerate(inputs) if x.shape[1:] == first]
            note = f"AdaRound learns from {len(kept)} of {len(inputs)} batches, those of input shape {list(first)}"
            return CachedData(torch.cat([inputs[i] for i in kept]), torch.cat([outputs[i] for i in kept])), [note]
    return CachedData(torch.cat(list(inputs)), torch.cat(list(outputs))), []


# -- forwards up to a layer --------------------------------------------------------------------------------------------


class _StopForward(BaseException):
    """Ends a forward after the last layer of interest; a BaseException, so that user code does not catch it."""


def _collect(
    model: nn.Module,
    names: Sequence[str],
    batches: Sequence[Arguments],
    *,
    inputs: bool,
    begin: Callable[[int], None] | None = None,
) -> dict[str, list[Tensor]]:
    """The inputs, or the outputs, of some layers over all data; each forward ends after the last of them.

    A layer called several times in one forward learns from the first call.
    ``begin`` is called with the number of each batch before it runs.
    """
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    noted: set[str] = set()  # in this batch
    handles = []

    def note(name: str, value: object) -> None:
        if name in noted:
            return
        noted.add(name)
        if isinstance(value, Tensor):
            found[name].append(value.detach().clone())
        if name == names[-1]:
            raise _StopForward

    for name in names:
        module = layer_module(model, name)
        if inputs:
            hook = lambda _, args, kwargs, name=name: note(name, given_input(args, kwargs))  # noqa: E731  a closure each
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        else:
            handles.append(module.register_forward_hook(lambda _, __, output, name=name: note(name, output)))
    try:
        with torch.no_grad():
            for number, (args, kwargs) in enumerate(batches):
                noted.clear()
                if begin is not None:
                    begin(number)
                with suppress(_StopForward):
                    model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return found


@dataclass
class _FloatOutputs:
    """Outputs of the float model's layers, computed for several layers at once as long as they are small."""

    model: nn.Module
    names: Sequence[str]
    batches: Sequence[Arguments]
    ready: dict[str, list[Tensor]] = field(default_factory=dict)
    ahead: int = 1

    def of(self, name: str) -> list[Tensor]:
        """The outputs of one layer, one tensor for each batch; they are removed from here."""
        if name not in self.ready:
            place = self.names.index(name)
            self.ready = _collect(self.model, self.names[place : place + self.ahead], self.batches, inputs=False)
            fetched = sum(tensor.nbytes for tensors in self.ready.values() for tensor in tensors)
            # Later layers are seldom larger: next time fetch as many as would have fit this time.
            self.ahead = max(1, self.ahead * _LOOKAHEAD_BYTES // max(fetched, 1))
        return self.ready.pop(name)
