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

from lightning_lengthpool.dataset import LengthPoolDataset, PooledBatch
from lightning_lengthpool.workers import prepare_workers


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


class TrainLoader:
    """Cuts energon's endless stream into epochs of `length` batches, and knows its place in it.

    The stream is one iterator that lives on from epoch to epoch: worker processes are started once, and an epoch that
    is left early (`limit_train_batches`) goes on where it was left.

    Args:
        loader: energon's, yields `PooledBatch`es without end.
        pool: The data set in it that makes them.
        length: Batches of an epoch, the same on all ranks.
        state: A place to go on from, as `state` returned it.
    """

    def __init__(
        self,
        loader: SavableDataLoader,
        pool: LengthPoolDataset,
        length: int,
        state: dict[str, Any] | None = None,
    ) -> None:
        self._loader = prepare_workers(_pin_where_possible(loader))
        self._length = length
        self._is_trial = pool.drop_batches
        self._stream: Iterator[Any] | None = None
        self._records: deque[BatchRecord] = deque(maxlen=1024)  # bounded, for nobody has to ask for them
        self._workers: list[dict[str, Any] | None] = [None] * max(1, loader.num_workers)
        self._batches = self._position = 0
        if state is not None:
            self._workers, self._batches = list(state["workers"]), state["batches"]
            self._position = state["position"]
            self._go_on(pool)

    def _go_on(self, pool: LengthPoolDataset) -> None:
        """Let each logical worker go on from its place, and the one whose turn it is come first."""
        pool.resume_from = {worker: state for worker, state in enumerate(self._workers) if state is not None}
        slots = [0 if state is None else state["place"]["slots"] for state in self._workers]
        if self._loader.num_workers == 0:
            self._loader.dataset._sample_index = slots[0]
            return
        places = [
            SavableDatasetCheckpoint(
                state=SavableDatasetState(rng=None, dataset_state=None, sample_index=number), offset=0
            )
            for number in slots
        ]
        turn = self._batches % len(self._workers)
        self._loader.restore_state_rank(
            SavableDataLoaderState(worker_states=places, next_worker_id=turn, micro_batch_size=None)
        )

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        if self._stream is None:
            self._stream = iter(self._loader)
        self._records.clear()
        # Lightning does not skip what an epoch has had before it was saved: it expects what remains.
        start = self._position if self._position < self._length else 0
        for position in range(start, self._length):
            started = time.perf_counter()
            pooled = next(self._stream)
            self._records.append(BatchRecord(pooled.lengths, started, time.perf_counter() - started, pooled.missed))
            self._follow(pooled)
            self._position = position + 1
            yield shield_sources(pooled.batch)

    def _follow(self, pooled: PooledBatch) -> None:
        """Keep the place of the worker that has made this batch: batch i comes from worker i % workers."""
        worker = self._batches % len(self._workers)
        snapshot = pooled.snapshot
        if snapshot is None and (last := self._workers[worker]) is not None:
            snapshot = last["snapshot"]
        dropped = count_dropped(self._workers)
        self._workers[worker] = {"snapshot": snapshot, "place": pooled.place}
        self._batches += 1
        if not (dropped or self._is_trial) and count_dropped(self._workers):
            warnings.warn(
                "a sample that costs more than max_tokens was left out (over_budget is 'drop'), and more may follow: "
                "the data module counts them in 'dropped'",
                stacklevel=3,
            )
        if pooled.warning is not None:
            warnings.warn(pooled.warning, stacklevel=3)

    def state(self) -> dict[str, Any]:
        """The place after the last batch that was yielded, plain; prefetched batches do not count."""
        return {"workers": list(self._workers), "batches": self._batches, "position": self._position}

    def pop_record(self) -> BatchRecord:
        """Return the record of the batch that is consumed now; to be called once for each batch, in order."""
        return self._records.popleft()

    def close(self) -> None:
        """Stop the worker processes."""
        self._stream = None
        _stop_workers(self._loader)


class EvalLoader:
    """Runs over a whole evaluation set from its start each time, with the same number of batches on every rank.

    A rank that has no batch left, while another has, yields its last one again; `is_repeat` tells which ones to leave
    out of a metric. The ranks agree before each batch (one small reduction), because how many batches an encoder
    makes of a data set (skipped samples, packing, generators) is not known before.

    Args:
        build: Makes a fresh energon loader.
        length: Batches of the longest rank, None if the encoder may make more of them than samples go in.
        ranks_with: Takes whether this rank has something, and returns on how many of `world_size` ranks it is so.
        world_size: Number of data-parallel ranks.
        name: Of the evaluation set, for errors.
    """

    def __init__(
        self,
        build: Callable[[], DataLoader],
        length: int | None,
        ranks_with: Callable[[bool], int],
        world_size: int,
        name: str,
    ) -> None:
        self._build = build
        self._length = length
        self._ranks_with = ranks_with
        self._world_size = world_size
        self._name = name
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
