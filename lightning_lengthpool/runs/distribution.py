"""Whether lengths are as a pool wants them: distributed alike on all ranks, and in random order over time."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_lengthpool.ordering import efficiency

Array = NDArray[np.float64]


@dataclass(frozen=True)
class NonIid:
    """How much of the idle fraction no pool can remove, for the ranks' lengths are distributed differently.

    Attributes:
        floor: The idle fraction of the best possible order, see `non_iid`.
        chance: The mean of the same for costs that are dealt to the ranks at random.
        chance_max: The largest of these.
    """

    floor: float
    chance: float
    chance_max: float

    @property
    def differs(self) -> bool:
        """Whether the ranks differ by more than chance, by over one point."""
        return self.floor > self.chance_max + 0.01

    @property
    def excess(self) -> float:
        """What the difference costs: `floor - chance`."""
        return self.floor - self.chance


def non_iid(costs: Array, rng: np.random.Generator, deals: int = 20) -> NonIid:
    """The idle fraction that is left when every rank sorts its costs: `1 - sum_u mean_r Q_r(u) / sum_u max_r Q_r(u)`.

    No order leaves less. Whatever the coupling of the ranks, `P(max <= x) <= min_r P(cost_r <= x)` (the upper bound of
    Hoeffding 1940 and Frechet 1951), and sorted costs reach it at every x, so their expected maximum is the smallest.

    Args:
        costs: What each rank's steps cost, in any order, `[steps, ranks]`; Q_r(u) is rank r's u-th smallest.
        rng: Deals the pooled costs to the ranks at random, `deals` times, which shows what chance alone would give.
        deals: See `rng`.
    """
    values = np.asarray(costs, dtype=np.float64)
    floor = efficiency.idle_fraction(np.sort(values, axis=0))
    chance = [
        efficiency.idle_fraction(np.sort(rng.permuted(values.ravel()).reshape(values.shape), 0)) for _ in range(deals)
    ]
    return NonIid(floor, float(np.mean(chance)), max(chance))


def neighbour_correlation(values: ArrayLike, max_lag: int = 10) -> Array:
    """Pearson correlation of a series with itself `lag` steps later, to see whether an order is random over time.

    Args:
        values: One figure a step, `[steps]`.
        max_lag: The largest lag.

    Returns:
        For lags 1 to `max_lag`, `[max_lag]`; NaN where fewer than two pairs are left or the values do not vary.
    """
    series = np.asarray(values, dtype=np.float64)
    result = np.full(max_lag, np.nan)
    for lag in range(1, min(max_lag, len(series) - 2) + 1):
        early, late = series[:-lag] - series[:-lag].mean(), series[lag:] - series[lag:].mean()
        spread = math.sqrt(float((early**2).sum() * (late**2).sum()))
        if spread > 0:
            result[lag - 1] = float((early * late).sum()) / spread
    return result
