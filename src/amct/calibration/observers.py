"""Creates observers from the activation settings of a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amct.config.registry import activation_of
from amct.numerics.affine import SymmetricScale

if TYPE_CHECKING:
    from amct.numerics.observer import Observer
    from amct.numerics.settings import ActivationSettings


def make_observer(
    settings: ActivationSettings,
    *,
    channel_axis: int | None = None,
    symmetric_scale: SymmetricScale = SymmetricScale.NEGATIVE_SIDE,
) -> Observer:
    """Return a new observer.

    Args:
        settings: The settings of a registered activation algorithm.
        channel_axis: The axis with one scale per channel; None: one scale for the tensor.
        symmetric_scale: The divisor of a symmetric range: that of the PyTorch dialect, or Caffe's ``FULL_RANGE``.

    Raises:
        ArgumentTypeError: No algorithm is registered for this class of settings.
    """
    return activation_of(settings).observer(settings, channel_axis=channel_axis, symmetric_scale=symmetric_scale)
