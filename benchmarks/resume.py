"""What exact resume costs: bytes and seconds of a checkpoint against pool_size, and samples per second.

    python benchmarks/resume.py

An encoder that takes 1 ms of CPU time, batches of 4, one worker. Saved in the middle of a pool: the bytes of the data's
part of a checkpoint, the seconds to collect and write it, and the seconds from loading it to the first batch, in which
the pool's samples are re-read and encoded again (what is left of the pool that is handed out, and what of the next one
had come in). The throughput is that of a loader whose place travels with its batches and is asked for every 25 batches,
against one whose does not; the two take turns, the ratio is the median over the segments.
"""

import argparse
import io
import statistics
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import torch
from loader_overhead import BATCH_SIZE, Loader, SlowEncoder, write_dataset
from rich.console import Console
from rich.table import Table

from lightning_lengthpool import LengthPoolDataModule
from lightning_lengthpool.data.pools.dataset import LengthPoolDataset
from lightning_lengthpool.data.pools.flush_pool import FlushPool


def module(path: Path, pool_size: int) -> LengthPoolDataModule:
    settings = {"pool_size": pool_size, "num_workers": 1, "virtual_epoch_length": 10**9}
    return LengthPoolDataModule(path, SlowEncoder(0.001), BATCH_SIZE, **settings)


def save_and_restore(path: Path, pool_size: int) -> tuple[int, float, float]:
    """Bytes of the state, seconds to save it, seconds from loading it to the next batch."""
    first = module(path, pool_size)
    stream = iter(first.train_dataloader())
    for _ in range(pool_size // BATCH_SIZE + pool_size // BATCH_SIZE // 2):
        next(stream)
    file = io.BytesIO()
    started = time.perf_counter()
    torch.save(first.state_dict(), file)
    saved = time.perf_counter() - started
    expected = next(stream)
    first.teardown("fit")
    file.seek(0)
    started = time.perf_counter()
    second = module(path, pool_size)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert next(iter(second.train_dataloader())) == expected
    restored = time.perf_counter() - started
    second.teardown("fit")
    return file.getbuffer().nbytes, saved, restored


def without_states(path: Path, pool_size: int) -> Loader:
    """A loader whose worker neither takes snapshots nor sends states: patched before it is forked."""
    with (
        patch.object(FlushPool, "_take_snapshot", lambda self: None),
        patch.object(LengthPoolDataset, "_add_state", lambda self, batch: None),
    ):
        return Loader(path, 0.001, policy="pool", num_workers=1, pool_size=pool_size)


def throughput(path: Path, pool_size: int, segments: int, samples: int) -> float:
    off = without_states(path, pool_size)
    on = Loader(path, 0.001, policy="pool", num_workers=1, pool_size=pool_size)
    ratios = []
    for segment in range(segments):
        rates = {}
        for loader in (on, off) if segment % 2 else (off, on):
            started = time.perf_counter()
            for batch in range(samples // BATCH_SIZE):
                next(loader.stream)
                if loader is on and batch % 25 == 0:
                    loader.train_loader.state()
            rates[loader] = samples / (time.perf_counter() - started)
        ratios.append(rates[on] / rates[off])
    for loader in (on, off):
        loader.train_loader.close()
    return statistics.median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pool_sizes", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--segments", type=int, default=8)
    parser.add_argument("--samples", type=int, default=2000, help="samples of a segment")
    options = parser.parse_args()
    table = Table("pool_size", "bytes", "save s", "restore s", "samples per second, on / off")
    with tempfile.TemporaryDirectory() as folder:
        path = write_dataset(Path(folder) / "data", 50_000)
        for pool_size in options.pool_sizes:
            size, saved, restored = save_and_restore(path, pool_size)
            ratio = throughput(path, pool_size, options.segments, options.samples)
            table.add_row(f"{pool_size:,}", f"{size:,}", f"{saved:.4f}", f"{restored:.2f}", f"{ratio:.3f}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
