"""Replay a policy over ranks on lists of lengths, with the code that orders training itself."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_lengthpool.ordering.settings import PoolSettings, check_integer, require_stream
from lightning_lengthpool.ordering.sorted_pool import SortedPool
from lightning_lengthpool.simulation.streams import (
    Batches,
    Source,
    flushed_batches,
    samples_of_whole_pools,
    shares_of_batches,
    source_of,
    stream_batches,
)

Array = NDArray[np.float64]
Indices = NDArray[np.int64]


class Simulation(NamedTuple):
    """What each rank would train on, batch by batch; all but `chosen` of shape `[steps, ranks]`."""

    tokens: Array
    padded: Array  # tokens with each sample padded to the longest
    longest: Array  # the longest sample
    samples: Indices  # how many there are
    classes: Indices  # which class they are of, 0 without classes
    missed: NDArray[np.bool_]  # whether the slot is meant for another class on all ranks, see `sorted_pool.Block`
    chosen: tuple[Indices, ...]
    """For each rank the samples of its batches in a row, as indices into its lengths (with several workers, into their
    lengths one after the other)."""


def simulate(
    lengths: Sequence[ArrayLike],
    settings: PoolSettings,
    steps: int | None,
    *,
    rng_seed: int | Sequence[int] = 0,
    workers: int = 1,
    costs: Sequence[ArrayLike] | None = None,
    classes: Sequence[ArrayLike] | None = None,
    is_cycle: bool = False,
    slots: Sequence[int] | None = None,
) -> Simulation:
    """The batches that each rank would train on.

    Each worker of a rank reads a stream of its own samples and pools them as in training: with 'pool' and 'blocks' one
    full pool after the other is ordered with the seed that all ranks share, and `batch_size` samples in a row make a
    batch, with 'pool' also across the border of two pools; with 'stream' the pool stays full and each step takes a
    block out of it. Batch i of a rank comes from worker `i % workers`. Figures hardly depend on the number of workers;
    it matters where a run is to be replayed batch by batch.

    There are three ways to read: by default samples are drawn at random with replacement, without end; with `is_cycle`
    they come in their order, around and around, as over epochs; and with `steps=None` in their order and once. The last
    replays a run, if the lengths are those of the samples in the order in which they come to each pool: as far as
    batches follow from them, for training reads an endless stream and never empties a pool. Samples that training would
    leave out (over_budget 'drop') must not be among them.

    Args:
        lengths: For each rank the lengths of its samples, in tokens. With several workers for each worker of each
            rank: `lengths[rank * workers + worker]`.
        settings: Of its functions none is asked: samples are their lengths and costs here.
        steps: Batches of each rank; None for as many as the streams make.
        costs: What the samples cost, as `lengths`: pools sort and fill batches by it. None for their lengths.
        classes: The class of each sample, as `lengths`; a batch then holds one class. Its index in
            `settings.class_shares`, or without these any number from 0: each class then has the share of the batches
            that it has of those that all samples make. For 'stream' only.
        slots: The slots whose random numbers the batches of each worker take, as many as it makes; for 'stream' only.
            By default 0, 1, 2, ..., as in training.

    Example:
        >>> simulate([np.array([5.0])] * 2, PoolSettings(batch_size=3, pool_size=10), steps=1).padded.tolist()
        [[15.0, 15.0]]
        >>> blocks = PoolSettings(batch_size=2, pool_size=2, policy="blocks")
        >>> simulate([np.array([1.0, 9.0, 5.0, 3.0, 7.0])], blocks, steps=None).tokens.tolist()
        [[10.0], [8.0]]
    """
    for name, value in (("steps", steps), ("workers", workers)):
        if value is not None:
            check_integer(name, value, minimum=1)
    known = _checked_lengths("lengths", lengths)
    if len(known) % workers:
        raise ValueError(f"lengths has {len(known)} streams, expected some for each of {workers} workers of each rank")
    known_costs = known if costs is None else _checked_lengths("costs", costs)
    if list(map(len, known_costs)) != list(map(len, known)):
        raise ValueError("costs must be a number for each of the lengths")
    if classes is not None and not settings.is_stream:
        require_stream(settings.policy, settings.pool_size, "classes")
    if classes is None and settings.class_shares is not None:
        raise ValueError("the settings have class_shares, so classes must tell the class of each sample")
    rngs: Sequence[np.random.Generator | None] = [None] * len(known)
    if not is_cycle and steps is not None:
        rngs = np.random.default_rng(rng_seed).spawn(len(known))
    sources = [source_of(len(stream), rng, steps is not None) for stream, rng in zip(known, rngs, strict=True)]
    if settings.is_stream:
        known_classes = None if classes is None else _checked_classes(classes, known)
        streams = _stream_pools(settings, known_costs, known_classes, sources, steps, workers, slots)
    else:
        streams = _whole_pools(settings, known_costs, sources, steps, workers)
    if steps is None:
        steps = _common_steps([len(stream.samples) for stream in streams], workers)
    if not steps:
        raise ValueError(
            f"lengths has streams of {min(map(len, known))} samples or more, too few for a batch on each rank: each "
            f"worker needs a full pool, here of {settings.capacity}, and a whole batch"
        )
    tokens, longest, ranks = [], [], []
    for first in range(0, len(known), workers):
        of_workers = known[first : first + workers]
        batches = _in_turn(streams[first : first + workers], of_workers, steps)
        chosen = (of_workers[0] if workers == 1 else np.concatenate(of_workers))[batches.chosen]
        starts = np.cumsum(batches.samples) - batches.samples
        tokens.append(np.add.reduceat(chosen, starts))
        longest.append(np.maximum.reduceat(chosen, starts))
        ranks.append(batches)
    samples = np.stack([batches.samples for batches in ranks], axis=1)
    return Simulation(
        tokens=np.stack(tokens, axis=1),
        padded=samples * np.stack(longest, axis=1),
        longest=np.stack(longest, axis=1),
        samples=samples,
        classes=np.stack([batches.classes for batches in ranks], axis=1),
        missed=np.stack([batches.missed for batches in ranks], axis=1),
        chosen=tuple(batches.chosen for batches in ranks),
    )


def _whole_pools(
    settings: PoolSettings, costs: Sequence[Array], sources: Sequence[Source], steps: int | None, workers: int
) -> list[Batches]:
    """The batches of all streams, from pools that leave as a whole."""
    if steps is None:
        whole = [samples_of_whole_pools(settings, len(stream)) for stream in costs]
        steps = _common_steps([samples // settings.slot_size for samples in whole], workers)
    by_worker = [
        flushed_batches(settings, costs[worker::workers], sources[worker::workers], _turns(steps, worker, workers))
        for worker in range(workers)
    ]
    return [stream for of_rank in zip(*by_worker, strict=True) for stream in of_rank]


def _stream_pools(
    settings: PoolSettings,
    costs: Sequence[Array],
    classes: Sequence[Indices] | None,
    sources: Sequence[Source],
    steps: int | None,
    workers: int,
    slots: Sequence[int] | None,
) -> list[Batches]:
    """The batches of all streams, from pools that stay full."""
    numbers = np.arange(len(settings.class_shares or [None]))  # of the classes
    if classes is not None and settings.class_shares is None:
        shares = shares_of_batches(np.concatenate(classes), np.concatenate(costs), settings)
        numbers = np.flatnonzero(shares)
        settings = replace(settings, class_shares={int(number): float(shares[number]) for number in numbers})
        classes = [np.searchsorted(numbers, of_stream) for of_stream in classes]
    streams = []
    for number, source in enumerate(sources):
        worker, of_stream = number % workers, None if classes is None else classes[number]
        turns = None if steps is None else _turns(steps, worker, workers)
        batches = stream_batches(SortedPool(settings, worker), costs[number], of_stream, source, turns, slots)
        streams.append(batches._replace(classes=numbers[batches.classes]))
    return streams


def _turns(steps: int, worker: int, workers: int) -> int:
    """How many of so many batches come from one worker."""
    return len(range(worker, steps, workers))


def _common_steps(batches: Sequence[int], workers: int) -> int:
    """How many batches all ranks have, from those that each stream has."""
    return min(count * workers + number % workers for number, count in enumerate(batches))


def _in_turn(streams: Sequence[Batches], lengths: Sequence[Array], steps: int) -> Batches:
    """A rank's first batches, of its workers in turn; indices are into the workers' lengths one after the other."""
    workers = len(streams)
    if workers == 1 and len(streams[0].samples) == steps:
        return streams[0]
    offsets = np.cumsum([0, *map(len, lengths[:-1])])
    chosen = [
        np.split(stream.chosen + offset, np.cumsum(stream.samples)[:-1])
        for stream, offset in zip(streams, offsets, strict=True)
    ]
    turns = [(step % workers, step // workers) for step in range(steps)]
    return Batches(
        np.concatenate([chosen[worker][turn] for worker, turn in turns]),
        np.array([streams[worker].samples[turn] for worker, turn in turns]),
        np.array([streams[worker].classes[turn] for worker, turn in turns]),
        np.array([streams[worker].missed[turn] for worker, turn in turns]),
    )


def _checked_lengths(name: str, lengths: Sequence[ArrayLike]) -> list[Array]:
    if not len(lengths):
        raise ValueError(f"{name} has no rank, expected those of at least one")
    arrays = [np.asarray(values, dtype=np.float64) for values in lengths]
    for rank, values in enumerate(arrays):
        if rank and values is arrays[rank - 1]:
            continue  # of ranks of one distribution
        if values.ndim != 1 or not values.size or not (np.isfinite(values) & (values >= 0)).all():
            raise ValueError(f"{name} of rank {rank} must be one or more finite numbers, none negative")
    return arrays


def _checked_classes(classes: Sequence[ArrayLike], lengths: Sequence[Array]) -> list[Indices]:
    arrays = [np.asarray(numbers) for numbers in classes]
    for rank, (numbers, values) in enumerate(zip(arrays, lengths, strict=True)):
        if numbers.shape != values.shape or numbers.dtype.kind not in "iub" or (numbers < 0).any():
            raise ValueError(f"classes of rank {rank} must be an integer of at least 0 for each of its samples")
    return [numbers.astype(np.int64) for numbers in arrays]
