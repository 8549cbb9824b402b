"""The command line in processes of its own, on the real demo."""

import contextlib
import csv
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_lengthpool.advise.command import advise_config
from lightning_lengthpool.cli import main
from lightning_lengthpool.runs.steps.columns import COLUMNS

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's data sets, built once for this file; CI hands its own cache in."""
    return Path(os.environ.get("LENGTHPOOL_CACHE") or tmp_path_factory.mktemp("cache"))


def run(args: Sequence[str], cache: Path, cwd: Path, *, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "train.py"), *args]
    env = os.environ | {"LENGTHPOOL_CACHE": str(cache), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 or not check, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def configs(*names: str) -> list[str]:
    return [part for name in names for part in ("--config", str(ROOT / "configs" / f"{name}.yaml"))]


def steps(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


SHORT = ["--data.init_args.pool_size=4", "--trainer.max_steps=8", "--trainer.limit_val_batches=2"]
SHORT += ["--trainer.val_check_interval=8"]


def test_fit_trains_two_ranks_and_ends_with_the_monitors_table(cache: Path, tmp_path: Path) -> None:
    done = run(["fit", *configs("demo"), *SHORT], cache, tmp_path)
    assert "idle by compute seconds" in done.stdout and "8 of 8 steps" in done.stdout
    folder = tmp_path / "runs" / "demo" / "version_0"
    rows = steps(folder / "sync" / "steps.csv")
    assert [(row["step"], row["rank"]) for row in rows] == [(str(s), r) for s in range(8) for r in "01"]
    assert all(row["samples"] == "1" and int(row["tokens"]) > 0 and float(row["compute_seconds"]) > 0 for row in rows)
    logged = steps(folder / "metrics.csv")
    assert sum(bool(row["sync/idle_fraction"]) for row in logged) == 8
    assert any(row["val/loss"] for row in logged)


def test_blend_trains_on_both_data_sets_of_the_metadataset(cache: Path, tmp_path: Path) -> None:
    code = "\n".join(
        (
            "import lightning_lengthpool.demo as demo",
            "step = demo.OcrModel.training_step",
            "def logged(self, batch, index):",
            "    with open(f'keys{self.global_rank}', 'a') as file:",
            "        print(*batch.__key__, file=file)",
            "    return step(self, batch, index)",
            "demo.OcrModel.training_step = logged",
            "from lightning_lengthpool.cli import main; main()",
        )
    )
    script = tmp_path / "blend.py"
    script.write_text(code)
    command = [sys.executable, str(script), "fit", *configs("demo", "blend"), *SHORT, "--trainer.max_steps=32"]
    command += ["--trainer.devices=1", "--trainer.strategy=auto"]
    env = os.environ | {"LENGTHPOOL_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    keys = (tmp_path / "keys0").read_text().split()
    assert len(keys) == 32 and {key.split("-")[0] for key in keys} == {"code", "prose"}


def test_validate_covers_the_validation_set(cache: Path, tmp_path: Path) -> None:
    single = ["--trainer.devices=1", "--trainer.strategy=auto", "--trainer.limit_val_batches=3"]
    done = run(["validate", *configs("demo"), *single], cache, tmp_path)
    assert "val/loss" in done.stdout


def test_compare_measures_the_policies_side_by_side(cache: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.yaml"
    small = "model: {init_args: {dim: 8, heads: 2, layers: 1}}\n"  # the policies' figures do not depend on the model
    short.write_text(f"trainer: {{limit_val_batches: 2}}\ndata: {{init_args: {{pool_size: 40}}}}\n{small}")
    args = ["compare", *configs("demo"), "--config", str(short), "--policies", "none", "pool", "--steps", "50"]
    done = run([*args, "--out", "out"], cache, tmp_path)
    assert "80 steps a run" in done.stdout  # two whole pools
    for figure in ("idle by compute seconds", "idle by tokens", "padding", "tokens per second", "seconds per step"):
        assert figure in done.stdout
    assert "seconds to the first batch" in done.stdout and "validation loss" in done.stdout
    result = json.loads((tmp_path / "out" / "compare.json").read_text())
    none, pool = result["policies"]
    assert (none["policy"], pool["policy"], result["steps"]) == ("none", "pool", 80)
    assert pool["mean"]["idle_fraction_tokens"] < 0.6 * none["mean"]["idle_fraction_tokens"]
    assert none["mean"]["val_loss"] > 0 and (tmp_path / "out" / "compare.png").stat().st_size > 10_000
    rows = [steps(Path(policy["runs"][0]["steps_csv"])) for policy in result["policies"]]
    for rank in "01":  # the same samples, in another order
        lengths = [[row["tokens"] for row in policy if row["rank"] == rank] for policy in rows]
        assert lengths[0] != lengths[1] and sorted(lengths[0]) == sorted(lengths[1])


def test_compare_takes_what_fit_takes(cache: Path, tmp_path: Path) -> None:
    args = ["compare", *configs("demo"), "--data.init_args.batch_size", "4", "--policies", "none", "pool"]
    args += ["--data.init_args.pool_size=8", "--trainer.max_steps", "5", "--trainer.devices=1", "--seed_everything=7"]
    args += ["--trainer.strategy=auto", "--model.lr", "0.5", "--optimizer=SGD", "--optimizer.lr=0.1", "--out", "out"]
    args += ["--trainer.limit_val_batches=1", "--trainer.callbacks+=lightning.pytorch.callbacks.LearningRateMonitor"]
    earlier = tmp_path / "out" / "pool-0" / "sync"
    earlier.mkdir(parents=True)
    (earlier / "steps.csv").write_text("of an earlier comparison, which this one replaces\n")
    done = run(args, cache, tmp_path)
    assert "6 steps a run: 5 were asked for" in done.stdout  # three pools of two batches
    result = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert result["steps"] == 6 and "--data.init_args.batch_size" in result["arguments"]
    for policy in ("none", "pool"):
        folder = tmp_path / "out" / f"{policy}-0"
        rows = steps(folder / "sync" / "steps.csv")
        assert [(row["step"], row["rank"], row["samples"]) for row in rows] == [(str(s), "0", "4") for s in range(6)]
        ran = yaml.safe_load((folder / "config.yaml").read_text())
        assert (ran["seed_everything"], ran["model"]["init_args"]["lr"]) == (7, 0.5)
        data = ran["data"]["init_args"]
        assert (data["policy"], data["batch_size"], data["pool_size"]) == (policy, 4, 8)
        assert ran["optimizer"]["class_path"] == "torch.optim.SGD" and ran["optimizer"]["init_args"]["lr"] == 0.1
        names = [callback["class_path"].rpartition(".")[2] for callback in ran["trainer"]["callbacks"]]
        assert names == ["SyncMonitor", "LearningRateMonitor"]


def test_an_option_that_fit_does_not_take_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for command in (["compare"], ["advise"]):
        with pytest.raises(SystemExit) as ended:
            main([*command, *configs("demo"), "--data.init_args.pool_sise=8", "--out", str(tmp_path)])
        assert ended.value.code == 2 and "pool_sise" in capsys.readouterr().err
    for command in (["report", str(tmp_path)], ["advise", "--lengths", "x.csv"]):
        with pytest.raises(SystemExit) as ended:
            main([*command, "--data.init_args.pool_size=8"])
        assert ended.value.code == 2 and "--data.init_args.pool_size=8" in capsys.readouterr().err


def test_advise_takes_the_options_of_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[Any, dict[str, Any]]] = []

    @functools.wraps(advise_config)
    def note(config: Any, **rest: Any) -> None:
        given.append((config, rest))

    monkeypatch.setattr("lightning_lengthpool.advise.command.advise_config", note)
    main(["advise", *configs("demo"), "--data.init_args.batch_size", "4", "--samples", "9", "--trainer.devices=3"])
    ((config, rest),) = given
    assert config["data"]["init_args"]["batch_size"] == 4 and int(config["trainer"]["devices"]) == 3
    unset = dict.fromkeys(("world_size", "pool_sizes", "run", "max_length"))
    assert rest == {"samples": 9, "out": "runs/advise", **unset}


@pytest.mark.parametrize(
    "args",
    [
        ["compare", *configs("demo"), "--out", "s3://b/x"],
        ["advise", *configs("demo"), "--out", "s3://b/x"],
        ["advise", "--lengths", "s3://b/x"],
        ["advise", "--lengths", "x.csv", "--batch_size", "1", "--world_size", "2", "--run", "s3://b/x"],
        ["report", "s3://b/x"],
        ["report", ".", "--out", "memory://x"],
    ],
)
def test_a_url_where_a_local_path_is_needed_is_named(
    args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(args)
    assert ended.value.code == 2 and "expected a path on this machine, not a URL" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_run_that_fails_ends_compare_with_its_output(cache: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("model: {init_args: {lr: -1.0}}\n")
    done = run(["compare", *configs("demo"), "--config", str(broken), "--out", "out"], cache, tmp_path, check=False)
    assert done.returncode == 2 and "the run of policy none failed" in done.stderr and "-1.0" in done.stderr


def test_report_makes_a_page_of_a_run(cache: Path, tmp_path: Path, steps_csv: Path) -> None:
    done = run(["report", str(tmp_path), "--out", "page", "--steps", "50"], cache, tmp_path)
    assert "page/report.html" in done.stdout and "\n- " in done.stdout
    assert "<h2>Findings</h2>" in (tmp_path / "page" / "report.html").read_text()
    assert (tmp_path / "page" / "causes.png").stat().st_size > 10_000


def test_report_says_in_one_line_why_there_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "steps.csv").write_text(f"{','.join(COLUMNS)}\n")
    (tmp_path / "empty").mkdir()
    for path, said in (
        (tmp_path, "has no steps yet"),
        (tmp_path / "empty", "no steps.csv"),
        ("gone", "no file or folder"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["report", str(path)])
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert ended.value.code == 2 and said in line


def test_advise_says_what_a_pool_brings_for_a_blend(cache: Path, tmp_path: Path) -> None:
    args = ["advise", *configs("demo", "blend"), "--samples", "300", "--world_size", "4", "--out", "out"]
    done = run(args, cache, tmp_path)
    assert "the pool is active: policy pool, pool_size 300" in done.stdout
    assert "Recommendation" in done.stdout and "4 ranks, predicted" in done.stdout
    assert "\x1b" not in done.stdout and "reading samples" not in done.stderr  # neither colours nor a bar in a pipe
    advice = json.loads((tmp_path / "out" / "advice.json").read_text())
    assert advice["plan"]["world_size"] == 4 and advice["today"]["case"]["pool_size"] == 300
    assert len(steps(tmp_path / "out" / "lengths.csv")) == 300
    assert (tmp_path / "out" / "advice.png").stat().st_size > 10_000


def test_help_is_the_manual(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")

    def manual_of(*args: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main([*args, "--help"])
        assert ended.value.code == 0
        return capsys.readouterr().out

    text = manual_of("fit")
    for setting in ("pool_size", "policy", "length_fn", "every_n_steps", "virtual_epoch_length"):
        assert f"init_args.{setting}" in text
    general = manual_of()
    assert "compare --help" in general and "advise --help" in general
    manual = manual_of("advise")
    for part in ("--config", "--lengths", "--world_size WORLD_SIZE", "N[,N...]", "--run", "lengths.csv", "Exit status"):
        assert part in manual
    assert "--repeats" in manual_of("compare")
    assert "--baseline" in manual_of("report")


def test_the_console_script_finds_the_users_own_code(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "my_code.py").write_text("from lightning_lengthpool.demo import OcrModel as MyModel\n")
    script = Path(sys.executable).with_name("lightning-lengthpool")
    command = [script, "validate", *configs("demo"), "--model=my_code.MyModel", "--print_config"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "my_code.MyModel" in done.stdout, done.stderr[-2000:]


def test_ending_compare_ends_its_runs(cache: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "train.py"), "compare", *configs("demo"), "--out", str(tmp_path / "out")]
    env = os.environ | {"LENGTHPOOL_CACHE": str(cache)}
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL) as compare:
        overlay = str(tmp_path / "out" / "none-0" / "compare.yaml")
        deadline = time.monotonic() + 100
        while not (found := running(overlay)) and time.monotonic() < deadline:
            time.sleep(0.1)
        compare.send_signal(signal.SIGTERM)
        assert compare.wait(30) == 143 and found
    deadline = time.monotonic() + 20
    while running(overlay) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not running(overlay)


def running(argument: str) -> list[int]:
    """The processes that have this argument."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if argument.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def test_a_wrong_setting_in_a_config_is_named(cache: Path, tmp_path: Path) -> None:
    done = run(["fit", *configs("demo"), "--data.init_args.policy=sorted"], cache, tmp_path, check=False)
    assert done.returncode != 0 and "policy is 'sorted', expected one of: none, pool" in done.stderr
