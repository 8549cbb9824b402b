"""The training loader that Lightning iterates: a plain iterable around energon's own."""

import math
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.energon import SavableDataLoader, get_savable_loader
from megatron.energon.savable_loader import SavableDataLoaderState, SavableDatasetCheckpoint, SavableDatasetState

from lightning_lengthpool.data.fit_progress import FitProgress
from lightning_lengthpool.data.pools.dataset import LengthPoolDataset, PooledBatch, WorkerState
from lightning_lengthpool.data.pools.plain_state import plain_state
from lightning_lengthpool.data.reading.shards import shield_sources
from lightning_lengthpool.data.source import Training
from lightning_lengthpool.data.workers import prepare_workers, stop_workers

_FIRST_BATCH_TIMEOUT = 600.0  # seconds until energon's watchdog speaks up: the first batch waits for a whole pool


class BatchRecord(NamedTuple):
    """What is known of a batch before its step: see `TrainLoader.pop_record`."""

    lengths: tuple[float, ...]  # tokens of each of the batch's samples
    fetch_started: float  # `time.perf_counter()` when the training loop asked for the batch
    data_seconds: float  # that the loop then waited for it
    missed: bool = False  # of another class than its slot is meant for on all ranks


@plain_state()
@dataclass(frozen=True)
class RankState:
    """One rank's iterator state."""

    workers: tuple[WorkerState | None, ...] = (None,)  # of its workers; None for one that has handed out nothing yet
    batches: int = 0  # that the rank has handed out so far
    position: int = 0  # how many of them in this epoch

    @property
    def dropped(self) -> int:
        """Samples that were left out."""
        return sum(worker.pool.dropped for worker in self.workers if worker is not None)

    def after(self, pooled: PooledBatch, position: int) -> "RankState":
        """The state after one more batch: batch `i` comes from worker `i % workers`."""
        workers, worker, state = list(self.workers), self.batches % len(self.workers), pooled.state
        if state is not None and state.pool.snapshot is None and (last := workers[worker]) is not None:
            state = state.with_snapshot_of(last)
        workers[worker] = state
        return RankState(tuple(workers), self.batches + 1, position)


# Makes the data set, and the state from which it goes on: the one that it is given (None for the beginning), or None if
# it has to begin from the beginning after all.
Build = Callable[[RankState | None], tuple[Training, RankState | None]]

RECENT = 4  # ranks may be a batch apart, and more where they do not meet at each batch


class TrainLoader:
    """Cuts energon's endless stream into epochs of `length` batches, and knows where it stands in it.

    The stream is one iterator that lives on from epoch to epoch: worker processes are started once, and an epoch that
    is left early (`limit_train_batches`) goes on where it was left. Energon's loader is built when the first batch is
    asked for, so a state may still be loaded after `iter()`, as some strategies of Lightning do.

    `length` is the same on all ranks, and `boundary` is called before each batch. With `is_resumed` the first epoch is
    one that a checkpoint has cut, of which only what remains is yielded.
    """

    def __init__(
        self,
        build: Build,
        length: int,
        state: RankState | None = None,
        progress: FitProgress | None = None,
        boundary: Callable[[], None] = lambda: None,
        *,
        is_resumed: bool = False,
    ) -> None:
        self._build = build
        self._length = length
        self._progress = progress or FitProgress()
        self._boundary = boundary
        self._loader: SavableDataLoader | None = None
        self._stream: Iterator[Any] | None = None
        self._records: deque[BatchRecord] = deque(maxlen=1024)  # bounded, for nobody has to ask for them
        self._resumed = 0  # of a loop that does not count by itself: where in the epoch it goes on
        self.load(state)
        if not is_resumed:
            self._resumed = 0

    def load(self, state: RankState | None) -> None:
        """Go on from a state, also in the middle of an iteration; None for the beginning."""
        self.close()
        self._resumed = 0 if state is None else state.position
        # States after the last batches, the newest one last. Replaced as a whole: a signal's handler, or a thread, may
        # read it at any moment.
        self.recent: tuple[RankState, ...] = (state or RankState(),)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the data module keeps the state. It tells Lightning that a restart in mid-epoch is no accident."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing: as `state_dict`."""

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        self._records.clear()
        # Lightning does not skip what an epoch has had before it was restarted: it expects what remains.
        start, self._resumed = self._resumed, 0
        if (position := self._progress.position()) is not None:
            start = position
        for position in range(start if start < self._length else 0, self._length):
            yield self._next(position + 1)

    def _next(self, position: int) -> Any:
        stream = self._open() if self._stream is None else self._stream
        self._boundary()
        self._progress.fetch()
        started = time.perf_counter()
        pooled = next(stream)
        self._records.append(BatchRecord(pooled.lengths, started, time.perf_counter() - started, pooled.missed))
        self._follow(pooled, position)
        return shield_sources(pooled.batch)

    def _open(self) -> Iterator[Any]:
        now = self.recent[-1]
        training, state = self._build(now if now.batches else None)
        pool = training.pool
        workers = pool.worker_config.num_workers
        # Without workers a collection every few batches would be the training process's; and in a worker it walks the
        # whole pool, so it comes about once per pool.
        loader = get_savable_loader(
            training.dataset,
            checkpoint_every_sec=math.inf,  # the state travels with the batches
            gc_collect_every_n_steps=max(10, pool.settings.capacity // pool.settings.slot_size) if workers else 0,
            watchdog_initial_timeout_seconds=_FIRST_BATCH_TIMEOUT,
        )
        self._loader = prepare_workers(loader)
        if state is None:
            self.recent = (RankState((None,) * max(1, workers)),)
        else:
            self._go_on(pool, state)
        self._stream = iter(loader)
        return self._stream

    def _go_on(self, pool: LengthPoolDataset, state: RankState) -> None:
        """Let each logical worker go on from its state, and the one whose turn it is come first."""
        assert self._loader is not None
        pool.resume_from = {number: own for number, own in enumerate(state.workers) if own is not None}
        slots = [0 if own is None else own.slots for own in state.workers]
        if self._loader.num_workers == 0:
            self._loader.dataset._sample_index = slots[0]
            return
        states = [
            SavableDatasetCheckpoint(
                state=SavableDatasetState(rng=None, dataset_state=None, sample_index=number), offset=0
            )
            for number in slots
        ]
        self._loader.restore_state_rank(
            SavableDataLoaderState(
                worker_states=states, next_worker_id=state.batches % len(state.workers), micro_batch_size=None
            )
        )

    def _follow(self, pooled: PooledBatch, position: int) -> None:
        """Keep the state after this batch."""
        before = self.recent[-1]
        now = before.after(pooled, position)
        self.recent = (*self.recent[1 - RECENT :], now)
        if now.dropped and not before.dropped:
            warnings.warn(
                "a sample that costs more than max_tokens was left out (over_budget is 'drop'), and more may follow: "
                "the data module counts them in 'dropped'",
                stacklevel=4,
            )
        if pooled.warning is not None:
            warnings.warn(pooled.warning, stacklevel=4)

    def state(self) -> RankState:
        """The state after the last batch that was trained on; batches that are only fetched do not count."""
        if len(self.recent) > 1 and not self._progress.has_trained():
            return self.recent[-2]
        return self.recent[-1]

    def pop_record(self) -> BatchRecord:
        """Return the record of the batch that is consumed now; to be called once for each batch, in order."""
        return self._records.popleft()

    def close(self) -> None:
        """Stop the worker processes."""
        self._stream = None
        if self._loader is not None:
            stop_workers(self._loader)
            self._loader = None
