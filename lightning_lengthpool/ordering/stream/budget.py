"""Which block of a sorted pool leaves at a slot, with batches that fill a token budget."""

import math

import numpy as np
from numpy.typing import NDArray

from lightning_lengthpool.ordering.stream.blocks import POOL_WEIGHT, index_towards_pool

Array = NDArray[np.float64]


def batch_shares(costs: Array, budget: float, batch_size: int | None = None) -> Array:
    """The share of a batch that each sample takes up, if a batch of samples like it may cost `budget`, `[samples]`.

    Their sum says about how many batches the samples make. Each is above 0 and at most 1: a sample that costs more than
    the budget takes up a whole batch, and one that costs nothing counts one token.
    """
    most = max(1, len(costs)) if batch_size is None else batch_size
    with np.errstate(over="ignore"):
        return 1.0 / np.clip(np.floor(budget / _counted(costs)), 1.0, most)


def budget_block(
    costs: Array,
    u: float,
    budget: float,
    batch_size: int | None = None,
    target: float | None = None,
    is_padded: bool = True,
    pool_weight: float = POOL_WEIGHT,
) -> tuple[int, int]:
    """Name a block of a sorted pool that fills a budget, as a slice `(start, stop)` of `costs`.

    The shared random number is a quantile of cumulative `batch_shares`, and the batch is filled downward from the
    sample there. Expensive samples are named more often and make small batches, so every sample is as likely to leave.
    Where the cheapest samples do not fill the budget, the batch takes more expensive ones.

    Args:
        costs: Ascending, at least one, `[samples]`.
        u: Shared random number in [0, 1).
        budget: What a batch costs at most; a more expensive sample is a batch of its own.
        batch_size: Samples of a batch at most; None for no limit.
        target: As for `aimed_block`, as is `pool_weight`; the quantile is then the u-quantile of cumulative shares.
        is_padded: Whether a batch costs its samples times the most expensive of them; else the sum of their costs.
    """
    top = _index_at_share(batch_shares(costs, budget, batch_size), u)
    if target is not None:
        top = min(max(0, int(index_towards_pool(costs, top + 0.5, target, pool_weight))), len(costs) - 1)
    return fill_budget(costs, top, budget, batch_size, is_padded)


def fill_budget(
    costs: Array, top: int, budget: float, batch_size: int | None = None, is_padded: bool = True
) -> tuple[int, int]:
    """Fill a budget downward from the sample `top`, and upward where there is nothing cheaper left.

    Arguments and result are as for `budget_block`; a sample that costs nothing counts one token.
    """
    most = len(costs) if batch_size is None else batch_size
    costs = _counted(costs)
    sums = np.array([]) if is_padded else np.concatenate(([0.0], np.cumsum(costs)))  # of the first 0, 1, 2, ... samples

    def size(last: int) -> int:
        """Samples of a batch from `last` downward; more than there are where it has room for others."""
        if is_padded:
            fitting = most if costs[last] * most <= budget else int(budget // costs[last])
        elif sums[last + 1] < budget:
            fitting = last + 2
        else:
            fitting = last + 1 - int(np.searchsorted(sums, sums[last + 1] - budget, side="left"))
        return max(1, min(fitting, most))

    # while there is room beside all that is cheaper, and the next more expensive sample fits in as well
    while top + 1 < len(costs) and size(top) > top + 1 and size(top + 1) >= top + 2:
        top += 1
    return max(0, top + 1 - size(top)), top + 1


def _counted(costs: Array) -> Array:
    """Costs as they count against a budget: nothing counts as one token, or one batch would take all that costs
    nothing."""
    return np.where(costs > 0, costs, 1.0)


def _index_at_share(weights: Array, u: float) -> int:
    """The index at which a share `u` of all weights is reached; by sums of parts, for one long sum takes longer."""
    size = max(1, math.isqrt(len(weights)))
    sums = np.add.reduceat(weights, np.arange(0, len(weights), size))
    ends = np.cumsum(sums)
    wanted = u * ends[-1]
    part = min(int(np.searchsorted(ends, wanted, side="right")), len(ends) - 1)
    within = np.cumsum(weights[part * size : (part + 1) * size]) + (ends[part] - sums[part])
    index = part * size + int(np.searchsorted(within, wanted, side="right"))
    return min(index, (part + 1) * size - 1, len(weights) - 1)
