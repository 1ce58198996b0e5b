"""The public extension points: a user's own package adds an algorithm without a change to this one.

``register_activation`` adds an activation algorithm: ``<name>_quantize { ... }`` in a simple config,
``"act_algo": "<name>"`` in a full one, and its settings object in a ``QuantConfig``, for models of every framework.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from amct.config.registry import Activation, ObserverFactory
from amct.config.registry import register_activation as _register_activation
from amct.numerics.affine import SymmetricScale
from amct.numerics.observer import ActivationFactors, Observer

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "Activation",
    "ActivationFactors",
    "Observer",
    "ObserverFactory",
    "SymmetricScale",
    "register_activation",
    "registered",
]


def register_activation(*, name: str, settings: type[Any], observer: ObserverFactory) -> Activation:
    """Register an activation algorithm, once, when the module that defines it is imported.

    Registering the same algorithm again changes nothing.

    Args:
        name: ``"toy"`` is chosen by ``toy_quantize { ... }`` in a simple config, ``"act_algo": "toy"`` in a full one.
        settings: A frozen, keyword-only dataclass of bool, int, float, str, Literal and tuple fields, each with a
            default; ``num_bits: int`` and ``asymmetric: bool`` are among them. Ranges are given as
            ``Annotated[float, pydantic.Field(gt=0)]`` and checked for every config, with the line and column of the
            mistake.
        observer: Called as ``observer(settings, channel_axis=..., symmetric_scale=...)`` for every tensor that is
            calibrated; returns an ``Observer``. ``channel_axis`` is None for one scale per tensor.

    Returns:
        The registered algorithm; its ``remove()`` takes it out of the registry.

    Raises:
        ArgumentTypeError: The settings are no such dataclass.
        ArgumentError: Another algorithm has this name or these settings.
    """
    return _register_activation(name, settings, observer)


@contextmanager
def registered(*, name: str, settings: type[Any], observer: ObserverFactory) -> Iterator[Activation]:
    """``register_activation`` for the length of a ``with`` block, as tests need it."""
    algorithm = register_activation(name=name, settings=settings, observer=observer)
    try:
        yield algorithm
    finally:
        algorithm.remove()
