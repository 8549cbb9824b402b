"""The advisor on planted data: what it says of it, and what it recommends."""

import json
import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import yaml

from helpers.advising import OFF, POOL, case_of, changed_case, changed_plan, scanned
from helpers.advising import advise_quickly as advise
from helpers.lengths import heavy_tailed as heavy
from lightning_lengthpool.advise.advice import Causes, Plan
from lightning_lengthpool.advise.checks.check import CheckContext
from lightning_lengthpool.advise.checks.checks import CHECKS
from lightning_lengthpool.advise.choice import Choice, recommend, yaml_lines
from lightning_lengthpool.advise.facts import (
    bound,
    cost_of,
    describe,
    expected_longest,
    outliers,
    relate,
)
from lightning_lengthpool.advise.scan.length_scan import BatchCheck, LengthScan, Stream
from lightning_lengthpool.cost_models import PackedCost, QuadraticCost
from lightning_lengthpool.ordering.efficiency import idle_fraction
from lightning_lengthpool.ordering.settings import PoolSettings, PoolWarmup
from lightning_lengthpool.runs.distribution import difference_of_ranks, drift_of
from lightning_lengthpool.runs.formatting import setting
from lightning_lengthpool.runs.run import load_run
from lightning_lengthpool.runs.steps.columns import COLUMNS
from lightning_lengthpool.runs.steps.steps_file import StepsFile
from lightning_lengthpool.simulation.choose import Chooser, batch_samples, waste
from lightning_lengthpool.simulation.predict import Interval, Prediction

SIZES = (100, 1000, 3000)


def equal(rng, count):
    return rng.normal(1000, 4, count).round()


def changed(scan, change):
    """The same with the lengths of each stream changed."""
    streams = []
    for stream in scan.streams:
        lengths = change(stream, stream.lengths)
        streams.append(replace(stream, lengths=lengths, costs=lengths))
    return replace(scan, streams=tuple(streams))


def predicted(idle, padding=0.0, case=POOL.case, width=0.01):
    useful = (1 - idle) * (1 - padding)
    spread = (Interval(value, max(0, value - width / 2), value + width / 2) for value in (idle, padding, useful))
    return Prediction(case, *spread)


def checks(scan, plan=POOL, *, idle=0.05, without=0.5, width=0.01, machine_bytes=None):
    """The checks by their key, without a simulation."""
    batch = batch_samples(scan.costs, plan.settings.batch_size, plan.settings.max_tokens)
    context = CheckContext(
        scan=scan,
        plan=plan,
        today=predicted(idle, width=width),
        baselines=[predicted(without, case=case_of("none", 0, plan.world_size, plan.settings.slot_size))],
        cost=cost_of(plan.case, plan, scan, batch),
        relation=relate(plan, scan, batch, plan.case),
        difference=difference_of_ranks(scan.costs_by_rank()),
        machine_bytes=machine_bytes,
    )
    found = CHECKS.make(context)
    for check in found:
        assert check.title and (check.result == "found") == bool(check.action)
        assert check.sentence or check.result == "passed"
    return {check.key: check for check in found}


# ---- checks


@pytest.mark.parametrize("draw", [heavy, equal], ids=["heavy", "equal"])
@pytest.mark.parametrize("seed", range(8))
def test_no_false_alarm_on_clean_data(draw, seed):
    plan = changed_plan(POOL, max_length=("model.max_length", 16_000), workers_by_rank=(2,) * 8)
    found = checks(scanned(draw, seed=seed), plan, machine_bytes=64 * 10**9)
    assert [check.key for check in found.values() if check.result == "found"] == []
    assert [check.key for check in found.values() if check.result == "not made"] == ["within_budget"]


@pytest.mark.parametrize("seed", range(20))
def test_no_false_alarm_of_streams_of_few_samples(seed):
    scan = scanned(ranks=64, samples=40, seed=seed)
    assert not difference_of_ranks(scan.costs_by_rank()).is_sure
    found = drift_of([stream.lengths for stream in scan.streams], 1000)
    assert found.size < 0.05 or found.deviations < 4


def test_the_pool_is_off():
    found = checks(scanned(), OFF)
    assert found["pool_on"].result == "found" and "policy is 'none'" in found["pool_on"].sentence
    assert "pool_size is 0" in checks(scanned(), changed_plan(OFF, policy="stream"))["pool_on"].sentence
    for key in ("pool_over_batch", "pool_in_share", "memory"):
        assert found[key].result == "not made" and found[key].sentence == "there is no pool"


def test_a_pool_of_few_batches():
    found = checks(scanned(), changed_plan(POOL, pool_size=39, batch_size=4))["pool_over_batch"]
    assert found.result == "found" and "40 to 400" in found.action
    assert checks(scanned(), changed_plan(POOL, pool_size=40, batch_size=4))["pool_over_batch"].result == "passed"


def test_a_token_budget_counts_the_batches_that_it_makes():
    scan = scanned(lambda rng, count: np.full(count, 100.0))
    plan = changed_plan(POOL, policy="stream", batch_size=None, max_tokens=5000.0, pool_size=400)
    found = checks(scan, plan)["pool_over_batch"]
    assert found.result == "found" and "holds 8 batches" in found.sentence and "500 to 5,000" in found.action


def test_pools_larger_than_what_falls_to_a_rank():
    found = checks(scanned(rank_samples=(1999, *(2500,) * 7)))["pool_in_share"]
    assert found.result == "found" and "2,000 samples, but only 1,999" in found.sentence and "999 or" in found.action
    assert checks(scanned(rank_samples=(2000,) * 8))["pool_in_share"].result == "passed"
    assert checks(scanned(rank_samples=None))["pool_in_share"].result == "not made"


def test_lengths_that_are_nearly_equal():
    found = checks(scanned(equal), without=0.019)["lengths_differ"]
    assert found.result == "found" and "only 1.9 %" in found.sentence and "not worth it" in found.action
    assert checks(scanned(), without=0.021)["lengths_differ"].result == "passed"
    assert checks(scanned(), changed_plan(POOL, world_size=1), without=0.0)["lengths_differ"].result == "not made"


@pytest.mark.parametrize("seed", range(5))
def test_ranks_whose_lengths_are_distributed_differently(seed):
    scan = changed(scanned(seed=seed), lambda stream, lengths: lengths * (1.5 if stream.rank == 3 else 1.0))
    found = checks(scan)["ranks_alike"]
    assert found.result == "found" and "no pool can go below" in found.sentence
    # the others wait for the longer third of the work of rank 3
    floor = float(found.sentence.split("no pool can go below about ")[1].split(" %")[0]) / 100
    assert floor == pytest.approx(1 - (7 + 1.5) / 8 / 1.5, abs=0.07)


def test_a_source_that_only_some_ranks_read():
    rng = np.random.default_rng(0)
    scan = changed(scanned(), lambda stream, own: rng.permutation(own) if stream.rank % 2 else own / 4)
    assert checks(scan)["ranks_alike"].result == "found"


def test_a_token_budget_evens_out_what_unlike_ranks_cost():
    scan = changed(scanned(samples=100, ranks=4), lambda stream, own: own * (3.0 if stream.rank == 3 else 1.0))
    plan = changed_plan(POOL, policy="stream", batch_size=None, max_tokens=150_000.0, world_size=4)
    found = checks(scan, plan)["ranks_alike"]
    assert found.result == "found" and "max_tokens lets their batches cost about the same" in found.sentence
    advice, _ = recommended(scan, plan, sizes=(1000,))
    assert advice.bottleneck.floor == 0 and advice.bottleneck.speed_up_pool == advice.bottleneck.speed_up_any
    assert advice.today.idle.mean < 0.2  # with a fixed batch size it is over half
    assert not any("fix that first" in reason for reason in advice.recommendation.reasons)


def test_ranks_cannot_be_compared():
    assert checks(scanned(ranks=1), changed_plan(POOL, world_size=1))["ranks_alike"].sentence == "there is one rank"
    few = checks(scanned(samples=5))["ranks_alike"]
    assert few.result == "not made" and "too few" in few.sentence


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["sorted", "grows", "shards"])
def test_lengths_that_change_along_the_streams(kind, seed):
    def change(stream, lengths):
        if kind == "sorted":
            return np.sort(lengths)[:: -1 if stream.rank % 2 else 1]
        if kind == "grows":
            return lengths * np.linspace(1, 2, len(lengths))
        rng = np.random.default_rng([seed, stream.rank, stream.worker])
        return lengths * np.repeat(rng.lognormal(0, 0.5, 4), len(lengths) // 4)

    scan = changed(scanned(samples=400, seed=seed), change)
    found = checks(scan, changed_plan(POOL, pool_size=100))["no_drift"]
    assert found.result == "found" and "shuffle" in found.action
    assert checks(replace(scan, has_ranks=False), POOL)["no_drift"].result == "not made"


def test_neighbours_that_are_alike_are_no_drift_for_a_pool_that_sees_many_of_them():
    # groups of five samples in a row are of one length, but a pool of 500 sees a hundred groups
    scan = scanned(lambda rng, count: np.repeat(heavy(rng, count // 5), 5), samples=2000)
    assert checks(scan, changed_plan(POOL, pool_size=500))["no_drift"].result == "passed"


def test_unequal_counts():
    found = checks(scanned(rank_samples=(50_000, 40_000, *(50_000,) * 6)))["equal_counts"]
    assert found.result == "found" and "40,000 to 50,000" in found.sentence and "on rank 1" in found.sentence
    assert checks(scanned(rank_samples=(50_000, *(49_999,) * 7)))["equal_counts"].result == "passed"
    assert checks(scanned(rank_samples=None))["equal_counts"].result == "not made"


def test_num_workers_that_differ_between_ranks():
    found = checks(scanned(), changed_plan(POOL, workers_by_rank=(2, 2, 4, 2, 2, 2, 2, 1)))["equal_workers"]
    assert found.result == "found" and "not on ranks 2, 7 (1, 2, 4)" in found.sentence
    assert checks(scanned(), changed_plan(POOL, workers_by_rank=(2,) * 8))["equal_workers"].result == "passed"
    assert checks(scanned(), POOL)["equal_workers"].result == "not made"


def test_a_length_function_that_disagrees_with_the_batches():
    good, off = BatchCheck("a/1", 1000, 1015, "input_ids"), BatchCheck("a/7", 1000, 1400, "attention_mask")
    found = checks(scanned(batch_checks=(good, off, good)))["tokens_agree"]
    assert found.result == "found" and "in 1 of 3 batches" in found.sentence
    for part in ("1000 tokens", "attention_mask says 1400", "'a/7'"):
        assert part in found.sentence
    assert checks(scanned(batch_checks=(good,)))["tokens_agree"].result == "passed"
    assert checks(scanned(batch_checks=(BatchCheck("b", 5, 7, "tokens"),)))["tokens_agree"].result == "passed"
    assert checks(scanned(batch_checks=()))["tokens_agree"].result == "not made"


def test_samples_over_the_models_limit():
    scan = scanned(lambda rng, count: np.where(np.arange(count) < 3, 5000.0, 800.0))
    found = checks(scan, changed_plan(POOL, max_length=("model.max_length", 4096)))["within_limit"]
    assert found.result == "found" and "48 of 4,800 samples (1.0 %)" in found.sentence
    assert "model.max_length, 4,096" in found.sentence and "longest has 5,000" in found.sentence
    passed = checks(scan, changed_plan(POOL, max_length=("model.max_length", 5000)))["within_limit"]
    assert passed.result == "passed"
    assert "--max_length" in checks(scan)["within_limit"].sentence


def test_samples_over_the_budget_and_samples_that_fail():
    plan = changed_plan(POOL, policy="stream", max_tokens=4096.0)
    scan = scanned(lambda rng, count: rng.uniform(100, 4000, count).round())
    found = checks(replace(scan, over_budget=7, failed=2, failed_key="'a/3': no picture"), plan)
    assert found["within_budget"].result == "found" and found["within_budget"].sentence.startswith("7 samples alone")
    assert found["no_failures"].result == "found" and "'a/3'" in found["no_failures"].sentence
    assert checks(scan, plan)["within_budget"].result == checks(scan, plan)["no_failures"].result == "passed"
    alone = scanned(lambda rng, count: np.where(np.arange(count) == 7, 5000.0, 800.0), ranks=1, workers=1)
    found = checks(alone, changed_plan(plan, world_size=1))["within_budget"]  # nobody counted them
    assert found.result == "found" and found.sentence.startswith("1 sample alone costs more than max_tokens, 4,096")


def test_samples_that_cannot_be_brought_back():
    found = checks(scanned(restore_seconds=None))["restorable"]
    assert found.result == "found" and "loses what its pools held" in found.sentence and "@stateless" in found.action
    assert checks(scanned())["restorable"].result == "passed"
    assert checks(scanned(restore_seconds=None, is_complete=False))["restorable"].result == "not made"
    assert checks(scanned(restore_seconds=None), OFF)["restorable"].sentence == "there is no pool"


def test_memory_over_what_the_machine_has():
    plan = changed_plan(POOL, ranks_per_node=4)  # 4 ranks x 2 workers x 1,000 samples x 40 kB
    found = checks(scanned(), plan, machine_bytes=600_000_000)["memory"]
    assert found.result == "found" and "320 MB for 4 ranks of 2 workers," in found.sentence
    assert "600 MB" in found.sentence and "preencode_sample" in found.action
    assert checks(scanned(), plan, machine_bytes=650_000_000)["memory"].result == "passed"
    assert checks(scanned(), plan)["memory"].result == "not made"
    unknown = checks(scanned(sample_bytes=None), plan, machine_bytes=1)["memory"]
    assert unknown.result == "not made" and "not measured" in unknown.sentence


def test_reading_that_stopped_early_and_few_samples():
    found = checks(scanned(asked=9000, is_complete=False), idle=0.3, width=0.13)
    assert "4,800 of 9,000 samples" in found["read_to_the_end"].sentence
    assert found["enough_samples"].result == "found" and "within 6.5 points" in found["enough_samples"].sentence
    few = checks(scanned(ranks=1, workers=1, samples=39), changed_plan(POOL, world_size=1))["enough_samples"]
    assert few.result == "found" and "39" in few.sentence


# ---- facts


def test_the_distribution_in_numbers_and_words():
    found = describe(np.arange(1.0, 102.0), 8, 1)
    assert found.count == 101 and found.mean == 51
    assert found.cv == pytest.approx(math.sqrt((101**2 - 1) / 12) / 51)
    assert found.percentiles == {5: 6, 25: 26, 50: 51, 75: 76, 90: 91, 95: 96, 99: 100, 100: 101}
    assert found.counts.sum() == 101 and found.edges[0] == 1 and found.edges[-1] == 101
    assert (np.diff(found.edges) > 0).all() and len(found.edges) == len(found.counts) + 1


@pytest.mark.parametrize(
    ("sigma", "word"), [(0.01, "no"), (0.15, "low"), (0.5, "moderate"), (1.0, "high")], ids=lambda value: str(value)
)
def test_variance_in_words(sigma, word):
    lengths = np.random.default_rng(0).lognormal(6, sigma, 20_000)
    found = describe(lengths, 8, 1)
    assert found.variance == word and found.counts.sum() == len(lengths)


@pytest.mark.parametrize(
    "lengths", [[5.0], [5.0] * 300, [0.0] * 200, [0.0, 3.0] * 100], ids=["one", "same", "0", "two"]
)
def test_a_distribution_without_a_spread(lengths):
    found = describe(np.array(lengths), 8, 1)
    assert found.counts.sum() == len(lengths) and (np.diff(found.edges) > 0).all()


def test_the_expected_longest_and_what_outliers_do_are_those_of_a_long_simulation():
    rng = np.random.default_rng(0)
    lengths = heavy(rng, 1000)
    drawn = rng.choice(lengths, (100_000, 8, 2))
    assert expected_longest(np.sort(lengths), 16) == pytest.approx(drawn.max(axis=(1, 2)).mean(), rel=0.01)
    found = outliers(lengths, 0.05, 8, 2)
    assert found.above == np.sort(lengths)[949]
    assert found.idle == pytest.approx(idle_fraction(drawn.max(axis=2)), abs=0.005)
    assert found.of_steps == pytest.approx((drawn.max(axis=(1, 2)) > found.above).mean(), abs=0.01)
    rest = rng.choice(np.sort(lengths)[:950], (100_000, 8, 2)).max(axis=2)
    assert found.idle_without == pytest.approx(idle_fraction(rest), abs=0.005)
    waiting, less = ((own.max(axis=1) - own.mean(axis=1)).mean() for own in (drawn.max(axis=2), rest))
    assert found.of_waiting == pytest.approx(1 - less / waiting, abs=0.01)


def test_outliers_dominate_only_where_there_are_some():
    rng = np.random.default_rng(0)
    body = rng.uniform(900, 1100, 5000)
    assert describe(np.where(rng.random(5000) < 0.02, 20_000, body), 8, 1).dominates
    assert not describe(body, 8, 1).dominates
    assert describe(body, 1, 1).outliers == ()


def test_costs_of_a_pool_that_is_handed_out_and_of_one_that_stays_full():
    scan = scanned()
    plan = changed_plan(POOL, batch_size=4, ranks_per_node=4)
    pool = cost_of(plan.case, plan, scan, 4)
    assert pool.pool_samples == 1000 and pool.worker_bytes == 1000 * 40_000
    assert pool.rank_bytes == 2 * pool.worker_bytes and pool.node_bytes == 4 * pool.rank_bytes
    assert pool.first_batch_seconds == pytest.approx(1000 * 0.004) and pool.stall_seconds == 0
    assert pool.batch_seconds == pytest.approx(4 * 0.004 / 2)
    assert pool.restore_seconds == pytest.approx(1000 * 0.003 + 1000 * 0.004)
    stream = cost_of(changed_case(plan.case, policy="stream", pool_size=1002), plan, scan, 4)
    assert stream.pool_samples == 1000 and stream.worker_bytes == 1000 * 40_000 + 4 * 1000 * 8
    off = cost_of(case_of("none", 0, 8, 4), plan, scan, 4)
    assert off.pool_samples == 0 and off.worker_bytes == 0 and off.restore_seconds == 0
    warm = cost_of(plan.case, changed_plan(plan, warmup=PoolWarmup(100, 5)), scan, 4)
    assert warm.first_batch_seconds == pytest.approx(0.4)
    decoded = cost_of(plan.case, plan, scanned(batch_seconds=0.1), 4)  # most of it after the pool
    assert decoded.batch_seconds == pytest.approx(0.05)
    assert decoded.first_batch_seconds == pytest.approx(996 * 0.004 + 0.1)
    main = cost_of(plan.case, changed_plan(plan, num_workers=0), scan, 4)
    assert main.rank_bytes == main.worker_bytes
    unknown = cost_of(plan.case, plan, scanned(sample_bytes=None, encode_seconds=None, restore_seconds=None), 4)
    assert (unknown.rank_bytes, unknown.first_batch_seconds, unknown.restore_seconds) == (None, None, None)


def test_the_relation_of_pool_batch_and_workers():
    found = relate(
        changed_plan(POOL, batch_size=4), scanned(), 4, changed_case(POOL.case, policy="stream", pool_size=3000)
    )
    assert found.batches_per_pool == 250 and found.rank_samples == 2000 and found.rank_share == 50_000
    text = "; ".join(found.sentences)
    for part in ("holds 250 batches", "each of the 2 workers", "holds 2,000 samples", "hold 4.0 % of them", "3,000"):
        assert part in text
    assert "not full before an epoch is over" in "; ".join(
        relate(POOL, scanned(rank_samples=(1500,) * 8), 1, POOL.case).sentences
    )


def test_the_bottleneck_from_the_lengths_alone():
    best = predicted(0.06, case=case_of("stream", 1000, 8, 1))
    found = bound(predicted(0.5, 0.2), best, "change", 0.25, None, "padded tokens")
    assert (found.speed_up_any, found.speed_up_pool, found.speed_up_useful) == (2.0, 1.5, 2.5)
    text = "; ".join(found.sentences)
    for part in (
        "50 % idle",
        "at most 2 x",
        "any pool leaves about 25 % idle",
        "at most 1.5 x",
        "2.5 x",
        "2.35 x",
        "predicted",
    ):
        assert part in text
    one = predicted(0.0, case=replace(POOL.case, world_size=1))
    alone = bound(one, one, "no pool", 0.0, None, "padded tokens")
    assert alone.sentences[0].startswith("one rank waits for nobody")


# ---- a measured run


def measured(folder, *, slow=1.0, data=0.0, lengths=heavy, steps=200, ranks=4):
    """Records of a run with batch size 1: a rank's seconds are 0.01 + 1e-4 a token, rank 2's `slow` times as long."""
    rng = np.random.default_rng(0)
    longest = lengths(rng, steps * ranks).reshape(steps, ranks)
    compute = (0.01 + 1e-4 * longest) * np.where(np.arange(ranks) == 2, slow, 1.0) * rng.normal(1, 0.01, longest.shape)
    waits = np.full(longest.shape, data)
    wall = (compute + waits).max(axis=1, keepdims=True)
    step, rank = np.indices(longest.shape)
    columns = {
        "step": step,
        "rank": rank,
        "samples": np.ones_like(longest),
        "tokens": longest,
        "longest": longest,
        "padded_tokens": longest,
        "data_seconds": waits,
        "compute_seconds": compute,
        "wait_seconds": wall - compute - waits,
        "step_seconds": np.broadcast_to(wall, longest.shape),
    }
    file = StepsFile(folder / "steps.csv")
    file.start(0)
    file.append({name: np.asarray(columns.get(name, np.zeros_like(longest)), float).ravel() for name in COLUMNS})
    return load_run(folder)


@pytest.mark.parametrize(
    ("changes", "said", "unsaid"),
    [
        ({}, ["that part a pool can save"], ["data loading", "slower"]),
        ({"data": 0.3}, ["data loading is the bottleneck, and the pool will not help that"], ["some ranks are slower"]),
        ({"slow": 2.0}, ["some ranks are slower than the others", "the pool will not help"], ["data loading"]),
        ({"slow": 2.0, "lengths": equal}, ["some ranks are slower", "lengths were hardly"], ["data loading"]),
        ({"lengths": equal}, ["lengths were hardly a cause"], ["can save", "data loading", "slower"]),
    ],
    ids=["lengths", "data", "slow_rank", "slow_rank_alone", "nothing"],
)
def test_the_causes_of_a_run_say_whether_a_pool_will_help(tmp_path, changes, said, unsaid):
    run = measured(tmp_path, **changes)
    advice = advise(scanned(ranks=4), changed_plan(POOL, world_size=4), world_sizes=[4], pool_sizes=[1000], run=run)
    text = "; ".join(advice.bottleneck.sentences)
    check_parts_agree(advice)
    assert [part for part in said if part not in text] == []
    assert [part for part in unsaid if part in text] == []
    mend = [reason for reason in advice.recommendation.reasons if "than to lengths: fix that first" in reason]
    assert len(mend) == ("data" in changes or {"slow", "lengths"} <= set(changes))
    causes = advice.bottleneck.run
    assert causes.steps == 199 and causes.by == "seconds"
    assert causes.idle == pytest.approx(causes.lengths + causes.slow_rank + causes.data + causes.rest)
    assert advice.basis.startswith("seconds, by a fit of the run")


def test_idle_is_predicted_in_the_seconds_of_the_run(tmp_path):
    # nine tenths of a batch's time do not depend on its tokens
    def flat(rng, count):
        return heavy(rng, count) / 10

    run = measured(tmp_path, lengths=flat)
    scan, plan = scanned(flat, ranks=4), changed_plan(OFF, world_size=4)
    by_seconds = advise(scan, plan, world_sizes=[4], pool_sizes=[1000], run=run).today.idle.mean
    by_tokens = advise(scan, plan, world_sizes=[4], pool_sizes=[1000]).today.idle.mean
    seconds = 0.01 + 1e-4 * np.random.default_rng(1).choice(scan.lengths, (100_000, 4))
    assert by_seconds == pytest.approx(idle_fraction(seconds), abs=0.03) and by_seconds < by_tokens - 0.1


def test_a_run_without_measured_compute_is_no_cost_model(tmp_path):
    run = measured(tmp_path)
    text = (tmp_path / "steps.csv").read_text().splitlines()
    place = text[0].split(",").index("compute_seconds")
    rows = [line.split(",") for line in text[1:]]
    for row in rows:
        row[place] = ""
    (tmp_path / "steps.csv").write_text("\n".join([text[0], *(",".join(row) for row in rows)]) + "\n")
    run = load_run(tmp_path)
    advice = advise(scanned(ranks=4), changed_plan(POOL, world_size=4), world_sizes=[4], pool_sizes=[1000], run=run)
    assert advice.basis == "padded tokens" and advice.bottleneck.run.by == "tokens"
    assert "compute could not be measured" in "; ".join(advice.bottleneck.sentences)


# ---- the recommendation


def check_parts_agree(advice):
    """One verdict in all sections; and a choice that is not the best row of its table says why."""
    found, here = advice.recommendation, advice.plan.world_size
    text = "; ".join(advice.bottleneck.sentences)
    assert ("the recommended setting" in text) <= (found.verdict == "change")
    assert ("would not have made it faster" in text) <= (found.verdict != "change")
    assert (found.verdict == "keep") == (found.case == advice.today.case and not advice.plan.is_off)
    assert bool(found.yaml) == (found.verdict == "change" or (found.verdict == "no pool" and not advice.plan.is_off))
    rows = [row for row in advice.predictions if row.case.world_size == here and not row.case.settings.is_off]
    least = min(rows, key=waste, default=found.prediction)
    if found.verdict != "no pool" and waste(found.prediction) - waste(least) > 0.001:
        assert setting(least.case) in found.not_best and found.not_best in found.reasons
        assert "within" in found.not_best or "memory" in found.not_best or "share" in found.not_best
    elif waste(found.prediction) <= waste(least):
        assert not found.not_best


def recommended(scan, plan, *, sizes=SIZES, **options):
    advice = advise(scan, plan, world_sizes=[plan.world_size], pool_sizes=sizes, **options)
    found = advice.recommendation
    assert found.prediction.case == found.case and found.reasons
    assert any("(predicted)" in reason for reason in found.reasons)
    check_parts_agree(advice)
    if found.yaml:
        pasted = yaml.safe_load(found.yaml)
        assert list(pasted) == ["data"] and list(pasted["data"]) == ["init_args"]
        settings = {"policy", "pool_size", "reference_lengths", "pool_warmup", "max_tokens"}
        assert pasted["data"]["init_args"] and set(pasted["data"]["init_args"]) <= settings
        return advice, pasted["data"]["init_args"]
    return advice, {}


@pytest.mark.parametrize(("lengths", "verdict"), [(0.01, "keep"), (0.05, "change")])
def test_a_run_of_todays_settings_that_lost_little_to_lengths_keeps_them(lengths, verdict):
    larger = changed_case(POOL.case, pool_size=3000)
    today, better = predicted(0.06), predicted(0.02, case=larger)
    baseline = predicted(0.5, case=POOL.without_pool(np.ones(1)))
    costs = {row.case: cost_of(row.case, POOL, scanned(), 1) for row in (today, better, baseline)}
    run = Causes("run", 100, "seconds", 0.1, lengths, 0.0, 0.0, 0.1)
    choice = Choice(POOL, Chooser(today, baseline), [today, better], costs, None, run)
    found = recommend(choice)
    assert (choice.verdict, found.verdict, found.case == larger) == (verdict, verdict, verdict == "change")
    text = "; ".join(bound(today, choice.best, choice.verdict, 0.0, run, "seconds").sentences)
    assert ("would not have made it faster" in text) == (verdict == "keep")
    assert ("of today's settings lost only 1.0 % to lengths" in found.not_best) == (verdict == "keep")


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("world_size", [8, 64])
def test_heavy_tailed_lengths_want_a_pool(world_size, batch_size):
    scan = scanned(ranks=world_size, samples=4800 // world_size // 2)
    advice, lines = recommended(scan, changed_plan(OFF, world_size=world_size, batch_size=batch_size))
    found = advice.recommendation
    assert found.verdict == "change" and lines["pool_size"] >= 1000 and lines["policy"] in ("pool", "stream")
    assert waste(advice.today) > 0.6 and waste(found.prediction) < 0.15
    if batch_size > 1:
        assert lines["policy"] == "stream" and any("random batches" in reason for reason in found.reasons)
    least = min(waste(other) for other in advice.predictions if other.case.world_size == world_size)
    assert waste(found.prediction) < least + 0.07


def test_padding_alone_is_worth_a_policy_that_saves_it():
    advice, lines = recommended(scanned(), changed_plan(POOL, batch_size=4))
    assert lines["policy"] == "stream" and waste(advice.today) > 0.4


def test_nearly_equal_lengths_are_not_worth_a_pool():
    advice, lines = recommended(scanned(equal), OFF)
    assert advice.recommendation.verdict == "no pool" and lines == {}
    assert "lengths are nearly equal" in advice.recommendation.sentence
    advice, lines = recommended(scanned(equal), POOL)
    assert advice.recommendation.verdict == "no pool" and lines == {"policy": "none"}
    assert "leave it as it is" in advice.recommendation.sentence


def test_a_good_setting_stays():
    plan = changed_plan(POOL, policy="stream", pool_size=3000, has_reference=True)
    advice, lines = recommended(scanned(), plan)
    assert advice.recommendation.verdict == "keep" and lines == {} and len(advice.costs) == 1
    assert advice.recommendation.sentence.startswith("change nothing")
    scan = scanned(rank_samples=(100_000,) * 8)
    advice, lines = recommended(scan, changed_plan(plan, pool_size=30_000), sizes=(*SIZES, 30_000))
    assert advice.recommendation.verdict == "keep"
    assert any("pool_size 3000 would do about as well" in reason for reason in advice.recommendation.reasons)


def test_one_rank_wants_a_pool_for_padding_alone():
    advice, lines = recommended(scanned(ranks=1, samples=2000), changed_plan(OFF, world_size=1))
    assert advice.recommendation.verdict == "no pool" and "one rank waits for nobody" in advice.recommendation.sentence
    assert lines == {}
    advice, lines = recommended(scanned(ranks=1, samples=2000), changed_plan(OFF, world_size=1, batch_size=4))
    assert lines["policy"] in ("blocks", "stream") and "reference_lengths" not in lines


def test_unlike_ranks_are_named_and_get_no_reference():
    scan = changed(scanned(), lambda stream, lengths: lengths * (3.0 if stream.rank == 3 else 1.0))
    advice, lines = recommended(scan, OFF)
    assert not any(found.case.has_reference for found in advice.predictions)
    assert "reference_lengths" not in lines
    assert any("fix that first" in reason for reason in advice.recommendation.reasons)
    floor = 1 - (7 + 3) / 8 / 3
    assert advice.bottleneck.floor == pytest.approx(floor, abs=0.05)
    # no policy gets below it, beyond what a scan of some samples leaves open
    assert min(found.idle.mean for found in advice.predictions) > floor - 0.05


def test_a_smaller_pool_is_not_praised_for_what_no_pool_can_mend():
    scan = changed(scanned(), lambda stream, lengths: lengths * (3.0 if stream.rank == 3 else 1.0))
    advice, _ = recommended(scan, POOL)
    assert advice.recommendation.verdict == "keep"
    assert not any("would do about as well" in reason for reason in advice.recommendation.reasons)


def test_memory_limits_the_pool():
    scan, plan = scanned(sample_bytes=5e6), changed_plan(POOL, batch_size=4, ranks_per_node=8)
    advice, lines = recommended(scan, plan, machine_bytes=32 * 10**9)
    case = advice.recommendation.case
    assert case.pool_size < 1000 and advice.costs[1].node_bytes <= 16e9 < advice.costs[0].node_bytes
    assert any("today's pools take 80,000 MB" in reason for reason in advice.recommendation.reasons)
    assert any("takes more memory than there is" in reason for reason in advice.recommendation.reasons)


def test_no_room_for_any_pool():
    advice, lines = recommended(scanned(sample_bytes=5e9), POOL, machine_bytes=64 * 10**9)
    assert lines == {"policy": "none"} and "no room" in advice.recommendation.sentence


def test_a_pool_is_not_larger_than_what_falls_to_a_rank():
    advice, lines = recommended(scanned(rank_samples=(2500,) * 8), OFF)
    assert lines["pool_size"] <= 1250
    advice, lines = recommended(scanned(rank_samples=(150,) * 8), OFF)  # less than any size of the sweep
    assert lines["pool_size"] <= 75
    plan = changed_plan(POOL, policy="stream", pool_size=3000)
    advice, lines = recommended(scanned(rank_samples=(5000,) * 8), plan)  # as good as it gets, but too large
    assert lines["pool_size"] <= 2500
    assert any("hold more samples than fall to a rank" in reason for reason in advice.recommendation.reasons)


def test_a_token_budget_stays_with_stream():
    scan = scanned(samples=100)
    plan = Plan(PoolSettings(None, 100, "stream", max_tokens=32_000.0), num_workers=2, world_size=4)
    advice, lines = recommended(scan, plan, sizes=(100, 1000))
    assert {found.case.settings.policy for found in advice.predictions} == {"none", "stream"}
    assert lines["pool_size"] == 1000 and "policy" not in lines
    assert advice.relation.batch_samples == pytest.approx(
        batch_samples(scan.costs, plan.settings.batch_size, plan.settings.max_tokens)
    )
    baseline = next(found for found in advice.predictions if found.case.settings.policy == "none")
    assert baseline.case.settings.batch_size == 32_000 // int(scan.lengths.max())


def test_classes_stay_with_stream():
    rng = np.random.default_rng(0)
    scan = scanned()
    streams = [replace(s, classes=tuple(rng.choice(["packed", "single"], len(s.lengths)))) for s in scan.streams]
    plan = changed_plan(POOL, policy="stream", pool_size=100, class_shares={"packed": 0.5, "single": 0.5})
    advice, lines = recommended(replace(scan, streams=tuple(streams)), plan)
    assert {found.case.settings.policy for found in advice.predictions} == {"none", "stream"}
    assert lines["pool_size"] >= 1000 and "policy" not in lines


def test_the_shares_of_the_classes_are_those_of_the_plan():
    scan = scanned(ranks=2, samples=50)
    labels = tuple("ab"[number % 2] for number in range(50))
    scan = replace(scan, streams=tuple(replace(stream, classes=labels) for stream in scan.streams))
    shares = {"a": 0.2, "b": 0.3, "c": 0.5}  # not all classes need have been read
    plan = changed_plan(POOL, policy="stream", pool_size=100, world_size=2, class_shares=shares)
    advice, _ = recommended(scan, plan, sizes=(100,))
    assert all(row.case.settings.class_shares == shares for row in advice.predictions if row.case.policy == "stream")


def test_a_warmup_goes_with_pool_and_blocks_only():
    plan = changed_plan(POOL, warmup=PoolWarmup(100, 5))
    case = changed_case(plan.case, policy="stream")
    assert yaml.safe_load(yaml_lines(plan, case))["data"]["init_args"] == {"policy": "stream", "pool_warmup": None}
    more = yaml_lines(plan, changed_case(plan.case, pool_size=3000))
    assert yaml.safe_load(more)["data"]["init_args"] == {"pool_size": 3000}


@pytest.mark.parametrize("folder", ["runs/advise", "/a b", "runs: 1", "#1", 'say "ä"'])
@pytest.mark.parametrize("budget", [4096.0, 2_000_000.0, 1500.5])
def test_lines_to_paste_have_any_path_and_number(folder, budget):
    plan = Plan(
        PoolSettings(None, policy="stream", max_tokens=budget),
        is_known=False,
        has_pool=False,
        lengths_file=f"{folder}/lengths.csv",
    )
    case = case_of("stream", 1000, 8, None, max_tokens=budget, has_reference=True)
    assert yaml.safe_load(yaml_lines(plan, case))["data"]["init_args"] == {
        "policy": "stream",
        "pool_size": 1000,
        "reference_lengths": f"{folder}/lengths.csv",
        "max_tokens": budget,
    }


def test_packs_of_one_length_wait_for_what_they_cost():
    scan = scanned(lambda rng, count: np.full(count, 4096.0))
    rng = np.random.default_rng(0)
    streams = tuple(replace(s, costs=s.lengths * rng.lognormal(0, 0.4, len(s.lengths))) for s in scan.streams)
    scan, plan = replace(scan, streams=streams), changed_plan(OFF, cost=PackedCost(k=1000))
    advice, lines = recommended(scan, plan)
    drawn = np.random.default_rng(0).choice(scan.costs, (100_000, 8))
    assert advice.today.idle.mean == pytest.approx(idle_fraction(drawn), abs=0.03)
    assert advice.recommendation.verdict == "change" and lines["pool_size"] >= 100
    advice, _ = recommended(scan, changed_plan(plan, batch_size=4), sizes=(100,))
    assert "as expensive as its most expensive one" in advice.basis


def test_a_cost_that_lengths_do_not_tell_gets_no_reference():
    scan = scanned()
    rng = np.random.default_rng(0)
    streams = tuple(replace(s, costs=s.lengths * rng.uniform(1, 2, len(s.lengths))) for s in scan.streams)
    plan = changed_plan(OFF, cost=PackedCost(k=1000))
    advice, _ = recommended(replace(scan, streams=streams), plan, sizes=(1000,))
    assert not any(found.case.has_reference for found in advice.predictions)
    assert advice.basis == "the costs of PackedCost(k=1000.0, field='cu_lengths')"
    streams = tuple(replace(s, costs=s.lengths + s.lengths**2 / 1000) for s in scan.streams)
    plan = changed_plan(plan, cost=QuadraticCost(k=1000))
    advice, _ = recommended(replace(scan, streams=streams), plan, sizes=(1000,))
    assert any(found.case.has_reference for found in advice.predictions)
    assert advice.basis == "the costs of QuadraticCost(k=1000.0)"
    drawn = np.random.default_rng(0).choice(scan.lengths, (100_000, 8))
    assert advice.today.idle.mean == pytest.approx(idle_fraction(drawn + drawn**2 / 1000), abs=0.03)


# ---- all of it


@pytest.fixture(scope="module")
def advice():
    done = []
    scan = scanned()
    made = advise(
        scan,
        changed_plan(POOL, batch_size=4, pool_size=100),
        world_sizes=[8, 16],
        pool_sizes=[2, 1000],
        machine_bytes=64 * 10**9,
        progress=lambda number, total: done.append((number, total)),
    )
    assert done[-1] == (len(made.predictions),) * 2
    return made


def test_the_sweep_has_each_policy_pool_size_and_world_size_once(advice):
    cases = [found.case for found in advice.predictions]
    assert len(set(cases)) == len(cases)
    assert {(c.settings.policy, c.settings.pool_size) for c in cases if c.world_size == 16} == {
        ("none", 0),
        *((policy, size) for policy in ("pool", "blocks", "stream") for size in (100, 1000)),
    }
    assert {c.settings.pool_size for c in cases if c.has_reference} == {100, 1000}
    assert {c.world_size for c in cases if c.has_reference} == {8}
    assert advice.today.case == case_of("pool", 100, 8, 4)
    for found in advice.predictions:
        for value in (found.idle, found.padding, found.useful):
            assert 0 <= value.low <= value.mean <= value.high <= 1


def test_every_section_is_there(advice):
    assert advice.pool[0].startswith("the pool is active: policy pool, pool_size 100; batch_size 4")
    assert advice.distribution.count == 4800 and advice.distribution.variance == "high"
    assert [cost.case for cost in advice.costs] == [advice.today.case, advice.recommendation.case]
    assert advice.relation.batches_per_pool == 25
    assert advice.bottleneck.idle == advice.today.idle and advice.bottleneck.run is None
    assert len(advice.checks) == 16
    assert advice.recommendation.verdict == "change"


def test_json_has_all_of_it_in_plain_values(advice):
    plain = advice.as_json()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert list(plain) == [
        "plan",
        "pool",
        "distribution",
        "basis",
        "today",
        "predictions",
        "costs",
        "relation",
        "bottleneck",
        "checks",
        "recommendation",
    ]
    first = plain["predictions"][0]
    assert list(first) == ["case", "idle", "padding", "useful"] and list(first["idle"]) == ["mean", "low", "high"]
    assert first["case"]["pool_size"] == 100 and first["idle"]["mean"] == advice.predictions[0].idle.mean
    assert sum(plain["distribution"]["counts"]) == 4800 and plain["distribution"]["percentiles"]["50"] > 0
    nothing = replace(advice, today=replace(advice.today, idle=Interval(math.nan, math.nan, math.inf))).as_json()
    assert nothing["today"]["idle"] == {"mean": None, "low": None, "high": None}


def test_lengths_alone():
    lengths = heavy(np.random.default_rng(0), 2000)
    scan = LengthScan(ranks=1, num_workers=0, streams=(Stream(0, 0, lengths, lengths),), has_ranks=False, asked=2000)
    plan = Plan(PoolSettings(1, 0, "none"), world_size=8, is_known=False)
    advice, lines = recommended(scan, plan, sizes=(1000,))
    assert {"policy", "pool_size"} <= set(lines)
    assert advice.pool[0].startswith("lengths alone")
    found = {check.key: check.result for check in advice.checks}
    assert {found[key] for key in ("pool_on", "ranks_alike", "no_drift", "equal_counts", "memory")} == {"not made"}


def test_lengths_alone_with_a_token_budget():
    lengths = heavy(np.random.default_rng(0), 1000)
    scan = LengthScan(ranks=1, num_workers=0, streams=(Stream(0, 0, lengths, lengths),), has_ranks=False, asked=1000)
    plan = Plan(PoolSettings(None, policy="stream", max_tokens=40_000.0), world_size=4, is_known=False, has_pool=False)
    advice, lines = recommended(scan, plan, sizes=(300,))
    assert advice.today.case == case_of("none", 0, 4, 40_000 // int(lengths.max()))
    assert {"policy": "stream", "pool_size": 300, "max_tokens": 40_000} == {
        name: value for name, value in lines.items() if name != "reference_lengths"
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [({"world_sizes": [8, 0]}, "world_sizes has 0"), ({"world_sizes": [8], "pool_sizes": [-1]}, "pool_sizes has -1")],
    ids=["world_sizes", "pool_sizes"],
)
def test_wrong_numbers_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        advise(scanned(), POOL, **options)


def test_nothing_was_read():
    with pytest.raises(ValueError, match="no length was read"):
        advise(replace(scanned(), streams=()), POOL, world_sizes=[8])
    with pytest.raises(ValueError, match="all 4,800 lengths are 0"):
        advise(changed(scanned(), lambda stream, lengths: 0 * lengths), POOL, world_sizes=[8])


def test_the_advisor_needs_no_torch_energon_or_lightning():
    code = (
        "import sys\n"
        "for name in ('torch', 'lightning', 'megatron', 'torchmetrics'): sys.modules[name] = None\n"
        "import lightning_lengthpool.advise.advisor, lightning_lengthpool.advise.output"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
