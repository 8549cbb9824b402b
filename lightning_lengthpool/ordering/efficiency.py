"""What a step costs, and how much of it is wasted: the formulas, on plain numbers.

Every figure of this package, predicted or measured, comes from here. `costs`, `tokens` and `padded` are
arrays of shape `[steps, ranks]`: one row for each gradient reduction, one column for each data-parallel rank.
Costs may be padded tokens (a prediction) or seconds of a rank's own compute (a measurement).

All functions raise `ValueError` where an array has the wrong number of dimensions or holds a negative,
infinite or NaN entry. A fraction of nothing (no steps, or a total of zero) is NaN, never 0: nothing was
measured.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

WORTH = 0.02
"""Waste that a change of settings has to save, to be worth it."""


def padded_tokens(lengths: Sequence[float] | Array) -> float:
    """Tokens of one batch once every sample is padded to the longest: `samples x longest`; 0 for an empty batch.

    Example:
        >>> padded_tokens([3, 5, 4])
        15.0
    """
    values = _checked("lengths", lengths, ndim=1)
    return float(values.size * values.max(initial=0.0))


def sync_efficiency(costs: ArrayLike) -> float:
    """Share of the ranks' time that is work: `sum over steps of mean over ranks / sum over steps of max over
    ranks`.

    It lies between `1 / ranks` (one rank works) and 1 (all ranks are equal at every step).

    Example:
        >>> sync_efficiency([[1, 3], [2, 2]])
        0.8
    """
    return 1.0 - idle_fraction(costs)


def idle_fraction(costs: ArrayLike) -> float:
    """Share of the ranks' time spent waiting for the slowest rank: `1 - sync_efficiency(costs)`."""
    values = _checked("costs", costs, ndim=2)
    if not values.size:
        return float("nan")
    return float(rank_idle_fractions(values.sum(axis=0), float(values.max(axis=1).sum())).mean())


def data_seconds_lost(compute: ArrayLike, data: ArrayLike, step: ArrayLike) -> Array:
    """Seconds by which waiting for data makes each step longer: `max(compute + data) - max(compute)` over ranks.

    A fetch may overlap with compute that is still running on a GPU, so it is at most what the step's wall-clock seconds
    leave beyond `max(compute)`; no such bound where all ranks' `step` are NaN. NaN in `data` counts as 0. All are
    `[steps, ranks]`, the result is `[steps]`.

    Example:
        >>> data_seconds_lost([[1, 2]], [[3, 0]], [[9, 9]]).tolist()
        [2.0]
    """
    values = _checked("compute", compute, ndim=2)
    waits, wall = np.nan_to_num(np.asarray(data, dtype=np.float64)), np.asarray(step, dtype=np.float64)
    slowest = values.max(axis=1)
    beyond = np.where(np.isnan(wall), -np.inf, wall).max(axis=1)
    bound = np.where(np.isneginf(beyond), np.inf, np.maximum(beyond - slowest, 0.0))
    lost: Array = np.minimum((values + waits).max(axis=1) - slowest, bound)
    return lost


def rank_idle_fractions(per_rank: ArrayLike, slowest: float) -> Array:
    """Each rank's share of its time spent waiting: `1 - per_rank / slowest`. Their mean is the idle fraction.

    It takes sums over steps, so a long run need not keep its steps: each rank's cost, `[ranks]`, and the slowest rank's
    cost of each step.
    """
    values = _checked("per_rank", per_rank, ndim=1)
    return 1.0 - values / slowest if slowest > 0 else np.full(values.shape, np.nan)


def padding_fraction(tokens: ArrayLike, padded: ArrayLike) -> float:
    """Share of the tokens trained on that is padding: `1 - sum of tokens / sum of padded tokens`, of any one shape.

    Example:
        >>> padding_fraction([5, 4], [6, 6])
        0.25
    """
    real, total = _pair(tokens, padded)
    return float(1.0 - real.sum() / total.sum()) if total.sum() > 0 else float("nan")


def useful_fraction(tokens: ArrayLike, padded: ArrayLike) -> float:
    """Share of the ranks' capacity that real tokens fill, waiting and padding both counted as waste.

    `sum of tokens / (ranks x sum over steps of the slowest rank's padded tokens)`

    Example:
        >>> useful_fraction([[6, 8]], [[8, 10]])
        0.7
    """
    real, total = _pair(tokens, padded, ndim=2)
    capacity = total.shape[1] * total.max(axis=1).sum() if total.size else 0.0
    return float(real.sum() / capacity) if capacity > 0 else float("nan")


def waste(idle: float, padding: float) -> float:
    """Idle and padding fractions in one number: `1 - (1 - idle) (1 - padding)`.

    Example:
        >>> waste(0.5, 0.2)
        0.6
    """
    return 1 - (1 - idle) * (1 - padding)


def _pair(tokens: ArrayLike, padded: ArrayLike, ndim: int | None = None) -> tuple[Array, Array]:
    real, total = _checked("tokens", tokens, ndim), _checked("padded", padded, ndim)
    if real.shape != total.shape:
        raise ValueError(f"tokens and padded need one shape, got {list(real.shape)} and {list(total.shape)}.")
    return real, total


def _checked(name: str, values: ArrayLike, ndim: int | None = None) -> Array:
    array = np.asarray(values, dtype=np.float64)
    if ndim is not None and array.ndim != ndim:
        expected = "[steps, ranks]" if ndim == 2 else "one dimension"
        raise ValueError(f"{name} needs {expected}, got shape {list(array.shape)}.")
    bad = array[~(np.isfinite(array) & (array >= 0))]
    if bad.size:
        raise ValueError(f"{name} must be finite and not negative, got {bad[0]} (leave out steps without a figure).")
    return array
