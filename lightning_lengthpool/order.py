"""Policies: in which order the samples of a pool leave it.

A policy is a pure function from the lengths of one pool to the order in which its samples leave. No rank goes in:
every rank calls it with the same seed and the same position in its stream, so that the ranks' orders agree by
relative place. What each policy trades away:

`none`
    Samples pass through in the order in which they come. Fully random if the stream is, but every rank waits for
    the longest sample of all ranks at every step.
`pool`
    The pool is sorted by length and shuffled with a seed that all ranks share: at step t all ranks hand out the
    sample of the same rank in length. Random over time; inside a batch of several samples lengths still differ.

Where the costs come from is not this module's business: a token count, an estimate or a cost model all serve.
"""

import random
from collections.abc import Callable, Sequence

Policy = Callable[[Sequence[float], int, int, int], list[int]]
"""`policy(lengths, pool_size, start, seed) -> order`, see `order_pool`."""


def order_none(lengths: Sequence[float], pool_size: int, start: int, seed: int) -> list[int]:
    """Leave the samples in the order in which they came; arguments as for `order_pool`."""
    return list(range(len(lengths)))


def order_pool(lengths: Sequence[float], pool_size: int, start: int, seed: int) -> list[int]:
    """Order one pool by length and shuffle it with the random sequence that all ranks share.

    A full pool (`len(lengths) == pool_size`) leaves in the reference order: a stable ascending sort by length, then
    `random.Random(seed + i).shuffle`, with `i = start + pool_size - 1` the 0-based index of the pool's last sample in
    this worker's stream. The index goes on counting over epochs of the underlying data.

    The last pool of a finite stream may be short, and its size may differ between ranks. A shuffle of another number
    of samples would be an unrelated permutation, so a short pool is drawn by relative place instead: at each step all
    ranks draw the same `u` in [0, 1) from `random.Random(seed + i)` (`i` as if the pool were full, so that it is the
    same on all ranks) and hand out place `floor(u * n)` of the `n` samples that are left in sorted order. Ranks
    whose last pools hold 90 and 100 samples then still see about the same length at each step, until the shorter
    pool is empty.

    Args:
        lengths: Length (or any other cost) of each sample of the pool, in the order in which the samples came.
        pool_size: Size of a full pool, at least `len(lengths)`.
        start: 0-based index of the pool's first sample in this worker's stream.
        seed: The seed that all ranks share.

    Returns:
        Positions in `lengths`, in the order in which the samples leave: a permutation of `range(len(lengths))`.
    """
    by_length = sorted(range(len(lengths)), key=lengths.__getitem__)
    rng = random.Random(seed + start + pool_size - 1)
    if len(by_length) == pool_size:
        rng.shuffle(by_length)
        return by_length
    return [by_length.pop(int(rng.random() * len(by_length))) for _ in range(len(by_length))]


POLICIES: dict[str, Policy] = {"none": order_none, "pool": order_pool}


def get_policy(name: str) -> Policy:
    """Return the policy called `name`.

    Raises:
        ValueError: If there is no such policy; the message lists those that exist.
    """
    try:
        return POLICIES[name]
    except (KeyError, TypeError):
        raise ValueError(f"policy is {name!r}, expected one of: {', '.join(POLICIES)}") from None
