"""Which observer finds the range of a tensor between layers, for placement ``fast``.

Most get their minimum and maximum, which is cheap, and there are many of them. The output of a convolution that is only
added to something (the last one of a residual block) gets the range with the least error instead. It has no activation
that bounds it, its outliers are rare, and its step is that of the sum too: the noise of every such block stays in the
sum until the end of the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from amct.numerics.hfmg import HfmgObserver
from amct.numerics.min_max import MinMaxObserver

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from amct.numerics.observer import TensorObserver


def tensor_observers(tensors: Iterable[str], addends: Collection[str]) -> dict[str, TensorObserver]:
    """A new observer for each tensor; ``addends`` are outputs of convolutions that are only added."""
    return {name: HfmgObserver() if name in addends else MinMaxObserver() for name in tensors}
