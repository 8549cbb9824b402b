"""The policies, by name, and in which order samples leave a pool that is handed out as a whole.

Pure functions from the costs of the samples in one pool to the order in which they leave. No rank goes in: every rank
calls them with the same seed and the same position in its stream, so that the ranks' orders agree by relative index.
What each policy trades away:

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
    The pool is kept sorted and never handed out as a whole, see `sorted_pool`: at each step the shared random number
    names a block, which leaves as one batch, and as many samples come in. No stall, and better synchronised than
    `blocks`, for a quantile is relative: ranks whose pools differ in size still agree.

A new policy of this kind takes a function here, with its name in `ORDERS`; simulation and training then know it. Which
options go with it stands in `settings`, whether an advice tries it in `simulation.choose`, how it is drawn in
`advise.figure`.
"""

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
Order = Callable[[Sequence[float], int, int, int, int], list[int]]
"""`order(costs, pool_size, start, seed, batch_size)`, see `order_pool`."""


def order_none(costs: Sequence[float], pool_size: int, start: int, seed: int, batch_size: int = 1) -> list[int]:
    """Leave the samples in the order in which they came."""
    return list(range(len(costs)))


def order_pool(costs: Sequence[float], pool_size: int, start: int, seed: int, batch_size: int = 1) -> list[int]:
    """Order one pool by cost and shuffle it with the random sequence that all ranks share.

    A full pool (`len(costs) == pool_size`) leaves in the reference order: a stable ascending sort by cost, then
    `random.Random(seed + i).shuffle`, with `i = start + pool_size - 1` the 0-based index of the pool's last sample in
    this worker's stream. The index goes on counting over epochs of the underlying data.

    The last pool of a finite stream may be short, and its size may differ between ranks. A shuffle of another number
    of samples would be an unrelated permutation, so a short pool is drawn by relative index instead: at each step all
    ranks draw the same `u` in [0, 1) from `random.Random(seed + i)` (`i` as if the pool were full, so that it is the
    same on all ranks) and hand out number `floor(u * n)` of the `n` samples that are left in sorted order. Ranks
    whose last pools hold 90 and 100 samples then still see about the same cost at each step, until the shorter
    pool is empty.

    Args:
        costs: Cost (or length) of each sample of the pool, in the order in which the samples came.
        pool_size: Size of a full pool, at least `len(costs)`.
        start: 0-based index of the pool's first sample in this worker's stream.
        seed: The seed that all ranks share.
        batch_size: Only `order_blocks` looks at it.

    Returns:
        Indices into `costs`, in the order in which the samples leave.
    """
    by_cost = sorted(range(len(costs)), key=costs.__getitem__)
    return _shuffled(by_cost, len(costs) == pool_size, seed + start + pool_size - 1)


def order_blocks(costs: Sequence[float], pool_size: int, start: int, seed: int, batch_size: int = 1) -> list[int]:
    """As `order_pool`, but the sorted pool is cut into blocks of `batch_size`, and the blocks are shuffled.

    What does not fill a block are the cheapest samples; they leave last.
    """
    by_cost = sorted(range(len(costs)), key=costs.__getitem__)
    rest = len(by_cost) % batch_size
    blocks = [by_cost[first : first + batch_size] for first in range(rest, len(by_cost), batch_size)]
    blocks = _shuffled(blocks, len(costs) == pool_size, seed + start + pool_size - 1)
    return [index for block in (*blocks, by_cost[:rest]) for index in block]


def _shuffled(items: list[T], is_full: bool, seed: int) -> list[T]:
    rng = random.Random(seed)
    if is_full:
        rng.shuffle(items)
        return items
    return [items.pop(int(rng.random() * len(items))) for _ in range(len(items))]


ORDERS: dict[str, Order] = {"none": order_none, "pool": order_pool, "blocks": order_blocks}
"""The policies that order a whole pool at once, by name."""

POLICIES = (*ORDERS, "stream")
"""All policies; `stream` has a pool of its own, see `sorted_pool`."""
