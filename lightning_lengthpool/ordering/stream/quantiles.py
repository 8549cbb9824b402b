"""What a block aims at: quantiles of costs, of a file that all ranks share or of what a pool has seen lately."""

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_lengthpool.ordering.stream.budget import batch_shares

Array = NDArray[np.float64]

_RENEWALS = 32  # of a history's quantiles, while all of it is replaced


class Quantiles:
    """Quantiles of costs; with a budget of the batches that they make, of at most `batch_size` samples."""

    def __init__(self, costs: Array, budget: float | None = None, batch_size: int | None = None) -> None:
        self._costs = np.sort(costs)
        self._batches = None if budget is None else np.cumsum(batch_shares(self._costs, budget, batch_size))

    def __getitem__(self, u: float) -> float | None:
        """The u-quantile; None of no costs."""
        if not len(self._costs):
            return None
        if self._batches is None:
            index = int(u * len(self._costs))
        else:
            index = int(np.searchsorted(self._batches, u * self._batches[-1], side="right"))
        return float(self._costs[min(index, len(self._costs) - 1)])


class History:
    """The costs of one class that came in last, and their quantiles, renewed now and then, for sorting takes time.

    Attributes:
        recent: The costs in the order in which they came: up to `size` for the quantiles, then those that came since.
        since: How many of the last ones the quantiles do not know yet.
    """

    def __init__(self, size: int) -> None:
        self._size, self._every = size, max(1, size // _RENEWALS)
        self.restore([], 0)

    def restore(self, recent: Sequence[float], since: int) -> None:
        """Go on from a history's `recent` and `since`."""
        self.recent = array("d", recent)
        self.since = since
        self._renew()

    def start(self, costs: Array) -> None:
        """What `add` of many costs in a row does to a new history."""
        since = (len(costs) - 1) % self._every if len(costs) else 0
        self.restore(costs[max(0, len(costs) - self._size - since) :].tolist(), since)

    def add(self, cost: float) -> None:
        self.recent.append(cost)
        self.since += 1
        if self.since == min(self._every, len(self.recent)):
            del self.recent[: -self._size]
            self.since = 0
            self._renew()

    def _renew(self) -> None:
        self.quantiles = Quantiles(np.array(self.recent)[: len(self.recent) - self.since])
