"""What a survey of a data set finds, as plain data; and a survey of lengths that are known without reading any data."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Stream:
    """What one worker of one rank read, in the order in which the samples come to its pool.

    Attributes:
        rank: The rank, of those of the configuration.
        worker: The worker of this rank.
        lengths: Lengths in tokens.
        costs: What a training step on each sample costs, by the configuration's cost model; lengths without one.
        classes: The samples' classes; None if the configuration has none.
    """

    rank: int
    worker: int
    lengths: Array
    costs: Array
    classes: tuple[str, ...] | None = None


@dataclass(frozen=True)
class BatchCheck:
    """The tokens of a batch by the length function, and by the batch itself.

    Attributes:
        key: Key of the batch's first sample.
        expected: Tokens by the length function.
        found: Tokens that the batch itself holds.
        field: Where these were found, and how they are counted.
    """

    key: str
    expected: float
    found: float
    field: str


@dataclass(frozen=True)
class Survey:
    """What a survey found.

    Attributes:
        ranks: Data-parallel ranks of the configuration.
        num_workers: Workers of each rank; 0 for none beside the main process.
        streams: Of all ranks, or of up to 64 evenly spaced ones; sorted by rank and worker.
        rank_samples: Samples of the training split that fall to each surveyed rank; None if that is not known.
        sample_bytes: Mean bytes of an encoded sample as the pool holds it.
        encode_seconds: A worker's mean seconds to read and encode a sample.
        batch_seconds: A worker's mean seconds for a batch: to read and encode its samples, and what follows the pool.
        restore_seconds: Mean seconds to bring back a sample by its key; None if the encoder cannot, or if reading was
            interrupted before it was tried.
        batch_checks: A few batches; empty if a batch has no field to compare with.
        asked: Samples that were asked for.
        is_complete: Whether reading was not interrupted.
        failed: Samples that failed in the encoder or have no length.
        failed_key: What is known of the first failed sample; None if none has failed.
        over_budget: Samples that alone cost more than `max_tokens`.
        has_ranks: Whether the streams tell the ranks apart; False for lengths of the data set as a whole.
        drawn_from: The number of lengths from which these were drawn at random; None if all that are known are here.
    """

    ranks: int
    num_workers: int
    streams: tuple[Stream, ...]
    rank_samples: tuple[int, ...] | None = None
    sample_bytes: float | None = None
    encode_seconds: float | None = None
    batch_seconds: float | None = None
    restore_seconds: float | None = None
    batch_checks: tuple[BatchCheck, ...] = ()
    asked: int = 0
    is_complete: bool = True
    failed: int = 0
    failed_key: str | None = None
    over_budget: int = 0
    has_ranks: bool = True
    drawn_from: int | None = None

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
        return tuple(kind for stream in self.streams for kind in stream.classes or ())

    def surveyed_ranks(self) -> list[int]:
        """The ranks that were read, in order."""
        return sorted({stream.rank for stream in self.streams})

    def lengths_by_rank(self) -> list[Array]:
        """The lengths of each surveyed rank, its workers one after the other."""
        return [_join(s.lengths for s in self.streams if s.rank == rank) for rank in self.surveyed_ranks()]

    def costs_by_rank(self) -> list[Array]:
        """The costs, in the order of `lengths_by_rank`."""
        return [_join(s.costs for s in self.streams if s.rank == rank) for rank in self.surveyed_ranks()]

    def classes_by_rank(self) -> list[tuple[str, ...]] | None:
        """The classes, in the order of `lengths_by_rank`; None if the configuration has none."""
        if self.classes is None:
            return None
        return [
            tuple(kind for s in self.streams if s.rank == rank for kind in s.classes or ())
            for rank in self.surveyed_ranks()
        ]


def survey_of_lengths(
    lengths: ArrayLike,
    *,
    ranks: int,
    classes: Sequence[str] | None = None,
    rank_of: ArrayLike | None = None,
    drawn_from: int | None = None,
) -> Survey:
    """A survey of lengths alone, which are known from somewhere.

    Args:
        lengths: In tokens.
        ranks: Data-parallel ranks.
        classes: Class of each sample; None without classes.
        rank_of: Rank of each sample; None if the lengths do not tell the ranks apart.
        drawn_from: As `Survey.drawn_from`.
    """
    values = np.asarray(lengths, dtype=np.float64)
    numbers = np.zeros(len(values), dtype=np.int64) if rank_of is None else np.asarray(rank_of, dtype=np.int64)
    order = np.argsort(numbers, kind="stable")
    found, starts = np.unique(numbers[order], return_index=True)
    streams = []
    for rank, mine in zip(found.tolist(), np.split(order, starts[1:]), strict=True):
        kinds = None if classes is None else tuple(classes[index] for index in mine.tolist())
        streams.append(Stream(rank, 0, values[mine], values[mine], kinds))
    return Survey(
        ranks=ranks,
        num_workers=0,
        streams=tuple(streams),
        asked=len(values),
        has_ranks=rank_of is not None,
        drawn_from=drawn_from,
    )


def _join(arrays: Iterable[Array]) -> Array:
    found = list(arrays)
    return np.concatenate(found) if found else np.zeros(0)
