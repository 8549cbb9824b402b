"""Exact resume through Lightning: whoever writes the checkpoint, wherever the run stops."""

import contextlib
import copy
import csv
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from megatron.energon import WorkerConfig, stateless

from helpers.datasets import LengthEncoder, LengthSample
from helpers.ranks import run_ranks
from helpers.training import LENGTHS, Recorder, data, trainer
from lightning_lengthpool import LengthPoolDataModule

ROOT = Path(__file__).parents[2]
EPOCH = 10


def fit(
    path: Path,
    folder: Path,
    ckpt_path: Path | None = None,
    *,
    num_workers: int = 0,
    policy: str = "pool",
    **kwargs: Any,
) -> Any:
    """Fit and return the keys of each batch, and the trainer."""
    model = Recorder()
    settings = {"max_epochs": -1, "num_sanity_val_steps": 0, "enable_checkpointing": "callbacks" in kwargs}
    run = trainer(folder, **(settings | kwargs))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = data(path, num_workers=num_workers, virtual_epoch_length=EPOCH, policy=policy)
        run.fit(model, module, ckpt_path=ckpt_path)
    return model.train_keys, run


def stop_at(step: int, how: str, path: Path, folder: Path, **kwargs: Any) -> tuple[list[list[str]], Path]:
    """Train to a step; returns the batches so far and the checkpoint of that step."""
    if how == "after fit":
        keys, run = fit(path, folder, max_steps=step, **kwargs)
        run.save_checkpoint(folder / "last.ckpt")
        return keys, folder / "last.ckpt"
    every = (
        {"every_n_train_steps": 1} if how == "every step" else {"every_n_epochs": 1, "save_on_train_epoch_end": True}
    )
    callback = ModelCheckpoint(dirpath=folder / how, save_top_k=-1, filename="{step}", **every)
    keys, _ = fit(path, folder, max_steps=step, callbacks=[callback], **kwargs)
    return keys, folder / how / f"step={step}.ckpt"


@pytest.mark.parametrize(
    ("how", "step"),
    [("every step", step) for step in (1, 10, 11, 25)]
    + [("after fit", step) for step in (5, 10)]
    + [("every epoch", step) for step in (10,)],
)
def test_the_resumed_run_trains_on_the_very_batches(
    dataset: Callable[..., Path], tmp_path: Path, how: str, step: int
) -> None:
    path = dataset(LENGTHS, val=[3] * 4)
    whole, _ = fit(path, tmp_path, max_steps=35)
    before, checkpoint = stop_at(step, how, path, tmp_path)
    after, _ = fit(path, tmp_path, checkpoint, max_steps=35)
    assert before + after == whole
    if how != "after fit":  # by then Lightning has counted the epoch that was cut as a whole one
        assert len(fit(path, tmp_path, checkpoint, max_epochs=5)[0]) == 5 * EPOCH - step


@pytest.mark.parametrize(
    "settings",
    [
        {"policy": "stream"},
        {"num_workers": 3},  # an epoch of 10 batches ends with another worker each time
        {"accumulate_grad_batches": 3},
        {"val_check_interval": 4, "check_val_every_n_epoch": None},
        {"limit_train_batches": 7},
        {"reload_dataloaders_every_n_epochs": 1},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_twice_in_a_row_under_any_schedule(dataset: Callable[..., Path], tmp_path: Path, settings: dict) -> None:
    path = dataset(LENGTHS, val=[3] * 4)
    whole, _ = fit(path, tmp_path, max_steps=22, **settings)
    first, checkpoint = stop_at(4, "every step", path, tmp_path, **settings)
    callback = ModelCheckpoint(dirpath=tmp_path / "second", save_top_k=-1, every_n_train_steps=1, filename="{step}")
    second, _ = fit(path, tmp_path, checkpoint, max_steps=13, callbacks=[callback], **settings)
    third, _ = fit(path, tmp_path, tmp_path / "second" / "step=13.ckpt", max_steps=22, **settings)
    assert first + second + third == whole


def test_several_fits_of_one_trainer_go_on(dataset: Callable[..., Path], tmp_path: Path) -> None:
    path = dataset(LENGTHS, val=[3] * 4)
    whole, _ = fit(path, tmp_path, max_steps=20)
    model, module = Recorder(), data(path, virtual_epoch_length=EPOCH)
    run = trainer(tmp_path, max_steps=7, max_epochs=-1, num_sanity_val_steps=0, inference_mode=False)
    run.fit(model, module)
    run.validate(model, module, verbose=False)
    run.fit_loop.epoch_loop.max_steps = 20
    run.fit(model, module)
    assert model.train_keys == whole


class SaveBeforeTheFirstBatch(Callback):
    def on_train_start(self, trainer: Trainer, pl_module: Recorder) -> None:
        trainer.save_checkpoint(Path(trainer.default_root_dir) / "first.ckpt")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_checkpoint_before_the_first_batch(dataset: Callable[..., Path], tmp_path: Path, num_workers: int) -> None:
    path = dataset(LENGTHS)
    settings = {"max_steps": 5, "num_workers": num_workers}
    whole, _ = fit(path, tmp_path, callbacks=[SaveBeforeTheFirstBatch()], **settings)
    assert fit(path, tmp_path, tmp_path / "first.ckpt", **settings)[0] == whole


# ---- two ranks


class FailAt(Callback):
    """Raises on one rank alone, as a bad sample or a full disk would."""

    def __init__(self, rank: int, batch: int) -> None:
        self.rank, self.batch = rank, batch

    def on_train_batch_start(self, trainer: Trainer, pl_module: Recorder, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == self.rank and batch_idx == self.batch:
            raise RuntimeError("planted")


def two_ranks(path: str, folder: str, ckpt_path: str | None = None, **kwargs: Any) -> list[list[str]]:
    return fit(Path(path), Path(folder), ckpt_path, devices=2, strategy="ddp", **kwargs)[0]


def two_ranks_with_slurms_signal(path: str, folder: str) -> list[list[str]]:
    """What Lightning does on SLURM's signal: its handler saves, on each rank where it happens to be."""

    class Signal(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == 4:
                if trainer.global_rank == 1:
                    time.sleep(0.5)
                trainer.save_checkpoint(Path(folder) / "hpc_ckpt_1.ckpt")

    return two_ranks(path, folder, max_steps=8, callbacks=[Signal()])


def test_two_ranks_resume_exactly_from_a_signal(dataset: Callable[..., Path], tmp_path: Path) -> None:
    call = {"path": str(dataset(LENGTHS)), "folder": str(tmp_path)}
    whole = run_ranks(two_ranks_with_slurms_signal, 2, **call)
    again = run_ranks(two_ranks, 2, **call, ckpt_path=str(tmp_path / "hpc_ckpt_1.ckpt"), max_steps=8)
    assert [keys[4:] for keys in whole] == again


def two_ranks_one_fails(path: str, folder: str) -> str:
    """Rank 0 fails alone and saves in its exception handler, while rank 1 waits for it in a collective."""
    callback = ModelCheckpoint(dirpath=folder, filename="failed", save_on_exception=True)
    # Lightning's own barrier at the end of saving waits as long as the strategy says.
    strategy = DDPStrategy(timeout=timedelta(seconds=15))
    settings = {"devices": 2, "strategy": strategy, "max_steps": 8, "callbacks": [callback, FailAt(rank=0, batch=3)]}
    try:
        fit(Path(path), Path(folder), **settings)
    except BaseException as error:
        return repr(error)
    return "no error"


def test_a_checkpoint_of_a_rank_that_fails_alone_is_exact(dataset: Callable[..., Path], tmp_path: Path) -> None:
    """Rank 1 waits in a collective, or has got an error from it; its thread answers all the same."""
    path = dataset(LENGTHS)
    messages = run_ranks(two_ranks_one_fails, 2, timeout=80, path=str(path), folder=str(tmp_path))
    assert "no error" not in messages
    saved = next(tmp_path.glob("failed*.ckpt"))
    state = torch.load(saved, weights_only=True)
    assert state["global_step"] == state["LengthPoolDataModule"]["batches"] == 3
    call = {"path": str(path), "folder": str(tmp_path)}
    whole = run_ranks(two_ranks, 2, **call, max_steps=8)
    again = run_ranks(two_ranks, 2, **call, ckpt_path=str(saved), max_steps=8)
    assert [keys[3:] for keys in whole] == again


class SlowOnRankOne(Callback):
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        time.sleep(0.05 * trainer.global_rank)


def two_ranks_two_modules(paths: list[str], folder: str) -> list[tuple[Any, Any]]:
    """Stages in one script, each with a data module of its own, saved after as many batches; then each resumed."""
    for stage, path in enumerate(paths):
        own = f"{folder}/{stage}"
        two_ranks(path, own, max_steps=4, callbacks=[SlowOnRankOne(), save(own)])
    return [
        (two_ranks(path, folder, max_steps=8), two_ranks(path, folder, f"{folder}/{stage}/step=4.ckpt", max_steps=8))
        for stage, path in enumerate(paths)
    ]


def two_ranks_copy(path: str, folder: str) -> tuple[Any, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message=".*(deprecated|Total length)")
        module = data(Path(path), virtual_epoch_length=EPOCH)
        trainer(Path(folder), devices=2, strategy="ddp", max_steps=7, max_epochs=-1).fit(Recorder(), module)
        return module.state_dict(), copy.deepcopy(module).state_dict()


def test_a_copy_has_the_states_of_all_ranks(dataset: Callable[..., Path], tmp_path: Path) -> None:
    (whole, copied), other = run_ranks(two_ranks_copy, 2, path=str(dataset(LENGTHS)), folder=str(tmp_path))
    assert copied == whole and [rank["batches"] for rank in whole["ranks"]] == [7, 7]
    assert other == ({}, {})


def save(folder: str) -> ModelCheckpoint:
    return ModelCheckpoint(dirpath=folder, save_top_k=-1, filename="{step}", every_n_train_steps=1)


def test_a_second_module_in_one_script_is_saved_with_its_state(dataset: Callable[..., Path], tmp_path: Path) -> None:
    paths = [str(dataset(LENGTHS)), str(dataset(LENGTHS[::-1]))]
    for stages in run_ranks(two_ranks_two_modules, 2, paths=paths, folder=str(tmp_path)):
        for whole, again in stages:
            assert whole[4:] == again and len(again) == 4


class BadFromNowOn(LengthEncoder):
    """Fails on rank 1 for ever after a while."""

    @stateless
    def batch(self, samples: list[LengthSample]) -> dict:
        if WorkerConfig.active_worker_config.rank == 1 and self.current_batch_index >= 4:
            raise ValueError(f"planted in {samples[0].__key__}")
        return super().batch(samples)


def two_ranks_one_has_bad_data(path: str, folder: str) -> None:
    module = LengthPoolDataModule(path, BadFromNowOn(), 1, pool_size=9, num_workers=1, failure_tolerance=6)
    trainer(Path(folder), devices=2, strategy="ddp", max_steps=100, max_epochs=-1).fit(Recorder(), module)


def test_too_many_failures_on_one_rank_end_both(dataset: Callable[..., Path], tmp_path: Path) -> None:
    """The rank with the bad data says what is wrong, with the sample's key; the other does not wait for it for ever."""
    with pytest.raises(AssertionError, match="rank 1 failed") as ended:
        run_ranks(two_ranks_one_has_bad_data, 2, timeout=60, path=str(dataset(LENGTHS)), folder=str(tmp_path))
    assert "rank 0 failed" in str(ended.value) and "hung" not in str(ended.value)
    assert "LengthPoolDataset.batch failed 6 times in a row" in str(ended.value)
    assert "planted in train0" in str(ended.value)


# ---- the command line


class Run:
    """`train.py fit` on two ranks, by Lightning's launcher or by two torchrun agents on the loopback network."""

    def __init__(self, folder: Path, cache: Path, launcher: str, *args: str) -> None:
        self.folder = folder
        self.name = f"{launcher}-{time.monotonic_ns()}"
        command = [str(ROOT / "train.py"), "fit", f"--config={ROOT / 'configs' / 'demo.yaml'}"]
        command += ["--trainer.limit_val_batches=0", "--data.init_args.pool_size=6"]
        command += [f"--trainer.logger.init_args.save_dir={folder}", f"--trainer.logger.init_args.version={self.name}"]
        command += [f"--config={checkpoints(folder)}", *args]
        agents = [[sys.executable, *command]]
        if launcher == "torchrun":
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1"]
            agent += ["--master_addr=127.0.0.1", f"--master_port={port}"]
            shape = ["--trainer.num_nodes=2", "--trainer.devices=1"]
            agents = [[*agent, f"--node_rank={node}", *command, *shape] for node in (0, 1)]
        environment = os.environ | {"LENGTHPOOL_CACHE": str(cache), "OMP_NUM_THREADS": "1", "LENGTHPOOL_RUN": self.name}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        with (folder / "output.txt").open("ab") as log:
            self.agents = [
                subprocess.Popen(agent, env=environment, cwd=folder, stdout=log, stderr=log) for agent in agents
            ]

    def output(self) -> str:
        return (self.folder / "output.txt").read_text(errors="replace")[-4000:]

    def processes(self) -> dict[int, bytes]:
        """All processes of the run with their environments."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                environment = b"\0" + (path / "environ").read_bytes()
                if f"LENGTHPOOL_RUN={self.name}".encode() in environment:
                    found[int(path.name)] = environment
        return found

    def rank_one(self) -> int:
        """The training process of rank 1, not its data workers, which have its environment too."""
        marks = (b"\0RANK=1\0", b"\0LOCAL_RANK=1\0")
        found = {pid for pid, environment in self.processes().items() if any(mark in environment for mark in marks)}
        (rank,) = [pid for pid in found if int(Path(f"/proc/{pid}/stat").read_text().split()[3]) not in found]
        return rank

    def finish(self, timeout: float = 150) -> list[int]:
        """Wait for the end; returns the agents' exit statuses."""
        deadline = time.monotonic() + timeout
        try:
            return [agent.wait(max(1, deadline - time.monotonic())) for agent in self.agents]
        except subprocess.TimeoutExpired:
            for pid in self.processes():
                os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"hangs: {self.output()}") from None

    def tokens(self) -> dict[tuple[str, str], str]:
        with (self.folder / "demo" / self.name / "sync" / "steps.csv").open(newline="") as file:
            return {(row["step"], row["rank"]): row["tokens"] for row in csv.DictReader(file)}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(os.environ.get("LENGTHPOOL_CACHE") or tmp_path_factory.mktemp("cache"))


def checkpoints(folder: Path) -> Path:
    """A YAML that saves after every step."""
    path = folder / "checkpoints.yaml"
    settings = f"{{dirpath: {folder}, every_n_train_steps: 1, save_top_k: -1, filename: '{{step}}'}}"
    path.write_text(
        "trainer:\n  callbacks:\n    - class_path: lightning_lengthpool.SyncMonitor\n"
        "      init_args: {every_n_steps: 1}\n"
        f"    - class_path: lightning.pytorch.callbacks.ModelCheckpoint\n      init_args: {settings}\n"
    )
    return path


@pytest.fixture(scope="module")
def uninterrupted(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], str]:
    run = Run(tmp_path_factory.mktemp("whole"), cache, "lightning", "--trainer.max_steps=14")
    assert run.finish() == [0], run.output()
    return run.tokens()


@pytest.mark.parametrize("launcher", ["lightning", "torchrun"])
def test_a_rank_that_is_killed_ends_the_run_and_it_resumes_exactly(
    cache: Path, tmp_path: Path, uninterrupted: dict, launcher: str
) -> None:
    """`kill -9` of one rank: all end with an error; `--ckpt_path`, and no other flag, goes on exactly."""
    run = Run(tmp_path, cache, launcher, "--trainer.max_steps=100000")
    deadline = time.monotonic() + 100
    while not (tmp_path / "step=20.ckpt").exists() and time.monotonic() < deadline:
        assert all(agent.poll() is None for agent in run.agents), run.output()
        time.sleep(0.05)
    os.kill(run.rank_one(), signal.SIGKILL)
    assert all(code != 0 for code in run.finish())
    saved = torch.load(tmp_path / "step=9.ckpt", weights_only=True)
    assert [rank["batches"] for rank in saved["DemoDataModule"]["ranks"]] == [9, 9]

    resumed = Run(tmp_path, cache, launcher, "--trainer.max_steps=14", f"--ckpt_path={tmp_path / 'step=9.ckpt'}")
    assert set(resumed.finish()) == {0}, resumed.output()
    got = resumed.tokens()
    assert sorted(got) == sorted((str(step), rank) for step in range(9, 14) for rank in "01")
    assert {key: uninterrupted[key] for key in got} == got
