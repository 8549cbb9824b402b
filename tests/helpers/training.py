"""A data module, a trainer and a model that records what it is given."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torchmetrics import MeanMetric

from helpers.datasets import LengthEncoder
from helpers.lengths import lognormal
from lightning_lengthpool import LengthPoolDataModule

LENGTHS = lognormal(120, seed=1, mu=5)


class Recorder(LightningModule):
    """Trains nothing; remembers the keys that it got."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        # Lightning's own mean over ranks divides integer weights and cuts the remainder off; this one is exact.
        self.val_length = MeanMetric().set_dtype(torch.float64)
        self.train_keys: list[list[str]] = []
        self.val_runs: list[list[str]] = []
        self.repeats = 0

    def training_step(self, batch: dict) -> torch.Tensor:
        self.train_keys.append(batch["keys"])
        return self.weight * 1.0

    def on_validation_epoch_start(self) -> None:
        self.val_runs.append([])

    def validation_step(self, batch: dict, batch_idx: int) -> None:
        repeat = self.trainer.datamodule.is_repeat(batch_idx)
        self.repeats += repeat
        self.val_runs[-1] += [] if repeat else batch["keys"]
        if not repeat:
            self.val_length.update(torch.tensor(batch["lengths"], dtype=torch.float64))
        self.log("val_length", self.val_length)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def trainer(folder: Path, **kwargs: Any) -> Trainer:
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    return Trainer(accelerator="cpu", default_root_dir=folder, **({"devices": 1} | quiet | kwargs))


def data(path: Path, batch_size: int | None = 2, **kwargs: Any) -> LengthPoolDataModule:
    return LengthPoolDataModule(path, LengthEncoder(), batch_size, **({"pool_size": 20, "num_workers": 0} | kwargs))
