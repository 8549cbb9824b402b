"""How long the training loop waits for each batch while pools turn over.

    python benchmarks/stall.py

An encoder that takes 2 ms of CPU time, pools of 2,000 samples, batches of 4, over two pools after the first batch, and
nothing done with the batches, so that the time of a batch is the loader's own. Three loaders: `none` (no pool), the
reference's way (collect a whole pool, then hand it out, kept here for comparison only), and ours, which lets one sample
in for each one that leaves. The first batch, which waits for the first pool, stands in a column of its own.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from loader_overhead import BATCH_SIZE, SlowEncoder, write_dataset
from rich.console import Console
from rich.table import Table

from lightning_lengthpool import LengthPoolDataModule
from lightning_lengthpool.data.pools.flush_pool import FlushPool
from lightning_lengthpool.data.source import Source, Training


class CollectThenFlush(FlushPool):
    """The reference's way: nothing comes in while a pool is handed out."""

    def _fill(self, samples: int) -> None:
        if samples > 1:
            super()._fill(samples)


class CollectingSource(Source):
    def training(self, *args: Any) -> Training:
        training = super().training(*args)
        training.pool.pool.__class__ = CollectThenFlush
        return training


def batch_seconds(
    path: Path, kind: str, num_workers: int, pool_size: int, encode_ms: float
) -> tuple[float, np.ndarray]:
    """The time of the first batch, and of each one over the next two pools."""
    policy = "none" if kind == "none" else "pool"
    settings = {"policy": policy, "pool_size": pool_size, "num_workers": num_workers, "virtual_epoch_length": 10**9}
    module = LengthPoolDataModule(path, SlowEncoder(encode_ms / 1000), BATCH_SIZE, **settings)
    if kind == "collect, then flush":
        module.source = CollectingSource(**vars(module.source))
    stream = iter(module.train_dataloader())
    marks = [time.perf_counter()]
    for _ in range(1 + 2 * pool_size // BATCH_SIZE):
        next(stream)
        marks.append(time.perf_counter())
    module.teardown("fit")
    seconds = np.diff(marks)
    return float(seconds[0]), seconds[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pool_size", type=int, default=2000)
    parser.add_argument("--encode_ms", type=float, default=2.0)
    options = parser.parse_args()
    table = Table(
        "workers", "loader", "median ms", "99 % ms", "max ms", "median / none", "99 % / none", "first batch s"
    )
    with tempfile.TemporaryDirectory() as folder:
        path = write_dataset(Path(folder) / "data", 20_000)
        for num_workers in (0, 1):
            base: list[float] = []
            for kind in ("none", "collect, then flush", "ours"):
                first, seconds = batch_seconds(path, kind, num_workers, options.pool_size, options.encode_ms)
                median, high, most = (1000 * float(np.percentile(seconds, q)) for q in (50, 99, 100))
                base = base or [median, high]
                table.add_row(
                    str(num_workers),
                    kind,
                    *(f"{value:.2f}" for value in (median, high, most)),
                    *(f"{value / of:.2f}" for value, of in zip((median, high), base, strict=True)),
                    f"{first:.2f}",
                )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
