"""What the findings say of a split, word for word."""

import math
import re

import numpy as np
import pytest

from helpers.lengths import heavy_tailed
from lightning_lengthpool.ordering import efficiency
from lightning_lengthpool.ordering.reference_costs import ReferenceCosts
from lightning_lengthpool.ordering.settings import PoolSettings
from lightning_lengthpool.runs.causes import Summary
from lightning_lengthpool.runs.findings import findings
from lightning_lengthpool.runs.formatting import compact_ranges
from lightning_lengthpool.runs.speed_fit import Fit
from lightning_lengthpool.simulation.simulate import simulate

SETTINGS = {"policy": "pool", "pool_size": 1000, "batch_size": 1, "num_workers": 1}
THROTTLING = "for throttling (clocks, temperature, power limit) and the host for other processes and CPU affinity"

COST = "the median rank's time for equal cost (30 % idle in all)"


def summary(ranks=4, **changes):
    parts = {"lengths": 0.0, "slow_rank": 0.0, "data": 0.0, "rest": 0.0} | {
        name: changes.pop(name) for name in ("lengths", "slow_rank", "data", "rest") if name in changes
    }
    values = {
        "steps": 1000,
        "micro_batches": 1.0,
        "samples": 1.0,
        "padding": 0.0,
        "idle_compute": 0.0,
        "idle_micro_batches": 0.0,
        "elsewhere": 0.0,
        "elsewhere_ranks": [],
        "ranks": list(range(ranks)),
        "idle": sum(value for value in parts.values() if not math.isnan(value)),
        "by": "seconds",
        "uneven": {},
        "data_ranks": [],
        "fits": {},
        "reference": Fit(0.0, 1e-4, math.inf),
    }
    return Summary(**(values | parts | changes))


def lengths_by_rank(ranks=4, samples=3000):
    return [heavy_tailed(np.random.default_rng(rank), samples, mu=6, sigma=0.5, longest=1500) for rank in range(ranks)]


def test_nothing_stands_out():
    assert findings(summary(lengths=0.021)) == ["nothing stands out: idle is 2.1 %"]
    by_tokens = summary(lengths=0.021, slow_rank=math.nan, data=math.nan, rest=math.nan, by="tokens")
    assert findings(by_tokens, lengths=lengths_by_rank(), settings=SETTINGS) == [
        "nothing stands out: idle is 2.1 % (by padded tokens; compute could not be measured)"
    ]


def test_nothing_measured():
    assert findings(summary(idle=math.nan)) == ["no step was measured"]


def test_one_rank():
    assert findings(summary(1)) == ["one rank waits for nobody"]
    first, second = findings(summary(1, data=0.3, data_ranks=[0]), settings=SETTINGS)
    assert first == "one rank waits for nobody" and second.startswith("data loading is the bottleneck on rank 0 (30 %")


def predicted(sentence):
    return float(re.search(r"about ([\d.]+) % idle \(predicted\)", sentence)[1]) / 100


def simulated_idle(lengths, policy, pool_size, batch_size=1):
    pooled = [np.concatenate(lengths)] * len(lengths)
    settings = PoolSettings(batch_size=batch_size, pool_size=pool_size, policy=policy)
    return efficiency.idle_fraction(simulate(pooled, settings, 10_000 // batch_size).padded)


def test_lengths_with_a_prediction():
    lengths = lengths_by_rank()
    (sentence,) = findings(summary(lengths=0.41), lengths=lengths, settings=SETTINGS | {"policy": "none"})
    assert sentence.startswith("lengths cause 41 % idle: stream, pool_size 300 would leave about ")
    idle = {size: simulated_idle(lengths, "stream", size) for size in (100, 300, 1000)}
    assert predicted(sentence) == pytest.approx(idle[300], abs=0.006)
    assert idle[300] + 0.02 < idle[100] and idle[300] < idle[1000] + 0.02  # so no larger one is worth it
    other = sentence.replace("idle: ", "idle: with LengthPoolDataModule, ")
    assert findings(summary(lengths=0.41), lengths=lengths) == [other]  # any other data module has no pool


def test_many_ranks_are_simulated_as_many():
    lengths = lengths_by_rank(200, 200)
    (sentence,) = findings(summary(200, lengths=0.41), lengths=lengths, settings=SETTINGS | {"policy": "none"})
    size = int(re.search(r"idle: stream, pool_size (\d+), reference_lengths would leave", sentence)[1])
    pooled = np.concatenate(lengths)
    pool = PoolSettings(pool_size=size, policy="stream", reference=ReferenceCosts({None: pooled}))
    truth, of_few = (efficiency.idle_fraction(simulate([pooled] * ranks, pool, 1000).padded) for ranks in (200, 8))
    assert predicted(sentence) == pytest.approx(truth, abs=0.015)
    assert truth > 1.5 * of_few  # which fewer ranks would not show


def test_the_policy_stays_if_it_is_about_as_good():
    lengths = lengths_by_rank()
    (sentence,) = findings(summary(lengths=0.2), lengths=lengths, settings=SETTINGS | {"pool_size": 100})
    assert sentence.startswith("lengths cause 20 % idle: pool, pool_size 1000 would leave about ")
    assert predicted(sentence) == pytest.approx(simulated_idle(lengths, "pool", 1000), abs=0.006)


def test_padding_counts_as_well():
    settings = SETTINGS | {"batch_size": 8}
    (sentence,) = findings(summary(lengths=0.06), lengths=lengths_by_rank(), settings=settings)
    assert re.fullmatch(
        r"lengths cause 6\.0 % idle: (blocks|stream), pool_size \d+ would leave about [\d.]+ % idle and [0-2]\.\d % "
        r"padding \(predicted\)",
        sentence,
    )
    (sentence,) = findings(summary(lengths=0.06), lengths=lengths_by_rank(), settings=settings | {"policy": "blocks"})
    assert "the present setting (blocks, pool_size 1000) is already near the best" in sentence


def test_batches_larger_than_the_pools_that_are_tried():
    (sentence,) = findings(summary(lengths=0.06), lengths=lengths_by_rank(), settings=SETTINGS | {"batch_size": 200})
    assert re.search("stream, pool_size (3000|10000) would leave", sentence)


def test_a_token_budget():
    settings = SETTINGS | {"policy": "stream", "batch_size": None, "max_tokens": 3000.0}
    (sentence,) = findings(summary(lengths=0.06), lengths=lengths_by_rank(), settings=settings)
    assert "the present setting (stream, pool_size 1000) is already near the best" in sentence
    (sentence,) = findings(summary(lengths=0.2), lengths=lengths_by_rank(), settings=settings | {"pool_size": 20})
    assert sentence.startswith("lengths cause 20 % idle: stream, pool_size ")


def test_raising_a_small_pool():
    (sentence,) = findings(summary(lengths=0.2), lengths=lengths_by_rank(), settings=SETTINGS | {"pool_size": 10})
    assert sentence.startswith("lengths cause 20 % idle: pool, pool_size 1000 would leave about ")


def test_a_pool_that_cannot_get_much_better():
    (sentence,) = findings(summary(lengths=0.06), lengths=lengths_by_rank(), settings=SETTINGS)
    assert sentence.startswith(
        "lengths cause 6.0 % idle: the present setting (pool, pool_size 1000) is already near the best that a "
        "pool can do here, about "
    )


def test_predictions_use_the_fit_and_sum_accumulated_micro_batches(monkeypatch):
    monkeypatch.setattr("lightning_lengthpool.runs.findings.POOL_SIZES", (10,))

    def predict(**changes):
        return predicted(findings(summary(lengths=0.4, **changes), lengths=lengths_by_rank())[0])

    plain = predict()
    assert predict(micro_batches=8.0) < 0.85 * plain
    assert predict(reference=Fit(0.3, 1e-4, math.inf)) < 0.5 * plain  # most seconds do not depend on lengths
    assert predict(reference=Fit(0.0, 1e-4, 100.0)) > 1.2 * plain
    assert predict(reference=Fit(0.3, 1e-4, math.inf), by="tokens") == plain


@pytest.mark.parametrize(
    "settings, advice",
    [
        ({}, "with LengthPoolDataModule, switch the pool on, e.g. pool_size 1000"),
        (SETTINGS | {"policy": "none"}, "switch the pool on, e.g. pool_size 1000"),
        (SETTINGS, "raise pool_size (it is 1000)"),
    ],
)
def test_lengths_without_samples(settings, advice):
    assert findings(summary(lengths=0.2), settings=settings) == [f"lengths cause 20 % idle: {advice}"]


def test_a_slow_rank_is_named_even_if_it_costs_little():
    assert findings(summary(slow_rank=0.03, uneven={3: 1.314}), hosts=["a", "a", "b", "b"]) == [
        "rank 3 on host b takes 1.31 x the median rank's time for equal cost (3.0 % idle): check its device "
        f"{THROTTLING}"
    ]


def test_slow_ranks_are_grouped_by_host():
    slow = {1: 1.2, 4: 1.3, 5: 1.5, 6: 1.4}
    assert findings(summary(8, slow_rank=0.3, uneven=slow), hosts=["a"] * 4 + ["b"] * 4) == [
        f"ranks 4-6 on host b take 1.30 to 1.50 x {COST}: check their devices {THROTTLING}",
        f"rank 1 on host a takes 1.20 x {COST}: check its device {THROTTLING}",
    ]
    (sentence,) = findings(summary(8, slow_rank=0.3, uneven=slow))
    assert sentence.startswith("ranks 1, 4-6 take 1.20 to 1.50 x")


def test_a_fast_rank_is_told_apart_from_slow_ones():
    sentences = findings(summary(slow_rank=0.1, uneven={0: 0.6, 2: 1.4}), hosts=["a", "a", "a", "b"])
    assert any("rank 2 on host a takes 1.40 x" in sentence and "throttling" in sentence for sentence in sentences)
    assert any("rank 0 on host a takes 0.60 x" in sentence and "it waits" in sentence for sentence in sentences)


def test_data():
    starved = summary(8, data=0.23, data_ranks=[0, 1, 2, 3, 7])
    assert findings(starved, settings=SETTINGS) == [
        "data loading is the bottleneck on ranks 0-3, 7 (23 % idle): use more workers (num_workers is 1), or a cheaper "
        "encoder"
    ]
    assert findings(starved)[0].endswith("(23 % idle): use more workers, or a cheaper encoder")
    assert findings(summary(8, data=0.06, data_ranks=[2]))[0].startswith(
        "waiting for data costs 6.0 % idle on rank 2: "
    )


def test_the_largest_cause_comes_first():
    everything = summary(lengths=0.1, slow_rank=0.2, data=0.15, rest=0.12, uneven={0: 1.4}, data_ranks=[1])
    starts = [
        "rank 0",
        "data loading",
        "compute that varies from step to step for equal cost causes 12 % idle",
        "lengths cause",
    ]
    for sentence, start in zip(findings(everything), starts, strict=True):
        assert sentence.startswith(start)


def test_ranks_whose_lengths_differ():
    lengths = [own * factor for own, factor in zip(lengths_by_rank(), (1, 1, 1, 2), strict=True)]
    (sentence,) = findings(summary(lengths=0.02), lengths=lengths, settings=SETTINGS)
    assert sentence.startswith("the ranks' lengths are distributed differently, which would leave 3")


def test_compact_ranges():
    assert compact_ranges([7, 0, 1, 2, 3, 9, 10]) == "0-3, 7, 9, 10"
    assert compact_ranges([]) == ""


def test_batches_are_as_large_as_they_were_where_the_data_module_does_not_say():
    lengths = [np.random.default_rng(rank).lognormal(6, 1, 3000) for rank in range(4)]
    known = findings(summary(lengths=0.4), lengths=lengths, settings={"batch_size": 8})
    assert findings(summary(lengths=0.4, samples=8.0), lengths=lengths) == known
    assert findings(summary(lengths=0.4, samples=1.0), lengths=lengths) != known


def test_time_spent_elsewhere_is_not_passed_over():
    (sentence,) = findings(summary(elsewhere=0.4, elsewhere_ranks=[1]))
    assert sentence.startswith("40 % of the time is spent outside data, compute and exchange, longest on rank 1")


def test_accumulation_that_does_not_even_out():
    (sentence,) = findings(summary(idle_compute=0.01, idle_micro_batches=0.4, micro_batches=2.0))
    assert "micro-batches differ by 40 % idle and steps by 1.0 %" in sentence


def test_pools_are_no_larger_than_a_ranks_share_of_the_data_set():
    settings = SETTINGS | {"policy": "none", "num_workers": 2}
    (free,) = findings(summary(lengths=0.2), lengths=lengths_by_rank(), settings=settings)
    (bound,) = findings(summary(lengths=0.2), lengths=lengths_by_rank(), settings=settings | {"rank_samples": 450})
    assert "stream, pool_size 300 would" in free and "stream, pool_size 100 would" in bound
    (bound,) = findings(
        summary(lengths=0.2), lengths=lengths_by_rank(), settings=settings | {"policy": "pool", "rank_samples": 450}
    )
    assert bound.endswith("(predicted); today's pools hold more than the 450 samples that fall to a rank")
