"""Causes of waiting planted in real runs of two and four ranks: each is named, and no other.

Work is `time.sleep`, which two cores can do for four ranks at once. All scenarios of a world size run in one launch.
"""

import csv
import os
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from helpers.monitored import Record, SlowBackward
from helpers.ranks import run_ranks
from lightning_lengthpool.monitor.callback import SyncMonitor
from lightning_lengthpool.runs.causes import CauseTracker
from lightning_lengthpool.runs.steps.steps_file import read_steps

STEPS = 60
SLOW = 1  # the rank with the planted fault
CAUSES = ("lengths", "slow_rank", "data")
# scenario -> (the cause that must be named, words of its sentence)
SCENARIOS = {
    "lengths": ("lengths", "lengths cause"),
    "forward": ("slow_rank", f"rank {SLOW} on host"),
    "backward": ("slow_rank", f"rank {SLOW} on host"),
    "loader": ("data", f"data loading is the bottleneck on rank {SLOW}"),
    "equal": (None, "nothing stands out"),
}


class Loader:
    """One sample a batch: of the same length on all ranks at each step, unless lengths are the fault."""

    def __init__(self, fault: str, rank: int) -> None:
        self.delay = 0.025 if fault == "loader" and rank == SLOW else 0.0
        rng = np.random.default_rng(rank if fault == "lengths" else 0)
        self.lengths = rng.lognormal(5, 0.9, STEPS).round()

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[Tensor]:
        self.records: list[Record] = []
        for length in self.lengths:
            started = time.perf_counter()
            time.sleep(self.delay)
            self.records.append(Record((length,), started, time.perf_counter() - started))
            yield torch.full((1, 4), float(length))

    def pop_record(self) -> Record:
        return self.records.pop(0)


class Model(LightningModule):
    """8 ms and 60 us a token in the forward pass, 8 ms in the backward pass."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        slow = self.global_rank == SLOW
        time.sleep((0.008 + 60e-6 * float(batch[0, 0])) * (1.8 if slow and self.fault == "forward" else 1.0))
        hidden = SlowBackward.apply(
            self.first(batch / 1000), 0.008 + (0.012 if slow and self.fault == "backward" else 0.0)
        )
        return self.last(hidden).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit_all(root: Path) -> dict[str, tuple[dict[str, Any], list[str], list[str]]]:
    """Run all scenarios; rank zero returns of each the summary of the causes, the findings and the alerts."""
    found = {}
    for fault in SCENARIOS:
        monitor = SyncMonitor(every_n_steps=20, alert_idle=0.1, alert_windows=1)
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
        runner = Trainer(
            accelerator="cpu",
            devices=int(os.environ["WORLD_SIZE"]),
            strategy="ddp",
            max_epochs=1,
            logger=CSVLogger(root / fault, name="", version=""),
            default_root_dir=root / fault,
            callbacks=[monitor],
            **quiet,
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            runner.fit(Model(fault), Loader(fault, runner.global_rank))
        alerts = [str(warning.message) for warning in caught if "the ranks waited" in str(warning.message)]
        if monitor.writer is not None:
            log = monitor.writer.log
            found[fault] = asdict(log.causes.summary()), log.findings(), alerts
        else:
            assert not alerts
    return found


@pytest.fixture(scope="module", params=[2, 4])
def planted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    root = tmp_path_factory.mktemp("planted")
    return root, run_ranks(fit_all, world_size=request.param, timeout=150, root=root)[0]


@pytest.mark.parametrize("fault", SCENARIOS)
def test_the_planted_cause_is_named_and_no_other(planted, fault):
    summary, sentences, alerts = planted[1][fault]
    cause, words = SCENARIOS[fault]
    assert {name for name in CAUSES if summary[name] >= 0.05} == ({cause} - {None}), summary
    assert list(summary["uneven"]) == ([SLOW] if cause == "slow_rank" else []), summary
    (sentence,) = sentences
    assert words in sentence
    assert len(alerts) == (1 if cause else 0)
    assert all(words in alert and "in steps 1 to 50 (alert_idle is 0.1)" in alert for alert in alerts)


@pytest.mark.parametrize("fault", [fault for fault, (cause, _) in SCENARIOS.items() if cause])
def test_the_split_is_logged_under_the_last_step_of_each_window(planted, fault):
    with (planted[0] / fault / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["sync/idle_by_rest"]]
    assert [int(row["step"]) for row in rows] == [50, STEPS - 1]
    shares = {cause: float(rows[0][f"sync/idle_by_{cause}"]) for cause in CAUSES}
    assert max(shares, key=shares.get) == SCENARIOS[fault][0]


def test_the_file_tells_the_same_as_the_live_run(planted):
    root, found = planted
    for fault, (live, _, _) in found.items():
        tracker = CauseTracker()
        tracker.add(read_steps(root / fault / "sync" / "steps.csv"))
        tracker.finish()
        again = asdict(tracker.summary())
        for name in ("idle", *CAUSES, "rest"):
            assert again[name] == pytest.approx(live[name], abs=2e-3)
