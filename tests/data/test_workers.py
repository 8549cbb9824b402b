"""Worker processes: signals that reach them, and a training process that is gone."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from megatron.energon import TextSample, stateless

from helpers.datasets import LengthEncoder, LengthSample
from helpers.ranks import run_ranks
from helpers.scanning import scan_module
from helpers.training import LENGTHS, data
from lightning_lengthpool import LengthPoolDataModule

HANDLED = [signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGTERM]
ROOT = Path(__file__).parents[2]


def children() -> list[int]:
    """The processes that this one has started and that still run."""
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def use_workers(kind: str, path: str) -> None:
    """Start workers of one kind, and signal them as SLURM does: all of them."""
    module = data(Path(path), num_workers=2)
    if kind == "trial":
        module.setup("fit")
        return
    if kind == "scan":
        scan_module(module, 1, 20, progress=lambda _: signal_all())
        return
    batches: Iterator[Any] = iter(module.train_dataloader() if kind == "training" else module.val_dataloader())
    next(batches)
    signal_all()
    for _ in range(8):
        next(batches)
    if kind == "training":
        with pytest.raises(RuntimeError, match="killed by signal: Terminated"):  # torch's word for a worker that ended
            subprocess.run(["kill", "-TERM", str(children()[0])], check=True)  # not from the parent, as SLURM's
            time.sleep(20)
    module.teardown("fit")


def signal_all() -> None:
    for worker in children():
        for number in HANDLED[:-1]:
            os.kill(worker, number)


def handlers_run(kind: str, path: str) -> tuple[int, list[int]]:
    """The training process's number, and those of the processes in which one of its handlers has run."""
    runs = Path(path) / f"{kind}.txt"
    runs.touch()

    def handler(*_: Any) -> None:
        with runs.open("a") as file:
            file.write(f"{os.getpid()}\n")

    for number in HANDLED:
        signal.signal(number, handler)
    # one comes in the very moment of the fork
    os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGUSR1))
    use_workers(kind, path)
    os.kill(os.getpid(), signal.SIGUSR1)
    return os.getpid(), [int(line) for line in runs.read_text().split()]


@pytest.mark.parametrize("kind", ["training", "validation", "trial", "scan"])
def test_no_worker_runs_a_handler_of_the_training_process(dataset: Callable[..., Path], kind: str) -> None:
    path = dataset(LENGTHS, val=range(1, 40))
    ((own, runs),) = run_ranks(handlers_run, 1, kind=kind, path=str(path))
    assert runs == [own]


class Busy(LengthEncoder):
    """Is busy for minutes with its eighth sample, and says so."""

    samples = 0

    @stateless
    def encode_sample(self, sample: TextSample) -> LengthSample:
        self.samples += 1
        if self.samples == 8:
            print(json.dumps(os.getpid()), flush=True)
            until = time.monotonic() + 300
            while time.monotonic() < until:
                pass
        return super().encode_sample(sample)


def train_with_a_busy_worker(path: str) -> None:
    module = LengthPoolDataModule(path, Busy(), 1, pool_size=2, num_workers=1, virtual_epoch_length=100)
    for _ in module.train_dataloader():
        pass


def test_a_worker_ends_when_its_parent_was_killed(dataset: Callable[..., Path]) -> None:
    code = f"import test_workers; test_workers.train_with_a_busy_worker({str(dataset(LENGTHS))!r})"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), *filter(None, sys.path)])}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    worker = json.loads(process.stdout.readline())
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20
    while is_running(worker) and time.monotonic() < deadline:
        time.sleep(0.1)
    gone = not is_running(worker)
    if not gone:
        os.kill(worker, signal.SIGKILL)
    assert gone


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
