"""Each pool alone, over a stream in memory: it goes on from its state at every slot, with exactly the rest."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from megatron.energon import SavableDataset
from megatron.energon.state import FlexState

from helpers.lengths import lognormal
from helpers.pools import CONFIG
from helpers.resuming import through_a_file
from helpers.save_load import check_save_and_load
from lightning_lengthpool.data.pools.flush_pool import FlushPool
from lightning_lengthpool.data.pools.plain_state import from_plain, to_plain
from lightning_lengthpool.data.pools.pool import Pool
from lightning_lengthpool.data.pools.stream_pool import StreamPool
from lightning_lengthpool.ordering.reference_costs import ReferenceCosts
from lightning_lengthpool.ordering.settings import PoolSettings, PoolWarmup

LENGTHS = lognormal(130)


class Restorable(SavableDataset):
    """A finite stream of dicts that can be saved, and whose samples come again by their keys."""

    def __init__(self, lengths: list[int]) -> None:
        super().__init__(worker_config=CONFIG)
        self.lengths, self.next = lengths, 0

    def sample(self, index: int) -> dict[str, Any]:
        return {"__key__": str(index), "__restore_key__": (index,), "total_len": self.lengths[index]}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self.next < len(self.lengths):
            self.next += 1
            yield self.sample(self.next - 1)

    def restore_sample(self, restore_key: Any) -> dict[str, Any]:
        return self.sample(restore_key[0])

    def save_state(self) -> FlexState:
        return FlexState(next=self.next)

    def restore_state(self, state: FlexState) -> None:
        self.next = state["next"]

    def len_worker(self, worker_idx: int | None = None) -> int:
        return len(self.lengths)

    def worker_has_samples(self) -> bool:
        return True

    def reset_state_own(self) -> None: ...

    def config(self) -> dict[str, Any]:
        return {}


def slots(pool: Pool, state: Any, fails: set[int]) -> Iterator[tuple[list[str], list[float], Any]]:
    """What the slots hold; where a slot fails, other samples take its turn, as in training."""
    CONFIG.worker_activate(0)
    try:
        stream = pool.start(state)
    finally:
        CONFIG.worker_deactivate()
    assert pool.differences == []
    for slot in stream:
        keys = [entry.sample["__key__"] for entry in slot.entries]
        if fails & set(map(int, keys)):
            slot = pool.take_nearest(slot)
            keys += [entry.sample["__key__"] for entry in slot.entries]
        yield keys, slot.costs, slot.class_name


def starter(
    cls: type[Pool], settings: PoolSettings, snapshot_samples: int, fails: set[int]
) -> Callable[[Any], tuple[Iterator[Any], Callable[[], Any]]]:
    def start(state: Any) -> tuple[Iterator[Any], Callable[[], Any]]:
        pool = cls(Restorable(LENGTHS), settings, snapshot_samples=snapshot_samples)
        return slots(pool, state, fails), pool.state

    return start


def plain_file(state: Any) -> Any:
    return from_plain(through_a_file(to_plain(state)))


def fails_now_and_then(sample: dict[str, Any]) -> int:
    if int(sample["__key__"]) % 29 == 7:
        raise ValueError("planted")
    return sample["total_len"]


def parity(sample: dict[str, Any]) -> str:
    return "odd" if sample["total_len"] % 2 else "even"


FLUSH = [
    PoolSettings(3, policy="none"),
    PoolSettings(1, 10),
    PoolSettings(3, 10),  # slots that span pools
    PoolSettings(3, 10, "blocks"),
    PoolSettings(2, 20, "blocks", warmup=PoolWarmup(4, 3)),
    PoolSettings(1, 13, length_fn=fails_now_and_then),
]
STREAM = [
    PoolSettings(1, 10, "stream"),
    PoolSettings(3, 13, "stream", length_fn=fails_now_and_then),
    PoolSettings(None, 12, "stream", max_tokens=2500, over_budget="drop"),
    PoolSettings(2, 12, "stream", class_fn=parity, class_shares={"odd": 0.5, "even": 0.5}),
    PoolSettings(2, 12, "stream", reference=ReferenceCosts({None: lognormal(500, seed=1)})),
]


@pytest.mark.parametrize("fails", [set(), set(random.Random(1).sample(range(130), 12))], ids=["whole", "failing"])
@pytest.mark.parametrize("snapshot_samples", [1, 25, 10_000])
@pytest.mark.parametrize("settings", [*FLUSH, *STREAM], ids=str)
def test_a_pool_goes_on_from_its_state_at_every_slot(
    settings: PoolSettings, snapshot_samples: int, fails: set[int]
) -> None:
    cls = StreamPool if settings.is_stream else FlushPool
    check_save_and_load(starter(cls, settings, snapshot_samples, fails), through=plain_file)


@pytest.mark.parametrize("settings", [FLUSH[2], STREAM[0]], ids=str)
def test_a_pool_that_loses_what_it_held_goes_on_with_what_comes(settings: PoolSettings) -> None:
    cls = StreamPool if settings.is_stream else FlushPool
    pool = cls(Restorable(LENGTHS), settings)
    stream = slots(pool, None, set())
    before = [key for _ in range(7) for key in next(stream)[0]]
    state, read = plain_file(pool.state()), pool.dataset.next
    lossy = cls(Restorable(LENGTHS), settings)
    CONFIG.worker_activate(0)
    after = [entry.sample["__key__"] for slot in lossy.start(state, lose=True) for entry in slot.entries]
    CONFIG.worker_deactivate()
    assert not set(before) & set(after) and {str(number) for number in range(read, 130)} <= set(after)
    assert len(after) == len(set(after)) and lossy.differences == []
