"""Where training starts: ranges of activations from calibration data, weight scales with the least rounding error."""

from __future__ import annotations

import functools
from contextlib import closing
from typing import TYPE_CHECKING

import torch

from amct.calibration import CalibrationSession
from amct.calibration.session import HIDDEN, INPUT, Stream
from amct.config.plan import OPEN_ENDED
from amct.numerics.adaround.scale import least_error_scale
from amct.numerics.ifmr import IfmrObserver
from amct.numerics.settings import IfmrSettings
from amct.pytorch.qat.functional import trained_parts
from amct.pytorch.qat.layers import quantized_layers
from amct.pytorch.qat.quantizers import ActivationQuantizer
from amct.pytorch.watch.layer_hooks import observe_inputs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn

    from amct.pytorch.qat.layers import QuantizedLayer
    from amct.pytorch.watch.layer_hooks import Arguments

_FEW_BITS = 8
_WIDE_SEARCH = (0.05, 1.01)
"""With few bits the best range cuts off much more than with 8."""


def start_weights(model: nn.Module) -> None:
    """Let the learned scale of every weight start where its squared rounding error is least."""
    for layer in quantized_layers(model).values():
        names = ("weight_quantizer", "state_weight_quantizer")
        for name, part in zip(names, trained_parts(layer), strict=False):
            quantizer = getattr(layer, name)
            found = least_error_scale(
                part.tensor,
                kind=part.kind,
                bits=quantizer.bits,
                channel_wise=quantizer.channel_wise,
                groups=part.gates or part.groups,
            )
            quantizer.restart(part.tensor, found.scale)


def start_activations(model: nn.Module, batches: Iterable[Arguments]) -> dict[str, tuple[float, float]]:
    """Determine the clips that the config does not give from the inputs of each layer in eval mode.

    Returns:
        The clips of every layer.

    Raises:
        CalibrationError: A layer is reached by no batch, or its input is not finite; the message names it.
    """
    layers = quantized_layers(model)
    streams = list(_streams(model))
    modes = {module: module.training for module in model.modules()}
    model.eval()
    session = CalibrationSession(streams)
    handles = [handle for name, layer in layers.items() for handle in observe_inputs(session, name, layer)]
    try:
        with closing(session), torch.no_grad():
            for args, kwargs in batches:
                with session.batch():
                    model(*args, **kwargs)
            session.finish()
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes.items():
            module.training = mode
    for name, layer in layers.items():
        found = session.result.layers[name]
        for stream, quantizer in _quantizers(layer):
            if not quantizer.is_ready:
                quantizer.set_clips(found[stream].clip_min, found[stream].clip_max)
    return {name: layer.activation.clips for name, layer in layers.items()}


def _quantizers(layer: QuantizedLayer) -> Iterator[tuple[str, ActivationQuantizer]]:
    """The activation quantizers of a layer, by the name of their stream."""
    yield INPUT, layer.activation
    state = layer._modules.get("state_quantizer")
    if isinstance(state, ActivationQuantizer):
        yield HIDDEN, state


def _streams(model: nn.Module) -> Iterator[Stream]:
    owners: dict[ActivationQuantizer, str] = {}
    for name, layer in quantized_layers(model).items():
        for what, quantizer in _quantizers(layer):
            leader = owners.setdefault(quantizer, name)
            yield _stream(name, what, quantizer, None if leader == name else (leader, what))


def _stream(name: str, what: str, quantizer: ActivationQuantizer, leader: tuple[str, str] | None) -> Stream:
    search = _WIDE_SEARCH if quantizer.bits < _FEW_BITS else IfmrSettings().search_range
    make = functools.partial(IfmrObserver, bits=quantizer.bits, asymmetric=True, search_range=search)
    return Stream(
        layer=name, name=what, settings=IfmrSettings(), batch_num=OPEN_ENDED, make_observer=make, same_as=leader
    )
