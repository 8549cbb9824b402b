"""Measure, in a Lightning run, how long each rank works and how long it waits for the others.

In data-parallel training the wall-clock time of a step is the same on every rank, for the gradient reduction
makes all wait for the slowest. So `SyncMonitor` times each rank's OWN compute: from the entry of the forward
pass, past whatever DDP exchanges before it, to the rank's last local gradient. What follows until the
backward pass returns is waiting.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_lengthpool.monitor.fit_monitor import FitMonitor, step_number
from lightning_lengthpool.monitor.run_files import RunFiles, base_folder
from lightning_lengthpool.monitor.run_log import RunLog
from lightning_lengthpool.monitor.run_writer import RunWriter


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

    and appends to `sync/steps.csv` (columns: `runs.steps.columns.COLUMNS`), one row for each micro-batch and rank. With
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
        self._fit: FitMonitor | None = None
        self._base: Path | None = None
        self._run: str | None = None  # of the checkpoint or the fit that this one goes on from, see `RunFiles.run`

    @property
    def writer(self) -> RunWriter | None:
        """What keeps the records of the present or the last fit, on global rank zero once its training has begun."""
        return None if self._fit is None else self._fit.writer

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":  # of a trainer that goes on, for a new one is at step 0 until its checkpoint is there
            goes_on = self.writer is not None and step_number(trainer) > 0
            self._run = self.writer.files.run if self.writer is not None and goes_on else None

    def state_dict(self) -> dict[str, Any]:
        run = (self.writer.files.run if self.writer is not None else None) or self._run
        return {} if run is None else {"run": run}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._run = state_dict.get("run")

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        is_dry = getattr(trainer, "fast_dev_run", False)
        self._base = base_folder(trainer) if trainer.is_global_zero and not is_dry else None
        self._remove_hooks()
        self._fit = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._remove_hooks()
        files = RunFiles(self._base, self.max_rows) if trainer.is_global_zero else None
        self._fit = FitMonitor(trainer, pl_module, self.length_fn, files, self._log)

    def _log(self, hosts: Sequence[str]) -> RunLog:
        return RunLog(hosts, self.alert_idle, self.alert_windows)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._fit is not None:
            self._fit.start_batch(batch, batch_idx, self._run)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._fit is not None:
            self._fit.start_backward()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fit is not None:
            self._fit.end_backward()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._fit is None:
            return
        idle = self._fit.end_batch(self.every_n_steps, is_automatic=pl_module.automatic_optimization)
        if idle is not None:
            pl_module.log("idle%", 100 * idle, prog_bar=True, logger=False, batch_size=1, rank_zero_only=True)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._interrupt()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._interrupt()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._interrupt()
        if self._fit is not None:
            self._fit.flush()  # a run that resumes from here goes on without a gap

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fit is not None:
            self._fit.end()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # later than on_train_end, where progress bars are still on the screen
        if self.writer is not None:
            if self.log_figures:
                self.writer.log_figures()
            self.writer.print()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._fit is not None:
            self._fit.fail()

    def _interrupt(self) -> None:
        """Something else comes between the last micro-batch and the next: a validation, a checkpoint, a new epoch."""
        if self._fit is not None:
            self._fit.interrupt()

    def _remove_hooks(self) -> None:
        if self._fit is not None:
            self._fit.remove_hooks()
