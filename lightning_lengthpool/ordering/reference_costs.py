"""Costs that all ranks share, and aim at."""

from collections.abc import Hashable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class ReferenceCosts:
    """Costs that all ranks share, and aim at.

    Args:
        costs: Of samples of the data set, in any order; by class, if the pool keeps classes apart, else of class None.
    """

    def __init__(self, costs: Mapping[Hashable, Sequence[float] | Array]) -> None:
        self.costs = {kind: np.sort(np.asarray(own, dtype=np.float64)) for kind, own in costs.items()}

    def distance(self, kind: Hashable, costs: Sequence[float] | Array) -> float:
        """The Kolmogorov-Smirnov distance of other costs from those of a class.

        Returns:
            The largest difference between the two shares of costs up to any bound: 0 if they are distributed alike, 1
            if they do not even overlap.
        """
        own, other = self.costs[kind], np.sort(np.asarray(costs, dtype=np.float64))
        # Between two of the other costs only one of the shares changes, and it only grows: the two ends are enough.
        gaps = [
            np.searchsorted(own, other, side=side) / len(own) - np.searchsorted(other, other, side=side) / len(other)
            for side in ("left", "right")
        ]
        return float(np.abs(gaps).max())
