"""The replay of a policy over ranks, against the order by hand."""

import random

import numpy as np
import pytest

from lightning_lengthpool import cost
from lightning_lengthpool.order import order_pool
from lightning_lengthpool.simulate import simulate


def by_hand(lengths, pool_size, batch_size, steps, seed, rng_seed):
    """One rank's batches: full pools, sorted and shuffled as the reference does, joined end to end and cut."""
    drawn = (
        np.random.default_rng(rng_seed).choice(lengths, size=-(-steps * batch_size // pool_size) * pool_size).tolist()
    )
    stream = []
    for last in range(pool_size - 1, len(drawn), pool_size):
        pool = sorted(drawn[last + 1 - pool_size : last + 1])
        random.Random(seed + last).shuffle(pool)
        stream += pool
    return [stream[i * batch_size : (i + 1) * batch_size] for i in range(steps)]


@pytest.mark.parametrize("pool_size, batch_size", [(10, 1), (10, 3), (4, 7), (1, 2)])
def test_batches_are_those_of_full_pools_joined_end_to_end(pool_size, batch_size):
    lengths = np.arange(1.0, 100.0) ** 2
    tokens, padded, longest = simulate([lengths], "pool", pool_size, batch_size, 20, seed=5, rng_seed=6)
    batches = by_hand(lengths, pool_size, batch_size, 20, 5, 6)
    assert tokens[:, 0].tolist() == [sum(batch) for batch in batches]
    assert padded[:, 0].tolist() == [cost.padded_tokens(batch) for batch in batches]
    assert longest[:, 0].tolist() == [max(batch) for batch in batches]


@pytest.mark.parametrize("policy, pool_size", [("none", 100), ("pool", 0)])
def test_without_a_pool_samples_come_as_they_are_drawn(policy, pool_size):
    lengths = np.arange(1.0, 10.0)
    tokens, _, _ = simulate([lengths, lengths], policy, pool_size, 2, 30, rng_seed=7)
    rng = np.random.default_rng(7)
    expected = [rng.choice(lengths, size=60).reshape(30, 2).sum(axis=1) for _ in range(2)]
    np.testing.assert_array_equal(tokens, np.transpose(expected))


def test_all_ranks_are_at_the_same_place_of_their_pools():
    # ranks whose lengths are multiples of one another, each drawn once: a pool the size of the data, in order
    pool = np.arange(1.0, 201.0)
    tokens, _, _ = simulate([pool, 10 * pool, pool], "pool", 200, 1, 400, rng_seed=8)
    places = tokens.reshape(2, 200, 3).argsort(axis=1, kind="stable").argsort(axis=1)
    # draws repeat, and equal lengths may swap: so places agree up to ties
    assert np.abs(places - places[..., :1]).max() <= 6
    expected = order_pool(sorted(pool), 200, 200, 42)  # the second pool starts at sample 200
    assert np.abs(places[1, :, 0] - expected).max() <= 6


def test_the_pool_synchronises_ranks():
    lengths = [np.random.default_rng(rank).lognormal(6, 1, 3000) for rank in range(4)]
    idle = {size: cost.idle_fraction(simulate(lengths, "pool", size, 1, 3000)[1]) for size in (0, 100, 1000)}
    assert idle[0] > 0.4 and idle[0] > 2 * idle[100] > 4 * idle[1000]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"policy": "nine"}, "policy is 'nine'"),
        ({"pool_size": -1}, "pool_size is -1"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"steps": 0}, "steps is 0"),
        ({"lengths": []}, "lengths has no rank"),
        ({"lengths": [np.ones(2), np.ones(0)]}, "lengths of rank 1"),
        ({"lengths": [np.array([1.0, np.nan])]}, "lengths of rank 0"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    arguments = {"lengths": [np.ones(3)], "policy": "pool", "pool_size": 2, "batch_size": 1, "steps": 1}
    with pytest.raises(ValueError, match=message):
        simulate(**(arguments | change))
