"""Replay a policy over ranks on lists of lengths, with the code that orders training itself."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_lengthpool.ordering.order import ORDERS
from lightning_lengthpool.ordering.settings import PoolSettings, check_integer, require_stream
from lightning_lengthpool.ordering.sorted_pool import SortedPool
from lightning_lengthpool.ordering.stream.budget import batch_shares

Array = NDArray[np.float64]
Indices = NDArray[np.int64]
_Source = Callable[[int], Indices]  # the next so many samples of a stream, fewer at its end; as indices into it

_CHUNK = 4096  # samples that a stream is read ahead


class Simulation(NamedTuple):
    """What each rank would train on, batch by batch; all but `chosen` of shape `[steps, ranks]`.

    Attributes:
        tokens: Real tokens.
        padded: Tokens with each sample padded to the longest.
        longest: The longest sample.
        samples: How many there are.
        classes: Which class they are of, 0 without classes.
        missed: Whether that is another class than the slot is meant for on all ranks, see `stream.Block`.
        chosen: For each rank the samples of its batches in a row, as indices into its lengths (with several workers,
            into their lengths one after the other).
    """

    tokens: Array
    padded: Array
    longest: Array
    samples: Indices
    classes: Indices
    missed: NDArray[np.bool_]
    chosen: tuple[Indices, ...]


class _Batches(NamedTuple):
    """Those of one stream."""

    chosen: Indices  # the samples in a row
    samples: Indices  # how many of them each batch has; like the others of shape [batches]
    classes: Indices
    missed: NDArray[np.bool_]


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
    they come in their order, around and around; and with `steps=None` in their order and once. The last replays a run,
    if the lengths are those of the samples in the order in which they come to each pool: as far as batches follow from
    them, for training reads an endless stream and never empties a pool. Samples that training would leave out
    (over_budget 'drop') must not be among them.

    Args:
        lengths: For each rank the lengths of its samples, in tokens. With several workers for each worker of each
            rank: `lengths[rank * workers + worker]`.
        settings: The pool's and the batches'. Of its functions none is asked: samples are their lengths and costs here.
        steps: Batches of each rank; None for as many as the streams make, read once.
        rng_seed: Seed of the draws.
        workers: Workers of a rank.
        costs: What the samples cost, as `lengths`: pools sort and fill batches by it. None for their lengths.
        classes: The class of each sample, as `lengths`; a batch then holds one class. Its index in
            `settings.class_shares`, or without these any number from 0: each class then has the share of the batches
            that it has of those that all samples make. For 'stream' only.
        is_cycle: Whether samples come in their order, around and around, as over epochs.
        slots: The slots whose random numbers the batches of each worker take, as many as it makes; for 'stream' only.
            By default 0, 1, 2, ..., as in training.

    Raises:
        ValueError: If an argument is out of its range, or streams that are read once are too short for a batch; the
            message names it.

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
    values = _checked_lengths("lengths", lengths)
    if len(values) % workers:
        raise ValueError(f"lengths has {len(values)} streams, expected some for each of {workers} workers of each rank")
    prices = values if costs is None else _checked_lengths("costs", costs)
    if [len(own) for own in prices] != [len(own) for own in values]:
        raise ValueError("costs must be a number for each of the lengths")
    if classes is not None and not settings.is_stream:
        require_stream(settings.policy, settings.pool_size, "classes")
    rngs: Sequence[np.random.Generator | None] = [None] * len(values)
    if not is_cycle and steps is not None:
        rngs = np.random.default_rng(rng_seed).spawn(len(values))
    sources = [_source(len(own), rng, steps is not None) for own, rng in zip(values, rngs, strict=True)]
    if settings.is_stream:
        labels = _checked_classes(classes, values)
        names: dict[int, Hashable] = dict(enumerate(settings.class_shares or ()))
        if labels is not None and settings.class_shares is None:
            settings = replace(settings, class_shares=_shares(labels, prices, settings))
            names = {int(label): label for label in np.unique(np.concatenate(labels)).tolist()}
        streams = [
            _stream(
                SortedPool(settings, number % workers),
                prices[number],
                None if labels is None else labels[number],
                names,
                source,
                None if steps is None else _turns(steps, number % workers, workers),
                slots,
            )
            for number, source in enumerate(sources)
        ]
        if steps is None:
            steps = _common_steps([len(own.samples) for own in streams], workers)
    else:
        if steps is None:
            steps = _common_steps([_whole(settings, len(own)) // settings.slot_size for own in values], workers)
        streams = _flushed(settings, prices, sources, [_turns(steps, worker, workers) for worker in range(workers)])
    if not steps:
        raise ValueError(
            f"lengths has streams of {min(map(len, values))} samples or more, too few for a batch on each rank: each "
            f"worker needs a full pool, here of {settings.capacity}, and a whole batch"
        )
    ranks = range(0, len(values), workers)
    joined = [_join(streams[first : first + workers], values[first : first + workers], steps) for first in ranks]
    scored = [
        _score(own, values[first] if workers == 1 else np.concatenate(values[first : first + workers]))
        for own, first in zip(joined, ranks, strict=True)
    ]
    tokens, longest = (np.stack(own, axis=1) for own in zip(*scored, strict=True))
    samples, classes_, missed = (np.stack(own, axis=1) for own in list(zip(*joined, strict=True))[1:])
    return Simulation(
        tokens, samples * longest, longest, samples, classes_, missed, tuple(own.chosen for own in joined)
    )


def _whole(settings: PoolSettings, samples: int) -> int:
    """How many of so many samples fill whole pools."""
    filled = 0
    for pool in range(0 if settings.warmup is None else settings.warmup.flushes):
        if filled + settings.size_of_pool(pool) > samples:
            return filled
        filled += settings.size_of_pool(pool)
    return samples - (samples - filled) % settings.capacity


def _flushed(
    settings: PoolSettings, costs: Sequence[Array], sources: Sequence[_Source], turns: Sequence[int]
) -> list[_Batches]:
    """The batches of each stream of pools that leave as a whole: `turns` are how many each worker of a rank makes."""
    workers, size = len(turns), settings.slot_size
    by_worker = [
        _ordered(settings, costs[worker::workers], sources[worker::workers], turns[worker] * size)
        for worker in range(workers)
    ]
    return [
        _Batches(own, *(np.full(len(own) // size, value) for value in (size, 0, False)))
        for own in chain.from_iterable(zip(*by_worker, strict=True))
    ]


def _ordered(settings: PoolSettings, costs: Sequence[Array], sources: Sequence[_Source], count: int) -> Indices:
    """The samples that leave, `[streams, count]`: of all streams at once, for a full pool leaves by indices of its
    sorted samples, which are the same in each."""
    if settings.is_off or settings.capacity == 1:  # nothing to order
        return np.stack([source(count) for source in sources])
    starts = [0]
    while starts[-1] < count:
        starts.append(starts[-1] + settings.size_of_pool(len(starts) - 1))
    drawn = np.stack([source(starts[-1]) for source in sources])
    price = np.stack([own[taken] for own, taken in zip(costs, drawn, strict=True)])
    order = ORDERS[settings.policy]
    for start, stop in zip(starts, starts[1:], strict=False):
        size = stop - start
        by_cost = np.argsort(price[:, start:stop], axis=1, kind="stable")
        leaving = by_cost[:, order(range(size), size, start, settings.seed, settings.slot_size)]
        drawn[:, start:stop] = np.take_along_axis(drawn[:, start:stop], leaving, axis=1)
    return drawn[:, :count]


def _stream(
    pool: SortedPool,
    costs: Array,
    classes: Indices | None,
    names: Mapping[int, Hashable],
    source: _Source,
    batches: int | None,
    slots: Sequence[int] | None,
) -> _Batches:
    """As many samples come in as leave, so that the pool stays full; without `batches` to a stream's end."""
    pool_size = pool.settings.capacity
    class_of = {name: number for number, name in names.items()}

    def labels_of(samples: Indices) -> list[Hashable]:
        return [None] * len(samples) if classes is None else [names[index] for index in classes[samples].tolist()]

    taken: list[int] = []  # numbers of arrival
    samples: list[int] = []
    left: list[int] = []  # the class of each batch
    missed: list[bool] = []
    arrivals = [source(pool_size)]
    is_over = len(arrivals[0]) < pool_size
    if not is_over:
        pool.fill(costs[arrivals[0]], None if classes is None else labels_of(arrivals[0]))
    add, take = pool.add, pool.take
    number, slot = pool_size, 0  # of the next arrival, and of the next batch
    prices: list[float] = []  # of what is read ahead
    labels: list[Hashable] = []
    first = pool_size  # and the number of the first of these
    while not is_over and (batches is None or slot < batches):
        block = take(slot if slots is None else slots[slot])
        slot += 1
        taken += block.numbers
        samples.append(len(block.numbers))
        left.append(0 if classes is None else class_of[block.class_name])
        missed.append(block.missed)
        stop = number + len(block.numbers)
        while stop > first + len(prices):
            arrivals.append(ahead := source(_CHUNK))
            if not len(ahead):
                break
            prices = prices[number - first :] + costs[ahead].tolist()
            labels = labels[number - first :] + labels_of(ahead)
            first = number
        is_over = stop > first + len(prices)
        if not is_over:
            for index in range(number - first, stop - first):
                add(first + index, prices[index], labels[index])
            number = stop
    return _Batches(
        np.concatenate(arrivals)[np.array(taken, dtype=np.int64)],
        np.array(samples, dtype=np.int64),
        np.array(left, dtype=np.int64),
        np.array(missed, dtype=np.bool_),
    )


def _turns(steps: int, worker: int, workers: int) -> int:
    """How many of so many batches come from one worker."""
    return len(range(worker, steps, workers))


def _common_steps(batches: Sequence[int], workers: int) -> int:
    """How many batches all ranks have, from those that each stream has."""
    return min(own * workers + number % workers for number, own in enumerate(batches))


def _join(streams: Sequence[_Batches], lengths: Sequence[Array], steps: int) -> _Batches:
    """A rank's first batches, of its workers in turn."""
    workers = len(streams)
    if workers == 1 and len(streams[0].samples) == steps:
        return streams[0]
    before = np.cumsum([0, *(len(own) for own in lengths)])
    parts = [
        np.split(own.chosen + first, np.cumsum(own.samples)[:-1]) for own, first in zip(streams, before, strict=False)
    ]
    turns = [(step % workers, step // workers) for step in range(steps)]
    columns = [np.array([own[worker][turn] for worker, turn in turns]) for own in list(zip(*streams, strict=True))[1:]]
    return _Batches(np.concatenate([parts[worker][turn] for worker, turn in turns]), *columns)


def _score(batches: _Batches, lengths: Array) -> tuple[Array, Array]:
    """The tokens and the longest sample of each batch."""
    own, starts = lengths[batches.chosen], np.cumsum(batches.samples) - batches.samples
    return np.add.reduceat(own, starts), np.maximum.reduceat(own, starts)


def _source(size: int, rng: np.random.Generator | None, is_endless: bool) -> _Source:
    """Draws with replacement, or without a `rng` goes around, or once."""
    if rng is not None:
        return lambda count: rng.integers(size, size=count)
    place = 0

    def in_order(count: int) -> Indices:
        nonlocal place
        stop = place + count if is_endless else min(place + count, size)
        taken = np.arange(place, stop) % size
        place = stop
        return taken

    return in_order


def _checked_lengths(name: str, lengths: Sequence[ArrayLike]) -> list[Array]:
    if not len(lengths):
        raise ValueError(f"{name} has no rank, expected those of at least one")
    arrays = [np.asarray(own, dtype=np.float64) for own in lengths]
    for rank, values in enumerate(arrays):
        if rank and values is arrays[rank - 1]:
            continue  # of ranks of one distribution
        if values.ndim != 1 or not values.size or not (np.isfinite(values) & (values >= 0)).all():
            raise ValueError(f"{name} of rank {rank} must be one or more finite numbers, none negative")
    return arrays


def _checked_classes(classes: Sequence[ArrayLike] | None, lengths: Sequence[Array]) -> list[Indices] | None:
    if classes is None:
        return None
    kinds = [np.asarray(own) for own in classes]
    for rank, (own, values) in enumerate(zip(kinds, lengths, strict=True)):
        if own.shape != values.shape or own.dtype.kind not in "iub" or (own < 0).any():
            raise ValueError(f"classes of rank {rank} must be an integer of at least 0 for each of its samples")
    return [own.astype(np.int64) for own in kinds]


def _shares(classes: list[Indices], costs: Sequence[Array], settings: PoolSettings) -> dict[Hashable, float]:
    """The share of the batches that each class has, if all samples are batched."""
    budget, weights = settings.max_tokens, None
    if budget is not None:
        weights = batch_shares(np.concatenate(costs), budget, settings.batch_size)
    held = np.bincount(np.concatenate(classes), weights=weights)
    return {label: float(own / held.sum()) for label, own in enumerate(held) if own}
