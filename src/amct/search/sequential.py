"""What samples prove about a mean: bounds by betting, which stay right however often one looks.

A gambler bets on each sample against the claim "the mean is m", by a stake that depends on earlier samples only. If the
claim is true, the capital is a supermartingale, so it ever exceeds 1/α with a probability of at most α (Ville): then
the claim is refuted. The bounds hold for any values between two known limits and any number of samples (Waudby-Smith
and Ramdas, Estimating means of bounded random variables by betting, 2023).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_STAKE = 0.9
"""The share of the capital that is lost at most with one sample."""
_STEPS = 60


def upper_bound(values: NDArray[np.float64], smallest: float, largest: float | None, error: float) -> float:
    """With a probability of at least ``1 - error``, the mean is not larger; the number of samples was known before.

    Args:
        values: The samples, in an order that does not depend on them.
        smallest: The smallest possible value.
        largest: The largest possible value; None: the bound comes from the normal distribution, and is about right.
        error: The probability.
    """
    count = len(values)
    if count == 0:
        return math.inf
    if largest is None:
        return float(values.mean()) + _normal_quantile(error) * float(values.std(ddof=min(1, count - 1))) / math.sqrt(
            count
        )
    scaled = (values - smallest) / (largest - smallest)
    floor = max(0.0, -smallest / (largest - smallest)) if smallest < 0 else 0.0
    stakes = _stakes(scaled, error, len(scaled), MOST_STAKE / (1 - floor))
    low, high = floor, 1.0
    if _log_capital(scaled, stakes, low) >= math.log(1 / error):
        return smallest + low * (largest - smallest)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if _log_capital(scaled, stakes, middle) >= math.log(1 / error):
            high = middle
        else:
            low = middle
    return smallest + high * (largest - smallest)


def fewest_samples(limit: float, smallest: float, largest: float, error: float) -> int:
    """How many samples without any loss are needed to prove that the mean loss is at most ``limit``."""
    count = 1
    while upper_bound(np.zeros(count), smallest, largest, error) > limit:
        count *= 2
        if count > 1 << 22:
            return count
    low = count // 2
    while low + 1 < count:
        middle = (low + count) // 2
        if upper_bound(np.zeros(middle), smallest, largest, error) > limit:
            low = middle
        else:
            count = middle
    return count


def _log_capital(scaled: NDArray[np.float64], stakes: NDArray[np.float64], mean: float) -> float:
    """The logarithm of the capital of a bet that the mean is smaller."""
    return float(np.log1p(-stakes * (scaled - mean)).sum())


def _stakes(scaled: NDArray[np.float64], error: float, count: int | None, most: float) -> NDArray[np.float64]:
    """The stake on each sample, from the variance of those before it."""
    number = np.arange(1, len(scaled) + 1)
    mean = (0.5 + np.cumsum(scaled)) / (number + 1)
    variance = (0.25 + np.cumsum((scaled - mean) ** 2)) / (number + 1)
    before = np.concatenate([[0.25], variance[:-1]])
    horizon = number * np.log1p(number) if count is None else np.full(len(scaled), float(count))
    stakes: NDArray[np.float64] = np.minimum(np.sqrt(2 * math.log(1 / error) / (before * horizon)), most)
    return stakes


def _normal_quantile(error: float) -> float:
    """The number that a normal variable exceeds with this probability."""
    low, high = 0.0, 40.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if math.erfc(middle / math.sqrt(2)) / 2 > error else (low, middle)
    return high


@dataclass(frozen=True)
class Decision:
    """Whether the mean of a sequence is known to be above or below a limit; neither: not yet."""

    above: bool = False
    below: bool = False


class Race:
    """Watches a sequence of samples and says as soon as its mean is clearly above or below a limit.

    Args:
        limit: The limit.
        smallest: The smallest possible sample.
        largest: The largest possible sample; None: it never decides.
        error: The probability of a wrong decision, however often it is asked.
    """

    def __init__(self, limit: float, smallest: float, largest: float | None, error: float) -> None:
        self._limit, self._smallest, self._largest, self._error = limit, smallest, largest, error

    def decide(self, values: NDArray[np.float64]) -> Decision:
        """What the samples so far say."""
        if self._largest is None or not len(values):
            return Decision()
        width = self._largest - self._smallest
        scaled, mean = (values - self._smallest) / width, (self._limit - self._smallest) / width
        if not 0 < mean < 1:
            return Decision()
        needed, half = math.log(2 / self._error), self._error / 2
        down = _stakes(scaled, half, None, MOST_STAKE / (1 - mean))
        up = _stakes(scaled, half, None, MOST_STAKE / mean)
        below = np.log1p(-down * (scaled - mean)).cumsum().max() >= needed
        above = np.log1p(up * (scaled - mean)).cumsum().max() >= needed
        return Decision(above=bool(above), below=bool(below) and not above)
