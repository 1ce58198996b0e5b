"""AMCT's tensor decomposition: a convolution becomes one along the height and one along the width.

``auto_decomposition`` changes structure and weights, and can write what it did to a file; ``decompose_network`` gives
another copy of the model the same structure by that file. Both change the model in place, as AMCT does.
"""

from __future__ import annotations

import logging
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from amct import atomic, log
from amct.arguments import FILE, amct_function, input_file, output_file
from amct.errors import ModelArgumentError
from amct.numerics.low_rank import estimated_rank
from amct.pytorch.decomposition.pairs import (
    SEPARATIONS,
    PairBuilder,
    changes_of,
    info_text,
    put_pairs,
    read_info,
    separation_mode,
    why_not_replaceable,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from amct.atomic import AnyPath

logger = logging.getLogger(__name__)

_FEWEST_CHANNELS = 64
_LARGE_KERNEL = 7
_STEP = 16
"""Ranks are multiples of this."""
_MANY_CHANNELS = 256

_function = amct_function("amct_pytorch", {"model": (nn.Module,), "decompose_info_path": FILE})


@_function
def auto_decomposition(
    model: nn.Module, decompose_info_path: AnyPath | None = None
) -> tuple[nn.Module, dict[str, list[str]]]:
    """Decompose the convolutions of a trained model that are large enough, in place; train it afterwards.

    Args:
        model: any nn.Module; if it is itself a convolution it is not changed.
        decompose_info_path: where the structure is written, as JSON, for ``decompose_network``; there is no file if
            no convolution is decomposed.

    Returns:
        The model, and the new names by the old ones: ``{"conv1": ["conv1.0", "conv1.1"]}``.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a weight holds NaN or infinite values.
        OSError: the file cannot be written.
    """
    where = None if decompose_info_path is None else output_file(decompose_info_path, "decompose_info_path")
    builder, found, pairs, kept = PairBuilder(), {}, {}, {}
    users = _users_of_weights(model)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Conv2d)}
    for name, layer in log.track(layers.items(), "Decomposing"):
        reason = next(filter(None, (_why_kept(user) for user in users.get(id(layer.weight), [layer]))), None)
        if reason is not None:
            kept[name] = reason
            continue
        mode = separation_mode(layer)
        rank = _rank(name, layer)
        pairs[name] = builder.pair(layer, mode, rank, partial(SEPARATIONS[mode].factors, layer.weight.cpu(), rank))
        found[name] = (layer, mode, rank)
    _tell(found, kept)
    if where is not None and found:
        atomic.write_text(where, info_text(found))
    return put_pairs(model, pairs), changes_of(found)


@_function
def decompose_network(model: nn.Module, decompose_info_path: AnyPath) -> tuple[nn.Module, dict[str, list[str]]]:
    """Give a model the structure that a file describes, in place; its new weights have torch's initial values.

    Args:
        model: the model as it was before it was decomposed.
        decompose_info_path: written by ``auto_decomposition``, or by ``save`` of ``amct.pytorch.decompose``.

    Returns:
        The model, and the new names by the old ones.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the file is not such a file, or does not fit the model.
        OSError: the file does not exist.
    """
    path = input_file(decompose_info_path, "decompose_info_path")
    modules = dict(model.named_modules())
    builder, pairs = PairBuilder(), {}
    for info in read_info(atomic.read_bytes(path), str(path), modules):
        layer = modules[info.name]
        pairs[info.name] = builder.pair(layer, info.mode, info.rank)
    return put_pairs(model, pairs), changes_of(pairs)


def _users_of_weights(model: nn.Module) -> dict[int, list[nn.Module]]:
    """The modules that use each weight, by its id: they are decomposed together or not at all."""
    found: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                found.setdefault(id(parameter), []).append(module)
    return found


def _why_kept(layer: nn.Module) -> str | None:
    """Why a layer is not decomposed, by AMCT's rules."""
    if not isinstance(layer, nn.Conv2d):
        return f"{type(layer).__name__} uses its weight too"
    side, channels = min(layer.kernel_size), min(layer.in_channels, layer.out_channels)
    rules = {
        "it has groups": layer.groups > 1,
        "it is dilated": max(layer.dilation) > 1,
        "its stride is above 2": max(layer.stride) > 2,
        "its kernel is smaller than 3": side < 3,
        f"it has fewer than {_FEWEST_CHANNELS} channels": side < _LARGE_KERNEL and channels < _FEWEST_CHANNELS,
        "it has too few channels": side * channels < _STEP,
    }
    return next((reason for reason, holds in rules.items() if holds), None) or why_not_replaceable(layer)


def _rank(name: str, layer: nn.Conv2d) -> int:
    """The estimated rank, within AMCT's limits and steps."""
    weight: Tensor = layer.weight.detach().to("cpu", torch.float64)
    if not torch.isfinite(weight).all():
        raise ModelArgumentError(f'model: the weight of layer "{name}" holds NaN or infinite values')
    matrix = SEPARATIONS[separation_mode(layer)].matrix(weight)
    values = torch.linalg.svdvals(matrix).numpy()
    rows, columns = matrix.shape
    divisor = 4 if min(layer.in_channels, layer.out_channels) >= _MANY_CHANNELS else 6
    estimate = estimated_rank(values, columns)
    rank = max(min(estimate, rows // divisor), rows // (divisor + 1))
    steps = max(_STEP, (rank + _STEP // 2) // _STEP * _STEP)
    return min(steps + _STEP if steps < 0.9 * rank else steps, len(values))


def _tell(found: Collection[str], kept: Mapping[str, str]) -> None:
    reasons = Counter(kept.values())
    told = "; ".join(f"{count} kept: {reason}" for reason, count in reasons.most_common())
    logger.info("%d of %d convolutions decomposed%s", len(found), len(found) + len(kept), f"; {told}" if told else "")
    for name, reason in kept.items():
        logger.debug("%s is kept: %s", name, reason)
