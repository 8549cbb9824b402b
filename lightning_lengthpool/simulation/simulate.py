"""Replay a policy over ranks on lists of lengths, with the code that orders training itself."""

from collections.abc import Callable, Hashable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_lengthpool.ordering.order import batch_shares, full_size, get_policy
from lightning_lengthpool.ordering.sorted_pool import HISTORY, Reference, SortedPool

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
    policy: str,
    pool_size: int,
    batch_size: int | None,
    steps: int | None,
    seed: int = 42,
    rng_seed: int | Sequence[int] = 0,
    *,
    workers: int = 1,
    costs: Sequence[ArrayLike] | None = None,
    is_padded: bool = True,
    warmup: tuple[int, int] | None = None,
    max_tokens: float | None = None,
    reference: Reference | ArrayLike | None = None,
    classes: Sequence[ArrayLike] | None = None,
    class_shares: Sequence[float] | None = None,
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
        policy: A name from `order.POLICIES`.
        pool_size: Samples of a worker's pool; 0 switches it off.
        batch_size: Samples of a batch; with `max_tokens` at most, or None.
        steps: Batches of each rank; None for as many as the streams make, read once.
        seed: Seed of the policy.
        rng_seed: Seed of the draws.
        workers: Workers of a rank.
        costs: What the samples cost, as `lengths`: pools sort and fill batches by it. None for their lengths.
        is_padded: Whether a batch costs its samples times the dearest of them, see `cost_models.CostModel.is_padded`;
            with `max_tokens`.
        warmup: `initial` and `flushes` of `pool.PoolWarmup`; for 'pool' and 'blocks'.
        max_tokens: What a batch may cost; for 'stream' only.
        reference: Costs (without a pool of their own) that all ranks share and aim at; for 'stream' only. With
            `classes` a `Reference` that has each of them.
        classes: The class of each sample, from 0, as `lengths`; a batch then holds one class. For 'stream' only.
        class_shares: Share of the batches that each class has, by its number. By default the share that it has of those
            that all samples make.
        is_cycle: Whether samples come in their order, around and around, as over epochs.
        slots: The slots whose random numbers the batches of each worker take, as many as it makes; for 'stream' only.
            By default 0, 1, 2, ..., as in training.

    Raises:
        ValueError: If an argument is out of its range, or streams that are read once are too short for a batch; the
            message names it.

    Example:
        >>> simulate([np.array([5.0])] * 2, "pool", 10, batch_size=3, steps=1).padded.tolist()
        [[15.0, 15.0]]
        >>> simulate([np.array([1.0, 9.0, 5.0, 3.0, 7.0])], "blocks", 2, batch_size=2, steps=None).tokens.tolist()
        [[10.0], [8.0]]
    """
    minima = {"pool_size": (pool_size, 0), "batch_size": (batch_size, 1), "steps": (steps, 1), "workers": (workers, 1)}
    for name, (value, minimum) in minima.items():
        if value is not None and value < minimum:
            raise ValueError(f"{name} is {value}, expected at least {minimum}")
    if batch_size is None and max_tokens is None:
        raise ValueError("batch_size is None, expected at least 1, or max_tokens")
    values = _checked_lengths("lengths", lengths)
    if len(values) % workers:
        raise ValueError(f"lengths has {len(values)} streams, expected some for each of {workers} workers of each rank")
    prices = values if costs is None else _checked_lengths("costs", costs)
    if [len(own) for own in prices] != [len(own) for own in values]:
        raise ValueError("costs must be a number for each of the lengths")
    is_flush = get_policy(policy) is not None or not pool_size
    options = {"max_tokens": max_tokens, "reference": reference, "classes": classes, "class_shares": class_shares}
    for name, option in options.items():
        if option is not None and is_flush:
            raise ValueError(f"{name} goes with policy 'stream' and a pool, not with {policy!r} of {pool_size}")
    if warmup is not None and not (policy in ("pool", "blocks") and pool_size and 1 <= warmup[0] <= pool_size):
        raise ValueError(
            f"warmup is {warmup} with policy {policy!r} of {pool_size}, expected 'pool' or 'blocks', and to begin with "
            "1 sample to pool_size"
        )
    if batch_size is not None and max_tokens is None and pool_size and policy in ("blocks", "stream"):
        for name, size in (("pool_size", pool_size), ("warmup[0]", pool_size if warmup is None else warmup[0])):
            if size < batch_size:
                raise ValueError(f"{name} is {size}, expected at least batch_size, {batch_size}")
    rngs: Sequence[np.random.Generator | None] = [None] * len(values)
    if not is_cycle and steps is not None:
        rngs = np.random.default_rng(rng_seed).spawn(len(values))
    sources = [_source(len(own), rng, steps is not None) for own, rng in zip(values, rngs, strict=True)]
    if is_flush:
        assert batch_size is not None
        is_off = policy == "none" or not pool_size
        pools = _Pools("none" if is_off else policy, 1 if is_off else pool_size, batch_size, warmup, seed)
        if steps is None:
            steps = _common_steps([pools.whole(len(own)) // batch_size for own in values], workers)
        streams = pools.batches(prices, sources, [_turns(steps, worker, workers) for worker in range(workers)])
    else:
        kinds = _checked_classes(classes, values)
        if max_tokens is None and batch_size is not None:
            pool_size -= pool_size % batch_size  # as in training: whole blocks
        setting: dict[str, Any] = {
            "seed": seed,
            "batch_size": batch_size,
            "budget": max_tokens,
            "is_padded": is_padded,
            "reference": _checked_reference(reference),
            "history": HISTORY * pool_size,
            "shares": _shares(kinds, prices, max_tokens, batch_size, class_shares),
        }
        streams = [
            _stream(
                SortedPool(worker=number % workers, **setting),
                prices[number],
                None if kinds is None else kinds[number],
                source,
                pool_size,
                None if steps is None else _turns(steps, number % workers, workers),
                slots,
            )
            for number, source in enumerate(sources)
        ]
        if steps is None:
            steps = _common_steps([len(own.samples) for own in streams], workers)
    if not steps:
        raise ValueError(
            f"lengths has streams of {min(map(len, values))} samples or more, too few for a batch on each rank: each "
            f"worker needs a full pool, here of {max(1, pool_size)}, and a whole batch"
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


class _Pools(NamedTuple):
    """The settings of full pools that are ordered one after the other, as `flush_pool.FlushPool` does."""

    policy: str
    pool_size: int
    batch_size: int
    warmup: tuple[int, int] | None
    seed: int

    def size(self, pool: int) -> int:
        return full_size(pool, self.pool_size, self.policy, self.batch_size, self.warmup)

    def whole(self, samples: int) -> int:
        """How many of so many samples fill whole pools."""
        filled = 0
        for pool in range(0 if self.warmup is None else self.warmup[1]):
            if filled + self.size(pool) > samples:
                return filled
            filled += self.size(pool)
        size = full_size(0, self.pool_size, self.policy, self.batch_size)
        return samples - (samples - filled) % size

    def batches(self, costs: Sequence[Array], sources: Sequence[_Source], turns: Sequence[int]) -> list[_Batches]:
        """The batches of each stream: `turns` are how many each worker of a rank makes."""
        workers = len(turns)
        by_worker = [
            self._ordered(costs[worker::workers], sources[worker::workers], turns[worker] * self.batch_size)
            for worker in range(workers)
        ]
        return [
            _Batches(own, *(np.full(len(own) // self.batch_size, value) for value in (self.batch_size, 0, False)))
            for own in chain.from_iterable(zip(*by_worker, strict=True))
        ]

    def _ordered(self, costs: Sequence[Array], sources: Sequence[_Source], places: int) -> Indices:
        """The samples that leave, `[streams, places]`: of all streams at once, for a full pool leaves by places of its
        sorted samples, which are the same in each."""
        policy = get_policy(self.policy)
        assert policy is not None
        if self.pool_size == 1:  # nothing to order
            return np.stack([source(places) for source in sources])
        starts = [0]
        while starts[-1] < places:
            starts.append(starts[-1] + self.size(len(starts) - 1))
        drawn = np.stack([source(starts[-1]) for source in sources])
        price = np.stack([own[taken] for own, taken in zip(costs, drawn, strict=True)])
        for start, stop in zip(starts, starts[1:], strict=False):
            size = stop - start
            by_cost = np.argsort(price[:, start:stop], axis=1, kind="stable")
            leaving = by_cost[:, policy(range(size), size, start, self.seed, self.batch_size)]
            drawn[:, start:stop] = np.take_along_axis(drawn[:, start:stop], leaving, axis=1)
        return drawn[:, :places]


def _stream(
    pool: SortedPool,
    costs: Array,
    kinds: Indices | None,
    source: _Source,
    pool_size: int,
    batches: int | None,
    slots: Sequence[int] | None,
) -> _Batches:
    """As many samples come in as leave, so that the pool stays at `pool_size`; without `batches` to a stream's end."""
    taken: list[int] = []  # numbers of arrival
    samples: list[int] = []
    classes: list[Any] = []
    missed: list[bool] = []
    arrivals = [source(pool_size)]
    is_over = len(arrivals[0]) < pool_size
    if not is_over:
        pool.fill(costs[arrivals[0]], None if kinds is None else kinds[arrivals[0]].tolist())
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
        classes.append(block.kind)
        missed.append(block.missed)
        stop = number + len(block.numbers)
        while stop > first + len(prices):
            arrivals.append(ahead := source(_CHUNK))
            if not len(ahead):
                break
            prices = prices[number - first :] + costs[ahead].tolist()
            labels = labels[number - first :] + ([None] * len(ahead) if kinds is None else kinds[ahead].tolist())
            first = number
        is_over = stop > first + len(prices)
        if not is_over:
            for place in range(number - first, stop - first):
                add(first + place, prices[place], labels[place])
            number = stop
    return _Batches(
        np.concatenate(arrivals)[np.array(taken, dtype=np.int64)],
        np.array(samples, dtype=np.int64),
        np.array([0] * slot if kinds is None else classes, dtype=np.int64),
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


def _checked_reference(reference: Reference | ArrayLike | None) -> Reference | None:
    if reference is None or isinstance(reference, Reference):
        return reference
    (values,) = _checked_lengths("reference", [reference])
    return Reference({None: values.tolist()})


def _shares(
    classes: list[Indices] | None,
    costs: Sequence[Array],
    max_tokens: float | None,
    batch_size: int | None,
    shares: Sequence[float] | None,
) -> dict[Hashable, float] | None:
    if classes is None:
        return None
    if shares is not None:
        return dict(enumerate(shares))
    weights = None if max_tokens is None else batch_shares(np.concatenate(costs), max_tokens, batch_size)
    held = np.bincount(np.concatenate(classes), weights=weights)
    return {kind: float(own / held.sum()) for kind, own in enumerate(held) if own}
