"""The batches of one worker's stream of samples, by the code that orders training."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import count, islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_lengthpool.ordering.policies import ORDERS
from lightning_lengthpool.ordering.settings import PoolSettings
from lightning_lengthpool.ordering.sorted_pool import Block, SortedPool
from lightning_lengthpool.ordering.stream.budget import batch_shares

Array = NDArray[np.float64]
Indices = NDArray[np.int64]
Source = Callable[[int], Indices]
"""The next so many samples of a stream, fewer at its end; as indices into its lengths."""

_CHUNK = 4096  # samples that a stream is read ahead


class Batches(NamedTuple):
    """Those of one stream; all but `chosen` of shape `[batches]`."""

    chosen: Indices  # their samples in a row, as indices into the stream's lengths
    samples: Indices  # how many of them each batch has
    classes: Indices  # the number of the class of each
    missed: NDArray[np.bool_]  # whether that is another class than the slot is meant for on all ranks


def source_of(size: int, rng: np.random.Generator | None, is_endless: bool) -> Source:
    """A stream of `size` samples: drawn with replacement, or without a `rng` in their order, endlessly or once."""
    if rng is not None:
        return lambda samples: rng.integers(size, size=samples)
    position = 0

    def in_order(samples: int) -> Indices:
        nonlocal position
        stop = position + samples if is_endless else min(position + samples, size)
        taken = np.arange(position, stop) % size
        position = stop
        return taken

    return in_order


# ---- pools that leave as a whole


def samples_of_whole_pools(settings: PoolSettings, samples: int) -> int:
    """How many of so many samples fill whole pools."""
    filled = 0
    for pool in range(0 if settings.warmup is None else settings.warmup.flushes):
        if filled + settings.size_of_pool(pool) > samples:
            return filled
        filled += settings.size_of_pool(pool)
    return samples - (samples - filled) % settings.capacity


def flushed_batches(
    settings: PoolSettings, costs: Sequence[Array], sources: Sequence[Source], batches: int
) -> list[Batches]:
    """The first batches of some streams, all at once: a full pool leaves by indices of its sorted samples, which are
    the same in each."""
    size = settings.slot_size
    samples = batches * size
    starts = [0]
    while starts[-1] < samples:
        starts.append(starts[-1] + settings.size_of_pool(len(starts) - 1))
    chosen = np.stack([source(starts[-1]) for source in sources])
    if settings.capacity > 1:
        chosen_costs = np.stack([of_stream[indices] for of_stream, indices in zip(costs, chosen, strict=True)])
        for start, stop in zip(starts, starts[1:], strict=False):
            order = ORDERS[settings.policy](range(stop - start), stop - start, start, settings.seed, size)
            by_cost = np.argsort(chosen_costs[:, start:stop], axis=1, kind="stable")
            chosen[:, start:stop] = np.take_along_axis(chosen[:, start:stop], by_cost[:, order], axis=1)
    of_batches = [np.full(batches, value) for value in (size, 0, False)]
    return [Batches(indices[:samples], *of_batches) for indices in chosen]


# ---- pools that stay full


def shares_of_batches(classes: Indices, costs: Array, settings: PoolSettings) -> Array:
    """The share that each class has of the batches that all samples make, by its number; 0 if it does not occur."""
    weights = None
    if settings.max_tokens is not None:
        weights = batch_shares(costs, settings.max_tokens, settings.batch_size)
    batches = np.bincount(classes, weights=weights)
    shares: Array = batches / batches.sum()
    return shares


def stream_batches(
    pool: SortedPool,
    costs: Array,
    classes: Indices | None,
    source: Source,
    batches: int | None,
    slots: Sequence[int] | None,
) -> Batches:
    """The batches of a pool (an empty one) that stays full: as many samples come in as leave.

    Args:
        classes: Of the stream's samples, as indices into the pool's `class_shares`; None without classes.
        batches: How many are made; None to the stream's end.
        slots: The slots that they take; None for 0, 1, 2, ...
    """
    capacity = pool.settings.capacity
    names: list[Hashable] = list(pool.settings.class_shares or [None])
    read: list[Indices] = []

    def arrivals() -> Iterator[tuple[float, Hashable]]:
        """Cost and class of each sample that comes in after the first pool."""
        while len(indices := source(_CHUNK)):
            read.append(indices)
            yield from zip(costs[indices].tolist(), names_of(indices), strict=True)

    def names_of(indices: Indices) -> list[Hashable]:
        return [None] * len(indices) if classes is None else [names[index] for index in classes[indices].tolist()]

    blocks: list[Block] = []
    read.append(source(capacity))
    if len(read[0]) == capacity:
        pool.fill(costs[read[0]], None if classes is None else names_of(read[0]))
        incoming, number = arrivals(), capacity
        for slot in islice(count() if slots is None else slots, batches):
            blocks.append(pool.take(slot))
            for cost, name in islice(incoming, len(blocks[-1].numbers)):
                pool.add(number, cost, name)
                number += 1
            if len(pool) < capacity:  # the stream is over
                break
    numbers = np.array([number for block in blocks for number in block.numbers], dtype=np.int64)
    return Batches(
        np.concatenate(read)[numbers],
        np.array([len(block.numbers) for block in blocks], dtype=np.int64),
        np.array([names.index(block.class_name) for block in blocks], dtype=np.int64),
        np.array([block.missed for block in blocks], dtype=np.bool_),
    )
