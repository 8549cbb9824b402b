"""What energon's loaders fork: worker processes that answer to nobody but the training process.

A worker is forked from the training process and takes over its signal handlers, with everything that these refer to.
SLURM signals every process of a step: a worker would run the handler with which Lightning saves a checkpoint, and write
the state of the moment of the fork over the real one. So a worker forgets the handlers before one can run. It ignores
what the training process handles, and SIGUSR1 and SIGUSR2, because training goes on after them. SIGTERM ends it, as
ever with torch: quietly if the training process has sent it; if somebody else has, that process gets torch's error.

And torch's workers look for their parent only between two batches: here a thread looks once a second, and a worker
whose parent was killed ends, however busy it is.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Generator
from multiprocessing.context import ForkContext, ForkProcess
from typing import Any, TypeVar

import torch
from megatron.energon import SavableDataset, WorkerConfig
from megatron.energon.savable_loader import BasicDataLoader
from megatron.energon.state import FlexState
from megatron.energon.wrappers.base import BaseWrapperDataset
from torch.utils.data import DataLoader

LoaderT = TypeVar("LoaderT", bound="DataLoader[Any]")
T = TypeVar("T")

TIMEOUT = 600.0  # seconds that `read_in_workers` waits

# The training process survives these where it has a handler, and goes on: so must its workers.
_IGNORED = {signal.SIGUSR1, signal.SIGUSR2}
# What torch ends its workers with, and what tells a worker of the processes that an encoder starts.
_DEFAULT = {signal.SIGTERM, signal.SIGCHLD}
_LOOK_EVERY = 1.0  # seconds


def prepare_workers(loader: LoaderT) -> LoaderT:
    """Let a loader start its workers without the training process's signal handlers, and end with that process.

    It also pins memory only where there is a GPU. To be called before the loader is iterated; returns the same one.
    """
    if loader.num_workers:
        loader.multiprocessing_context = _Context()
    loader.pin_memory = torch.cuda.is_available()  # energon always asks for it, and torch warns where it is in vain
    return loader


def stop_workers(loader: DataLoader[Any]) -> None:
    """End a loader's worker processes now: torch leaves persistent ones to the garbage collector."""
    iterator = getattr(loader, "_iterator", None)
    if iterator is not None and hasattr(iterator, "_shutdown_workers"):
        with contextlib.suppress(RuntimeError):  # torch's word that a worker was dead already
            iterator._shutdown_workers()
        loader._iterator = None


class NothingCameError(Exception):
    """Workers made nothing in the time that is told: energon lets an encoder skip samples for ever."""


class Records(BaseWrapperDataset[Any, T]):
    """A data set of plain records that a worker makes of samples, for `read_in_workers`; nothing of it is saved.

    A record is a dataclass with a field `__restore_key__: tuple`, into which energon's loader puts its own position.
    """

    def __init__(self, dataset: SavableDataset, *, worker_config: WorkerConfig) -> None:
        super().__init__(dataset, worker_config=worker_config)

    def reset_state_own(self) -> None: ...

    def save_state(self) -> FlexState:
        return FlexState(__class__=type(self).__name__)

    def len_worker(self, worker_idx: int | None = None) -> int:
        return self.dataset.len_worker(worker_idx)

    def config(self) -> dict[str, Any]:
        return {"type": type(self).__qualname__, "dataset": self.dataset.config()}

    def __str__(self) -> str:
        return f"{type(self).__name__}({self.dataset})"


def read_in_workers(dataset: Records[T], *, prefetch_factor: int = 2) -> Generator[T, None, None]:
    """Read a data set in forked workers, which are stopped when the iterator ends or is closed.

    Raises `NothingCameError` if nothing came for `TIMEOUT` seconds, torch's own `RuntimeError` if a worker has died.
    """
    loader = BasicDataLoader(
        dataset, gc_collect_every_n_steps=0, prefetch_factor=prefetch_factor, watchdog_timeout_seconds=None
    )
    prepare_workers(loader)
    loader.pin_memory, loader.timeout = False, TIMEOUT
    try:
        yield from loader
    except RuntimeError as error:
        if "timed out" not in str(error):
            raise
        raise NothingCameError(f"within {TIMEOUT:.0f} s") from error
    finally:
        stop_workers(loader)


class _Worker(ForkProcess):
    def start(self) -> None:
        # No handler runs in the new process before `run`: it begins with these signals blocked.
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            super().start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def run(self) -> None:
        _forget_handlers()
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        threading.Thread(target=_end_with_parent, daemon=True).start()
        super().run()


class _Context(ForkContext):
    Process = _Worker


def _forget_handlers() -> None:
    handled = {number for number in signal.valid_signals() if callable(signal.getsignal(number))}
    for number in (handled | _IGNORED) - {signal.SIGINT}:  # Ctrl-C ends a worker as ever
        signal.signal(number, signal.SIG_DFL if number in _DEFAULT else signal.SIG_IGN)


def _end_with_parent() -> None:
    # Not by PR_SET_PDEATHSIG: that signal comes when the THREAD ends which has started the worker.
    parent = multiprocessing.parent_process()
    assert parent is not None
    while os.getppid() == parent.pid:
        time.sleep(_LOOK_EVERY)
    os._exit(1)
