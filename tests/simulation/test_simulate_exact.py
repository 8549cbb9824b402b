"""What a simulation says and what a run trains on are the same, batch by batch.

All runs on two ranks are made in one launch (`train_all`). What each rank's workers read is had from the data module
itself, without a pool and one sample a batch.
"""

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer

from helpers.datasets import LengthEncoder, LengthSample, write_dataset
from helpers.ranks import run_ranks
from lightning_lengthpool import LengthPoolDataModule, SyncMonitor
from lightning_lengthpool.cost_models import CostModel
from lightning_lengthpool.demo.build import ensure_dataset
from lightning_lengthpool.demo.model import OcrModel
from lightning_lengthpool.demo.task_encoder import OcrTaskEncoder
from lightning_lengthpool.ordering.reference_costs import ReferenceCosts
from lightning_lengthpool.ordering.settings import PoolSettings, PoolWarmup
from lightning_lengthpool.runs.steps.steps_file import read_steps
from lightning_lengthpool.simulation.simulate import Simulation, simulate

STEPS = 25
SAMPLES = 200  # of each rank that are read to be simulated; a batch has up to 5, and the pools hold up to 2 * 16
RNG = random.Random(3)
LENGTHS = [int(RNG.lognormvariate(4, 1)) + 1 for _ in range(90)]  # so the data set comes around
COLUMNS = ("samples", "tokens", "longest", "padded_tokens", "misses")


class Uneven(CostModel):
    """A cost that does not grow with the length; a batch costs the sum of its samples."""

    @property
    def is_padded(self) -> bool:
        return False

    def of_length(self, length: float) -> float:
        return 1.0 + 37.0 * length % 101.0


class Folded(Uneven):
    """The same, of padded batches."""

    is_padded = True


def parity(sample: LengthSample) -> str:
    return ("even", "odd")[sample.total_len % 2]


POOL = {"policy": "pool", "pool_size": 16, "batch_size": 3}
BLOCKS = {"policy": "blocks", "pool_size": 16, "batch_size": 3}
STREAM = {"policy": "stream", "pool_size": 16, "batch_size": 3}
BUDGET = {"policy": "stream", "pool_size": 16, "batch_size": None, "over_budget": "alone"}
READ = {"shuffle_buffer_size": 7, "max_samples_per_sequence": 4}
SETTINGS: dict[str, dict[str, Any]] = {
    "none": {"policy": "none", "batch_size": 3, "num_workers": 2},
    "off": POOL | {"pool_size": 0, "num_workers": 0},
    "pool": POOL | READ | {"num_workers": 1, "batch_size": 1},
    "pool_workers": POOL | {"num_workers": 2, "pool_warmup": PoolWarmup(5, 3), "cost": Folded()},
    "blocks": BLOCKS | {"num_workers": 0, "pool_warmup": PoolWarmup(4, 3)},
    "blocks_workers": BLOCKS | {"num_workers": 2, "cost": Folded()},
    "stream": STREAM | READ | {"num_workers": 1, "cost": Folded()},
    "stream_workers": STREAM | {"num_workers": 2},
    "stream_reference": STREAM | {"num_workers": 0, "reference_lengths": True},
    "classes": STREAM | {"num_workers": 0, "class_fn": parity, "class_shares": {"odd": 0.6, "even": 0.4}},
    "budget": BUDGET | {"num_workers": 2, "max_tokens": 700.0},
    "budget_cost": BUDGET | {"num_workers": 0, "max_tokens": 700.0, "cost": Folded(), "batch_size": 5},
    "budget_sum": BUDGET | {"num_workers": 0, "max_tokens": 200.0, "cost": Uneven(), "reference_lengths": True},
}
DEMO: dict[str, dict[str, Any]] = {
    "demo_none": {"policy": "none", "batch_size": 1, "num_workers": 0},
    "demo_pool": {"policy": "pool", "pool_size": 10, "batch_size": 3, "num_workers": 2},
    "demo_blocks": {"policy": "blocks", "pool_size": 10, "batch_size": 2, "num_workers": 0},
    "demo_stream": {"policy": "stream", "pool_size": 10, "batch_size": 2, "num_workers": 1},
}
TWO_RANKS = [
    *("none", "pool", "pool_workers", "blocks_workers", "stream", "stream_workers", "stream_reference", "budget"),
    *("demo_pool", "demo_stream"),
]
ONE_RANK = [name for name in (*SETTINGS, *DEMO) if name not in TWO_RANKS]


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch: dict) -> torch.Tensor:
        return self.weight * 1.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def module_of(root: Path, is_demo: bool, **settings: Any) -> LengthPoolDataModule:
    if settings.get("reference_lengths"):
        settings["reference_lengths"] = root / "reference.csv"
    path = ensure_dataset("code", root / "demo", 60) if is_demo else root / "data"
    return LengthPoolDataModule(path, OcrTaskEncoder() if is_demo else LengthEncoder(), seed=5, **settings)


def train(root: Path, name: str, world_size: int) -> None:
    """One run on this rank."""
    module = module_of(root, name in DEMO, **(SETTINGS | DEMO)[name])
    Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy="ddp" if world_size > 1 else "auto",
        default_root_dir=root / f"{name}-{world_size}",
        callbacks=[SyncMonitor()],
        max_steps=STEPS,
        max_epochs=-1,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(OcrModel(dim=8, heads=2, layers=1) if name in DEMO else Model(), module)


def train_all(root: Path, names: list[str]) -> None:
    for name in names:
        train(root, name, 2)


@cache
def streams(root: Path, is_demo: bool, num_workers: int, world_size: int, **reading: int) -> list[np.ndarray]:
    """The lengths of the samples that each worker of each rank reads, in their order."""
    found = []
    for rank in range(world_size):
        reading |= {"rank": rank, "world_size": world_size}
        module = module_of(root, is_demo, policy="none", batch_size=1, num_workers=num_workers, **reading)
        loader = module.train_dataloader()
        lengths: list[float] = []
        while len(lengths) < SAMPLES:  # an epoch may be shorter
            lengths += [loader.pop_record().lengths[0] for _ in loader]
        loader.close()
        workers = max(1, num_workers)
        found += [np.array(lengths[worker::workers]) for worker in range(workers)]
    return found


def replay(root: Path, name: str, world_size: int) -> Simulation:
    """The simulation of the same run, as far as the samples reach that were read."""
    settings = (SETTINGS | DEMO)[name]
    reading = {key: settings[key] for key in READ if key in settings}
    own = streams(root, name in DEMO, settings["num_workers"], world_size, **reading)
    cost = settings.get("cost")
    of_length = cost.of_length if cost else float
    reference = None
    if "reference_lengths" in settings:
        reference = ReferenceCosts({None: [of_length(length) for length in LENGTHS]})
    pool = PoolSettings(
        batch_size=settings["batch_size"],
        pool_size=settings.get("pool_size", 0),
        policy=settings["policy"],
        seed=5,
        cost=cost,
        warmup=settings.get("pool_warmup"),
        max_tokens=settings.get("max_tokens"),
        reference=reference,
        class_shares=settings.get("class_shares"),
    )
    return simulate(
        own,
        pool,
        None,
        workers=max(1, settings["num_workers"]),
        costs=[[of_length(length) for length in lengths] for lengths in own] if cost else None,
        classes=[lengths.astype(int) % 2 for lengths in own] if pool.class_shares else None,  # in order of their names
    )


def assert_equal(root: Path, name: str, world_size: int) -> Simulation:
    steps = read_steps(root / f"{name}-{world_size}" / "sync" / "steps.csv")
    about = json.loads((root / f"{name}-{world_size}" / "sync" / "run.json").read_text())
    assert about["workers_by_rank"] == [(SETTINGS | DEMO)[name]["num_workers"]] * world_size
    found = replay(root, name, world_size)
    assert len(found.tokens) >= STEPS and len(steps["step"]) == STEPS * world_size
    columns = found.samples, found.tokens, found.longest, found.padded, found.missed
    for column, values in zip(COLUMNS, columns, strict=True):
        expected = steps[column].reshape(STEPS, world_size)
        np.testing.assert_array_equal(values[:STEPS], expected, err_msg=column)
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both data sets, and a file of reference lengths."""
    root = tmp_path_factory.mktemp("exact")
    write_dataset(root / "data", LENGTHS, shards=6)
    (root / "reference.csv").write_text("tokens\n" + "\n".join(map(str, LENGTHS)))
    ensure_dataset("code", root / "demo", 60)
    return root


@pytest.fixture(scope="module")
def two_ranks(root: Path) -> Path:
    run_ranks(train_all, world_size=2, timeout=240, root=root, names=TWO_RANKS)
    return root


@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks_train_on_what_the_simulation_says(two_ranks: Path, name: str) -> None:
    found = assert_equal(two_ranks, name, 2)
    assert (found.tokens[:, 0] != found.tokens[:, 1]).any()  # each reads its own samples


@pytest.mark.parametrize("name", ONE_RANK)
def test_one_rank_trains_on_what_the_simulation_says(root: Path, name: str) -> None:
    train(root, name, 1)
    assert_equal(root, name, 1)
