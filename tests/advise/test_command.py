"""The command `advise`: what it takes from a configuration or a file, what it writes, and how it ends."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.pytorch.demos.boring_classes import BoringModel

from helpers.datasets import LengthEncoder
from lightning_lengthpool import LengthPoolDataModule
from lightning_lengthpool.advise import command
from lightning_lengthpool.advise.command import advise_config
from lightning_lengthpool.advise.from_config import machine_bytes, make_data, workers_by_rank, world_of
from lightning_lengthpool.cli import main, parse_config
from lightning_lengthpool.ordering.lengths_file import read_lengths
from lightning_lengthpool.ordering.reference_lengths import read_reference_lengths
from lightning_lengthpool.ordering.settings import PoolWarmup

ROOT = Path(__file__).parents[2]
LENGTHS = [(7 * i) % 101 + 1 for i in range(200)]


class NoModel(pl.LightningModule):
    """A model that cannot be made on this machine."""

    def __init__(self, max_seq_len: int = 77) -> None:
        raise RuntimeError("no GPU for this model")


class NoCallback(pl.Callback):
    def __init__(self) -> None:
        raise RuntimeError("a callback was made")


class Derived(LengthPoolDataModule):
    """Finds its data late, as a module of one's own may."""

    def __init__(self, folder: str, batch_size: int = 2) -> None:
        super().__init__("not yet known", LengthEncoder(), batch_size, num_workers=0)
        self.folder = folder

    def prepare_data(self) -> None:
        self.prepared = self.folder

    def setup(self, stage: str) -> None:
        self.path = self.prepared
        super().setup(stage)


class NeedsTrainer(Derived):
    def prepare_data(self) -> None:
        self.prepared = self.trainer.default_root_dir


class NoEncoder(LengthEncoder):
    def __init__(self) -> None:
        raise KeyError("vocabulary")


def parity(sample: Any) -> str:
    return "odd" if sample.total_len % 2 else "even"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where results go by default


class Asked(Exception):
    """Ends the command where it would begin to simulate."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the advisor is asked; it gives no answer."""
    seen = SimpleNamespace()

    def ask(scan: Any, plan: Any, **options: Any) -> None:
        seen.scan, seen.plan, seen.options = scan, plan, options
        raise Asked

    monkeypatch.setattr(command, "advise", ask)
    return seen


@pytest.fixture
def config(tmp_path: Path, dataset: Callable[..., Path]) -> Callable[..., str]:
    """`config(trainer=..., model=..., **data) -> path` writes a YAML with a data set of its own."""

    def write(trainer: Any = None, model: str = "NoModel", **settings: Any) -> str:
        settings = {"path": str(dataset(LENGTHS)), "batch_size": 4, "num_workers": 0, **settings}
        encoder = {"class_path": "helpers.datasets.LengthEncoder"}
        data = {
            "class_path": "lightning_lengthpool.LengthPoolDataModule",
            "init_args": {"task_encoder": encoder, **settings},
        }
        path = tmp_path / "config.yaml"
        text = {"model": f"{__name__}.{model}", "data": data, "trainer": {"devices": 2, **(trainer or {})}}
        path.write_text(yaml.safe_dump(text))
        return str(path)

    return write


def run(*args: str) -> None:
    with pytest.raises(Asked):
        main(["advise", *args])


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The one line with which the command ends."""
    capsys.readouterr()  # what the making of a data set has said
    with pytest.raises(SystemExit) as ended:
        main(["advise", *args])
    said = capsys.readouterr()
    assert ended.value.code == 2 and not said.out
    (line,) = said.err.strip().splitlines()
    return line


def test_all_of_it_for_a_config(config: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = config(pool_size=20), tmp_path / "out"
    main(["advise", "--config", path, "--samples", "120", "--pool_sizes", "20", "--out", str(out)])
    said = capsys.readouterr()
    assert "policy pool, pool_size 20" in said.out and "Recommendation" in said.out and "%|" not in said.err
    assert json.loads((out / "advice.json").read_text())["plan"]["world_size"] == 2
    assert (out / "advice.png").stat().st_size > 10_000
    assert (out / "lengths.csv").read_text().splitlines()[0] == "tokens"
    lengths = read_reference_lengths(out / "lengths.csv").lengths[None]
    assert len(lengths) == 120 and set(lengths) <= set(LENGTHS)
    # and the file serves as it is said to
    settings = yaml.safe_load(Path(path).read_text())["data"]["init_args"] | {"task_encoder": LengthEncoder()}
    module = LengthPoolDataModule(**settings | {"policy": "stream", "reference_lengths": out / "lengths.csv"})
    module.setup("fit")


def test_the_plan_is_that_of_the_config(
    config: Callable[..., str], asked: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cost = {"class_path": "lightning_lengthpool.cost_models.QuadraticCost", "init_args": {"k": 4000}}
    warmup = {"initial": 8, "flushes": 2}
    trainer = {
        "devices": 3,
        "num_nodes": 2,
        "accumulate_grad_batches": 5,
        "strategy": "ddp",
        "callbacks": [{"class_path": f"{__name__}.NoCallback"}],
    }
    settings = {"pool_size": 30, "policy": "blocks", "seed": 7, "num_workers": 2, "cost": cost, "pool_warmup": warmup}
    run("--config", config(trainer, **settings), "--samples", "24", "--out", str(tmp_path))
    plan, pool = asked.plan, asked.plan.settings
    assert (pool.policy, pool.pool_size, pool.batch_size, plan.num_workers) == ("blocks", 30, 4, 2)
    assert (plan.world_size, plan.ranks_per_node, plan.accumulate, pool.seed) == (6, 3, 5, 7)
    assert (repr(pool.cost), pool.is_padded, pool.warmup) == ("QuadraticCost(k=4000.0)", True, PoolWarmup(8, 2))
    assert plan.max_length == ("model.init_args.max_seq_len", 77)
    assert not plan.is_off and plan.is_known and not plan.has_reference
    assert plan.lengths_file == str(tmp_path / "lengths.csv")
    assert asked.options["world_sizes"] == [6] and asked.options["machine_bytes"] == machine_bytes()
    assert len(asked.scan.streams) == 12 and asked.scan.ranks == 6
    assert asked.scan.costs[0] == pytest.approx(asked.scan.lengths[0] * (1 + asked.scan.lengths[0] / 4000))


def test_the_first_world_size_is_the_runs(config: Callable[..., str], asked: SimpleNamespace, tmp_path: Path) -> None:
    args = ["--config", config({"devices": "auto"}), "--samples", "40", "--out", str(tmp_path)]
    run(*args, "--world_size", "8, 64,512", "--max_length", "50")
    assert asked.plan.world_size == asked.scan.ranks == 8 and asked.options["world_sizes"] == [8, 64, 512]
    assert asked.plan.max_length == ("--max_length", 50)


@pytest.mark.parametrize("settings", [{"policy": "none"}, {"pool_size": 0}], ids=["none", "zero"])
def test_a_pool_that_is_off_is_advised_on(
    config: Callable[..., str], asked: SimpleNamespace, tmp_path: Path, settings: dict[str, Any]
) -> None:
    run("--config", config(**settings), "--samples", "40", "--out", str(tmp_path))
    assert asked.plan.is_off and len(asked.scan.lengths) == 40


def test_a_derived_module_finds_its_data(dataset: Callable[..., Path], asked: SimpleNamespace, tmp_path: Path) -> None:
    path = tmp_path / "derived.yaml"
    data = {"class_path": f"{__name__}.Derived", "init_args": {"folder": str(dataset(LENGTHS))}}
    path.write_text(yaml.safe_dump({"model": f"{__name__}.NoModel", "data": data, "trainer": {"devices": 1}}))
    setup = LengthPoolDataModule.setup
    run("-c", str(path), "--samples", "30", "--out", str(tmp_path))
    assert len(asked.scan.lengths) == 30 and LengthPoolDataModule.setup is setup


def test_classes_and_shares_of_a_reference_that_is_there(
    config: Callable[..., str], asked: SimpleNamespace, tmp_path: Path
) -> None:
    reference = tmp_path / "reference.csv"
    reference.write_text("tokens,class\n" + "1,odd\n" * 3 + "2,even\n")
    stream = {"policy": "stream", "pool_size": 20, "class_fn": f"{__name__}.parity"}
    path = config(**stream, reference_lengths=str(reference))
    run("--config", path, "--samples", "40", "--out", str(tmp_path))
    assert asked.plan.has_reference and asked.plan.settings.class_shares == {"even": 0.25, "odd": 0.75}
    with (tmp_path / "lengths.csv").open() as file:
        assert all(("odd" if int(row["tokens"]) % 2 else "even") == row["class"] for row in csv.DictReader(file))
    assert set(read_reference_lengths(tmp_path / "lengths.csv").lengths) == {"odd", "even"}


def test_a_reference_that_is_not_there_yet_is_no_error(
    config: Callable[..., str], asked: SimpleNamespace, tmp_path: Path
) -> None:
    path = config(policy="stream", pool_size=20, reference_lengths=str(tmp_path / "lengths.csv"))
    run("--config", path, "--samples", "40", "--out", str(tmp_path))
    assert asked.plan.has_reference and len(read_lengths(tmp_path / "lengths.csv", "file")) == 40
    before = "tokens\n5\n"  # checkpoints know it, so it must stay
    (tmp_path / "lengths.csv").write_text(before)
    run("--config", path, "--samples", "40", "--out", str(tmp_path))
    assert (tmp_path / "lengths.csv").read_text() == before


def test_no_model_and_no_trainer_are_made(config: Callable[..., str], asked: SimpleNamespace, tmp_path: Path) -> None:
    parsed = parse_config([config({"accelerator": "gpu", "devices": 2, "strategy": "fsdp"})])
    assert isinstance(make_data(parsed), LengthPoolDataModule)
    with pytest.raises(Asked):
        advise_config(parsed, samples=10, out=str(tmp_path))
    assert asked.plan.world_size == 2


@pytest.mark.parametrize(
    ("trainer", "world"),
    [
        ({"devices": 4}, (4, 4)),
        ({"devices": "2", "num_nodes": 3}, (6, 2)),
        ({"devices": [0, 1, 5]}, (3, 3)),
        ({"devices": "0,1"}, (2, 2)),
        ({"devices": "3,"}, (1, 1)),
        ({"devices": 8, "strategy": "ddp", "num_nodes": 64}, (512, 8)),
        ({"devices": 2, "strategy": {"class_path": "lightning.pytorch.strategies.FSDPStrategy"}}, (2, 2)),
    ],
    ids=["int", "text", "list", "ids", "one_id", "nodes", "class"],
)
def test_the_world_is_devices_times_nodes(trainer: dict[str, Any], world: tuple[int, int]) -> None:
    assert world_of({"accelerator": "auto"} | trainer) == (*world, ())


TENSOR = "lightning.pytorch.strategies.ModelParallelStrategy"


@pytest.mark.parametrize(
    ("trainer", "world", "said"),
    [
        ({"devices": "auto", "accelerator": "cpu"}, (1, 1), "trainer.devices is 'auto' with accelerator 'cpu'"),
        ({"devices": "auto"}, (4, 4), "this machine's 4 GPU"),
        ({"devices": -1, "num_nodes": 2}, (8, 4), "trainer.devices is -1: this machine's 4 GPU"),
        ({"devices": "-1", "accelerator": "gpu"}, (4, 4), "this machine's 4 GPU"),
        ({"devices": 8, "num_nodes": 2, "strategy": {"class_path": TENSOR}}, (2, 1), "2 data-parallel rank"),
        (
            {
                "devices": 8,
                "strategy": {"class_path": TENSOR, "init_args": {"data_parallel_size": 4, "tensor_parallel_size": 2}},
            },
            (4, 4),
            "4 data-parallel rank",
        ),
        ({"devices": 8, "strategy": {"class_path": "their.Strategy"}}, (8, 8), "each of the 8 devices"),
    ],
    ids=["cpu", "auto", "all", "all_as_text", "tensor_parallel", "both_sizes", "foreign"],
)
def test_what_is_assumed_of_the_world_is_said(
    trainer: dict[str, Any], world: tuple[int, int], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    found = world_of({"accelerator": "auto"} | trainer)
    assert found[:2] == world
    assert said in found.notes[0] and "--world_size" in found.notes[0]


def test_without_gpus_one_device_is_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    ranks, _, (note,) = world_of({"devices": "auto", "accelerator": "gpu", "num_nodes": 3})
    assert ranks == 3 and "no GPU" in note and "--world_size" in note


@pytest.mark.parametrize("trainer", [{"devices": 0}, {"devices": "two"}, {"devices": []}, {"num_nodes": 0}], ids=str)
def test_a_world_that_cannot_be_is_named(trainer: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"trainer.{next(iter(trainer))} is "):
        world_of({"devices": 1} | trainer)


# ---- without a config


def rows(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_a_file_of_lengths_is_advised_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = rows(tmp_path / "in.csv", "tokens\n" + "\n".join(map(str, LENGTHS)))
    out = tmp_path / "out"
    args = ["--lengths", path, "--world_size", "4", "--batch_size", "2", "--pool_sizes", "20", "--out", str(out)]
    main(["advise", *args])
    assert "Recommendation" in capsys.readouterr().out
    assert read_lengths(out / "lengths.csv", "file").tokens.tolist() == LENGTHS
    assert (out / "advice.json").is_file() and (out / "advice.png").is_file()


def test_the_plan_for_a_file_of_lengths(asked: SimpleNamespace, tmp_path: Path) -> None:
    path = rows(tmp_path / "in.csv", "tokens,class\n5,a\n9,b\n")
    common = ["--lengths", path, "--world_size", "64,8", "--out", str(tmp_path / "out")]
    run(*common, "--batch_size", "4")
    plan = asked.plan
    assert (plan.is_known, plan.is_off, plan.settings.batch_size, plan.world_size) == (False, True, 4, 64)
    assert asked.scan.classes == ("a", "b") and not asked.scan.has_ranks
    assert asked.options["world_sizes"] == [64, 8]
    run(*common, "--pool_size", "100", "--max_tokens", "7.5", "--max_length", "8")
    plan, pool = asked.plan, asked.plan.settings
    assert (plan.is_off, pool.policy, pool.pool_size, pool.max_tokens) == (False, "stream", 100, 7.5)
    assert pool.batch_size is None and plan.max_length == ("--max_length", 8)
    run(*common, "--pool_size", "100", "--batch_size", "4")
    assert (asked.plan.settings.policy, asked.plan.settings.batch_size) == ("pool", 4)


def test_a_column_of_ranks_tells_them_apart(asked: SimpleNamespace, tmp_path: Path) -> None:
    path = rows(tmp_path / "lengths.csv", "rank,tokens\n0,5\n1,9\n0,6\n")
    run("--lengths", path, "--batch_size", "1", "--out", str(tmp_path))
    assert [own.tolist() for own in asked.scan.lengths_by_rank()] == [[5, 6], [9]]
    assert asked.plan.world_size == 2 and asked.scan.has_ranks
    assert "rank" in Path(path).read_text()  # the file is not written over


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tokens\n5\nx\n", "line 3 of --lengths .* has the length 'x'"),
        ("tokens\n5\n\n-7\n", "line 4 of --lengths .* has the length -7, expected a finite number of at least 0"),
        ("tokens\n5\nnan\n", "line 3 .* the length nan"),
        ("rank,tokens\n0,5\n1\n", "line 3 .* has the length None"),
        ("rank,tokens\n0,5\nfirst,6\n", "line 3 .* has the rank 'first'"),
        ("tokens,class\n5,\n", "line 2 .* names no class"),
        ("length\n5\n", "no column 'tokens'"),
        ("tokens\n", "no lengths below its first line"),
        ("", "no column 'tokens'"),
        ("tokens\n5\n" + "9" * 200_000 + "\n", "line 3 .* cannot be read"),
    ],
    ids=["text", "negative", "nan", "short", "rank", "class", "column", "no_rows", "empty", "endless"],
)
def test_a_wrong_file_of_lengths_is_named_with_the_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    path = rows(tmp_path / "in.csv", text)
    line = refused(capsys, "--lengths", path, "--world_size", "4", "--batch_size", "2", "--out", str(tmp_path))
    with pytest.raises(ValueError, match=said):
        raise ValueError(line)
    assert "in.csv" in line


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--lengths", "gone.csv", "--world_size", "4", "--batch_size", "2"], "'gone.csv', but no file is there"),
        (["--lengths", "IN", "--batch_size", "2"], "--lengths needs --world_size"),
        (["--lengths", "IN", "--world_size", "4"], "--lengths needs --batch_size"),
        (["--lengths", "IN", "--world_size", "0", "--batch_size", "2"], "--world_size is '0', expected integers"),
        (["--lengths", "IN", "--world_size", "4,", "--batch_size", "2"], "--world_size is '4,', expected integers"),
        (["--lengths", "IN", "--world_size", "4", "--batch_size", "0"], "--batch_size is 0, expected an integer"),
        (["--lengths", "IN", "--world_size", "4", "--batch_size", "9", "--pool_size", "5"], "--pool_size is 5, less"),
        (["--lengths", "IN", "--world_size", "4", "--max_tokens", "-1"], "--max_tokens is -1.0, expected a finite"),
        (["--lengths", "IN", "--world_size", "4", "--batch_size", "2", "--max_length", "0"], "--max_length is 0"),
        (["--lengths", "IN", "--world_size", "4", "--batch_size", "2", "--run", "gone"], "no file or folder gone"),
        (["--lengths", "IN", "--samples", "5", "--batch_size", "2"], "--samples goes with --config"),
        (["--config", "c.yaml", "--pool_size", "5"], "--pool_size goes with --lengths"),
        (["--config", "gone.yaml"], "gone.yaml"),
        ([], "expected either --config or --lengths"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_option_is_named_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], said: str
) -> None:
    path = rows(tmp_path / "in.csv", "tokens\n5\n6\n")
    assert said in refused(capsys, *(path if arg == "IN" else arg for arg in args))


@pytest.mark.parametrize(
    ("settings", "args", "said"),
    [
        ({"path": "/nowhere"}, [], "path is '/nowhere', but nothing is there"),
        ({}, ["--world_size", "300"], "200 samples for 300 ranks"),
        ({}, ["--samples", "0"], "--samples is 0"),
        ({}, ["--run", "/nowhere"], "no file or folder /nowhere"),
        ({"policy": "sorted"}, [], "policy is 'sorted', expected one of"),
        ({"trainer": {"devices": "two"}}, [], "trainer.devices is 'two'"),
        ({"poolsize": 5}, [], "poolsize"),
    ],
    ids=["path", "ranks", "samples", "run", "setting", "devices", "name"],
)
def test_a_wrong_config_is_named_in_one_line(
    config: Callable[..., str], capsys: pytest.CaptureFixture[str], settings: dict[str, Any], args: list[str], said: str
) -> None:
    line = refused(capsys, "--config", config(**settings), *args)
    assert said in line


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            {"class_path": f"{__name__}.NeedsTrainer", "init_args": {"folder": "x"}},
            "the data of NeedsTrainer cannot be set up without a trainer: AttributeError",
        ),
        (
            {
                "class_path": "lightning_lengthpool.LengthPoolDataModule",
                "init_args": {"path": "x", "task_encoder": f"{__name__}.NoEncoder", "batch_size": 1},
            },
            "lightning_lengthpool.LengthPoolDataModule, which cannot be made: KeyError: 'vocabulary'",
        ),
    ],
    ids=["trainer", "encoder"],
)
def test_data_that_cannot_be_made_are_named_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], data: dict[str, Any], said: str
) -> None:
    path = rows(tmp_path / "config.yaml", yaml.safe_dump({"model": f"{__name__}.NoModel", "data": data}))
    assert said in refused(capsys, "--config", path, "--out", str(tmp_path))


def test_a_folder_that_cannot_be_is_named_before_the_data_are_read(
    config: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config(path="/nowhere")
    line = refused(capsys, "--config", path, "--out", path)
    assert f"--out is {path!r}, expected a folder" in line


def test_an_empty_data_set_is_named(
    config: Callable[..., str], dataset: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = config(path=str(dataset([], val=[1, 2, 3])))
    assert "has no 'train' split, or an empty one" in refused(capsys, "--config", path)


@pytest.mark.parametrize(
    "data", [None, "lightning.pytorch.demos.boring_classes.BoringDataModule"], ids=["none", "other"]
)
def test_other_data_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], data: str | None) -> None:
    text = {"model": f"{BoringModel.__module__}.BoringModel"} | ({} if data is None else {"data": data})
    path = rows(tmp_path / "config.yaml", yaml.safe_dump(text))
    line = refused(capsys, "--config", path)
    assert "LengthPoolDataModule" in line and "--lengths" in line


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "SLURM_NTASKS"])
def test_launchers_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "2")
    path = rows(tmp_path / "in.csv", "tokens\n5\n")
    assert "not under torchrun or srun" in refused(capsys, "--lengths", path, "--world_size", "2", "--batch_size", "1")


# ---- a run


@pytest.mark.parametrize(
    ("about", "workers"),
    [({"workers_by_rank": [2, 4]}, (2, 4)), ({"settings": {"num_workers": 2}}, None), (None, None)],
    ids=["told", "not_told", "no_file"],
)
def test_the_workers_of_a_runs_ranks(
    steps_csv: Path, tmp_path: Path, asked: SimpleNamespace, about: dict[str, Any] | None, workers: Any
) -> None:
    if about is not None:
        (steps_csv.parent / "run.json").write_text(json.dumps(about))
    path = rows(tmp_path / "in.csv", "tokens\n5\n6\n")
    args = ["--lengths", path, "--world_size", "2", "--batch_size", "1", "--out", str(tmp_path / "out")]
    run(*args, "--run", str(steps_csv))
    assert asked.plan.workers_by_rank == workers and asked.options["run"].path == steps_csv
    run(*args)
    assert asked.plan.workers_by_rank is asked.options["run"] is workers_by_rank(None) is None


# ---- Ctrl-C


SLOW = """
import time
from helpers.datasets import LengthEncoder, LengthSample
from megatron.energon import stateless

class Slow(LengthEncoder):
    @stateless
    def encode_sample(self, sample):
        open("reading", "a").write(".")
        time.sleep(0.05)
        return LengthSample.derive_from(sample, total_len=int(sample.text))
"""


def test_ctrl_c_ends_the_reading_and_what_was_read_counts(config: Callable[..., str], tmp_path: Path) -> None:
    path = Path(config(num_workers=2, pool_size=20))
    path.write_text(path.read_text().replace("helpers.datasets.LengthEncoder", "slow.Slow"))
    (tmp_path / "slow.py").write_text(SLOW)
    command = [sys.executable, str(ROOT / "train.py"), "advise", "--config", str(path), "--out", "out"]
    command += ["--pool_sizes", "20"]
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{Path(__file__).parent}", "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, env=env, start_new_session=True, **pipes) as advising:
        reading = tmp_path / "reading"
        while advising.poll() is None and not (reading.exists() and reading.stat().st_size > 40):
            time.sleep(0.05)
        os.killpg(advising.pid, signal.SIGINT)
        out, err = advising.communicate(timeout=120)
    assert advising.returncode == 0, err
    assert "Traceback" not in err and "Interrupted: the advice is on the" in err
    read = read_lengths(tmp_path / "out" / "lengths.csv", "lengths")
    assert 10 <= len(read) < 150 and f"on the {len(read)} samples" in err
    assert "Recommendation" in out and (tmp_path / "out" / "advice.json").is_file()
    with pytest.raises(ProcessLookupError):  # no worker is left
        os.killpg(advising.pid, 0)
