"""The loaders that Lightning iterates: plain iterables around energon's own."""

import contextlib
import itertools
import math
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from megatron.energon import SavableDataLoader
from megatron.energon.savable_loader import SavableDataLoaderState, SavableDatasetCheckpoint, SavableDatasetState
from torch.utils.data import DataLoader

from lightning_lengthpool.data.fit_progress import FitProgress
from lightning_lengthpool.data.pools.dataset import LengthPoolDataset, PooledBatch
from lightning_lengthpool.data.workers import prepare_workers


class BatchRecord(NamedTuple):
    """What is known of a batch before its step: see `TrainLoader.pop_record`.

    Attributes:
        lengths: Tokens of each of the batch's samples.
        fetch_started: `time.perf_counter()` when the training loop asked for the batch.
        data_seconds: Seconds that the loop then waited for it.
        missed: Whether the batch is of another class than its slot is meant for on all ranks.
    """

    lengths: tuple[float, ...]
    fetch_started: float
    data_seconds: float
    missed: bool = False


class Sources:
    """A batch's `__sources__`, in a wrapping that Lightning does not look into; iterate over it.

    Lightning takes a batch apart to move its tensors to the device, and refuses the frozen dataclasses with which
    energon tells where each sample was read.
    """

    def __init__(self, sources: Iterable[Any]) -> None:
        self._sources = tuple(sources)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._sources)

    def __repr__(self) -> str:
        return f"Sources{self._sources}"


def shield_sources(batch: Any) -> Any:
    """Wrap a batch's `__sources__`, or those of each sample of a list, as `Sources`; returns the batch."""
    if isinstance(batch, (list, tuple)):
        for sample in batch:
            shield_sources(sample)
    elif isinstance(batch, dict):
        if isinstance(batch.get("__sources__"), (list, tuple)):
            batch["__sources__"] = Sources(batch["__sources__"])
    elif isinstance(getattr(batch, "__sources__", None), (list, tuple)):
        batch.__sources__ = Sources(batch.__sources__)
    return batch


def count_dropped(workers: Iterable[Mapping[str, Any] | None]) -> int:
    """How many samples several workers have left out, as their places tell."""
    return sum(state["place"]["pool"].get("dropped", 0) for state in workers if state is not None)


State = Mapping[str, Any]  # where a rank stands: its workers' iterator states, and how many batches it has handed out
Build = Callable[[State | None], tuple[SavableDataLoader, LengthPoolDataset, State | None]]

RECENT = 4  # ranks may be a batch apart, and more where they do not meet at each batch


class TrainLoader:
    """Cuts energon's endless stream into epochs of `length` batches, and knows where it stands in it.

    The stream is one iterator that lives on from epoch to epoch: worker processes are started once, and an epoch that
    is left early (`limit_train_batches`) goes on where it was left. Energon's loader is built when the first batch is
    asked for, so a state may still be loaded after `iter()`, as some strategies of Lightning do.

    Args:
        build: Makes a new loader of energon's, the pool in it, and the state from which they go on: the one that it is
            given (None for the beginning), or None if it has to begin from the beginning after all.
        length: Batches of an epoch, the same on all ranks.
        state: Where to go on, as `state` returned it; None for the beginning.
        progress: What the training loop says of its batches.
        boundary: Called before each batch.
        is_resumed: Whether the first epoch is one that a checkpoint has cut, of which only what remains is yielded.
    """

    def __init__(
        self,
        build: Build,
        length: int,
        state: State | None = None,
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
        self._is_trial = False
        self._records: deque[BatchRecord] = deque(maxlen=1024)  # bounded, for nobody has to ask for them
        self.load(state)
        self._resumed = self._resumed if is_resumed else 0

    def load(self, state: State | None) -> None:
        """Go on from a state, also in the middle of an iteration; None for the beginning."""
        self.close()
        self._resumed = 0 if state is None else state["position"]  # of a loop that does not count by itself
        # States after the last batches, the newest one last. Replaced as a whole: a signal's handler, or a thread, may
        # read it at any moment.
        self.recent: tuple[State, ...] = (state or {"workers": (None,), "batches": 0, "position": 0},)

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
        loader, pool, state = self._build(now if now["batches"] else None)
        self._loader = prepare_workers(_pin_where_possible(loader))
        self._is_trial = pool.drop_batches
        if state is None:
            self.recent = ({"workers": (None,) * max(1, loader.num_workers), "batches": 0, "position": 0},)
        else:
            self._go_on(pool, state)
        self._stream = iter(loader)
        return self._stream

    def _go_on(self, pool: LengthPoolDataset, state: State) -> None:
        """Let each logical worker go on from its state, and the one whose turn it is come first."""
        assert self._loader is not None
        workers = state["workers"]
        pool.resume_from = {worker: own for worker, own in enumerate(workers) if own is not None}
        slots = [0 if own is None else own["place"]["slots"] for own in workers]
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
                worker_states=states, next_worker_id=state["batches"] % len(workers), micro_batch_size=None
            )
        )

    def _follow(self, pooled: PooledBatch, position: int) -> None:
        """Keep the state of the worker that has made this batch: batch i comes from worker i % workers."""
        before = self.recent[-1]
        workers = list(before["workers"])
        worker = before["batches"] % len(workers)
        snapshot = pooled.snapshot
        if snapshot is None and (last := workers[worker]) is not None:
            snapshot = last["snapshot"]
        workers[worker] = {"snapshot": snapshot, "place": pooled.place}
        now = {"workers": workers, "batches": before["batches"] + 1, "position": position}
        self.recent = (*self.recent[1 - RECENT :], now)
        if not (self._is_trial or count_dropped(before["workers"])) and count_dropped(workers):
            warnings.warn(
                "a sample that costs more than max_tokens was left out (over_budget is 'drop'), and more may follow: "
                "the data module counts them in 'dropped'",
                stacklevel=4,
            )
        if pooled.warning is not None:
            warnings.warn(pooled.warning, stacklevel=4)

    def state(self) -> State:
        """The state after the last batch that was trained on, plain; batches that are only fetched do not count."""
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
            _stop_workers(self._loader)
            self._loader = None


class EvalLoader:
    """Runs over a whole evaluation set from its start each time, with the same number of batches on every rank.

    A rank that has no batch left, while another has, yields its last one again; `is_repeat` tells which ones to leave
    out of a metric. The ranks agree before each batch (one small reduction), because how many batches an encoder
    makes of a data set (skipped samples, packing, generators) is not known before.

    Args:
        build: Makes a fresh energon loader.
        length: Batches of the longest rank, None if the encoder may make more of them than samples go in.
        ranks_with: Takes whether this rank has something, and returns on how many of `world_size` ranks it is so. None
            if each rank goes on by itself, without repeats.
        world_size: Number of data-parallel ranks.
        name: Of the evaluation set, for errors.
        boundary: Called before each batch, equally often on all ranks.
    """

    def __init__(
        self,
        build: Callable[[], DataLoader],
        length: int | None,
        ranks_with: Callable[[bool], int] | None,
        world_size: int,
        name: str,
        boundary: Callable[[], None] = lambda: None,
    ) -> None:
        self._build = build
        self._length = length
        self._ranks_with = ranks_with
        self._world_size = world_size
        self._name = name
        self._boundary = boundary
        self._first_repeat = math.inf
        self._open: DataLoader | None = None

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"the number of {self._name} batches is not known before they are encoded")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        self.close()
        self._first_repeat = math.inf
        self._open = prepare_workers(_pin_where_possible(self._build()))
        stream = iter(self._open)
        if self._ranks_with is None:
            yield from map(shield_sources, stream)
            return
        fresh, batch = next(stream, None), None
        having = self._ranks_with(fresh is not None)
        if 0 < having < self._world_size:
            raise ValueError(
                f"{self._world_size - having} of {self._world_size} ranks got no {self._name} batch: all their samples "
                "were skipped, or there are too few. Use fewer ranks or a larger set."
            )
        for index in itertools.count():
            if having == 0:
                return
            self._boundary()
            if fresh is None:
                self._first_repeat = min(self._first_repeat, index)
            else:
                batch = shield_sources(fresh)
            # Looked for before this one is used: Lightning does not come back after the last, when the workers can go.
            fresh = next(stream, None)
            having = self._ranks_with(fresh is not None)
            if having == 0:
                self.close()
            yield batch

    def close(self) -> None:
        """Stop the worker processes."""
        if self._open is not None:
            _stop_workers(self._open)
            self._open = None

    def is_repeat(self, batch_idx: int) -> bool:
        """Whether batch `batch_idx` of the run that is under way was yielded before."""
        return batch_idx >= self._first_repeat


def _pin_where_possible(loader: DataLoader) -> DataLoader:
    """Take pinning back where it is in vain: energon always asks for it, and torch then warns."""
    loader.pin_memory = torch.cuda.is_available()
    return loader


def _stop_workers(loader: DataLoader) -> None:
    """End a loader's worker processes now: torch leaves persistent ones to the garbage collector."""
    iterator = getattr(loader, "_iterator", None)
    if iterator is not None and hasattr(iterator, "_shutdown_workers"):
        with contextlib.suppress(RuntimeError):  # torch's word that a worker was dead already
            iterator._shutdown_workers()
        loader._iterator = None
