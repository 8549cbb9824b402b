"""The pool of policies `none`, `pool` and `blocks`: samples come in, are ordered, and leave by places.

While one pool is handed out the next one fills, one sample in for each place handed out (more, where pools still
grow): training never waits for a whole pool but the first. So a full pool's samples are held, of both together.

The pool's place in the data is saved without the samples. A snapshot, taken when a pool is full, holds that pool's
keys and the state of the data at that moment; what has changed since is a few numbers. Restoring re-reads what is left
of the pool by its keys, and reads on from that state of the data for what had come in since.
"""

import math
from array import array
from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any, NamedTuple

import numpy as np
from megatron.energon import SavableDataset
from megatron.energon.wrappers.base import get_sample_restore_key

from lightning_lengthpool.data.pools.arrivals import Arrivals, Replay
from lightning_lengthpool.data.pools.measure import Measured, Measurer
from lightning_lengthpool.data.pools.plain_state import from_plain, to_plain
from lightning_lengthpool.data.pools.pool import SNAPSHOT_SAMPLES, Entry, Slot, rewind
from lightning_lengthpool.ordering.order import ORDERS
from lightning_lengthpool.ordering.settings import PoolSettings

_UNKNOWN = Measured(0.0, 0.0)  # of a sample that was measured when it was saved, and cannot be now


class _Held(NamedTuple):
    sample: Any
    key: Any
    length: float
    cost: float


class _Samples:
    """Samples in a row, each with a number; their costs lie in an array, for a search goes through all of them."""

    def __init__(self, held: Sequence[_Held] = (), numbers: Sequence[int] = ()) -> None:
        self.held = list(held)
        self.numbers = array("q", numbers)
        self._costs = array("d", [one.cost for one in held])

    def __len__(self) -> int:
        return len(self.held)

    def append(self, held: _Held, number: int) -> None:
        self.held.append(held)
        self.numbers.append(number)
        self._costs.append(held.cost)

    def pop(self, index: int = -1) -> tuple[_Held, int]:
        self._costs.pop(index)
        return self.held.pop(index), self.numbers.pop(index)

    def nearest(self, cost: float) -> tuple[float, int]:
        """How far the nearest cost is, and the first index that has it; infinitely far if there is none."""
        if not self.held:
            return math.inf, 0
        distances = np.abs(np.array(self._costs) - cost)
        index = int(distances.argmin())
        return float(distances[index]), index


class FlushPool:
    """The pool over one worker's stream of encoded samples; see `pool.Pool` for the methods that it shares.

    Args:
        dataset: The stream; `restore_sample` re-reads one of its samples by key.
        settings: The pool.
        failure_tolerance: See `measure.Measurer`.
        snapshot_samples: Samples that come in at least between two snapshots.
    """

    _saved = ("_turns", "_arrived", "_taken", "_failed", "_cursor", "_holes")

    def __init__(
        self,
        dataset: SavableDataset,
        settings: PoolSettings,
        failure_tolerance: int | None = 100,
        snapshot_samples: int = SNAPSHOT_SAMPLES,
    ) -> None:
        self.dataset = dataset
        self.settings, self._snapshot_samples = settings, snapshot_samples
        self._measure = Measurer(settings, dataset.worker_config, failure_tolerance)
        self._order_of = ORDERS["none" if settings.is_off else settings.policy]
        self.warning: str | None = None
        self.arrivals = Arrivals()
        self.reset()

    def reset(self) -> None:
        self.arrivals.reset()
        self.differences: list[str] = []
        self._ready = _Samples()  # by places, the last one first, so that the next sample is popped from the end
        self._incoming = _Samples()  # by arrival since the snapshot
        self._places = 0  # of the pool that is handed out
        self._cursor = 0  # the next of these
        self._holes: dict[int, float] = {}  # those whose sample left out of its turn -> the cost that belongs there
        self.snapshot: dict[str, Any] | None = None
        self._turns = 0  # pools ordered since the snapshot
        self._arrived = 0  # samples that have come in since the snapshot
        self._taken: list[int] = []  # which of these have left out of their turn
        self._failed: list[int] = []  # which of these could not be measured
        self._pending: list[Any] | None = None  # what had come in by the place that is to be restored

    # ---- handing out

    def take_slot(self, upstream: Iterator[Any]) -> Slot | None:
        slot = Slot([], [])
        for _ in range(self.settings.slot_size):
            if (place := self._take_place(upstream)) is None:
                break
            entry, cost = place
            if entry is not None:
                slot.entries.append(entry)
            slot.costs.append(cost)
        return slot if slot.costs else None

    def _take_place(self, upstream: Iterator[Any]) -> tuple[Entry | None, float] | None:
        """Hand out the next place, and let one sample in (more, where the next pool is larger).

        Returns:
            The place's sample (None if that has left out of its turn) and the cost that belongs there; None at the
            end of a finite stream.
        """
        if self._cursor == self._places and not self._turn(upstream):
            return None
        place, self._cursor = self._cursor, self._cursor + 1
        entry = None
        if place in self._holes:
            cost = self._holes.pop(place)
        else:
            held, _ = self._ready.pop()
            entry, cost = Entry(held.sample, held.length), held.cost
        own, following = self.settings.size_of_pool(self._pools() - 1), self.settings.size_of_pool(self._pools())
        self._fill(upstream, -(-self._cursor * following // own) + (-place * following // own))
        return entry, cost

    def take_nearest(self, upstream: Iterator[Any], slot: Slot) -> Slot:
        entries = (self._take_out_of_turn(upstream, cost) for cost in slot.costs)
        return slot._replace(entries=[entry for entry in entries if entry is not None])

    def _take_out_of_turn(self, upstream: Iterator[Any], cost: float) -> Entry | None:
        """Take the sample nearest to `cost`, from both pools; None if there are no more samples."""
        if not self._ready and not self._incoming:
            self._fill(upstream, 1)
        if not self._ready and not self._incoming:
            return None
        (near, index), (near_ready, index_ready) = self._incoming.nearest(cost), self._ready.nearest(cost)
        if near <= near_ready:  # a tie goes to the incoming pool, which leaves no hole
            held, number = self._incoming.pop(index)
            self._taken.append(number)
        else:
            held, place = self._ready.pop(index_ready)
            self._holes[place] = float(held.cost)
        return Entry(held.sample, held.length)

    def _left(self) -> list[int]:
        """The places that still have their sample, as they lie in `_ready`: the last one first."""
        return [place for place in range(self._places - 1, self._cursor - 1, -1) if place not in self._holes]

    def _fill(self, upstream: Iterator[Any], samples: int) -> None:
        """Let up to `samples` samples in, as long as the incoming pool has room."""
        size = min(len(self._incoming) + samples, self.settings.size_of_pool(self._pools()))
        while len(self._incoming) < size:
            try:
                sample = next(upstream)
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

    def _turn(self, upstream: Iterator[Any]) -> bool:
        """Order the incoming pool and start to hand it out; False if there is nothing left."""
        self._fill(upstream, self.settings.size_of_pool(self._pools()))
        if not self._incoming:
            return False
        self._turns += 1
        self._order()
        self._cursor = 0
        if self.snapshot is None or self._arrived >= self._snapshot_samples:
            pools = self._pools()
            self._turns, self._arrived, self._taken, self._failed = 0, 0, [], []
            self.snapshot = {
                "pools": pools,
                "keys": [held.key for held in reversed(self._ready.held)],
                "costs": [float(held.cost) for held in reversed(self._ready.held)],
                "arrivals": self.arrivals.state(),
            }
            try:
                self.snapshot = to_plain(self.snapshot | {"data": self.dataset.save_state()})
            except TypeError as error:
                self.snapshot = {"pools": pools, "error": str(error)}
        return True

    def _pools(self) -> int:
        """Pools ordered so far."""
        return self._turns + (self.snapshot["pools"] if self.snapshot else 0)

    def _pools_since(self) -> range:
        """Of these the ones whose samples have all come in since the snapshot."""
        return range(self._pools() - self._turns, self._pools())

    def _order(self) -> None:
        """Make the incoming samples the pool that is handed out."""
        held, self._incoming = self._incoming.held, _Samples()
        # Counted in pools and not in samples that came, so that a rank which has lost a sample keeps the others' seed.
        pool = self._pools() - 1
        start, costs = self.settings.samples_of_pools(range(pool)), [one.cost for one in held]
        settings = self.settings
        order = self._order_of(costs, settings.size_of_pool(pool), start, settings.seed, settings.slot_size)
        self._places = len(order)
        self._ready = _Samples([held[i] for i in reversed(order)], range(len(order) - 1, -1, -1))

    # ---- saving and restoring

    def place(self) -> dict[str, Any]:
        own = {name.lstrip("_"): copy(getattr(self, name)) for name in self._saved}
        return own | {"arrivals": self.arrivals.state()}

    def restore(self, snapshot: dict[str, Any] | None, place: dict[str, Any]) -> None:
        self.reset()
        if snapshot is None:
            rewind(self.dataset)
            return
        self.snapshot = to_plain(snapshot)
        for name in self._saved:
            setattr(self, name, copy(place[name.lstrip("_")]))
        self.dataset.restore_state(from_plain(snapshot["data"]))
        self.arrivals.restore(snapshot["arrivals"])
        self._pending = place["arrivals"]

    def start(self, *, lose_pool: bool = False) -> Iterator[Any]:
        if self._pending is None:
            return iter(self.dataset)
        saved, self._pending = self._pending, None
        replay = Replay(self.dataset, self.settings)
        keys = from_plain(self.snapshot["keys"])
        if self._turns == 0 and not lose_pool:
            self._places = len(keys)
            for place in self._left():
                cost = self.snapshot["costs"][place]
                if (again := replay.sample(keys[place], cost)) is None:
                    self._holes[place] = cost
                    continue
                sample, size = again
                self._ready.append(_Held(sample, keys[place], size.length, size.cost), place)
        upstream = iter(self.dataset)
        # Of what has come in since, earlier pools are gone, the next ones are the pool that is handed out, and the rest
        # is the one that fills.
        taken, failed, waiting = set(self._taken), set(self._failed), 0
        gone = self.settings.samples_of_pools(self._pools_since()[:-1])
        for number, sample in zip(range(self._arrived), upstream, strict=False):
            if number in failed:
                continue
            size = self._measure(sample) or _UNKNOWN
            if number not in taken and waiting >= gone:
                self._let_in(sample, size, number)
            else:
                self.arrivals.add(sample, size.cost)
            waiting += number not in taken
        if not lose_pool:
            replay.compare(self.arrivals, saved)
        self.differences = replay.differences
        if self._turns:
            full, incoming = self.settings.size_of_pool(self._pools() - 1), self._incoming
            self._incoming = _Samples(incoming.held[:full], incoming.numbers[:full])
            self._order()
            self._keep([] if lose_pool else self._left())
            self._incoming = _Samples(incoming.held[full:], incoming.numbers[full:])
        if lose_pool:
            self._places, self._holes = self._cursor, {}
        return upstream

    def _keep(self, places: list[int]) -> None:
        """Keep these places of a pool that was just ordered: the others had been handed out before."""
        self._ready = _Samples([self._ready.held[self._places - 1 - place] for place in places], places)
