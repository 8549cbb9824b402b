"""The length pool as an energon wrapper: draws slots from the pool, forms batches, tells its iterator state.

A batch is a SLOT of the pool's order. The order advances by slots and never by samples, so that one rank's bad sample
does not shift that rank against the others: a sample that fails after the pool leaves its slot smaller, and a slot that
is empty, or whose collate fails, takes the samples nearest in cost instead.

The iterator state travels beside each batch to the main process. So saving needs no word from a worker: it works before
the first batch, after the last, and with workers that are gone.
"""

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron.energon import SavableDataset, WorkerConfig
from megatron.energon.errors import ErrorContext
from megatron.energon.state import FlexState
from megatron.energon.task_encoder.base import get_failure_tolerance
from megatron.energon.wrappers import PackingDataset, ShuffleBufferDataset
from megatron.energon.wrappers.base import BaseWrapperDataset, SampleIndex
from torch.utils.data._utils.pin_memory import pin_memory

from lightning_lengthpool.data.pools.arrivals import Arrivals, ArrivalsState, starve
from lightning_lengthpool.data.pools.flush_pool import FlushPool, FlushState
from lightning_lengthpool.data.pools.plain_state import plain_state
from lightning_lengthpool.data.pools.pool import Entry, Pool, Slot
from lightning_lengthpool.data.pools.stream_pool import StreamPool, StreamState
from lightning_lengthpool.data.reading.shards import parts_of, watch_sources
from lightning_lengthpool.ordering.length import get_field
from lightning_lengthpool.ordering.settings import PoolSettings
from lightning_lengthpool.ordering.sorted_pool import SNAPSHOT_SAMPLES


@plain_state()
@dataclass(frozen=True)
class WorkerState:
    """One worker's iterator state."""

    pool: FlushState | StreamState
    slots: int  # batches handed out so far
    indices: tuple[int, ...]  # how often each stage has run, by which energon seeds it

    def without_snapshot(self) -> "WorkerState":
        """What has changed since the snapshot; it goes with few batches, because it is large."""
        return replace(self, pool=replace(self.pool, snapshot=None))

    def with_snapshot_of(self, before: "WorkerState") -> "WorkerState":
        """Undo `without_snapshot`, by the state of the batch before."""
        snapshot: Any = before.pool.snapshot
        return replace(self, pool=replace(self.pool, snapshot=snapshot))


@dataclass
class PooledBatch:
    """A user's batch on its way from the worker to the main process, with what travels beside it."""

    batch: Any
    lengths: tuple[float, ...]  # tokens of each of its samples
    __key__: list[str]
    state: WorkerState | None = None  # after this batch; without its snapshot if that is the one of the batch before
    missed: bool = False  # of another class than its slot is meant for on all ranks
    warning: str | None = None  # something that the user should know, said in the main process
    __restore_key__: tuple[Any, ...] = field(default=())  # where energon's loader puts its own position

    def pin_memory(self) -> "PooledBatch":
        """Pin the user's batch as torch's loader would have done without this wrapper (untested on a GPU)."""
        self.batch = pin_memory(self.batch)  # type: ignore[no-untyped-call]
        return self


class LengthPoolDataset(BaseWrapperDataset[Any, PooledBatch]):
    """Pools the encoded samples of a dataset by length and yields batches (`PooledBatch`).

    `batch` collates a list of samples; None (with a slot of one sample) yields the sample itself as the batch.
    `encode_batch` is applied to the collated batch, `postencode` to each sample after it has left the pool: it may
    yield several samples or none.

    `failure_tolerance`: failures in a row after which a `FatalSampleError` ends the iteration, of a method that does
    not say so itself (`@stateless(failure_tolerance=...)`). `skip_tolerance`: samples that may be read in a row without
    one that comes into the pool, or leave it without a batch, before a `StarvedError` ends it. 0 for no limit.
    `snapshot_samples`: samples that come in at least between two snapshots of the pool.
    """

    def __init__(
        self,
        dataset: SavableDataset,
        *,
        settings: PoolSettings,
        batch: Callable[[list[Any]], Any] | None,
        encode_batch: Callable[[Any], Any] | None = None,
        postencode: Callable[[Any], Any] | None = None,
        failure_tolerance: int | None = 100,
        skip_tolerance: int = 0,
        snapshot_samples: int = SNAPSHOT_SAMPLES,
        worker_config: WorkerConfig,
    ) -> None:
        super().__init__(dataset, worker_config=worker_config)
        self.settings = settings
        self.batch = batch
        self.encode_batch = encode_batch
        self.postencode = postencode
        #: Where this rank's workers go on, by logical worker; to be set before iteration starts.
        self.resume_from: dict[int, WorkerState] = {}
        #: Whether what was left of the pool that was handed out cannot be re-read, and is lost.
        self.lose_pool = False
        #: Whether to refuse to go on with other samples than the uninterrupted run's; else there is a warning.
        self.is_exact = False
        self.failure_tolerance, self.skip_tolerance = failure_tolerance, skip_tolerance
        self.snapshot_samples = snapshot_samples
        self._arrivals = Arrivals()
        watch_sources(dataset, self._arrivals)
        self._errors = {
            stage: ErrorContext(
                name=f"LengthPoolDataset.{stage}",
                handler=worker_config.global_error_handler,
                tolerance=get_failure_tolerance(method, failure_tolerance),
            )
            for stage, method in (("postencode", postencode), ("batch", batch), ("encode_batch", encode_batch))
        }
        self.reset_state_own()

    def reset_state_own(self) -> None:
        self._arrivals.restore(ArrivalsState())
        pool = StreamPool if self.settings.is_stream else FlushPool
        self.pool: Pool[Any] = pool(
            self.dataset, self.settings, self.failure_tolerance, self.snapshot_samples, self._arrivals
        )
        self._slots = 0  # batches handed out so far
        self._sent: Any = None  # the snapshot that has travelled last
        self._indices = tuple(SampleIndex(self.worker_config, src=self) for _ in range(3))
        self._postencode_index, self._batch_index, self._encode_batch_index = self._indices

    def __iter__(self) -> Iterator[PooledBatch]:
        state = self.resume_from.pop(self.worker_config.rank_worker_id(), None)
        self._arrivals.tolerance = self.skip_tolerance
        self._arrivals.buffered = sum(map(_buffered, parts_of(self.dataset)))
        try:
            slots = self.pool.start() if state is None else self._go_on(state)
        except (AssertionError, AttributeError, IndexError, KeyError, TypeError) as error:
            if state is None:
                raise
            raise ValueError(
                f"rank {self.worker_config.rank}, worker {self.worker_config.rank_worker_id()}: its part of the data "
                f"state in the checkpoint cannot be restored ({error!r}): it is damaged, or energon reads another one "
                "now. To let the data start from the beginning on purpose set 'resume: fresh'."
            ) from error
        warning, self._sent = self._check_replay(), None
        for slot in slots:
            self._slots += 1
            if (batch := self._make_batch(slot)) is None:
                return
            self._add_state(batch)
            if warning is None:
                warning, self.pool.warning = self.pool.warning, None
            batch.warning, warning = warning, None
            yield batch

    def _check_replay(self) -> str | None:
        """Say what the pool had to restore, and found otherwise; an error if it must not be."""
        differences, self.pool.differences = self.pool.differences, []
        if not differences:
            return None
        config, more = self.worker_config, len(differences) - 1
        what = f"rank {config.rank}, worker {config.rank_worker_id()}: {differences[0]}"
        what += f" ({more} more differences)" if more else ""
        why = "A read that failed once, an encoder that draws random numbers without restore_seeds, or changed data "
        why += "can be the cause."
        if self.is_exact:
            raise ValueError(
                f"the data cannot go on exactly (resume is 'exact'); {what}. {why} Bring back what was there; or set "
                "resume to 'auto', and the run goes on with other samples."
            )
        return f"the data do not go on exactly; {what}. {why}"

    def _make_batch(self, slot: Slot) -> PooledBatch | None:
        """Make a slot's batch; None at the end of a finite stream."""
        taken, tried = slot, 0
        while (batch := self._form_batch(taken.entries)) is None:
            tried += len(taken.entries)
            if self.skip_tolerance and tried > self.skip_tolerance:
                what = f"{tried} samples in a row left the pool and none made a batch"
                starve(self.worker_config, what, self.skip_tolerance)
            taken = self.pool.take_nearest(slot)
            if not taken.entries:
                return None
        batch.missed = taken.missed
        return batch

    def state(self) -> WorkerState:
        """The iterator state after the last batch."""
        return WorkerState(self.pool.state(), self._slots, tuple(index.save_state() for index in self._indices))

    def _add_state(self, batch: PooledBatch) -> None:
        """Let the state travel with a batch, and its snapshot with the first one only."""
        now = self.state()
        batch.state = now.without_snapshot() if now.pool.snapshot is self._sent else now
        self._sent = now.pool.snapshot

    def _go_on(self, state: WorkerState) -> Iterator[Slot]:
        self._slots = state.slots
        for index, saved in zip(self._indices, state.indices, strict=True):
            index.restore_state(saved)
        return self.pool.start(state.pool, lose=self.lose_pool)

    def save_state(self) -> FlexState:
        """Nothing: energon asks for it, but the state travels with the batches."""
        return FlexState(__class__=type(self).__name__)

    def _form_batch(self, slot: Sequence[Entry]) -> PooledBatch | None:
        """Post-encode and collate a slot's samples; None if none is left or the collate failed."""
        encoded = [done for entry in slot for done in self._postencode(entry)]
        if not encoded:
            return None
        samples = [entry.sample for entry in encoded]
        batch: Any = samples
        for stage, function, index in (
            ("batch", self.batch or _only, self._batch_index),
            ("encode_batch", self.encode_batch if self.batch is not None else None, self._encode_batch_index),
        ):
            if function is not None:
                given, batch = batch, None
                with self._errors[stage].handle_errors(samples), index.ctx():
                    batch = function(given)
                if batch is None:  # it has failed, or there is nothing to train on: Lightning would pass None over
                    return None
                if isinstance(batch, Generator):
                    raise TypeError(f"{stage} gave a generator: a slot is exactly one batch on every rank. Return it.")
        keys = [str(get_field(sample, "__key__")) for sample in samples]
        return PooledBatch(batch, tuple(entry.length for entry in encoded), keys)

    def _postencode(self, entry: Entry) -> list[Entry]:
        if self.postencode is None:
            return [entry]
        with self._errors["postencode"].handle_errors(entry.sample):
            with self._postencode_index.ctx():
                sample = self.postencode(entry.sample)
                samples = list(sample) if isinstance(sample, Iterator) else [sample]
            return [Entry(sample, entry.length) for sample in samples]
        return []

    def len_worker(self, worker_idx: int | None = None) -> int:
        return math.ceil(self.dataset.len_worker(worker_idx) / self.settings.slot_size)

    def can_restore_sample(self) -> bool:
        return False  # a batch is restored through the pool's state, not by a key of its own

    def config(self) -> dict[str, Any]:
        settings = self.settings
        functions = {"length_fn": settings.length_fn, "class_fn": settings.class_fn, "batch": self.batch}
        return {
            "type": type(self).__qualname__,
            **settings.identity(),
            **{name: None if fn is None else self._function_config(fn) for name, fn in functions.items()},
            "worker_config": self.worker_config.config(),
            "dataset": self.dataset.config(),
        }

    def __str__(self) -> str:
        return f"LengthPoolDataset({self.settings}, dataset={self.dataset})"


def _buffered(dataset: Any) -> int:
    if isinstance(dataset, ShuffleBufferDataset):
        return dataset.size
    return dataset.buffer_size if isinstance(dataset, PackingDataset) else 0


def _only(samples: list[Any]) -> Any:
    """A pack is the batch."""
    return samples[0]
