"""A survey of a data set: the lengths of its samples as each worker of each rank meets them, and what they take."""

import contextlib
import gc
import math
import os
import signal
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from megatron.energon import WorkerConfig

from lightning_lengthpool.advise.scan.scan_parts import BatchCheck, Stream, Survey, survey_of_lengths
from lightning_lengthpool.advise.scan.scan_worker import BatchReader, Failures, Part, SampleReader, named
from lightning_lengthpool.data.workers import NothingCameError, read_in_workers
from lightning_lengthpool.ordering.settings import PoolSettings

if TYPE_CHECKING:
    from lightning_lengthpool.data.datamodule import LengthPoolDataModule

__all__ = ["BatchCheck", "Stream", "Survey", "survey", "survey_of_lengths"]

MOST_RANKS = 64  # that are read; of more ranks as many, evenly spaced
_BATCHES = 4  # whose tokens are compared
_TRIAL_POOL = 100  # samples of the pool that these come from, where a batch has one class


def survey(
    module: "LengthPoolDataModule",
    ranks: int,
    samples: int,
    progress: Callable[[int], None] | None = None,
) -> Survey:
    """Read a sample of a data module's training data, in worker processes, as training would read it.

    Ctrl-C ends reading, and what was read so far counts.

    Args:
        module: Whose data; set up so far that its `path` is right.
        ranks: Data-parallel ranks.
        samples: How many samples to read, about; of a smaller data set each worker reads its share about once.
        progress: Called with the number of samples that have just come in.

    Raises:
        FileNotFoundError, ValueError: If the data cannot be read, or a sample has no length; the message names the
            setting or the sample, and the way out.
    """
    workers = max(1, module.source.num_workers)
    module.source.require_samples(ranks)
    surveyed = spread(ranks, MOST_RANKS)
    quota = math.ceil(samples / (len(surveyed) * workers))
    found: dict[tuple[int, int], list[Part]] = defaultdict(list)
    shares = []
    batches: list[Part] = []
    is_complete = False
    with _interrupts() as interrupted, _frozen(), contextlib.suppress(KeyboardInterrupt):
        for rank in surveyed:
            reader, share = _sample_reader(module, rank, ranks, quota, is_first=not shares)
            shares.append(share)
            for part in _read(reader, module):
                found[rank, part.worker].append(part)
                if progress is not None:
                    progress(len(part.lengths))
        is_complete = True
        if any(part.lengths for own in found.values() for part in own):
            batches = _make_batches(module)
    parts = [part for own in found.values() for part in own]
    if not any(part.lengths for part in parts):
        if interrupted:
            raise KeyboardInterrupt
        raise ValueError(_nothing_left(module, parts))
    last = [own[-1] for own in found.values()]
    streams = [_stream(rank, worker, own, module.class_fn is not None) for (rank, worker), own in found.items()]
    streams = sorted((stream for stream in streams if len(stream.lengths)), key=lambda own: (own.rank, own.worker))
    if len({stream.rank for stream in streams}) < len(shares):  # of which nothing came before the interruption
        read = {stream.rank for stream in streams}
        shares = [share for rank, share in zip(surveyed, shares, strict=False) if rank in read]
    return Survey(
        ranks=ranks,
        num_workers=module.source.num_workers,
        streams=tuple(streams),
        rank_samples=tuple(shares),
        sample_bytes=_sample_bytes(found.values()),
        encode_seconds=_mean(part.encode_seconds for part in last if part.encode_seconds is not None),
        batch_seconds=_mean(seconds for part in batches for seconds in part.batch_seconds),
        restore_seconds=_mean(part.restore_seconds for part in last if part.restore_seconds is not None),
        batch_checks=tuple(BatchCheck(*one) for part in batches for one in part.batches),
        asked=samples,
        is_complete=is_complete,
        failed=sum(part.failed for part in last),
        failed_key=next((part.failure for part in last if part.failure is not None), None),
        over_budget=sum(part.over_budget for part in parts),
    )


def spread(ranks: int, most: int) -> list[int]:
    """All ranks, or at most so many that are evenly spaced.

    Example:
        >>> spread(3, 4), spread(10, 4)
        ([0, 1, 2], [0, 2, 5, 7])
    """
    return [index * ranks // most for index in range(most)] if ranks > most else list(range(ranks))


# ---- reading


def _sample_reader(
    module: "LengthPoolDataModule", rank: int, ranks: int, quota: int, *, is_first: bool
) -> tuple[SampleReader, int]:
    """What reads a rank's samples, and how many of the split are this rank's."""
    failures = Failures()
    # One worker reads what the training process would read itself; and a process of its own leaves energon's memory of
    # the first rank's seed, in @stateless(restore_seeds=True), behind.
    workers = max(1, module.source.num_workers)
    config = WorkerConfig(rank=rank, world_size=ranks, num_workers=workers, global_error_handler=failures)
    with named(f"the train split of {module.source.path} cannot be set up with {module.source.encoder_name}"):
        pool = module.source.training(module.settings, config).pool
    upstream = pool.dataset
    reader = SampleReader(
        upstream,
        quota,
        module.settings,
        module.class_fn,
        pool.failure_tolerance,
        module.source.packing_buffer_size,
        0 if is_first else None,
        failures,
        config,
    )
    return reader, sum(upstream.len_worker(worker) for worker in range(workers))


def _make_batches(module: "LengthPoolDataModule") -> list[Part]:
    failures = Failures()
    config = WorkerConfig(rank=0, world_size=1, num_workers=1, global_error_handler=failures)
    batch_size = module.batch_size
    if batch_size is None and module.source.packing_buffer_size is None:
        batch_size = _BATCHES
    pool = module.source.small().training(_trial_settings(module.settings, batch_size), config).pool
    try:
        return list(_read(BatchReader(pool, _BATCHES, failures, config), module))
    except ValueError as error:  # the lengths are known all the same
        warnings.warn(f"no batch was compared with its lengths: {error}", stacklevel=3)
        return []


def _trial_settings(settings: PoolSettings, batch_size: int | None) -> PoolSettings:
    if settings.class_fn is None:
        return PoolSettings(batch_size, policy="none", length_fn=settings.length_fn, cost=settings.cost)
    over_budget = "error" if settings.max_tokens is None else "alone"
    size = min(settings.pool_size, max(_TRIAL_POOL, batch_size or 1))  # a batch has one class
    return replace(settings, batch_size=batch_size, pool_size=size, over_budget=over_budget, reference=None)


def _read(reader: SampleReader | BatchReader, module: "LengthPoolDataModule") -> Iterator[Part]:
    """Run the reader's workers to their end."""
    encoder = module.source.encoder_name
    parts = read_in_workers(reader)
    try:
        for part in parts:
            if part.error is not None:
                first = f" ({part.failed} samples failed, the first one {part.failure})" if part.failure else ""
                raise ValueError(
                    f"the train split of {module.source.path} cannot be read with {encoder}: {part.error}{first}"
                )
            yield part
    except NothingCameError as error:
        raise ValueError(
            f"{encoder} made no sample of the train split of {module.source.path} {error}. Does it skip all samples "
            "(SkipSample)?"
        ) from error
    except RuntimeError as error:
        if "exited unexpectedly" not in str(error) and "killed" not in str(error):
            raise
        raise ValueError(f"a worker that read the train split of {module.source.path} has died: {error}") from error
    finally:
        parts.close()


@contextlib.contextmanager
def _interrupts() -> Iterator[list[bool]]:
    """Ctrl-C reaches this process only, once; yields a list that is filled when it comes."""
    came: list[bool] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    main, before = os.getpid(), signal.getsignal(signal.SIGINT)

    def interrupt(*_: Any) -> None:
        if os.getpid() != main:
            return  # a worker, which is told to end
        signal.signal(signal.SIGINT, before)
        came.append(True)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _frozen() -> Iterator[None]:
    """energon's loaders collect garbage at each start, in each worker as well: of what is there already it is idle."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


# ---- putting it together


def _stream(rank: int, worker: int, parts: Sequence[Part], has_classes: bool) -> Stream:
    lengths, costs = (
        np.array([value for part in parts for value in getattr(part, name)], dtype=np.float64)
        for name in ("lengths", "costs")
    )
    kinds = tuple(kind for part in parts for kind in part.classes) if has_classes else None
    return Stream(rank, worker, lengths, costs, kinds)


def _nothing_left(module: "LengthPoolDataModule", parts: Sequence[Part]) -> str:
    if over_budget := sum(part.over_budget for part in parts):
        return (
            f"all {over_budget} samples that were read cost more than max_tokens ({module.settings.max_tokens:g}), and "
            "over_budget is 'drop': nothing would be left of them. Raise max_tokens."
        )
    what = f"{module.source.encoder_name} made no sample of the train split of {module.source.path}"
    first = next((part.failure for part in parts if part.failure is not None), None)
    return what if first is None else f"{what} that can be measured: the first one that failed is sample {first}"


def _sample_bytes(workers: Iterable[Sequence[Part]]) -> float | None:
    sizes = [[size for part in parts for size in part.sample_bytes] for parts in workers]
    # a worker's first sample also brings what all have in common
    return _mean(size for own in sizes for size in own[1:] or own)


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return float(np.mean(found)) if found else None
