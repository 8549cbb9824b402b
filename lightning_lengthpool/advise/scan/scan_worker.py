"""What a survey's worker processes do: read samples, measure them, and send the numbers alone."""

import contextlib
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from megatron.energon import SavableDataset, WorkerConfig
from megatron.energon.wrappers import PackingDataset
from megatron.energon.wrappers.base import get_sample_restore_key

from lightning_lengthpool.advise.scan.sample_bytes import Scales
from lightning_lengthpool.data.pools.arrivals import StarvedError
from lightning_lengthpool.data.pools.dataset import LengthPoolDataset, PooledBatch
from lightning_lengthpool.data.pools.measure import Measurer
from lightning_lengthpool.data.reading.shards import ShardError
from lightning_lengthpool.data.workers import Records
from lightning_lengthpool.ordering.length import get_field
from lightning_lengthpool.ordering.settings import ClassFn, PoolSettings

_PART_SECONDS, _PART_SAMPLES = 0.5, 256  # of what is sent at a time
_RESTORED, _RESTORE_SECONDS = 8, 5.0  # samples that are brought back by their keys, and when to stop doing so
_SHOWN = 300  # characters of an error
_NAMES_OF_TOKENS = ("tokens", "input_ids", "labels")


@dataclass
class Part:
    """What a worker has found since its last part.

    Attributes:
        worker: The worker.
        lengths: Of the samples, as are `costs` and `classes`.
        sample_bytes: Of some samples.
        over_budget: Samples that cost more than a batch may.
        encode_seconds: To read and encode a sample; None as long as that is not known.
        restore_seconds: To bring back one; None if it was not tried, or failed.
        failed: Samples that have failed so far.
        failure: The first of them.
        error: Why the worker gave up; None if it has not.
        batches: `(key, expected, found, field)` of batches, if these were made.
        batch_seconds: What these took, but for the first one, which also opens files and fills buffers.
    """

    worker: int
    lengths: list[float] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    sample_bytes: list[int] = field(default_factory=list)
    over_budget: int = 0
    encode_seconds: float | None = None
    restore_seconds: float | None = None
    failed: int = 0
    failure: str | None = None
    error: str | None = None
    batches: list[tuple[str, float, float, str]] = field(default_factory=list)
    batch_seconds: list[float] = field(default_factory=list)
    __restore_key__: tuple = field(default=())  # where energon's loader puts its own position


class Failures:
    """energon's error handler in a worker: counts the samples that fail, and keeps the first one's name."""

    def __init__(self) -> None:
        self.count, self.first = 0, None

    def __call__(self, error: Exception, sample: Any, sources: Any = None) -> None:
        self.count += 1
        if self.first is None:
            one = sample[0] if isinstance(sample, list) and sample else sample
            self.first = f"{get_field(one, '__key__')!r} ({in_one_line(error)})"


def in_one_line(error: BaseException) -> str:
    """An error as a short text without line breaks; energon has the sample first, and last what was wrong with it."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} ... {text[-_SHOWN // 2 :]}"


@contextlib.contextmanager
def named(what: str) -> Iterator[None]:
    """Say in one line what failed, where the user's own code may; errors for people pass as they are."""
    try:
        yield
    except (ValueError, OSError):
        raise
    except Exception as error:
        raise ValueError(f"{what}: {in_one_line(error)}") from error


class _Reader(Records[Part]):
    """A data set of parts, which ends."""

    def __init__(self, dataset: SavableDataset, failures: Failures, worker_config: WorkerConfig) -> None:
        super().__init__(dataset, worker_config=worker_config)
        self.failures = failures

    def __iter__(self) -> Iterator[Part]:
        if torch.utils.data.get_worker_info() is not None:  # what an encoder prints is no part of a report
            sys.stdout = open(os.devnull, "w")
        worker = self.worker_config.rank_worker_id()
        try:
            for part in self._parts(worker):
                yield self._counted(part)
        except Exception as error:
            text = str(error) if isinstance(error, (_Plain, ShardError, StarvedError)) else in_one_line(error)
            yield self._counted(Part(worker, error=text))

    def _parts(self, worker: int) -> Iterator[Part]:
        raise NotImplementedError

    def _counted(self, part: Part) -> Part:
        part.failed, part.failure = self.failures.count, self.failures.first
        return part


class _Plain(ValueError):
    """An error whose text says it all."""


class SampleReader(_Reader):
    """Measures a worker's samples in the order in which they would come to its pool.

    It ends after `quota` samples, or when the worker's share of the data was read about once: where many samples are
    skipped when there are more repetitions than other samples.

    Args:
        dataset: What the pool would read from.
        quota: Samples to read.
        settings: The pool, for lengths and costs.
        class_fn: Names a sample's class, if there are classes.
        failure_tolerance: Failures of a function in a row that are let pass, see `measure.Measurer`.
        packing_buffer_size: Samples that energon packs from; None without packing.
        restorer: The worker which also brings some samples back by their keys; None for none.
        failures: Counts those.
        worker_config: The rank and its workers.
    """

    def __init__(
        self,
        dataset: SavableDataset,
        quota: int,
        settings: PoolSettings,
        class_fn: ClassFn | None,
        failure_tolerance: int | None,
        packing_buffer_size: int | None,
        restorer: int | None,
        failures: Failures,
        worker_config: WorkerConfig,
    ) -> None:
        super().__init__(dataset, failures, worker_config)
        self.quota, self.settings, self.class_fn = quota, settings, class_fn
        self.packing_buffer_size, self.restorer = packing_buffer_size, restorer
        self._measurer = Measurer(settings, worker_config, failure_tolerance, class_fn)
        self._scales = Scales()

    def _parts(self, worker: int) -> Iterator[Part]:
        part, share = Part(worker), self.dataset.len_worker()
        keys: list[Any] = []
        seen: set[Any] = set()
        read = 0  # samples of the data set: several make a pack, and one may be encoded as several
        pulls: list[float] = []
        upstream, sent = iter(self.dataset), time.perf_counter()
        while len(pulls) < self.quota and read < max(1, share) and read <= 2 * len(seen):
            started = time.perf_counter()
            sample = next(upstream, None)
            if sample is None:
                break
            pulls.append(time.perf_counter() - started)
            key = get_sample_restore_key(sample)
            origins, new = _origins(key, len(pulls))
            seen |= origins
            read += new
            if worker == self.restorer and key is not None:
                keys.append(key)
            self._measure(sample, part)
            if len(part.lengths) >= _PART_SAMPLES or time.perf_counter() - sent >= _PART_SECONDS:
                part.encode_seconds = self._encode_seconds(pulls, read)
                yield part
                part, sent = Part(worker), time.perf_counter()
        part.encode_seconds = self._encode_seconds(pulls, read)
        if keys:
            part.restore_seconds = self._restore(keys[:: max(1, len(keys) // _RESTORED)][:_RESTORED])
        yield part

    def _measure(self, sample: Any, part: Part) -> None:
        settings = self.settings
        if (size := self._measurer(sample)) is None:
            return  # counted by `failures`
        kind, shares = size.class_name, settings.class_shares
        if self.class_fn is not None and (
            not isinstance(kind, str) or not kind or (shares is not None and kind not in shares)
        ):
            raise _Plain(
                f"sample {get_field(sample, '__key__')!r} is of class {kind!r}, expected "
                + ("a name" if shares is None else f"one of those in class_shares: {', '.join(map(repr, shares))}")
                + ". Give the class a share, or let class_fn name another one."
            )
        if self._scales.is_open:
            part.sample_bytes.append(self._scales.weigh(sample))
        is_over = settings.max_tokens is not None and size.cost > settings.max_tokens
        part.over_budget += is_over
        if is_over and settings.over_budget == "drop":
            return  # it never comes into a pool
        part.lengths.append(float(size.length))
        part.costs.append(float(size.cost))
        if kind is not None:
            part.classes.append(kind)

    def _encode_seconds(self, pulls: list[float], read: int) -> float | None:
        """Mean seconds of a sample; the first one also opens files and fills buffers."""
        if not pulls:
            return None
        seconds = float(np.mean(pulls[1:] or pulls))
        buffer = self.packing_buffer_size
        if buffer is not None and len(pulls) > 1 and read <= buffer:  # only the first pack has filled the buffer
            seconds += pulls[0] * min(1.0, read / len(pulls) / buffer)
        return seconds

    def _restore(self, keys: list[Any]) -> float | None:
        if not self.dataset.can_restore_sample():
            return None
        seconds: list[float] = []
        try:
            for key in keys:
                started = time.perf_counter()
                self.dataset.restore_sample(key)
                seconds.append(time.perf_counter() - started)
                if sum(seconds) > _RESTORE_SECONDS:
                    break
        except Exception:  # whatever it is: it cannot
            return None
        return float(np.mean(seconds))


def _origins(key: Any, number: int) -> tuple[set[Any], int]:
    """What a sample was made of, by keys that stay the same when the data come again; and how many of that are new."""
    if not isinstance(key, tuple):
        return {number}, 1
    inner = [part for part in key if isinstance(part, tuple)] if PackingDataset.__name__ in key else []
    found = [_origin(one) for one in inner or [key]]
    return {origin for origin, _ in found}, sum(is_first for _, is_first in found)


def _origin(key: tuple) -> tuple[tuple, bool]:
    """A key without the numbers of an encoder's runs; and whether it is the first sample of its run."""
    origin: list[Any] = []
    runs: list[Any] = []
    target = origin
    for part in key:
        if isinstance(part, str):
            target = runs if "MapDataset" in part else origin
        target.append(part)
    # of a generator a run has a second number
    return tuple(origin), not any(
        isinstance(a, int) and isinstance(b, int) and b > 0 for a, b in zip(runs, runs[1:], strict=False)
    )


class BatchReader(_Reader):
    """Makes a few batches, and compares their tokens with what the length function says.

    Args:
        pool: Makes the batches.
        count: How many.
        failures: Counts those.
        worker_config: The rank and its workers.
    """

    def __init__(self, pool: LengthPoolDataset, count: int, failures: Failures, worker_config: WorkerConfig) -> None:
        super().__init__(pool, failures, worker_config)
        self.count = count

    def _parts(self, worker: int) -> Iterator[Part]:
        part, started, batches = Part(worker), time.perf_counter(), iter(self.dataset)
        for number in range(self.count):
            if (pooled := next(batches, None)) is None:
                break
            if number:
                part.batch_seconds.append(time.perf_counter() - started)
            if (found := _check(pooled)) is not None:
                part.batches.append(found)
            started = time.perf_counter()
        yield part


def _check(pooled: PooledBatch) -> tuple[str, float, float, str] | None:
    lengths, key = pooled.lengths, pooled.__key__[0]
    mask = get_field(pooled.batch, "attention_mask")
    if _is_array(mask) and len(mask.shape) <= 2:
        total = float(mask.sum())
        if 0 <= total < math.inf:  # else it is one that is added to the scores
            return key, math.fsum(lengths), total, "sum of attention_mask"
    for name in _NAMES_OF_TOKENS:
        value = get_field(pooled.batch, name)
        if _is_array(value) and 1 <= len(value.shape) <= 2:
            if len(value.shape) == 2 and len(value) == len(lengths):
                return key, len(lengths) * max(lengths), float(math.prod(value.shape)), f"size of {name}, with padding"
            return key, math.fsum(lengths), float(math.prod(value.shape)), f"size of {name}"
        if isinstance(value, (list, tuple)) and value and all(_is_array(one) or isinstance(one, list) for one in value):
            return key, math.fsum(lengths), float(sum(map(len, value))), f"lengths of {name}"
    return None


def _is_array(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray))
