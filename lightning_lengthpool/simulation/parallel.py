"""Spread pure computations over the CPU cores, by forked processes that need nothing pickled but their results."""

import contextlib
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")

WORTH = 1.0  # seconds of work from which on processes are started


def spread(
    function: Callable[[Job], Result], jobs: Sequence[Job], seconds: Sequence[float]
) -> Iterator[tuple[int, Result]]:
    """Compute `function(job)` for each job, in as many processes as there are CPU cores for this one.

    A forked process inherits function and jobs, so it is no matter whether the main module can be imported; it must not
    use what other threads of this process may hold locked, so plain Python and NumPy, but no torch. One that ends
    early is an error, and if this process ends, so do they. Without a second core, or within a process that may have no
    children, all is computed here.

    Args:
        function: Of a job; its result is pickled.
        jobs: The arguments.
        seconds: About how long each job takes.

    Yields:
        The number of a job and its result, as they are done, in no certain order.

    Raises:
        RuntimeError: If a process ends without its results. What `function` raises is raised here.
    """
    cores = min(len(os.sched_getaffinity(0)), len(jobs))
    if cores < 2 or sum(seconds) < WORTH or multiprocessing.current_process().daemon:
        for number, job in enumerate(jobs):
            yield number, function(job)
        return
    by_time = sorted(range(len(jobs)), key=lambda number: -seconds[number])
    shares = [by_time[core::cores] for core in range(cores)]
    context = multiprocessing.get_context("fork")
    open_: dict[Any, Any] = {}  # connection -> process
    try:
        for share in shares:
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(function, jobs, share, sender), daemon=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of other threads' locks
                process.start()
            sender.close()
            open_[receiver] = process
        missing = len(jobs)
        while missing:
            for ready in wait(list(open_)):
                connection: Any = ready
                try:
                    number, result = connection.recv()
                except EOFError:
                    process = open_.pop(connection)
                    process.join()
                    if process.exitcode or not open_:
                        raise RuntimeError(
                            f"a process ended with exit code {process.exitcode} before its work was done; with -9 it "
                            "was killed, most likely for memory"
                        ) from None
                    continue
                if isinstance(result, _Failure):
                    raise result.error
                missing -= 1
                yield number, result
    finally:
        for connection, process in open_.items():
            process.terminate()
            process.join()
            connection.close()


class _Failure:
    def __init__(self, error: Exception) -> None:
        self.error = error


def _work(function: Callable[[Any], Any], jobs: Sequence[Any], share: Sequence[int], sender: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends these
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with contextlib.suppress(BrokenPipeError):  # nobody is there any more
        for number in share:
            try:
                result = function(jobs[number])
            except Exception as error:
                sender.send((number, _Failure(error)))
                return
            sender.send((number, result))
