"""Random settings, a random stop, one resume: the Trainer trains on the very batches, keys and content.

`LENGTHPOOL_RESUME_SETTINGS=60 pytest tests/test_resume_random.py` tries as many settings.
"""

import os
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from helpers.resuming import LENGTHS, NoisyEncoder, PackingEncoder
from helpers.training import Recorder, trainer
from lightning_lengthpool import LengthPoolDataModule
from lightning_lengthpool.cost_models import QuadraticCost
from lightning_lengthpool.ordering.settings import PoolWarmup

SETTINGS = int(os.environ.get("LENGTHPOOL_RESUME_SETTINGS", 12))


class ContentRecorder(Recorder):
    """Remembers the whole batch."""

    def training_step(self, batch: Any) -> torch.Tensor:
        self.train_keys.append(batch)
        return self.weight * 1.0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


def draw(rng: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of the data module and of the trainer that go together."""
    batch_size = rng.randint(1, 4)
    module: dict[str, Any] = {
        "policy": rng.choice(["none", "pool", "blocks", "stream"]),
        "batch_size": batch_size,
        "pool_size": rng.randint(batch_size + 3, 40),
        "num_workers": rng.randint(0, 3),
        "seed": rng.randint(0, 99),
        "shuffle_buffer_size": rng.choice([None, None, 7]),
        "max_samples_per_sequence": rng.choice([None, 5]),
        "virtual_epoch_length": rng.choice([None, 6, 10, 11]),
        "cost": rng.choice([None, None, QuadraticCost(k=9)]),
        "resume": rng.choice(["auto", "exact"]),
    }
    if module["policy"] in ("pool", "blocks") and rng.random() < 0.4:
        module["pool_warmup"] = PoolWarmup(batch_size, rng.randint(1, 3))
    if module["policy"] == "stream" and module["cost"] is None and rng.random() < 0.5:
        module |= {"max_tokens": 900.0, "over_budget": rng.choice(["alone", "drop"])}
    if module["cost"] is None and module.get("max_tokens") is None and rng.random() < 0.2:
        module |= {"packing_buffer_size": 9, "encoder": "packing"}
    run: dict[str, Any] = {
        "limit_train_batches": rng.choice([1.0, 1.0, 5, 0.6]),
        "accumulate_grad_batches": rng.choice([1, 1, 2, 3]),
        "reload_dataloaders_every_n_epochs": rng.choice([0, 0, 1]),
        "num_sanity_val_steps": rng.choice([0, 2]),
        "check_val_every_n_epoch": rng.choice([1, 2]),
    }
    return module, run


def fit(path: Path, folder: Path, module: dict[str, Any], run: dict[str, Any], ckpt_path: Path | None = None) -> Any:
    settings = dict(module)
    encoder = PackingEncoder() if settings.pop("encoder", None) else NoisyEncoder()
    model = ContentRecorder()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message=".*(not resumable|data state|go on|from the beginning)")
        data = LengthPoolDataModule(path, encoder, **settings)
        trainer(folder, max_epochs=-1, **run).fit(model, data, ckpt_path=ckpt_path)
    return model.train_keys


@pytest.mark.parametrize("seed", range(SETTINGS))
def test_any_settings_resume_exactly_from_any_step(dataset: Callable[..., Path], tmp_path: Path, seed: int) -> None:
    rng = random.Random(f"resume {seed}")
    path = dataset(LENGTHS, val=[3] * 4, shards=rng.choice([1, 4]))
    module, run = draw(rng)
    steps, stop = 30 // run["accumulate_grad_batches"], rng.randint(1, 20 // run["accumulate_grad_batches"])
    save = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=1, save_top_k=-1, filename="{step}")
    whole = fit(path, tmp_path, module, run | {"max_steps": steps, "callbacks": [save], "enable_checkpointing": True})
    file = tmp_path / "saved" / f"step={stop}.ckpt"
    batches = torch.load(file, weights_only=True)["LengthPoolDataModule"]["batches"]
    again = fit(path, tmp_path, module, run | {"max_steps": steps}, file)
    assert again == whole[batches:], (module, run, stop)
