"""The length pool as an energon wrapper: fills the pool, asks `order.py` for the next slot, forms the batch.

A batch is a SLOT: `batch_size` places of the pool's order. The order advances by slots and never by samples, so that
one rank's bad sample does not shift that rank against the others: a sample that fails after the pool leaves its slot
smaller, and a slot that is empty, or whose collate fails, takes the samples nearest in length instead.

While one pool is handed out the next one fills, one sample in for each place handed out: training never waits for a
whole pool but the first. A worker therefore holds at most `2 * pool_size` samples.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron.energon import SavableDataset, WorkerConfig
from megatron.energon.errors import ErrorContext
from megatron.energon.wrappers.base import BaseWrapperDataset, SampleIndex
from megatron.energon.wrappers.buffer import SavableSampleBuffer
from torch.utils.data._utils.pin_memory import pin_memory

from lightning_lengthpool.length import LengthFn, get_field, sample_length
from lightning_lengthpool.order import get_policy


@dataclass(frozen=True)
class PoolSettings:
    """What makes a pool: the same on all ranks and workers.

    Args:
        pool_size: Samples that one worker of one rank holds to choose from; 0 switches the pool off.
        policy: How samples leave the pool, a name from `order.POLICIES`.
        seed: Seed of the random sequence that all ranks share.
        length_fn: Takes an encoded sample and gives its length; None takes `total_len`, else `len(tokens)`.

    Raises:
        ValueError: If `pool_size` is negative or no integer, `seed` is no integer, or the policy is unknown.
    """

    pool_size: int = 1000
    policy: str = "pool"
    seed: int = 42
    length_fn: LengthFn | None = None

    def __post_init__(self) -> None:
        check_integer("pool_size", self.pool_size, minimum=0, hint="0 switches the pool off")
        check_integer("seed", self.seed)
        get_policy(self.policy)
        if self.length_fn is not None and not callable(self.length_fn):
            raise ValueError(f"length_fn is {self.length_fn!r}, expected a callable that takes an encoded sample")

    @property
    def places(self) -> int:
        """Places of one pool; without a pool each sample is a pool of its own."""
        return 1 if self.policy == "none" else max(1, self.pool_size)


@dataclass
class PooledBatch:
    """A user's batch on its way from the worker to the main process, with its samples' lengths beside it."""

    batch: Any
    lengths: tuple[float, ...]
    __key__: list[str]
    __restore_key__: tuple = field(default=())  # where energon's loader puts its own position

    def pin_memory(self) -> "PooledBatch":
        """Pin the user's batch as torch's loader would have done without this wrapper (untested on a GPU)."""
        self.batch = pin_memory(self.batch)
        return self


class _Entry(NamedTuple):
    """A sample that has left the pool."""

    sample: Any
    length: float


def check_integer(name: str, value: Any, *, minimum: int | None = None, hint: str = "") -> None:
    """Raise a `ValueError` that names the setting if `value` is no integer or below `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int) or (minimum is not None and value < minimum):
        bound = "" if minimum is None else f" of at least {minimum}"
        raise ValueError(f"{name} is {value!r}, expected an integer{bound}" + (f" ({hint})" if hint else ""))


class LengthPoolDataset(BaseWrapperDataset[Any, PooledBatch]):
    """Pools the samples of a dataset by length and yields batches (`PooledBatch`).

    Args:
        dataset: Encoded samples.
        batch_size: Places a slot has; at least 1.
        settings: The pool.
        batch: Collates a list of samples; None (with `batch_size` 1) yields the sample itself as the batch.
        encode_batch: Applied to the collated batch, if given.
        postencode: Applied to each sample after it has left the pool, if given; may yield several samples or none.
        failure_tolerance: Failures in a row after which a `FatalSampleError` ends the iteration; 0 for no limit.
        worker_config: The rank and its workers.
    """

    _savable_fields = (
        *("_ready", "_incoming", "_holes", "_cursor", "_places", "_pools"),
        *("_postencode_index", "_batch_index", "_encode_batch_index"),
    )

    def __init__(
        self,
        dataset: SavableDataset,
        *,
        batch_size: int,
        settings: PoolSettings,
        batch: Callable[[list[Any]], Any] | None,
        encode_batch: Callable[[Any], Any] | None = None,
        postencode: Callable[[Any], Any] | None = None,
        failure_tolerance: int = 100,
        worker_config: WorkerConfig,
    ) -> None:
        super().__init__(dataset, worker_config=worker_config)
        check_integer("batch_size", batch_size, minimum=1)
        self.batch_size = batch_size
        self.settings = settings
        self.batch = batch
        self.encode_batch = encode_batch
        self.postencode = postencode
        self._sample_errors, self._batch_errors = (
            ErrorContext(
                name=f"LengthPoolDataset.{stage}",
                handler=worker_config.global_error_handler,
                tolerance=failure_tolerance,
            )
            for stage in ("postencode_sample", "batch")
        )
        self.reset_state_own()

    def reset_state_own(self) -> None:
        # The pool that is handed out lies in reverse order, so that the next sample is popped from the end.
        self._ready = SavableSampleBuffer(self.dataset, worker_config=self.worker_config)
        self._ready_lengths: list[float] = []
        self._incoming = SavableSampleBuffer(self.dataset, worker_config=self.worker_config)
        self._incoming_lengths: list[float] = []
        self._holes: dict[int, float] = {}  # places whose sample left early -> the length that belongs there
        self._cursor = 0  # the next place of the pool that is handed out
        self._places = 0  # places that this pool has
        self._pools = 0  # pools ordered so far
        self._postencode_index = SampleIndex(self.worker_config, src=self)
        self._batch_index = SampleIndex(self.worker_config, src=self)
        self._encode_batch_index = SampleIndex(self.worker_config, src=self)

    def __iter__(self) -> Iterator[PooledBatch]:
        for buffer, lengths in ((self._ready, self._ready_lengths), (self._incoming, self._incoming_lengths)):
            buffer.worker_start()  # re-reads the samples after a restore
            lengths[:] = [sample_length(sample, self.settings.length_fn) for sample in buffer.buffer]
        upstream = iter(self.dataset)
        while (batch := self._next_batch(upstream)) is not None:
            yield batch

    def _next_batch(self, upstream: Iterator[Any]) -> PooledBatch | None:
        """Hand out the next slot; None at the end of a finite stream."""
        slot: list[_Entry] = []
        wanted: list[float] = []  # the lengths that belong into this slot
        for _ in range(self.batch_size):
            if self._cursor == self._places and not self._turn(upstream):
                break
            entry, length = self._take_place()
            slot += [entry] if entry is not None else []
            wanted.append(length)
            self._fill(upstream, 1)
        while wanted:
            if (batch := self._form_batch(slot)) is not None:
                return batch
            slot = [entry for length in wanted if (entry := self._take_nearest(upstream, length)) is not None]
            if not slot:
                break
        return None

    def _fill(self, upstream: Iterator[Any], samples: int) -> None:
        """Let up to `samples` samples in, as long as the incoming pool has room."""
        for _ in range(min(samples, self.settings.places - len(self._incoming_lengths))):
            try:
                sample = next(upstream)
            except StopIteration:
                return
            # Before the sample is stored: samples and lengths must not fall out of step when this raises.
            length = sample_length(sample, self.settings.length_fn)
            self._incoming.append(sample)
            self._incoming_lengths.append(length)

    def _turn(self, upstream: Iterator[Any]) -> bool:
        """Order the incoming pool and start to hand it out; False if there is nothing left."""
        size = self.settings.places
        self._fill(upstream, size)
        samples, keys = self._incoming.flush()
        if not samples:
            return False
        policy = get_policy(self.settings.policy if self.settings.pool_size else "none")
        # Counted in pools and not in samples that came, so that a rank which has lost a sample keeps the others' seed.
        order = policy(self._incoming_lengths, size, self._pools * size, self.settings.seed)[::-1]
        self._ready.extend([samples[i] for i in order], [keys[i] for i in order])
        self._ready_lengths = [self._incoming_lengths[i] for i in order]
        self._incoming_lengths = []
        self._cursor, self._places = 0, len(order)
        self._pools += 1
        return True

    def _take_place(self) -> tuple[_Entry | None, float]:
        """Hand out the next place: its sample (None if that left early) and the length that belongs there."""
        place, self._cursor = self._cursor, self._cursor + 1
        if place in self._holes:
            return None, self._holes.pop(place)
        length = self._ready_lengths.pop()
        return _Entry(self._ready.pop(-1), length), length

    def _take_nearest(self, upstream: Iterator[Any], length: float) -> _Entry | None:
        """Take the sample nearest to `length` out of its turn, from both pools; None if there are no more samples."""
        if not self._ready_lengths and not self._incoming_lengths:
            self._fill(upstream, 1)
        candidates = [
            (abs(other - length), is_ready, index)  # a tie goes to the incoming pool, which leaves no hole
            for is_ready, lengths in enumerate((self._incoming_lengths, self._ready_lengths))
            for index, other in enumerate(lengths)
        ]
        if not candidates:
            return None
        _, is_ready, index = min(candidates)
        if not is_ready:
            return _Entry(self._incoming.pop(index), self._incoming_lengths.pop(index))
        places = [place for place in range(self._places - 1, self._cursor - 1, -1) if place not in self._holes]
        self._holes[places[index]] = self._ready_lengths[index]
        return _Entry(self._ready.pop(index), self._ready_lengths.pop(index))

    def _form_batch(self, slot: Sequence[_Entry]) -> PooledBatch | None:
        """Post-encode and collate a slot's samples; None if none is left or the collate failed."""
        encoded = [done for entry in slot for done in self._postencode(entry)]
        if not encoded:
            return None
        samples = [entry.sample for entry in encoded]
        with self._batch_errors.handle_errors(samples):
            batch = samples[0]
            if self.batch is not None:
                with self._batch_index.ctx():
                    batch = self.batch(samples)
                if self.encode_batch is not None:
                    with self._encode_batch_index.ctx():
                        batch = self.encode_batch(batch)
            keys = [str(get_field(sample, "__key__")) for sample in samples]
            return PooledBatch(batch, tuple(entry.length for entry in encoded), keys)
        return None

    def _postencode(self, entry: _Entry) -> list[_Entry]:
        if self.postencode is None:
            return [entry]
        with self._sample_errors.handle_errors(entry.sample):
            with self._postencode_index.ctx():
                sample = self.postencode(entry.sample)
                samples = list(sample) if isinstance(sample, Iterator) else [sample]
            return [_Entry(sample, entry.length) for sample in samples]
        return []

    def len_worker(self, worker_idx: int | None = None) -> int:
        return math.ceil(self.dataset.len_worker(worker_idx) / self.batch_size)

    def can_restore_sample(self) -> bool:
        return False  # a batch is restored through the pool's state, not by a key of its own

    def config(self) -> dict[str, Any]:
        functions = {"length_fn": self.settings.length_fn, "batch": self.batch}
        return {
            "type": type(self).__qualname__,
            "batch_size": self.batch_size,
            "pool_size": self.settings.pool_size,
            "policy": self.settings.policy,
            "seed": self.settings.seed,
            **{name: None if fn is None else self._function_config(fn) for name, fn in functions.items()},
            "worker_config": self.worker_config.config(),
            "dataset": self.dataset.config(),
        }

    def __str__(self) -> str:
        return f"LengthPoolDataset({self.settings}, batch_size={self.batch_size}, dataset={self.dataset})"
