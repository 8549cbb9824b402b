"""How many seconds a micro-batch takes by its cost: a robust fit of each rank, from sums of bounded size."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

TINY = 1e-12


@dataclass(frozen=True)
class Fit:
    """Seconds of one micro-batch: `a + b * (padded + padded * longest / k)`.

    Attributes:
        a: Seconds of a micro-batch of no tokens.
        b: Seconds per token.
        k: Length in tokens at which attention costs as much as all else; infinite if no curve was seen.
    """

    a: float
    b: float
    k: float

    def seconds(self, padded: ArrayLike, longest: ArrayLike) -> Array:
        """Seconds of micro-batches of `padded` tokens whose longest sample has `longest`; any one shape."""
        tokens = np.asarray(padded, dtype=np.float64)
        return self.a + self.b * tokens * (1.0 + np.asarray(longest, dtype=np.float64) / self.k)


def robust_moments(x: Array, seconds: Array) -> tuple[Array, Array, Array, Array]:
    """Weighted moments of each rank's records, outliers left out.

    Iteratively reweighted least squares on relative residuals, first with Huber's weights, then with Tukey's, which
    let gross outliers go altogether. Each weight also has the factor `(typical seconds / predicted seconds)**2`: short
    and long micro-batches count alike, and so do windows before and after a rank's speed changes.

    Args:
        x: Features, `[ranks, micro-batches, 3]`, 0 where `seconds` is NaN.
        seconds: `[ranks, micro-batches]`.

    Returns:
        `[ranks, 4, 4]`, the moments of (features, seconds); `[ranks]`, the sum of the robust weights; `[ranks, 3]`,
        the fit; `[ranks]`, its relative noise.
    """
    measured = ~np.isnan(seconds)
    level = np.maximum(np.nan_to_num(lower_median(seconds)), TINY)[:, None]
    y = np.where(measured, seconds, 0.0)
    table = np.concatenate([x, y[..., None]], axis=2)
    # to begin with, weight by the seconds themselves: that already makes little of what took too long
    predicted, robust = np.maximum(y, 0.1 * level), measured.astype(np.float64)
    for turn in range(9):
        weights = robust * (level / predicted) ** 2
        gram = (table * weights[..., None]).transpose(0, 2, 1) @ table
        theta, _, noise = solve(gram, robust.sum(axis=1))
        if turn == 8:
            break
        # no micro-batch counts more than 100 typical ones, nor is a prediction negative
        predicted = np.maximum((x @ theta[..., None])[..., 0], 0.1 * level)
        residual = np.abs(y - predicted) / predicted
        scale = 1.4826 * np.nan_to_num(lower_median(np.where(measured, residual, np.nan)))
        distance = residual / np.maximum(scale, 1e-4)[:, None]
        if turn < 5:
            robust = measured * np.minimum(1.0, 1.345 / np.maximum(distance, TINY))
        else:
            robust = measured * (1.0 - np.minimum(distance / 4.685, 1.0) ** 2) ** 2
    return gram, robust.sum(axis=1), theta, noise


def solve(gram: Array, weight: Array) -> tuple[Array, float, Array]:
    """Each rank's fit, with the k that suits all of them best.

    Args:
        gram: Moments of (1, padded, padded * longest, seconds), `[ranks, 4, 4]`.
        weight: Observations of each rank, `[ranks]`.

    Returns:
        theta `[ranks, 3]`, k, and the relative noise `[ranks]`.
    """
    pooled, count = gram.sum(axis=0), float(weight.sum())
    typical_length = math.sqrt(pooled[2, 2] / max(pooled[1, 1], TINY))

    def best_of(grid: Array) -> tuple[float, float, Array, Array]:
        theta, squares = least_squares(gram, grid[:, None])
        relative = squares / np.maximum(gram[:, 3, 3], TINY**2)  # [grid, ranks]: each rank's noise counts alike
        pooled_squares = relative @ weight + 1e-9 * count + TINY
        best = pooled_squares.argmin()
        return float(grid[best]), float(pooled_squares[best]), theta[best], np.sqrt(relative[best])

    k, straight, theta, noise = best_of(np.array([np.inf]))
    if typical_length > 0:
        # k more than 100 lengths away is a straight line, and one below a thirtieth of a length a parabola
        coarse = best_of(typical_length * np.logspace(-1.5, 2, 22))
        fine = best_of(coarse[0] * np.logspace(-1 / 6, 1 / 6, 15))
        # Bayes' criterion for one more parameter, and a margin: a gain of 1 % in the squares does not matter
        if count * math.log(straight / fine[1]) > 10 + math.log(count + 1) + 0.01 * count:
            k, _, theta, noise = fine
    return theta, k, noise


def least_squares(gram: Array, k: Array | np.float64) -> tuple[Array, Array]:
    """Fit `a + b * (padded + padded * longest / k)` from moments, in closed form.

    Args:
        gram: `[..., 4, 4]`.
        k: Broadcasts against the leading dimensions.

    Returns:
        theta `[..., 3]` on the features (1, padded, padded * longest), and the residual sum of squares `[...]`.
    """
    per_k = 1.0 / k
    g = np.moveaxis(gram, (-2, -1), (0, 1))
    # the two features are scaled to length 1
    scale_a = np.sqrt(np.maximum(g[0, 0], TINY**2))
    scale_b = np.sqrt(np.maximum(g[1, 1] + per_k * (2 * g[1, 2] + per_k * g[2, 2]), TINY**2))
    both = (g[0, 1] + per_k * g[0, 2]) / (scale_a * scale_b)
    y_a, y_b = g[0, 3] / scale_a, (g[1, 3] + per_k * g[2, 3]) / scale_b
    # a trace of a ridge: where all costs are equal a and b cannot be told apart, and each explains half
    diagonal = 1.0 + 1e-8
    determinant = diagonal**2 - both**2
    a, b = (diagonal * y_a - both * y_b) / determinant, (diagonal * y_b - both * y_a) / determinant
    squares = g[3, 3] - 2 * (a * y_a + b * y_b) + a**2 + b**2 + 2 * both * a * b
    b = b / scale_b
    return np.stack([a / scale_a, b, per_k * b], axis=-1), np.maximum(squares, 0.0)


def lower_median(values: Array) -> Any:
    """The lower median over the last axis, so that of two ranks the faster is the reference; NaNs are left out."""
    count = np.count_nonzero(~np.isnan(values), axis=-1)  # NaNs are sorted to the end
    place = np.maximum(count - 1, 0) // 2
    return np.take_along_axis(np.sort(values, axis=-1), np.asarray(place)[..., None], axis=-1)[..., 0]
