"""Measure, in a Lightning run, how long each rank works and how long it waits for the others.

In data-parallel training the wall-clock time of a step is the same on every rank, for the gradient reduction
makes all wait for the slowest. So `SyncMonitor` times each rank's OWN compute: from the entry of the forward
pass, past whatever DDP exchanges before it, to the rank's last local gradient. What follows until the
backward pass returns is waiting.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_lengthpool import report
from lightning_lengthpool.compute_hooks import ComputeHooks, collectives_issued
from lightning_lengthpool.metrics import IdleFraction, PaddingFraction, RankSpread, UsefulFraction
from lightning_lengthpool.recorder import CudaStepRecorder, StepRecorder
from lightning_lengthpool.records import COLUMNS, RunTotals, append_steps, by_step

HIDDEN = (
    "SyncMonitor: the compute seconds of some steps are left out (empty cells in steps.csv), so their idle fraction "
    "comes from padded tokens. The likely cause is communication inside the step before the last gradient, when a "
    "rank's own work cannot be told from waiting: self.log(..., sync_dist=True) in training_step (use "
    "sync_dist=False there), SyncBatchNorm, an all_reduce or all_gather in the forward pass, or several backward "
    "passes in one step; or else a step without a backward pass."
)
UNSUPPORTED = (
    "SyncMonitor: {strategy} communicates during the forward and backward pass, so a rank's own compute seconds "
    "cannot be measured; idle fractions come from padded tokens. A single device and DDP can be measured."
)
NO_LENGTHS = (
    "SyncMonitor does not know the samples' lengths: the train loader ({loader}) does not report them. Use "
    "LengthPoolDataModule, whose loader does, or pass SyncMonitor(length_fn=...), a function from a batch to a list "
    "with the length of each of its samples."
)


class SyncMonitor(Callback):
    """Record how long each rank computes and waits; log it, write `steps.csv`, and print a table after `fit`.

    The ranks exchange their records every `every_n_steps` optimizer steps and once after the last, in one
    collective; in between nothing is communicated and the GPU is not synchronized. Then rank zero logs, for
    every optimizer step and under that step's own number (the one under which Lightning logs a `self.log` of
    its `training_step`):

    - `sync/idle_fraction`: by compute seconds where they were measured, else by padded tokens
    - `sync/compute_seconds_mean`, `_min`, `_max`, `_variance` over ranks (absent where not measured)
    - `sync/tokens_mean`, `_min`, `_max`, `_variance` over ranks
    - `sync/padding_fraction`, `sync/useful_fraction`
    - `sync/data_wait_seconds_max` over ranks (absent if the loader does not report it)

    and appends to `<trainer.log_dir>/sync/steps.csv` (columns: `records.COLUMNS`), one row for each
    micro-batch and rank. A fit that starts at step 0 starts the file anew; a resumed one drops the rows of
    the steps it repeats and appends. With `fast_dev_run`, which turns loggers off, no file is written.

    A step is what lies between two gradient reductions: accumulated micro-batches are summed before ranks are
    compared. (Lightning itself exchanges a flag before every micro-batch, where accumulating ranks may wait for each
    other as well; that lies between records and is not counted.) Compute seconds are measured on a single device and
    under DDP. Where a collective runs inside the step before the last gradient, they are absent, with one warning.
    `step_seconds` and `data_seconds` are host time.

    Args:
        every_n_steps: Optimizer steps between two exchanges. Default 50.
        length_fn: Returns the lengths, in tokens, of a batch's samples, as plain numbers. Default: the
            lengths that the train loader of `LengthPoolDataModule` reports. Needed with any other data.

    Raises:
        ValueError: If `every_n_steps` is less than 1.
        MisconfigurationException: When training starts, if neither the loader nor `length_fn` gives lengths.
    """

    def __init__(self, every_n_steps: int = 50, length_fn: Callable[[Any], Sequence[float]] | None = None) -> None:
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps must be at least 1, got {every_n_steps}.")
        self.every_n_steps = every_n_steps
        self.length_fn = length_fn
        self._recorder = StepRecorder()
        self._totals = RunTotals()
        self._hooks: ComputeHooks | None = None
        self._path: Path | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # asking for log_dir is a collective, so every rank must ask
        self._totals = RunTotals()
        folder = trainer.log_dir or trainer.default_root_dir
        self._path = None if trainer.fast_dev_run else Path(folder) / "sync" / "steps.csv"

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.length_fn is None and not hasattr(trainer.train_dataloader, "pop_record"):
            raise MisconfigurationException(NO_LENGTHS.format(loader=type(trainer.train_dataloader).__name__))
        self._recorder = CudaStepRecorder() if pl_module.device.type == "cuda" else StepRecorder()
        self._totals = RunTotals()
        self._metrics = {
            "idle_compute": IdleFraction(sync_on_compute=False),
            "idle_tokens": IdleFraction(sync_on_compute=False),
            "padding": PaddingFraction(sync_on_compute=False),
            "useful": UsefulFraction(sync_on_compute=False),
            "compute_seconds": RankSpread(sync_on_compute=False),
            "tokens": RankSpread(sync_on_compute=False),
        }
        self._steps = 0
        self._is_ddp = isinstance(trainer.strategy.model, DistributedDataParallel)
        self._measured = self._is_ddp or isinstance(trainer.strategy, SingleDeviceStrategy)
        self._warned = not self._measured
        if not self._measured:
            rank_zero_warn(UNSUPPORTED.format(strategy=type(trainer.strategy).__name__))
        self._remove_hooks()
        if self._measured:
            self._hooks = ComputeHooks(pl_module, self._recorder, self._is_ddp)
        if trainer.is_global_zero and self._path is not None:
            _keep_steps_before(self._path, _step_number(trainer))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        pop_record = getattr(trainer.train_dataloader, "pop_record", None)  # a fit may have several loaders
        record = pop_record() if pop_record else None
        lengths = self.length_fn(batch) if self.length_fn else record.lengths
        if self._hooks is not None:
            self._hooks.watch_gradients()
        timing = (record.fetch_started, record.data_seconds) if record else ()
        self._recorder.begin(_step_number(trainer), lengths, *timing)
        if self._measured and not self._is_ddp:
            self._recorder.start_compute(collectives_issued())

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._recorder.start_backward(collectives_issued())

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._recorder.end_backward()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._recorder.end()
        if not trainer.fit_loop._should_accumulate():
            self._steps += 1
            if self._steps % self.every_n_steps == 0:
                self._exchange(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._remove_hooks()
        self._exchange(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # later than on_train_end, where progress bars are still on the screen
        if trainer.is_global_zero and self._totals.steps:
            report.print_table(report.steps_table(self._totals.summary()))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._remove_hooks()
        if trainer.world_size == 1 and self._path is not None:  # else no exchange: other ranks may be gone
            self._exchange(trainer)

    def _remove_hooks(self) -> None:
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None

    def _exchange(self, trainer: Trainer) -> None:
        """Gather the records of all ranks, and on rank zero log and write them."""
        # under tensor parallelism the global rank is not the data-parallel one; the sampler's is
        sampler = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
        own = torch.from_numpy(self._recorder.take(int(sampler.get("rank", 0))))
        if not len(own):
            return
        gathered = own[None]
        if trainer.world_size > 1:
            # strategy.all_gather is the differentiable one, of which torch warns that it will go
            own = own.to(trainer.strategy.root_device)
            parts = [torch.empty_like(own) for _ in range(trainer.world_size)]
            torch.distributed.all_gather(parts, own)
            gathered = torch.stack(parts).cpu()
        if not trainer.is_global_zero:
            return
        # ranks that share a data-parallel rank train on the same batches: the first stands for all
        _, firsts = np.unique(gathered[:, 0, 1].numpy(), return_index=True)
        rows = gathered[firsts.tolist()].transpose(0, 1).reshape(-1, own.shape[1]).numpy()
        steps = dict(zip(COLUMNS, rows.T, strict=True))
        self._totals.add(steps)
        if self._path is not None:
            append_steps(self._path, steps)
        if not self._warned and np.isnan(steps["compute_seconds"]).any():
            self._warned = True
            rank_zero_warn(HIDDEN)
        if trainer.loggers:
            self._log(trainer, by_step(steps))

    def _log(self, trainer: Trainer, table: dict[str, Any]) -> None:
        for i, step in enumerate(table["step"]):
            row = {name: torch.from_numpy(table[name][i : i + 1]) for name in table if name not in ("step", "rank")}
            idle = self._metrics["idle_compute"](row["compute_seconds"])
            idle_tokens = self._metrics["idle_tokens"](row["padded_tokens"])
            values = {
                "idle_fraction": idle_tokens if idle.isnan() else idle,
                "padding_fraction": self._metrics["padding"](row["tokens"], row["padded_tokens"]),
                "useful_fraction": self._metrics["useful"](row["tokens"], row["padded_tokens"]),
                "data_wait_seconds_max": row["data_seconds"].max(),
            }
            for name in ("compute_seconds", "tokens"):
                spread = self._metrics[name](row[name])
                values |= {f"{name}_{kind}": value for kind, value in spread.items()}
            logged = {f"sync/{name}": value.item() for name, value in values.items() if not value.isnan()}
            for logger in trainer.loggers:
                logger.log_metrics(logged, step=int(step))


def _step_number(trainer: Trainer) -> int:
    """The number under which Lightning logs the current `training_step` (its own callbacks read it here too).

    It counts from 0 and goes up with each batch after which an optimizer may step; `trainer.global_step`
    would count each of several optimizers.
    """
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def _keep_steps_before(path: Path, step: int) -> None:
    """Keep the rows of a `steps.csv` that a run which now starts at `step` does not repeat."""
    if not path.exists():
        return
    if step == 0:
        path.unlink()
        return
    header, *rows = path.read_text().splitlines(keepends=True)
    path.write_text("".join([header, *(row for row in rows if int(row.split(",", 1)[0]) < step)]))
