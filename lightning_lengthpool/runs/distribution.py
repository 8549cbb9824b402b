"""Whether lengths are as a pool wants them: distributed alike on all ranks, and in random order over time."""

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_lengthpool.ordering import efficiency

Array = NDArray[np.float64]

SURE = 4.0  # standard deviations
_SURE_OF_DEALS = 6.0  # the same for random deals: they are not normal, for a few of the longest samples decide
_WORTH = 0.01
_FEW = 40  # samples of a stream, of which a drift cannot be told from chance
_FEW_OF_RANK = 20
_DEALS = 100
_DEALT = 5_000_000  # samples in all deals: many ranks have enough of them for fewer deals
_FEWEST_DEALS = 10
_MOST = 500_000  # samples that are looked at


class Difference(NamedTuple):
    """How differently the ranks' lengths are distributed."""

    floor: float  # the idle fraction of the best order of each rank's samples: no pool can go below it
    chance: float  # the same on average, if the samples are dealt to the ranks at random
    is_sure: bool  # whether it is over a point more, and no chance

    @property
    def excess(self) -> float:
        """What the difference costs."""
        return self.floor - self.chance


def difference_of_ranks(costs: Sequence[Array]) -> Difference | None:
    """How differently the ranks' own samples are distributed; None with too few of them to tell.

    The floor is `1 - sum_u mean_r Q_r(u) / sum_u max_r Q_r(u)`, with Q_r(u) rank r's u-th smallest cost. No order
    leaves less: whatever the coupling of the ranks, `P(max <= x) <= min_r P(cost_r <= x)` (the upper bound of Hoeffding
    1940 and Frechet 1951), and sorted costs reach it at every x, so their expected maximum is the smallest.

    A rank counts with as many samples, drawn at random, as the one that has the fewest; each sample comes once, in any
    order. That the difference is no chance is told by the ranks' mean quantiles among all samples (Kruskal and Wallis
    1952), or by a floor that is far beyond that of random deals.

    Example:
        >>> lengths = np.random.default_rng(0).lognormal(6, 1, (2, 1000))
        >>> difference_of_ranks([*lengths]).is_sure, difference_of_ranks([lengths[0], 2 * lengths[1]]).is_sure
        (False, True)
    """
    fewest = min((len(of_rank) for of_rank in costs), default=0)
    if len(costs) < 2 or fewest < _FEW_OF_RANK:
        return None
    fewest = min(fewest, max(_FEW_OF_RANK, _MOST // len(costs)))
    rng = np.random.default_rng(0)
    drawn = np.stack([rng.permutation(of_rank)[:fewest] for of_rank in costs], axis=1)
    floor = floor_of(drawn)
    count = min(max(_DEALT // drawn.size, _FEWEST_DEALS), _DEALS)
    deals = [floor_of(rng.permuted(drawn.ravel()).reshape(drawn.shape)) for _ in range(count)]
    chance = float(np.mean(deals))
    quantiles = _quantiles(drawn.ravel()).reshape(drawn.shape)
    means, variance = quantiles.mean(axis=0), float(quantiles.var(ddof=1)) / fewest
    total = float(((means - means.mean()) ** 2).sum()) / variance if variance > 0 else 0.0
    # by how many standard deviations the largest of so many normal numbers is above their mean (Blom 1958)
    spread = (max(deals) - chance) / NormalDist().inv_cdf((count - 0.375) / (count + 0.25))
    is_sure = _deviations(total, len(costs) - 1) > SURE or floor - chance > _SURE_OF_DEALS * spread
    return Difference(floor, chance, is_sure and floor - chance > _WORTH)


def floor_of(costs: ArrayLike) -> float:
    """The idle fraction that is left when every rank sorts its costs, `[steps, ranks]`."""
    return efficiency.idle_fraction(np.sort(np.asarray(costs, dtype=np.float64), axis=0))


class Drift(NamedTuple):
    """How much lengths change along their streams."""

    size: float  # standard deviation of the stretches' mean quantiles (from 0 to 1) beyond chance
    deviations: float  # by how many standard deviations these vary more than by chance
    ratio: float  # the mean lengths of two stretches of one stream, at most


def drift_of(streams: Sequence[Array], stretch: int) -> Drift | None:
    """How much lengths change along streams, as a pool sees them, which sees one stretch at a time.

    Each sample has its quantile among the lengths of its stream, and each stretch of L samples (half a stream where
    that is shorter) their mean. Of samples in random order these means vary by `v / L`, where v is the variance of the
    quantiles; whether they vary more is asked by a chi-squared test over all stretches. None without a stream that is
    long enough.
    """
    total, freedom, excess, ratio = 0.0, 0, [0.0], 1.0
    long = [stream for stream in streams if len(stream) >= _FEW]
    for stream in long:
        size = min(stretch, len(stream) // 2)
        parts = len(stream) // size
        quantiles, lengths = (
            values[: parts * size].reshape(parts, size).mean(axis=1) for values in (_quantiles(stream), stream)
        )
        chance = float(_quantiles(stream).var(ddof=1)) / size
        if chance > 0:
            total += float(((quantiles - quantiles.mean()) ** 2).sum()) / chance
            freedom += parts - 1
            excess.append(float(quantiles.var(ddof=1)) - chance)
            ratio = max(ratio, float(lengths.max() / max(lengths.min(), 1.0)))
    if not long:
        return None
    return Drift(math.sqrt(max(0.0, sum(excess) / len(long))), _deviations(total, freedom), ratio)


def neighbour_correlation(values: ArrayLike, max_lag: int = 10) -> Array:
    """Pearson correlation of a series with itself `lag` steps later, to see whether an order is random over time.

    Given for lags 1 to `max_lag`, `[max_lag]`; NaN where fewer than two pairs are left or the values do not vary.
    """
    series = np.asarray(values, dtype=np.float64)
    result = np.full(max_lag, np.nan)
    for lag in range(1, min(max_lag, len(series) - 2) + 1):
        early, late = series[:-lag] - series[:-lag].mean(), series[lag:] - series[lag:].mean()
        spread = math.sqrt(float((early**2).sum() * (late**2).sum()))
        if spread > 0:
            result[lag - 1] = float((early * late).sum()) / spread
    return result


def _quantiles(values: Array) -> Array:
    """Each value's quantile among all, from 0 to 1; equal ones share their mean quantile."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    quantiles: Array = ((np.cumsum(counts) - counts / 2) / len(values))[inverse]
    return quantiles


def _deviations(total: float, freedom: int) -> float:
    """How far a chi-squared number is off, in standard deviations (Wilson and Hilferty 1931)."""
    if not freedom:
        return 0.0
    spread = 2 / (9 * freedom)
    return float(((total / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread))
