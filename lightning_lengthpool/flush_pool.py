"""The pool of policies `none`, `pool` and `blocks`: samples come in, are ordered, and leave by places.

While one pool is handed out the next one fills, one sample in for each place handed out (more, where pools still
grow): training never waits for a whole pool but the first. So a full pool's samples are held, of both together.

The pool's place in the data is saved without the samples. A snapshot, taken when a pool is full, holds that pool's
keys and the state of the data at that moment; what has changed since is a few numbers. Restoring re-reads what is left
of the pool by its keys, and reads on from that state of the data for what had come in since.
"""

from collections.abc import Iterator
from typing import Any

from megatron.energon import SavableDataset
from megatron.energon.wrappers.buffer import SavableSampleBuffer

from lightning_lengthpool.order import Policy, full_size, get_policy
from lightning_lengthpool.pool import Entry, PoolSettings, Size, Slot, rewind
from lightning_lengthpool.state import from_plain, to_plain
from lightning_lengthpool.stream import SNAPSHOT_SAMPLES


class FlushPool:
    """The pool over one worker's stream of encoded samples; see `pool.Pool` for the methods that it shares.

    Args:
        dataset: The stream; `restore_sample` re-reads one of its samples by key.
        settings: The pool.
        batch_size: Places of a slot.
    """

    _saved = ("_turns", "_arrived", "_taken", "_cursor", "_holes")

    def __init__(self, dataset: SavableDataset, settings: PoolSettings, batch_size: int) -> None:
        self.dataset = dataset
        self.settings = settings
        self.batch_size = batch_size
        self.is_off = settings.policy == "none" or not settings.pool_size
        policy = get_policy("none" if self.is_off else settings.policy)
        assert policy is not None  # 'stream' has a pool of its own
        self._policy: Policy = policy
        self.warning: str | None = None
        self.reset()

    def reset(self) -> None:
        config = self.dataset.worker_config
        # The pool that is handed out lies in reverse order, so that the next sample is popped from the end.
        self._ready = SavableSampleBuffer(self.dataset, worker_config=config)
        self._ready_sizes: list[Size] = []
        self._incoming = SavableSampleBuffer(self.dataset, worker_config=config)
        self._incoming_sizes: list[Size] = []
        self._places = 0  # of the pool that is handed out
        self._cursor = 0  # the next of these
        self._holes: dict[int, float] = {}  # those whose sample left out of its turn -> the cost that belongs there
        self.snapshot: dict[str, Any] | None = None
        self._turns = 0  # pools ordered since the snapshot
        self._arrived = 0  # samples that have come in since the snapshot
        self._taken: list[int] = []  # which of these have left out of their turn
        self._pending = False  # a place is to be restored

    def size(self, pool: int) -> int:
        """Samples of one full pool, by its number; without a pool each sample is a pool of its own."""
        if self.is_off:
            return 1
        settings, warmup = self.settings, self.settings.warmup
        growth = None if warmup is None else (warmup.initial, warmup.flushes)
        return full_size(pool, settings.pool_size, settings.policy, self.batch_size, growth)

    def _samples(self, pools: range) -> int:
        """Samples of several full pools in a row."""
        warm = 0 if self.settings.warmup is None else self.settings.warmup.flushes
        growing = range(pools.start, max(pools.start, min(pools.stop, warm)))
        return sum(map(self.size, growing)) + (len(pools) - len(growing)) * self.size(warm)

    # ---- handing out

    def take_slot(self, upstream: Iterator[Any]) -> Slot | None:
        slot = Slot([], [])
        for _ in range(self.batch_size):
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
            length, cost = self._ready_sizes.pop()
            entry = Entry(self._ready.pop(-1), length)
        own, following = self.size(self._pools() - 1), self.size(self._pools())
        self._fill(upstream, -(-self._cursor * following // own) + (-place * following // own))
        return entry, cost

    def take_nearest(self, upstream: Iterator[Any], slot: Slot) -> Slot:
        entries = (self._take_out_of_turn(upstream, cost) for cost in slot.costs)
        return slot._replace(entries=[entry for entry in entries if entry is not None])

    def _take_out_of_turn(self, upstream: Iterator[Any], cost: float) -> Entry | None:
        """Take the sample nearest to `cost`, from both pools; None if there are no more samples."""
        if not self._ready_sizes and not self._incoming_sizes:
            self._fill(upstream, 1)
        candidates = [
            (abs(size.cost - cost), is_ready, index)  # a tie goes to the incoming pool, which leaves no hole
            for is_ready, sizes in enumerate((self._incoming_sizes, self._ready_sizes))
            for index, size in enumerate(sizes)
        ]
        if not candidates:
            return None
        _, is_ready, index = min(candidates)
        if is_ready:
            self._holes[self._left()[index]] = self._ready_sizes[index].cost
            return Entry(self._ready.pop(index), self._ready_sizes.pop(index).length)
        waiting = [number for number in range(self._arrived) if number not in self._taken]
        self._taken.append(waiting[self._samples(self._pools_since()) + index])
        return Entry(self._incoming.pop(index), self._incoming_sizes.pop(index).length)

    def _left(self) -> list[int]:
        """The places that still have their sample, as they lie in `_ready`: the last one first."""
        return [place for place in range(self._places - 1, self._cursor - 1, -1) if place not in self._holes]

    def _fill(self, upstream: Iterator[Any], samples: int) -> None:
        """Let up to `samples` samples in, as long as the incoming pool has room."""
        for _ in range(min(samples, self.size(self._pools()) - len(self._incoming_sizes))):
            try:
                sample = next(upstream)
            except StopIteration:
                return
            self._arrived += 1
            self._let_in(sample)

    def _let_in(self, sample: Any) -> None:
        size = self.settings.measure(sample)  # first: the two must not fall out of step if it raises
        self._incoming.append(sample)
        self._incoming_sizes.append(size)

    def _turn(self, upstream: Iterator[Any]) -> bool:
        """Order the incoming pool and start to hand it out; False if there is nothing left."""
        self._fill(upstream, self.size(self._pools()))
        if not self._incoming_sizes:
            return False
        self._turns += 1
        self._order()
        self._cursor = 0
        if self.snapshot is None or self._arrived >= SNAPSHOT_SAMPLES:
            pools = self._pools()
            self._turns, self._arrived, self._taken = 0, 0, []
            self.snapshot = {"pools": pools, "keys": self._ready.restore_key()[::-1]}
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
        samples, keys = self._incoming.flush()
        # Counted in pools and not in samples that came, so that a rank which has lost a sample keeps the others' seed.
        pool = self._pools() - 1
        start, costs = self._samples(range(pool)), [size.cost for size in self._incoming_sizes]
        order = self._policy(costs, self.size(pool), start, self.settings.seed, self.batch_size)[::-1]
        self._ready.extend([samples[i] for i in order], [keys[i] for i in order])
        self._ready_sizes = [self._incoming_sizes[i] for i in order]
        self._incoming_sizes = []
        self._places = len(order)

    # ---- saving and restoring

    def place(self) -> dict[str, Any]:
        return {name.lstrip("_"): to_plain(getattr(self, name)) for name in self._saved}

    def restore(self, snapshot: dict[str, Any] | None, place: dict[str, Any]) -> None:
        self.reset()
        if snapshot is None:
            rewind(self.dataset)
            return
        self.snapshot = to_plain(snapshot)
        for name in self._saved:
            setattr(self, name, to_plain(place[name.lstrip("_")]))
        self.dataset.restore_state(from_plain(snapshot["data"]))
        self._pending = True

    def start(self, *, lose_pool: bool = False) -> Iterator[Any]:
        if not self._pending:
            return iter(self.dataset)
        self._pending = False
        keys = from_plain(self.snapshot["keys"])
        if self._turns == 0 and not lose_pool:
            self._places = len(keys)
            self._ready.restore_state({"__class__": "SavableSampleBuffer", "_restore_keys": self._keys_left(keys)})
            self._ready.worker_start()
            self._ready_sizes = [self.settings.measure(sample) for sample in self._ready.buffer]
        upstream = iter(self.dataset)
        # Of what has come in since, earlier pools are gone, the next ones are the pool that is handed out, and the rest
        # is the one that fills.
        taken, waiting = set(self._taken), 0
        gone = self._samples(self._pools_since()[:-1])
        for number in range(self._arrived):
            sample = next(upstream)
            if number not in taken:
                if waiting >= gone:
                    self._let_in(sample)
                waiting += 1
        if self._turns:
            size = self.size(self._pools() - 1)
            samples, keys = self._incoming.flush()
            sizes = self._incoming_sizes
            self._incoming.extend(samples[:size], keys[:size])
            self._incoming_sizes = sizes[:size]
            self._order()
            self._keep([] if lose_pool else self._left())
            self._incoming.extend(samples[size:], keys[size:])
            self._incoming_sizes = sizes[size:]
        if lose_pool:
            self._places, self._holes = self._cursor, {}
        return upstream

    def _keys_left(self, keys: list[Any]) -> list[Any]:
        return [keys[place] for place in self._left()]

    def _keep(self, places: list[int]) -> None:
        """Keep these places of a pool that was just ordered: the others had been handed out before."""
        indices = [self._places - 1 - place for place in places]
        samples, keys = self._ready.flush()
        self._ready.extend([samples[i] for i in indices], [keys[i] for i in indices])
        self._ready_sizes = [self._ready_sizes[i] for i in indices]
