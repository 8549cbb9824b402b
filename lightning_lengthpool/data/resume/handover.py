"""From the processes of ddp_spawn, ddp_fork and ddp_notebook the state of the data comes back in a file.

These strategies train copies of the data module, in processes that end with `fit`. The module that the user holds would
know nothing of it, and a second `fit` would begin with the first samples again.
"""

import os
import tempfile
import uuid
import weakref
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher


def trains_a_copy(trainer: Trainer | None) -> bool:
    """Whether this is a process that a trainer has started for one fit, and its data module a copy."""
    return trainer is not None and isinstance(trainer.strategy.launcher, _MultiProcessingLauncher)


class Handover:
    """The file in which copies of a data module leave their state."""

    def __init__(self) -> None:
        self._file = Path(tempfile.gettempdir()) / f"lengthpool-{uuid.uuid4().hex}.pt"
        self._home = os.getpid()
        self._is_known = False  # in a copy: what lies there now, for it may have left it itself
        weakref.finalize(self, _remove, self._file, self._home)

    def leave(self, state: dict[str, Any]) -> None:
        """Leave a plain state instead of the one before."""
        self._is_known = True
        new = self._file.with_suffix(".new")
        torch.save(state, new)
        new.replace(self._file)

    def find(self) -> dict[str, Any] | None:
        """The state that was left last, None if there is none, or none that was not found before."""
        if self._is_known or not self._file.exists():
            return None
        self._is_known = os.getpid() != self._home  # the module itself takes it away
        state: dict[str, Any] = torch.load(self._file, weights_only=True)
        _remove(self._file, self._home)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if os.getpid() == self._home:  # no trainer's copy: one that the user has made
            self.__init__()  # type: ignore[misc]


def _remove(file: Path, home: int) -> None:
    if os.getpid() == home:
        file.unlink(missing_ok=True)
