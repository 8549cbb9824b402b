"""Lets Lightning's SLURM handler save between two steps, the same two on all ranks.

The handler saves where the signal finds a rank, and then waits for the others in a barrier. A rank that is found in its
forward pass waits there, while the others wait for its gradients: all hang, and if rank zero is one of these no
checkpoint is ever written. So the signal is only noted. At its next batch rank zero tells the other ranks, through
their threads, at which batch all of them call the handler: no rank can be past it, because Lightning lets no rank begin
a batch before rank zero does.
"""

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Trainer


class SignalGuard:
    """Stands before the handler that Lightning installs for SLURM's signal, on several ranks.

    Lightning has installed it by the first `boundary`. `tell` brings the number of a boundary to `save_at` of all other
    ranks, and returns when all have it; it is None on all ranks but the one that decides.
    """

    def __init__(self, trainer: Trainer, tell: Callable[[int], Any] | None) -> None:
        self._trainer, self._tell = trainer, tell
        self._handler: Callable[[int, FrameType | None], Any] | None = None
        self._signal = 0
        self._is_due = False
        self._boundaries = 0
        self.save_at = 0  # the boundary at which all ranks save

    def boundary(self) -> None:
        """To be called before each batch, equally often on all ranks."""
        if self._boundaries == 0:
            self._install()
        self._boundaries += 1
        if self._handler is not None and self._boundaries == self.save_at:
            self._handler(self._signal, None)
        elif self._is_due and self._tell is not None:
            self._is_due = False
            self._tell(self._boundaries + 1)
            self.save_at = self._boundaries + 1

    def _install(self) -> None:
        environment = getattr(self._trainer.strategy, "cluster_environment", None)
        if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
            return
        self._signal = environment.requeue_signal or 0
        handler = signal.getsignal(self._signal)
        if callable(handler):
            self._handler = handler
            signal.signal(self._signal, self._note)  # Lightning itself puts back what was there before the fit

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._is_due = True
