"""Slots of the sorted pool, without torch and energon: so the golden orders run on every version of Python."""

from collections.abc import Iterator, Sequence
from typing import Any

from lightning_lengthpool.cost_models import TokenCost
from lightning_lengthpool.ordering.settings import PoolSettings
from lightning_lengthpool.ordering.sorted_pool import Block, SortedPool


def parity(length: float) -> str:
    return "odd" if length % 2 else "even"


class Summed(TokenCost):
    """A batch costs the sum of its samples."""

    @property
    def is_padded(self) -> bool:
        return False


def stream_settings(pool_size: int, *, is_padded: bool = True, **settings: Any) -> PoolSettings:
    cost = None if is_padded else Summed()
    return PoolSettings(policy="stream", pool_size=pool_size, cost=cost, **settings)


def blocks(
    lengths: Sequence[float], pool_size: int, worker: int = 0, aims: bool = True, **settings: Any
) -> Iterator[tuple[Block, int]]:
    """Each slot's block of a finite stream, and how many samples had come in by then."""
    pool = SortedPool(stream_settings(pool_size, **settings), worker)
    capacity, arrived = pool.settings.capacity, 0
    for slot in range(len(lengths)):
        while len(pool) < capacity and arrived < len(lengths):
            pool.add(arrived, lengths[arrived], parity(lengths[arrived]) if settings.get("class_shares") else None)
            arrived += 1
        if not len(pool):
            return
        yield pool.take(slot, aim=aims and len(pool) >= capacity), arrived
