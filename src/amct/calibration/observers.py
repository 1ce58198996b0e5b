"""From the settings of a plan to the observer that follows them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amct.config.settings import HfmgSettings
from amct.numerics.affine import SymmetricScale
from amct.numerics.hfmg import HfmgObserver
from amct.numerics.ifmr import IfmrObserver

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
        settings: of IFMR or HFMG, as a plan has them.
        channel_axis: one scale per channel of this axis; None: one for the tensor.
        symmetric_scale: what a symmetric range is divided by: the PyTorch dialect's way, or Caffe's ``FULL_RANGE``.
    """
    if isinstance(settings, HfmgSettings):
        return HfmgObserver(
            bits=settings.num_bits,
            asymmetric=settings.asymmetric,
            channel_axis=channel_axis,
            symmetric_scale=symmetric_scale,
            num_of_bins=settings.num_of_bins,
        )
    return IfmrObserver(
        bits=settings.num_bits,
        asymmetric=settings.asymmetric,
        channel_axis=channel_axis,
        symmetric_scale=symmetric_scale,
        max_percentile=settings.max_percentile,
        min_percentile=settings.min_percentile,
        search_range=settings.search_range,
        search_step=settings.search_step,
    )
