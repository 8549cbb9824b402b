"""Why ranks wait: step records -> a running fit of each rank's speed -> idle time split by its cause.

A rank's seconds for one micro-batch are taken to be `a + b * cost`, with `cost = padded + padded * longest / k` (the
second term is attention: `samples * longest**2 = padded * longest`). `a` and `b` are a rank's own; `k`, in tokens, is
shared by all ranks, and infinite unless the records clearly show a curve. What the fit of the typical rank would wait
on the lengths that were drawn is due to lengths, what the slow ranks' own fits add is due to these ranks, and what no
fit predicts is the rest.

Only sums are kept, of a size that depends on the number of ranks and not on the number of steps.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_lengthpool.ordering import efficiency
from lightning_lengthpool.runs.speed_fit import TINY, Fit, RankSpeeds, WindowSpeeds
from lightning_lengthpool.runs.steps.columns import COLUMNS
from lightning_lengthpool.runs.steps.records import by_step, step_starts
from lightning_lengthpool.runs.thresholds import ELSEWHERE_RANK_FROM, NAMED_FROM

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Split:
    """The idle fraction of some steps and its parts, `idle = lengths + slow_rank + data + rest`.

    Attributes:
        idle: Share of the ranks' time spent waiting, for each other and for data.
        lengths: The part that ranks of equal speed would wait as well.
        slow_rank: The part that would go if the ranks that stand out were as fast as the typical one.
        data: The part in which all ranks wait for data.
        rest: Noise, and whatever else the fits do not predict.
        by: "seconds", or "tokens" where compute was not measured: then `idle` and `lengths` are the idle fraction by
            padded tokens, and the other parts NaN.
        uneven: The ranks that stand out, with their time for equal cost as a multiple of the typical rank's: above 1
            for a slow rank, below 1 for one that waits because it is fast.
        data_ranks: The ranks that wait for data most (at least half as long as the worst), where `data` is 5 % or more.
    """

    idle: float
    lengths: float
    slow_rank: float
    data: float
    rest: float
    by: str
    uneven: dict[int, float]
    data_ranks: list[int]


@dataclass(frozen=True)
class Window(Split):
    """The split of some steps in a row."""

    first_step: int
    last_step: int


@dataclass(frozen=True)
class Summary(Split):
    """The split of all windows together: fractions are ratios of sums.

    Attributes:
        micro_batches: Micro-batches of a step, on average.
        samples: Samples of a micro-batch, on average.
        ranks: The ranks, ascending.
        uneven: The ranks that stood out in more than half of the windows, of all or of the last (about
            `speed_fit.MEMORY`), with their mean factor over these.
        idle_compute: The idle fraction of compute alone, data left aside.
        idle_micro_batches: What that would be if the ranks met after every micro-batch.
        elsewhere: Share of the wall-clock time beyond the slowest rank's data and compute and the gradient exchange:
            the optimizer, callbacks, transfers; NaN where it is not known.
        elsewhere_ranks: The ranks that spend longer there than the others, by 5 % of the time or more.
        fits: Each rank's fit, of about the last `speed_fit.MEMORY` windows; empty if nothing was measured.
        reference: The fit of the typical rank.
    """

    steps: int
    micro_batches: float
    samples: float
    ranks: list[int]
    padding: float
    idle_compute: float
    idle_micro_batches: float
    elsewhere: float
    elsewhere_ranks: list[int]
    fits: dict[int, Fit]
    reference: Fit | None

    @property
    def seconds(self) -> Callable[[Array, Array], Array] | None:
        """What a micro-batch costs the typical rank, by its padded tokens and its longest sample; None if not known."""
        fit = self.reference
        return fit.seconds if self.by == "seconds" and fit is not None and fit.b > 0 else None


class CauseTracker:
    """Split idle time by its cause, window by window of so many steps; add chunks of records as they come.

    The first step ever added is left out, for it contains the start-up. Which ranks stand out: see `RankSpeeds`.
    """

    def __init__(self, window: int = 50) -> None:
        if window < 1:
            raise ValueError(f"window must be at least 1, got {window}.")
        self.window = window
        self._chunks: list[dict[str, Array]] = []
        self._buffered = 0  # steps
        self._ranks: Array | None = None
        self._speeds = RankSpeeds(0)
        self._steps = self._micro_batches = self._samples = 0
        self._compute, self._by_micro_batch = np.zeros(2), np.zeros(2)  # waiting and total, in seconds
        self._tokens = np.zeros(2)  # real and padded
        self._wall = np.zeros(2)  # wall-clock seconds, and those that pass elsewhere
        # [total, idle, lengths, slow_rank, data], in seconds or in padded tokens
        self._sums = {"seconds": np.zeros(5), "tokens": np.zeros(5)}

    def add(self, steps: Mapping[str, Array]) -> list[Window]:
        """Add records; a step's micro-batches must come in one call. Returns the windows that this completes.

        Raises `ValueError` if records have gaps or the ranks change.
        """
        chunk = {name: np.array(steps[name], dtype=np.float64) for name in COLUMNS}
        if not len(chunk["step"]):
            return []
        if self._ranks is None:
            self._ranks = np.unique(chunk["rank"])
            count = len(self._ranks)
            self._speeds = RankSpeeds(count)
            self._data, self._outside = np.zeros(count), np.zeros(count)
            later = chunk["step"] != chunk["step"][0]
            chunk = {name: column[later] for name, column in chunk.items()}
        self._chunks.append(chunk)
        self._buffered += len(step_starts(chunk["step"]))
        return self._analyse_buffer(self._buffered - self._buffered % self.window)

    def finish(self) -> list[Window]:
        """Analyse the steps that are left over, as a window of their own."""
        return self._analyse_buffer(self._buffered)

    def summary(self) -> Summary:
        """The figures over all windows so far; steps that do not fill a window yet are not in it."""
        by = "tokens" if self._sums["tokens"][0] > 0 and not self._sums["seconds"][0] > 0 else "seconds"
        parts, speeds = _fractions(self._sums[by]), self._speeds.latest
        ranks = [] if self._ranks is None else [int(rank) for rank in self._ranks]
        fits: dict[int, Fit] = {}
        if speeds is not None:
            theta, k, _ = speeds.running
            fits = {rank: _fit(of_rank, k) for rank, of_rank in zip(ranks, theta, strict=True)}
        return Summary(
            steps=self._steps,
            micro_batches=self._micro_batches / self._steps if self._steps else math.nan,
            samples=self._samples / self._micro_batches / len(ranks) if self._micro_batches else math.nan,
            ranks=ranks,
            by=by,
            uneven={ranks[index]: factor for index, factor in self._speeds.uneven().items()},
            data_ranks=_data_ranks(ranks, self._data, parts["data"]) if ranks else [],
            padding=efficiency.padding_fraction(*self._tokens),
            idle_compute=_ratio(*self._compute),
            idle_micro_batches=_ratio(*self._by_micro_batch),
            elsewhere=_ratio(*self._wall[::-1]),
            elsewhere_ranks=self._elsewhere_ranks(ranks),
            fits=fits,
            reference=None if speeds is None else _fit(speeds.reference, speeds.running.k),
            **parts,
        )

    def _analyse_buffer(self, steps: int) -> list[Window]:
        if not steps:
            return []
        rows = {name: np.concatenate([chunk[name] for chunk in self._chunks]) for name in COLUMNS}
        bounds = np.append(step_starts(rows["step"]), len(rows["step"]))
        self._buffered -= steps
        self._chunks = [{name: column[bounds[steps] :].copy() for name, column in rows.items()}]
        edges = [*bounds[: steps : self.window], bounds[steps]]
        return [
            self._analyse({name: column[start:stop] for name, column in rows.items()})
            for start, stop in zip(edges, edges[1:], strict=False)
        ]

    def _analyse(self, rows: Mapping[str, Array]) -> Window:
        assert self._ranks is not None
        table = by_step(rows)
        if not np.array_equal(table["rank"], self._ranks):
            raise ValueError(f"The ranks changed from {self._ranks.tolist()} to {table['rank'].tolist()}.")
        count = len(self._ranks)
        step, padded, longest, compute = (
            rows[name].reshape(-1, count) for name in ("step", "padded_tokens", "longest", "compute_seconds")
        )
        features = np.stack([np.ones_like(padded), padded, padded * longest], axis=2)  # [micro-batches, ranks, 3]
        self._steps += len(table["step"])
        self._micro_batches += len(padded)
        self._samples += int(rows["samples"].sum())
        self._tokens += [rows["tokens"].sum(), padded.sum()]
        uneven: dict[int, float] = {}
        if np.isfinite(compute).any():
            speeds = self._speeds.learn(features, compute)
            uneven = {int(self._ranks[i]): float(speeds.factor[i]) for i in np.flatnonzero(speeds.stands_out)}
        complete = np.isfinite(table["compute_seconds"]).all(axis=1)
        if complete.any():
            by = "seconds"
            # the fits are linear, so a step's seconds are the fit of its micro-batches' summed features
            summed = np.add.reduceat(features, step_starts(step[:, 0]), axis=0)[complete]
            compute, data, seconds = (
                table[name][complete] for name in ("compute_seconds", "data_seconds", "step_seconds")
            )
            data = np.nan_to_num(data)
            sums = _split(compute, data, seconds, summed, speeds)
            waited = data.sum(axis=0)
            self._data += waited
            self._look_elsewhere(compute + data, seconds, table["wait_seconds"][complete])
            micro = rows["compute_seconds"].reshape(-1, count)
            micro = micro[np.isfinite(micro).all(axis=1)]
            self._by_micro_batch += [_waiting(micro), micro.max(axis=1).sum()]
            self._compute += [_waiting(compute), compute.max(axis=1).sum()]
        else:
            by, tokens = "tokens", table["padded_tokens"]
            waiting = _waiting(tokens)
            sums = np.array([tokens.max(axis=1).sum(), waiting, waiting, np.nan, np.nan])
            waited = np.zeros(count)
        self._sums[by] += sums
        parts = _fractions(sums)
        return Window(
            first_step=int(table["step"][0]),
            last_step=int(table["step"][-1]),
            by=by,
            uneven=uneven,
            data_ranks=_data_ranks([int(rank) for rank in self._ranks], waited, parts["data"]),
            **parts,
        )

    def _look_elsewhere(self, busy: Array, seconds: Array, wait: Array) -> None:
        """Add the wall-clock time that is neither compute nor data nor gradient exchange; all `[steps, ranks]`."""
        known = np.isfinite(seconds).all(axis=1) & np.isfinite(wait).all(axis=1)
        busy, seconds, wait = busy[known], seconds[known], wait[known]
        # the exchange itself takes what even the last rank waits for it
        beyond = seconds.max(axis=1) - busy.max(axis=1) - wait.min(axis=1)
        self._wall += [seconds.max(axis=1).sum(), np.maximum(beyond, 0.0).sum()]
        self._outside += np.maximum(seconds - busy - wait, 0.0).sum(axis=0)

    def _elsewhere_ranks(self, ranks: list[int]) -> list[int]:
        if not self._wall[0] > 0:
            return []
        longer = self._outside - self._outside.min() > ELSEWHERE_RANK_FROM * self._wall[0]
        return [ranks[i] for i in np.flatnonzero(longer)]


def _split(compute: Array, data: Array, step: Array, features: Array, speeds: WindowSpeeds) -> Array:
    """Split the waiting of some steps by its cause, into seconds `[total, idle, lengths, slow_rank, data]`.

    A step takes the slowest rank's compute and what data add, see `efficiency.data_seconds_lost`. Noise can even out
    what the fits predict: then the predicted parts are scaled down to what was measured. `compute`, `data` and `step`
    are `[steps, ranks]`; `features` are summed over the step's micro-batches, `[steps, ranks, 3]`.
    """
    slowest = compute.max(axis=1)
    data_part = float(efficiency.data_seconds_lost(compute, data, step).sum())
    waiting = _waiting(compute)
    typical = speeds.pace * speeds.reference
    lengths = _waiting(features @ typical)
    slow_rank = 0.0
    if speeds.stands_out.any():
        per_rank = np.where(speeds.stands_out[:, None], speeds.of_window, typical)
        slow_rank = max(_waiting(np.einsum("srf,rf->sr", features, per_rank)) - lengths, 0.0)
    scale = min(1.0, waiting / max(lengths + slow_rank, TINY))
    total = float(slowest.sum()) + data_part
    return np.array([total, waiting + data_part, scale * lengths, scale * slow_rank, data_part])


def _waiting(values: Array) -> float:
    """What all ranks but the slowest wait, as a mean over ranks, summed over `[steps, ranks]`: idle x total."""
    values = np.maximum(values, 0.0)  # a fit may be negative below the lengths that it has seen
    total = float(values.max(axis=1).sum())
    return max(efficiency.idle_fraction(values), 0.0) * total if total > 0 else 0.0  # rounding can make it -1e-17


def _ratio(part: float, total: float) -> float:
    return float(part / total) if total > 0 else math.nan


def _fractions(sums: Array) -> dict[str, float]:
    idle, lengths, slow_rank, data = (_ratio(part, sums[0]) for part in sums[1:])
    rest = idle - lengths - slow_rank - data
    rest = max(rest, 0.0) if not math.isnan(rest) else math.nan
    return {"idle": idle, "lengths": lengths, "slow_rank": slow_rank, "data": data, "rest": rest}


def _data_ranks(ranks: list[int], waited: Array, fraction: float) -> list[int]:
    if not fraction >= NAMED_FROM:
        return []
    return [rank for rank, seconds in zip(ranks, waited, strict=True) if seconds >= waited.max() / 2]


def _fit(theta: Array, k: float) -> Fit:
    return Fit(float(theta[0]), float(theta[1]), k)
