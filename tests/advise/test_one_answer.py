"""`advise` before a run and the findings after it answer one question in one way."""

import math

import numpy as np
import pytest

from lightning_lengthpool.advise.advice import Plan
from lightning_lengthpool.advise.advisor import advise
from lightning_lengthpool.advise.scan.length_scan import LengthScan, Stream
from lightning_lengthpool.ordering.settings import PoolSettings
from lightning_lengthpool.runs.causes import Summary
from lightning_lengthpool.runs.distribution import difference_of_ranks
from lightning_lengthpool.runs.findings import choose_setting, difference_in, findings

RANKS, WORKERS = 4, 2


def measured() -> Summary:
    return Summary(
        idle=0.4,
        lengths=0.4,
        slow_rank=math.nan,
        data=math.nan,
        rest=math.nan,
        by="tokens",
        uneven={},
        data_ranks=[],
        steps=100,
        micro_batches=1.0,
        samples=2.0,
        ranks=list(range(RANKS)),
        padding=0.3,
        idle_compute=math.nan,
        idle_micro_batches=math.nan,
        elsewhere=math.nan,
        elsewhere_ranks=[],
        fits={},
        reference=None,
    )


def lengths(factors: tuple[float, ...] = (1, 1, 1, 1)) -> list[np.ndarray]:
    return [factor * np.random.default_rng(rank).lognormal(6, 0.8, 900).round() for rank, factor in enumerate(factors)]


def scan(by_rank: list[np.ndarray], rank_samples: int) -> LengthScan:
    streams = [
        Stream(rank, worker, part, part)
        for rank, own in enumerate(by_rank)
        for worker, part in enumerate(np.split(own, WORKERS))
    ]
    return LengthScan(
        ranks=RANKS, num_workers=WORKERS, streams=tuple(streams), rank_samples=(rank_samples,) * RANKS, asked=3600
    )


@pytest.mark.parametrize(
    ("policy", "pool_size", "rank_samples"),
    [("none", 0, 450), ("none", 0, 100_000), ("pool", 1000, 450), ("pool", 100, 2000)],
)
def test_the_same_setting_is_recommended_before_a_run_and_after_it(
    policy: str, pool_size: int, rank_samples: int
) -> None:
    plan = Plan(PoolSettings(2, pool_size, policy), num_workers=WORKERS, world_size=RANKS)
    settings = {"policy": policy, "pool_size": pool_size, "batch_size": 2, "num_workers": WORKERS}
    by_rank = lengths()
    before = advise(scan(by_rank, rank_samples), plan, world_sizes=[RANKS]).recommendation
    pooled = [np.concatenate(by_rank)] * RANKS
    _, after = choose_setting(measured(), pooled, settings | {"rank_samples": rank_samples}, True)
    assert (after.case.policy, after.case.pool_size, after.case.has_reference) == (
        before.case.policy,
        before.case.pool_size,
        before.case.has_reference,
    )
    assert after.idle.mean == pytest.approx(before.prediction.idle.mean, abs=0.02)


@pytest.mark.parametrize("factors", [(1, 1, 1, 1), (1, 1, 1, 1.6)])
def test_whether_the_ranks_differ_is_asked_once(factors: tuple[float, ...]) -> None:
    by_rank, settings = lengths(factors), {"policy": "none", "pool_size": 0, "batch_size": 2}
    differs = factors[-1] != 1
    plan = Plan(PoolSettings(2, 0, "none"), num_workers=WORKERS, world_size=RANKS)
    advice = advise(scan(by_rank, 2000), plan, world_sizes=[RANKS], pool_sizes=[100])
    (check,) = [check for check in advice.checks if check.key == "ranks_alike"]
    assert (check.result == "found") == differs
    difference = difference_in(measured(), by_rank, settings)
    assert difference == difference_of_ranks([2 * own for own in by_rank]) and difference.is_sure == differs
    sentences = findings(measured(), lengths=by_rank, settings=settings)
    assert any("distributed differently" in sentence for sentence in sentences) == differs
