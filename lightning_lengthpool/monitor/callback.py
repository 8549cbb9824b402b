"""Measure, in a Lightning run, how long each rank works and how long it waits for the others.

In data-parallel training the wall-clock time of a step is the same on every rank, for the gradient reduction
makes all wait for the slowest. So `SyncMonitor` times each rank's OWN compute: from the entry of the forward
pass, past whatever DDP exchanges before it, to the rank's last local gradient. What follows until the
backward pass returns is waiting.
"""

import math
import socket
import uuid
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

from lightning_lengthpool.monitor.compute_hooks import ComputeHooks
from lightning_lengthpool.monitor.fetch_timer import FetchTimer
from lightning_lengthpool.monitor.recorder import CudaStepRecorder, StepRecorder
from lightning_lengthpool.monitor.reservoir import Reservoir
from lightning_lengthpool.monitor.run_folder import base_folder
from lightning_lengthpool.monitor.run_log import Journal
from lightning_lengthpool.ranks.store import ALONE_SECONDS, gather
from lightning_lengthpool.runs.records import COLUMNS

SAMPLED_LENGTHS = 1000  # of each rank: enough for the advice at the end

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
    - `sync/data_wait_seconds_max` over ranks (absent for a `training_step` that fetches its batches itself)

    and appends to `sync/steps.csv` (columns: `records.COLUMNS`), one row for each micro-batch and rank. With
    `fast_dev_run`, which turns loggers off, no file is written.

    The folder `sync` lies beside Lightning's `checkpoints`: in the first logger's own folder of the run (CSV,
    TensorBoard: `log_dir`; W&B: `save_dir/project/run id`; MLflow: `save_dir/experiment id/run id`; others:
    `save_dir/name/version`); `trainer.default_root_dir` takes the part of `save_dir` where a logger has none, or where
    there is no logger. Files are written to local disks only: if that folder is a URL (`s3://`), they go to a folder
    below `lightning_logs` in the current directory, and a warning says so once.

    No two runs write one file. A run that begins where others have `sync` takes `sync_1`, `sync_2`, ...; the end of
    `fit` prints the file's path. A run that is resumed from a checkpoint continues that run's file, if the logger
    keeps its folder (give it a fixed `version`, or W&B's `id`): it drops the rows of the steps that it repeats. If the
    run that made the checkpoint is still going, its records move to a new folder, with a warning.

    A step is what lies between two gradient reductions: accumulated micro-batches are summed before ranks are
    compared. (Lightning itself exchanges a flag before every micro-batch, where accumulating ranks may wait for each
    other as well; that lies between records and is not counted.) `step_seconds` and `data_seconds` are host time.

    Compute seconds are measured on a single device and under DDP: from the entry of the forward pass to the last local
    gradient; with several backward passes they go on from the return of each to the last gradient of the next.
    Launching a reduction counts as waiting, so a communication hook may block. Where any other collective runs within
    compute, the figure is absent, with one warning. Not seen: communication outside torch.distributed, and an
    asynchronous collective begun before the forward pass and waited for inside it.

    When `fit` ends, the table is followed by the causes of waiting, in words (see `causes.CauseTracker`, whose figures
    are also logged, as `sync/idle_by_*`, every 50 steps). The progress bar shows `idle%`
    of the steps of the last exchange, waiting for data included.

    Args:
        every_n_steps: Optimizer steps between two exchanges. Default 50.
        length_fn: Returns the lengths, in tokens, of a batch's samples, as plain numbers. Default: the
            lengths that the train loader of `LengthPoolDataModule` reports. Needed with any other data.
        max_rows: Rows of `steps.csv` at most (a row for each micro-batch and rank, about 60 bytes); above it every
            second block of 100 steps is left out, then three of four, and so on. None for no cap.
        log_figures: Give the figures of the `report` command to the loggers that take figures (TensorBoard, Weights &
            Biases, MLflow) when `fit` ends.
        alert_idle: Idle fraction, in 0 to 1, that calls for a warning: once, with the cause. Default: no warning.
        alert_windows: Windows of 50 steps in a row that must be as idle before the warning comes.

    Raises:
        ValueError: If a number is out of its range.
        MisconfigurationException: When training starts, if neither the loader nor `length_fn` gives lengths.
    """

    def __init__(
        self,
        every_n_steps: int = 50,
        length_fn: Callable[[Any], Sequence[float]] | None = None,
        *,
        max_rows: int | None = 1_000_000,
        log_figures: bool = False,
        alert_idle: float | None = None,
        alert_windows: int = 3,
    ) -> None:
        for name, value in (("every_n_steps", every_n_steps), ("alert_windows", alert_windows)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        if length_fn is not None and not callable(length_fn):
            raise ValueError(f"length_fn must be a function from a batch to its samples' lengths, got {length_fn!r}.")
        if max_rows is not None and max_rows < 1:
            raise ValueError(f"max_rows must be at least 1, or None for no cap, got {max_rows}.")
        if alert_idle is not None and not 0 < alert_idle <= 1:
            raise ValueError(f"alert_idle is a fraction above 0 and at most 1, got {alert_idle}.")
        self.every_n_steps = every_n_steps
        self.length_fn = length_fn
        self.max_rows = max_rows
        self.log_figures = log_figures
        self.alert_idle, self.alert_windows = alert_idle, alert_windows
        self._recorder = StepRecorder()
        self._hooks: ComputeHooks | None = None
        self._fetches: FetchTimer | None = None
        self.journal: Journal | None = None
        self._base: Path | None = None
        self._run: str | None = None  # of the checkpoint or the fit that this one goes on from, see `Journal.run`
        self._training = self._is_ddp = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":  # of a trainer that goes on, for a new one is at step 0 until its checkpoint is there
            self._run = self.journal.run if self.journal is not None and _step_number(trainer) > 0 else None

    def state_dict(self) -> dict[str, Any]:
        run = (self.journal.run if self.journal is not None else None) or self._run
        return {} if run is None else {"run": run}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._run = state_dict.get("run")

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._base = base_folder(trainer) if trainer.is_global_zero and not trainer.fast_dev_run else None
        self.journal = None
        self._training = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.length_fn is None and not hasattr(trainer.train_dataloader, "pop_record"):
            raise MisconfigurationException(NO_LENGTHS.format(loader=type(trainer.train_dataloader).__name__))
        self._recorder = CudaStepRecorder() if pl_module.device.type == "cuda" else StepRecorder()
        self._lengths = Reservoir(SAMPLED_LENGTHS)
        self._steps = 0
        self._finished = -1  # the last step whose micro-batches are all there
        self._rows = np.empty((0, len(COLUMNS)))
        self._flushes = 0
        # under tensor parallelism the global rank is not the data-parallel one; the sampler's is
        sampler = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
        self._rank, self._ranks = int(sampler.get("rank", 0)), int(sampler.get("num_replicas", 1))
        self._is_ddp = is_ddp = isinstance(trainer.strategy.model, DistributedDataParallel)
        measured = is_ddp or isinstance(trainer.strategy, SingleDeviceStrategy)
        if not measured:
            rank_zero_warn(UNSUPPORTED.format(strategy=type(trainer.strategy).__name__))
        self._remove_hooks()
        self._fetches = FetchTimer(trainer)
        if measured:
            self._hooks = ComputeHooks(pl_module, self._recorder, is_ddp)
        settings = _settings(trainer)
        hosts, workers, self._name = self._agree(trainer, settings.get("num_workers"))
        if trainer.is_global_zero:
            self.journal = Journal(
                self._base,
                loggers=trainer.loggers,
                hosts=hosts,
                workers=workers,
                settings=settings,
                max_rows=self.max_rows,
                alert_idle=self.alert_idle,
                alert_windows=self.alert_windows,
                measured=measured,
            )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        pop_record = getattr(trainer.train_dataloader, "pop_record", None)  # a fit may have several loaders
        record = pop_record() if pop_record else None
        lengths = _checked(self.length_fn(batch), batch_idx) if self.length_fn else record.lengths
        self._lengths.add(lengths)
        known = self._fetches.last() or ()
        if record:
            known = (record.fetch_started, record.data_seconds, getattr(record, "missed", False))
        step = _step_number(trainer)
        if not self._training:  # not earlier, for only now a resumed loop has counted the step that its checkpoint ends
            self._training = True
            if self.journal is not None:
                self.journal.start(step, self._run)
        self._recorder.begin(step, lengths, *known)
        if self._hooks is not None:
            self._hooks.start_batch()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._hooks is not None:
            self._hooks.start_backward()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._hooks is not None:
            self._hooks.end_backward()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._recorder.end(needs_reduction=self._is_ddp and not pl_module.automatic_optimization)
        if trainer.fit_loop._should_accumulate():
            return
        self._finished = _step_number(trainer)
        self._steps += 1
        if self._steps % self.every_n_steps == 0:
            idle = self._exchange(trainer)
            if idle is not None:
                self.log("idle%", 100 * idle, prog_bar=True, logger=False, batch_size=1, rank_zero_only=True)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._recorder.interrupt()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._recorder.interrupt()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._recorder.interrupt()
        self._flush(trainer)  # a run that resumes from here goes on without a gap

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._remove_hooks()
        self._exchange(trainer)
        own = torch.from_numpy(np.append(self._rank, self._lengths.padded()))
        gathered = self._gather(trainer, own).numpy()
        self._training = False
        if self.journal is not None:
            by_rank = {row[0]: row[1:] for row in gathered[::-1]}  # the first of each data rank
            self.journal.close([own[~np.isnan(own)] for _, own in sorted(by_rank.items())])

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # later than on_train_end, where progress bars are still on the screen
        if self.journal is not None:
            if self.log_figures:
                self.journal.log_figures()
            self.journal.print()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._remove_hooks()
        self._flush(trainer)
        self._training = False

    def _remove_hooks(self) -> None:
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None
        if self._fetches is not None:
            self._fetches.remove()
            self._fetches = None

    def _collect(self) -> np.ndarray:
        """The records of whole steps since the last exchange, shape `[micro-batches, columns]`; they are kept."""
        self._rows = np.concatenate([self._rows, self._recorder.take(self._rank)])
        return self._rows[self._rows[:, 0] <= self._finished]

    def _exchange(self, trainer: Trainer) -> float | None:
        """Gather the records of all ranks for rank zero's journal; there it returns these steps' idle fraction."""
        own = self._collect()
        if not len(own):
            return None
        self._rows = self._rows[len(own) :]
        rows = self._gather(trainer, torch.from_numpy(own))
        return None if self.journal is None else self.journal.add(rows.numpy())

    def _flush(self, trainer: Trainer) -> None:
        """Let the journal have the records before the next exchange, which still brings all of them.

        Without a collective, for this rank may be alone here, in an exception handler or by a call of the user's.
        """
        if not self._training:
            return
        own = self._collect()
        last, self._flushes = f"{self._name}-{self._flushes}", self._flushes + 1
        if self.journal is None or len(own):
            progress = trainer.fit_loop.epoch_loop.batch_progress.total
            seconds = ALONE_SECONDS if progress.ready > progress.processed else None  # in a step others may be stuck
            name, plain = f"{self._name}-{self._flushes}", torch.from_numpy(own)
            tensors = gather(plain, self._rank, self._ranks, name, last=last, seconds=seconds)
            parts = [None if tensor is None else tensor.numpy() for tensor in tensors]
            if self.journal is not None and all(part is not None for part in parts):
                count = min(map(len, parts))  # a rank that fails may be a step behind
                if count:
                    self.journal.add(np.stack([part[:count] for part in parts]))

    def _gather(self, trainer: Trainer, own: Tensor) -> Tensor:
        """Stack a tensor of all processes, on the CPU; the shape must be the same everywhere."""
        if trainer.world_size == 1:
            return own[None]
        # strategy.all_gather is the differentiable one, of which torch warns that it will go
        own = own.to(trainer.strategy.root_device)
        parts = [torch.empty_like(own) for _ in range(trainer.world_size)]
        torch.distributed.all_gather(parts, own)
        return torch.stack(parts).cpu()

    def _agree(self, trainer: Trainer, num_workers: int | None) -> tuple[list[str], list[int | None], str]:
        """The host name and the number of workers of each data rank, and a name in the store that was never used."""
        own = socket.gethostname(), num_workers, uuid.uuid4().hex
        if trainer.world_size == 1:
            return [own[0]], [own[1]], own[2]
        found: list[Any] = [None] * trainer.world_size
        torch.distributed.all_gather_object(found, (self._rank, own))
        by_rank = [of_rank for _, of_rank in sorted(dict(reversed(found)).items())]
        hosts, workers, _ = zip(*by_rank, strict=True)
        return list(hosts), list(workers), found[0][1][2]


def _settings(trainer: Trainer) -> dict[str, Any]:
    """What is known of the data module, or else of the loader."""
    if hasattr(trainer.datamodule, "pool_settings"):
        return trainer.datamodule.pool_settings()
    workers = getattr(trainer.train_dataloader, "num_workers", None)
    return {"num_workers": workers} if isinstance(workers, int) else {}


def _checked(lengths: Any, batch_idx: int) -> list[float]:
    """What `length_fn` returned, as numbers."""
    try:
        numbers = list(map(float, lengths))
    except TypeError:
        numbers = None
    if numbers is None or not all(0 <= number < math.inf for number in numbers):
        raise ValueError(
            f"length_fn gave {lengths if numbers is None else numbers} for batch {batch_idx}, expected the length in "
            "tokens of each of its samples: a list of finite numbers, none of them negative."
        )
    return numbers


def _step_number(trainer: Trainer) -> int:
    """The number under which Lightning logs the current `training_step` (its own callbacks read it here too).

    It counts from 0 and goes up with each batch after which an optimizer may step; `trainer.global_step`
    would count each of several optimizers.
    """
    return trainer.fit_loop.epoch_loop._batches_that_stepped
