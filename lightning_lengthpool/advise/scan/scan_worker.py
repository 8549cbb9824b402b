"""What a length scan's worker processes do: read samples, measure them, and send the numbers alone."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from megatron.energon import SavableDataset, WorkerConfig
from megatron.energon.wrappers.base import get_sample_restore_key

from lightning_lengthpool.advise.scan.length_scan import BatchCheck
from lightning_lengthpool.advise.scan.origins import Key, origins
from lightning_lengthpool.advise.scan.sample_bytes import Scales
from lightning_lengthpool.data.pools.arrivals import StarvedError
from lightning_lengthpool.data.pools.measure import Measurer
from lightning_lengthpool.data.reading.shards import ShardError
from lightning_lengthpool.data.workers import Records
from lightning_lengthpool.ordering.length import get_field
from lightning_lengthpool.ordering.settings import ClassFn, PoolSettings

_PART_SECONDS, _PART_SAMPLES = 0.5, 256  # of what is sent at a time
_RESTORED, _RESTORE_SECONDS = 8, 5.0  # samples that are brought back by their keys, and when to stop doing so
_SHOWN = 300  # characters of an error


@dataclass
class Part:
    """What a worker has measured since its last part."""

    worker: int
    lengths: list[float] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    sample_bytes: list[int] = field(default_factory=list)  # of some samples
    over_budget: int = 0  # samples that cost more than a batch may
    encode_seconds: float | None = None  # to read and encode a sample; None as long as that is not known
    restore_seconds: float | None = None  # to bring back one; None if it was not tried, or failed
    failed: int = 0  # samples that have failed so far
    failure: str | None = None  # the first of them
    error: str | None = None  # why the worker gave up
    batch_checks: list[BatchCheck] = field(default_factory=list)
    batch_seconds: list[float] = field(default_factory=list)  # but for the first batch, which also fills buffers
    __restore_key__: Key = field(default=())  # where energon's loader puts its own position


class Failures:
    """energon's error handler in a worker: counts the samples that fail, and keeps the first one's name."""

    def __init__(self) -> None:
        self.count = 0
        self.first: str | None = None

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
def explained(what: str) -> Iterator[None]:
    """Say in one line what failed, where the user's own code may; errors for people pass as they are."""
    try:
        yield
    except (ValueError, OSError):
        raise
    except Exception as error:
        raise ValueError(f"{what}: {in_one_line(error)}") from error


class _ForPeople(ValueError):
    """An error whose text says it all."""


class Scanner(Records[Part]):
    """A data set of parts, which ends; an error becomes a part as well."""

    def __init__(self, dataset: SavableDataset, failures: Failures, worker_config: WorkerConfig) -> None:
        super().__init__(dataset, worker_config=worker_config)
        self.failures = failures

    def __iter__(self) -> Iterator[Part]:
        if torch.utils.data.get_worker_info() is not None:  # what an encoder prints is no part of a report
            sys.stdout = open(os.devnull, "w")
        worker = self.worker_config.rank_worker_id()
        try:
            for part in self.parts(worker):
                yield self._with_failures(part)
        except Exception as error:
            text = str(error) if isinstance(error, (_ForPeople, ShardError, StarvedError)) else in_one_line(error)
            yield self._with_failures(Part(worker, error=text))

    def parts(self, worker: int) -> Iterator[Part]:
        """What the worker measures."""
        raise NotImplementedError

    def _with_failures(self, part: Part) -> Part:
        part.failed, part.failure = self.failures.count, self.failures.first
        return part


class SampleScanner(Scanner):
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

    def parts(self, worker: int) -> Iterator[Part]:
        part, share = Part(worker), self.dataset.len_worker()
        keys: list[Key] = []
        distinct: set[Any] = set()
        read = 0  # samples of the data set: several make a pack, and one may be encoded as several
        seconds: list[float] = []  # of each sample
        upstream, sent = iter(self.dataset), time.perf_counter()
        while len(seconds) < self.quota and read < max(1, share) and read <= 2 * len(distinct):
            started = time.perf_counter()
            sample = next(upstream, None)
            if sample is None:
                break
            seconds.append(time.perf_counter() - started)
            key = get_sample_restore_key(sample)
            if isinstance(key, tuple):
                keys.append(key)
                made_of = origins(key)
                distinct.update(origin.key for origin in made_of)
                read += sum(origin.is_first for origin in made_of)
            else:  # an encoder that drops the key
                distinct.add(len(seconds))
                read += 1
            self._measure(sample, part)
            if len(part.lengths) >= _PART_SAMPLES or time.perf_counter() - sent >= _PART_SECONDS:
                part.encode_seconds = self._encode_seconds(seconds, read)
                yield part
                part, sent = Part(worker), time.perf_counter()
        part.encode_seconds = self._encode_seconds(seconds, read)
        if keys and worker == self.restorer:
            part.restore_seconds = self._restore_seconds(keys[:: max(1, len(keys) // _RESTORED)][:_RESTORED])
        yield part

    def _measure(self, sample: Any, part: Part) -> None:
        settings = self.settings
        if (size := self._measurer(sample)) is None:
            return  # counted by `failures`
        label, shares = size.class_name, settings.class_shares
        if self.class_fn is not None and (
            not isinstance(label, str) or not label or (shares is not None and label not in shares)
        ):
            raise _ForPeople(
                f"sample {get_field(sample, '__key__')!r} is of class {label!r}, expected "
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
        if label is not None:
            part.classes.append(label)

    def _encode_seconds(self, seconds: Sequence[float], read: int) -> float | None:
        """Mean seconds of a sample; the first one also opens files and fills buffers."""
        if not seconds:
            return None
        mean = float(np.mean(seconds[1:] or seconds))
        buffer = self.packing_buffer_size
        if buffer is not None and len(seconds) > 1 and read <= buffer:  # only the first pack has filled the buffer
            mean += seconds[0] * min(1.0, read / len(seconds) / buffer)
        return mean

    def _restore_seconds(self, keys: Sequence[Key]) -> float | None:
        """Mean seconds to bring back a sample by its key; None where it cannot be."""
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
