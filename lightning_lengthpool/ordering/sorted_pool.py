"""The pool of policy `stream`: samples sorted by cost, from which each slot takes one block.

It holds numbers, not samples, so that training and simulation run the same code.

What a block aims at is a quantile of costs: of those in a file that all ranks share, or else of the pool's own last
ones, which tell the distribution better than the few that the pool holds, and so agree better with the other ranks'.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_lengthpool.ordering.order import (
    OWN_PLACE,
    OWN_PLACE_ALONE,
    aimed_block,
    batch_shares,
    block_top,
    budget_block,
    fill_budget,
    stream_block,
    stream_class,
    stream_draw,
)
from lightning_lengthpool.ordering.settings import PoolSettings

Array = NDArray[np.float64]

HISTORY = 4
"""How many times its size a pool remembers costs."""

SNAPSHOT_SAMPLES = 1000
"""Samples between two snapshots of a place, if a pool is smaller: without a pool each sample would take one."""

_RENEWALS = 32  # of the table of a history, while all of it is replaced


class _Quantiles:
    """Costs to aim at, and for a budget how many batches they make up to each.

    Args:
        costs: In any order.
        budget: Of a batch; None for batches of a fixed size.
        batch_size: Samples of a batch; with a budget, at most.
    """

    def __init__(self, costs: Array, budget: float | None = None, batch_size: int | None = None) -> None:
        self.costs = np.sort(costs)
        self.batches = None if budget is None else np.cumsum(batch_shares(self.costs, budget, batch_size))

    def __getitem__(self, u: float) -> float | None:
        """The u-quantile: of the samples, or with a budget of the batches that they make; None of no costs."""
        place = int(u * len(self.costs))
        if self.batches is not None and len(self.batches):
            place = int(np.searchsorted(self.batches, u * self.batches[-1], side="right"))
        return float(self.costs[min(place, len(self.costs) - 1)]) if len(self.costs) else None


class _History:
    """The costs of one class that came in last, and their quantiles, renewed now and then, for sorting takes time.

    Args:
        size: How many costs.
    """

    def __init__(self, size: int) -> None:
        self._size, self._every = size, max(1, size // _RENEWALS)
        self.restore([], 0)

    def restore(self, recent: Sequence[float], since: int) -> None:
        """Go on from a history's `recent` and `since`."""
        self.recent = array("d", recent)  # in the order in which they came: up to `size` for the quantiles, then
        self.since = since  # so many more that came since
        self._renew()

    def start(self, costs: Array) -> None:
        """What `add` of many costs in a row does to a new history."""
        since = (len(costs) - 1) % self._every if len(costs) else 0
        self.restore(costs[max(0, len(costs) - self._size - since) :].tolist(), since)

    def add(self, cost: float) -> None:
        self.recent.append(cost)
        self.since += 1
        if self.since == min(self._every, len(self.recent)):
            del self.recent[: -self._size]
            self.since = 0
            self._renew()

    def _renew(self) -> None:
        known = np.array(self.recent)[: len(self.recent) - self.since]
        self.quantiles = _Quantiles(known)


@lru_cache(maxsize=1 << 14)  # a simulation asks again for each rank
def _draws(seed: int, worker: int, slot: int) -> tuple[float, float]:
    rng = stream_draw(seed, worker, slot)
    return rng.random(), rng.random()


@lru_cache(maxsize=8)
def even_slots(seed: int, count: int) -> tuple[int, ...]:
    """Slots whose random numbers lie evenly between 0 and 1, in their order: the first one in each of `count` parts.

    A simulation of so few steps else has the most expensive blocks too often, or not at all.
    """
    first: dict[int, int] = {}
    slot = 0
    while len(first) < count:
        first.setdefault(int(_draws(seed, 0, slot)[1] * count), slot)
        slot += 1
    return tuple(sorted(first.values()))


@dataclass
class _Sorted:
    """The samples of one class: two arrays, for inserting into them takes microseconds at any size in use."""

    costs: Any = field(default_factory=lambda: array("d"))
    numbers: Any = field(default_factory=lambda: array("q"))

    def pop(self, start: int, stop: int) -> list[int]:
        taken = list(self.numbers[start:stop])
        del self.costs[start:stop], self.numbers[start:stop]
        return taken


class Block(NamedTuple):
    """What a slot takes.

    Attributes:
        numbers: Of the samples, by cost, ascending.
        costs: Of the same.
        kind: Their class.
        meant: The class that the slot is meant for on all ranks: the one that the shared random number names by the
            shared shares. A rank takes another one where its own pool had it so, see `order.stream_class`, or had too
            few of that class.
    """

    numbers: list[int]
    costs: list[float]
    kind: Hashable
    meant: Hashable

    @property
    def missed(self) -> bool:
        """Whether the samples are of another class than the slot is meant for."""
        return self.kind != self.meant


class SortedPool:
    """The samples that one worker holds, sorted by cost.

    Args:
        settings: The pool's; of policy 'stream'. Without `reference` it aims at the quantiles of its own last costs, of
            which it remembers `HISTORY` times its capacity; with `max_tokens` at a block's relative index alone.
        worker: Number of the worker within its rank.
    """

    def __init__(self, settings: PoolSettings, worker: int = 0) -> None:
        self.settings, self.worker = settings, worker
        self._batch_size, self._budget = settings.batch_size, settings.max_tokens
        reference, shares = settings.reference, settings.class_shares
        self._shares: dict[Hashable, float] = {None: 1.0} if shares is None else dict(shares)
        self._classes = {kind: _Sorted() for kind in self._shares}
        self._own_place = OWN_PLACE_ALONE if reference is None else OWN_PLACE
        self._reference: dict[Hashable, _Quantiles] = {}
        self._history: dict[Hashable, _History] = {}
        for kind in self._shares:
            if reference is not None:
                self._reference[kind] = _Quantiles(reference.costs[kind], self._budget, self._batch_size)
            elif self._budget is None:  # which batch fills a budget hardly differs by the history: no gain there
                self._history[kind] = _History(HISTORY * settings.capacity)

    def __len__(self) -> int:
        return sum(len(own.costs) for own in self._classes.values())

    def add(self, number: int, cost: float, kind: Hashable = None) -> None:
        """Let a sample in; of several with one cost the first comes first."""
        if self._history:
            self._history[kind].add(cost)
        own = self._classes[kind]
        place = bisect_right(own.costs, cost)
        own.costs.insert(place, cost)
        own.numbers.insert(place, number)

    def fill(self, costs: Array, kinds: Sequence[Hashable] | None = None) -> None:
        """Let many samples into an empty pool at once, as `add` would one by one, numbered from 0.

        Args:
            costs: Shape `[samples]`, in the order in which they come.
            kinds: Their classes; None for class None.
        """
        for kind in self._classes:
            numbers = np.arange(len(costs))
            if kinds is not None:
                numbers = numbers[[own == kind for own in kinds]]
            if self._history:
                self._history[kind].start(costs[numbers])
            numbers = numbers[np.argsort(costs[numbers], kind="stable")]
            own = self._classes[kind]
            own.costs, own.numbers = array("d", costs[numbers].tobytes()), array("q", numbers.tobytes())

    def items(self) -> Iterator[tuple[int, float, Hashable]]:
        """Number, cost and class of each sample, by class and in order."""
        for kind, own in self._classes.items():
            for number, cost in zip(own.numbers, own.costs, strict=True):
                yield number, cost, kind

    def history(self) -> dict[Hashable, tuple[list[float], int]]:
        """What the pool remembers of each class: costs in the order in which they came, and how many of the last ones
        it does not aim at yet."""
        return {kind: (own.recent.tolist(), own.since) for kind, own in self._history.items()}

    def restore(
        self,
        items: Iterable[tuple[int, float, Hashable]],
        history: Mapping[Hashable, tuple[Sequence[float], int]],
    ) -> None:
        """Make an empty pool equal to the one that gave these `items` (or some of them) and this `history`."""
        for number, cost, kind in items:
            self._classes[kind].numbers.append(number)
            self._classes[kind].costs.append(cost)
        for kind, (recent, since) in history.items():
            if kind in self._history:
                self._history[kind].restore(recent, since)

    def batches(self, kind: Hashable = None) -> float:
        """About how many batches a class holds."""
        costs = self._classes[kind].costs
        if self._budget is None:
            return len(costs) / self.settings.slot_size
        return float(batch_shares(np.array(costs), self._budget, self._batch_size).sum())

    def take(self, slot: int, *, aim: bool = True) -> Block:
        """Take the block of a slot out of the pool, which must not be empty.

        Args:
            slot: 0-based number of the batch in this worker's stream.
            aim: Whether to aim at a cost; not at the end of a finite stream, where a pool empties unevenly.
        """
        u_class, u = _draws(self.settings.seed, self.worker, slot)
        wanted = self._draw_class(u_class)
        kind = wanted if self._suffices(wanted) else self._nearest_class(wanted, u)
        own = self._classes[kind]
        if self._budget is None:
            size = self.settings.slot_size
            # as many blocks on all ranks, however many samples of the class each of them has just now
            blocks = max(1, round(len(self) * self._shares[wanted] / size))
            top = block_top(u, blocks)
            target = self._target(wanted, top) if aim else None
            if target is None:
                start, stop = stream_block(own.costs, u, size)
            else:
                start, stop = aimed_block(own.costs, top, size, target, self._own_place)
        else:
            target = self._target(wanted, u) if aim else None
            table = np.array(own.costs)  # a copy: the array cannot change while NumPy looks at it
            start, stop = budget_block(
                table, u, self._budget, self._batch_size, target, self.settings.is_padded, self._own_place
            )
        costs = list(own.costs[start:stop])
        return Block(own.pop(start, stop), costs, kind, self._class_of_all(u_class))

    def take_nearest(self, costs: Sequence[float], kind: Hashable = None) -> tuple[list[int], Hashable]:
        """Take samples in place of those that a slot had, as like them as the pool has.

        Args:
            costs: Of the slot's samples, ascending.
            kind: Their class; another one if the pool has none of it.

        Returns:
            The samples' numbers (none only if the pool is empty; within the budget, if there is one), and their class.
        """
        if not self._classes[kind].costs:
            kind = max(self._classes, key=lambda other: len(self._classes[other].costs))
        own = self._classes[kind]
        if self._budget is not None and own.costs:
            place = _nearest(own.costs, costs[-1])
            block = fill_budget(np.array(own.costs), place, self._budget, self._batch_size, self.settings.is_padded)
            return own.pop(*block), kind
        numbers = []
        for cost in costs[: len(own.costs)]:
            place = _nearest(own.costs, cost)
            numbers += own.pop(place, place + 1)
        return numbers, kind

    def _target(self, kind: Hashable, u: float) -> float | None:
        """The cost to aim at; None if there is nothing to go by."""
        if self._reference:
            return self._reference[kind][u]
        return self._history[kind].quantiles[u] if self._history else None

    def _class_of_all(self, u: float) -> Hashable:
        """The class that all ranks would draw if their pools held what the shares say."""
        shares = list(self._shares.values())
        return list(self._shares)[stream_class(shares, shares, u)]

    def _draw_class(self, u: float) -> Hashable:
        kinds = list(self._shares)
        if len(kinds) == 1:
            return kinds[0]
        held = [self.batches(kind) for kind in kinds]
        total = sum(held)
        return kinds[stream_class(list(self._shares.values()), [own / total for own in held], u)]

    def _suffices(self, kind: Hashable) -> bool:
        """Whether a class can fill a batch, or the pool has nothing else."""
        size = self.settings.slot_size if self._budget is None else 1
        held = len(self._classes[kind].costs)
        return held >= size or held >= len(self)

    def _nearest_class(self, wanted: Hashable, u: float) -> Hashable:
        """The class that holds the cost nearest to what the slot was meant for."""
        enough = [kind for kind in self._classes if self._suffices(kind)]
        enough = enough or [max(self._classes, key=lambda kind: len(self._classes[kind].costs))]
        target = self._target(wanted, u)
        if target is None:
            return max(enough, key=lambda kind: len(self._classes[kind].costs))

        def distance(kind: Hashable) -> float:
            costs = self._classes[kind].costs
            return abs(float(costs[_nearest(costs, target)]) - target)

        return min(enough, key=distance)


def _nearest(costs: Sequence[float], wanted: float) -> int:
    """The place of the sorted cost nearest to `wanted`, of two the cheaper one."""
    place = bisect_left(costs, wanted)
    if place == len(costs) or (place and wanted - costs[place - 1] <= costs[place] - wanted):
        place -= 1
    return place
