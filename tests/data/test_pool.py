"""What a pool is set to, and how the first pools grow."""

from typing import Any

import pytest

from helpers.lengths import lognormal
from helpers.pools import CONFIG, batches, pooled
from lightning_lengthpool.cost_models import CostModel, QuadraticCost
from lightning_lengthpool.ordering.policies import ORDERS
from lightning_lengthpool.ordering.reference_costs import ReferenceCosts
from lightning_lengthpool.ordering.reference_lengths import read_reference_lengths, with_reference
from lightning_lengthpool.ordering.settings import PoolSettings, PoolWarmup


def a_class(sample: Any) -> str:
    return "a"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": "pools"}, "policy is 'pools', expected one of: none, pool, blocks, stream"),
        ({"length_fn": 3}, "length_fn is 3, expected a callable that takes an encoded sample and gives its length"),
        ({"cost": "quadratic"}, "cost is 'quadratic', expected a cost model"),
        ({"policy": "stream", "max_tokens": 0}, "max_tokens is 0, expected a finite number above 0"),
        ({"policy": "stream", "max_tokens": "8k"}, "max_tokens is '8k', expected a finite number above 0"),
        (
            {"policy": "blocks", "max_tokens": 8},
            "max_tokens is 8 with policy 'blocks'.*expected policy 'stream'.*unequal",
        ),
        (
            {"policy": "stream", "pool_size": 0, "max_tokens": 8},
            "max_tokens is 8 .*pool_size 0, expected policy 'stream'",
        ),
        ({"reference": ReferenceCosts({None: [1]})}, "reference_lengths is set with policy 'pool'"),
        ({"class_fn": a_class, "class_shares": {"a": 1}}, "class_shares is .*with policy 'pool'"),
        ({"policy": "stream", "class_fn": a_class}, "class_fn and class_shares go together"),
        ({"over_budget": "skip"}, "over_budget is 'skip', expected one of: error, alone, drop"),
        ({"warmup": PoolWarmup(2000, 2)}, "pool_warmup is PoolWarmup.*pool_size 1000.*initial is at most pool_size"),
        ({"policy": "stream", "warmup": PoolWarmup(2, 2)}, "pool_warmup is .*with policy 'stream'"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PoolSettings(**settings)


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ({}, "class_shares is {}, expected the share of each class"),
        ({"a": 0.5, "b": 0.4}, "adds up to 0.9"),
        ({"a": 1.5, "b": -0.5}, r"class_shares\['b'\] is -0.5, expected a finite number above 0"),
        ({1: 1.0}, "expected the share of each class by its name"),
    ],
)
def test_wrong_shares_are_named(shares: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PoolSettings(policy="stream", class_fn=a_class, class_shares=shares)


def test_shares_are_in_one_order_however_they_were_written() -> None:
    settings = PoolSettings(policy="stream", class_fn=a_class, class_shares={"b": 0.4, "a": 0.6})
    assert list(settings.class_shares or {}) == ["a", "b"]


@pytest.mark.parametrize(
    "warmup", [{"initial": 0, "flushes": 1}, {"initial": 1, "flushes": 0}, {"initial": 2.5, "flushes": 1}]
)
def test_a_wrong_warmup_is_named(warmup: dict) -> None:
    with pytest.raises(ValueError, match=r"pool_warmup\.(initial|flushes) is .*expected an integer of at least 1"):
        PoolWarmup(**warmup)


@pytest.mark.parametrize("policy", ["blocks", "stream"])
def test_a_pool_without_a_whole_batch_is_an_error_where_batches_come_from_one_pool(policy: str) -> None:
    with pytest.raises(ValueError, match="pool_size is 3, less than batch_size 4, .*10 to 100 times"):
        PoolSettings(4, pool_size=3, policy=policy)
    PoolSettings(4, pool_size=3)
    with pytest.raises(ValueError, match="pool_warmup.initial is 3, less than batch_size 4"):
        PoolSettings(4, policy="blocks", warmup=PoolWarmup(3, 2))


class Halves(CostModel):
    def of_length(self, length: float) -> float:
        return length / 2 if length != 13 else -1.0


def test_a_sample_is_measured_by_length_and_cost() -> None:
    assert PoolSettings().measure({"total_len": 8}) == (8, 8)
    assert PoolSettings(cost=Halves()).measure({"total_len": 8}) == (8, 4)
    with pytest.raises(ValueError, match=r"sample 'x' costs -1.0 by Halves\(\), expected a finite number"):
        PoolSettings(cost=Halves()).measure({"total_len": 13, "__key__": "x"})


class Backwards(CostModel):
    """Long samples are cheap."""

    def of_length(self, length: float) -> float:
        return 1e6 - length


@pytest.mark.parametrize("policy", ["pool", "blocks", "stream"])
def test_pools_sort_by_cost_and_batches_tell_lengths(policy: str) -> None:
    lengths = lognormal(200)
    plain, quadratic, backwards = (
        batches(pooled(lengths, pool_size=40, batch_size=4, policy=policy, cost=cost))
        for cost in (None, QuadraticCost(k=1000), Backwards())
    )
    assert [b.__key__ for b in quadratic] == [b.__key__ for b in plain]  # the same order of costs
    assert [b.__key__ for b in backwards] != [b.__key__ for b in plain]
    assert all(b.lengths == tuple(lengths[int(key)] for key in b.__key__) for b in backwards)


# ---- warm-up


@pytest.mark.parametrize(("policy", "batch_size"), [("pool", 1), ("pool", 3), ("blocks", 3)])
def test_the_first_pools_grow_to_the_full_size(policy: str, batch_size: int) -> None:
    lengths, warmup = lognormal(300), PoolWarmup(initial=10, flushes=4)
    settings = {"policy": policy, "pool_size": 50, "warmup": warmup}
    sizes = [10, 20, 30, 40, 50, 50, 50]
    if policy == "blocks":
        sizes = [size // 3 * 3 for size in sizes]
    made = PoolSettings(batch_size, **settings)
    assert [made.size_of_pool(number) for number in range(7)] == sizes
    expected, start = [], 0
    for size in sizes:
        own = lengths[start : start + size]
        # the seed's i is the index of the pool's last sample
        expected += [start + i for i in ORDERS[policy](own, size, start, 42, batch_size)]
        start += size
    out = [int(key) for batch in batches(pooled(lengths, batch_size=batch_size, **settings)) for key in batch.__key__]
    assert out[: min(start, 300)] == expected[:300] and sorted(out) == list(range(300))


def test_a_growing_pool_has_filled_by_the_time_it_is_needed() -> None:
    """No more samples are read at once than the pools grow by."""
    dataset = pooled(lognormal(400), pool_size=60, warmup=PoolWarmup(initial=10, flushes=5))
    CONFIG.worker_activate(0)
    try:
        before, most = 0, 0
        for step, _ in zip(range(200), dataset, strict=False):
            most = max(most, dataset.dataset.read - before if step else 0)
            before = dataset.dataset.read
        assert most == 2
    finally:
        CONFIG.worker_deactivate()


def test_the_reference_is_without_what_is_dropped(tmp_path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("\ufefftokens,class\n5,a\n7,a\n90,a\n95,b\n")
    file = read_reference_lengths(path)
    settings = PoolSettings(policy="stream", max_tokens=50, over_budget="drop")
    assert with_reference(settings, file, None).reference.costs[None].tolist() == [5, 7]
    with pytest.raises(ValueError, match="all lengths of class 'b' in reference_lengths .* cost more than max_tokens"):
        with_reference(settings, file, len)
