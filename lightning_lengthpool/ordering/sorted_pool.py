"""The pool of policy `stream`: samples sorted by cost, from which each slot takes one block.

It holds numbers, not samples, so that training and simulation run the same code.

What a block aims at is a quantile of costs: of those in a file that all ranks share, or else of the pool's own last
ones, which tell the distribution better than the few that the pool holds, and so agree better with the other ranks'.
"""

from array import array
from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_lengthpool.ordering.settings import PoolSettings
from lightning_lengthpool.ordering.stream.blocks import (
    POOL_WEIGHT,
    POOL_WEIGHT_ALONE,
    aimed_block,
    nearest_index,
    slot_numbers,
    stream_block,
    stream_class,
    top_quantile,
)
from lightning_lengthpool.ordering.stream.budget import batch_shares, budget_block, fill_budget
from lightning_lengthpool.ordering.stream.quantiles import History, Quantiles

Array = NDArray[np.float64]

HISTORY = 4
"""How many times its size a pool remembers costs."""

SNAPSHOT_SAMPLES = 1000
"""Samples between two snapshots of a pool, if it is smaller: without a pool each sample would take one."""


class Block(NamedTuple):
    """What a slot takes."""

    numbers: list[int]  # of the samples, by cost, ascending
    costs: list[float]  # of the same
    class_name: Hashable
    meant_class: Hashable
    """The class that the slot is meant for on all ranks: the one that the shared random number names by the shared
    shares. A rank takes another one where its own pool had it so, see `stream_class`, or had too few of that class."""

    @property
    def missed(self) -> bool:
        """Whether the samples are of another class than the slot is meant for."""
        return self.class_name != self.meant_class


@dataclass
class _Samples:
    """Those of one class, by cost: two arrays, for inserting into them takes microseconds at any size in use."""

    costs: "array[float]" = field(default_factory=lambda: array("d"))
    numbers: "array[int]" = field(default_factory=lambda: array("q"))

    def __len__(self) -> int:
        return len(self.costs)

    def insert(self, number: int, cost: float) -> None:
        index = bisect_right(self.costs, cost)
        self.costs.insert(index, cost)
        self.numbers.insert(index, number)

    def pop(self, start: int, stop: int) -> list[int]:
        taken = list(self.numbers[start:stop])
        del self.costs[start:stop], self.numbers[start:stop]
        return taken


class SortedPool:
    """The samples that one worker holds under policy 'stream', sorted by cost.

    Without `reference` it aims at the quantiles of its own last costs, of which it remembers `HISTORY` times its
    capacity; with `max_tokens` at a block's relative index alone.
    """

    def __init__(self, settings: PoolSettings, worker: int = 0) -> None:
        self.settings, self.worker = settings, worker
        self._batch_size, self._budget = settings.batch_size, settings.max_tokens
        reference = settings.reference
        self._shares: dict[Hashable, float] = dict(settings.class_shares or {None: 1.0})
        self._classes = {name: _Samples() for name in self._shares}
        self._pool_weight = POOL_WEIGHT_ALONE if reference is None else POOL_WEIGHT
        self._reference: dict[Hashable, Quantiles] = {}
        self._history: dict[Hashable, History] = {}
        if reference is not None:
            self._reference = {
                name: Quantiles(reference.costs[name], self._budget, self._batch_size) for name in self._shares
            }
        elif self._budget is None:  # which batch fills a budget hardly differs by the history: no gain there
            self._history = {name: History(HISTORY * settings.capacity) for name in self._shares}

    def __len__(self) -> int:
        return sum(map(len, self._classes.values()))

    def add(self, number: int, cost: float, class_name: Hashable = None) -> None:
        """Let a sample in; of several with one cost the first comes first."""
        if self._history:
            self._history[class_name].add(cost)
        self._classes[class_name].insert(number, cost)

    def fill(self, costs: Array, class_names: Sequence[Hashable] | None = None) -> None:
        """Let many samples, `[samples]`, into an empty pool at once, as `add` would one by one, numbered from 0."""
        for name, samples in self._classes.items():
            numbers = np.arange(len(costs))
            if class_names is not None:
                numbers = numbers[[other == name for other in class_names]]
            if self._history:
                self._history[name].start(costs[numbers])
            numbers = numbers[np.argsort(costs[numbers], kind="stable")]
            samples.costs, samples.numbers = array("d", costs[numbers].tobytes()), array("q", numbers.tobytes())

    def items(self) -> Iterator[tuple[int, float, Hashable]]:
        """Number, cost and class of each sample, by class and in order."""
        for name, samples in self._classes.items():
            for number, cost in zip(samples.numbers, samples.costs, strict=True):
                yield number, cost, name

    def history(self) -> dict[Hashable, tuple[list[float], int]]:
        """What the pool remembers of each class: costs in the order in which they came, and how many of the last ones
        it does not aim at yet."""
        return {name: (history.recent.tolist(), history.since) for name, history in self._history.items()}

    def restore(
        self,
        items: Iterable[tuple[int, float, Hashable]],
        history: Mapping[Hashable, tuple[Sequence[float], int]],
    ) -> None:
        """Make an empty pool equal to the one that gave these `items` (or some of them) and this `history`."""
        for number, cost, name in items:
            self._classes[name].numbers.append(number)
            self._classes[name].costs.append(cost)
        for name, (recent, since) in history.items():
            if name in self._history:
                self._history[name].restore(recent, since)

    def batches(self, class_name: Hashable = None) -> float:
        """About how many batches a class holds."""
        costs = self._classes[class_name].costs
        if self._budget is None:
            return len(costs) / self.settings.slot_size
        return float(batch_shares(np.array(costs), self._budget, self._batch_size).sum())

    def take(self, slot: int, *, aim: bool = True) -> Block:
        """Take the block of a slot (0-based in this worker's stream) out of the pool, which must not be empty.

        `aim` at a cost, but not at the end of a finite stream, where a pool empties unevenly.
        """
        u_class, u = slot_numbers(self.settings.seed, self.worker, slot)
        drawn, meant = self._draw_classes(u_class)
        taken = drawn if self._suffices(drawn) else self._nearest_class(drawn, u)
        samples = self._classes[taken]
        find_block = self._block if self._budget is None else self._full_block
        start, stop = find_block(samples, drawn, u, aim)
        costs = list(samples.costs[start:stop])
        return Block(samples.pop(start, stop), costs, taken, meant)

    def take_nearest(self, costs: Sequence[float], class_name: Hashable = None) -> tuple[list[int], Hashable]:
        """Take samples in place of those that a slot had, as like their `costs` (ascending) as the pool has.

        Returns their numbers (none only if the pool is empty; within the budget, if there is one), and their class:
        another one if the pool has none of `class_name`.
        """
        if not self._classes[class_name]:
            class_name = self._largest_class(self._classes)
        samples = self._classes[class_name]
        if self._budget is not None and samples:
            top = nearest_index(samples.costs, costs[-1])
            all_costs = np.array(samples.costs)
            block = fill_budget(all_costs, top, self._budget, self._batch_size, self.settings.is_padded)
            return samples.pop(*block), class_name
        numbers = []
        for cost in costs[: len(samples)]:
            index = nearest_index(samples.costs, cost)
            numbers += samples.pop(index, index + 1)
        return numbers, class_name

    # ---- blocks

    def _block(self, samples: _Samples, drawn: Hashable, u: float, aim: bool) -> tuple[int, int]:
        """The block of `batch_size` samples that leaves."""
        size = self.settings.slot_size
        # as many blocks on all ranks, however many samples of the class each of them has just now
        top = top_quantile(u, max(1, round(len(self) * self._shares[drawn] / size)))
        target = self._target(drawn, top) if aim else None
        if target is None:
            return stream_block(samples.costs, u, size)
        return aimed_block(samples.costs, top, size, target, self._pool_weight)

    def _full_block(self, samples: _Samples, drawn: Hashable, u: float, aim: bool) -> tuple[int, int]:
        """The block that leaves, of as many samples as fit into the budget."""
        assert self._budget is not None
        target = self._target(drawn, u) if aim else None
        costs = np.array(samples.costs)  # a copy: the array cannot change while NumPy looks at it
        is_padded = self.settings.is_padded
        return budget_block(costs, u, self._budget, self._batch_size, target, is_padded, self._pool_weight)

    def _target(self, class_name: Hashable, u: float) -> float | None:
        """The cost to aim at; None if there is nothing to go by."""
        if self._reference:
            return self._reference[class_name][u]
        return self._history[class_name].quantiles[u] if self._history else None

    # ---- classes

    def _draw_classes(self, u: float) -> tuple[Hashable, Hashable]:
        """The class that this rank draws, and the one that all would if their pools held what the shares say."""
        names, shares = list(self._shares), list(self._shares.values())
        if len(names) == 1:
            return names[0], names[0]
        held = [self.batches(name) for name in names]
        total = sum(held)
        drawn = stream_class(shares, [batches / total for batches in held], u)
        return names[drawn], names[stream_class(shares, shares, u)]

    def _suffices(self, class_name: Hashable) -> bool:
        """Whether a class can fill a batch, or the pool has nothing else."""
        size = self.settings.slot_size if self._budget is None else 1
        held = len(self._classes[class_name])
        return held >= size or held >= len(self)

    def _nearest_class(self, wanted: Hashable, u: float) -> Hashable:
        """The class that holds the cost nearest to what the slot was meant for."""
        enough = list(filter(self._suffices, self._classes)) or [self._largest_class(self._classes)]
        target = self._target(wanted, u)
        if target is None:
            return self._largest_class(enough)

        def distance(class_name: Hashable) -> float:
            costs = self._classes[class_name].costs
            return abs(costs[nearest_index(costs, target)] - target)

        return min(enough, key=distance)

    def _largest_class(self, class_names: Iterable[Hashable]) -> Hashable:
        return max(class_names, key=lambda name: len(self._classes[name]))
