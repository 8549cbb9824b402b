"""The split of idle time by cause, on records whose causes are planted."""

import dataclasses
import json
import math
import pickle

import numpy as np
import pytest

from helpers.lengths import heavy_tailed
from lightning_lengthpool.ordering import efficiency
from lightning_lengthpool.runs.causes import CauseTracker
from lightning_lengthpool.runs.distribution import difference_of_ranks, floor_of, neighbour_correlation
from lightning_lengthpool.runs.speed_fit import MEMORY, Fit
from lightning_lengthpool.runs.steps.columns import COLUMNS
from lightning_lengthpool.runs.steps.records import by_step

PARTS = ("lengths", "slow_rank", "data", "rest")


def records(lengths, compute, data=0.0, step_seconds=None):
    """Records of batches of one sample: `lengths` and `compute` are `[steps, ranks]` or `[steps, micros, ranks]`."""
    lengths, compute = (values.reshape(len(values), -1, values.shape[-1]) for values in (lengths, compute))
    steps, micro_batches, ranks = compute.shape
    data = np.asarray(data).reshape(-1, 1, ranks) if np.ndim(data) else data
    data = np.broadcast_to(data, compute.shape)
    if step_seconds is None:
        step_seconds = np.nanmax(compute + np.nan_to_num(data), axis=2, keepdims=True)
    columns = {
        "step": np.arange(steps).reshape(-1, 1, 1),
        "rank": np.arange(ranks),
        "samples": 1.0,
        "tokens": lengths,
        "longest": lengths,
        "padded_tokens": lengths,
        "misses": 0.0,
        "data_seconds": data,
        "compute_seconds": compute,
        "wait_seconds": np.nan,
        "step_seconds": step_seconds,
    }
    return {name: np.broadcast_to(columns[name], compute.shape).astype(float).ravel() for name in COLUMNS}


def noisy(rng, seconds, noise=0.03, outliers=0.01):
    """Multiplicative noise, and now and then a micro-batch that takes five times as long."""
    seconds = seconds * (1 + noise * rng.standard_normal(seconds.shape))
    return np.where(rng.random(seconds.shape) < outliers, 5 * seconds, seconds)


def track(steps, window=50):
    tracker = CauseTracker(window)
    windows = tracker.add(steps) + tracker.finish()
    return windows, tracker.summary()


def named(summary):
    return {part for part in PARTS if getattr(summary, part) >= 0.05}


def waiting(values):
    return (values.max(axis=1) - values.mean(axis=1)).sum()


def assert_split_close(summary, compute, data, reference, own, within=0.02):
    """Hold a summary against its definition: noise-free `reference` and `own` seconds, all `[steps, ranks]`."""
    total = (compute + data).max(axis=1).sum()
    expected = {
        "idle": (total - compute.mean(axis=1).sum()) / total,
        "lengths": waiting(reference) / total,
        "slow_rank": (waiting(own) - waiting(reference)) / total,
        "data": (total - compute.max(axis=1).sum()) / total,
    }
    expected["rest"] = expected["idle"] - sum(expected[part] for part in PARTS[:3])
    for part, value in expected.items():
        assert getattr(summary, part) == pytest.approx(value, abs=within), part
    assert summary.idle == pytest.approx(expected["idle"], abs=1e-12)


def test_100_000_records_give_back_the_parameters_and_the_split():
    rng = np.random.default_rng(0)
    a = np.array([0.020, 0.021, 0.026, 0.0195])
    b = np.array([1.0, 0.98, 1.3, 1.01]) * 1e-4
    lengths = heavy_tailed(rng, 25_000, 4)
    clean = a + b * lengths
    compute = noisy(rng, clean, noise=0.04)
    data = np.zeros_like(compute)
    data[:, 1] = np.where(rng.random(25_000) < 0.2, 0.3, 0.0)
    _, summary = track(records(lengths, compute, data))
    for rank in range(4):
        assert summary.fits[rank].a == pytest.approx(a[rank], rel=0.05)
        assert summary.fits[rank].b == pytest.approx(b[rank], rel=0.05)
    assert summary.reference.a == pytest.approx(0.0202, rel=0.05)
    assert summary.reference.b == pytest.approx(1e-4, rel=0.05)
    assert summary.reference.k == math.inf
    assert summary.uneven == {2: pytest.approx(1.3, rel=0.03)}
    assert summary.data_ranks == [1]
    normal = 0.0202 + 0.9967e-4 * lengths
    own = np.where([False, False, True, False], clean, normal)
    assert_split_close(summary, compute[1:], data[1:], normal[1:], own[1:])
    assert summary.steps == 24_999 and summary.micro_batches == 1


@pytest.mark.parametrize("k", [300.0, 3_000.0, 20_000.0])
def test_quadratic_attention_is_recovered(k):
    rng = np.random.default_rng(1)
    lengths = heavy_tailed(rng, 2_000, 4)
    clean = 0.02 + 1e-4 * lengths * (1 + lengths / k)
    compute = noisy(rng, clean, noise=0.04)
    _, summary = track(records(lengths, compute))
    assert summary.reference.k == pytest.approx(k, rel=0.15)
    assert summary.reference.a == pytest.approx(0.02, rel=0.05)
    assert summary.reference.b == pytest.approx(1e-4, rel=0.1)
    np.testing.assert_allclose(summary.reference.seconds(lengths, lengths), clean, rtol=0.05)
    assert_split_close(summary, compute[1:], 0 * compute[1:], clean[1:], clean[1:])


def test_a_fit_predicts_seconds():
    assert Fit(1.0, 0.5, math.inf).seconds([0, 8], [0, 4]).tolist() == [1, 5]
    assert Fit(1.0, 0.5, 4.0).seconds(8, 4) == 9


@pytest.mark.parametrize("ranks", [2, 4])
class TestPlanted:
    """Each cause is found where it was planted, and nowhere else."""

    def steps(self, ranks, synchronised=True):
        rng = np.random.default_rng(ranks)
        lengths = heavy_tailed(rng, 600, ranks)
        if synchronised:
            lengths = lengths[:, :1].repeat(ranks, axis=1)
        return rng, lengths

    def test_lengths(self, ranks):
        rng, lengths = self.steps(ranks, synchronised=False)
        _, summary = track(records(lengths, noisy(rng, 0.02 + 1e-4 * lengths, outliers=0)))
        assert named(summary) == {"lengths"} and summary.uneven == {} and summary.data_ranks == []

    @pytest.mark.parametrize("slow", ["a", "b"])
    def test_a_slow_rank(self, ranks, slow):
        rng, lengths = self.steps(ranks)
        factor = np.ones(ranks)
        factor[-1] = {"a": 5.0, "b": 1.5}[slow]
        clean = 0.02 * factor + 1e-4 * lengths if slow == "a" else 0.02 + 1e-4 * factor * lengths
        windows, summary = track(records(lengths, noisy(rng, clean, outliers=0)))
        assert named(summary) == {"slow_rank"} and summary.data_ranks == []
        assert summary.uneven == {ranks - 1: pytest.approx(clean[1:, -1].mean() / clean[1:, 0].mean(), rel=0.05)}
        assert all(list(window.uneven) == [ranks - 1] for window in windows)

    def test_data(self, ranks):
        rng, lengths = self.steps(ranks)
        data = np.zeros(lengths.shape)
        data[:, -1] = 0.1
        _, summary = track(records(lengths, noisy(rng, 0.02 + 1e-4 * lengths, outliers=0), data))
        assert named(summary) == {"data"} and summary.uneven == {} and summary.data_ranks == [ranks - 1]

    @pytest.mark.parametrize("seed", range(5))
    def test_heavy_noise_is_nobodys_fault(self, ranks, seed):
        rng = np.random.default_rng(100 + seed)
        _, lengths = self.steps(ranks)
        compute = (0.02 + 1e-4 * lengths) * rng.lognormal(0, 0.3, lengths.shape)
        _, summary = track(records(lengths, compute))
        assert named(summary) == {"rest"} and summary.uneven == {} and summary.data_ranks == []

    def test_constant_lengths_can_still_tell_a_slow_rank(self, ranks):
        rng, lengths = self.steps(ranks)
        factor = np.ones(ranks)
        factor[0] = 1.3
        _, summary = track(records(np.full_like(lengths, 700.0), noisy(rng, 0.09 * factor * np.ones_like(lengths))))
        assert list(summary.uneven) == [0] and summary.uneven[0] == pytest.approx(1.3, rel=0.02)
        assert summary.reference.seconds(700, 700) == pytest.approx(0.09, rel=0.02)


def test_accumulated_micro_batches_are_fitted_apart_and_compared_by_step():
    rng = np.random.default_rng(3)
    lengths = heavy_tailed(rng, 600, 3, 4)
    clean = (0.02 + 1e-4 * lengths) * np.array([1, 1, 1.25, 1])
    compute = noisy(rng, clean)
    steps = records(lengths, compute)
    _, summary = track(steps)
    assert summary.micro_batches == 3 and summary.steps == 599
    assert summary.reference.a == pytest.approx(0.02, rel=0.05)
    assert summary.idle == pytest.approx(efficiency.idle_fraction(by_step(steps)["compute_seconds"][1:]))
    assert list(summary.uneven) == [2]
    normal = (0.02 + 1e-4 * lengths).sum(axis=1)[1:]
    summed = compute.sum(axis=1)[1:]
    assert_split_close(summary, summed, 0 * summed, normal, clean.sum(axis=1)[1:])


def test_a_rank_that_becomes_slow_is_seen_within_the_memory():
    rng = np.random.default_rng(4)
    before, after, window = 20, 3 * MEMORY, 20
    lengths = heavy_tailed(rng, 1 + (before + after) * window, 4)
    clean = 0.02 + 1e-4 * lengths
    clean[1 + before * window :, 1] *= 1.5
    windows, summary = track(records(lengths, noisy(rng, clean)), window)
    assert all(window.uneven == {} for window in windows[:before])
    assert all(list(window.uneven) == [1] for window in windows[before + MEMORY // 2 :])
    # both regimes count by their windows: after MEMORY of them, exp(-1) of the MEMORY windows before is left
    new, old = 1 - math.exp(-1), (1 - math.exp(-1)) * math.exp(-1)
    assert windows[before + MEMORY - 1].uneven[1] == pytest.approx((1.5 * new + old) / (new + old), rel=0.02)
    assert windows[-1].uneven[1] == pytest.approx(1.5, rel=0.05)  # of what was before, exp(-3) is left
    assert list(summary.uneven) == [1]


def test_a_rank_that_turned_slow_late_is_named():
    rng = np.random.default_rng(18)
    window, late = 20, 2 * MEMORY
    lengths = heavy_tailed(rng, 1 + 6 * late * window, 4)
    clean = 0.02 + 1e-4 * lengths
    clean[-late * window :, 3] *= 1.6
    _, summary = track(records(lengths, noisy(rng, clean)), window)
    assert list(summary.uneven) == [3]


def test_a_rank_that_is_slow_for_a_while_is_the_cause_in_that_while():
    rng = np.random.default_rng(20)
    lengths = heavy_tailed(rng, 3001, 8)
    clean = np.tile(0.02 + 1e-4 * lengths, 1)
    clean[1501:2401, 3] *= 1.4
    windows, _ = track(records(lengths, noisy(rng, clean, outliers=0)))
    slow = windows[31:48]  # the first of them is not yet sure
    assert all(list(window.uneven) == [3] for window in slow)
    assert all(3 not in window.uneven for window in (*windows[:30], *windows[48:]))
    reference = 0.02 + 1e-4 * lengths
    for window in slow:
        rows = slice(window.first_step, window.last_step + 1)
        expected = (waiting(clean[rows]) - waiting(reference[rows])) / clean[rows].max(axis=1).sum()
        assert window.slow_rank == pytest.approx(expected, abs=0.02)
        assert window.rest < 0.03


def test_a_rank_that_is_fast_waits_because_of_it():
    rng = np.random.default_rng(19)
    lengths = heavy_tailed(rng, 801, 1).repeat(4, axis=1)
    clean = (0.02 + 1e-4 * lengths) * np.array([1, 0.6, 1, 1])
    _, summary = track(records(lengths, noisy(rng, clean, outliers=0)))
    assert named(summary) == {"slow_rank"}
    assert summary.uneven == {1: pytest.approx(0.6, rel=0.03)}


def test_a_burst_on_one_rank_in_one_window_is_not_named():
    rng = np.random.default_rng(5)
    lengths = heavy_tailed(rng, 501, 4)
    compute = noisy(rng, 0.02 + 1e-4 * lengths)
    compute[201:246, 2] *= 4
    windows, summary = track(records(lengths, compute))
    assert summary.uneven == {}
    assert all(window.uneven == {} for i, window in enumerate(windows) if i != 4)


def test_many_outliers_do_not_bias_the_fit():
    rng = np.random.default_rng(17)
    lengths = heavy_tailed(rng, 1001, 4)
    clean = 0.02 + 1e-4 * lengths
    _, summary = track(records(lengths, noisy(rng, clean, noise=0.2, outliers=0.15)))
    assert (summary.reference.seconds(lengths, lengths) / clean).mean() == pytest.approx(1, abs=0.04)


def test_few_noisy_steps_name_nobody():
    for seed in range(30):
        rng = np.random.default_rng(seed)
        lengths = np.full((51, 4), 700.0)
        windows, _ = track(records(lengths, 0.09 * rng.lognormal(0, 0.5, lengths.shape)))
        assert windows[0].uneven == {}


def test_too_few_steps_name_nobody():
    lengths = heavy_tailed(np.random.default_rng(6), 16, 2)
    windows, summary = track(records(lengths, 1e-4 * lengths * [1, 2]))
    assert len(windows) == 1 and windows[0].uneven == summary.uneven == {}
    assert summary.fits[1].b == pytest.approx(2e-4, rel=1e-3)


def test_chunks_of_any_size_give_the_same():
    rng = np.random.default_rng(7)
    lengths = heavy_tailed(rng, 121, 2, 3)
    steps = records(
        lengths, noisy(rng, 0.02 + 1e-4 * lengths), data=rng.random((121, 1, 3)).repeat(2, 1).reshape(-1, 3)[::2]
    )
    steps["step"] = steps["step"] * 3 + 5  # steps may be missing
    rows = 2 * 3
    results = []
    for size in (1, 7, 121):
        tracker = CauseTracker(window=20)
        windows = []
        for start in range(0, 121, size):
            windows += tracker.add({n: column[start * rows : (start + size) * rows] for n, column in steps.items()})
        assert len(windows) == 6 and tracker.finish() == []
        results.append((windows, tracker.summary()))
    assert results[0] == results[1] == results[2]
    assert (windows[0].first_step, windows[-1].last_step) == (8, 365)


def test_what_is_left_over_is_a_window_and_parts_sum_to_idle():
    rng = np.random.default_rng(8)
    lengths = heavy_tailed(rng, 108, 3)
    data = rng.exponential(0.05, lengths.shape)
    compute = noisy(rng, (0.02 + 1e-4 * lengths) * [1, 1, 1.3], noise=0.2)
    windows, summary = track(records(lengths, compute, data))
    assert [window.last_step - window.first_step + 1 for window in windows] == [50, 50, 7]
    for split in (*windows, summary):
        parts = [getattr(split, part) for part in PARTS]
        assert min(parts) >= 0 and sum(parts) == pytest.approx(split.idle, abs=1e-12) and split.by == "seconds"


def test_predicted_parts_never_exceed_what_was_measured():
    lengths = heavy_tailed(np.random.default_rng(9), 151, 2)
    compute = 0.02 + 1e-4 * lengths
    compute[102::2] = compute[102::2].mean(axis=1, keepdims=True)  # ranks that the fits expect to wait, but do not
    windows, _ = track(records(lengths, compute))
    assert windows[0].idle == pytest.approx(windows[0].lengths, rel=1e-6)
    assert 0 < windows[2].idle == pytest.approx(windows[2].lengths, rel=1e-12)  # scaled down
    assert windows[2].rest == pytest.approx(0, abs=1e-12)


def test_data_is_at_most_what_the_step_took_beyond_compute():
    compute = np.array([[1.0, 2.0]] * 61)
    lengths = np.ones_like(compute)
    # fetching overlapped with compute that was still running on the device
    _, summary = track(records(lengths, compute, data=np.array([[3.0, 0.0]] * 61), step_seconds=np.float64(2.5)))
    assert summary.data == pytest.approx(0.5 / 2.5) and summary.idle == pytest.approx((2.5 - 1.5) / 2.5)
    _, summary = track(records(lengths, compute, data=np.array([[3.0, np.nan]] * 61), step_seconds=np.float64(np.nan)))
    assert summary.data == pytest.approx(2.0 / 4.0)  # max(1 + 3, 2 + 0) - 2


def test_steps_whose_compute_is_absent_are_left_out():
    rng = np.random.default_rng(10)
    lengths = heavy_tailed(rng, 301, 3)
    compute = noisy(rng, (0.02 + 1e-4 * lengths) * [1, 1, 1.3])
    compute[rng.random(301) < 0.2, 1] = np.nan
    compute[201:251] = np.nan
    windows, summary = track(records(lengths, compute, step_seconds=np.float64(9)))
    measured = compute[1:][np.isfinite(compute[1:]).all(axis=1)]
    assert summary.by == "seconds" and summary.steps == 300 and list(summary.uneven) == [2]
    assert summary.idle == pytest.approx(efficiency.idle_fraction(measured))
    assert [window.by for window in windows] == ["seconds"] * 4 + ["tokens", "seconds"]
    assert windows[4].idle == windows[4].lengths == pytest.approx(efficiency.idle_fraction(lengths[201:251]))
    assert math.isnan(windows[4].slow_rank) and math.isnan(windows[4].data) and math.isnan(windows[4].rest)


@pytest.mark.parametrize("absent", [[0, 1], [1]])
def test_without_any_compute_idle_is_by_tokens(absent):
    lengths = heavy_tailed(np.random.default_rng(11), 101, 2)
    compute = 1e-4 * lengths
    compute[:, absent] = np.nan
    _, summary = track(records(lengths, compute, step_seconds=np.float64(9)))
    assert summary.by == "tokens" and summary.uneven == {} and summary.data_ranks == []
    assert summary.idle == summary.lengths == pytest.approx(efficiency.idle_fraction(lengths[1:]))
    assert math.isnan(summary.data)


def test_one_rank_waits_only_for_data():
    lengths = heavy_tailed(np.random.default_rng(12), 101, 1)
    _, summary = track(records(lengths, np.full((101, 1), 3.0), data=np.full((101, 1), 1.0)))
    assert summary.idle == summary.data == pytest.approx(0.25)
    assert summary.lengths == summary.slow_rank == summary.rest == 0 and summary.data_ranks == [0]


def test_nothing_seen():
    tracker = CauseTracker()
    assert tracker.add({name: np.empty(0) for name in COLUMNS}) == tracker.finish() == []
    assert math.isnan(tracker.summary().idle) and tracker.summary().reference is None
    tracker.add(records(np.ones((1, 2)), np.ones((1, 2))))  # the first step, with the start-up
    assert tracker.finish() == [] and tracker.summary().steps == 0 and tracker.summary().ranks == [0, 1]


def test_memory_does_not_grow_with_the_steps():
    rng = np.random.default_rng(13)
    lengths = heavy_tailed(rng, 1 + 1000 * 4, 4)
    steps = records(lengths, noisy(rng, 0.02 + 1e-4 * lengths))
    tracker, sizes = CauseTracker(window=4), {}
    for window in range(1000):
        rows = slice((window * 4 + (window > 0)) * 4, (window * 4 + 5) * 4)
        assert len(tracker.add({name: column[rows] for name, column in steps.items()})) == 1
        sizes[window] = len(pickle.dumps(tracker))
    assert sizes[999] == pytest.approx(sizes[9], rel=0.01)


def test_a_summary_is_ready_for_json():
    lengths = heavy_tailed(np.random.default_rng(14), 101, 2)
    windows, summary = track(records(lengths, 1e-4 * lengths * [1, 2]))
    content = json.loads(json.dumps([dataclasses.asdict(item) for item in (*windows, summary)]))
    assert content[-1]["uneven"] == {"1": pytest.approx(2)} and content[-1]["reference"]["b"] == pytest.approx(1e-4)


def test_wrong_input_is_refused():
    with pytest.raises(ValueError, match="window must be at least 1, got 0"):
        CauseTracker(window=0)
    tracker = CauseTracker(window=1)
    tracker.add(records(np.ones((2, 2)), np.ones((2, 2))))
    with pytest.raises(ValueError, match="The ranks changed"):
        tracker.add(records(np.ones((2, 3)), np.ones((2, 3))))


def test_ranks_of_other_lengths_leave_a_floor_that_chance_does_not():
    rng = np.random.default_rng(15)
    assert floor_of([[1.0, 3.0], [2.0, 1.0]]) == pytest.approx(1 - (1 + 2.5) / (1 + 3))
    lengths = heavy_tailed(rng, 2000, 4)
    same = difference_of_ranks([*lengths.T])
    assert not same.is_sure and abs(same.excess) < 0.02
    other = difference_of_ranks([*(lengths * [1, 1, 1, 2]).T])
    assert other.is_sure and other.excess == pytest.approx(other.floor - other.chance)
    assert other.floor == pytest.approx(1 - (5 / 4) / 2, abs=0.02)  # the other three are half of the largest


def test_neighbour_correlation_is_that_of_pearson():
    rng = np.random.default_rng(16)
    values = np.convolve(rng.standard_normal(500), np.ones(3), "valid")
    correlation = neighbour_correlation(values, max_lag=5)
    expected = [np.corrcoef(values[:-lag], values[lag:])[0, 1] for lag in range(1, 6)]
    np.testing.assert_allclose(correlation, expected)
    assert correlation[0] > 0.5
    assert np.isnan(neighbour_correlation(np.ones(9))).all()
    assert np.isnan(neighbour_correlation([1.0, 2.0, 4.0, 3.0], 4)).tolist() == [False, False, True, True]


@pytest.mark.parametrize("pace", ["throttled", "drift", "warm-up", "alternating"])
def test_what_all_ranks_do_together_names_nobody(pace):
    rng = np.random.default_rng(21)
    lengths = heavy_tailed(rng, 1501, 4)
    step = np.arange(1501)[:, None]
    factor = {
        "throttled": np.where(step > 500, 1.4, 1.0),
        "drift": 1 + 0.6 * step / 1500,
        "warm-up": np.maximum(3 - step / 200, 1),
        "alternating": np.where(step // 100 % 2, 1.3, 1.0),
    }[pace]
    windows, summary = track(records(lengths, noisy(rng, (0.02 + 1e-4 * lengths) * factor)))
    assert summary.uneven == {} and not any(window.uneven for window in windows)
    assert named(summary) == {"lengths"}


def test_the_factor_is_that_of_the_slow_windows_alone():
    rng = np.random.default_rng(22)
    lengths = heavy_tailed(rng, 3001, 4)
    clean = 0.02 + 1e-4 * lengths
    step = np.arange(3001)
    clean[(step > 0) & (step % 500 < 350), 1] *= 1.5  # and as fast as the others in three windows of ten
    _, summary = track(records(lengths, noisy(rng, clean)))
    assert summary.uneven == {1: pytest.approx(1.5, rel=0.15)}


def test_time_outside_compute_and_data_and_the_rank_that_spends_it():
    rng = np.random.default_rng(23)
    lengths = heavy_tailed(rng, 201, 4)
    compute = np.full(lengths.shape, 0.06)
    steps = records(lengths, compute, 0.01, step_seconds=np.full((201, 1, 4), 0.10))
    steps["wait_seconds"] = np.tile([0.025, 0.005, 0.025, 0.025], 201)
    _, summary = track(steps)
    assert summary.elsewhere == pytest.approx((0.10 - 0.07 - 0.005) / 0.10)
    assert summary.elsewhere_ranks == [1]
    assert math.isnan(track(records(lengths, compute))[1].elsewhere)  # the waiting is not known


def test_what_idle_would_be_by_micro_batch():
    compute = np.full((101, 2, 2), 0.01)
    compute[:, 0, 0] = compute[:, 1, 1] = 0.05
    _, summary = track(records(np.full(compute.shape, 100.0), compute))
    assert summary.idle == pytest.approx(0) and summary.idle_micro_batches == pytest.approx(0.4)
    assert summary.samples == 1
