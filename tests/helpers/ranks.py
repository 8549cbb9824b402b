"""Run a function in several real processes, one a rank, for tests in which a collective runs.

    results = run_ranks(target, world_size=2, timeout=60, x=1)   # [target(x=1) of rank 0, of rank 1]

`target` is a function at the top level of a file (or `"path/to/file.py:name"`). Every process has the variables that
torchrun sets, so that `torch.distributed.init_process_group("gloo")` works without arguments and Lightning joins by
itself. As under torchrun the parent holds the rendezvous store, on a port that the system chose, so two tests never
meet on one port. The store serves one `init_process_group` per process.

Ranks are forked from a server that has torch, Lightning and energon imported, and no threads: an import takes each
process seconds, and a fork of the parent would lose its threads.
"""

import faulthandler
import importlib
import inspect
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

GRACE_SECONDS = 3.0  # once one rank has failed the others may hang in a collective: they get this long, then end
PRELOADED = ["lightning_lengthpool.data.datamodule", "lightning_lengthpool.monitor.callback"]


def run_ranks(target: Callable[..., Any] | str, world_size: int, timeout: float = 60.0, **kwargs: Any) -> list[Any]:
    """Run `target(**kwargs)` in `world_size` processes and return what each rank's call returned.

    Args:
        target: A function at the top level of a file, or `"path/to/file.py:name"`.
        world_size: Number of processes.
        timeout: Seconds after which ranks that still run are ended and the test fails.
        **kwargs: Arguments for the target; they and its results are pickled.

    Returns:
        The results, by rank.

    Raises:
        AssertionError: If a rank fails or hangs; the message names those ranks and shows the end of their
            output.
    """
    from torch.distributed import TCPStore

    path, name = target.split(":") if isinstance(target, str) else (inspect.getfile(target), target.__name__)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout))
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "TORCHELASTIC_RUN_ID": "tests",  # Lightning takes this for a launch by torchrun
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder, _quiet_threads() as environment:
        root = Path(folder)
        (root / "call.pkl").write_bytes(pickle.dumps((str(Path(path).resolve()), name, kwargs)))
        ranks = []
        for rank in range(world_size):
            own = environment | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
            ranks.append(context.Process(target=run_rank, args=(folder, own)))
            ranks[-1].start()
        try:
            _wait(ranks, timeout)
            codes = [process.exitcode for process in ranks]
            _show_where_they_hang([process for process in ranks if process.exitcode is None])
            problems = [
                f"rank {rank} {'hung' if code is None else f'failed ({code})'}:\n"
                + (root / f"{rank}.log").read_text(errors="replace")[-8000:]
                for rank, code in enumerate(codes)
                if code != 0
            ]
        finally:
            for process in ranks:
                process.kill()
                process.join()
        assert not problems, f"{name}, {world_size} ranks, {timeout:g} s:\n" + "\n".join(problems)
        return [pickle.loads((root / f"{rank}.pkl").read_bytes()) for rank in range(world_size)]


def _wait(ranks: list[BaseProcess], timeout: float) -> None:
    """Return when all have ended, time is up, or one has failed and the others had their grace."""
    deadline = time.monotonic() + timeout
    failed = False
    while time.monotonic() < deadline:
        codes = [process.exitcode for process in ranks]
        if None not in codes:
            return
        if not failed and any(codes):
            failed = True
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        time.sleep(0.02)


def _show_where_they_hang(ranks: list[BaseProcess]) -> None:
    """Let ranks that hang write the stacks of their threads, and of their workers', into their output."""
    for process in ranks:
        os.killpg(process.pid, signal.SIGABRT)
    for process in ranks:
        process.join()
    if ranks:
        time.sleep(0.5)  # the workers' are written by then


@contextmanager
def _quiet_threads() -> Iterator[dict[str, str]]:
    """The environment of ranks, which the server has to have when it starts; the parent's comes back."""
    before = dict(os.environ)
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    try:
        yield dict(os.environ)
    finally:
        os.environ.clear()
        os.environ.update(before)


def run_rank(folder: str, environment: Mapping[str, str]) -> None:
    """One rank's process."""
    os.setsid()  # with its workers a process group of its own
    log = os.open(f"{folder}/{environment['RANK']}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()
    os.environ.clear()
    os.environ.update(environment)
    path, name, kwargs = pickle.loads((Path(folder) / "call.pkl").read_bytes())
    sys.path.insert(0, str(Path(path).parent))
    try:
        result = getattr(importlib.import_module(Path(path).stem), name)(**kwargs)
        (Path(folder) / f"{environment['RANK']}.pkl").write_bytes(pickle.dumps(result))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # past gloo's destructors: when another rank has left first, they now and then abort the process
