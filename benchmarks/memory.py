"""Peak memory of a worker whose pool holds light samples, against heavy ones.

    python benchmarks/memory.py

The demo's data, pools of 1,000, one worker, over two pools. Light: the demo's encoder, whose pool holds the PNG files
and the text (`preencode_sample` computes the length, `postencode_sample` decodes). Heavy: the same work done before the
pool, which then holds decoded patches.
"""

import argparse
import os
from pathlib import Path

from loader_overhead import children
from megatron.energon import OCRSample, TaskEncoder, stateless
from rich.console import Console
from rich.table import Table

from lightning_lengthpool import LengthPoolDataModule
from lightning_lengthpool.demo import OcrTaskEncoder
from lightning_lengthpool.demo.build import ensure_dataset


class HeavyEncoder(OcrTaskEncoder):
    """Decodes before the pool."""

    postencode_sample = TaskEncoder.postencode_sample

    @stateless
    def preencode_sample(self, sample: OCRSample) -> object:
        return OcrTaskEncoder.postencode_sample(self, OcrTaskEncoder.preencode_sample(self, sample))


def megabytes(pid: int, field: str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(dict(line.split(":", 1) for line in lines)[field].split()[0]) / 1024


def peak(encoder: TaskEncoder, policy: str, pool_size: int) -> float:
    """Peak resident memory of the worker over two pools, MB."""
    settings = {"pool_size": pool_size, "num_workers": 1, "policy": policy, "virtual_epoch_length": 10**9}
    module = LengthPoolDataModule(ensure_dataset("code"), encoder, 1, **settings)
    before = set(children())
    stream = iter(module.train_dataloader())
    for _ in range(2 * pool_size):
        next(stream)
    (pid,) = set(children()) - before
    result = megabytes(pid, "VmHWM")
    module.teardown("fit")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pool_size", type=int, default=1000)
    options = parser.parse_args()
    base = peak(OcrTaskEncoder(), "none", options.pool_size)
    table = Table("pool", "peak MB", "MB over no pool", "KB per sample held (2 x pool_size)")
    table.add_row("none", f"{base:.0f}", "", "")
    for name, encoder in (("light", OcrTaskEncoder()), ("heavy", HeavyEncoder())):
        megabytes_peak = peak(encoder, "pool", options.pool_size)
        more = megabytes_peak - base
        table.add_row(name, f"{megabytes_peak:.0f}", f"{more:.0f}", f"{more * 1024 / (2 * options.pool_size):.1f}")
    Console(width=110).print(table)
    print(f"main process {os.getpid()}: {megabytes(os.getpid(), 'VmHWM'):.0f} MB")


if __name__ == "__main__":
    main()
