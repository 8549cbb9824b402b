"""How many seconds a micro-batch takes by its cost: a robust fit of each rank, from sums of bounded size.

A micro-batch's features are 1, `padded` and `padded * longest`; its moments are the products of these and its seconds.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_lengthpool.runs.thresholds import SLOW_RANK_FACTOR, SLOW_STANDARD_ERRORS, SLOW_WINDOW_FACTOR

Array = NDArray[np.float64]

TINY = 1e-12
MEMORY = 20  # windows: an older one counts 1 / e of a new one
MIN_MICRO_BATCHES = 20  # of a rank, before anything is said of it

# Iteratively reweighted least squares: the usual constants, for 95 % efficiency on normal residuals.
_HUBER, _HUBER_TURNS = 1.345, 5
_TUKEY, _TURNS = 4.685, 9
_OF_DEVIATION = 1.4826  # standard deviation of a normal distribution / its median absolute deviation


@dataclass(frozen=True)
class Fit:
    """Seconds of one micro-batch: `a + b * (padded + padded * longest / k)`."""

    a: float  # seconds of a micro-batch of no tokens
    b: float  # seconds per token
    k: float  # length in tokens at which attention costs as much as all else; infinite if no curve was seen

    def seconds(self, padded: ArrayLike, longest: ArrayLike) -> Array:
        """Seconds of micro-batches of `padded` tokens whose longest sample has `longest`; any one shape."""
        tokens = np.asarray(padded, dtype=np.float64)
        return self.a + self.b * tokens * (1.0 + np.asarray(longest, dtype=np.float64) / self.k)


class RankFits(NamedTuple):
    """Fits of all ranks."""

    theta: Array  # coefficients of the features, `[ranks, 3]`
    k: float  # see `Fit`; shared by all ranks
    noise: Array  # relative, of one micro-batch, `[ranks]`


def robust_moments(x: Array, seconds: Array) -> tuple[Array, Array, RankFits]:
    """Weighted moments of each rank's records, outliers left out.

    Iteratively reweighted least squares on relative residuals, first with Huber's weights, then with Tukey's, which
    let gross outliers go altogether. Each weight also has the factor `(typical seconds / predicted seconds)**2`: short
    and long micro-batches count alike, and so do windows before and after a rank's speed changes.

    Args:
        x: Features, `[ranks, micro-batches, 3]`, 0 where `seconds` is NaN.
        seconds: `[ranks, micro-batches]`.

    Returns:
        `[ranks, 4, 4]`, the moments of (features, seconds); `[ranks]`, the sum of the robust weights; and the fits.
    """
    measured = ~np.isnan(seconds)
    typical = np.maximum(np.nan_to_num(lower_median(seconds)), TINY)[:, None]
    y = np.where(measured, seconds, 0.0)
    features_and_seconds = np.concatenate([x, y[..., None]], axis=2)

    def moments(predicted: Array, robust: Array) -> Array:
        weights = robust * (typical / predicted) ** 2
        result: Array = (features_and_seconds * weights[..., None]).transpose(0, 2, 1) @ features_and_seconds
        return result

    # to begin with, weight by the seconds themselves: that already makes little of what took too long
    robust = measured.astype(np.float64)
    gram = moments(np.maximum(y, 0.1 * typical), robust)
    for turn in range(1, _TURNS):
        fits = solve(gram, robust.sum(axis=1))
        # no micro-batch counts more than 100 typical ones, nor is a prediction negative
        predicted = np.maximum((x @ fits.theta[..., None])[..., 0], 0.1 * typical)
        residual = np.abs(y - predicted) / predicted
        scale = _OF_DEVIATION * np.nan_to_num(lower_median(np.where(measured, residual, np.nan)))
        distance = residual / np.maximum(scale, 1e-4)[:, None]
        if turn <= _HUBER_TURNS:
            robust = measured * np.minimum(1.0, _HUBER / np.maximum(distance, TINY))
        else:
            robust = measured * (1.0 - np.minimum(distance / _TUKEY, 1.0) ** 2) ** 2
        gram = moments(predicted, robust)
    weight = robust.sum(axis=1)
    return gram, weight, solve(gram, weight)


def solve(gram: Array, weight: Array) -> RankFits:
    """Each rank's fit, with the k that suits all of them best, from moments `[ranks, 4, 4]` of (features, seconds) and
    the observations of each rank, `[ranks]`.
    """
    count, straight = float(weight.sum()), _best_of(np.array([np.inf]), gram, weight)
    pooled = gram.sum(axis=0)
    typical_length = math.sqrt(pooled[2, 2] / max(pooled[1, 1], TINY))
    if not typical_length > 0:
        return straight[1]
    # k more than 100 lengths away is a straight line, and one below a thirtieth of a length a parabola
    _, coarse = _best_of(typical_length * np.logspace(-1.5, 2, 22), gram, weight)
    curve = _best_of(coarse.k * np.logspace(-1 / 6, 1 / 6, 15), gram, weight)
    # Bayes' criterion for one more parameter, and a margin: a gain of 1 % in the squares does not matter
    is_curve = count * math.log(straight[0] / curve[0]) > 10 + math.log(count + 1) + 0.01 * count
    return (curve if is_curve else straight)[1]


def _best_of(grid: Array, gram: Array, weight: Array) -> tuple[float, RankFits]:
    """The sum of squares and the fits with the best k of a grid."""
    theta, squares = least_squares(gram, grid[:, None])
    relative = squares / np.maximum(gram[:, 3, 3], TINY**2)  # [grid, ranks]: each rank's noise counts alike
    pooled = relative @ weight + 1e-9 * float(weight.sum()) + TINY
    best = pooled.argmin()
    return float(pooled[best]), RankFits(theta[best], float(grid[best]), np.sqrt(relative[best]))


def least_squares(gram: Array, k: Array | np.float64) -> tuple[Array, Array]:
    """Fit `a + b * (padded + padded * longest / k)` from moments `[..., 4, 4]`, in closed form; k broadcasts.

    Returns theta `[..., 3]` on the features (1, padded, padded * longest), and the residual sum of squares `[...]`.
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
    middle = np.asarray(np.maximum(count - 1, 0) // 2)
    return np.take_along_axis(np.sort(values, axis=-1), middle[..., None], axis=-1)[..., 0]


class WindowSpeeds(NamedTuple):
    """How fast the ranks are in a window; theta are coefficients of the features."""

    running: RankFits  # of about the last `MEMORY` windows
    of_window: Array  # theta of this window alone, `[ranks, 3]`
    reference: Array  # theta of the typical rank, `[3]`
    pace: float  # the typical rank's time in this window, as a multiple of what `reference` says
    factor: Array  # each rank's time for equal cost, as a multiple of the typical one's
    stands_out: NDArray[np.bool_]  # whether a rank is slow or fast beyond chance


class RankSpeeds:
    """Running fits of the ranks' speeds, and which ranks stand out.

    Within a window outliers are found by a robust fit of that window alone, so a lasting change is not taken for one;
    the window's weighted moments then enter running moments in which a window that is `MEMORY` windows old counts
    1 / e.

    A rank stands out in a window if for equal cost the running fit puts it at `SLOW_RANK_FACTOR` times the (lower)
    median rank or more, or as much below it, beyond `SLOW_STANDARD_ERRORS`, and the window's own fit confirms it; or if
    the own fits of two windows in a row do.
    """

    def __init__(self, ranks: int) -> None:
        self.latest: WindowSpeeds | None = None
        self._gram, self._weight, self._features = np.zeros((ranks, 4, 4)), np.zeros(ranks), np.zeros(3)
        self._side = np.zeros(ranks)  # of the last window's own fit, see `_sides`
        # Of slow ranks and of fast ones: in how many windows a rank was so, and the sum of its factors there. Each
        # counted over all windows, and with older ones fading.
        self._windows = np.zeros(2)  # [all or fading]
        self._times, self._factors = np.zeros((2, 2, ranks)), np.zeros((2, 2, ranks))  # [side, all or fading, rank]

    def learn(self, features: Array, seconds: Array) -> WindowSpeeds:
        """Fit a window, add its moments to the running ones, and return what these show now.

        Features are `[micro-batches, ranks, 3]`, seconds `[micro-batches, ranks]`, NaN where not measured.
        """
        measured = np.isfinite(seconds)
        x = np.ascontiguousarray((features * measured[..., None]).transpose(1, 0, 2))
        gram, weight, window = robust_moments(x, np.where(measured, seconds, np.nan).T)
        fading, per_rank = math.exp(-1 / MEMORY), x.sum(axis=1)
        self._gram = fading * self._gram + gram
        self._weight = fading * self._weight + weight
        self._features = fading * self._features + per_rank.sum(axis=0)

        running = solve(self._gram, self._weight)
        with np.errstate(divide="ignore", invalid="ignore"):  # a rank that was never measured has no factor
            level = np.where(self._weight > 0, running.theta @ self._features, np.nan)
            factor = level / lower_median(level)
            typical = np.abs(factor - 1) <= SLOW_RANK_FACTOR - 1
            reference = least_squares(self._gram[typical].sum(axis=0), np.float64(running.k))[0]
            lately = np.einsum("rf,rf->r", per_rank, window.theta) / (per_rank @ reference)
            pace = float(lower_median(np.where(weight > 0, lately, np.nan)))
            lately /= pace  # all ranks may have changed together
            steady, now = _sides(factor, running.noise, self._weight), _sides(lately, window.noise, weight)
            confirmed = np.where(factor > 1, lately > SLOW_WINDOW_FACTOR, lately < 1 / SLOW_WINDOW_FACTOR)
        # the running fit is slow to see a change; two windows in a row show it as well
        stands_out = (steady != 0) & confirmed | (now != 0) & (now == self._side)
        self._side = now
        factor = np.where(steady != 0, factor, lately)
        keep = np.array([1.0, fading])
        self._windows = keep * self._windows + 1.0
        on_side = np.stack([stands_out & (factor > 1), stands_out & (factor < 1)])[:, None]
        self._times = keep[:, None] * self._times + on_side
        self._factors = keep[:, None] * self._factors + np.where(on_side, factor, 0.0)
        self.latest = WindowSpeeds(running, window.theta, reference, pace, factor, stands_out)
        return self.latest

    def uneven(self) -> dict[int, float]:
        """The ranks (by index) that stood out in more than half of the windows, of all or of the last, and how much.

        A mean over all windows goes before one over the last.
        """
        mean: dict[int, float] = {}
        for times, factors in zip(self._times, self._factors, strict=True):
            for counted in (1, 0):
                for rank in np.flatnonzero(2 * times[counted] > self._windows[counted]):
                    mean[int(rank)] = float(factors[counted, rank] / times[counted, rank])
        return dict(sorted(mean.items()))


def _sides(factor: Array, noise: Array, weight: Array) -> Array:
    """Tell for each rank whether it is slow (1), fast (-1) or neither (0), beyond what noise explains.

    `factor` is its time for equal cost, as a multiple of the typical rank's; `weight` its number of micro-batches.
    """
    error = noise / np.sqrt(weight)
    certain = np.abs(factor - 1) > SLOW_STANDARD_ERRORS * np.hypot(factor * error, lower_median(error))
    side = np.where(factor >= SLOW_RANK_FACTOR, 1.0, np.where(factor <= 1 / SLOW_RANK_FACTOR, -1.0, 0.0))
    return np.where(certain & (weight >= MIN_MICRO_BATCHES), side, 0.0)
