"""A sample of bounded size of a stream of numbers."""

import random
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


class Reservoir:
    """Keep a uniform sample of all numbers seen (algorithm R: Vitter, "Random sampling with a reservoir", 1985).

    Args:
        size: How many numbers are kept at most.
        seed: Of its own random sequence; no other one is touched.
    """

    def __init__(self, size: int, seed: int = 0) -> None:
        self._size, self._seen, self._kept = size, 0, list[float]()
        self._random = random.Random(seed)

    def add(self, numbers: Iterable[float]) -> None:
        """See some numbers."""
        for number in numbers:
            self._seen += 1
            if len(self._kept) < self._size:
                self._kept.append(float(number))
            elif (place := int(self._random.random() * self._seen)) < self._size:
                self._kept[place] = float(number)

    def padded(self) -> NDArray[np.float64]:
        """The kept numbers, with NaN up to the size, so that ranks can exchange them. Shape `[size]`."""
        return np.array(self._kept + [np.nan] * (self._size - len(self._kept)))
