"""Replay a policy over ranks on lists of lengths, with the code that orders training itself."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_lengthpool.order import batch_shares, get_policy
from lightning_lengthpool.stream import HISTORY, Reference, SortedPool

Array = NDArray[np.float64]
Indices = NDArray[np.int64]
_Source = Callable[[int], Indices]  # the next so many samples of a rank, as indices into its own

_CHUNK = 4096  # samples that a rank's stream is read ahead


class Simulation(NamedTuple):
    """What each rank would train on, batch by batch; all of shape `[steps, ranks]`.

    Attributes:
        tokens: Real tokens.
        padded: Tokens with each sample padded to the longest.
        longest: The longest sample.
        samples: How many there are.
        classes: Which class they are of, 0 without classes.
        missed: Whether that is another class than the one that the slot was meant for.
    """

    tokens: Array
    padded: Array
    longest: Array
    samples: Indices
    classes: Indices
    missed: NDArray[np.bool_]


def simulate(
    lengths: Sequence[ArrayLike],
    policy: str,
    pool_size: int,
    batch_size: int | None,
    steps: int,
    seed: int = 42,
    rng_seed: int = 0,
    *,
    max_tokens: float | None = None,
    reference: Reference | ArrayLike | None = None,
    classes: Sequence[ArrayLike] | None = None,
    is_cycle: bool = False,
) -> Simulation:
    """The batches that each rank would train on.

    Each rank reads an endless stream of its own samples and pools them as one worker does: with 'pool' and 'blocks' one
    full pool after the other is ordered with the seed that all ranks share, and `batch_size` samples in a row make a
    batch, with 'pool' also across the border of two pools; with 'stream' the pool stays full and each step takes a
    block out of it. Several workers, which take turns, have a stream of pools each; the figures are the same on
    average.

    Args:
        lengths: For each rank the lengths of samples that it may see, in tokens.
        policy: A name from `order.POLICIES`.
        pool_size: Samples of a pool; 0 switches it off.
        batch_size: Samples of a batch; with `max_tokens` at most, or None.
        steps: Batches of each rank.
        seed: Seed of the policy.
        rng_seed: Seed of the draws.
        max_tokens: What a batch may have with padding; for 'stream' only.
        reference: Lengths (without a pool of their own) that all ranks share and aim at; for 'stream' only. With
            `classes` a `Reference` that has each of them.
        classes: For each rank the class of each of its samples, from 0; a batch then holds one class. For 'stream'
            only. Each has its share of the batches that all ranks' samples make.
        is_cycle: Whether a rank goes through its samples in their order, again and again, as over epochs; by default it
            draws with replacement.

    Raises:
        ValueError: If an argument is out of its range; the message names it.

    Example:
        >>> simulate([np.array([5.0])] * 2, "pool", 10, batch_size=3, steps=1).padded.tolist()
        [[15.0, 15.0]]
    """
    minima = {"pool_size": (pool_size, 0), "batch_size": (batch_size, 1), "steps": (steps, 1)}
    for name, (value, minimum) in minima.items():
        if value is not None and value < minimum:
            raise ValueError(f"{name} is {value}, expected at least {minimum}")
    if batch_size is None and max_tokens is None:
        raise ValueError("batch_size is None, expected at least 1, or max_tokens")
    if batch_size is not None and max_tokens is None and pool_size and policy in ("blocks", "stream"):
        if pool_size < batch_size:
            raise ValueError(f"pool_size is {pool_size}, expected at least batch_size, {batch_size}")
        pool_size -= pool_size % batch_size  # as in training: whole blocks
    values = _checked_lengths(lengths)
    rngs = np.random.default_rng(rng_seed).spawn(len(values))
    sources = [_source(len(own), None if is_cycle else rng) for own, rng in zip(values, rngs, strict=True)]
    order = get_policy(policy)
    if order is None and pool_size:
        kinds = _checked_classes(classes, values)
        pools = [
            SortedPool(
                seed=seed,
                batch_size=batch_size,
                budget=max_tokens,
                reference=_checked_reference(reference),
                history=HISTORY * pool_size,
                shares=_shares(kinds, values, max_tokens, batch_size),
            )
            for _ in values
        ]
        return _stream(pools, values, kinds, sources, pool_size, steps)
    for name, option in (("max_tokens", max_tokens), ("reference", reference), ("classes", classes)):
        if option is not None:
            raise ValueError(f"{name} goes with policy 'stream' and a pool, not with {policy!r} of {pool_size}")
    assert batch_size is not None
    places = 1 if policy == "none" or not pool_size else pool_size
    count = -(-steps * batch_size // places)
    # [ranks, pools, places]
    drawn = np.stack([own[source(count * places)] for own, source in zip(values, sources, strict=True)])
    drawn = drawn.reshape(len(values), count, places)
    if places > 1 and order is not None:
        # a full pool leaves by places of its sorted samples, which are the same on all ranks
        drawn.sort(axis=2)
        for pool in range(count):
            drawn[:, pool] = drawn[:, pool, order(range(places), places, pool * places, seed, batch_size)]
    batches = drawn.reshape(len(values), -1)[:, : steps * batch_size].reshape(len(values), steps, batch_size)
    longest = batches.max(axis=2).T
    zeros = np.zeros(longest.shape, dtype=np.int64)
    return Simulation(batches.sum(axis=2).T, batch_size * longest, longest, zeros + batch_size, zeros, zeros > 0)


def _stream(
    pools: Sequence[SortedPool],
    lengths: Sequence[Array],
    kinds: Sequence[Indices] | None,
    sources: Sequence[_Source],
    pool_size: int,
    steps: int,
) -> Simulation:
    """As many samples come in as leave, so that each pool stays at `pool_size`."""
    shape = steps, len(pools)
    tokens, longest, samples = np.empty(shape), np.empty(shape), np.empty(shape, dtype=np.int64)
    classes, missed = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.bool_)
    for rank, (pool, own, source) in enumerate(zip(pools, lengths, sources, strict=True)):
        incoming = _arrivals(own, None if kinds is None else kinds[rank], source)
        add, take = pool.add, pool.take
        room = pool_size
        for step in range(steps):
            for _ in range(room):
                length, kind = next(incoming)
                add(0, length, kind)
            block = take(step)
            room = len(block.costs)
            tokens[step, rank], longest[step, rank], samples[step, rank] = sum(block.costs), block.costs[-1], room
            if kinds is not None:
                classes[step, rank] = block.kind  # type: ignore[call-overload]
                missed[step, rank] = block.missed
    return Simulation(tokens, samples * longest, longest, samples, classes, missed)


def _arrivals(lengths: Array, kinds: Indices | None, source: _Source) -> Iterator[tuple[float, Hashable]]:
    while True:
        chosen = source(_CHUNK)
        labels: Sequence[Hashable] = [None] * _CHUNK if kinds is None else kinds[chosen].tolist()
        yield from zip(lengths[chosen].tolist(), labels, strict=True)


def _source(size: int, rng: np.random.Generator | None) -> _Source:
    """Draws with replacement, or without a `rng` goes around."""
    if rng is not None:
        return lambda count: rng.integers(size, size=count)
    place = 0

    def around(count: int) -> Indices:
        nonlocal place
        place += count
        return np.arange(place - count, place) % size

    return around


def _checked_lengths(lengths: Sequence[ArrayLike]) -> list[Array]:
    if not len(lengths):
        raise ValueError("lengths has no rank, expected the lengths of at least one")
    arrays = [np.asarray(own, dtype=np.float64) for own in lengths]
    for rank, values in enumerate(arrays):
        if values.ndim != 1 or not values.size or not (np.isfinite(values) & (values >= 0)).all():
            raise ValueError(f"lengths of rank {rank} must be one or more finite numbers, none negative")
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
    (values,) = _checked_lengths([reference])
    return Reference({None: values.tolist()})


def _shares(
    classes: list[Indices] | None, lengths: Sequence[Array], max_tokens: float | None, batch_size: int | None
) -> dict[Hashable, float] | None:
    if classes is None:
        return None
    weights = None if max_tokens is None else batch_shares(np.concatenate(lengths), max_tokens, batch_size)
    held = np.bincount(np.concatenate(classes), weights=weights)
    return {kind: float(own / held.sum()) for kind, own in enumerate(held) if own}
