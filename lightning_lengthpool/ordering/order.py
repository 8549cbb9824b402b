"""Policies: in which order the samples of a pool leave it.

Pure functions from the costs of the samples in one pool to which of them leave next. No rank goes in: every rank calls
them with the same seed and the same position in its stream, so that the ranks' orders agree by relative place. What
each policy trades away:

`none`
    Samples pass through in the order in which they come. Fully random if the stream is, but every rank waits for
    the longest sample of all ranks at every step.
`pool`
    The pool is sorted by cost and shuffled with a seed that all ranks share: at step t all ranks hand out the
    sample of the same rank in cost. Random over time; inside a batch of several samples lengths still differ.
`blocks`
    The sorted pool is cut into blocks of one batch each, and the blocks are shuffled: as well synchronised, and
    almost without padding. The samples of a batch are alike, so a batch says less about the data than a random one.
`stream`
    The pool is kept sorted and never flushed: at each step the shared random number names a block, which leaves as one
    batch, and as many samples come in. No stall, and better synchronised than `blocks`, for a place is relative: ranks
    whose pools differ in size still agree.

Where the costs come from is not this module's business: a token count, an estimate or a cost model all serve.
"""

import math
import random
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
Array = NDArray[np.float64]
Policy = Callable[[Sequence[float], int, int, int, int], list[int]]
"""`policy(costs, pool_size, start, seed, batch_size) -> order`, see `order_pool`."""

OWN_PLACE = 0.2
"""How far a block that aims at a cost that all ranks share moves back towards the pool's own relative place.

Without it (0) blocks follow the target exactly, and parts of the pool that the target misses would never leave.
"""

OWN_PLACE_ALONE = 0.5
"""The same where a rank aims at what it has seen itself: the pool then stays as its data are, long or short."""


def order_none(costs: Sequence[float], pool_size: int, start: int, seed: int, batch_size: int = 1) -> list[int]:
    """Leave the samples in the order in which they came; arguments as for `order_pool`."""
    return list(range(len(costs)))


def order_pool(costs: Sequence[float], pool_size: int, start: int, seed: int, batch_size: int = 1) -> list[int]:
    """Order one pool by cost and shuffle it with the random sequence that all ranks share.

    A full pool (`len(costs) == pool_size`) leaves in the reference order: a stable ascending sort by cost, then
    `random.Random(seed + i).shuffle`, with `i = start + pool_size - 1` the 0-based index of the pool's last sample in
    this worker's stream. The index goes on counting over epochs of the underlying data.

    The last pool of a finite stream may be short, and its size may differ between ranks. A shuffle of another number
    of samples would be an unrelated permutation, so a short pool is drawn by relative place instead: at each step all
    ranks draw the same `u` in [0, 1) from `random.Random(seed + i)` (`i` as if the pool were full, so that it is the
    same on all ranks) and hand out place `floor(u * n)` of the `n` samples that are left in sorted order. Ranks
    whose last pools hold 90 and 100 samples then still see about the same cost at each step, until the shorter
    pool is empty.

    Args:
        costs: Cost (or length) of each sample of the pool, in the order in which the samples came.
        pool_size: Size of a full pool, at least `len(costs)`.
        start: 0-based index of the pool's first sample in this worker's stream.
        seed: The seed that all ranks share.
        batch_size: Samples of a batch; only `order_blocks` looks at it.

    Returns:
        Positions in `costs`, in the order in which the samples leave: a permutation of `range(len(costs))`.
    """
    by_cost = sorted(range(len(costs)), key=costs.__getitem__)
    return _shuffled(by_cost, len(costs) == pool_size, seed + start + pool_size - 1)


def order_blocks(costs: Sequence[float], pool_size: int, start: int, seed: int, batch_size: int = 1) -> list[int]:
    """As `order_pool`, but the sorted pool is cut into blocks of `batch_size`, and the blocks are shuffled.

    What does not fill a block are the cheapest samples; they leave last.
    """
    by_cost = sorted(range(len(costs)), key=costs.__getitem__)
    rest = len(by_cost) % batch_size
    blocks = [by_cost[place : place + batch_size] for place in range(rest, len(by_cost), batch_size)]
    blocks = _shuffled(blocks, len(costs) == pool_size, seed + start + pool_size - 1)
    return [index for block in (*blocks, by_cost[:rest]) for index in block]


def _shuffled(items: list[T], is_full: bool, seed: int) -> list[T]:
    rng = random.Random(seed)
    if is_full:
        rng.shuffle(items)
        return items
    return [items.pop(int(rng.random() * len(items))) for _ in range(len(items))]


ORDERS: dict[str, Policy] = {"none": order_none, "pool": order_pool, "blocks": order_blocks}
"""The policies that order a whole pool at once, by name."""


# ---- stream


def stream_draw(seed: int, worker: int, slot: int) -> random.Random:
    """The random sequence of one slot, the same on all ranks.

    Args:
        seed: The seed that all ranks share.
        worker: Number of the worker within its rank: batch i of a rank comes from worker `i % workers`, so workers that
            shared a sequence would make neighbouring batches alike.
        slot: 0-based number of the batch in this worker's stream.
    """
    return random.Random(f"{seed}/{worker}/{slot}")  # a string is hashed: neighbouring slots have nothing in common


def stream_block(costs: Sequence[float], u: float, batch_size: int) -> tuple[int, int]:
    """Name the block of a sorted pool that leaves as the next batch.

    The pool is cut into blocks of `batch_size`, and the block leaves in which the place `u n` of the `n` samples lies,
    so every sample is as likely to leave, long or short.

    Args:
        costs: Of the pool's samples, ascending, at least one.
        u: Shared random number in [0, 1).
        batch_size: Samples of a batch; a pool that holds fewer leaves as a whole.

    Returns:
        The block as a slice `(start, stop)` of `costs`, of `batch_size` samples wherever the pool has as many.
    """
    n = len(costs)
    size = min(batch_size, n)
    rest = n % size  # what does not fill a block lies at the cheap end, and borrows from the block above
    start = max(0, rest + math.floor((u * n - rest) / size) * size)
    return start, start + size


def block_top(u: float, blocks: int) -> float:
    """The quantile of costs that is to be the dearest of a block, if all costs make so many blocks of one size.

    All ranks cut the same quantiles, not their own samples, into blocks: so the blocks agree, and those at both ends
    are as likely as the others.

    Args:
        u: Shared random number in [0, 1).
        blocks: How many a pool has.
    """
    return (math.floor(u * blocks) + 1) / blocks


def aimed_block(
    costs: Sequence[float], top: float, batch_size: int, target: float, own_place: float = OWN_PLACE
) -> tuple[int, int]:
    """As `stream_block`, with a cost in common: the block that ends at `k + own_place (top n - k)`.

    `k` is the target's place among the samples: what a batch costs depends on its dearest sample, so that is what the
    ranks should agree on. The last term keeps a pool from filling up with what the target misses.

    Args:
        costs: As for `stream_block`, as is `batch_size`.
        top: The quantile that the block's dearest sample is to have, see `block_top`.
        target: The cost of that quantile, of costs that all ranks share or at least know alike.
        own_place: 0 follows the target alone, 1 the pool alone.

    Returns:
        As `stream_block`.
    """
    n = len(costs)
    size = min(batch_size, n)
    stop = min(max(size, int(_towards(costs, top * n, target, own_place) + 0.5)), n)
    return stop - size, stop


def batch_shares(costs: Array, budget: float, batch_size: int | None = None) -> Array:
    """The share of a batch that each sample takes up, if a batch of samples like it may cost `budget`.

    Their sum says about how many batches the samples make.

    Args:
        costs: Of samples, shape `[samples]`. One that costs nothing counts one token here.
        budget: What a batch may cost, above 0; a dearer sample takes up a whole batch.
        batch_size: Samples of a batch at most; None for no limit.

    Returns:
        Shape `[samples]`, each above 0 and at most 1.
    """
    most = max(1, len(costs)) if batch_size is None else batch_size
    with np.errstate(over="ignore"):
        return 1.0 / np.clip(np.floor(budget / _counted(costs)), 1.0, most)


def _counted(costs: Array) -> Array:
    """Costs as they count against a budget: nothing counts as one token, or one batch would take all that costs
    nothing."""
    return np.where(costs > 0, costs, 1.0)


def budget_block(
    costs: Array,
    u: float,
    budget: float,
    batch_size: int | None = None,
    target: float | None = None,
    is_padded: bool = True,
    own_place: float = OWN_PLACE,
) -> tuple[int, int]:
    """Name a block of a sorted pool that fills a budget, whatever the samples' own costs.

    The shared random number names a place on the axis of cumulative `batch_shares`, and the batch is filled downward
    from the sample there. Expensive samples are named more often and make small batches, so every sample is as likely
    to leave. Where the cheapest samples do not fill the budget, the batch takes dearer ones.

    Args:
        costs: Of the pool's samples, ascending, at least one, shape `[samples]`.
        u: Shared random number in [0, 1).
        budget: What a batch costs at most; a dearer sample is a batch of its own.
        batch_size: Samples of a batch at most; None for no limit.
        target: As for `aimed_block`; the quantile is then the u-quantile of cumulative shares.
        is_padded: Whether a batch costs its samples times the dearest of them; else the sum of their costs.
        own_place: As for `aimed_block`.

    Returns:
        The block as a slice `(start, stop)` of `costs`.
    """
    top = _place(batch_shares(costs, budget, batch_size), u)
    if target is not None:
        top = min(max(0, int(_towards(costs, top + 0.5, target, own_place))), len(costs) - 1)
    return fill_budget(costs, top, budget, batch_size, is_padded)


def _place(weights: Array, u: float) -> int:
    """Where a share `u` of all weights is reached; in two steps, for a sum over all of them in a row takes longer."""
    size = max(1, math.isqrt(len(weights)))
    sums = np.add.reduceat(weights, np.arange(0, len(weights), size))
    ends = np.cumsum(sums)
    wanted = u * ends[-1]
    part = min(int(np.searchsorted(ends, wanted, side="right")), len(ends) - 1)
    within = np.cumsum(weights[part * size : (part + 1) * size]) + (ends[part] - sums[part])
    place = part * size + int(np.searchsorted(within, wanted, side="right"))
    return min(place, (part + 1) * size - 1, len(weights) - 1)


def fill_budget(
    costs: Array, top: int, budget: float, batch_size: int | None = None, is_padded: bool = True
) -> tuple[int, int]:
    """Fill a budget downward from the sample `top`, and upward where there is nothing cheaper left.

    Args:
        costs: Of the pool's samples, ascending, shape `[samples]`. One that costs nothing counts one token here.
        top: The place of the dearest sample.
        budget: As for `budget_block`, as are the other arguments.
        batch_size: Samples of a batch at most; None for no limit.
        is_padded: Whether a batch costs its samples times the dearest of them.

    Returns:
        The block as a slice `(start, stop)` of `costs`.
    """
    n, most = len(costs), len(costs) if batch_size is None else batch_size
    costs = _counted(costs)
    cumulative = None if is_padded else np.concatenate(([0.0], np.cumsum(costs)))

    def start_of(last: int) -> int:
        """Where a batch begins whose dearest sample is `last`; negative if it has room for cheaper ones than exist."""
        if cumulative is None:
            fits = int(budget // costs[last]) if costs[last] * most > budget else most
        elif cumulative[last + 1] < budget:
            fits = last + 2
        else:
            fits = last + 1 - int(np.searchsorted(cumulative, cumulative[last + 1] - budget, side="left"))
        return last + 1 - max(1, min(fits, most))

    while start_of(top) < 0 and top + 1 < n and start_of(top + 1) <= 0:
        top += 1
    return max(0, start_of(top)), top + 1


def _towards(costs: Sequence[float] | Array, own: float, target: float, own_place: float) -> float:
    """The place of `target` among sorted costs, moved towards the pool's `own` place."""
    # of the places that have just this cost, the one nearest to the pool's own
    place = min(max(own, bisect_left(costs, target)), bisect_right(costs, target))
    return place + own_place * (own - place)


def stream_class(shares: Sequence[float], own: Sequence[float], u: float) -> int:
    """Name the class that the next batch is drawn from.

    All ranks draw from about the same probabilities, so that (nearly) all take the same class, corrected a little
    towards what this rank's pool holds, so that over time each class leaves as it comes:
    `p = shares + 0.2 (own - shares)`.

    Args:
        shares: Share of each class's batches that all ranks expect, adding up to 1.
        own: The same of this rank's pool.
        u: Shared random number in [0, 1).

    Returns:
        The index of a class, in the order of `shares`; this rank's pool may have none of it.
    """
    cumulative = 0.0
    for index, (share, held) in enumerate(zip(shares, own, strict=True)):
        cumulative += share + OWN_PLACE * (held - share)
        if u < cumulative:
            return index
    return len(shares) - 1  # where rounding has left the sum below 1
