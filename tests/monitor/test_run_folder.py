"""Each run has a folder of its own, whatever the logger, and a resumed one finds its own again.

W&B and MLflow are stand-ins behind Lightning's own `save_dir`, `name` and `version`.
"""

import itertools
import subprocess
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from helpers.monitored import Loader, Model, trainer
from lightning_lengthpool.monitor.callback import SyncMonitor
from lightning_lengthpool.monitor.run_files import base_folder
from lightning_lengthpool.runs.run import find_steps
from lightning_lengthpool.runs.steps.steps_file import read_steps

IDS = itertools.count()


class Quiet:
    """Takes what it is given, and keeps nothing."""

    def log_metrics(self, *_: Any, **__: Any) -> None: ...

    log_hyperparams = save = finalize = after_save_checkpoint = log_metrics


class FakeWandb(Quiet, WandbLogger):
    def __init__(self, folder: Path, id: str | None = None) -> None:
        self._save_dir, self._project, self._id, self._experiment = str(folder), "project", id, None

    @property
    def experiment(self) -> Any:
        if self._experiment is None:
            self._experiment = types.SimpleNamespace(id=self._id or f"run{next(IDS)}")
        return self._experiment


class FakeMLFlow(Quiet, MLFlowLogger):
    def __init__(self, folder: Path, id: str | None = None, uri: str | None = None) -> None:
        self._tracking_uri, self._experiment_id, self._run_id = uri or f"file:{folder}", "7", id

    @property
    def experiment(self) -> None:
        self._run_id = self._run_id or f"run{next(IDS)}"


class Database(FakeMLFlow):
    """Keeps nothing in a folder."""

    def __init__(self, folder: Path, id: str | None = None) -> None:
        super().__init__(folder, id, "sqlite:///mlflow.db")


class Nameless(Quiet, Logger):
    """A logger whose runs have no version."""

    def __init__(self, folder: Path, id: str | None = None) -> None:
        self.save_dir = str(folder)

    save_dir = ""
    name = "mine"
    version = None


def csv(folder: Path, id: str | None = None) -> CSVLogger:
    return CSVLogger(folder, name="demo", version=id)


def tensorboard(folder: Path, id: str | None = None) -> TensorBoardLogger:
    return TensorBoardLogger(folder, name="demo", version=id)


def none(folder: Path, id: str | None = None) -> bool:
    return False


LOGGERS = [csv, tensorboard, FakeWandb, FakeMLFlow, Database, Nameless, none]


def fit(root: Path, logger: Any, mark: int, steps: int = 4, first: int = 0, **kwargs: Any) -> SyncMonitor:
    """Train; the tokens of a run's rows are those of `mark`. Saves a checkpoint `mark-STEP.ckpt` after each step."""
    loader = Loader(mark, steps)
    loader.first = first
    monitor = SyncMonitor(every_n_steps=1)
    saving = ModelCheckpoint(root / "saved", f"{mark}-{{step}}", every_n_train_steps=1, save_top_k=-1)
    saving.CHECKPOINT_EQUALS_CHAR = ""
    callbacks = [saving, *kwargs.pop("callbacks", ())]
    trainer(root, monitor, callbacks, devices=1, logger=logger).fit(Model(), loader, **kwargs)
    return monitor


def resume(root: Path, logger: Any, mark: int, of: int, first: int, steps: int = 6, **kwargs: Any) -> SyncMonitor:
    saved = root / "saved" / f"{of}-step{first}.ckpt"
    return fit(root, logger, mark, steps, first, ckpt_path=saved, **kwargs)


def marks(path: Path) -> list[int]:
    """Which run each row is of, in the order of the steps, which start at 0 and lack none."""
    steps = read_steps(path)
    assert steps["step"].tolist() == list(range(len(steps["step"])))
    return [int((tokens - step - 1) / 10 - 1) for step, tokens in zip(steps["step"], steps["tokens"], strict=True)]


def files(root: Path) -> list[Path]:
    return sorted(root.rglob("steps.csv"))


@pytest.mark.parametrize("logger", LOGGERS)
def test_two_runs_have_two_files(tmp_path, logger):
    for mark in (1, 2):
        fit(tmp_path, logger(tmp_path), mark)
    assert sorted(marks(path) for path in files(tmp_path)) == [[1] * 4, [2] * 4]


@pytest.mark.parametrize("logger", LOGGERS)
def test_a_resumed_run_goes_on_in_its_own_file_and_has_no_rows_of_another(tmp_path, logger, capsys):
    fit(tmp_path, logger(tmp_path, "a"), 1)
    fit(tmp_path, logger(tmp_path, "b"), 2)
    before = {path: marks(path) for path in files(tmp_path)}
    resume(tmp_path, logger(tmp_path, "a"), 3, of=1, first=2)
    for path, found in before.items():
        assert marks(path) == ([1] * 2 + [3] * 4 if found == [1] * 4 else [2] * 4)
    assert len(files(tmp_path)) == 2
    assert sum(str(path) in capsys.readouterr().out for path in files(tmp_path)) == 1  # it says where


@pytest.mark.parametrize("logger", [csv, FakeWandb])
def test_a_run_that_is_resumed_under_another_id_has_a_file_of_its_own(tmp_path, logger):
    fit(tmp_path, logger(tmp_path, "a"), 1)
    fit(tmp_path, logger(tmp_path, "b"), 2)
    resume(tmp_path, logger(tmp_path, "b"), 3, of=1, first=2)
    new = next(path for path in files(tmp_path) if path.parent.name == "sync_1")
    assert read_steps(new)["step"].tolist() == [2, 3, 4, 5]
    assert sorted(marks(path) for path in files(tmp_path) if path != new) == [[1] * 4, [2] * 4]


def test_the_folders(tmp_path):
    def where(logger: Any) -> str:
        return str(base_folder(Trainer(logger=logger, default_root_dir=tmp_path)).relative_to(tmp_path))

    assert where(csv(tmp_path, "x")) == where(tensorboard(tmp_path, "x")) == "demo/x"
    assert (
        where(CSVLogger(tmp_path, name="demo")) == where(TensorBoardLogger(tmp_path, name="demo")) == "demo/version_0"
    )
    assert where(FakeWandb(tmp_path, "x")) == "project/x"
    assert where(FakeMLFlow(tmp_path / "mlruns", "x")) == "mlruns/7/x"
    assert where(Database(tmp_path, "x")) == "7/x"
    assert where([FakeWandb(tmp_path, "x"), csv(tmp_path)]) == "project/x"  # the first, as for checkpoints
    assert where(False) == "."


def test_without_a_logger_a_run_takes_the_next_folder_and_report_names_them(tmp_path):
    for mark in (1, 2):
        fit(tmp_path, False, mark)
    first, second = tmp_path / "sync" / "steps.csv", tmp_path / "sync_1" / "steps.csv"
    with pytest.raises(ValueError) as error:
        find_steps(tmp_path)
    assert str(error.value).endswith(f"newest comes last):\n  {first}\n  {second}")
    assert find_steps(tmp_path / "sync_1") == second


def test_a_second_fit_of_one_trainer_goes_on_and_one_of_a_new_trainer_does_not(tmp_path):
    monitor = SyncMonitor()
    first = trainer(tmp_path, monitor, devices=1)
    first.fit(Model(), Loader(1, 3))
    first.validate(Model(), Loader(1, 1), verbose=False)
    first.fit_loop.max_epochs = 2
    first.fit(Model(), Loader(1, 3))
    trainer(tmp_path, monitor, devices=1).fit(Model(), Loader(2, 3))
    assert len(read_steps(tmp_path / "sync" / "steps.csv")["step"]) == 6
    assert marks(tmp_path / "sync_1" / "steps.csv") == [2] * 3


class AtStep(Callback):
    """Calls something once, before a batch."""

    def __init__(self, step: int, call: Callable[[], Any]) -> None:
        self.step, self.call = step, call

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.step:
            self.call()


def test_a_run_whose_file_another_one_continues_moves_on_with_a_warning(tmp_path):
    other = AtStep(4, lambda: resume(tmp_path, False, 2, of=1, first=2))
    with pytest.warns(UserWarning, match="another run writes .*sync/steps.csv.* are now in .*sync_1"):
        fit(tmp_path, False, 1, steps=7, callbacks=[other])
    assert marks(tmp_path / "sync" / "steps.csv") == [1] * 2 + [2] * 4
    assert marks(tmp_path / "sync_1" / "steps.csv") == [1] * 7
    # and its later checkpoints know where
    resume(tmp_path, False, 3, of=1, first=6, steps=8)
    assert marks(tmp_path / "sync_1" / "steps.csv") == [1] * 6 + [3] * 2
    assert len(files(tmp_path)) == 2


@pytest.mark.parametrize("resumed", [False, True], ids=["fresh", "resumed"])
def test_two_processes_at_once_never_mix_their_rows(tmp_path, resumed):
    if resumed:
        fit(tmp_path, False, 5)
    script = tmp_path / "one.py"
    script.write_text(
        "import pathlib, sys, time\n"
        "import torch\n"
        "from test_run_folder import fit, resume\n"
        "mark, other, resumed = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == 'True'\n"
        "root = pathlib.Path(sys.argv[0]).parent\n"
        "(root / str(mark)).touch()\n"
        "while not (root / str(other)).exists(): time.sleep(0.001)\n"
        "if resumed: resume(root, False, mark, of=5, first=2, steps=60)\n"
        "else: fit(root, False, mark, steps=60)\n"
    )
    path = ":".join(map(str, (Path(__file__).parent, *filter(None, sys.path))))
    environment = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    command = [[sys.executable, str(script), *numbers, str(resumed)] for numbers in (("1", "2"), ("2", "1"))]
    running = [subprocess.Popen(one, env=environment, stdout=subprocess.DEVNULL) for one in command]
    assert [process.wait(120) for process in running] == [0, 0]
    before = [5] * 2 if resumed else []
    assert sorted(marks(file) for file in files(tmp_path)) == [before + [mark] * (60 - len(before)) for mark in (1, 2)]


# ---- URLs


@pytest.mark.parametrize("scheme", ["memory://", "simplecache::memory://"])
def test_a_url_has_a_local_folder_in_its_stead_and_a_warning_names_it(tmp_path, monkeypatch, scheme):
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(f"{scheme}bucket/x", SyncMonitor(), devices=1).fit(Model(), Loader(1, 3))
    folder = tmp_path.joinpath("lightning_logs", *scheme.strip(":/").split("::"), "bucket", "x")
    (said,) = [str(warning.message) for warning in caught if "local disks only" in str(warning.message)]
    assert f"{scheme}bucket/x" in said and str(folder) in said
    assert marks(folder / "sync" / "steps.csv") == [1] * 3
    assert [path.name for path in tmp_path.iterdir()] == ["lightning_logs"]


def test_a_loggers_folder_at_a_url_too_and_a_resumed_run_finds_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    logger = CSVLogger("memory://runs", name="demo", version="a")
    fit(tmp_path, logger, 1)
    resume(tmp_path, CSVLogger("memory://runs", name="demo", version="a"), 2, of=1, first=3)
    assert [*map(marks, files(tmp_path))] == [[1] * 3 + [2] * 3]
    assert files(tmp_path)[0] == tmp_path / "lightning_logs/memory/runs/demo/a/sync/steps.csv"


@pytest.mark.parametrize("scheme", ["file://", "local://"])
def test_a_local_url_is_a_local_path(tmp_path, monkeypatch, scheme):
    monkeypatch.chdir(tmp_path)
    trainer(f"{scheme}{tmp_path}/x", SyncMonitor(), devices=1).fit(Model(), Loader(1, 3))
    assert find_steps(f"{scheme}{tmp_path}/x") == tmp_path / "x" / "sync" / "steps.csv"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("url", ["s3://bucket/run", "memory://run", "simplecache::s3://bucket/run"])
def test_a_run_at_a_url_cannot_be_read_and_that_is_said(url):
    with pytest.raises(ValueError, match="the run is .*expected a path on this machine, not a URL"):
        find_steps(url)
