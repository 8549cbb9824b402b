"""The pool as an energon wrapper, many ranks in one process."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.energon import (
    SkipSample,
    WorkerConfig,
    stateless,
)

from helpers.blocks import blocks, parity
from helpers.datasets import LengthEncoder
from helpers.lengths import lognormal
from helpers.orders import reference_stream
from helpers.pools import CONFIG, batches, keys, pooled
from lightning_lengthpool.data.pools.dataset import LengthPoolDataset
from lightning_lengthpool.data.source import Source
from lightning_lengthpool.data.train_loader import TrainLoader
from lightning_lengthpool.ordering.policies import order_blocks
from lightning_lengthpool.ordering.reference_costs import ReferenceCosts
from lightning_lengthpool.ordering.settings import PoolSettings
from lightning_lengthpool.ordering.stream.blocks import stream_draw

# ---- order


@pytest.mark.parametrize("batch_size", [1, 4, 7])
def test_samples_leave_in_the_reference_order(batch_size: int) -> None:
    lengths = lognormal(600)
    assert keys(pooled(lengths, pool_size=100, batch_size=batch_size)) == reference_stream(lengths, 100)


@pytest.mark.parametrize("off", [{"policy": "none"}, {"pool_size": 0}])
def test_a_pool_that_is_switched_off_leaves_the_order_alone(off: dict) -> None:
    assert keys(pooled(lognormal(50), batch_size=3, **off)) == list(range(50))


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(["pool", "blocks", "stream"]),
    st.lists(st.integers(0, 50), max_size=80),
    st.integers(0, 30),
    st.integers(1, 9),
)
def test_every_sample_leaves_once_in_full_batches(
    policy: str, lengths: list[int], pool_size: int, batch_size: int
) -> None:
    if policy != "pool" and pool_size:
        pool_size = max(pool_size, batch_size)
    out = batches(pooled(lengths, pool_size=pool_size, batch_size=batch_size, policy=policy))
    assert sorted(int(key) for batch in out for key in batch.__key__) == list(range(len(lengths)))
    assert all(len(batch.batch) == batch_size for batch in out[:-1])
    assert all(batch.lengths == tuple(lengths[int(key)] for key in batch.__key__) for batch in out)


def test_blocks_leave_as_the_pure_policy_says() -> None:
    lengths = lognormal(600)
    expected = [
        start + i for start in range(0, 600, 100) for i in order_blocks(lengths[start : start + 100], 100, start, 42, 4)
    ]
    assert keys(pooled(lengths, pool_size=103, batch_size=4, policy="blocks")) == expected


def test_a_stream_leaves_as_the_pure_pool_says() -> None:
    lengths = lognormal(600)
    out = [[int(key) for key in batch.__key__] for batch in batches(streamed(lengths, pool_size=103, batch_size=4))]
    assert out == [block.numbers for block, _ in blocks(lengths, 100, batch_size=4)]


def streamed(lengths: list[int], **settings: Any) -> LengthPoolDataset:
    return pooled(lengths, policy="stream", **settings)


def test_a_stream_holds_its_pool_and_no_more() -> None:
    dataset = streamed(lognormal(400), pool_size=100, batch_size=4)
    CONFIG.worker_activate(0)
    try:
        for step, _ in zip(range(1, 90), iter(dataset), strict=False):
            assert dataset.dataset.read == min(400, 96 + 4 * step)
    finally:
        CONFIG.worker_deactivate()


def test_the_next_pool_fills_while_one_is_handed_out() -> None:
    dataset = pooled(lognormal(400), pool_size=100, batch_size=2)
    CONFIG.worker_activate(0)
    try:
        for step, _ in zip(range(1, 120), iter(dataset), strict=False):
            assert dataset.dataset.read == min(400, 100 + 2 * step)  # so a pool's samples are held, of both together
    finally:
        CONFIG.worker_deactivate()


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_each_ranks_pool_holds_exactly_its_own_samples(dataset: Callable[..., Path], num_workers: int) -> None:
    ranks, pool_size, pools = 4, 30, 3
    path = dataset(lognormal(1000), shards=8)
    workers = max(1, num_workers)

    def stream(rank: int, policy: str) -> list[str]:
        config = WorkerConfig(rank=rank, world_size=ranks, num_workers=num_workers)
        training = Source(path, LengthEncoder()).training(PoolSettings(1, pool_size, policy), config)
        loader = TrainLoader(lambda state: (training, state), pools * pool_size * workers)
        try:
            return [key for batch in loader for key in batch["keys"]]
        finally:
            loader.close()

    seen: list[str] = []
    for rank in range(ranks):
        own, mixed = stream(rank, "none"), stream(rank, "pool")
        assert own != mixed
        for worker in range(workers):
            for pool in range(pools):
                places = slice(pool * pool_size, (pool + 1) * pool_size)
                assert sorted(own[worker::workers][places]) == sorted(mixed[worker::workers][places])
        # The pools of the first pass over the data share no sample with any other rank's.
        seen += mixed[: workers * pool_size * (1000 // (ranks * workers * pool_size))]
    assert len(seen) == len(set(seen)) > 0


@pytest.mark.parametrize(("num_workers", "policy"), [(0, "blocks"), (0, "stream"), (2, "stream")])
def test_four_ranks_see_blocks_of_the_same_relative_place(
    dataset: Callable[..., Path], num_workers: int, policy: str
) -> None:
    path = dataset(lognormal(1200), shards=8)

    def stream(rank: int) -> list[float]:
        config = WorkerConfig(rank=rank, world_size=4, num_workers=num_workers)
        training = Source(path, LengthEncoder()).training(PoolSettings(4, 120, policy), config)
        loader = TrainLoader(lambda state: (training, state), 80)
        try:
            return [float(np.mean(batch["lengths"])) for batch in loader]
        finally:
            loader.close()

    ranks = np.log([stream(rank) for rank in range(4)])
    assert np.corrcoef(ranks).min() > 0.93
    assert np.corrcoef(ranks[0], ranks[1][::-1])[0, 1] < 0.3


# ---- slots and bad samples


@pytest.mark.parametrize(
    ("policy", "batch_size"), [("pool", 1), ("pool", 3), ("blocks", 3), ("stream", 1), ("stream", 3)]
)
def test_a_sample_that_never_comes_does_not_shift_a_rank_against_the_others(policy: str, batch_size: int) -> None:
    """One rank's encoder skips a sample: its orders stay those of the ranks that have all of theirs."""
    lengths = lognormal(900)
    settings = {"pool_size": 90, "batch_size": batch_size, "policy": policy}
    ours, theirs = (
        [np.log(sum(batch.lengths)) for batch in batches(pooled(stream, **settings))]
        for stream in (lengths[:3] + lengths[4:], lengths)
    )
    steps = 810 // batch_size  # nine of the ten pools; the last one of the short rank is not full
    assert np.corrcoef(ours[:steps], theirs[:steps])[0, 1] > 0.95


def failing(bad: set[str], error: type[Exception]) -> Callable[[dict], dict]:
    def postencode(sample: dict) -> dict:
        if sample["__key__"] in bad:
            raise error("planted")
        return sample

    return postencode


@pytest.mark.parametrize("error", [SkipSample, ValueError])
@pytest.mark.parametrize("policy", ["pool", "blocks", "stream"])
def test_a_sample_that_fails_after_the_pool_leaves_its_slot_smaller(policy: str, error: type[Exception]) -> None:
    lengths, settings = lognormal(200), {"pool_size": 50, "batch_size": 5, "policy": policy}
    good = batches(pooled(lengths, **settings))
    bad = good[7].__key__[2]
    out = batches(pooled(lengths, **settings, postencode=failing({bad}, error)))
    assert [b.__key__ for b in out] == [[k for k in b.__key__ if k != bad] for b in good]


@pytest.mark.parametrize("place", [0, 7, 49, 50, 99])
def test_an_empty_slot_takes_the_nearest_length_and_shifts_nothing(place: int) -> None:
    lengths = lognormal(300)
    good = batches(pooled(lengths, pool_size=50))
    bad = good[place].__key__[0]
    out = batches(pooled(lengths, pool_size=50, postencode=failing({bad}, ValueError)))
    turn = 50 * (place // 50 + 1)  # the samples that come in after this position make the next pool
    left = [lengths[int(key)] for batch in good[place + 1 : turn] for key in batch.__key__]
    candidates = left + lengths[turn : turn + place % 50 + 1]
    want = lengths[int(bad)]
    assert abs(out[place].lengths[0] - want) == min(abs(length - want) for length in candidates)
    # One sample is missing, nothing doubled, and slot by slot the lengths stay about the same to the end.
    assert sorted(key for b in out for key in b.__key__) == sorted(str(i) for i in range(300) if str(i) != bad)
    ours, theirs = (np.log([b.lengths[0] for b in stream[: len(out)]]) for stream in (out, good))
    assert np.corrcoef(ours[:250], theirs[:250])[0, 1] > 0.9


@pytest.mark.parametrize("bad", range(0, 60, 7))
def test_an_empty_slot_of_a_stream_takes_the_nearest_length_and_shifts_nothing(bad: int) -> None:
    lengths = lognormal(300)
    good = batches(streamed(lengths, pool_size=50))
    lost = good[bad].__key__[0]
    out = batches(streamed(lengths, pool_size=50, postencode=failing({lost}, ValueError)))
    assert sorted(key for b in out for key in b.__key__) == sorted(str(i) for i in range(300) if str(i) != lost)
    ours, theirs = (np.log([b.lengths[0] for b in stream[: len(out)]]) for stream in (out, good))
    held = set(range(50 + bad)) - {int(key) for b in out[:bad] for key in b.__key__} - {int(lost)}
    want = lengths[int(lost)]
    assert abs(out[bad].lengths[0] - want) == min(abs(lengths[number] - want) for number in held)
    assert np.corrcoef(ours[:250], theirs[:250])[0, 1] > 0.95


@pytest.mark.parametrize("policy", ["pool", "blocks", "stream"])
def test_a_failed_collate_uses_its_slot_up(policy: str) -> None:
    lengths, settings = lognormal(200), {"pool_size": 50, "batch_size": 5, "policy": policy}
    good = batches(pooled(lengths, **settings))
    bad = good[3].__key__[0]

    def collate(samples: list[dict]) -> list[dict]:
        if any(sample["__key__"] == bad for sample in samples):
            raise ValueError("planted")
        return samples

    out = batches(pooled(lengths, **settings, batch=collate))
    lost = set(good[3].__key__)
    assert sorted(key for b in out for key in b.__key__) == sorted(str(i) for i in range(200) if str(i) not in lost)
    assert [b.__key__ for b in out[:3]] == [b.__key__ for b in good[:3]]
    assert len(out[3].__key__) == 5
    assert abs(np.log(np.mean(out[3].lengths)) - np.log(np.mean(good[3].lengths))) < 0.3


def test_too_many_failures_in_a_row_end_the_iteration() -> None:
    dataset = pooled(lognormal(300), pool_size=50, postencode=failing({str(i) for i in range(300)}, ValueError))
    with pytest.raises(ValueError, match="100 times in a row"):
        batches(dataset)


@pytest.mark.parametrize("stage", ["postencode", "batch"])
def test_a_method_says_itself_how_many_failures_it_may_have(stage: str) -> None:
    @stateless(failure_tolerance=5)
    def fail(sample: Any) -> Any:
        raise ValueError("planted")

    with pytest.raises(ValueError, match="5 times in a row"):
        batches(pooled(lognormal(300), pool_size=50, **{stage: fail}))


def test_a_collate_that_gives_nothing_uses_its_slot_up() -> None:
    def collate(samples: list[dict]) -> list[dict] | None:
        return None if samples[0]["__key__"] == "7" else samples

    out = batches(pooled(lognormal(60), pool_size=20, batch=collate))
    assert len(out) == 59 and all(batch.batch for batch in out)


def test_a_collate_that_gives_a_generator_is_an_error() -> None:
    with pytest.raises(TypeError, match="batch gave a generator"):
        batches(pooled(lognormal(60), pool_size=20, batch=lambda samples: (sample for sample in samples)))


def test_a_postencode_may_yield_several_samples() -> None:
    def twice(sample: dict) -> Iterator[dict]:
        yield sample
        yield sample

    out = batches(pooled([5, 3], pool_size=2, postencode=twice))
    assert sorted(b.lengths for b in out) == [(3, 3), (5, 5)]


# ---- policy stream: budget, classes, reference


@pytest.mark.parametrize("over_budget", ["alone", "drop"])
@pytest.mark.parametrize("batch_size", [None, 6])
def test_batches_hold_what_fits(over_budget: str, batch_size: int | None) -> None:
    lengths = lognormal(500)
    dear = {str(i) for i, length in enumerate(lengths) if length > 2000}
    dataset = streamed(lengths, pool_size=60, batch_size=batch_size, max_tokens=2000, over_budget=over_budget)
    out = batches(dataset)
    found = sorted(key for batch in out for key in batch.__key__)
    assert found == sorted(str(i) for i in range(500) if over_budget == "alone" or str(i) not in dear)
    for batch in out:
        assert len(batch.lengths) <= (batch_size or 500)
        assert len(batch.lengths) * max(batch.lengths) <= 2000 or (len(batch.lengths) == 1 and batch.__key__[0] in dear)
    assert out[-1].state.pool.dropped == (len(dear) if over_budget == "drop" else 0) != len(out)
    assert len(dear) > 5


def test_a_sample_over_the_budget_is_named_with_the_ways_out() -> None:
    message = r"sample '3' costs 30, more than a whole batch may \(max_tokens is 20\).*Raise.*'alone'.*'drop'"
    with pytest.raises(ValueError, match=message):
        batches(streamed([5, 5, 5, 30, 5], pool_size=5, batch_size=None, max_tokens=20))


def test_a_budget_that_no_sample_fits_is_an_error_at_last() -> None:
    with pytest.raises(ValueError, match="1000 samples in a row cost more than .*max_tokens is 20.*'1000'.*of 30"):
        batches(streamed([5] + [30] * 1100, pool_size=5, batch_size=None, max_tokens=20, over_budget="drop"))


def test_a_failed_batch_is_replaced_within_the_budget() -> None:
    lengths = [min(length, 2000) for length in lognormal(300)]
    good = batches(streamed(lengths, pool_size=60, batch_size=None, max_tokens=2000))
    bad = set(good[4].__key__)
    out = batches(
        streamed(lengths, pool_size=60, batch_size=None, max_tokens=2000, postencode=failing(bad, ValueError))
    )
    assert sorted(key for b in out for key in b.__key__) == sorted(str(i) for i in range(300) if str(i) not in bad)
    assert all(len(batch.lengths) * max(batch.lengths) <= 2000 for batch in out)


def by_parity(sample: dict) -> str:
    return parity(sample["total_len"])


def test_a_batch_holds_one_class_also_after_a_failure() -> None:
    lengths = lognormal(400)
    settings = {"pool_size": 60, "batch_size": 4, "class_fn": by_parity, "class_shares": {"odd": 0.5, "even": 0.5}}
    bad = {str(i) for i in range(0, 400, 3)}
    out = batches(streamed(lengths, **settings, postencode=failing(bad, SkipSample)))
    assert all(len({parity(length) for length in batch.lengths}) == 1 for batch in out)
    assert sorted(key for b in out for key in b.__key__) == sorted(str(i) for i in range(400) if str(i) not in bad)
    assert {batch.missed for batch in out} == {False, True}  # at the end one class runs out


def test_a_slot_that_is_filled_again_from_another_class_is_a_miss() -> None:
    lengths = [2] * 20 + [3]  # the one that is odd fails
    settings = {"pool_size": 21, "batch_size": 1, "class_fn": by_parity, "class_shares": {"odd": 0.5, "even": 0.5}}
    slots = [
        (batch.missed, stream_draw(42, 0, slot).random() < 0.5, batch.lengths)  # in order of names: even first
        for slot, batch in enumerate(batches(streamed(lengths, **settings, postencode=failing({"20"}, SkipSample))))
    ]
    assert {lengths for _, _, lengths in slots} == {(2,)} and len(slots) == 20
    assert [missed for missed, _, _ in slots] == [not is_even for _, is_even, _ in slots]


@pytest.mark.parametrize("kind", ["both", 3, None])
def test_a_class_without_a_share_is_named_with_the_sample(kind: Any) -> None:
    settings = {"class_fn": lambda sample: kind, "class_shares": {"odd": 0.5, "even": 0.5}}
    with pytest.raises(
        ValueError, match=rf"sample '0' is of class {kind!r}, which has no share: expected .*'even', 'odd'"
    ):
        batches(streamed([4, 5], pool_size=2, **settings))


def test_a_pool_that_drifts_from_its_reference_says_so_once() -> None:
    lengths = lognormal(2500)
    right, wrong = (
        ReferenceCosts({None: lognormal(2000, seed=5)}),
        ReferenceCosts({None: [2 * n for n in lognormal(2000, seed=5)]}),
    )
    settings = {"pool_size": 200, "batch_size": 4}
    for reference, warnings in ((right, 0), (wrong, 1)):
        found = [
            batch.warning for batch in batches(streamed(lengths, reference=reference, **settings)) if batch.warning
        ]
        assert len(found) == warnings
    assert "pool of rank 0, worker 0, holds other lengths than reference_lengths says" in found[0]


# ---- settings


@pytest.mark.parametrize("pool_size", [-1, 2.5, "10", True, None])
def test_a_wrong_pool_size_is_named(pool_size: Any) -> None:
    with pytest.raises(ValueError, match="pool_size is .*expected an integer of at least 0"):
        PoolSettings(pool_size=pool_size)
