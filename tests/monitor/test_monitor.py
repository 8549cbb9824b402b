"""The accumulator on a fake clock, and the callback in real Lightning runs, alone and on two ranks.

All scenarios on two ranks run in one launch (`fit_all`), each a `fit` of its own; rank 1 is made slow by `DELAY`.
"""

import csv
import json
import math
import socket
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor

from helpers.monitored import DELAY, Loader, Model, lengths, trainer
from helpers.ranks import run_ranks
from lightning_lengthpool.monitor.callback import SyncMonitor
from lightning_lengthpool.ordering import efficiency
from lightning_lengthpool.ranks import store
from lightning_lengthpool.runs.steps.records import by_step, summarize
from lightning_lengthpool.runs.steps.steps_file import read_steps

STEPS = 6


class Alone(Callback):
    """Rank zero makes a checkpoint that the others know nothing of."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 2 and trainer.is_global_zero:
            store.SECONDS = 0.2
            trainer._checkpoint_connector.dump_checkpoint(False)


class Written(Callback):
    """Notes how many rows `steps.csv` has at the start of each batch."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        path = Path(trainer.default_root_dir) / "sync" / "steps.csv"
        self.rows.append(len(read_steps(path)["step"]) if path.exists() else 0)


# name -> (module, trainer settings)
SCENARIOS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "slow_forward": ({"slow": "forward"}, {}),
    "slow_backward": ({"slow": "backward"}, {}),
    "buffers": ({"slow": "forward", "norm": True}, {}),
    "hidden": ({"slow": "forward", "sync_dist": True}, {}),
    "accumulated": ({"slow": "forward"}, {"accumulate_grad_batches": 2}),
    "checkpointed": ({}, {"callbacks": [ModelCheckpoint(every_n_train_steps=3, save_top_k=-1)]}),
    "alone": ({}, {"callbacks": [Alone()]}),
    "tensor_parallel": ({}, {"strategy": ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2)}),
}


def fit_all(root: Path) -> dict[str, list[Any]]:
    """Run every scenario on this rank; returns the warnings about hidden compute that each gave here.

    "rows" are the rows in the file at the start of each batch of the scenario "checkpointed".
    """
    written = Written()
    warned = {}
    for name, (module, settings) in SCENARIOS.items():
        monitor = SyncMonitor(every_n_steps=4)
        logger = CSVLogger(root / name, name="", version="")
        callbacks = [*settings.pop("callbacks", ()), *([written] if name == "checkpointed" else ())]
        runner = trainer(root / name, monitor, callbacks, devices=2, logger=logger, **{"strategy": "ddp"} | settings)
        loader = Loader(runner.global_rank, STEPS)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            runner.fit(Model(**module), loader, torch.utils.data.DataLoader(torch.ones(4, 4), 2))
        warned[name] = [str(w.message) for w in caught if "compute seconds" in str(w.message)]
    return warned | {"rows": written.rows}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, list[str]]]]:
    root = tmp_path_factory.mktemp("two_ranks")
    return root, run_ranks(fit_all, world_size=2, timeout=120, root=root)


def records(two_ranks: tuple[Path, Any], name: str) -> dict[str, np.ndarray]:
    return read_steps(two_ranks[0] / name / "sync" / "steps.csv")


def logged(folder: Path) -> dict[int, dict[str, float]]:
    """step -> what `SyncMonitor` logged under it, without the `sync/`."""
    with (folder / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["sync/idle_fraction"]]
    numbers = [{key[5:]: float(v) for key, v in row.items() if key.startswith("sync/") and v} for row in rows]
    assert len({row["step"] for row in rows}) == len(rows)
    return {int(row["step"]): values for row, values in zip(rows, numbers, strict=True)}


@pytest.mark.parametrize("name", ["slow_forward", "slow_backward", "buffers"])
def test_the_slow_rank_is_named(two_ranks, name):
    table = by_step(records(two_ranks, name))
    compute, wait, wall = (np.median(table[f"{kind}_seconds"], axis=0) for kind in ("compute", "wait", "step"))
    assert len(table["step"]) == STEPS
    assert 2.5 * DELAY > compute[1] >= DELAY and compute[0] < DELAY / 2
    assert wait[0] > DELAY / 2 > wait[1]
    assert wall[0] == pytest.approx(wall[1], rel=0.3)  # which is why wall-clock time names nobody
    summary = summarize(records(two_ranks, name))
    assert summary["compute_steps"] == STEPS
    assert summary["ranks"][0]["idle_fraction"] > 0.5 > 0.1 > summary["ranks"][1]["idle_fraction"]
    assert two_ranks[1][0][name] == []


def test_compute_is_absent_where_a_collective_hides_it_with_one_warning(two_ranks):
    name = "hidden"
    steps = records(two_ranks, name)
    assert np.isnan(steps["compute_seconds"]).all() and np.isnan(steps["wait_seconds"]).all()
    assert not np.isnan(steps["step_seconds"]).any()
    (message,) = two_ranks[1][0][name]
    assert "sync_dist=False" in message and "SyncBatchNorm" in message
    assert two_ranks[1][1][name] == []
    for step, values in logged(two_ranks[0] / name).items():
        assert not any("compute" in key for key in values)
        assert values["idle_fraction"] == pytest.approx(
            efficiency.idle_fraction(by_step(steps)["padded_tokens"][[step]])
        )


def test_a_checkpoint_finds_all_steps_before_it_in_the_file(two_ranks):
    # exchanged after 4 steps, checkpoints after 3 and 6
    assert two_ranks[1][0]["rows"] == [0, 0, 0, 2 * 3, 2 * 4, 2 * 4]
    steps = records(two_ranks, "checkpointed")
    assert steps["step"].tolist() == np.repeat(range(STEPS), 2).tolist() and steps["rank"].tolist() == [0, 1] * STEPS


def test_a_checkpoint_that_one_rank_makes_alone_costs_no_record(two_ranks):
    steps = records(two_ranks, "alone")
    assert steps["step"].tolist() == np.repeat(range(STEPS), 2).tolist() and steps["rank"].tolist() == [0, 1] * STEPS


def test_tensor_parallel_ranks_are_one_data_rank_and_compute_is_absent(two_ranks):
    steps = records(two_ranks, "tensor_parallel")
    assert steps["rank"].tolist() == [0] * STEPS
    assert steps["tokens"].tolist() == [step + 11 for step in range(STEPS)]
    assert np.isnan(steps["compute_seconds"]).all()
    (message,) = two_ranks[1][0]["tensor_parallel"]
    assert "ModelParallelStrategy" in message and "padded tokens" in message


def test_accumulated_micro_batches_are_one_step(two_ranks):
    steps = records(two_ranks, "accumulated")
    assert steps["step"].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert steps["rank"].tolist() == [0, 1] * STEPS
    compute = steps["compute_seconds"].reshape(STEPS // 2, 2, 2).sum(axis=1)  # steps, micro-batches, ranks
    assert (compute[:, 1] >= 2 * DELAY).all()
    values = logged(two_ranks[0] / "accumulated")
    assert list(values) == [0, 1, 2]
    for step, row in values.items():
        assert row["idle_fraction"] == pytest.approx(efficiency.idle_fraction(compute[[step]]), abs=1e-3)
        assert row["compute_seconds_max"] == pytest.approx(compute[step].max(), abs=1e-5)


def test_every_row_and_logged_value(two_ranks):
    steps, values = records(two_ranks, "slow_forward"), logged(two_ranks[0] / "slow_forward")
    assert steps["step"].tolist() == np.repeat(range(STEPS), 2).tolist()
    for row, (step, rank) in enumerate((step, rank) for step in range(STEPS) for rank in (0, 1)):
        sizes = lengths(rank, step)
        names = ("step", "rank", "samples", "tokens", "longest", "padded_tokens")
        expected = [step, rank, 2, sum(sizes), max(sizes), 2 * max(sizes)]
        assert [steps[name][row] for name in names] == expected
    assert list(values) == list(range(STEPS))
    for step, row in values.items():
        tokens = [step + 11.0, step + 21.0]
        compute = steps["compute_seconds"][2 * step : 2 * step + 2]
        expected = {
            "idle_fraction": efficiency.idle_fraction(compute[None]),
            "tokens_mean": step + 16.0,
            "tokens_min": tokens[0],
            "tokens_max": tokens[1],
            "tokens_variance": 25.0,
            "padding_fraction": 1 - sum(tokens) / 60,
            "useful_fraction": sum(tokens) / 80,
            "compute_seconds_mean": compute.mean(),
            "compute_seconds_min": compute.min(),
            "compute_seconds_max": compute.max(),
            "compute_seconds_variance": compute.var(),
            "data_wait_seconds_max": steps["data_seconds"][2 * step : 2 * step + 2].max(),
        }
        assert row == pytest.approx(expected, abs=1e-3)


def test_step_numbers_are_those_of_self_log(two_ranks):
    for name, per_step in (("slow_forward", 1), ("accumulated", 2)):
        with (two_ranks[0] / name / "metrics.csv").open() as file:
            own = {int(row["step"]): float(row["batch"]) for row in csv.DictReader(file) if row["batch"]}
        # the module logs its batch_idx, whose step must be the one that the batch's records have
        assert own == {step: step * per_step + per_step - 1 for step in logged(two_ranks[0] / name)}


def fit(root: Path, monitor: SyncMonitor, batches: int = 3, module: Model | None = None, **kwargs: Any) -> Trainer:
    runner = trainer(root, monitor, devices=1, **kwargs)
    runner.fit(module or Model(), Loader(0, batches))
    return runner


def test_one_rank_without_a_logger(tmp_path, capsys):
    fit(tmp_path, SyncMonitor())
    steps = read_steps(tmp_path / "sync" / "steps.csv")
    assert steps["step"].tolist() == [0, 1, 2]
    assert (steps["compute_seconds"] > 0).all() and (steps["compute_seconds"] < steps["step_seconds"]).all()
    table = capsys.readouterr().out
    assert "compute: 3 of 3 steps" in table and "idle by tokens" in table
    assert "\x1b" not in table


def test_the_table_and_the_file_tell_the_same(tmp_path):
    monitor = SyncMonitor(every_n_steps=2)
    fit(tmp_path, monitor, batches=5)
    from_file = summarize(read_steps(tmp_path / "sync" / "steps.csv"))
    live = monitor.writer.log.totals.summary()
    (live_rank,), (file_rank,) = live.pop("ranks"), from_file.pop("ranks")
    assert live == pytest.approx(from_file, abs=1e-4, rel=1e-2)
    assert live_rank == pytest.approx(file_rank, abs=1e-4)


def test_compute_is_measured_with_two_backward_passes_on_one_rank(tmp_path):
    fit(tmp_path, SyncMonitor(), module=Model(manual=True))
    assert (read_steps(tmp_path / "sync" / "steps.csv")["compute_seconds"] > 0).all()


def test_parameters_frozen_during_the_run_and_gradients_of_gradients(tmp_path):
    class Thawing(Model):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.first.requires_grad_(batch_idx >= 1)
            loss = self(batch)
            penalty = torch.autograd.grad(loss, list(self.rest.parameters()), create_graph=True)[0]
            return loss + penalty.square().sum()

    fit(tmp_path, SyncMonitor(), module=Thawing())
    assert (read_steps(tmp_path / "sync" / "steps.csv")["compute_seconds"] > 0).all()


def test_nothing_is_left_on_the_module(tmp_path):
    module = Model()
    fit(tmp_path, SyncMonitor(), module=module)
    assert not module._forward_pre_hooks
    assert not any(param._post_accumulate_grad_hooks for param in module.parameters())


def test_a_second_fit_appends_and_a_fresh_one_has_a_file_of_its_own(tmp_path):
    path = tmp_path / "sync" / "steps.csv"
    runner = fit(tmp_path, SyncMonitor())
    runner.fit_loop.max_epochs = 2
    runner.fit(Model(), Loader(0, 3))
    assert read_steps(path)["step"].tolist() == [0, 1, 2, 3, 4, 5]
    fit(tmp_path, SyncMonitor())
    assert read_steps(path)["step"].tolist() == [0, 1, 2, 3, 4, 5]
    assert read_steps(tmp_path / "sync_1" / "steps.csv")["step"].tolist() == [0, 1, 2]


def test_a_resumed_fit_replaces_the_steps_that_it_repeats(tmp_path):
    path = tmp_path / "sync" / "steps.csv"
    runner = fit(tmp_path, SyncMonitor())
    runner.save_checkpoint(tmp_path / "end.ckpt")
    runner.fit_loop.max_epochs = 2
    runner.fit(Model(), Loader(0, 3))
    again = trainer(tmp_path, SyncMonitor(), devices=1, max_epochs=2)
    again.fit(Model(), Loader(0, 3), ckpt_path=tmp_path / "end.ckpt")
    assert read_steps(path)["step"].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_that_died_goes_on_from_its_checkpoint_without_a_gap(tmp_path, accumulate):
    """The checkpoint after step 2 lies between two exchanges, and the run dies in the midst of a step after it."""

    class Dying(Model):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if batch_idx == 5 * accumulate - 1:
                raise KeyboardInterrupt
            return super().training_step(batch, batch_idx)

    def go(module: Model, **kwargs: Any) -> None:
        saving = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1)
        runner = trainer(tmp_path, SyncMonitor(4), [saving], devices=1, accumulate_grad_batches=accumulate)
        runner.fit(module, Loader(0, 7 * accumulate), **kwargs)

    path = tmp_path / "sync" / "steps.csv"
    with pytest.raises(SystemExit):
        go(Dying())
    assert read_steps(path)["step"].tolist() == np.repeat(range(4), accumulate).tolist()
    with path.open("a") as file:
        file.write("4,0,2,1")  # a line that was cut off
    rest = Loader(0, 7 * accumulate)
    rest.first = 3 * accumulate
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1)
    runner = trainer(tmp_path, SyncMonitor(4), [saving], devices=1, accumulate_grad_batches=accumulate)
    runner.fit(Model(), rest, ckpt_path=next(tmp_path.glob("*step=3.ckpt")))
    steps = read_steps(path)
    assert steps["step"].tolist() == np.repeat(range(7), accumulate).tolist()
    assert steps["tokens"].tolist() == [11.0 + index for index in range(7 * accumulate)]


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_the_progress_bar_shows_idle(tmp_path, bar, capfd):
    callback = bar(refresh_rate=1)
    runner = trainer(tmp_path, SyncMonitor(every_n_steps=2), [callback], devices=1, enable_progress_bar=True)
    runner.fit(Model(), Loader(0, 5))
    assert 0 <= callback.get_metrics(runner, runner.lightning_module)["idle%"] < 100
    out, err = capfd.readouterr()
    assert "idle%" in out + err


def test_what_lies_beside_the_file(tmp_path):
    fit(tmp_path, SyncMonitor(), batches=4)
    about = json.loads((tmp_path / "sync" / "run.json").read_text())
    assert len(about.pop("run")) == 32
    assert about == {"hosts": [socket.gethostname()], "workers_by_rank": [None], "settings": {}}
    rows = list(csv.DictReader((tmp_path / "sync" / "lengths.csv").open()))
    assert sorted(float(row["tokens"]) for row in rows) == [1, 2, 3, 4, 10, 10, 10, 10]
    assert {row["rank"] for row in rows} == {"0"}


def test_the_file_can_be_capped(tmp_path):
    fit(tmp_path, SyncMonitor(every_n_steps=2, max_rows=3), batches=5)
    assert read_steps(tmp_path / "sync" / "steps.csv")["step"].tolist() == [0, 1, 2]


def test_the_figures_go_to_the_loggers(tmp_path, monkeypatch):
    given: list[tuple[list[Any], list[str], int]] = []

    def log_figures(loggers: Sequence[Any], drawn: dict[str, Any], step: int) -> None:
        given.append((list(loggers), list(drawn), step))

    monkeypatch.setattr("lightning_lengthpool.monitor.figure_loggers.log_figures", log_figures)
    logger = CSVLogger(tmp_path, name="", version="")
    fit(tmp_path, SyncMonitor(log_figures=True), batches=4, logger=logger)
    ((loggers, names, step),) = given
    assert loggers == [logger] and step == 3
    assert names == [f"sync/{name}" for name in ("compute", "lengths", "causes", "distribution", "correlation")]


def test_fast_dev_run_writes_no_file(tmp_path, capsys):
    trainer(tmp_path, SyncMonitor(), devices=1, fast_dev_run=True).fit(Model(), Loader(0, 3))
    assert not list(tmp_path.rglob("steps.csv"))
    assert "compute: 1 of 1 steps" in capsys.readouterr().out


class SlowData(torch.utils.data.Dataset):
    """Sample i takes i hundredths of a second."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(index / 100)
        return torch.ones(4)


class SlowStream(SlowData, torch.utils.data.IterableDataset):
    __len__ = None  # Lightning then fetches one batch ahead

    def __iter__(self) -> Iterator[Tensor]:
        return (self[index] for index in range(4))


@pytest.mark.parametrize("data", [SlowData, SlowStream])
def test_a_foreign_loader_with_length_fn(tmp_path, data):
    loader = torch.utils.data.DataLoader(data(), batch_size=1)
    monitor = SyncMonitor(length_fn=lambda batch: map(len, batch))
    trainer(tmp_path, monitor, devices=1).fit(Model(), loader)
    steps = read_steps(tmp_path / "sync" / "steps.csv")
    assert steps["padded_tokens"].tolist() == [4, 4, 4, 4]
    expected = np.arange(4) / 100
    seen = (
        slice(0, 4) if data is SlowData else slice(1, 3)
    )  # the first was fetched before training, the end is a fetch too
    assert np.all((steps["data_seconds"] >= expected)[seen]) and np.all((steps["data_seconds"] < expected + 0.01)[seen])
    assert (steps["step_seconds"] >= expected)[seen].all()


def test_a_step_lasts_from_the_end_of_the_one_before(tmp_path):
    class Slow(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            time.sleep(0.02)

    runner = trainer(tmp_path, SyncMonitor(), [Slow()], devices=1)
    runner.fit(Model(), Loader(0, 4))
    assert (read_steps(tmp_path / "sync" / "steps.csv")["step_seconds"][1:] >= 0.02).all()


def test_a_file_that_cannot_be_written_does_not_end_the_training(tmp_path, monkeypatch):
    def full(self: Any, steps: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lightning_lengthpool.runs.steps.steps_file.StepsFile.append", full)
    with pytest.warns(UserWarning, match="goes on without its files.*No space left") as caught:
        runner = fit(tmp_path, SyncMonitor(every_n_steps=1), batches=4)
    assert runner.global_step == 4
    assert sum("without its files" in str(warning.message) for warning in caught) == 1


@pytest.mark.parametrize("bad", [float("nan"), -1.0, float("inf"), 3])
def test_a_length_that_is_none_is_named_at_once(tmp_path, bad):
    given = bad if bad == 3 else [bad]
    with pytest.raises(ValueError, match=r"length_fn gave .* for batch 0, expected the length"):
        fit(tmp_path, SyncMonitor(length_fn=lambda batch: given))


def test_length_fn_comes_before_the_loaders_lengths(tmp_path):
    fit(tmp_path, SyncMonitor(length_fn=lambda batch: torch.tensor([1, 2, 3])))
    steps = read_steps(tmp_path / "sync" / "steps.csv")
    assert steps["tokens"].tolist() == [6, 6, 6] and not np.isnan(steps["data_seconds"]).any()


def test_without_lengths_the_error_says_what_to_do(tmp_path):
    loader = torch.utils.data.DataLoader(torch.ones(6, 4), batch_size=2)
    with pytest.raises(MisconfigurationException, match=r"DataLoader.*SyncMonitor\(length_fn=\.\.\.\)"):
        trainer(tmp_path, SyncMonitor(), devices=1).fit(Model(), loader)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every_n_steps": 0}, "every_n_steps must be at least 1, got 0"),
        ({"alert_windows": 0}, "alert_windows must be at least 1, got 0"),
        ({"alert_idle": 30}, "alert_idle is a fraction above 0 and at most 1, got 30"),
        ({"max_rows": 0}, "max_rows must be at least 1, or None"),
        ({"length_fn": 3}, "length_fn must be a function"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        SyncMonitor(**settings)


def test_records_are_dropped_once_exchanged(tmp_path):
    class Counting(SyncMonitor):
        most = 0

        def on_train_batch_end(self, *args: Any) -> None:
            super().on_train_batch_end(*args)
            self.most = max(self.most, len(self._fit.recorder))

    monitor = Counting(every_n_steps=2)
    fit(tmp_path, monitor, batches=9)
    assert monitor.most == 1 and len(read_steps(tmp_path / "sync" / "steps.csv")["step"]) == 9
    assert math.isfinite(monitor.writer.log.totals.summary()["idle_fraction_compute"])


def test_run_ranks_names_the_rank_that_hangs_or_fails(tmp_path):
    script = tmp_path / "ranks_in_trouble.py"
    script.write_text(
        "import os, time\n"
        "rank = int(os.environ['RANK'])\n"
        "def hang(): time.sleep(60 * rank)\n"
        "def fail():\n"
        "    print('about to fail', flush=True)\n"
        "    time.sleep(0 if rank else 60)\n"
        "    raise RuntimeError('planted')\n"
    )
    with pytest.raises(AssertionError, match="rank 1 hung") as hung:
        run_ranks(f"{script}:hang", world_size=2, timeout=4)
    assert "rank 0" not in str(hung.value)
    with pytest.raises(AssertionError, match=r"(?s)rank 0 hung.*rank 1 failed \(1\).*about to fail.*planted"):
        run_ranks(f"{script}:fail", world_size=2, timeout=30)
