"""The arithmetic of the paired runner: quantiles, per-round ratios, geometric means."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile (0 <= q <= 1), linear between neighbouring order statistics."""
    if not values:
        raise ValueError("quantile of no values")
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


@dataclass(frozen=True)
class Spread:
    """Median with the 20% and 80% quantiles: what every reported figure consists of."""

    median: float
    q20: float
    q80: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(quantile(values, 0.5), quantile(values, 0.2), quantile(values, 0.8))

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.q20:.2f}-{self.q80:.2f}]"


def ratios(numerator: Sequence[float], denominator: Sequence[float]) -> list[float]:
    """Round by round, so that a slow-down of the machine that lasts longer than a round cancels out."""
    return [a / b for a, b in zip(numerator, denominator, strict=True)]


def geometric_mean(values: Sequence[float]) -> float:
    if not values:
        raise ValueError("geometric mean of no values")
    return math.exp(math.fsum(math.log(value) for value in values) / len(values))
