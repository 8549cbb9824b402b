"""The pool of policy `stream` on numbers alone. Its golden lists are a contract as those in `test_policies.py` are."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.blocks import blocks, parity, stream_settings
from helpers.orders import GOLDEN_LENGTHS
from lightning_lengthpool.ordering.efficiency import idle_fraction
from lightning_lengthpool.ordering.reference_costs import ReferenceCosts
from lightning_lengthpool.ordering.sorted_pool import SortedPool
from lightning_lengthpool.ordering.stream.blocks import stream_draw

LENGTHS = [*GOLDEN_LENGTHS, *(2 * length + 1 for length in GOLDEN_LENGTHS)]
SHARES = {"even": 0.5, "odd": 0.5}
TRACE = np.random.default_rng(0).lognormal(6, 1, 20_000).round()


GOLDEN: list[tuple[dict[str, Any], list[list[int]]]] = [
    (
        {"batch_size": 2, "aims": False},
        [[1, 8], [5, 10], [9, 0], [11, 2], [15, 7], [6, 3], [14, 17], [16, 13], [19, 4], [18, 12]],
    ),
    (
        {"batch_size": 2, "worker": 1, "aims": False},
        [[4, 7], [5, 10], [12, 6], [11, 2], [1, 8], [0, 19], [16, 13], [18, 9], [14, 17], [15, 3]],
    ),
    (
        {"batch_size": None, "max_tokens": 200.0},
        [[1, 8, 2, 9, 0], [6, 3], [5, 10, 4], [19, 15], [14], [16], [17], [13], [11, 18, 12], [7]],
    ),
    (
        {"batch_size": None, "max_tokens": 200.0, "is_padded": False},
        [[1, 8, 2, 9, 0, 5, 4], [14], [15, 7], [11, 18, 12, 19, 10], [17], [16], [13], [6, 3]],
    ),
    (
        {"batch_size": 2, "reference": ReferenceCosts({None: [5.0, 20.0, 40.0, 80.0, 120.0]})},
        [[2, 9], [4, 7], [12, 5], [8, 11], [1, 0], [10, 15], [14, 17], [16, 13], [6, 3], [18, 19]],
    ),
    (
        {"batch_size": 2},
        [[1, 8], [5, 10], [9, 0], [11, 2], [4, 15], [7, 6], [14, 17], [16, 13], [19, 3], [18, 12]],
    ),
    (
        {"batch_size": 2, "class_shares": {"even": 0.3, "odd": 0.7}},
        [[2, 9], [0, 5], [11, 12], [10, 4], [15, 7], [6, 14], [16, 13], [19, 17], [8, 3], [1], [18]],
    ),
    (
        {"batch_size": 2, "aims": False, "class_shares": {"even": 0.3, "odd": 0.7}},
        [[2, 9], [10, 4], [0, 12], [5, 15], [7, 6], [14, 17], [16, 13], [18, 19], [8, 3], [1], [11]],
    ),
]


@pytest.mark.parametrize(("settings", "expected"), GOLDEN)
def test_golden_order_of_a_stream(settings: dict, expected: list) -> None:
    assert [block.numbers for block, _ in blocks(LENGTHS, 10, **settings)] == expected


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 60), max_size=80),
    st.integers(1, 30),
    st.none() | st.integers(1, 9),
    st.none() | st.integers(1, 200),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_every_sample_leaves_once(
    lengths: list[int],
    pool_size: int,
    batch_size: int | None,
    budget: int | None,
    padded: bool,
    classes: bool,
    ref: bool,
    aims: bool,
) -> None:
    batch_size = 3 if batch_size is None and budget is None else batch_size
    kinds = ("even", "odd") if classes else (None,)
    out = blocks(
        lengths,
        max(pool_size, batch_size or 1),
        batch_size=batch_size,
        max_tokens=budget,
        is_padded=padded,
        class_shares={"even": 0.5, "odd": 0.5} if classes else None,
        reference=ReferenceCosts({kind: [3, 30, 31] for kind in kinds}) if ref else None,
        aims=aims,
    )
    found = [block for block, _ in out]
    assert sorted(number for block in found for number in block.numbers) == list(range(len(lengths)))
    for block in found:
        own = [lengths[number] for number in block.numbers]
        assert own == sorted(own) == block.costs
        assert not classes or {parity(length) for length in own} == {block.class_name}
        if budget is not None and len(own) > 1:
            assert (len(own) * own[-1] if padded else sum(own)) <= budget


@pytest.mark.parametrize(
    "settings",
    [
        {"batch_size": 1, "aims": False},
        {"batch_size": 4, "aims": False},
        {"batch_size": None, "max_tokens": 8000.0},
        {"batch_size": 8, "max_tokens": 8000.0},
        {"batch_size": None, "max_tokens": 8000.0, "is_padded": False},
        {"batch_size": 1},
        {"batch_size": 4},
    ],
    ids=str,
)
def test_long_and_short_samples_stay_as_long(settings: dict) -> None:
    """Mean residence in slots, by length: the fifths differ by what chance explains, and not by what is aimed at."""
    lengths = TRACE.clip(max=8000)
    came = np.zeros(len(lengths))
    stays: list[tuple[float, float]] = []
    before = 0
    for slot, (block, arrived) in enumerate(blocks(lengths, 400, **settings)):
        came[before:arrived], before = slot, arrived
        if 2000 < block.numbers[0] and arrived < len(lengths):
            stays += [(cost, slot - came[number]) for number, cost in zip(block.numbers, block.costs, strict=True)]
    costs, slots = np.array(stays).T
    fifths = np.searchsorted(np.quantile(costs, [0.2, 0.4, 0.6, 0.8]), costs)
    means = np.array([slots[fifths == fifth].mean() for fifth in range(5)])
    assert means / slots.mean() == pytest.approx(1, abs=0.2)


def neighbours(batches: list[float]) -> float:
    return float(np.corrcoef(np.log(batches[:-1]), np.log(batches[1:]))[0, 1])


@pytest.mark.parametrize("workers", [1, 2])
def test_neighbouring_batches_are_uncorrelated_in_length(workers: int) -> None:
    """Batch i comes from worker i % workers; in sorted order neighbours would be alike."""
    streams = [
        [
            float(np.mean(block.costs))
            for block, _ in blocks(TRACE[worker::workers], 400, batch_size=4, worker=worker, aims=False)
        ]
        for worker in range(workers)
    ]
    batches = [batch for turn in zip(*streams, strict=True) for batch in turn][:2000]
    assert abs(neighbours(batches)) < 0.06 < 0.99 < neighbours(sorted(batches))


@pytest.mark.parametrize("settings", [{"batch_size": 4}, {"batch_size": None, "max_tokens": 8000.0}], ids=str)
@pytest.mark.parametrize("aim", [False, True])
def test_ranks_whose_pools_differ_in_size_see_the_same_lengths(settings: dict, aim: bool) -> None:
    rng = np.random.default_rng(1)
    reference = ReferenceCosts({None: rng.choice(TRACE, 3000).clip(max=8000)}) if aim else None

    def rank(pool_size: int) -> list[float]:
        lengths = rng.choice(TRACE, 4000).clip(max=8000)
        found = [block.costs[-1] for block, _ in blocks(lengths, pool_size, reference=reference, **settings)]
        return found[:300]

    ranks = np.log([rank(pool_size) for pool_size in (400, 393, 360)])
    assert np.corrcoef(ranks).min() > 0.97


@pytest.mark.parametrize("settings", [{"batch_size": 4}, {"batch_size": None, "max_tokens": 8000.0}], ids=str)
def test_a_rank_says_where_it_takes_another_class_than_the_draw_that_all_share(settings: dict) -> None:
    shares = {"even": 0.8, "odd": 0.2}
    draws = [stream_draw(42, 0, slot).random() for slot in range(900)]
    meant = ["even" if draw < 0.8 else "odd" for draw in draws]
    missed: list[bool] = []
    for seed in range(8):
        rng = np.random.default_rng(seed)
        lengths = (2 * rng.choice(TRACE, 4500) + (rng.random(4500) < 0.2)).clip(max=7999)  # one in five is odd
        found = [block for block, _ in blocks(lengths, 200, class_shares=shares, **settings)][:900]
        assert [block.missed for block in found] == [
            block.class_name != own for block, own in zip(found, meant, strict=False)
        ]
        missed += [block.missed for block in found]
        assert 0.1 < np.mean([block.class_name == "odd" for block in found]) < 0.3
    assert 0.001 < np.mean(missed) < 0.1  # the pool's own share has its part: p = shares + 0.2 (own - shares)


def test_a_class_that_is_missing_leaves_its_slot_to_another() -> None:
    found = [block for block, _ in blocks([2.0] * 20, 10, batch_size=2, class_shares={"even": 0.5, "odd": 0.5})]
    assert {block.class_name for block in found} == {"even"} and any(block.missed for block in found)
    assert not all(block.missed for block in found)


def test_the_nearest_samples_are_taken_of_the_same_class() -> None:
    pool = SortedPool(stream_settings(10, batch_size=2, class_shares=SHARES))
    for number, length in enumerate([2, 4, 8, 3, 5]):
        pool.add(number, length, parity(length))
    assert pool.take_nearest([3, 7], "even") == ([0, 2], "even")
    assert pool.take_nearest([1, 1], "even") == ([1], "even")
    assert pool.take_nearest([1, 1], "even") == ([3, 4], "odd")  # there is no other class left
    assert pool.take_nearest([1], "odd")[0] == []


def test_the_nearest_samples_fit_into_the_budget() -> None:
    pool = SortedPool(stream_settings(10, batch_size=None, max_tokens=15))
    for number, length in enumerate([1, 6, 6, 6, 40]):
        pool.add(number, length)
    assert pool.take_nearest([5, 5, 5]) == ([0, 1], None)
    assert pool.take_nearest([30]) == ([4], None)


@pytest.mark.parametrize("shares", [None, {"even": 0.5, "odd": 0.5}], ids=["alike", "classes"])
@pytest.mark.parametrize("slots", [0, 1, 7, 150])
def test_a_restored_pool_goes_on_as_the_first(slots: int, shares: dict | None) -> None:
    arrivals = iter(TRACE.tolist())
    one, two = (SortedPool(stream_settings(51, batch_size=3, class_shares=shares)) for _ in range(2))

    def go_on(pool: SortedPool, slot: int, lengths: Iterator[float]) -> list[float]:
        while len(pool) < 51:
            length = next(lengths)
            pool.add(slot, length, parity(length) if shares else None)
        return pool.take(slot).costs

    for slot in range(slots):
        go_on(one, slot, arrivals)
    two.restore(one.items(), one.history())
    assert list(two.items()) == list(one.items()) and two.history() == one.history()
    rest = list(itertools.islice(arrivals, 1000))
    first, second = (
        [go_on(pool, slot, lengths) for slot in range(slots, slots + 200)]
        for pool, lengths in ((one, iter(rest)), (two, iter(rest)))
    )
    assert first == second


def test_of_equal_costs_the_first_comes_first() -> None:
    pool = SortedPool(stream_settings(10, batch_size=2))
    for number, length in enumerate([3, 1, 3, 1, 3]):
        pool.add(number, length)
    assert list(pool.items()) == [(1, 1, None), (3, 1, None), (0, 3, None), (2, 3, None), (4, 3, None)]


@pytest.mark.parametrize(
    "settings", [{"batch_size": 1}, {"batch_size": 4}, {"batch_size": 4, "class_shares": SHARES}], ids=str
)
def test_ranks_that_remember_agree_better(settings: dict) -> None:
    lengths = np.random.default_rng(3).lognormal(6, 1, (8, 5000)).round()

    def idle(aims: bool) -> float:
        ranks = [[block.costs[-1] for block, _ in blocks(own, 200, aims=aims, **settings)] for own in lengths]
        steps = slice(1000 // settings["batch_size"], 4800 // settings["batch_size"])
        return idle_fraction(np.array([own[steps] for own in ranks]).T)

    assert idle(True) < 0.97 * idle(False)


def test_samples_that_cost_nothing_leave_too() -> None:
    found = [
        block
        for block, _ in blocks([0.0] * 9, 4, batch_size=None, max_tokens=5.0, class_shares={"even": 1.0, "odd": 1e-9})
    ]
    assert sum(len(block.numbers) for block in found) == 9


@pytest.mark.parametrize("reference", [None, ReferenceCosts({None: [0.0, 0.0, 5.0]})], ids=["alone", "reference"])
@pytest.mark.parametrize("is_padded", [True, False])
def test_a_batch_of_a_budget_has_no_more_samples_than_the_budget_has_tokens(
    reference: ReferenceCosts | None, is_padded: bool
) -> None:
    lengths = [0.0] * 900 + [5.0] * 100
    np.random.default_rng(4).shuffle(lengths)
    found = [
        len(block.numbers)
        for block, _ in blocks(lengths, 300, batch_size=None, max_tokens=16.0, reference=reference, is_padded=is_padded)
    ]
    assert max(found) == 16 and sum(found) == 1000


def test_the_distance_from_a_reference() -> None:
    reference = ReferenceCosts({None: range(100)})
    assert reference.distance(None, range(100)) == 0
    assert reference.distance(None, [100, 200]) == 1
    assert reference.distance(None, range(50)) == pytest.approx(0.5)
    assert reference.distance(None, [49]) == pytest.approx(0.5)
    rng = np.random.default_rng(0)
    for _ in range(20):
        one, two = rng.integers(0, 30, 40), rng.integers(5, 40, 25)
        shares = [[np.mean(values <= bound) for bound in range(50)] for values in (one, two)]
        assert ReferenceCosts({None: one}).distance(None, two) == pytest.approx(np.abs(np.subtract(*shares)).max())
