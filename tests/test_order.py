"""Orders are a contract: a golden list may change only together with an ITERATION ORDER entry in CHANGELOG.md."""

import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_lengthpool.order import POLICIES, get_policy, order_none, order_pool

GOLDEN_LENGTHS = [31, 4, 15, 92, 65, 35, 89, 79, 4, 15]


def reference_stream(lengths: list[int], pool_size: int, seed: int = 42) -> list[int]:
    """The reference algorithm on a stream, full pools only; gives positions in the stream."""
    pool: list[tuple[int, int]] = []
    out: list[int] = []
    for i, length in enumerate(lengths):
        pool.append((i, length))
        if len(pool) == pool_size:
            pool.sort(key=lambda entry: entry[1])
            random.Random(seed + i).shuffle(pool)
            out += [position for position, _ in pool]
            pool = []
    return out


def test_golden_order_of_full_pools() -> None:
    assert order_pool(GOLDEN_LENGTHS, 10, 0, 42) == [1, 3, 5, 7, 0, 4, 8, 2, 6, 9]
    assert order_pool(GOLDEN_LENGTHS, 10, 10, 42) == [8, 1, 3, 0, 5, 6, 4, 9, 2, 7]
    assert order_pool(GOLDEN_LENGTHS, 10, 0, 7) == [4, 0, 1, 3, 8, 9, 2, 6, 7, 5]


def test_golden_order_of_a_short_pool() -> None:
    assert order_pool(GOLDEN_LENGTHS[:7], 10, 20, 42) == [0, 4, 1, 3, 6, 5, 2]


def test_golden_order_of_none() -> None:
    assert order_none(GOLDEN_LENGTHS, 10, 0, 42) == list(range(10))


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
    st.sampled_from(sorted(POLICIES)),
    st.lists(st.floats(0, 1e9, allow_nan=False), max_size=60),
    st.integers(0, 20),
    st.integers(0, 10**6),
    st.integers(-5, 2**40),
)
def test_an_order_is_a_permutation(policy: str, lengths: list[float], room: int, start: int, seed: int) -> None:
    order = get_policy(policy)(lengths, len(lengths) + room, start, seed)
    assert sorted(order) == list(range(len(lengths)))


def test_ranks_with_short_pools_of_different_size_stay_together_by_relative_place() -> None:
    def relative_places(samples: int) -> list[float]:
        return [place / samples for place in order_pool(range(samples), 200, 1000, 42)]

    long, short = relative_places(100), relative_places(90)
    apart = [abs(a - b) for a, b in zip(long, short, strict=False)]
    unrelated = [abs(a - b) for a, b in zip(long, sorted(short), strict=False)]
    assert sum(apart) / len(apart) < 0.1 < 0.2 < sum(unrelated) / len(unrelated)


def test_an_unknown_policy_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"policy is 'sorted', expected one of: none, pool"):
        get_policy("sorted")


@pytest.mark.parametrize("module", ["order", "cost"])
def test_a_pure_module_loads_without_torch_energon_and_lightning(module: str) -> None:
    blocked = ["torch", "megatron", "megatron.energon", "lightning", "pytorch_lightning", "torchmetrics"]
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked!r})); import lightning_lengthpool.{module}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
