"""What the pool costs the loader: samples per second with `pool` against `none`.

    python benchmarks/loader_overhead.py

An encoder that takes 1 ms of CPU time, saving of the loader's state on (energon's default), batches of 4. The two
loaders of a pair take turns, a segment of samples each, so that a machine that slows down slows both; the ratio is the
median over the segments. Before the first segment each has yielded its first batch: filling the first pool is start-up,
shown in its own column. Memory is how much the resident size of the process that holds the pool grew from the first
batch to the end. It grows without a pool as well: energon's tar reader keeps a few hundred bytes of each sample it has
read. What the pool adds must be flat.
"""

import argparse
import io
import os
import statistics
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
from megatron.energon import DefaultTaskEncoder, Sample, TextSample, edataclass, stateless
from megatron.energon.flavors.webdataset import BaseWebdatasetFactory
from rich.console import Console
from rich.table import Table

from lightning_lengthpool import LengthPoolDataModule

BATCH_SIZE = 4


@edataclass
class Encoded(Sample):
    total_len: int
    conversation: list


class SlowEncoder(DefaultTaskEncoder):
    """Takes a fixed time per sample, and makes samples of several Python objects, as real encoders do."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    @stateless
    def encode_sample(self, sample: TextSample) -> Encoded:
        end = time.perf_counter() + self.seconds
        length = int(sample.text)
        turns = [{"role": role, "tokens": np.zeros(length // 4), "spans": [[0, length]]} for role in ("user", "model")]
        while time.perf_counter() < end:
            pass
        return Encoded.derive_from(sample, total_len=length, conversation=turns)

    @stateless
    def batch(self, samples: list[Encoded]) -> list[str]:
        return [sample.__key__ for sample in samples]


def write_dataset(path: Path, samples: int) -> Path:
    lengths = np.random.default_rng(0).lognormal(6.5, 0.8, samples).astype(int) + 1
    path.mkdir()
    with tarfile.open(path / "data.tar", "w") as tar:
        for index, length in enumerate(lengths):
            member = tarfile.TarInfo(f"{index:06d}.txt")
            content = str(length).encode()
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    with redirect_stdout(io.StringIO()):
        BaseWebdatasetFactory.prepare_dataset(path, ["data.tar"], split_parts_ratio=[("train", 1.0)], workers=1)
    (path / ".nv-meta" / "dataset.yaml").write_text(
        "sample_type:\n  __module__: megatron.energon\n  __class__: TextSample\nfield_map:\n  text: txt\n"
    )
    return path


class Loader:
    """One policy's loader, its start-up time and its memory."""

    def __init__(self, path: Path, seconds: float, **settings: Any) -> None:
        module = LengthPoolDataModule(path, SlowEncoder(seconds), BATCH_SIZE, virtual_epoch_length=10**9, **settings)
        before = set(children())
        self.train_loader = module.train_dataloader()
        self.stream: Iterator[Any] = iter(self.train_loader)
        started = time.perf_counter()
        next(self.stream)
        self.first_batch = time.perf_counter() - started
        self.pid = next(iter(set(children()) - before), os.getpid())

    def rate(self, samples: int) -> float:
        """Samples per second over the next `samples` samples."""
        started = time.perf_counter()
        for _ in range(samples // BATCH_SIZE):
            next(self.stream)
        return samples / (time.perf_counter() - started)

    def resident(self) -> float:
        """Resident size, MB."""
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{self.pid}/status").read_text().splitlines())
        return int(fields["VmRSS"].split()[0]) / 1024


def children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pool_sizes", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument("--num_workers", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--segments", type=int, default=12, help="segments of each loader")
    parser.add_argument("--samples", type=int, default=2000, help="samples of a segment")
    parser.add_argument("--encode_ms", type=float, default=1.0)
    options = parser.parse_args()
    table = Table("workers", "pool_size", "none /s", "pool /s", "ratio", "first batch s", "MB grown: none", "pool")
    with tempfile.TemporaryDirectory() as folder:
        path = write_dataset(Path(folder) / "data", 50_000)
        for num_workers in options.num_workers:
            for pool_size in options.pool_sizes:
                settings = {"num_workers": num_workers, "pool_size": pool_size}
                loaders = [
                    Loader(path, options.encode_ms / 1000, policy=policy, **settings) for policy in ("none", "pool")
                ]
                rates, memory = [], [loader.resident() for loader in loaders]
                for segment in range(options.segments):
                    # The one that goes first changes, for a worker reads ahead while the other is measured.
                    order = (0, 1) if segment % 2 else (1, 0)
                    measured = {index: loaders[index].rate(options.samples) for index in order}
                    rates.append((measured[0], measured[1]))
                grown = [loader.resident() - before for loader, before in zip(loaders, memory, strict=True)]
                for loader in loaders:
                    loader.train_loader.close()
                table.add_row(
                    str(num_workers),
                    f"{pool_size:,}",
                    *(f"{statistics.median(rate[i] for rate in rates):.1f}" for i in (0, 1)),
                    f"{statistics.median(pool / none for none, pool in rates):.3f}",
                    f"{loaders[1].first_batch:.2f}",
                    *(f"{megabytes:.1f}" for megabytes in grown),
                )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
