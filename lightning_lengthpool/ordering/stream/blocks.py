"""Which block of a sorted pool leaves at a slot, and of which class, with batches of a number of samples.

All ranks draw the same random numbers for a slot, and read them as quantiles: so their blocks cost about the same.
"""

import math
import random
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Costs = Sequence[float] | NDArray[np.float64]

POOL_WEIGHT = 0.2
"""Weight of what this pool holds beside what all ranks aim at, for blocks as for classes.

Without it (0) blocks follow the target exactly, and parts of the pool that the target misses would never leave.
"""

POOL_WEIGHT_ALONE = 0.5
"""The same where a rank aims at the costs that it has seen itself: the pool then stays as its data are."""


def stream_draw(seed: int, worker: int, slot: int) -> random.Random:
    """The random sequence of one slot (0-based in a worker's stream), the same on all ranks.

    Each worker has its own, for batch i of a rank comes from worker `i % workers`: workers that shared a sequence would
    make neighbouring batches alike.
    """
    return random.Random(f"{seed}/{worker}/{slot}")  # a string is hashed: neighbouring slots have nothing in common


@lru_cache(maxsize=1 << 14)  # a simulation asks again for each rank
def slot_numbers(seed: int, worker: int, slot: int) -> tuple[float, float]:
    """The two random numbers of a slot: the first one names the class, the second one the block."""
    rng = stream_draw(seed, worker, slot)
    return rng.random(), rng.random()


@lru_cache(maxsize=8)
def even_slots(seed: int, count: int) -> tuple[int, ...]:
    """Slots whose random numbers lie evenly between 0 and 1, in their order: the first one in each of `count` parts.

    A simulation of so few steps else has the most expensive blocks too often, or not at all.
    """
    first: dict[int, int] = {}
    slot = 0
    while len(first) < count:
        first.setdefault(int(slot_numbers(seed, 0, slot)[1] * count), slot)
        slot += 1
    return tuple(sorted(first.values()))


def stream_block(costs: Sequence[float], u: float, batch_size: int) -> tuple[int, int]:
    """Name the block of a sorted pool that leaves as the next batch, as a slice `(start, stop)` of `costs`.

    The pool is cut into blocks of `batch_size`, and of its `n` samples the block leaves that holds number `u n`: so
    every sample is as likely to leave, long or short. A pool of fewer samples leaves as a whole.

    Args:
        costs: Ascending, at least one.
        u: Shared random number in [0, 1).
    """
    n = len(costs)
    size = min(batch_size, n)
    rest = n % size  # what does not fill a block lies at the cheap end, and borrows from the block above
    start = max(0, rest + math.floor((u * n - rest) / size) * size)
    return start, start + size


def top_quantile(u: float, blocks: int) -> float:
    """The quantile of the most expensive sample of a block, where all costs make so many blocks of one size.

    All ranks cut the same quantiles, not their own samples, into blocks: so the blocks agree, and those at both ends
    are as likely as the others.
    """
    return (math.floor(u * blocks) + 1) / blocks


def aimed_block(
    costs: Sequence[float], top: float, batch_size: int, target: float, pool_weight: float = POOL_WEIGHT
) -> tuple[int, int]:
    """As `stream_block`, with a cost in common: the block that ends at index `k + pool_weight (top n - k)`.

    `k` is the target's index among the samples: what a batch costs depends on its most expensive sample, so that is
    what the ranks should agree on. The last term keeps a pool from filling up with what the target misses.

    Args:
        top: The quantile that the block's most expensive sample is to have, see `top_quantile`.
        target: The cost of that quantile, of costs that all ranks share or at least know alike.
        pool_weight: 0 follows the target alone, 1 the pool alone.
    """
    n = len(costs)
    size = min(batch_size, n)
    stop = min(max(size, int(index_towards_pool(costs, top * n, target, pool_weight) + 0.5)), n)
    return stop - size, stop


def index_towards_pool(costs: Costs, pool_index: float, target: float, pool_weight: float) -> float:
    """The index of `target` among sorted costs, moved towards `pool_index`, the one that the pool alone would name."""
    # of the indices that have just this cost, the nearest one
    index = min(max(pool_index, bisect_left(costs, target)), bisect_right(costs, target))
    return index + pool_weight * (pool_index - index)


def nearest_index(costs: Sequence[float], wanted: float) -> int:
    """The index of the sorted cost nearest to `wanted`, of two the cheaper one."""
    index = bisect_left(costs, wanted)
    if index == len(costs) or (index and wanted - costs[index - 1] <= costs[index] - wanted):
        index -= 1
    return index


def stream_class(shares: Sequence[float], held: Sequence[float], u: float) -> int:
    """Name the class that the next batch is drawn from, by its index in `shares`.

    All ranks draw from about the same probabilities, so that (nearly) all take the same class, corrected a little
    towards what this rank's pool holds, so that over time each class leaves as it comes:
    `p = shares + POOL_WEIGHT (held - shares)`. This rank's pool may have none of it.

    Args:
        shares: Share of each class's batches that all ranks expect, adding up to 1.
        held: The same of this rank's pool.
        u: Shared random number in [0, 1).
    """
    cumulative = 0.0
    for index, (share, of_pool) in enumerate(zip(shares, held, strict=True)):
        cumulative += share + POOL_WEIGHT * (of_pool - share)
        if u < cumulative:
            return index
    return len(shares) - 1  # where rounding has left the sum below 1
