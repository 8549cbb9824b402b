"""Costs that all ranks share, and aim at."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class ReferenceCosts:
    """Costs that all ranks share, and aim at: by class, if the pool keeps classes apart, else of class None."""

    def __init__(self, costs: Mapping[Any, Sequence[float] | Array]) -> None:
        self.costs: dict[Hashable, Array] = {
            name: np.sort(np.asarray(of_class, dtype=np.float64)) for name, of_class in costs.items()
        }

    def distance(self, class_name: Hashable, costs: Sequence[float] | Array) -> float:
        """The Kolmogorov-Smirnov distance of other costs from those of a class.

        It is the largest difference between the two shares of costs up to any bound: 0 if they are distributed alike, 1
        if they do not even overlap.
        """
        expected, other = self.costs[class_name], np.sort(np.asarray(costs, dtype=np.float64))
        # Between two of the other costs only one of the shares changes, and it only grows: the two ends are enough.
        gaps = [
            np.searchsorted(expected, other, side=side) / len(expected)
            - np.searchsorted(other, other, side=side) / len(other)
            for side in ("left", "right")
        ]
        return float(np.abs(gaps).max())
