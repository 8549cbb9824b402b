"""The pool of policies `none`, `pool` and `blocks`: samples come in, are ordered, and leave in that order.

While one pool is handed out the next one fills, one sample in for each one handed out (more, where pools still grow):
training never waits for a whole pool but the first. So a full pool's samples are held, of both together.

The iterator state is saved without the samples. A snapshot, taken when a pool is full, holds that pool's keys and the
state of the data at that moment; what has changed since is a few numbers. To go on, what is left of the pool is re-read
by its keys, and what had come in since is read on from that state of the data.
"""

import math
from array import array
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from megatron.energon.wrappers.base import get_sample_restore_key

from lightning_lengthpool.data.pools.arrivals import ArrivalsState, Replay
from lightning_lengthpool.data.pools.measure import Measured
from lightning_lengthpool.data.pools.plain_state import from_plain, plain_state
from lightning_lengthpool.data.pools.pool import Entry, Pool, Slot
from lightning_lengthpool.ordering.policies import ORDERS

_UNKNOWN = Measured(0.0, 0.0)  # of a sample that was measured when it was saved, and cannot be now


@plain_state("keys", "costs", "data")
@dataclass(frozen=True)
class FlushSnapshot:
    """A pool that was just ordered, and what had been read by then."""

    pools: int  # ordered by then, with this one
    keys: list[Any]  # of the pool's samples, in their order, plain
    costs: list[float]  # of the same
    arrivals: ArrivalsState
    data: Any  # energon's state of the data, plain
    error: str | None = None  # why there is none; None if there is


@plain_state()
@dataclass(frozen=True)
class FlushState:
    """A flush pool's iterator state: a snapshot, and what has changed since."""

    snapshot: FlushSnapshot | None  # None before the first batch
    pools: int  # ordered so far
    index: int  # which sample of the pool that is handed out is the next one
    holes: tuple[tuple[int, float], ...]  # `(index, cost)` of following ones that left out of their turn
    arrived: int  # how many samples have come in since the snapshot
    taken: tuple[int, ...]  # which of these have left out of their turn, before their pool was ordered
    failed: tuple[int, ...]  # which of these could not be measured
    arrivals: ArrivalsState
    dropped: ClassVar[int] = 0


class _Held(NamedTuple):
    sample: Any
    key: Any
    length: float
    cost: float


class _Samples:
    """Samples in a row, each with a number; their costs lie in an array, for a search goes through all of them."""

    def __init__(self, samples: Iterable[tuple[_Held, int]] = ()) -> None:
        self.held: list[_Held] = []
        self.numbers, self._costs = array("q"), array("d")
        for held, number in samples:
            self.append(held, number)

    def __len__(self) -> int:
        return len(self.held)

    def append(self, held: _Held, number: int) -> None:
        self.held.append(held)
        self.numbers.append(number)
        self._costs.append(held.cost)

    def pop(self, index: int = -1) -> tuple[_Held, int]:
        self._costs.pop(index)
        return self.held.pop(index), self.numbers.pop(index)

    def items(self) -> list[tuple[_Held, int]]:
        return list(zip(self.held, self.numbers, strict=True))

    def nearest(self, cost: float) -> tuple[float, int]:
        """How far the nearest cost is, and the first index that has it; infinitely far if there is none."""
        if not self.held:
            return math.inf, 0
        distances = np.abs(np.array(self._costs) - cost)
        index = int(distances.argmin())
        return float(distances[index]), index


class FlushPool(Pool[FlushState]):
    """Fills, is ordered, and is handed out as a whole; see `pool.Pool`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._order_of = ORDERS["none" if self.settings.is_off else self.settings.policy]
        self._ready = _Samples()  # numbered by their order, the last one first: the next sample is popped from the end
        self._incoming = _Samples()  # numbered by arrival since the snapshot
        self._pools = 0  # ordered so far
        self._size = 0  # of the pool that is handed out
        self._index = 0  # the next of its samples
        self._holes: dict[int, float] = {}  # those that have left out of their turn -> the cost that belongs there
        self._snapshot: FlushSnapshot | None = None
        self._arrived = 0  # samples that have come in since the snapshot
        self._taken: list[int] = []  # which of these have left out of their turn
        self._failed: list[int] = []  # which of these could not be measured

    # ---- handing out

    def _take_slot(self) -> Slot | None:
        slot = Slot([], [])
        for _ in range(self.settings.slot_size):
            if self._index == self._size and not self._turn():
                break
            index, self._index = self._index, self._index + 1
            if index in self._holes:
                slot.costs.append(self._holes.pop(index))
            else:
                held, _ = self._ready.pop()
                slot.entries.append(Entry(held.sample, held.length))
                slot.costs.append(held.cost)
            self._fill(self._due(self._index) - self._due(index))
        return slot if slot.costs else None

    def _due(self, index: int) -> int:
        """How many samples of the next pool come in until the sample at `index` leaves: in proportion to the sizes."""
        size, following = (self.settings.size_of_pool(pool) for pool in (self._pools - 1, self._pools))
        return -(-index * following // size)

    def take_nearest(self, slot: Slot) -> Slot:
        entries = (self._take_out_of_turn(cost) for cost in slot.costs)
        return slot._replace(entries=[entry for entry in entries if entry is not None])

    def _take_out_of_turn(self, cost: float) -> Entry | None:
        """Take the sample nearest to `cost`, from both pools; None if there are no more samples."""
        if not self._ready and not self._incoming:
            self._fill(1)
        if not self._ready and not self._incoming:
            return None
        (distance, number), (distance_ready, number_ready) = self._incoming.nearest(cost), self._ready.nearest(cost)
        if distance <= distance_ready:  # a tie goes to the incoming pool, which leaves no hole
            held, arrival = self._incoming.pop(number)
            self._taken.append(arrival)
        else:
            held, index = self._ready.pop(number_ready)
            self._holes[index] = float(held.cost)
        return Entry(held.sample, held.length)

    def _fill(self, samples: int) -> None:
        """Let up to `samples` samples in, as long as the incoming pool has room."""
        size = min(len(self._incoming) + samples, self.settings.size_of_pool(self._pools))
        while len(self._incoming) < size:
            try:
                sample = next(self._upstream)
            except StopIteration:
                return
            if (measured := self._measure(sample)) is None:
                self._failed.append(self._arrived)
            else:
                self._let_in(sample, measured, self._arrived)
            self._arrived += 1

    def _let_in(self, sample: Any, size: Measured, number: int) -> None:
        self.arrivals.add(sample, size.cost)
        self._incoming.append(_Held(sample, get_sample_restore_key(sample), size.length, size.cost), number)

    def _turn(self) -> bool:
        """Order the incoming pool and start to hand it out; False if there is nothing left."""
        self._fill(self.settings.size_of_pool(self._pools))
        if not self._incoming:
            return False
        self._pools += 1
        self._order()
        self._index = 0
        if self._snapshot is None or self._arrived >= self._snapshot_samples:
            self._take_snapshot()
        return True

    def _order(self) -> None:
        """Make the incoming samples the pool that is handed out."""
        held, self._incoming = self._incoming.held, _Samples()
        # Counted in pools and not in samples that came, so that a rank which has lost a sample keeps the others' seed.
        settings, pool = self.settings, self._pools - 1
        size, start = settings.size_of_pool(pool), settings.samples_of_pools(range(pool))
        order = self._order_of([one.cost for one in held], size, start, settings.seed, settings.slot_size)
        self._size = len(order)
        self._ready = _Samples((held[order[index]], index) for index in reversed(range(len(order))))

    # ---- saving and going on

    def _take_snapshot(self) -> None:
        self._arrived, self._taken, self._failed = 0, [], []
        ordered = self._ready.held[::-1]
        self._snapshot = FlushSnapshot(
            pools=self._pools,
            costs=[float(held.cost) for held in ordered],
            arrivals=self.arrivals.state(),
            **self._saved([held.key for held in ordered]),
        )

    def state(self) -> FlushState:
        return FlushState(
            snapshot=self._snapshot,
            pools=self._pools,
            index=self._index,
            holes=tuple(self._holes.items()),
            arrived=self._arrived,
            taken=tuple(self._taken),
            failed=tuple(self._failed),
            arrivals=self.arrivals.state(),
        )

    def _go_on(self, state: FlushState, replay: Replay | None) -> None:
        snapshot = state.snapshot
        assert snapshot is not None
        self._snapshot, self._pools, self._index = snapshot, state.pools, state.index
        self._holes, self._taken, self._failed = dict(state.holes), list(state.taken), list(state.failed)
        since = range(snapshot.pools, state.pools)  # the numbers of the pools that were ordered since the snapshot
        if not since and replay is not None:
            self._read_by_keys(snapshot, replay)
        self._upstream = iter(self.dataset)
        self._read_since(state.arrived, skip=self.settings.samples_of_pools(since[:-1]))
        if since:  # the first samples are those of the pool that is handed out, the others fill the next one
            arrived, size = self._incoming.items(), self.settings.size_of_pool(since[-1])
            self._incoming = _Samples(arrived[:size])
            self._order()
            self._keep(self._left() if replay is not None else ())
            self._incoming = _Samples(arrived[size:])
        if replay is None:
            self._size, self._holes = self._index, {}

    def _left(self) -> list[int]:
        """Which samples of the pool have not left: the last one first, as they lie in `_ready`."""
        return [index for index in range(self._size - 1, self._index - 1, -1) if index not in self._holes]

    def _keep(self, indices: Container[int]) -> None:
        """Drop the others of a pool that was just ordered again: they had left."""
        self._ready = _Samples((held, index) for held, index in self._ready.items() if index in indices)

    def _read_by_keys(self, snapshot: FlushSnapshot, replay: Replay) -> None:
        """Re-read what is left of the snapshot's pool."""
        keys = from_plain(snapshot.keys)
        self._size = len(keys)
        for index in self._left():
            cost = snapshot.costs[index]
            if (again := replay.sample(keys[index], cost)) is None:
                self._holes[index] = cost
            else:
                sample, size = again
                self._ready.append(_Held(sample, keys[index], size.length, size.cost), index)

    def _read_since(self, arrived: int, *, skip: int) -> None:
        """Read the `arrived` samples once more that have come in since the snapshot.

        The first `skip` of them, but for those that left out of their turn, belonged to pools that are gone.
        """
        taken, failed = set(self._taken), set(self._failed)
        for number, sample in zip(range(arrived), self._upstream, strict=False):
            if number in failed:
                continue
            size = self._measure(sample) or _UNKNOWN
            if number in taken or skip:
                self.arrivals.add(sample, size.cost)
                skip -= number not in taken
            else:
                self._let_in(sample, size, number)
        self._arrived = arrived
