"""Whether the streams that the ranks read are as a pool wants them: alike, and in random order."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_lengthpool.runs.distribution import non_iid

Array = NDArray[np.float64]

SURE = 4.0  # standard deviations
_FEW = 40  # samples of a stream, of which a drift cannot be told from chance
_FEW_OF_RANK = 20
_DEALS = 100  # whose largest lies 2.5 standard deviations over their mean, on average, if they are normal
_SURE_OF_DEALS = 6.0 / 2.5  # they are not, for a few of the longest samples decide
_WORTH = 0.01


class Difference(NamedTuple):
    """How differently the ranks' lengths are distributed.

    Attributes:
        floor: The idle fraction of the best order of each rank's samples, see `distribution.non_iid`.
        chance: The same on average, if the samples are dealt to the ranks at random.
        is_sure: Whether it is over a point more, and no chance.
    """

    floor: float
    chance: float
    is_sure: bool


def difference_of_ranks(by_rank: Sequence[Array]) -> Difference | None:
    """How differently the ranks' own samples are distributed; None with too few of them to tell.

    A rank counts with as many samples, drawn at random, as the one that has the fewest. That the difference is no
    chance is told by the ranks' mean places among all samples (Kruskal and Wallis 1952), or by a floor that is far
    beyond that of random deals.
    """
    fewest = min((len(own) for own in by_rank), default=0)
    if len(by_rank) < 2 or fewest < _FEW_OF_RANK:
        return None
    rng = np.random.default_rng(0)
    drawn = np.stack([rng.permutation(own)[:fewest] for own in by_rank], axis=1)
    found = non_iid(drawn, rng, _DEALS)
    places = _places(drawn.ravel()).reshape(drawn.shape)
    means, chance = places.mean(axis=0), float(places.var(ddof=1)) / fewest
    total = float(((means - means.mean()) ** 2).sum()) / chance if chance > 0 else 0.0
    is_sure = _deviations(total, len(by_rank) - 1) > SURE or found.excess > _SURE_OF_DEALS * (
        found.chance_max - found.chance
    )
    return Difference(found.floor, found.chance, is_sure and found.excess > _WORTH)


class Drift(NamedTuple):
    """How much lengths change along their streams.

    Attributes:
        size: Standard deviation of the stretches' mean places (from 0 to 1) beyond chance.
        deviations: By how many standard deviations these vary more than by chance.
        ratio: The mean lengths of two stretches of one stream, at most.
    """

    size: float
    deviations: float
    ratio: float


def drift_of(streams: Sequence[Array], stretch: int) -> Drift | None:
    """How much lengths change along streams, as a pool sees them, which sees one stretch at a time.

    Each stream's samples get their places in its order of lengths, from 0 to 1 (a tie their mean place), and each
    stretch of L samples its mean place. Of samples in random order these vary by `v / L`, where v is the variance of
    the places; whether they vary more is asked by a chi-squared test over all stretches.

    Args:
        streams: Lengths in the order in which they come.
        stretch: L; half a stream where that is shorter.

    Returns:
        None without a stream that is long enough.
    """
    total, freedom, excess, ratio = 0.0, 0, [0.0], 1.0
    long = [own for own in streams if len(own) >= _FEW]
    for own in long:
        size = min(stretch, len(own) // 2)
        parts = len(own) // size
        places, lengths = (values[: parts * size].reshape(parts, size).mean(axis=1) for values in (_places(own), own))
        chance = float(_places(own).var(ddof=1)) / size
        if chance > 0:
            total += float(((places - places.mean()) ** 2).sum()) / chance
            freedom += parts - 1
            excess.append(float(places.var(ddof=1)) - chance)
            ratio = max(ratio, float(lengths.max() / max(lengths.min(), 1.0)))
    if not long:
        return None
    return Drift(math.sqrt(max(0.0, sum(excess) / len(long))), _deviations(total, freedom), ratio)


def _places(values: Array) -> Array:
    """Each value's place in their order, from 0 to 1; equal ones share their mean place."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    places: Array = ((np.cumsum(counts) - counts / 2) / len(values))[inverse]
    return places


def _deviations(total: float, freedom: int) -> float:
    """How far a chi-squared number is off, in standard deviations (Wilson and Hilferty 1931)."""
    if not freedom:
        return 0.0
    spread = 2 / (9 * freedom)
    return float(((total / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread))
