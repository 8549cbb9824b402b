"""What energon's loaders fork: worker processes that answer to nobody but the training process.

A worker is forked from the training process and takes over its signal handlers, with everything that these refer to.
SLURM signals every process of a step: a worker would run the handler with which Lightning saves a checkpoint, and write
the state of the moment of the fork over the real one. So a worker forgets the handlers before one can run. It ignores
what the training process handles, and SIGUSR1 and SIGUSR2, because training goes on after them. SIGTERM ends it, as
ever with torch: quietly if the training process has sent it; if somebody else has, that process gets torch's error.

And torch's workers look for their parent only between two batches: here a thread looks once a second, and a worker
whose parent was killed ends, however busy it is.
"""

import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.context import ForkContext, ForkProcess
from typing import TypeVar

from torch.utils.data import DataLoader

LoaderT = TypeVar("LoaderT", bound=DataLoader)

# The training process survives these where it has a handler, and goes on: so must its workers.
_IGNORED = {signal.SIGUSR1, signal.SIGUSR2}
# What torch ends its workers with, and what tells a worker of the processes that an encoder starts.
_DEFAULT = {signal.SIGTERM, signal.SIGCHLD}
_LOOK_EVERY = 1.0  # seconds


def prepare_workers(loader: LoaderT) -> LoaderT:
    """Let a loader start its workers without the training process's signal handlers, and end with that process.

    Args:
        loader: Any loader of energon's, before it is iterated.

    Returns:
        The same loader.
    """
    if loader.num_workers:
        loader.multiprocessing_context = _Context()
    return loader


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
