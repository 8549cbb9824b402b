"""Simulations of many ranks for a prediction: of what, cut into jobs, and what each rank trains on."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_lengthpool.ordering.reference_costs import ReferenceCosts
from lightning_lengthpool.ordering.settings import PoolSettings
from lightning_lengthpool.simulation.simulate import simulate
from lightning_lengthpool.simulation.streams import shares_of_batches

Array = NDArray[np.float64]
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Case:
    """What is predicted.

    A simulation is of full pools, so `warmup` plays no part, and `reference` is the known lengths, see `has_reference`.
    """

    settings: PoolSettings
    world_size: int  # data-parallel ranks
    accumulate: int = 1  # micro-batches of a step
    has_reference: bool = False  # whether all ranks aim at the lengths that are known; only with policy 'stream'

    @property
    def policy(self) -> str:
        return self.settings.policy

    @property
    def pool_size(self) -> int:
        return self.settings.pool_size

    @property
    def batch_size(self) -> int | None:
        return self.settings.batch_size

    @property
    def max_tokens(self) -> float | None:
        return self.settings.max_tokens


@dataclass(frozen=True)
class Lengths:
    """Samples of a data set, each known rank's.

    Args:
        by_rank: Lengths in tokens.
        is_iid: Whether they are distributed alike: then every rank draws from all of them. Else a rank draws from one
            known rank's lengths, and where there are to be more ranks than are known, these are taken in turn.
        costs: Each sample's cost, where that is not its length.
        classes: The name of each sample's class; a batch then holds one class, with policy 'stream'. Classes have the
            shares of `class_shares`, those that do not occur left out; without it those of the batches that all
            samples make.
    """

    by_rank: tuple[Array, ...]
    is_iid: bool = True
    costs: tuple[Array, ...] | None = None
    classes: tuple[Sequence[Hashable], ...] | None = None


class Job(NamedTuple):
    """Some ranks of a case to be simulated."""

    case: Case
    columns: tuple[int, ...]  # which known rank each is like; 0 if all are of one distribution
    batches: int  # micro-batches of each rank
    first: int  # number of its first rank; below 0 for a job with resampled lengths

    @property
    def seed(self) -> tuple[int, int]:
        return abs(self.case.settings.seed), abs(self.first)

    @property
    def seconds(self) -> float:
        """About how long it takes."""
        settings = self.case.settings
        samples = self.batches * (settings.batch_size or 4)
        if not settings.is_stream:
            return 2e-7 * len(self.columns) * max(samples, settings.capacity)
        take = 4e-6 if settings.max_tokens is None else 1e-4
        return len(self.columns) * (take * self.batches + 1.5e-6 * samples + 3e-7 * settings.capacity)


class Replay(NamedTuple):
    """What some ranks train on."""

    chosen: NDArray[np.int32]  # samples in a row, rank after rank, as indices into the table
    samples: Indices  # of each batch, `[ranks, batches]`
    lengths: Array | None = None  # in place of the table's, if they were resampled

    @property
    def starts(self) -> Indices:
        """Where in `chosen` each batch begins, `[ranks * batches]`."""
        flat = self.samples.ravel()
        return np.cumsum(flat) - flat

    @staticmethod
    def join(parts: Sequence["Replay"]) -> "Replay":
        return Replay(np.concatenate([part.chosen for part in parts]), np.concatenate([part.samples for part in parts]))


class Table:
    """All lengths, sorted by rank (if ranks differ), class and cost."""

    def __init__(self, known: Lengths) -> None:
        sizes = [len(lengths) for lengths in known.by_rank]
        if not sizes or not all(sizes):
            raise ValueError("lengths has a rank without a sample, expected at least one of each")
        ranks = np.zeros(sum(sizes), dtype=np.int64) if known.is_iid else np.repeat(np.arange(len(sizes)), sizes)
        lengths = np.concatenate([np.asarray(lengths, dtype=np.float64) for lengths in known.by_rank])
        costs = lengths if known.costs is None else np.concatenate(known.costs)
        classes = np.zeros(len(lengths), dtype=np.int64)
        self._class_names: list[Hashable] = []
        if known.classes is not None:
            names, classes = np.unique(np.concatenate(list(map(np.asarray, known.classes))), return_inverse=True)
            self._class_names = names.tolist()
        order = np.lexsort((costs, classes, ranks))
        ranks, self._costs, self._classes = ranks[order], costs[order], classes[order]
        self.lengths = lengths[order]
        self.ranks = int(ranks[-1]) + 1
        self._bounds = np.searchsorted(ranks, np.arange(self.ranks + 1))
        # where the samples of one rank and class begin, and end
        self._strata = np.flatnonzero(np.diff(ranks * (classes.max() + 1) + self._classes, prepend=-1, append=-1))
        self._by_length = np.argsort(self.lengths, kind="stable")
        self._rank_in_length = np.empty(len(lengths), dtype=np.int64)
        self._rank_in_length[self._by_length] = np.arange(len(lengths))

    def columns(self, count: int) -> list[int]:
        """The known rank that each of at least `count` simulated ones is like: all of them in turn."""
        return list(range(self.ranks)) * -(-count // self.ranks)

    def longest(self, replay: Replay) -> Indices:
        """Each batch's longest sample, as an index into the table, `[batches, ranks]`."""
        longest = np.maximum.reduceat(self._rank_in_length[replay.chosen], replay.starts)
        return self._by_length[longest].reshape(replay.samples.shape).T

    def resampled(self, rng: np.random.Generator) -> Indices:
        """A bootstrap sample: indices into the table, each rank and class sorted by cost as it is there."""
        strata = zip(self._strata, self._strata[1:], strict=False)
        return np.concatenate([np.sort(rng.integers(start, stop, size=stop - start)) for start, stop in strata])

    def run(self, job: Job) -> Replay:
        lengths, costs = self.lengths, self._costs
        if job.first < 0:
            indices = self.resampled(np.random.default_rng(job.seed))
            lengths, costs = lengths[indices], costs[indices]
        settings = self._settings(job.case, costs)
        parts = [slice(self._bounds[rank], self._bounds[rank + 1]) for rank in job.columns]
        result = simulate(
            [lengths[part] for part in parts],
            settings,
            job.batches,
            rng_seed=job.seed,
            costs=[costs[part] for part in parts],
            classes=None if settings.class_shares is None else [self._classes[part] for part in parts],
        )
        chosen = [indices + part.start for indices, part in zip(result.chosen, parts, strict=True)]
        return Replay(np.concatenate(chosen).astype(np.int32), result.samples.T, lengths if job.first < 0 else None)

    def _settings(self, case: Case, costs: Array) -> PoolSettings:
        """The settings of a case, with what follows from the costs; classes go by their numbers."""
        settings = replace(case.settings, warmup=None, reference=None, class_fn=None, class_shares=None)
        if not settings.is_stream:
            return settings
        by_class: dict[Hashable, Array] = {None: costs}
        if self._class_names:
            by_class = {number: costs[self._classes == number] for number in range(len(self._class_names))}
            settings = replace(settings, class_shares=dict(enumerate(self._shares(case.settings))))
        return replace(settings, reference=ReferenceCosts(by_class)) if case.has_reference else settings

    def _shares(self, settings: PoolSettings) -> list[float]:
        """The share of the batches that each class has."""
        shares, names = settings.class_shares, self._class_names
        if shares is None or not set(names) <= set(shares):
            return [float(share) for share in shares_of_batches(self._classes, self._costs, settings)]
        of_names = sum(shares[name] for name in names)
        return [shares[name] / of_names for name in names]
