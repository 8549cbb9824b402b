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
"""`seconds(padded, longest)` of micro-batches, increasing in both."""

_BLOCKS = 20  # pieces in time
_SAMPLES = 200  # of the bootstrap
_PARTS = 8  # of the ranks, for the jackknife
_CONFIDENCE = 0.9
_SEED = 42


class Interval(NamedTuple):
    """A fraction, and the bounds between which it lies with a probability of 90 %."""

    mean: float
    low: float
    high: float


class Scored:
    """What simulated ranks train on, in pieces in time (`blocks`) whose figures are taken to be independent.

    Attributes:
        longest: The longest sample of each micro-batch, as an index into the table, `[batches, ranks]`.
        tokens: Real tokens of each step, `[steps, ranks]`.
        padded: The same with padding.
        costs: What the step costs: its seconds, without a fit its padded tokens.
    """

    def __init__(
        self, table: Table, replay: Replay, accumulate: int, seconds: Seconds | None, blocks: int = _BLOCKS
    ) -> None:
        self.replay, self.accumulate, self.blocks = replay, accumulate, blocks
        lengths = table.lengths if replay.lengths is None else replay.lengths
        tokens = np.add.reduceat(lengths[replay.chosen], replay.starts).reshape(replay.samples.shape).T
        self.longest = table.longest(replay)
        longest = lengths[self.longest]
        padded: Array = replay.samples.T * longest
        self.tokens, self.padded = self._by_step(tokens), self._by_step(padded)
        self.costs = self.padded if seconds is None else self._by_step(costs_of(seconds, padded, longest))

    def _by_step(self, values: Array) -> Array:
        total: Array = values.reshape(-1, self.accumulate, values.shape[1]).sum(axis=1)
        return total

    @property
    def world(self) -> Indices:
        """All ranks as one world, `[1, ranks]`."""
        return np.arange(self.costs.shape[1])[None]

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

    def variances(self, worlds: Indices) -> Array:
        """The variances of `figures` by the chance of so few steps and ranks."""
        costs, tokens, padded = (values[:, worlds] for values in (self.costs, self.tokens, self.padded))
        ratios = [
            (costs.mean(axis=2), costs.max(axis=2)),
            (tokens.mean(axis=2), padded.mean(axis=2)),
            (tokens.mean(axis=2), padded.max(axis=2)),
        ]
        variances = np.array([_ratio_variance(part, whole, self.blocks) for part, whole in ratios])
        if len(worlds) < 4 and worlds.shape[1] >= 2 * _PARTS:  # too few to see how they differ
            without = [self.figures(np.delete(worlds, np.s_[part::_PARTS], axis=1)) for part in range(_PARTS)]
            variances += (_PARTS - 1) * np.var(without, axis=0)
        return variances

    def longest_of_slowest(self, values: Array, worlds: Indices) -> Indices:
        """The longest sample of each batch of the rank with most of `values`, `[batches, worlds]`."""
        slowest = np.take_along_axis(worlds, values[:, worlds].argmax(axis=2).T, axis=1).T  # [steps, worlds]
        return np.take_along_axis(self.longest, np.repeat(slowest, self.accumulate, axis=0), axis=1)


class Bootstrap:
    """Lengths drawn from the lengths, again and again."""

    def __init__(self, table: Table, seconds: Seconds | None) -> None:
        self._table, self._seconds = table, seconds
        self._costs: dict[float, Array] = {}

    @cached_property
    def lengths(self) -> Array:
        """`[samples of the bootstrap + 1, lengths]`: the first are the lengths themselves."""
        lengths = self._table.lengths
        count = int(min(max(4e6 // len(lengths), 40), _SAMPLES))  # with many lengths a few samples say enough
        rng = np.random.default_rng((_SEED, 1))
        return np.stack([lengths, *(lengths[self._table.resampled(rng)] for _ in range(count))])

    def costs(self, samples: float) -> Array:
        """What a batch of so many samples costs whose longest has each of the `lengths`."""
        if samples not in self._costs:  # of many cases in a row it is the same number
            self._costs = {samples: costs_of(self._seconds, samples * self.lengths, self.lengths)}
        return self._costs[samples]

    def differences(self, scored: Scored, worlds: Indices) -> Array:
        """By how much `Scored.figures` are off with other lengths, `[samples of the bootstrap, 3]`.

        A sum over steps is here one over lengths: of how often each occurs, times what it costs.
        """
        ranks, sizes = worlds.shape[1], scored.replay.samples
        samples = float(sizes.mean())
        times_used = np.bincount(worlds.ravel(), minlength=len(sizes)).astype(np.float64)  # of each simulated rank
        tokens = self._sums(scored.replay.chosen, self.lengths, np.repeat(times_used, sizes.sum(axis=1)))
        longest = scored.longest[:, worlds]
        padded = samples * self._sums(longest, self.lengths)
        slowest_padded = samples * self._sums(scored.longest_of_slowest(scored.padded, worlds), self.lengths)
        cost, slowest_cost = padded, slowest_padded
        if self._seconds is not None:
            costs = self.costs(samples)
            cost = self._sums(longest, costs)
            slowest_cost = self._sums(scored.longest_of_slowest(scored.costs, worlds), costs)
        with np.errstate(invalid="ignore", divide="ignore"):  # the formulas of `efficiency`, on sums
            idle = 1 - cost / ranks / slowest_cost
            padding = 1 - tokens / padded
            useful = tokens / (ranks * slowest_padded)
        figures = np.stack([idle, padding, useful], axis=1)
        return np.asarray(figures[1:] - figures[0])

    def _sums(self, indices: Indices | NDArray[np.int32], values: Array, weights: Array | None = None) -> Array:
        """The sum of the values of some indices into the table, of each of `[rows, lengths]`."""
        counts = np.bincount(indices.ravel(), weights, minlength=values.shape[1]).astype(np.float64)
        return np.asarray(np.dot(values, counts))


def budget_variances(figures: Array, resampled: Sequence[Scored]) -> Array:
    """The variance of figures by what is known of the lengths, from small simulations of resampled ones."""
    of_resampled = np.array([small.figures(small.world) for small in resampled])
    by_chance = np.mean([small.variances(small.world) for small in resampled], axis=0)
    variances = of_resampled.var(axis=0, ddof=1)
    # what these waste themselves may be another part of it: few ranks wait less
    no_waste = np.array([0, 0, 1])
    scale = np.abs(figures - no_waste) / np.maximum(np.abs(of_resampled.mean(axis=0) - no_waste), 1e-9)
    return np.asarray(np.maximum(variances - by_chance, variances / 4) * scale**2)


def rank_variances(scored: Scored, known_ranks: int, world_size: int) -> Array:
    """The variance of the figures for a world whose ranks are like some of the known ones: by a bootstrap of these."""
    rng = np.random.default_rng(0)
    turns = scored.costs.shape[1] // known_ranks
    figures = []
    for _ in range(40):
        drawn = rng.integers(known_ranks, size=known_ranks)
        ranks = drawn[rng.integers(known_ranks, size=(2, world_size))]
        worlds = ranks + known_ranks * rng.integers(turns, size=(2, world_size))
        figures.append(scored.figures(worlds, every=max(1, len(scored.costs) // 250)))
    return np.asarray(np.var(figures, axis=0, ddof=1))


def interval(value: float, differences: Array, error: float) -> Interval:
    """Bounds from what the bootstrap says of the lengths, and a standard error for all else.

    Few lengths hardly have the longest, so the bootstrap's figures are skewed, and mostly to the wrong side: its
    percentile and its basic interval both lie within the bounds.
    """
    normal = [NormalDist().inv_cdf((i + 0.5) / 25) for i in range(25)]
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
