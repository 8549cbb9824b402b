"""The pool of policy `stream`: as many samples come in as leave, and each slot takes a block of what is there.

The iterator state is a snapshot (keys and costs of the samples held then, the last costs, the state of the data) and
how many slots have left since. Which samples a slot takes depends on costs, seed, worker and slot number only, so to go
on the slots are REPLAYED on the snapshot's costs, reading again what had come in since; only of the samples that are
still held then the content is re-read by key.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.energon.wrappers.base import get_sample_restore_key

from lightning_lengthpool.data.pools.arrivals import ArrivalsState, Replay
from lightning_lengthpool.data.pools.measure import Measured
from lightning_lengthpool.data.pools.plain_state import from_plain, plain_state
from lightning_lengthpool.data.pools.pool import Entry, Pool, Slot
from lightning_lengthpool.ordering.length import get_field
from lightning_lengthpool.ordering.sorted_pool import Block, SortedPool

_TOO_MANY = 1000  # samples in a row that are left out: an endless stream of them would be read for ever


@plain_state("costs", "classes", "history", "keys", "data")
@dataclass(frozen=True)
class StreamSnapshot:
    """What a stream pool held at some moment."""

    slots: int  # handed out by then
    worker: int  # whose draws these were
    costs: list[float]  # of the samples, by class and in order
    classes: list[Hashable] | None  # of the same; None without classes
    history: list[tuple[Hashable, list[float], int]]  # `(class, costs, how many of the last are not aimed at yet)`
    dropped: int  # samples that were left out
    arrivals: ArrivalsState
    keys: list[Any]  # of the samples, plain
    data: Any  # energon's state of the data, plain
    error: str | None = None  # why there are none; None if there are


@plain_state()
@dataclass(frozen=True)
class StreamState:
    """A stream pool's iterator state: a snapshot, and what has changed since."""

    snapshot: StreamSnapshot | None  # None before the first batch
    slots: int  # handed out since the snapshot
    again: tuple[tuple[int, int], ...]  # which of these took other samples, and how often: `(slot, times)`
    failed: tuple[int, ...]  # which of the samples that came in since could not be measured
    dropped: int  # samples left out so far, since the beginning
    arrivals: ArrivalsState


class _Held(NamedTuple):
    sample: Any  # None for one that a replay has not needed yet
    key: Any
    length: float


class StreamPool(Pool[StreamState]):
    """Stays full, and each slot takes a block of it; see `pool.Pool`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sorted = SortedPool(self.settings, 0)
        self._held: dict[int, _Held] = {}
        self._next_number = 0
        self._slots = 0
        self._snapshot: StreamSnapshot | None = None
        self._arrived = 0  # samples that have come in since the snapshot
        self._failed: set[int] = set()  # which of these could not be measured
        self._again: dict[int, int] = {}  # slot since the snapshot -> how often it took other samples
        self._ended = False
        self._dropped = self._dropped_in_a_row = 0
        self._warned = False

    def start(self, state: StreamState | None = None, *, lose: bool = False) -> Iterator[Slot]:
        slots = super().start(state, lose=lose)
        worker = self.dataset.worker_config.rank_worker_id()
        if self._sorted.worker != worker:  # at the beginning, or in a run of another shape
            self._sorted.worker, self._arrived = worker, self._snapshot_every
        return slots

    # ---- handing out

    def _take_slot(self) -> Slot | None:
        self._fill()
        if self._snapshot is None or self._arrived >= self._snapshot_every:
            self._take_snapshot()
        if not len(self._sorted):
            return None
        block = self._take()
        return Slot(self._entries(block.numbers), block.costs, block.class_name, block.meant_class)

    def take_nearest(self, slot: Slot) -> Slot:
        last = self._slots - 1
        self._again[last] = self._again.get(last, 0) + 1
        numbers, class_name = self._take_numbers(slot.costs, slot.class_name)
        return slot._replace(entries=self._entries(numbers), class_name=class_name)

    def _take(self) -> Block:
        block = self._sorted.take(self._slots, aim=not self._ended)
        self._slots += 1
        return block

    def _take_numbers(self, costs: list[float], class_name: Hashable) -> tuple[list[int], Hashable]:
        if not len(self._sorted):
            self._fill()
        return self._sorted.take_nearest(costs, class_name)

    def _entries(self, numbers: list[int]) -> list[Entry]:
        held = [self._held.pop(number) for number in numbers]
        return [Entry(one.sample, one.length) for one in held]

    def _fill(self) -> None:
        while len(self._sorted) < self.settings.capacity and not self._ended:
            try:
                sample = next(self._upstream)
            except StopIteration:
                self._ended = True
                return
            if self._arrived not in self._failed:  # in a replay these are known
                self._let_in(sample)
            self._arrived += 1

    def _let_in(self, sample: Any) -> None:
        if (size := self._measure(sample)) is None:
            self._failed.add(self._arrived)
            return
        self.arrivals.add(sample, size.cost)
        self._require_share(sample, size.class_name)
        if self._fits(sample, size):
            self._dropped_in_a_row = 0
            self._add(_Held(sample, get_sample_restore_key(sample), size.length), size.cost, size.class_name)
            return
        self._dropped += 1
        self._dropped_in_a_row += 1
        if self._dropped_in_a_row == _TOO_MANY:
            raise ValueError(
                f"{_TOO_MANY} samples in a row cost more than a whole batch may (max_tokens is "
                f"{self.settings.max_tokens:g}) and were left out, the last one with the key "
                f"{get_field(sample, '__key__')!r} and a cost of {size.cost:g}. Raise max_tokens."
            )

    def _add(self, held: _Held, cost: float, class_name: Hashable) -> None:
        self._sorted.add(self._next_number, cost, class_name)
        self._held[self._next_number] = held
        self._next_number += 1

    def _fits(self, sample: Any, size: Measured) -> bool:
        """Whether a sample may come in; one that costs more than a batch may is a batch of its own there."""
        budget, over = self.settings.max_tokens, self.settings.over_budget
        if budget is None or size.cost <= budget or over == "alone":
            return True
        if over == "drop":
            return False
        raise ValueError(
            f"sample {get_field(sample, '__key__')!r} costs {size.cost:g}, more than a whole batch may (max_tokens is "
            f"{budget:g}). Raise max_tokens; or set over_budget to 'alone', and it is a batch of its own, which takes "
            "as much memory as it takes; or to 'drop', and such samples are left out and counted."
        )

    def _require_share(self, sample: Any, class_name: Any) -> None:
        shares = self.settings.class_shares
        if shares is not None and (not isinstance(class_name, str) or class_name not in shares):
            raise ValueError(
                f"sample {get_field(sample, '__key__')!r} is of class {class_name!r}, which has no share: expected one "
                f"of {', '.join(map(repr, shares))}. Give it a share in class_shares (or in the reference_lengths), or "
                "let class_fn name another class."
            )

    # ---- saving and going on

    @property
    def _snapshot_every(self) -> int:
        """Samples that come in between two snapshots."""
        return max(self.settings.capacity, self._snapshot_samples)

    def _take_snapshot(self) -> None:
        items = list(self._sorted.items())
        self._arrived, self._failed, self._again = 0, set(), {}
        self._snapshot = StreamSnapshot(
            slots=self._slots,
            worker=self._sorted.worker,
            costs=[float(cost) for _, cost, _ in items],
            classes=None if self.settings.class_fn is None else [class_name for _, _, class_name in items],
            history=[(class_name, recent, since) for class_name, (recent, since) in self._sorted.history().items()],
            dropped=self._dropped,
            arrivals=self.arrivals.state(),
            **self._saved([self._held[number].key for number, _, _ in items]),
        )
        self._check_drift()

    def state(self) -> StreamState:
        return StreamState(
            snapshot=self._snapshot,
            slots=self._slots - self._snapshot.slots if self._snapshot else 0,
            again=tuple(self._again.items()),
            failed=tuple(sorted(self._failed)),
            dropped=self._dropped,
            arrivals=self.arrivals.state(),
        )

    def _go_on(self, state: StreamState, replay: Replay | None) -> None:
        self._upstream = iter(self.dataset)
        self._replay_slots(state)
        if self._read_by_keys(replay):
            self._arrived = self._snapshot_every  # what follows is no replay: a new snapshot is due

    def _replay_slots(self, state: StreamState) -> None:
        """Take the slots since the snapshot once more, to know what is held after them."""
        snapshot = state.snapshot
        assert snapshot is not None
        self._snapshot, self._slots, self._dropped = snapshot, snapshot.slots, snapshot.dropped
        self._again, self._failed = dict(state.again), set(state.failed)
        self._held = {number: _Held(None, key, 0.0) for number, key in enumerate(from_plain(snapshot.keys))}
        self._next_number = len(self._held)
        self._sorted = SortedPool(self.settings, snapshot.worker)
        classes = snapshot.classes or [None] * len(snapshot.keys)
        self._sorted.restore(
            zip(self._held, snapshot.costs, classes, strict=True),
            {class_name: (recent, since) for class_name, recent, since in snapshot.history},
        )
        for _ in range(state.slots):
            self._fill()
            block = self._take()
            left = list(block.numbers)
            for _ in range(self._again.get(self._slots - 1, 0)):
                left += self._take_numbers(block.costs, block.class_name)[0]
            for number in left:
                del self._held[number]

    def _read_by_keys(self, replay: Replay | None) -> bool:
        """Re-read the snapshot's samples that are still held, or lose them; returns whether some are lost."""
        costs = {number: cost for number, cost, _ in self._sorted.items()}
        kept: dict[int, _Held] = {}
        for number, held in self._held.items():
            if held.sample is not None:
                kept[number] = held
            elif replay is not None and (again := replay.sample(held.key, costs[number])) is not None:
                kept[number] = _Held(again[0], held.key, again[1].length)
        is_lost, self._held = len(kept) < len(self._held), kept
        if is_lost:
            before, self._sorted = self._sorted, SortedPool(self.settings, self._sorted.worker)
            self._sorted.restore((item for item in before.items() if item[0] in kept), before.history())
        return is_lost

    def _check_drift(self) -> None:
        """Warn once if the samples held are not those that the reference says."""
        reference = self.settings.reference
        if reference is None or self._warned:
            return
        held: dict[Hashable, list[float]] = {}
        for _, cost, class_name in self._sorted.items():
            held.setdefault(class_name, []).append(cost)
        for class_name, costs in held.items():
            distance = reference.distance(class_name, costs)
            # A pool of the reference's own samples drifts too, by chance and as blocks leave it: by 0.29, 0.31 and 0.46
            # at most with 100, 37 and 10 batches to a pool, in simulations on four traces. Lengths that are 30 % off
            # drift by more than the bound from about 30 batches on; with few batches it is no bound at all.
            bound = 0.1 + 2 / self._sorted.batches(class_name) ** 0.5 + 1 / len(reference.costs[class_name]) ** 0.5
            if distance > bound:
                self._warned = True
                whose = "" if class_name is None else f" of class {class_name!r}"
                self.warning = (
                    f"the pool of rank {self.dataset.worker_config.rank}, worker {self._sorted.worker}, holds other "
                    f"lengths{whose} than reference_lengths says (Kolmogorov-Smirnov distance {distance:.2f}, expected "
                    f"at most {bound:.2f}): the ranks aim at lengths that are not there, and wait for each "
                    "other. Write the file again from this data set and encoder, or leave reference_lengths out."
                )
                return
