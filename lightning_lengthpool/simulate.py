"""Replay a policy over ranks on lists of lengths, with the code that orders training itself."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_lengthpool.order import get_policy

Array = NDArray[np.float64]


def simulate(
    lengths: Sequence[Array],
    policy: str,
    pool_size: int,
    batch_size: int,
    steps: int,
    seed: int = 42,
    rng_seed: int = 0,
) -> tuple[Array, Array, Array]:
    """The batches that each rank would train on.

    Each rank draws samples from its own lengths, with replacement, and pools them as one worker does: one full pool
    after the other is ordered with the seed that all ranks share, and `batch_size` samples in a row make a batch, also
    across the border of two pools. Several workers, which take turns, have a stream of pools each; as they share the
    seed too, the figures are the same on average.

    Args:
        lengths: For each rank the lengths of samples that it may see, in tokens.
        policy: A name from `order.POLICIES`.
        pool_size: Samples of a pool; 0 switches it off.
        batch_size: Samples of a batch.
        steps: Batches of each rank.
        seed: Seed of the policy.
        rng_seed: Seed of the draws.

    Returns:
        Tokens, padded tokens (`batch_size x longest`) and the longest sample of each batch, each `[steps, ranks]`.

    Raises:
        ValueError: If an argument is out of its range; the message names it.

    Example:
        >>> tokens, padded, longest = simulate([np.array([5.0])] * 2, "pool", 10, batch_size=3, steps=1)
        >>> padded.tolist()
        [[15.0, 15.0]]
    """
    for name, value, minimum in (("pool_size", pool_size, 0), ("batch_size", batch_size, 1), ("steps", steps, 1)):
        if value < minimum:
            raise ValueError(f"{name} is {value}, expected at least {minimum}")
    if not lengths:
        raise ValueError("lengths has no rank, expected the lengths of at least one")
    order = get_policy(policy)
    places = pool_size if policy != "none" and pool_size else 1
    pools, rng = -(-steps * batch_size // places), np.random.default_rng(rng_seed)
    batches = np.empty((steps, len(lengths), batch_size))
    for rank, own in enumerate(lengths):
        values = np.asarray(own, dtype=np.float64)
        if values.ndim != 1 or not values.size or not (np.isfinite(values) & (values >= 0)).all():
            raise ValueError(f"lengths of rank {rank} must be one or more finite numbers, none negative")
        drawn = rng.choice(values, size=(pools, places))
        if places > 1:
            drawn = np.array([pool[order(pool.tolist(), places, i * places, seed)] for i, pool in enumerate(drawn)])
        batches[:, rank] = drawn.ravel()[: steps * batch_size].reshape(steps, batch_size)
    longest = batches.max(axis=2)
    return batches.sum(axis=2), batch_size * longest, longest
