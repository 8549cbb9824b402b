"""Models and loaders whose compute takes a known time."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_lengthpool.monitor.callback import SyncMonitor

DELAY = 0.06


class Record(NamedTuple):
    lengths: tuple[float, ...]
    fetch_started: float
    data_seconds: float


class Loader:
    """Batches with a record each; ranks differ in length, known from the step."""

    def __init__(self, rank: int, batches: int) -> None:
        self.rank, self.batches, self.first = rank, batches, 0

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[Tensor]:
        self.records: list[Record] = []
        for index in range(self.first, self.batches):
            started = time.perf_counter()
            batch = torch.ones(2, 4)
            self.records.append(Record(lengths(self.rank, index), started, time.perf_counter() - started))
            yield batch

    def pop_record(self) -> Record:
        return self.records.pop(0)


def lengths(rank: int, index: int) -> tuple[float, ...]:
    return (index + 1.0, 10.0 * (rank + 1))


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grad, None


class Model(LightningModule):
    """`slow`: where rank 1 sleeps; `sync_dist`: log so; `manual`: two backward passes by hand.

    `norm`: has buffers, and rank 0 comes late to the forward pass, so that rank 1 waits for them inside DDP.
    """

    def __init__(self, slow: str = "", sync_dist: bool = False, norm: bool = False, manual: bool = False) -> None:
        super().__init__()
        self.slow, self.sync_dist, self.norm, self.automatic_optimization = slow, sync_dist, norm, not manual
        self.first = nn.Linear(4, 4)  # before the slow place, so its gradient comes last
        self.rest = nn.Sequential(nn.BatchNorm1d(4) if norm else nn.Identity(), nn.Linear(4, 1))

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if self.norm and self.global_rank == 0:
            time.sleep(3 * DELAY)

    def forward(self, x: Tensor) -> Tensor:
        seconds = DELAY if self.global_rank == 1 else 0.0
        if self.slow == "forward":
            time.sleep(seconds)
        x = self.first(x)
        if self.slow == "backward":
            x = SlowBackward.apply(x, seconds)
        return self.rest(x).mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        loss = self(batch)
        self.log("batch", float(batch_idx), sync_dist=self.sync_dist)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.manual_backward(self(batch))
        optimizer.step()
        return None

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self(batch)

    def configure_model(self) -> None:
        """Nothing to split, but the tensor-parallel strategy asks for it."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def trainer(root: Path, monitor: SyncMonitor, callbacks: Sequence[Callback] = (), **kwargs: Any) -> Trainer:
    settings = {"max_epochs": 1, "logger": False, "log_every_n_steps": 1, "enable_progress_bar": False} | kwargs
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    quiet = {"enable_model_summary": False, "enable_checkpointing": saves}
    return Trainer(accelerator="cpu", default_root_dir=root, callbacks=[monitor, *callbacks], **settings, **quiet)
