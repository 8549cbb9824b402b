"""Simulations of many ranks for a prediction: of what, cut into jobs, and what each rank trains on."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_lengthpool.ordering.cost_model import CostModel
from lightning_lengthpool.ordering.order import batch_shares
from lightning_lengthpool.ordering.reference_costs import ReferenceCosts
from lightning_lengthpool.ordering.settings import PoolSettings
from lightning_lengthpool.simulation.simulate import simulate

Array = NDArray[np.float64]
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Case:
    """A setting.

    Args:
        policy: A name from `order.POLICIES`.
        pool_size: Samples of a pool; 0 for no pool.
        world_size: Data-parallel ranks.
        batch_size: Samples of a micro-batch; with `max_tokens` at most, or None.
        max_tokens: What a batch may cost; only with policy 'stream'.
        has_reference: Whether all ranks aim at the lengths that are known; only with policy 'stream'.
        accumulate: Micro-batches of a step.
    """

    policy: str
    pool_size: int
    world_size: int
    batch_size: int | None
    max_tokens: float | None = None
    has_reference: bool = False
    accumulate: int = 1


@dataclass(frozen=True)
class Lengths:
    """Samples of a data set.

    Args:
        by_rank: Each known rank's lengths, in tokens.
        is_iid: Whether they are distributed alike: then every rank draws from all of them. Else a rank draws from one
            rank's own, and where there are to be more ranks than are known they are taken round and round.
        costs: Each sample's cost, where that is not its length.
        classes: Each sample's class, from 0; a batch then holds one class, with policy 'stream'.
        is_padded: Whether a batch costs its samples times the dearest of them.
        class_shares: Share of the batches that each class has, by its number; None for that of what all samples make.
    """

    by_rank: tuple[Array, ...]
    is_iid: bool = True
    costs: tuple[Array, ...] | None = None
    classes: tuple[NDArray[np.int64], ...] | None = None
    is_padded: bool = True
    class_shares: Sequence[float] | None = None


class Job(NamedTuple):
    """Some ranks of a case to be simulated."""

    case: Case
    columns: tuple[int, ...]  # of which surveyed rank each is; 0 if all are of one distribution
    steps: int
    seed: int
    first: int  # number of its first rank; below 0 for one with resampled lengths

    @property
    def seconds(self) -> float:
        """About how long it takes."""
        samples = self.steps * (self.case.batch_size or 4)
        if self.case.policy != "stream":
            return 2e-7 * len(self.columns) * max(samples, self.case.pool_size)
        take = 4e-6 if self.case.max_tokens is None else 1e-4
        return len(self.columns) * (take * self.steps + 1.5e-6 * samples + 3e-7 * self.case.pool_size)


class Replay(NamedTuple):
    """What some ranks train on."""

    chosen: NDArray[np.int32]  # samples in a row, rank after rank, as places in the table
    samples: Indices  # of each batch, `[ranks, batches]`
    lengths: Array | None = None  # in the place of the table's, if they were resampled

    @staticmethod
    def join(parts: Sequence["Replay"]) -> "Replay":
        return Replay(np.concatenate([part.chosen for part in parts]), np.concatenate([part.samples for part in parts]))


class Table:
    """All lengths, sorted by rank (if ranks differ), class and cost."""

    def __init__(self, lengths: Lengths) -> None:
        self.setting = lengths
        ranks = len(lengths.by_rank)
        if not ranks or not all(len(own) for own in lengths.by_rank):
            raise ValueError("lengths has a rank without a sample, expected at least one of each")
        sizes = [len(own) for own in lengths.by_rank]
        rank = np.zeros(sum(sizes), dtype=np.int64) if lengths.is_iid else np.repeat(np.arange(ranks), sizes)
        own = np.concatenate([np.asarray(values, dtype=np.float64) for values in lengths.by_rank])
        price = own if lengths.costs is None else np.concatenate(lengths.costs)
        kind = np.zeros(len(own), dtype=np.int64) if lengths.classes is None else np.concatenate(lengths.classes)
        order = np.lexsort((price, kind, rank))
        self.lengths, self.costs, self.classes = own[order], price[order], kind[order]
        self.ranks = int(rank.max()) + 1
        self.bounds = np.searchsorted(rank[order], np.arange(self.ranks + 1))
        #: Where the samples of one rank and class begin, and end.
        self.strata = np.flatnonzero(np.diff(rank[order] * (kind.max() + 1) + kind[order], prepend=-1, append=-1))
        by_length = np.argsort(self.lengths, kind="stable")
        self._by_length = by_length
        self._place = np.empty(len(own), dtype=np.int64)
        self._place[by_length] = np.arange(len(own))

    def columns(self, count: int) -> list[int]:
        """The surveyed rank that each of at least `count` simulated ones is like: all of them in turn."""
        turns = -(-count // self.ranks)
        return list(range(self.ranks)) * turns

    def longest(self, replay: Replay) -> Indices:
        """The place in the table of each batch's longest sample, `[batches, ranks]`."""
        places = np.maximum.reduceat(self._place[replay.chosen], starts_of(replay.samples))
        return self._by_length[places].reshape(replay.samples.shape).T

    def resampled(self, rng: np.random.Generator) -> Indices:
        """A bootstrap sample: places in the table, each stratum sorted by cost as it is there."""
        drawn = [
            np.sort(rng.integers(start, stop, size=stop - start))
            for start, stop in zip(self.strata, self.strata[1:], strict=False)
        ]
        return np.concatenate(drawn)

    def shares(self, case: Case) -> list[float]:
        """The share of the batches that each class has."""
        if self.setting.class_shares is not None:
            return list(self.setting.class_shares)
        weights = None if case.max_tokens is None else batch_shares(self.costs, case.max_tokens, case.batch_size)
        held = np.bincount(self.classes, weights=weights)
        return [float(own) for own in held / held.sum()]

    def run(self, job: Job) -> Replay:
        case, setting = job.case, self.setting
        lengths, costs = self.lengths, self.costs
        resampled = None
        if job.first < 0:
            places = self.resampled(np.random.default_rng((job.seed, -job.first)))
            resampled, costs = lengths[places], costs[places]
            lengths = resampled
        parts = [slice(self.bounds[rank], self.bounds[rank + 1]) for rank in job.columns]
        settings = PoolSettings(
            batch_size=case.batch_size,
            pool_size=case.pool_size,
            policy=case.policy,
            seed=job.seed,
            max_tokens=case.max_tokens,
        )
        classes = None
        if settings.is_stream:
            by_class: dict[Hashable, Array] = {None: costs}
            if setting.classes is not None:
                classes = [self.classes[part] for part in parts]
                settings = replace(settings, class_shares=dict(enumerate(self.shares(case))))
                by_class = {label: costs[self.classes == label] for label in np.unique(self.classes).tolist()}
            if case.has_reference:
                settings = replace(settings, reference=ReferenceCosts(by_class))
            settings = replace(settings, cost=None if setting.is_padded else _PADDING_FREE)
        result = simulate(
            [lengths[part] for part in parts],
            settings,
            job.steps,
            rng_seed=(job.seed, abs(job.first)),
            costs=[costs[part] for part in parts],
            classes=classes,
        )
        chosen = [own + part.start for own, part in zip(result.chosen, parts, strict=True)]
        return Replay(np.concatenate(chosen).astype(np.int32), result.samples.T, resampled)


class _PaddingFree(CostModel):
    """Costs are known here; what counts is that a batch costs their sum."""

    @property
    def is_padded(self) -> bool:
        return False

    def of_length(self, length: float) -> float:
        return length


_PADDING_FREE = _PaddingFree()


def starts_of(samples: Indices) -> Indices:
    """Where each batch begins, `[ranks * batches]`."""
    flat = samples.ravel()
    return np.cumsum(flat) - flat
