"""The replay of a policy over ranks, against the order by hand; against real runs see `test_simulate_exact.py`."""

import random
from dataclasses import replace

import numpy as np
import pytest

from lightning_lengthpool.ordering import efficiency
from lightning_lengthpool.ordering.policies import ORDERS, order_pool
from lightning_lengthpool.ordering.reference_costs import ReferenceCosts
from lightning_lengthpool.ordering.settings import PoolSettings
from lightning_lengthpool.ordering.sorted_pool import SortedPool
from lightning_lengthpool.ordering.stream.blocks import even_slots, stream_draw
from lightning_lengthpool.simulation.simulate import simulate


def pool(policy, pool_size, batch_size, seed=42, **more):
    return PoolSettings(policy=policy, pool_size=pool_size, batch_size=batch_size, seed=seed, **more)


def draws(lengths, size, rng_seed, ranks=1):
    """What each rank draws."""
    return [lengths[rng.integers(len(lengths), size=size)] for rng in np.random.default_rng(rng_seed).spawn(ranks)]


def by_hand(lengths, pool_size, batch_size, steps, seed, rng_seed):
    """One rank's batches: full pools, sorted and shuffled as the reference does, joined end to end and cut."""
    drawn = draws(lengths, -(-steps * batch_size // pool_size) * pool_size, rng_seed)[0].tolist()
    stream = []
    for last in range(pool_size - 1, len(drawn), pool_size):
        pool = sorted(drawn[last + 1 - pool_size : last + 1])
        random.Random(seed + last).shuffle(pool)
        stream += pool
    return [stream[i * batch_size : (i + 1) * batch_size] for i in range(steps)]


@pytest.mark.parametrize("pool_size, batch_size", [(10, 1), (10, 3), (4, 7), (1, 2)])
def test_batches_are_those_of_full_pools_joined_end_to_end(pool_size, batch_size):
    lengths = np.arange(1.0, 100.0) ** 2
    result = simulate([lengths], pool("pool", pool_size, batch_size, 5), 20, rng_seed=6)
    batches = by_hand(lengths, pool_size, batch_size, 20, 5, 6)
    assert result.tokens[:, 0].tolist() == [sum(batch) for batch in batches]
    assert result.padded[:, 0].tolist() == [efficiency.padded_tokens(batch) for batch in batches]
    assert result.longest[:, 0].tolist() == [max(batch) for batch in batches]
    assert (result.samples == batch_size).all() and not result.missed.any()


@pytest.mark.parametrize("policy", ["pool", "blocks"])
@pytest.mark.parametrize("pool_size, batch_size", [(50, 1), (50, 4), (7, 3)])
def test_all_ranks_are_ordered_exactly_as_each_alone(policy, pool_size, batch_size):
    """Simulating sorts all ranks' pools at once; training orders one at a time, by the same function."""
    lengths = [np.random.default_rng(rank).integers(1, 30, 200) for rank in range(5)]  # with many ties
    result = simulate(lengths, pool(policy, pool_size, batch_size, 3), 60, is_cycle=True)
    if policy == "blocks":
        pool_size -= pool_size % batch_size
    count = -(-60 * batch_size // pool_size)
    for rank, own in enumerate(lengths):
        pools = np.resize(own, count * pool_size).reshape(count, pool_size).tolist()
        order = [ORDERS[policy](own_pool, pool_size, i * pool_size, 3, batch_size) for i, own_pool in enumerate(pools)]
        left = [own_pool[place] for own_pool, places in zip(pools, order, strict=True) for place in places]
        batches = np.array(left)[: 60 * batch_size].reshape(60, batch_size)
        np.testing.assert_array_equal(result.tokens[:, rank], batches.sum(axis=1))
        np.testing.assert_array_equal(result.longest[:, rank], batches.max(axis=1))


@pytest.mark.parametrize("policy, pool_size", [("none", 100), ("pool", 0)])
def test_without_a_pool_samples_come_as_they_are_drawn(policy, pool_size):
    lengths = np.arange(1.0, 10.0)
    result = simulate([lengths, lengths], pool(policy, pool_size, 2), 30, rng_seed=7)
    expected = [drawn.reshape(30, 2).sum(axis=1) for drawn in draws(lengths, 60, 7, ranks=2)]
    np.testing.assert_array_equal(result.tokens, np.transpose(expected))
    assert not np.array_equal(*result.tokens.T)


def test_all_ranks_are_at_the_same_quantile_of_their_pools():
    # ranks whose lengths are multiples of one another, each drawn once: a pool the size of the data, in order
    lengths = np.arange(1.0, 201.0)
    tokens = simulate([lengths, 10 * lengths, lengths], pool("pool", 200, 1), 400, rng_seed=8).tokens
    places = tokens.reshape(2, 200, 3).argsort(axis=1, kind="stable").argsort(axis=1)
    # draws repeat, and equal lengths may swap: so places agree up to ties
    assert np.abs(places - places[..., :1]).max() <= 6
    expected = order_pool(sorted(lengths), 200, 200, 42)  # the second pool starts at sample 200
    assert np.abs(places[1, :, 0] - expected).max() <= 6


def test_the_pool_synchronises_ranks():
    lengths = [np.random.default_rng(rank).lognormal(6, 1, 3000) for rank in range(4)]
    idle = {
        size: efficiency.idle_fraction(simulate(lengths, pool("pool", size, 1), 3000).padded) for size in (0, 100, 1000)
    }
    assert idle[0] > 0.4 and idle[0] > 2 * idle[100] > 4 * idle[1000]


def sorted_pool_by_hand(own, pool, pool_size, steps, kinds=None):
    """One rank's blocks, of samples that come around and around: each step one block out, as many samples in."""
    number, blocks = 0, []
    for step in range(steps):
        while len(pool) < pool_size:
            at = number % len(own)
            pool.add(number, float(own[at]), None if kinds is None else kinds[at])
            number += 1
        blocks.append(pool.take(step))
    return blocks


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 1},
        {"batch_size": 4, "reference": ReferenceCosts({None: np.arange(1.0, 3000.0)})},
        {"batch_size": None, "max_tokens": 9000.0},
        {"batch_size": 5, "max_tokens": 9000.0, "reference": ReferenceCosts({None: np.arange(1.0, 3000.0)})},
    ],
)
def test_stream_takes_the_blocks_of_the_pool_that_trains(options):
    lengths = [np.random.default_rng(rank).lognormal(6, 1, 300) for rank in range(3)]
    settings = pool("stream", 100, seed=9, **options)
    result = simulate(lengths, settings, 80, is_cycle=True)
    for rank, own in enumerate(lengths):
        blocks = sorted_pool_by_hand(own, SortedPool(settings), 100, 80)  # 100 divides by each batch size
        assert result.samples[:, rank].tolist() == [len(block.costs) for block in blocks]
        assert result.longest[:, rank].tolist() == [max(block.costs) for block in blocks]
        assert result.tokens[:, rank] == pytest.approx([sum(block.costs) for block in blocks])
        assert result.padded[:, rank] == pytest.approx([efficiency.padded_tokens(block.costs) for block in blocks])


def test_stream_with_classes():
    rngs = [np.random.default_rng(rank) for rank in range(4)]
    lengths = [rng.lognormal(6, 1, 500) for rng in rngs]
    classes = [(rng.random(500) < 0.3).astype(int) for rng in rngs]
    settings = pool("stream", 200, 4, 9)
    result = simulate(lengths, settings, 300, is_cycle=True, classes=classes)
    share = np.concatenate(classes).mean()
    by_hand = SortedPool(replace(settings, class_shares={0: 1 - share, 1: share}))
    blocks = sorted_pool_by_hand(lengths[2], by_hand, 200, 300, classes[2].tolist())
    assert result.classes[:, 2].tolist() == [block.class_name for block in blocks]
    assert result.missed[:, 2].tolist() == [block.missed for block in blocks]
    assert (result.classes == result.classes[:, :1]).all(axis=1).mean() > 0.9
    assert result.classes.mean() == pytest.approx(0.3, abs=0.05)


def test_numbers_of_classes_may_have_gaps():
    lengths = [np.random.default_rng(rank).lognormal(6, 1, 400) for rank in range(2)]
    classes = [np.arange(400) % 3 // 2 for _ in lengths]
    settings = PoolSettings(batch_size=2, pool_size=50, policy="stream")
    without, with_gap = (simulate(lengths, settings, 60, classes=[n * own for own in classes]) for n in (1, 7))
    assert set(with_gap.classes.ravel()) == {0, 7}
    np.testing.assert_array_equal(with_gap.classes, 7 * without.classes)
    np.testing.assert_array_equal(with_gap.tokens, without.tokens)


def test_a_stream_is_the_same_however_long_it_is_read():
    lengths = [np.arange(1.0, 2000.0)] * 2
    long, short = (simulate(lengths, pool("stream", 50, 2), steps, rng_seed=3).tokens for steps in (3000, 20))
    np.testing.assert_array_equal(long[:20], short)


@pytest.mark.parametrize(
    "policy, samples, steps", [("none", 11, 5), ("pool", 11, 4), ("blocks", 11, 4), ("stream", 11, 4)]
)
def test_streams_that_are_read_once_make_batches_as_far_as_they_reach(policy, samples, steps):
    """Of pools of 4 the third is not full; a stream's pool of 4 is full for the fourth batch, at sample 10."""
    short, long = np.arange(1.0, 1.0 + samples), np.arange(1.0, 50.0)
    result = simulate([long, short], pool(policy, 4, 2), None)
    assert len(result.tokens) == steps
    again = simulate([long, long], pool(policy, 4, 2), steps, is_cycle=True)
    np.testing.assert_array_equal(result.tokens, again.tokens)
    # a worker that reads less ends its rank's turns, where they come to it
    workers = simulate([long, short, long, long], pool(policy, 4, 2), None, workers=2)
    assert len(workers.tokens) == 2 * steps + 1


def test_workers_take_turns_with_pools_of_their_own():
    streams = [np.random.default_rng(number).permutation(np.arange(60.0)) for number in range(3)]
    for policy in ("pool", "blocks"):  # whose order does not depend on the worker
        alone = [simulate([own], pool(policy, 10, 2), None) for own in streams]
        both = simulate(streams, pool(policy, 10, 2), None, workers=3)
        for worker, own in enumerate(alone):
            np.testing.assert_array_equal(both.tokens[worker::3], own.tokens)
    result = simulate(streams, pool("stream", 10, 2), None, workers=3)
    np.testing.assert_array_equal(
        np.concatenate(streams)[result.chosen[0]].reshape(-1, 2).sum(axis=1), result.tokens[:, 0]
    )
    assert not (result.chosen[0][:2] == result.chosen[0][2:4] - 60).all()  # each draws for itself


def test_samples_are_sorted_by_cost_and_counted_by_length():
    lengths = np.random.default_rng(0).permutation(np.arange(1.0, 101.0))
    result = simulate([lengths], pool("blocks", 100, 5), None, costs=[1000 - lengths])
    np.testing.assert_array_equal(
        result.tokens, simulate([lengths[::-1]], pool("blocks", 100, 5), None, costs=[-lengths[::-1] + 1000]).tokens
    )
    order = ORDERS["blocks"]((1000 - lengths).tolist(), 100, 0, 42, 5)
    assert result.chosen[0].tolist() == order
    np.testing.assert_array_equal(result.longest[:, 0], lengths[order].reshape(-1, 5).max(axis=1))


def test_every_sample_is_as_likely_to_leave_a_stream():
    """What has left of each fifth of the lengths, of what had come in."""
    own = np.random.default_rng(0).permutation(np.arange(10_000.0))
    left = simulate([own], pool("stream", 500, 1), 9500, is_cycle=True).tokens[:, 0]
    counts = np.histogram(left, bins=5, range=(0, 10_000))[0]
    assert counts.min() > 1900 - 45 and counts.max() < 1900 + 45  # the 500 that are still there


@pytest.mark.parametrize(
    "change, message",
    [
        ({"steps": 0}, "steps is 0"),
        ({"lengths": []}, "lengths has no rank"),
        ({"lengths": [np.ones(2), np.ones(0)]}, "lengths of rank 1"),
        ({"lengths": [np.array([1.0, np.nan])]}, "lengths of rank 0"),
        (
            {"policy": "stream", "pool_size": 0, "classes": [[0, 0, 0]]},
            "classes is set with policy 'stream' and pool_size 0",
        ),
        ({"policy": "stream", "classes": [[0, 0]]}, "classes of rank 0"),
        ({"policy": "stream", "class_shares": {0: 1.0}}, "class_shares, so classes must tell"),
        ({"policy": "stream", "classes": [[0, 0, -1]]}, "classes of rank 0"),
        ({"workers": 0}, "workers is 0"),
        ({"workers": 2}, "lengths has 1 streams, expected some for each of 2 workers"),
        ({"costs": [[1.0]]}, "costs must be a number for each"),
        ({"costs": [[1.0, -1.0, 1.0]]}, "costs of rank 0"),
        ({"steps": None, "pool_size": 4}, "streams of 3 samples or more, too few for a batch .* full pool, here of 4"),
        ({"steps": None, "pool_size": 4, "policy": "stream"}, "too few for a batch"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    of_pool = {name: change[name] for name in ("policy", "pool_size", "class_shares") if name in change}
    settings = PoolSettings(**({"pool_size": 2} | of_pool))
    arguments = {name: value for name, value in change.items() if name not in of_pool}
    with pytest.raises(ValueError, match=message):
        simulate(**({"lengths": [np.ones(3)], "steps": 1} | arguments), settings=settings)


def test_even_slots_draw_each_part_once_and_a_simulation_takes_them():
    slots = even_slots(42, 20)
    assert list(slots) == sorted(set(slots)) and len(slots) == 20
    draws = [stream_draw(42, 0, slot) for slot in slots]
    assert sorted(int(20 * (own.random(), own.random())[1]) for own in draws) == list(range(20))
    lengths = [np.arange(1.0, 101.0)] * 2
    found = simulate(lengths, pool("stream", 100, 1), 20, slots=slots)
    assert found.longest.min() <= 5 and found.longest.max() >= 96
    plain = simulate(lengths, pool("stream", 100, 1), 20)
    assert plain.longest.tolist() == simulate(lengths, pool("stream", 100, 1), 20, slots=range(20)).longest.tolist()
    assert plain.longest.tolist() != found.longest.tolist()
