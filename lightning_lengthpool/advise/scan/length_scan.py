"""A length scan of a data set, as plain data; and one of lengths that are known without reading any data."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Stream:
    """What one worker of one rank read, in the order in which the samples come to its pool."""

    rank: int  # of those of the configuration
    worker: int
    lengths: Array  # in tokens
    costs: Array  # what a training step on each sample costs, by the configuration's cost model; lengths without one
    classes: tuple[str, ...] | None = None  # None if the configuration has none


@dataclass(frozen=True)
class BatchCheck:
    """The tokens of a batch by the length function, and by the batch itself."""

    key: str  # of the batch's first sample
    expected: float  # by the length function
    counted: float  # in the batch
    field: str  # which of its fields tells, and how


@dataclass(frozen=True)
class LengthScan:
    """What reading some of the training data tells about it."""

    ranks: int  # data-parallel ranks of the configuration
    num_workers: int  # of each rank; 0 for none beside the main process
    streams: tuple[Stream, ...]  # of all ranks, or of up to 64 evenly spaced ones; sorted by rank and worker
    rank_samples: tuple[int, ...] | None = None  # of the split that fall to each of these ranks; None if not known
    sample_bytes: float | None = None  # mean of an encoded sample as the pool holds it
    encode_seconds: float | None = None  # a worker's mean to read and encode a sample
    batch_seconds: float | None = None  # a worker's mean for a batch: also for what follows the pool
    restore_seconds: float | None = None  # mean to bring back a sample by its key; None if it cannot, or was not tried
    batch_checks: tuple[BatchCheck, ...] = ()  # empty if a batch has no field to compare with
    asked: int = 0  # samples that were asked for
    is_complete: bool = True  # whether reading was not interrupted
    failed: int = 0  # samples that failed in the encoder or have no length
    failed_key: str | None = None  # what is known of the first of them
    over_budget: int = 0  # samples that alone cost more than `max_tokens`
    has_ranks: bool = True  # whether the streams tell the ranks apart; False for lengths of the data set as a whole
    drawn_from: int | None = None  # how many lengths these were drawn from at random; None if all known ones are here

    @property
    def lengths(self) -> Array:
        """All lengths that were read."""
        return _join(stream.lengths for stream in self.streams)

    @property
    def costs(self) -> Array:
        """All costs, in the order of `lengths`."""
        return _join(stream.costs for stream in self.streams)

    @property
    def classes(self) -> tuple[str, ...] | None:
        """All classes, in the order of `lengths`; None if the configuration has none."""
        if any(stream.classes is None for stream in self.streams):
            return None
        return tuple(label for stream in self.streams for label in stream.classes or ())

    def ranks_read(self) -> list[int]:
        """The ranks that were read, in order."""
        return sorted({stream.rank for stream in self.streams})

    def lengths_by_rank(self) -> list[Array]:
        """The lengths of each of these ranks, its workers one after the other."""
        return [_join(stream.lengths for stream in self._of(rank)) for rank in self.ranks_read()]

    def costs_by_rank(self) -> list[Array]:
        """The costs, in the order of `lengths_by_rank`."""
        return [_join(stream.costs for stream in self._of(rank)) for rank in self.ranks_read()]

    def classes_by_rank(self) -> list[tuple[str, ...]] | None:
        """The classes, in the order of `lengths_by_rank`; None if the configuration has none."""
        if self.classes is None:
            return None
        return [
            tuple(label for stream in self._of(rank) for label in stream.classes or ()) for rank in self.ranks_read()
        ]

    def fewest_of_rank(self) -> int | None:
        """Samples of the training split that fall to a rank, the fewest of any; None if that is not known."""
        return None if self.rank_samples is None else min(self.rank_samples)

    def _of(self, rank: int) -> list[Stream]:
        return [stream for stream in self.streams if stream.rank == rank]


def scan_of_lengths(
    lengths: ArrayLike,
    *,
    ranks: int,
    classes: Sequence[str] | None = None,
    rank_of: ArrayLike | None = None,
    drawn_from: int | None = None,
) -> LengthScan:
    """A length scan of lengths alone, which are known from somewhere.

    Args:
        lengths: In tokens.
        ranks: Data-parallel ranks.
        classes: Class of each sample; None without classes.
        rank_of: Rank of each sample; None if the lengths do not tell the ranks apart.
        drawn_from: As `LengthScan.drawn_from`.
    """
    values = np.asarray(lengths, dtype=np.float64)
    numbers = np.zeros(len(values), dtype=np.int64) if rank_of is None else np.asarray(rank_of, dtype=np.int64)
    order = np.argsort(numbers, kind="stable")
    present, starts = np.unique(numbers[order], return_index=True)
    streams = []
    for rank, mine in zip(present.tolist(), np.split(order, starts[1:]), strict=True):
        labels = None if classes is None else tuple(classes[index] for index in mine.tolist())
        streams.append(Stream(rank, 0, values[mine], values[mine], labels))
    return LengthScan(
        ranks=ranks,
        num_workers=0,
        streams=tuple(streams),
        asked=len(values),
        has_ranks=rank_of is not None,
        drawn_from=drawn_from,
    )


def _join(arrays: Iterable[Array]) -> Array:
    parts = list(arrays)
    return np.concatenate(parts) if parts else np.zeros(0)
