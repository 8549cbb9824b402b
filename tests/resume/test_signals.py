"""SLURM's signal with Lightning's own handler, at random moments, on two real ranks: the checkpoint is exact.

As under SLURM the signal goes to every process, so also to the data workers.
"""

import contextlib
import multiprocessing
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.environments import SLURMEnvironment

from helpers.ranks import run_ranks
from helpers.training import LENGTHS, Recorder, data, trainer

TRIES = 20
FOLLOWING = 12  # batches of the resumed run


class Steps(Recorder):
    """Takes time in and between its steps, another time on each rank."""

    def training_step(self, batch: dict) -> torch.Tensor:
        time.sleep(random.uniform(0, 0.02))
        return super().training_step(batch)

    def on_train_batch_end(self, *_: Any) -> None:
        time.sleep(random.uniform(0, 0.005))


def fit(path: str, folder: Path, number: int, model: Recorder, **settings: Any) -> None:
    ckpt_path = settings.pop("ckpt_path", None)
    run = trainer(folder, devices=2, strategy="ddp", num_sanity_val_steps=0, max_epochs=-1, **settings)
    policy = ("pool", "stream", "blocks")[number % 3]
    module = data(Path(path), num_workers=number % 3, policy=policy, virtual_epoch_length=10, resume="exact")
    run.fit(model, module, ckpt_path=ckpt_path)


def train_until_a_signal(path: str, folder: Path, number: int) -> None:
    """Train as under `srun`, and end this process once the handler has saved."""
    rank = os.environ["RANK"]
    random.seed(f"{number} {rank}")
    os.environ |= {"SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "train", "SLURM_NODELIST": "localhost", "SLURM_NODEID": "0"}
    os.environ |= {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_PROCID": rank, "SLURM_LOCALID": rank}
    model, done = Steps(), folder / "done"

    def signals() -> None:
        while not model.train_keys:
            time.sleep(0.005)
        time.sleep(random.Random(number).uniform(0, 0.4) + random.uniform(0, 0.01))
        for child in multiprocessing.active_children():
            os.kill(child.pid, signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
        while not done.exists():
            with contextlib.suppress(Exception):  # while it is written it cannot be read
                torch.load(folder / "hpc_ckpt_1.ckpt", weights_only=True)
                done.touch()
            time.sleep(0.02)
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(0)

    threading.Thread(target=signals, daemon=True).start()
    fit(path, folder, number, model, max_steps=10_000, plugins=[SLURMEnvironment(auto_requeue=True)])


def agree_on_a_port(folder: Path) -> int:
    """A free port, which rank 0 writes down."""
    file = folder / "port"
    if os.environ["RANK"] == "0":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            file.with_suffix(".new").write_text(str(free.getsockname()[1]))
        file.with_suffix(".new").rename(file)
    while not file.exists():
        time.sleep(0.01)
    return int(file.read_text())


def in_a_fork(number: int, folder: Path, target: Callable[..., None], *args: Any) -> None:
    """Run a function in a fork of this process, which has no threads yet, in a process group of its own."""
    port = agree_on_a_port(folder)
    if (child := os.fork()) == 0:
        os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(port)}
        try:
            target(*args)
        finally:
            os._exit(0 if (folder / "done").exists() else 1)  # once it has saved, the other rank may leave first
    _, status = os.waitpid(child, 0)
    assert status == 0, f"try {number} ended with status {status}"


def interrupted_and_resumed(path: str, folder: str, tries: int) -> list[Any]:
    """For each try the global step and the batches of the checkpoint, and the keys of the run that resumes from it."""
    for number in range(tries):
        own = Path(folder) / str(number)
        own.mkdir(exist_ok=True)
        in_a_fork(number, own, train_until_a_signal, path, own, number)
    found: list[Any] = []
    for number in range(tries):
        file, model = Path(folder) / str(number) / "hpc_ckpt_1.ckpt", Recorder()
        saved = torch.load(file, weights_only=True)
        steps = saved["global_step"]
        fit(path, Path(folder), number, model, max_steps=steps + FOLLOWING, ckpt_path=file)
        found.append((steps, saved["LengthPoolDataModule"]["batches"], model.train_keys))
    most = max(steps for steps, _, _ in found)
    for number in range(3):
        model = Recorder()
        fit(path, Path(folder), number, model, max_steps=most + FOLLOWING)
        found.append(model.train_keys)
    return found


def test_slurms_signal_at_random_moments_saves_what_the_model_has_seen(
    dataset: Callable[..., Path], tmp_path: Path
) -> None:
    call = {"path": str(dataset(LENGTHS, shards=4)), "folder": str(tmp_path), "tries": TRIES}
    ranks = run_ranks(interrupted_and_resumed, 2, timeout=240, **call)
    for found in ranks:
        tries, whole = found[:TRIES], found[TRIES:]
        for number, (steps, batches, keys) in enumerate(tries):
            assert steps == batches, number
            assert keys == whole[number % 3][steps : steps + FOLLOWING], number
    assert len({steps for steps, _, _ in ranks[0][:TRIES]}) > TRIES // 4  # the moments did differ
