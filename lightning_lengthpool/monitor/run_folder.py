"""Where a run's records go: a folder of its own, so that no two runs ever write one file."""

import itertools
import os
import uuid
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_warn

from lightning_lengthpool.ordering.local_paths import is_remote, local_path, stand_in
from lightning_lengthpool.runs.run_json import read_about

NAME = "sync"


def base_folder(trainer: Trainer) -> Path:
    """The folder in which the records' folder lies; ask on global rank zero, where loggers know their version.

    It is the one where Lightning's `ModelCheckpoint` puts `checkpoints`: of the first logger `log_dir` if that is its
    run's own (CSV, TensorBoard), else `save_dir/name/version` (W&B: project and run id; MLflow: experiment and run id).
    Without a logger, or with one that keeps nothing locally, `trainer.default_root_dir` takes the part of `save_dir`.
    A URL has a local folder in its stead, and a warning says which.
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
    """Find the folder of a run that is resumed, or make one that no other run has.

    Args:
        base: Where the folder lies: `sync`, or where others have that one, `sync_1`, `sync_2`, ...
        run: The `run` of a run that is resumed; None for one that begins.

    Returns:
        The folder, and its `run`. That is another one than was given if no folder in `base` has it.
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
