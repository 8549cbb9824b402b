"""Orders are a contract: a golden list may change only together with an ITERATION ORDER entry in CHANGELOG.md."""

import random
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.orders import GOLDEN_LENGTHS, reference_stream
from lightning_lengthpool.ordering.order import (
    ORDERS,
    aimed_block,
    batch_shares,
    block_top,
    budget_block,
    fill_budget,
    order_blocks,
    order_none,
    order_pool,
    stream_block,
    stream_class,
    stream_draw,
)
from lightning_lengthpool.ordering.settings import PoolSettings


def test_golden_order_of_full_pools() -> None:
    assert order_pool(GOLDEN_LENGTHS, 10, 0, 42) == [1, 3, 5, 7, 0, 4, 8, 2, 6, 9]
    assert order_pool(GOLDEN_LENGTHS, 10, 10, 42) == [8, 1, 3, 0, 5, 6, 4, 9, 2, 7]
    assert order_pool(GOLDEN_LENGTHS, 10, 0, 7) == [4, 0, 1, 3, 8, 9, 2, 6, 7, 5]


def test_golden_order_of_a_short_pool() -> None:
    assert order_pool(GOLDEN_LENGTHS[:7], 10, 20, 42) == [0, 4, 1, 3, 6, 5, 2]


def test_golden_order_of_none() -> None:
    assert order_none(GOLDEN_LENGTHS, 10, 0, 42) == list(range(10))


def test_golden_order_of_blocks() -> None:
    assert order_blocks(GOLDEN_LENGTHS, 10, 0, 42, 2) == [4, 7, 0, 5, 1, 8, 6, 3, 2, 9]
    assert order_blocks(GOLDEN_LENGTHS, 10, 10, 42, 3) == [7, 6, 3, 8, 2, 9, 0, 5, 4, 1]
    assert order_blocks(GOLDEN_LENGTHS[:7], 10, 20, 42, 2) == [2, 0, 6, 3, 5, 4, 1]


def test_golden_draws_of_a_stream() -> None:
    draws = [stream_draw(42, worker, slot).random() for worker, slot in ((0, 0), (0, 1), (1, 0))]
    assert [round(draw, 6) for draw in draws] == [0.785706, 0.657937, 0.152185]


@pytest.mark.parametrize("pool_size", [1, 2, 3, 7, 100, 299, 300, 1000, 2000])
@pytest.mark.parametrize("samples", [0, 1, 299, 300, 301, 4999, 5000])
def test_pool_is_the_reference_order_on_full_pools(samples: int, pool_size: int) -> None:
    check_reference(samples, pool_size, seed=42)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 5000), st.integers(1, 2000), st.integers(0, 2**31))
def test_pool_is_the_reference_order_on_any_stream(samples: int, pool_size: int, seed: int) -> None:
    check_reference(samples, pool_size, seed)


def check_reference(samples: int, pool_size: int, seed: int) -> None:
    rng = random.Random(samples * 31 + pool_size)
    lengths = [int(rng.lognormvariate(3, 1)) for _ in range(samples)]  # small values: many ties
    ours = [
        start + position
        for start in range(0, samples - samples % pool_size, pool_size)
        for position in order_pool(lengths[start : start + pool_size], pool_size, start, seed)
    ]
    assert ours == reference_stream(lengths, pool_size, seed)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(sorted(ORDERS)),
    st.lists(st.floats(0, 1e9, allow_nan=False), max_size=60),
    st.integers(0, 20),
    st.integers(0, 10**6),
    st.integers(-5, 2**40),
    st.integers(1, 9),
)
def test_an_order_is_a_permutation(
    policy: str, lengths: list[float], room: int, start: int, seed: int, batch_size: int
) -> None:
    order = ORDERS[policy](lengths, len(lengths) + room, start, seed, batch_size)
    assert sorted(order) == list(range(len(lengths)))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 99), max_size=60), st.integers(0, 20), st.integers(1, 9), st.integers(0, 2**40))
def test_blocks_are_neighbours_in_length_and_full_but_for_the_cheapest(
    lengths: list[int], room: int, batch_size: int, seed: int
) -> None:
    order = order_blocks(lengths, len(lengths) + room, 0, seed, batch_size)
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    bounds = sorted((min(lengths[i] for i in batch), max(lengths[i] for i in batch)) for batch in batches)
    assert all(high <= low for (_, high), (low, _) in zip(bounds, bounds[1:], strict=False))
    assert not len(order) % batch_size or max(lengths[i] for i in batches[-1]) == bounds[0][1]


# ---- stream

COSTS = st.lists(st.integers(0, 300), min_size=1, max_size=60).map(sorted)
DRAW = st.floats(0, 1, exclude_max=True)
TARGET = st.none() | st.floats(0, 400)


@settings(max_examples=300, deadline=None)
@given(COSTS, DRAW, st.integers(1, 9), TARGET, st.integers(1, 20))
def test_a_block_is_always_full(costs: list[int], u: float, batch_size: int, target: float | None, blocks: int) -> None:
    if target is None:
        start, stop = stream_block(costs, u, batch_size)
    else:
        start, stop = aimed_block(costs, block_top(u, blocks), batch_size, target)
    assert 0 <= start < stop <= len(costs) and stop - start == min(batch_size, len(costs))


def test_an_aimed_block_ends_at_the_target_and_leans_to_its_own_place() -> None:
    costs = [float(cost) for cost in range(0, 200, 2)]  # 100 of them
    assert [block_top(u, 25) for u in (0.0, 0.039, 0.041, 0.999)] == [0.04, 0.04, 0.08, 1.0]
    assert aimed_block(costs, 0.5, 4, 99.0, own_place=0) == (46, 50)
    assert aimed_block(costs, 0.5, 4, 139.0, own_place=0) == (66, 70)
    assert aimed_block(costs, 0.5, 4, 139.0, own_place=1) == (46, 50)
    assert aimed_block(costs, 0.5, 4, 139.0, own_place=0.5) == (56, 60)
    assert aimed_block(costs, 1.0, 4, 500.0) == (96, 100) and aimed_block(costs, 0.04, 4, -1.0) == (0, 4)


def test_the_blocks_of_a_pool_that_is_as_expected_leave_alike() -> None:
    """Where the pool has just the quantiles that it aims at, each block of the pool is named once, the ends too."""
    costs = [float(cost) for cost in range(100)]
    found = []
    for block in range(25):
        top = block_top((block + 0.5) / 25, 25)
        found.append(aimed_block(costs, top, 4, costs[min(round(top * 100), 99)]))
    assert found == [(start, start + 4) for start in range(0, 100, 4)]


@pytest.mark.parametrize("samples", [12, 13, 14, 15])
def test_each_sample_is_as_likely_to_leave_but_at_the_cheap_end(samples: int) -> None:
    """What does not fill a block borrows from the one above it: the first four samples make up for each other."""
    counts = np.zeros(samples)
    draws = 4 * 15 * 14 * 13
    for draw in range(draws):
        start, stop = stream_block(range(samples), (draw + 0.5) / draws, 4)
        counts[start:stop] += samples / 4 / draws
    assert counts[0 if samples == 12 else 8 :] == pytest.approx(1, abs=0.01)
    assert counts.sum() == pytest.approx(samples)


@settings(max_examples=300, deadline=None)
@given(COSTS, DRAW, st.integers(1, 2000), st.none() | st.integers(1, 9), TARGET, st.booleans())
def test_a_batch_never_exceeds_its_budget_and_fills_it(
    costs: list[int], u: float, budget: int, batch_size: int | None, target: float | None, is_padded: bool
) -> None:
    start, stop = budget_block(np.array(costs, dtype=float), u, budget, batch_size, target, is_padded)
    block = costs[start:stop]
    costs, block = [max(cost, 1) for cost in costs], [max(cost, 1) for cost in block]  # as they count
    cost = (lambda block: len(block) * block[-1]) if is_padded else sum
    assert block and len(block) <= (batch_size or 60)
    assert cost(block) <= budget or len(block) == 1
    if start and len(block) != batch_size:  # there was one more, cheaper
        assert cost(costs[start - 1 : stop]) > budget
    elif stop < len(costs) and len(block) != batch_size and not start:
        assert cost(costs[: stop + 1]) > budget


def test_a_sample_that_is_dearer_than_the_budget_is_alone() -> None:
    costs = np.array([1.0, 2.0, 3.0, 100.0])
    assert fill_budget(costs, 3, 10) == (3, 4)
    assert fill_budget(costs, 2, 10) == (0, 3)
    assert fill_budget(costs, 0, 10) == (0, 3)  # with dearer ones, where the cheap ones do not fill it
    assert fill_budget(costs, 2, 5, is_padded=False) == (1, 3)


def test_batch_shares_add_up_to_the_batches() -> None:
    assert batch_shares(np.array([5.0, 5.0, 10.0, 11.0, 3.0]), 10).tolist() == [0.5, 0.5, 1, 1, pytest.approx(1 / 3)]
    assert batch_shares(np.array([0.0, 1.0]), 10, 4).tolist() == [0.25, 0.25]
    assert batch_shares(np.array([0.0] * 50 + [0.5]), 10).tolist() == [0.1] * 50 + [0.05]


@pytest.mark.parametrize("is_padded", [True, False])
@pytest.mark.parametrize(("budget", "most"), [(8, 8), (8.5, 8), (0.5, 1)])
def test_samples_that_cost_nothing_count_one_token_each(budget: float, most: int, is_padded: bool) -> None:
    costs = np.zeros(50)
    for top in (0, 7, 20, 49):
        start, stop = fill_budget(costs, top, budget, None, is_padded)
        assert stop - start == most and start <= top
    for u in (0.0, 0.3, 0.999):
        start, stop = budget_block(costs, u, budget, None, None, is_padded)
        assert stop - start == most
    assert fill_budget(costs, 20, budget, 3, is_padded) == (21 - min(3, most), 21)


@pytest.mark.parametrize("is_padded", [True, False])
def test_costs_below_one_count_as_they_are(is_padded: bool) -> None:
    """A model may count in other units, say in seconds."""
    assert fill_budget(np.full(50, 0.125), 40, 2, None, is_padded) == (25, 41)


def test_a_class_is_drawn_by_the_shared_shares_and_a_little_by_what_is_held() -> None:
    assert [stream_class([0.5, 0.5], [1.0, 0.0], u) for u in (0.0, 0.59, 0.61, 0.99)] == [0, 0, 1, 1]
    assert stream_class([0.5, 0.5 - 1e-9], [0.5, 0.5 - 1e-9], 1 - 1e-12) == 1


def test_ranks_with_short_pools_of_different_size_stay_together_by_relative_place() -> None:
    def relative_places(samples: int) -> list[float]:
        return [place / samples for place in order_pool(range(samples), 200, 1000, 42)]

    long, short = relative_places(100), relative_places(90)
    apart = [abs(a - b) for a, b in zip(long, short, strict=False)]
    unrelated = [abs(a - b) for a, b in zip(long, sorted(short), strict=False)]
    assert sum(apart) / len(apart) < 0.1 < 0.2 < sum(unrelated) / len(unrelated)


def test_an_unknown_policy_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"policy is 'sorted', expected one of: none, pool, blocks, stream"):
        PoolSettings(policy="sorted")


def test_the_room_loads_without_torch_energon_and_lightning() -> None:
    blocked = ["torch", "megatron", "lightning", "pytorch_lightning", "torchmetrics", "jsonargparse"]
    code = (
        f"import importlib, pkgutil, sys; sys.modules.update(dict.fromkeys({blocked!r})); "
        "import lightning_lengthpool.ordering as room; "
        "[importlib.import_module(f'{room.__name__}.{module.name}') for module in pkgutil.iter_modules(room.__path__)]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
