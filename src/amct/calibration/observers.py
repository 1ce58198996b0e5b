"""From the settings of a plan to the observer that follows them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amct.config.registry import activation_of
from amct.numerics.affine import SymmetricScale

if TYPE_CHECKING:
    from amct.config.settings import ActivationSettings
    from amct.numerics.observer import Observer


def make_observer(
    settings: ActivationSettings,
    *,
    channel_axis: int | None = None,
    symmetric_scale: SymmetricScale = SymmetricScale.NEGATIVE_SIDE,
) -> Observer:
    """A new observer.

    Args:
        settings: of a registered activation algorithm, as a plan has them.
        channel_axis: one scale per channel of this axis; None: one for the tensor.
        symmetric_scale: what a symmetric range is divided by: the PyTorch dialect's way, or Caffe's ``FULL_RANGE``.

    Raises:
        ArgumentTypeError: no algorithm with settings of this class is registered.
    """
    return activation_of(settings).observer(settings, channel_axis=channel_axis, symmetric_scale=symmetric_scale)
