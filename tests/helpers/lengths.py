"""Heavy-tailed lengths, as of answers of a language model."""

import random
from typing import Any

import numpy as np


def heavy_tailed(
    rng: np.random.Generator, *shape: int, mu: float = 6.5, sigma: float = 0.9, longest: float = 16_000
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Whole lengths: log-normal, cut at `longest`."""
    return np.minimum(rng.lognormal(mu, sigma, shape), longest).round()


def lognormal(count: int, seed: int = 0, mu: float = 6) -> list[int]:
    """Whole lengths as a list, for data sets and streams; golden orders depend on these very numbers."""
    rng = random.Random(seed)
    return [int(rng.lognormvariate(mu, 1)) for _ in range(count)]
