"""AdaRound over a whole model, layer after layer.

The inputs of a layer come from the model whose earlier layers are quantized, its target outputs from the float model.
Inputs and outputs of one layer are held at a time, and the outputs of the next few layers as long as they are small. A
forward stops at the layer that is being learned; outputs of finished modules are cached.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from amct import log
from amct.calibration import ALONE
from amct.calibration.ranks import Meeting, fingerprint
from amct.errors import AmctError, CalibrationError
from amct.numerics.adaround.learning import AdaRoundLayer, AdaRoundResult, CachedData, RowShare, adaround
from amct.numerics.adaround.rounding import Learning
from amct.numerics.integer import ConvolutionGeometry
from amct.numerics.settings import AdaRoundSettings
from amct.pipeline.weights import layer_error
from amct.printable import counted
from amct.pytorch.call_sites import has_own_forward, observe_operation
from amct.pytorch.capture.functional_layers import layer_module, named_layers
from amct.pytorch.capture.layer_types import put_weights
from amct.pytorch.layer_hooks import given_input
from amct.pytorch.onnx.lowering.program import without_mutation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from amct.calibration import Ranks
    from amct.config.plan import LayerPlan
    from amct.pipeline.weights import QuantizedWeights
    from amct.pytorch.capture.trace import Traced
    from amct.pytorch.folding import Fused
    from amct.pytorch.layer_hooks import Arguments
    from amct.pytorch.preparation import TorchPreparation

logger = logging.getLogger(__name__)

_LOOKAHEAD_BYTES = 256 << 20
_SEED = 0
_NAMES_SHOWN = 3


def learn_rounding(
    preparation: TorchPreparation, data: Callable[[], Iterable[Arguments]], *, fast: bool, ranks: Ranks = ALONE
) -> dict[str, QuantizedWeights]:
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
    together = ranks if fast else ALONE
    batches = list(data())  # read once: a loader may shuffle, and inputs and target outputs must match
    quantized = preparation.quantized_copy()
    cache = OutputCache(quantized, [layer.name for layer in layers])
    outputs = _FloatOutputs(preparation.fused.model, [layer.name for layer in layers], batches)
    learned: dict[str, QuantizedWeights] = {}
    notes: dict[str, list[str]] = {}
    with log.bar("AdaRound", len(layers)) as advance:
        for layer in layers:
            advance(0, description=f"AdaRound {layer.name}")
            target = outputs.of(layer.name)
            inputs = _collect(quantized, [layer.name], batches, inputs=True, begin=cache.begin)[layer.name]
            learn = functools.partial(_learn, layer, fast=fast, ranks=together)
            found = _learn_layer(layer.name, preparation, inputs, target, learn, notes)
            put_weights(layer_module(quantized, layer.name), found.real())
            cache.finish(layer.name)
            learned[layer.name] = found
            advance()
    for note, names in notes.items():
        logger.info("%s: %s", _some(names), note)
    return learned


def _some(names: Sequence[str]) -> str:
    """One layer by its name, or the first of several."""
    listed, more = ", ".join(f'"{name}"' for name in names[:_NAMES_SHOWN]), len(names) - _NAMES_SHOWN
    return f"layer{'s' if len(names) > 1 else ''} {listed}" + (f" and {more} more" if more > 0 else "")


def _learn_layer(
    name: str,
    preparation: TorchPreparation,
    inputs: list[Tensor],
    target: list[Tensor],
    learn: Callable[[AdaRoundLayer, CachedData], AdaRoundResult],
    notes: dict[str, list[str]],
) -> QuantizedWeights:
    """Learn one layer; ``notes`` has what is worth saying, with the layers of which it is said."""
    before = preparation.weights[name]
    module = layer_module(preparation.fused.model, name)
    if not inputs:
        raise CalibrationError(f'layer "{name}": no data reaches it, so AdaRound cannot learn; use ARQ for it')
    if not _is_plain_operation(module, inputs[0], target[0]):
        logger.info('layer "%s": its forward uses other settings than its own, so ARQ rounds it, not AdaRound', name)
        return before
    pairs, own = _merged(module, inputs, target)
    (weight,) = before.weights
    bias = getattr(module, "bias", None)
    described = AdaRoundLayer(
        weight=weight.source.balanced(),
        bias=bias.detach().float() if isinstance(bias, Tensor) else None,
        geometry=_geometry(module),
        activation=activation_after(name, preparation.traced, preparation.fused),
    )
    result = learn(described, pairs)
    for note in (*own, *result.notes):
        notes.setdefault(note, []).append(name)
    logger.debug('layer "%s": loss %g, was %g', name, result.final_loss, result.initial_loss)
    learned = replace(weight, qparams=result.qparams, stored=result.weight)
    return replace(before, weights=(learned,), custom_rounding=True)


def _is_plain_operation(module: nn.Module, x: Tensor, y: Tensor) -> bool:
    """Whether torch's own forward of a layer gives the shape that its operation gave (its class may pad elsewhere)."""
    if not has_own_forward(module):
        return True
    own: Any = next(kind for kind in type(module).__mro__ if kind.__module__.startswith("torch.nn."))
    with torch.no_grad():
        return bool(own.forward(module, x).shape == y.shape)


def _learn(
    layer: LayerPlan, described: AdaRoundLayer, pairs: CachedData, *, fast: bool, ranks: Ranks
) -> AdaRoundResult:
    """Learn a layer, of several processes each some of its output channels."""
    settings = layer.weight
    assert isinstance(settings, AdaRoundSettings)
    meeting = None if ranks.is_alone else Meeting(ranks, fingerprint(["AdaRound", layer.name]))
    share = None if meeting is None else RowShare(ranks.rank, ranks.size, functools.partial(_gathered, meeting))
    with log.bar(f"  {layer.name}", max(settings.num_iteration, 1)) as advance:
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
                Learning(**vars(settings), fast=fast),
                generator=torch.Generator().manual_seed(_SEED),
                progress=report,
                share=share,
            )
        except AmctError as error:
            raise layer_error(layer.name, error) from error


def _gathered(meeting: Meeting, rows: Tensor) -> list[Tensor]:
    """The rows that each process has learned."""
    found = meeting.exchange({"rows": rows.cpu().numpy()})
    return [torch.from_numpy(each["rows"]).to(rows.device) for each in found]


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
            count = counted(len(inputs), "batch")
            note = f"AdaRound learns from {len(kept)} of {count}, those of input shape {list(first)}"
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

    def note(name: str, value: object) -> None:
        if name in noted:
            return
        noted.add(name)
        if isinstance(value, Tensor):
            found[name].append(value.detach().clone())
        if name == names[-1]:
            raise _StopForward

    undo = [_watched(layer_module(model, name), functools.partial(note, name), inputs=inputs) for name in names]
    try:
        with torch.no_grad():
            for number, (args, kwargs) in enumerate(batches):
                noted.clear()
                if begin is not None:
                    begin(number)
                with suppress(_StopForward):
                    model(*args, **kwargs)
    finally:
        for each in undo:
            each()
    return found


def _watched(layer: nn.Module, seen: Callable[[object], None], *, inputs: bool) -> Callable[[], None]:
    """Call a function with the input or the output of a layer's operation; returns the undoing."""
    if has_own_forward(layer):  # it may pad its input
        return observe_operation(layer, lambda x, y: seen(x if inputs else y))
    if not inputs:
        return layer.register_forward_hook(lambda _, __, output: seen(output)).remove
    before = layer.register_forward_pre_hook(lambda _, args, kwargs: seen(given_input(args, kwargs)), with_kwargs=True)
    return before.remove


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


# -- the activation behind a layer -------------------------------------------------------------------------------------


_ACTIVATIONS = frozenset(
    {"clamp", "gelu", "hardtanh", "leaky_relu", "prelu", "relu", "relu6", "rrelu", "sigmoid", "tanh"}
)
_LIMITS = {"clamp": (0, 6), "hardtanh": (0, 6)}
"""The limits with which these are ReLU6."""


def activation_after(layer: str, traced: Traced, fused: Fused) -> Callable[[Tensor], Tensor] | None:
    """The activation after a layer (after the batch norm folded into it), which is the only reader of its output.

    AdaRound minimizes the error after it. None when there is no such activation.

    Supported are ReLU, ReLU6, LeakyReLU, PReLU, RReLU, GELU, Sigmoid and Tanh.
    """
    if traced.graph is None or layer not in traced.graph:
        return None
    norm = fused.fusions.get(layer)
    if norm is not None and not traced.graph[norm].attributes["exact"]:
        return None  # the batch norm has an activation inside
    reader = traced.graph.sole_consumer(traced.graph[norm if norm is not None else layer])
    if reader is None or len(reader.inputs) != 1 or reader.op not in _ACTIVATIONS:
        return None
    assert traced.program is not None
    operation = next(node for node in traced.program.graph.nodes if node.name == reader.name)
    settings = operation.args[1:]
    if reader.op in _LIMITS and settings != _LIMITS[reader.op]:
        return None
    if reader.op == "prelu":
        names: Any = reader.attributes["parameters"]
        if len(names) != 1:
            return None  # the slope is computed
        settings = (fused.model.get_parameter(names[0]).detach(),)
    function = without_mutation(operation.target) or operation.target

    def activation(x: Tensor) -> Tensor:
        own = (each.to(x.dtype) if isinstance(each, Tensor) else each for each in settings)
        return function(x, *own, **operation.kwargs)  # type: ignore[no-any-return]

    return activation


# -- outputs of finished modules ---------------------------------------------------------------------------------------


_BUDGET = 512 << 20


class OutputCache:
    """The outputs of finished modules of a copied model, by batch, so that repeated forwards do not compute them again.

    A module is finished when all layers in it and all layers executed before it are learned (or are not to be
    learned): its output for a batch is cached. Of nested modules only the outermost is cached.

    Args:
        model: a copy; the forwards of its modules with parameters are replaced.
        layers: the layers that will be learned, one after the other; call ``finish`` after each.
        budget: the most bytes to cache.
    """

    def __init__(self, model: nn.Module, layers: Iterable[str], budget: int = _BUDGET) -> None:
        self._unfinished = set(layers)
        self._left = budget
        self._outputs: dict[tuple[str, int], Tensor] = {}
        self._calls: Counter[str] = Counter()
        self._called_often: set[str] = set()
        self._batch = 0
        self._all_finished = True
        for name, module in named_layers(model):
            if module is not model and next(module.parameters(), None) is not None:
                module.forward = functools.partial(_cached_forward, self, name, module.forward)  # of this instance

    def begin(self, batch: int) -> None:
        """Start batch number ``batch``; call before its forward."""
        self._batch = batch
        self._all_finished = True
        self._calls.clear()

    def finish(self, layer: str) -> None:
        """Mark a layer as finished; call when its weight is final."""
        self._unfinished.discard(layer)

    def lookup(self, name: str) -> Tensor | None:
        """The cached output of a module for this batch, or None; counts the call."""
        self._calls[name] += 1
        if self._calls[name] > 1:
            self._called_often.add(name)
        found = self._outputs.get((name, self._batch)) if name not in self._called_often else None
        return None if found is None else found.clone()  # the next module may write to it

    def store(self, name: str, output: object) -> None:
        """Cache the output of a module that was executed, if it is finished."""
        if name in self._unfinished:
            self._all_finished = False
        if not self._all_finished or name in self._called_often or not isinstance(output, Tensor):
            return
        for inner in [key for key in self._outputs if key[1] == self._batch and key[0].startswith(f"{name}.")]:
            self._left += self._outputs.pop(inner).nbytes
        if output.nbytes <= self._left:
            self._left -= output.nbytes
            self._outputs[name, self._batch] = output.detach().clone()


def _cached_forward(cache: OutputCache, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  those of the module
    """A forward that returns the cached output if there is one."""
    known = cache.lookup(name)
    if known is not None:
        return known
    result = forward(*args, **kwargs)
    cache.store(name, result)
    return result
