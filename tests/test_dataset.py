"""The pool as an energon wrapper, many ranks in one process."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import LengthEncoder
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.energon import (
    SavableDataset,
    SkipSample,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    stateless,
)
from test_order import reference_stream

from lightning_lengthpool.dataset import LengthPoolDataset, PooledBatch
from lightning_lengthpool.loader import TrainLoader
from lightning_lengthpool.pool import PoolSettings
from lightning_lengthpool.task_encoder import length_pool

CONFIG = WorkerConfig(rank=0, world_size=1, num_workers=0)


class Stream(SavableDataset):
    """A finite stream of dicts with the given lengths, keyed by their positions."""

    def __init__(self, lengths: list[int]) -> None:
        super().__init__(worker_config=CONFIG)
        self.lengths = lengths
        self.read = 0

    def __iter__(self) -> Iterator[dict]:
        for self.read, length in enumerate(self.lengths, start=1):  # noqa: B020 - counts what was read
            yield {"__key__": str(self.read - 1), "total_len": length}

    def len_worker(self, worker_idx: int | None = None) -> int:
        return len(self.lengths)

    def worker_has_samples(self) -> bool:
        return bool(self.lengths)

    def reset_state_own(self) -> None: ...

    def config(self) -> dict:
        return {}


def pooled(lengths: list[int], *, batch_size: int = 1, **settings: Any) -> LengthPoolDataset:
    functions = {name: settings.pop(name) for name in ("batch", "postencode") if name in settings}
    return LengthPoolDataset(
        Stream(lengths),
        batch_size=batch_size,
        settings=PoolSettings(**settings),
        worker_config=CONFIG,
        **{"batch": list, **functions},
    )


def batches(dataset: LengthPoolDataset) -> list[PooledBatch]:
    CONFIG.worker_activate(0)
    try:
        return list(dataset)
    finally:
        CONFIG.worker_deactivate()


def keys(dataset: LengthPoolDataset) -> list[int]:
    return [int(key) for batch in batches(dataset) for key in batch.__key__]


def lognormal(samples: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [int(rng.lognormvariate(6, 1)) for _ in range(samples)]


# ---- order


@pytest.mark.parametrize("batch_size", [1, 4, 7])
def test_samples_leave_in_the_reference_order(batch_size: int) -> None:
    lengths = lognormal(600)
    assert keys(pooled(lengths, pool_size=100, batch_size=batch_size)) == reference_stream(lengths, 100)


@pytest.mark.parametrize("off", [{"policy": "none"}, {"pool_size": 0}])
def test_a_pool_that_is_switched_off_leaves_the_order_alone(off: dict) -> None:
    assert keys(pooled(lognormal(50), batch_size=3, **off)) == list(range(50))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 50), max_size=80), st.integers(0, 30), st.integers(1, 9))
def test_every_sample_leaves_once_in_full_batches(lengths: list[int], pool_size: int, batch_size: int) -> None:
    out = batches(pooled(lengths, pool_size=pool_size, batch_size=batch_size))
    assert sorted(int(key) for batch in out for key in batch.__key__) == list(range(len(lengths)))
    assert all(len(batch.batch) == batch_size for batch in out[:-1])
    assert all(batch.lengths == tuple(lengths[int(key)] for key in batch.__key__) for batch in out)


def test_the_next_pool_fills_while_one_is_handed_out() -> None:
    dataset = pooled(lognormal(400), pool_size=100, batch_size=2)
    CONFIG.worker_activate(0)
    try:
        for step, _ in zip(range(1, 120), iter(dataset), strict=False):
            held = dataset.dataset.read - 2 * step
            assert dataset.dataset.read == min(400, 100 + 2 * step)
            assert held <= 200
    finally:
        CONFIG.worker_deactivate()


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_each_ranks_pool_holds_exactly_its_own_samples(dataset: Callable[..., Path], num_workers: int) -> None:
    ranks, pool_size, pools = 4, 30, 3
    path = dataset(lognormal(1000), shards=8)
    workers = max(1, num_workers)

    def stream(rank: int, policy: str) -> list[str]:
        config = WorkerConfig(rank=rank, world_size=ranks, num_workers=num_workers)
        encoder = LengthEncoder()
        with length_pool(encoder, PoolSettings(pool_size=pool_size, policy=policy)):
            data = get_train_dataset(
                path,
                worker_config=config,
                batch_size=1,
                shuffle_buffer_size=None,
                max_samples_per_sequence=None,
                task_encoder=encoder,
            )
        loader = TrainLoader(get_savable_loader(data, gc_collect_every_n_steps=0), data, pools * pool_size * workers)
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


# ---- slots and bad samples


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_sample_that_never_comes_does_not_shift_a_rank_against_the_others(batch_size: int) -> None:
    """One rank's encoder skips a sample: its orders stay those of the ranks that have all of theirs."""
    lengths = lognormal(900)
    ours, theirs = (
        [np.log(sum(batch.lengths)) for batch in batches(pooled(stream, pool_size=90, batch_size=batch_size))]
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
def test_a_sample_that_fails_after_the_pool_leaves_its_slot_smaller(error: type[Exception]) -> None:
    lengths = lognormal(200)
    good = batches(pooled(lengths, pool_size=50, batch_size=5))
    bad = good[7].__key__[2]
    out = batches(pooled(lengths, pool_size=50, batch_size=5, postencode=failing({bad}, error)))
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


def test_a_failed_collate_uses_its_slot_up() -> None:
    lengths = lognormal(200)
    good = batches(pooled(lengths, pool_size=50, batch_size=5))
    bad = good[3].__key__[0]

    def collate(samples: list[dict]) -> list[dict]:
        if any(sample["__key__"] == bad for sample in samples):
            raise ValueError("planted")
        return samples

    out = batches(pooled(lengths, pool_size=50, batch_size=5, batch=collate))
    lost = set(good[3].__key__)
    assert sorted(key for b in out for key in b.__key__) == sorted(str(i) for i in range(200) if str(i) not in lost)
    assert [b.__key__ for b in out[:3]] == [b.__key__ for b in good[:3]]
    assert len(out[3].__key__) == 5
    assert np.corrcoef(sorted(out[3].lengths), sorted(good[3].lengths))[0, 1] > 0.9


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


def test_a_bad_length_ends_the_iteration() -> None:
    with pytest.raises(ValueError, match="sample '3' has the length -2"):
        batches(pooled([5, 4, 3, -2, 5], pool_size=5))


# ---- settings


@pytest.mark.parametrize("pool_size", [-1, 2.5, "10", True, None])
def test_a_wrong_pool_size_is_named(pool_size: Any) -> None:
    with pytest.raises(ValueError, match="pool_size is .*expected an integer of at least 0"):
        PoolSettings(pool_size=pool_size)


def test_a_wrong_policy_is_named() -> None:
    with pytest.raises(ValueError, match="policy is 'pools', expected one of: none, pool"):
        PoolSettings(policy="pools")


def test_a_wrong_length_fn_is_named() -> None:
    with pytest.raises(ValueError, match="length_fn is 3, expected a callable"):
        PoolSettings(length_fn=3)  # type: ignore[arg-type]
