"""Spread pure computations over the CPU cores, by forked processes that need nothing pickled but their results."""

import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.context import ForkContext
from typing import Any, TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")

WORTH = 1.0  # seconds of work from which on processes are started

_call: Callable[[int], Any]  # in a worker process: computes the job of a number


def spread(
    function: Callable[[Job], Result], jobs: Sequence[Job], seconds: Sequence[float]
) -> Iterator[tuple[int, Result]]:
    """Compute `function(job)` for each job, in as many processes as there are CPU cores for this one.

    Yields the number of a job and its (pickled) result, as they are done, in no certain order. `seconds` is about how
    long each job takes.

    A forked process inherits function and jobs, so it is no matter whether the main module can be imported; it must not
    use what other threads of this process may hold locked, so plain Python and NumPy, but no torch. One that ends
    early is a `RuntimeError`, and if this process ends, so do they. What `function` raises is raised here. Without a
    second core, or within a process that may have no children, all is computed here.
    """
    cores = min(len(os.sched_getaffinity(0)), len(jobs))
    if cores < 2 or sum(seconds) < WORTH or multiprocessing.current_process().daemon:
        for number, job in enumerate(jobs):
            yield number, function(job)
        return
    context = _ForkContext()
    executor = ProcessPoolExecutor(cores, context, _start, (lambda number: function(jobs[number]),))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of other threads' locks
            longest_first = sorted(range(len(jobs)), key=lambda number: -seconds[number])
            numbers = {executor.submit(_compute, number): number for number in longest_first}
        for done in as_completed(numbers):
            yield numbers.pop(done), done.result()
    except BrokenProcessPool:
        executor.shutdown()
        codes = [worker.exitcode for worker in context.workers]
        # the executor ends the others by SIGTERM
        code = next((code for code in codes if code not in (None, -signal.SIGTERM)), -signal.SIGTERM)
        raise RuntimeError(
            f"a process ended with exit code {code} before its work was done; with -9 it was killed, most likely for "
            "memory"
        ) from None
    except BaseException:  # Ctrl-C, a job that fails, or results that nobody wants any more
        for worker in context.workers:
            worker.terminate()
        raise
    finally:
        executor.shutdown(cancel_futures=True)


class _ForkContext(ForkContext):
    """Remembers its processes, for the executor does not tell which are its own."""

    def __init__(self) -> None:
        super().__init__()
        self.workers: list[Any] = []

    def Process(self, *args: Any, **named: Any) -> Any:  # type: ignore[override]
        self.workers.append(super().Process(*args, **named))
        return self.workers[-1]


def _start(call: Callable[[int], Any]) -> None:
    global _call
    _call = call
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends these
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _compute(number: int) -> Any:
    return _call(number)
