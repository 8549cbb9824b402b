"""What samples cost that fail after the pool: milliseconds of a batch with failures against none.

    python benchmarks/failures.py

The pool alone, over lengths in memory, in one process: `postencode` skips a share of the samples. A slot that is left
empty takes the samples nearest in cost instead, and that is what is timed here: the median batch, the mean and the
slowest one, and the ratio of the means. The state that travels with each batch is part of it.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from megatron.energon import SavableDataset, SkipSample, WorkerConfig
from rich.console import Console
from rich.table import Table

from lightning_lengthpool.data.pools.dataset import LengthPoolDataset
from lightning_lengthpool.ordering.settings import PoolSettings

CONFIG = WorkerConfig(rank=0, world_size=1, num_workers=0)


class Lengths(SavableDataset):
    """An endless stream of samples that are their lengths."""

    def __init__(self) -> None:
        super().__init__(worker_config=CONFIG)
        self.lengths = np.random.default_rng(0).lognormal(6.5, 0.8, 100_000).astype(int) + 1

    def __iter__(self) -> Iterator[dict[str, Any]]:
        number = 0
        while True:
            length = int(self.lengths[number % len(self.lengths)])
            yield {"__key__": str(number), "__restore_key__": (number,), "total_len": length}
            number += 1

    def len_worker(self, worker_idx: int | None = None) -> int:
        return len(self.lengths)

    def worker_has_samples(self) -> bool:
        return True

    def reset_state_own(self) -> None: ...

    def config(self) -> dict[str, Any]:
        return {}


def batch_seconds(policy: str, pool_size: int, batch_size: int, batches: int, share: float) -> list[float]:
    """What each batch took, after the first one, which has filled the pool."""
    rng = np.random.default_rng(1)

    def postencode(sample: dict[str, Any]) -> dict[str, Any]:
        if rng.random() < share:
            raise SkipSample
        return sample

    dataset = LengthPoolDataset(
        Lengths(),
        settings=PoolSettings(batch_size, pool_size, policy),
        batch=list,
        postencode=postencode,
        worker_config=CONFIG,
    )
    CONFIG.worker_activate(0)
    try:
        stream, found = iter(dataset), []
        next(stream)
        for _ in range(batches):
            started = time.perf_counter()
            next(stream)
            found.append(time.perf_counter() - started)
        return found
    finally:
        CONFIG.worker_deactivate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pool_size", type=int, default=8000)
    parser.add_argument("--batch_size", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--batches", type=int, default=20_000)
    parser.add_argument("--share", type=float, default=0.3, help="of the samples that fail")
    parser.add_argument("--policies", nargs="+", default=["pool", "blocks", "stream"])
    options = parser.parse_args()
    table = Table("policy", "batch_size", "failures", "median ms", "mean ms", "slowest ms", "ratio of means")
    for policy in options.policies:
        for batch_size in options.batch_size:
            without = None
            for share in (0.0, options.share):
                seconds = batch_seconds(policy, options.pool_size, batch_size, options.batches, share)
                mean = statistics.fmean(seconds)
                figures = (statistics.median(seconds), mean, max(seconds))
                ratio = "" if without is None else f"{mean / without:.1f}"
                table.add_row(policy, str(batch_size), f"{share:.0%}", *(f"{1000 * one:.3f}" for one in figures), ratio)
                without = mean
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
