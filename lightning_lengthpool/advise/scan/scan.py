"""A length scan: some of the training data read as each worker of each rank meets them, and measured."""

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
from typing import Any

import numpy as np
from megatron.energon import WorkerConfig

from lightning_lengthpool.advise.scan.batch_check import BatchScanner
from lightning_lengthpool.advise.scan.length_scan import LengthScan, Stream
from lightning_lengthpool.advise.scan.scan_worker import Failures, Part, SampleScanner, Scanner, explained
from lightning_lengthpool.data.source import Source
from lightning_lengthpool.data.workers import NothingCameError, read_in_workers
from lightning_lengthpool.ordering.settings import ClassFn, PoolSettings

MOST_RANKS = 64  # that are read; of more ranks as many, evenly spaced
_BATCHES = 4  # whose tokens are compared
_TRIAL_POOL = 100  # samples of the pool that these come from, where a batch has one class


def scan_lengths(
    source: Source,
    settings: PoolSettings,
    ranks: int,
    samples: int,
    *,
    class_fn: ClassFn | None = None,
    most_ranks: int = MOST_RANKS,
    progress: Callable[[int], None] | None = None,
) -> LengthScan:
    """Read some of the training data, in worker processes, as training would read it.

    Ctrl-C ends reading, and what was read so far counts.

    Args:
        source: The data.
        settings: The pool.
        ranks: Data-parallel ranks.
        samples: How many samples to read, about; of a smaller data set each worker reads its share about once.
        class_fn: Names a sample's class, where there are classes; also before their shares are known.
        most_ranks: Ranks that are read; of more ranks as many, evenly spaced.
        progress: Called with the number of samples that have just come in.

    Raises:
        FileNotFoundError, ValueError: If the data cannot be read, or a sample has no length; the message names the
            setting or the sample, and the way out.
    """
    source.require_samples(ranks)
    chosen = spread(ranks, most_ranks)
    quota = math.ceil(samples / (len(chosen) * max(1, source.num_workers)))
    by_worker: dict[tuple[int, int], list[Part]] = defaultdict(list)
    shares: dict[int, int] = {}
    batches: list[Part] = []
    is_complete = False
    with _interrupts() as interrupted, _frozen(), contextlib.suppress(KeyboardInterrupt):
        for rank in chosen:
            scanner = _sample_scanner(source, settings, class_fn, rank, ranks, quota, is_first=rank == chosen[0])
            shares[rank] = sum(scanner.dataset.len_worker(worker) for worker in range(max(1, source.num_workers)))
            for part in _read(scanner, source):
                by_worker[rank, part.worker].append(part)
                if progress is not None:
                    progress(len(part.lengths))
        is_complete = True
        if any(part.lengths for parts in by_worker.values() for part in parts):
            batches = _make_batches(source, settings)
    all_parts = [part for parts in by_worker.values() for part in parts]
    if not any(part.lengths for part in all_parts):
        if interrupted:
            raise KeyboardInterrupt
        raise ValueError(_nothing_left(source, settings, all_parts))
    last = [parts[-1] for parts in by_worker.values()]
    streams = [
        _stream(rank, worker, parts, class_fn is not None)
        for (rank, worker), parts in sorted(by_worker.items(), key=lambda item: item[0])
        if any(part.lengths for part in parts)
    ]
    with_samples = {stream.rank for stream in streams}
    if len(with_samples) < len(shares):  # of some nothing came before the interruption
        shares = {rank: share for rank, share in shares.items() if rank in with_samples}
    return LengthScan(
        ranks=ranks,
        num_workers=source.num_workers,
        streams=tuple(streams),
        rank_samples=tuple(shares.values()),
        sample_bytes=_sample_bytes(by_worker.values()),
        encode_seconds=_mean(part.encode_seconds for part in last),
        batch_seconds=_mean(seconds for part in batches for seconds in part.batch_seconds),
        restore_seconds=_mean(part.restore_seconds for part in last),
        batch_checks=tuple(check for part in batches for check in part.batch_checks),
        asked=samples,
        is_complete=is_complete,
        failed=sum(part.failed for part in last),
        failed_key=next((part.failure for part in last if part.failure is not None), None),
        over_budget=sum(part.over_budget for part in all_parts),
    )


def spread(ranks: int, most: int) -> list[int]:
    """All ranks, or at most so many that are evenly spaced.

    Example:
        >>> spread(3, 4), spread(10, 4)
        ([0, 1, 2], [0, 2, 5, 7])
    """
    return [index * ranks // most for index in range(most)] if ranks > most else list(range(ranks))


# ---- reading


def _sample_scanner(
    source: Source,
    settings: PoolSettings,
    class_fn: ClassFn | None,
    rank: int,
    ranks: int,
    quota: int,
    *,
    is_first: bool,
) -> SampleScanner:
    failures = Failures()
    # One worker reads what the training process would read itself; and a process of its own leaves energon's memory of
    # the first rank's seed, in @stateless(restore_seeds=True), behind.
    workers = max(1, source.num_workers)
    config = WorkerConfig(rank=rank, world_size=ranks, num_workers=workers, global_error_handler=failures)
    with explained(f"the train split of {source.path} cannot be set up with {source.encoder_name}"):
        pool = source.training(settings, config).pool
    return SampleScanner(
        pool.dataset,
        quota,
        settings,
        class_fn,
        pool.failure_tolerance,
        source.packing_buffer_size,
        0 if is_first else None,
        failures,
        config,
    )


def _make_batches(source: Source, settings: PoolSettings) -> list[Part]:
    failures = Failures()
    config = WorkerConfig(rank=0, world_size=1, num_workers=1, global_error_handler=failures)
    batch_size = settings.batch_size
    if batch_size is None and source.packing_buffer_size is None:
        batch_size = _BATCHES
    if settings.class_fn is None:
        trial = PoolSettings(batch_size=batch_size, policy="none", length_fn=settings.length_fn, cost=settings.cost)
    else:  # a batch has one class
        size = min(settings.pool_size, max(_TRIAL_POOL, batch_size or 1))
        over_budget = "error" if settings.max_tokens is None else "alone"
        trial = replace(settings, batch_size=batch_size, pool_size=size, over_budget=over_budget, reference=None)
    pool = source.small().training(trial, config).pool
    try:
        return list(_read(BatchScanner(pool, _BATCHES, failures, config), source))
    except ValueError as error:  # the lengths are known all the same
        warnings.warn(f"no batch was compared with its lengths: {error}", stacklevel=3)
        return []


def _read(scanner: Scanner, source: Source) -> Iterator[Part]:
    """Run the scanner's workers to their end."""
    try:
        with contextlib.closing(read_in_workers(scanner)) as parts:
            for part in parts:
                if part.error is not None:
                    first = f" ({part.failed} samples failed, the first one {part.failure})" if part.failure else ""
                    raise ValueError(
                        f"the train split of {source.path} cannot be read with {source.encoder_name}: "
                        f"{part.error}{first}"
                    )
                yield part
    except NothingCameError as error:
        raise ValueError(
            f"{source.encoder_name} made no sample of the train split of {source.path} {error}. Does it skip all "
            "samples (SkipSample)?"
        ) from error
    except RuntimeError as error:
        if "exited unexpectedly" not in str(error) and "killed" not in str(error):
            raise
        raise ValueError(f"a worker that read the train split of {source.path} has died: {error}") from error


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
    """energon's loaders collect garbage at each start, in each worker as well: frozen objects are skipped."""
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
    labels = tuple(label for part in parts for label in part.classes) if has_classes else None
    return Stream(rank, worker, lengths, costs, labels)


def _nothing_left(source: Source, settings: PoolSettings, parts: Sequence[Part]) -> str:
    if over_budget := sum(part.over_budget for part in parts):
        return (
            f"all {over_budget} samples that were read cost more than max_tokens ({settings.max_tokens:g}), and "
            "over_budget is 'drop': nothing would be left of them. Raise max_tokens."
        )
    what = f"{source.encoder_name} made no sample of the train split of {source.path}"
    first = next((part.failure for part in parts if part.failure is not None), None)
    return what if first is None else f"{what} that can be measured: the first one that failed is sample {first}"


def _sample_bytes(workers: Iterable[Sequence[Part]]) -> float | None:
    by_worker = [[size for part in parts for size in part.sample_bytes] for parts in workers]
    # a worker's first sample also brings what all have in common
    return _mean(size for sizes in by_worker for size in sizes[1:] or sizes)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
