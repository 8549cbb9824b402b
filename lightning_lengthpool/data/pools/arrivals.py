"""What comes into a worker's pool: that something comes at all, and the same again when a run goes on.

A resumed run reads again what its worker had read: samples by their keys, and the stream since the last snapshot. A
sample whose read failed once, or fails now, an encoder whose result depends on more than the sample, or changed data
would lead to other batches without a word. So the iterator state has a checksum of what came in.
"""

import zlib
from dataclasses import dataclass
from typing import Any, NoReturn

from megatron.energon import SavableDataset, WorkerConfig
from megatron.energon.errors import FatalSampleError
from megatron.energon.wrappers.base import get_sample_restore_key

from lightning_lengthpool.data.pools.plain_state import plain_state
from lightning_lengthpool.data.reading.shards import ShardError
from lightning_lengthpool.ordering.length import get_field
from lightning_lengthpool.ordering.settings import PoolSettings, Size


class StarvedError(FatalSampleError):
    """A worker that reads, and makes nothing of what it reads: the other ranks would wait for it without end."""


@plain_state()
@dataclass(frozen=True)
class ArrivalsState:
    """What has come into a pool: how many samples, their checksum, and the last one's key."""

    samples: int = 0
    checksum: int = 0
    last: Any = None


class Arrivals:
    """The samples that have come into one worker's pool.

    `tolerance` samples (0: any number) may be read in a row before one comes in, and `buffered` more, which energon's
    own buffers hold back.
    """

    def __init__(self) -> None:
        self.tolerance = self.buffered = 0
        self._samples = self._checksum = self._read = 0
        self._last: Any = None  # the last one's key

    def read(self, worker_config: WorkerConfig) -> None:
        """Count a sample that is read, before it is known what becomes of it; `StarvedError` for too many in a row."""
        self._read += 1
        if self.tolerance and self._read > self.tolerance + self.buffered:
            what = f"{self._read - 1} samples were read in a row and none came into the pool"
            starve(worker_config, what, self.tolerance)

    def add(self, sample: Any, cost: float) -> None:
        """Count a sample that comes in."""
        self._read = 0
        self._samples += 1
        self._checksum = zlib.crc32(f"{get_sample_restore_key(sample)}{cost}".encode(), self._checksum)
        self._last = get_field(sample, "__key__")

    def state(self) -> ArrivalsState:
        return ArrivalsState(self._samples, self._checksum, self._last)

    def restore(self, state: ArrivalsState) -> None:
        """Go on counting from there."""
        self._samples, self._checksum, self._last, self._read = state.samples, state.checksum, state.last, 0


class Replay:
    """Reads again what an iterator state names, and keeps a sentence for each of the `differences` to what was."""

    def __init__(self, dataset: SavableDataset, settings: PoolSettings) -> None:
        self._dataset = dataset
        self._settings = settings
        self.differences: list[str] = []

    def sample(self, key: Any, cost: float) -> tuple[Any, Size] | None:
        """Read one sample again by its restore key, which had this cost then; None if it fails now."""
        try:
            sample = self._dataset.restore_sample(key)
            size = self._settings.measure(sample)
        except ShardError:
            raise
        except Exception as error:
            self.differences.append(f"the sample with the restore key {key} cannot be read again ({error!r})")
            return None
        if size.cost != cost:
            name = get_field(sample, "__key__")
            self.differences.append(f"sample {name!r} has a cost of {size.cost:g} now, and had one of {cost:g}")
        return sample, size

    def compare(self, now: ArrivalsState, saved: ArrivalsState) -> None:
        """Compare what has come in again with what had come in when the state was saved."""
        if now == saved:
            return
        which = "some of them are" if saved.last == now.last else f"the last of them is {now.last!r}, so they are"
        self.differences.append(
            f"the samples that had come in since the last snapshot, up to number {saved.samples} ({saved.last!r}), "
            f"were read again, and {which} others or of other lengths"
        )


def starve(worker_config: WorkerConfig, what: str, tolerance: int) -> NoReturn:
    """Raise a `StarvedError` that says what was skipped by whom, and the way out."""
    raise StarvedError(
        f"rank {worker_config.rank}, worker {worker_config.rank_worker_id()}: {what} (skip_tolerance is {tolerance}), "
        "and all other ranks wait for this one. The task encoder skips them (SkipSample), yields nothing for them or "
        "fails on them: correct it, or leave such samples out of the data. Or raise skip_tolerance; 0 sets no limit."
    )
