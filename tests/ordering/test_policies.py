"""Orders are a contract: a golden list may change only together with an ITERATION ORDER entry in CHANGELOG.md."""

import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.orders import GOLDEN_LENGTHS, reference_stream
from lightning_lengthpool.ordering.policies import ORDERS, order_blocks, order_none, order_pool
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


def test_ranks_with_short_pools_of_different_size_stay_together_by_relative_index() -> None:
    def relative_indices(samples: int) -> list[float]:
        return [index / samples for index in order_pool(range(samples), 200, 1000, 42)]

    long, short = relative_indices(100), relative_indices(90)
    apart = [abs(a - b) for a, b in zip(long, short, strict=False)]
    unrelated = [abs(a - b) for a, b in zip(long, sorted(short), strict=False)]
    assert sum(apart) / len(apart) < 0.1 < 0.2 < sum(unrelated) / len(unrelated)


def test_an_unknown_policy_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"policy is 'sorted', expected one of: none, pool, blocks, stream"):
        PoolSettings(policy="sorted")


def test_the_room_takes_numpy_and_the_standard_library_only() -> None:
    code = (
        "import importlib, pkgutil, sys\n"
        "before = set(sys.modules)\n"
        "import lightning_lengthpool.ordering as room\n"
        "for module in pkgutil.walk_packages(room.__path__, 'lightning_lengthpool.ordering.'):\n"
        "    importlib.import_module(module.name)\n"
        "print(*{name.split('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    assert sorted(done.stdout.split()) == ["lightning_lengthpool", "numpy"]
