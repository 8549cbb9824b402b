"""In-memory streams and what pools make of them."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.energon import (
    SavableDataset,
    WorkerConfig,
)

from helpers import resuming
from helpers.resuming import through_a_file
from lightning_lengthpool.data.pools.dataset import LengthPoolDataset, PooledBatch
from lightning_lengthpool.ordering.settings import PoolSettings

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
        settings=PoolSettings(batch_size, **settings),
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


def take(
    path: Path, encoder: Any, batches: int, state: dict[str, Any] | None = None, **settings: Any
) -> tuple[list[list[str]], dict[str, Any], list[str]]:
    """Take some batches; returns their keys, the state after them, and what was warned of."""
    module = resuming.module(path, encoder=encoder, **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module.load_state_dict(state or {})
        keys = []
        try:
            for batch in module.train_dataloader():
                keys.append(batch["keys"])
                if len(keys) == batches:
                    break
            state = through_a_file(module.state_dict())
        finally:
            module.teardown("fit")
    return keys, state, [str(one.message) for one in caught if "the data " in str(one.message)]
