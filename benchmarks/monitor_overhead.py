"""What `SyncMonitor` costs: step seconds of the demo's training with and without it.

    python benchmarks/monitor_overhead.py

One training run for each number of ranks, in which the monitor is attached and detached in turns, a segment of steps
each, so that a machine that slows down slows both. Every segment trains on the same batches. A pair of segments gives
one ratio, the median over its batches of a step's seconds with and without; shown are the median over the pairs and
its 90 % interval (bootstrap). `own` is the host time in the monitor's hooks, without Python's and autograd's calls of
them. Each segment ends with an exchange of records and their logging, which at one step of 50 does not move the
median: `all` is the ratio with an exchange spread over the steps of a segment. All on rank zero.
"""

import argparse
import json
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console
from rich.table import Table

from lightning_lengthpool import SyncMonitor
from lightning_lengthpool.demo import DemoDataModule, OcrModel
from lightning_lengthpool.monitor.compute_hooks import collectives_issued

HOOKS = ("on_train_batch_start", "on_before_backward", "on_after_backward", "on_train_batch_end")


class Record(NamedTuple):
    lengths: list[float]
    fetch_started: float
    data_seconds: float


class Replay:
    """This rank's batches, over and over."""

    def __init__(self, batches: list[tuple[Any, list[float]]], ranks: int, rounds: int) -> None:
        self.batches, self.ranks, self.rounds = batches, ranks, rounds

    def __len__(self) -> int:
        return self.rounds * len(self.batches) // self.ranks

    def __iter__(self) -> Iterator[Any]:
        rank = torch.distributed.get_rank() if self.ranks > 1 else 0
        for _ in range(self.rounds):
            for batch, lengths in self.batches[rank :: self.ranks]:
                self.record = Record(lengths, time.perf_counter(), 0.0)
                yield batch

    def pop_record(self) -> Record:
        return self.record


class TimedMonitor(SyncMonitor):
    """Adds up the time in its own hooks, and keeps that of each exchange."""

    def __init__(self, every_n_steps: int) -> None:
        super().__init__(every_n_steps)
        self.hook_seconds, self.exchange_seconds = 0.0, []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        for name in HOOKS:  # not before: a rank's process gets the callback pickled
            setattr(self, name, self._timed(getattr(self, name)))

    def _timed(self, hook: Any) -> Any:
        def timed(*args: Any) -> None:
            started, exchanges = time.perf_counter(), len(self.exchange_seconds)
            hook(*args)
            self.hook_seconds += time.perf_counter() - started - sum(self.exchange_seconds[exchanges:])

        return timed

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        exchange = self._fit._exchange

        def timed() -> float | None:
            started = time.perf_counter()
            idle = exchange()
            self.exchange_seconds.append(time.perf_counter() - started)
            return idle

        self._fit._exchange = timed


class Turns(Callback):
    """Times each step, and attaches and detaches the monitor between segments: with, without, without, with, ..."""

    def __init__(self, monitor: TimedMonitor, steps: int, out: Path) -> None:
        self.monitor, self.steps, self.out = monitor, steps, out
        self.seconds: list[float] = []
        self.attached: list[bool] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.started = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self.started)
        self.attached.append(self.monitor in trainer.callbacks)
        if len(self.seconds) % self.steps == 0:
            attach = len(self.seconds) // self.steps % 4 in (0, 3)
            if not attach and self.attached[-1]:
                self.gradients_seconds = gradients_seconds(self.monitor)
                self.monitor._fit._hooks.remove()  # they come back by themselves with the next batch
            trainer.callbacks = [self.monitor, self] if attach else [self]
        self.started = time.perf_counter()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            table = np.array(self.seconds).reshape(-1, self.steps)[2:]  # the first pair warms up
            attached = np.array(self.attached).reshape(-1, self.steps)[2:, 0]
            own = self.monitor.hook_seconds / sum(self.attached) + self.gradients_seconds
            figures = {
                "with": table[attached].tolist(),
                "without": table[~attached].tolist(),
                "own": own,
                "exchange": self.monitor.exchange_seconds,
            }
            self.out.write_text(json.dumps(figures))


def gradients_seconds(monitor: TimedMonitor, repeats: int = 200) -> float:
    """What the marks on the gradients of one step cost, outside of any step."""
    recorder, hooks = monitor._fit.recorder, monitor._fit._hooks
    recorder.begin(0, [1.0])
    recorder.start_compute(collectives_issued())
    started = time.perf_counter()
    for _ in range(repeats):
        for _, node in hooks._watched:
            recorder.mark_gradient(collectives_issued())
            if node is not None:
                recorder.after_reduction(collectives_issued())
    seconds = (time.perf_counter() - started) / repeats
    recorder._open = None
    return seconds


def demo_batches(count: int) -> list[tuple[Any, list[float]]]:
    """Batches of the demo, each with its samples' lengths."""
    data = DemoDataModule(num_workers=0, pool_size=0)
    data.prepare_data()
    data.setup("fit")
    loader = data.train_dataloader()
    stream = iter(loader)
    return [(next(stream), list(loader.pop_record().lengths)) for _ in range(count)]


def measure(ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        monitor = TimedMonitor(every_n_steps=options.steps)
        turns = Turns(monitor, options.steps, Path(folder) / "seconds.json")
        trainer = Trainer(
            accelerator="cpu",
            devices=ranks,
            strategy="ddp_spawn" if ranks > 1 else "auto",
            max_epochs=1,
            logger=CSVLogger(folder),
            callbacks=[monitor, turns],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        batches = demo_batches(ranks * options.steps)
        trainer.fit(OcrModel(), Replay(batches, ranks, 2 * (options.pairs + 1)))
        return json.loads(turns.out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--pairs", type=int, default=10, help="pairs of segments")
    parser.add_argument("--steps", type=int, default=50, help="steps of a segment")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    table = Table("ranks", "ms without", "ms with", "ratio", "90 %", "own us", "exchange ms", "all")
    for ranks in options.ranks:
        figures = measure(ranks, options)
        attached, detached = np.array(figures["with"]), np.array(figures["without"])
        ratios = np.median(attached / detached, axis=1)
        resampled = np.random.default_rng(0).choice(ratios, (10_000, len(ratios)))
        low, high = np.quantile(np.median(resampled, axis=1), [0.05, 0.95])
        exchange = float(np.median(figures["exchange"]))
        table.add_row(
            str(ranks),
            f"{np.median(detached) * 1e3:.2f}",
            f"{np.median(attached) * 1e3:.2f}",
            f"{np.median(ratios):.4f}",
            f"{low:.4f} to {high:.4f}",
            f"{figures['own'] * 1e6:.0f}",
            f"{exchange * 1e3:.2f}",
            f"{np.median(ratios) + exchange / options.steps / np.median(detached):.4f}",
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
