"""A run's files, in a folder of their own, so that no two runs ever write one file."""

import contextlib
import itertools
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from numpy.typing import NDArray

from lightning_lengthpool.ordering.lengths_file import write_lengths
from lightning_lengthpool.ordering.local_paths import is_remote, local_path, stand_in
from lightning_lengthpool.runs.run_json import About, read_about, write_about
from lightning_lengthpool.runs.steps.steps_file import StepsFile, TakenError

Array = NDArray[np.float64]

NAME = "sync"


def base_folder(trainer: Trainer) -> Path:
    """The folder in which the records' folder lies; ask on global rank zero, where loggers know their version.

    It is the one where Lightning's `ModelCheckpoint` puts `checkpoints`: of the first logger `log_dir` if that is its
    run's own (CSV, TensorBoard), else `save_dir/name/version` (W&B: project and run id; MLflow: experiment and run id).
    Without a logger, or with one that keeps nothing locally, `trainer.default_root_dir` takes the part of `save_dir`.
    A URL has a local folder instead, and a warning says which.
    """
    logger = trainer.logger
    if logger is None:
        folder = trainer.default_root_dir
    elif isinstance(logger, CSVLogger | TensorBoardLogger):
        folder = logger.log_dir
    else:
        version = f"version_{logger.version}" if isinstance(logger.version, int) else logger.version
        parts = [os.fspath(logger.save_dir or trainer.default_root_dir), logger.name, version]
        folder = "/".join(str(part) for part in parts if part not in (None, ""))
    if not is_remote(folder):
        return local_path(folder, "the logger's folder")
    local = stand_in(folder)
    rank_zero_warn(
        f"SyncMonitor writes its files to local disks only, and the run's folder is {folder}: they go to {local}. Copy "
        "them from there, or give the logger (or trainer.default_root_dir) a local folder."
    )
    return local


def claim(base: Path, run: str | None) -> tuple[Path, str]:
    """Return the folder of a run that is resumed (`run` is None for one that begins), or a new one, and its `run`.

    A new one is `sync` in `base`, or where others have that one, `sync_1`, `sync_2`, ... If no folder has the `run`
    that was given, the one returned is another.
    """
    if run is not None:
        for folder in base.glob(f"{NAME}*"):
            if _run_of(folder) == run:
                return folder, run
    for number in itertools.count():
        folder = base / (f"{NAME}_{number}" if number else NAME)
        try:
            folder.mkdir(parents=True)  # of two processes only one makes it
        except FileExistsError:
            continue
        return folder, uuid.uuid4().hex
    raise AssertionError  # there is always another number


def _run_of(folder: Path) -> str | None:
    try:
        return read_about(folder).run
    except ValueError:
        return None


class RunFiles:
    """`steps.csv`, `run.json` and `lengths.csv` of one run.

    A file that cannot be written must not end the training: one warning, and the run goes on without files. Their
    folder lies in `base`, see `claim`; None to write nothing.
    """

    def __init__(self, base: Path | None, max_rows: int | None) -> None:
        self._base, self._max_rows = base, max_rows
        self._steps: StepsFile | None = None
        self._about = About()

    @property
    def run(self) -> str | None:
        """Names the run's records, for a checkpoint: see `run_json.About`."""
        return self._about.run

    @property
    def steps_csv(self) -> Path | None:
        return None if self._steps is None else self._steps.path

    def start(self, step: int, about: About) -> None:
        """Begin the files, `step` being the first step.

        `about.run` is that of the checkpoint that the run goes on from, None if there is none. That one's records are
        continued, but for the rows of `step` and later ones, which are replaced.
        """
        if self._base is None:
            return
        before = about.run if step > 0 else None
        with self._writing():
            folder, run = claim(self._base, before)
            self._about = replace(about, run=run)
            self._steps = StepsFile(folder / "steps.csv", self._max_rows)
            self._steps.start(step, ranks=len(about.hosts or ()))
            write_about(folder, self._about)
        if self._steps is not None and step > 0 and self.run != before:
            rank_zero_info(
                f"SyncMonitor: {self._base} holds no records of the run that this one goes on from. Those from step "
                f"{step} on go to {self._steps.path}"
            )

    def append(self, steps: Mapping[str, Array]) -> None:
        """Append records to `steps.csv`, in another folder if another run has taken this one."""
        if self._steps is None or self._base is None:
            return
        with self._writing():
            try:
                self._steps.append(steps)
            except TakenError as error:
                folder, run = claim(self._base, None)
                self._about = replace(self._about, run=run)
                self._steps.move(folder / "steps.csv")
                write_about(folder, self._about)
                rank_zero_warn(
                    f"SyncMonitor: {error}, which went on from a checkpoint of this one. The records of this run, "
                    f"earlier ones too, are now in {self._steps.path}"
                )
                self._steps.append(steps)

    def write_lengths(self, lengths: Sequence[Array]) -> None:
        """Write `lengths.csv`: of each rank a sample of its samples' lengths."""
        # one that is taken is in the folder of another run
        if self._steps is not None and any(map(len, lengths)) and not self._steps.is_taken():
            with self._writing():
                ranks = np.repeat(np.arange(len(lengths)), [len(of_rank) for of_rank in lengths])
                path = self._steps.path.with_name("lengths.csv")
                write_lengths(path, np.concatenate(list(lengths)).tolist(), ranks=ranks.tolist())

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            self._base = self._steps = None
            rank_zero_warn(f"SyncMonitor goes on without its files: {error}")
