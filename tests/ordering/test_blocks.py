"""Which block of a sorted pool leaves: the functions of `ordering.stream`."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_lengthpool.ordering.stream.blocks import (
    aimed_block,
    stream_block,
    stream_class,
    stream_draw,
    top_quantile,
)
from lightning_lengthpool.ordering.stream.budget import batch_shares, budget_block, fill_budget

COSTS = st.lists(st.integers(0, 300), min_size=1, max_size=60).map(sorted)
DRAW = st.floats(0, 1, exclude_max=True)
TARGET = st.none() | st.floats(0, 400)


def test_golden_draws_of_a_stream() -> None:
    draws = [stream_draw(42, worker, slot).random() for worker, slot in ((0, 0), (0, 1), (1, 0))]
    assert [round(draw, 6) for draw in draws] == [0.785706, 0.657937, 0.152185]


@settings(max_examples=300, deadline=None)
@given(COSTS, DRAW, st.integers(1, 9), TARGET, st.integers(1, 20))
def test_a_block_is_always_full(costs: list[int], u: float, batch_size: int, target: float | None, blocks: int) -> None:
    if target is None:
        start, stop = stream_block(costs, u, batch_size)
    else:
        start, stop = aimed_block(costs, top_quantile(u, blocks), batch_size, target)
    assert 0 <= start < stop <= len(costs) and stop - start == min(batch_size, len(costs))


def test_an_aimed_block_ends_at_the_target_and_leans_to_the_pool() -> None:
    costs = [float(cost) for cost in range(0, 200, 2)]  # 100 of them
    assert [top_quantile(u, 25) for u in (0.0, 0.039, 0.041, 0.999)] == [0.04, 0.04, 0.08, 1.0]
    assert aimed_block(costs, 0.5, 4, 99.0, pool_weight=0) == (46, 50)
    assert aimed_block(costs, 0.5, 4, 139.0, pool_weight=0) == (66, 70)
    assert aimed_block(costs, 0.5, 4, 139.0, pool_weight=1) == (46, 50)
    assert aimed_block(costs, 0.5, 4, 139.0, pool_weight=0.5) == (56, 60)
    assert aimed_block(costs, 1.0, 4, 500.0) == (96, 100) and aimed_block(costs, 0.04, 4, -1.0) == (0, 4)


def test_the_blocks_of_a_pool_that_is_as_expected_leave_alike() -> None:
    """Where the pool has just the quantiles that it aims at, each block of the pool is named once, the ends too."""
    costs = [float(cost) for cost in range(100)]
    found = []
    for block in range(25):
        top = top_quantile((block + 0.5) / 25, 25)
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


def test_a_sample_that_is_more_expensive_than_the_budget_is_alone() -> None:
    costs = np.array([1.0, 2.0, 3.0, 100.0])
    assert fill_budget(costs, 3, 10) == (3, 4)
    assert fill_budget(costs, 2, 10) == (0, 3)
    assert fill_budget(costs, 0, 10) == (0, 3)  # with more expensive ones, where the cheap ones do not fill it
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
