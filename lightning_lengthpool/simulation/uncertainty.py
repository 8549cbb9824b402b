"""How far a prediction may be off: the chance of a finite simulation, and what a sample of lengths leaves open.

A policy sees costs by their order alone. So a simulation once made also tells, to first order, what other lengths would
have given: the sample that was the i-th of the sorted lengths becomes the i-th of the others. With the slowest rank of
each step kept (to first order it stays the slowest) all sums are linear in what the lengths cost, and one simulation
serves as many bootstrap samples as wanted.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_lengthpool.ordering import efficiency
from lightning_lengthpool.simulation.cases import Replay, Table

Array = NDArray[np.float64]
Indices = NDArray[np.int64]
Seconds = Callable[[Array, Array], Array]
"""`seconds(padded, longest)` of micro-batches, as `fit.Fit.seconds`; increasing in both."""

_BLOCKS = 20  # pieces in time
_SAMPLES = 200  # of the bootstrap
_PARTS = 8  # of the ranks, for the jackknife
_CONFIDENCE = 0.9


class Interval(NamedTuple):
    """A fraction, and the bounds between which it lies with a probability of 90 %."""

    mean: float
    low: float
    high: float


class Scored:
    """What simulated ranks train on; like `Simulation` of shape `[batches, ranks]`.

    Args:
        table: The lengths.
        replay: What was simulated.
        accumulate: Micro-batches of a step.
        seconds: As for `predict`.
        blocks: Pieces in time whose figures are taken to be independent.
    """

    def __init__(
        self, table: Table, replay: Replay, accumulate: int, seconds: Seconds | None, blocks: int = _BLOCKS
    ) -> None:
        self.blocks = blocks
        lengths = table.lengths if replay.lengths is None else replay.lengths
        self.replay, self.accumulate = replay, accumulate
        tokens = np.add.reduceat(lengths[replay.chosen], replay.starts).reshape(replay.samples.shape).T
        self.longest = table.longest(replay)
        longest = lengths[self.longest]
        padded: Array = replay.samples.T * longest
        #: Of each step, `[steps, ranks]`.
        self.tokens, self.padded = self._by_step(tokens), self._by_step(padded)
        self.costs = self.padded if seconds is None else self._by_step(costs_of(seconds, padded, longest))

    def _by_step(self, values: Array) -> Array:
        total: Array = values.reshape(-1, self.accumulate, values.shape[1]).sum(axis=1)
        return total

    def figures(self, worlds: Indices, every: int = 1) -> Array:
        """The fractions idle, padding and useful of worlds of some ranks each, `[worlds, ranks]`, taken together."""
        costs, tokens, padded = (
            values[::every, worlds].reshape(-1, worlds.shape[1]) for values in (self.costs, self.tokens, self.padded)
        )
        return np.array(
            [
                efficiency.idle_fraction(costs),
                efficiency.padding_fraction(tokens, padded),
                efficiency.useful_fraction(tokens, padded),
            ]
        )

    def slowest(self, values: Array, worlds: Indices, places: int) -> Array:
        """How often each place of the table is the longest sample of a batch of the rank with most of `values`."""
        rank = np.take_along_axis(worlds, values[:, worlds].argmax(axis=2).T, axis=1).T  # [steps, worlds]
        own = np.take_along_axis(self.longest, np.repeat(rank, self.accumulate, axis=0), axis=1)
        return _counts(own, places)

    def chance(self, worlds: Indices) -> Array:
        """The standard errors of `figures` for so few steps and ranks."""
        ratios = [
            (self.costs[:, worlds].mean(axis=2), self.costs[:, worlds].max(axis=2)),
            (self.tokens[:, worlds].mean(axis=2), self.padded[:, worlds].mean(axis=2)),
            (self.tokens[:, worlds].mean(axis=2), self.padded[:, worlds].max(axis=2)),
        ]
        variances = np.array([_ratio_variance(*ratio, self.blocks) for ratio in ratios])
        if len(worlds) < 4 and worlds.shape[1] >= 2 * _PARTS:  # too few to see how they differ
            without = np.array([self.figures(np.delete(worlds, np.s_[i::_PARTS], axis=1)) for i in range(_PARTS)])
            variances += (_PARTS - 1) * without.var(axis=0)
        errors: Array = np.sqrt(variances)
        return errors


class Bootstrap:
    """Lengths drawn from the lengths, again and again.

    Args:
        table: The lengths.
        seconds: As for `predict`.
    """

    def __init__(self, table: Table, seconds: Seconds | None) -> None:
        self._table, self._seconds = table, seconds
        self._costs: dict[float, Array] = {}

    @cached_property
    def lengths(self) -> Array:
        """`[samples of the bootstrap + 1, lengths]`: the first are the lengths themselves."""
        own = self._table.lengths
        count = int(min(max(4e6 // len(own), 40), _SAMPLES))  # with many lengths a few samples say enough
        rng = np.random.default_rng((42, 1))
        return np.stack([own, *(own[self._table.resampled(rng)] for _ in range(count))])

    def costs(self, samples: float) -> Array:
        """What a batch of so many samples costs whose longest has each of the `lengths`."""
        if self._seconds is None:
            return samples * self.lengths
        if samples not in self._costs:
            self._costs = {samples: costs_of(self._seconds, samples * self.lengths, self.lengths)}
        return self._costs[samples]

    def differences(self, scored: Scored, worlds: Indices) -> Array:
        """By how much `Scored.figures` are off with other lengths, `[samples of the bootstrap, 3]`."""
        n, width, samples = self.lengths.shape[1], worlds.shape[1], float(scored.replay.samples.mean())
        chosen, sizes = scored.replay.chosen, scored.replay.samples
        used = np.bincount(worlds.ravel(), minlength=len(sizes)).astype(np.float64)
        each = np.bincount(chosen, weights=np.repeat(used, sizes.sum(axis=1)), minlength=n).astype(np.float64)
        weigh = [each, _counts(scored.longest[:, worlds], n), scored.slowest(scored.padded, worlds, n)]
        tokens, longest, slowest = (_sums(self.lengths, weights) for weights in weigh)
        work, slowest_work = samples * longest, samples * slowest
        if self._seconds is not None:
            costs = self.costs(samples)
            work, slowest_work = _sums(costs, weigh[1]), _sums(costs, scored.slowest(scored.costs, worlds, n))
        with np.errstate(invalid="ignore", divide="ignore"):  # `efficiency.py`, on sums
            found = np.stack(
                [
                    1 - work / width / slowest_work,
                    1 - tokens / (samples * longest),
                    tokens / (width * samples * slowest),
                ],
                axis=1,
            )
        differences: Array = found[1:] - found[0]
        return differences


def budget_variances(figures: Array, resampled: Sequence[Scored]) -> Array:
    """The variance of figures by what is known of the lengths, from small simulations of resampled ones."""
    worlds = [np.arange(small.costs.shape[1])[None] for small in resampled]
    found = np.array([small.figures(world) for small, world in zip(resampled, worlds, strict=True)])
    by_chance = np.mean([small.chance(world) ** 2 for small, world in zip(resampled, worlds, strict=True)], axis=0)
    variances = found.var(axis=0, ddof=1)
    # what these waste themselves may be another part of it: few ranks wait less
    none_wasted = np.array([0, 0, 1])
    scale = np.abs(figures - none_wasted) / np.maximum(np.abs(found.mean(axis=0) - none_wasted), 1e-9)
    scaled: Array = np.maximum(variances - by_chance, variances / 4) * scale**2
    return scaled


def rank_variances(scored: Scored, surveyed: int, width: int) -> Array:
    """The variance of the figures for a world whose ranks are like some of the surveyed: by a bootstrap of these."""
    rng = np.random.default_rng(0)
    turns = scored.costs.shape[1] // surveyed
    found = []
    for _ in range(40):
        drawn = rng.integers(surveyed, size=surveyed)
        worlds = drawn[rng.integers(surveyed, size=(2, width))] + surveyed * rng.integers(turns, size=(2, width))
        found.append(scored.figures(worlds, every=max(1, len(scored.costs) // 250)))
    variances: Array = np.var(found, axis=0, ddof=1)
    return variances


def interval(value: float, differences: Array, error: float) -> Interval:
    """Bounds from what the bootstrap says of the lengths, and a standard error for all else.

    Few lengths hardly have the longest, so the bootstrap's figures are skewed, and mostly to the wrong side: its
    percentile and its basic interval both lie within the bounds.
    """
    normal = [NormalDist().inv_cdf((place + 0.5) / 25) for place in range(25)]
    drawn = np.add.outer(differences, error * np.array(normal))
    low, high = np.quantile(drawn, [(1 - _CONFIDENCE) / 2, (1 + _CONFIDENCE) / 2])
    low, high = value + min(low, -high), value + max(high, -low)
    return Interval(value, min(value, max(0.0, float(low))), max(value, min(1.0, float(high))))


def costs_of(seconds: Seconds | None, padded: Array, longest: Array) -> Array:
    """What micro-batches cost; a fit may be below 0 where there were no such batches."""
    return padded if seconds is None else np.maximum(seconds(padded, longest), 0.0)


def _ratio_variance(part: Array, whole: Array, blocks: int) -> float:
    """The variance of `sum of part / sum of whole`, both of shape `[steps, worlds]`.

    Steps share the random sequence and worlds their pools, so both are clusters: their variances add up, and what is
    counted twice is taken off (Cameron, Gelbach and Miller 2011, "Robust inference with multiway clustering").
    """
    steps, worlds = part.shape
    blocks = min(blocks, steps)
    total = whole.sum() or np.nan
    rest = (part - part.sum() / total * whole) / total
    cells = np.add.reduceat(rest, np.linspace(0, steps, blocks, endpoint=False, dtype=np.int64), axis=0)
    # of a single piece nothing is known; its sum is 0
    in_time = (cells.sum(axis=1) ** 2).sum() * blocks / max(1, blocks - 1)
    if worlds < 4:
        return float(in_time)
    among = (cells.sum(axis=0) ** 2).sum() * worlds / (worlds - 1)
    return float(max(in_time + among - (cells**2).sum(), in_time, among))


def _sums(values: Array, weights: Array) -> Array:
    """`[rows]` from `values` `[rows, places]` and `weights` `[places]`."""
    sums: Array = np.dot(values, weights)
    return sums


def _counts(places: Indices, size: int) -> Array:
    """How often each of `size` places occurs."""
    counts: Array = np.bincount(places.ravel(), minlength=size).astype(np.float64)
    return counts
