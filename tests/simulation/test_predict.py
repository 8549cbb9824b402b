"""Predictions with their intervals: against plain simulations, synthetic runs, and what the whole data would give."""

import os
from dataclasses import replace

import numpy as np
import pytest

from lightning_lengthpool.ordering import efficiency
from lightning_lengthpool.ordering.reference_costs import ReferenceCosts
from lightning_lengthpool.ordering.settings import PoolSettings
from lightning_lengthpool.runs.causes import CauseTracker
from lightning_lengthpool.runs.steps.columns import COLUMNS
from lightning_lengthpool.simulation import parallel
from lightning_lengthpool.simulation.predict import Case, Interval, Lengths, predict
from lightning_lengthpool.simulation.simulate import simulate

RNG = np.random.default_rng(0)
LENGTHS = RNG.lognormal(6, 1, 3000).round().clip(1, 4000)
FIGURES = ("idle", "padding", "useful")


def case_of(policy, pool_size, world_size, batch_size, *, accumulate=1, has_reference=False, **settings):
    settings = PoolSettings(batch_size, pool_size, policy, **settings)
    return Case(settings, world_size, accumulate, has_reference)


def seeded(case, seed):
    return replace(case, settings=replace(case.settings, seed=seed))


def one(lengths, case, **options):
    (found,) = predict(lengths, [case], **options)
    assert found.case == case
    return found


def half(interval):
    return (interval.high - interval.low) / 2


CASES = [
    case_of("none", 0, 64, 4, seed=5),
    case_of("pool", 100, 64, 3, seed=5),
    case_of("blocks", 100, 64, 4, seed=5),
    case_of("stream", 100, 64, 4, seed=5),
    case_of("stream", 100, 64, 4, has_reference=True, seed=5),
    case_of("stream", 100, 64, None, max_tokens=9000.0, seed=5),
    case_of("stream", 100, 64, 4, accumulate=2, seed=5),
]


@pytest.mark.parametrize("case", CASES)
def test_the_figures_are_those_of_a_simulation(case):
    known, settings = np.sort(LENGTHS), case.settings
    if case.has_reference:
        settings = replace(settings, reference=ReferenceCosts({None: known}))
    # whole pools: 40 steps of 3 are two pools of 100, of which 66 batches can be made
    steps = {"pool": 66, "blocks": 50}.get(settings.policy, 40 * case.accumulate)
    # ranks are simulated in parts of 32
    parts = [simulate([known] * 32, settings, steps, rng_seed=(5, first)) for first in (0, 32)]
    tokens, padded = (np.concatenate([getattr(own, name) for own in parts], axis=1) for name in ("tokens", "padded"))
    tokens, padded = (own.reshape(-1, case.accumulate, 64).sum(axis=1) for own in (tokens, padded))
    found = one(Lengths((LENGTHS,)), case, steps=40)
    assert found.idle.mean == pytest.approx(efficiency.idle_fraction(padded), rel=1e-12)
    assert found.padding.mean == pytest.approx(efficiency.padding_fraction(tokens, padded), rel=1e-12)
    assert found.useful.mean == pytest.approx(efficiency.useful_fraction(tokens, padded), rel=1e-12)
    for name in FIGURES:
        low, high = getattr(found, name)[1:]
        assert 0 <= low < getattr(found, name).mean < high <= 1


def test_smaller_worlds_are_parts_of_the_largest():
    cases = [case_of("pool", 100, ranks, 1) for ranks in (1, 2, 8, 64)]
    found = predict(Lengths((LENGTHS,)), cases, steps=200)
    parts = [simulate([np.sort(LENGTHS)] * 32, PoolSettings(1, 100), 200, rng_seed=(42, first)) for first in (0, 32)]
    tokens = np.hstack([part.padded for part in parts])
    for own, ranks in zip(found, (1, 2, 8, 64), strict=True):
        worlds = [tokens[:, first : first + ranks] for first in range(0, 64, ranks)]
        assert own.idle.mean == pytest.approx(efficiency.idle_fraction(np.vstack(worlds)))
    assert found[0].idle == Interval(0.0, 0.0, 0.0)


def test_without_a_pool_the_policy_does_not_matter():
    cases = [case_of("none", 300, 4, 2), case_of("pool", 0, 4, 2), case_of("stream", 0, 4, 2)]
    assert len({(own.idle, own.useful) for own in predict(Lengths((LENGTHS,)), cases, steps=50)}) == 1


def test_costs_and_classes_are_simulated_as_in_training():
    known = LENGTHS[:500]
    costs, classes = 1e4 / known, (known % 2).astype(int)
    lengths = Lengths((known,), costs=(costs,), classes=([("even", "odd")[number] for number in classes],))
    case = case_of("stream", 50, 64, 2, seed=1, class_shares={"odd": 0.7, "even": 0.3})
    found = one(lengths, case, steps=30)
    order = np.lexsort((costs, classes))
    options = {"classes": [classes[order]] * 32, "costs": [costs[order]] * 32}
    parts = [simulate([known[order]] * 32, case.settings, 30, rng_seed=(1, first), **options) for first in (0, 32)]
    assert found.idle.mean == pytest.approx(efficiency.idle_fraction(np.hstack([own.padded for own in parts])))
    assert found.idle.low < found.idle.mean < found.idle.high


def test_classes_have_the_shares_of_all_ranks_together():
    """Of two unlike ranks one has hardly any of a class; both must still be meant to draw it as often."""
    rng = np.random.default_rng(3)
    by_rank = tuple(rng.lognormal(6, 1, 500) for _ in range(2))
    classes = tuple((rng.random(500) < share).astype(int) for share in (0.1, 0.9))
    lengths = Lengths(by_rank, is_iid=False, classes=classes)
    share = np.concatenate(classes).mean()
    found, given, other = (
        one(lengths, case_of("stream", 50, 2, 2, class_shares=shares), steps=50)
        for shares in (None, {0: 0.5, 1: 0.5}, {0: 1 - share, 1: share})
    )
    assert found.idle == other.idle != given.idle


def test_a_class_that_does_not_occur_leaves_its_share_to_the_others():
    classes = (["a", "b"] * 300,)
    lengths = Lengths((LENGTHS[:600],), classes=classes)
    some, all_ = (
        one(lengths, case_of("stream", 50, 4, 2, class_shares=shares), steps=30)
        for shares in ({"a": 0.3, "b": 0.6, "never": 0.1}, {"a": 1 / 3, "b": 2 / 3})
    )
    assert some.idle == all_.idle


# ---- seconds


def run_of(policy, fit, rng, steps=1200):
    """Records of two ranks with planted seconds."""
    settings = PoolSettings(2, 100, policy)
    result = simulate([LENGTHS[:1500], LENGTHS[1500:]], settings, steps, rng_seed=int(rng.integers(1000)))
    a, b, k = fit
    seconds = (a + b * result.padded * (1 + result.longest / k)) * rng.lognormal(0, 0.04, result.padded.shape)
    rows = {name: np.zeros(2 * steps) for name in COLUMNS}
    rows["step"], rows["rank"] = np.repeat(np.arange(steps), 2), np.tile([0, 1], steps)
    values = {"tokens": result.tokens, "padded_tokens": result.padded, "longest": result.longest}
    for name, value in (values | {"compute_seconds": seconds, "samples": result.samples}).items():
        rows[name] = value.ravel().astype(float)
    rows["step_seconds"] = np.repeat(seconds.max(axis=1), 2)
    return rows, efficiency.idle_fraction(seconds)


@pytest.mark.parametrize("measured, other", [("none", "pool"), ("pool", "none"), ("none", "stream")])
@pytest.mark.parametrize("planted", [(0.2, 1e-4, 1500.0), (0.01, 1e-4, np.inf)], ids=["curved", "straight"])
def test_a_fit_of_one_run_predicts_the_idle_seconds_of_another(measured, other, planted):
    rng = np.random.default_rng(7)
    tracker = CauseTracker()
    tracker.add(run_of(measured, planted, rng)[0])
    tracker.finish()
    fit = tracker.summary().reference
    idle = run_of(other, planted, rng)[1]
    found = one(Lengths((LENGTHS,)), case_of(other, 100, 2, 2), seconds=fit.seconds)
    assert found.idle.mean == pytest.approx(idle, abs=0.05)
    by_tokens = one(Lengths((LENGTHS,)), case_of(other, 100, 2, 2))
    assert found.padding == by_tokens.padding and found.useful == by_tokens.useful
    if planted[0] == 0.2 and other == "none":
        assert abs(by_tokens.idle.mean - idle) > 0.02  # by tokens it would be off


# ---- intervals


def test_intervals_hold_what_the_whole_data_would_give():
    """Lengths with a limit, as those of a model are; also a check that they are not so wide as to say nothing."""
    cases = [case_of(policy, 50, 8, 2) for policy in ("none", "pool", "blocks", "stream")]
    rng = np.random.default_rng(1)
    whole = rng.lognormal(6, 0.8, 20_000).clip(50, 1500)

    def figures(known, seed):
        found = predict(Lengths((known,)), [seeded(case, seed) for case in cases], steps=150)
        return np.array([[getattr(own, name) for name in FIGURES] for own in found])

    truth = np.mean([figures(whole, 100 + seed)[..., 0] for seed in range(10)], axis=0)
    trials = np.array([figures(rng.choice(whole, 1000), seed) for seed in range(30)])
    holds = ((trials[..., 1] <= truth) & (truth <= trials[..., 2])).mean(axis=0)
    assert holds.min() > 0.7 and 0.85 < holds.mean() < 0.99
    spread = 1.645 * trials[..., 0].std(axis=0)  # what an interval should have on either side
    width = (trials[..., 2] - trials[..., 1]).mean(axis=0) / 2
    assert (width < 2 * spread)[:, [0, 2]].all()


def test_a_budgets_intervals_hold_it_too():
    case = case_of("stream", 50, 4, None, max_tokens=4000.0)
    rng = np.random.default_rng(2)
    whole = rng.lognormal(6, 0.8, 20_000).clip(50, 1500)
    truth = np.mean([one(Lengths((whole,)), seeded(case, 100 + n), steps=120).idle.mean for n in range(3)])
    found = [one(Lengths((rng.choice(whole, 300),)), seeded(case, n), steps=120).idle for n in range(8)]
    assert sum(own.low <= truth <= own.high for own in found) >= 6
    assert np.mean([half(own) for own in found]) < 3 * 1.645 * np.std([own.mean for own in found])


def test_more_lengths_and_more_steps_make_intervals_narrower():
    case = case_of("pool", 50, 8, 2)
    rng = np.random.default_rng(0)
    few, many = (Lengths((rng.lognormal(6, 1, size).clip(0, 3000),)) for size in (200, 20_000))
    assert half(one(few, case).idle) > 2 * half(one(many, case).idle)
    assert half(one(many, case, steps=50).idle) > 1.5 * half(one(many, case, steps=2000).idle)


def test_ranks_that_differ():
    """Each rank draws from its own; other ranks than those surveyed are like some of them, which is less certain."""
    scales = (1.0, 1.0, 1.0, 2.0)
    rng = np.random.default_rng(4)
    by_rank = tuple(scale * rng.lognormal(6, 0.5, 1000) for scale in scales)
    sizes = (2, 4, 8, 512)
    found = predict(Lengths(by_rank, is_iid=False), [case_of("pool", 200, n, 1) for n in sizes], steps=200)
    alike = predict(Lengths(by_rank), [case_of("pool", 200, n, 1) for n in sizes], steps=200)
    floor = 1 - np.mean(scales) / max(scales)
    assert floor < found[1].idle.mean < floor + 0.1 and alike[1].idle.mean < 0.15
    assert found[0].idle.mean < found[1].idle.mean  # of two ranks often none is the slow one
    assert floor < found[3].idle.mean
    assert half(found[2].idle) > 3 * half(found[1].idle)
    assert found[2].idle.low < found[2].idle.mean < found[2].idle.high


def test_the_same_arguments_give_the_same_figures_however_many_processes(monkeypatch):
    cases = [*CASES, replace(CASES[0], world_size=16), case_of("pool", 30, 100, 1, seed=5)]
    lengths = Lengths((LENGTHS[:600], LENGTHS[600:]), is_iid=False)
    alone, done = predict(lengths, cases, steps=20), []
    monkeypatch.setattr(parallel, "WORTH", 0.0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    assert predict(lengths, cases, steps=20, progress=done.append) == alone
    assert done == sorted(set(done)) and done[-1] == len(cases)
    assert predict(lengths, [seeded(case, 1) for case in cases], steps=20)[1].idle != alone[1].idle


@pytest.mark.parametrize(
    "lengths, change, message",
    [
        (Lengths((LENGTHS,)), {"world_size": 0}, "world_size is 0"),
        (Lengths((LENGTHS,)), {"accumulate": 0}, "accumulate is 0"),
        (Lengths((LENGTHS, np.ones(0)), is_iid=False), {}, "a rank without a sample"),
        (Lengths((np.array([1.0, -1.0]),)), {}, "lengths of rank 0"),
    ],
)
def test_wrong_arguments_are_named(lengths, change, message):
    with pytest.raises(ValueError, match=message):
        predict(lengths, [replace(case_of("pool", 100, 2, 1), **change)], steps=2)
