"""`compare`: the same training once per policy, measured side by side."""

import contextlib
import csv
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import yaml
from filelock import FileLock, Timeout

from lightning_lengthpool.ordering.settings import PoolSettings, unfit_settings
from lightning_lengthpool.report import figures
from lightning_lengthpool.report.out_folder import make_out
from lightning_lengthpool.report.summary import compare_runs, compare_table, print_table, write_json

_SHOWN_OF_A_FAILURE = 3000  # characters of a failed run's output

# One epoch, for at its end Lightning steps whatever has accumulated, and one validation, when all policies have seen
# the same samples.
_TRAINER = {
    "max_epochs": 1,
    "limit_train_batches": 1.0,
    "val_check_interval": 1.0,
    "check_val_every_n_epoch": 1,
    "num_sanity_val_steps": 0,
}
# what compare sets besides, and what to do about it
_SET = {
    "trainer.logger": "the logs of each run lie in --out",
    "data.policy": "name the policies with --policies",
    "data.virtual_epoch_length": "every run is as long as --steps says",
    "ckpt_path": "every run starts from the beginning",
}


def compare(
    config: Any,
    configs: Sequence[str],
    policies: Sequence[str],
    steps: int | None = None,
    repeats: int = 1,
    out: str = "runs/compare",
    val_metric: str | None = None,
    overrides: Sequence[str] = (),
) -> dict[str, Any]:
    """Train once per policy and repeat, and report the measured figures.

    Every run starts fresh processes from the same configuration. The runs of one repeat share a seed, and cover whole
    pools, so that all policies see the same samples. The policies take turns within a repeat, so that a machine that
    slows down over time slows all of them.

    Args:
        config: The configuration, parsed.
        configs: The YAMLs that it comes from.
        policies: Names of policies; the first is the baseline of the figure.
        steps: Optimizer steps of each run; None takes the configuration's `max_steps`. Rounded up to whole pools, and
            to two of them at least.
        repeats: Runs per policy.
        out: Folder for each run's logs and for `compare.json` and `compare.png`.
        val_metric: Logged name of the validation loss; None takes the first name with 'val' and 'loss' in it.
        overrides: Options of `fit` that go over the YAMLs, say `["--data.init_args.batch_size", "4"]`.

    Returns:
        What `compare.json` holds: see `report.compare_runs`.

    Raises:
        ValueError: If the configuration has no length pool, a number is out of range, an option sets what compare sets
            itself, another compare writes into `out`, or a run fails; the message shows the end of the failed run's
            output.
    """
    if repeats < 1 or (steps is not None and steps < 1):
        raise ValueError(f"repeats is {repeats} and steps is {steps}, expected integers of at least 1")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 or int(os.environ.get("SLURM_NTASKS", 1)) > 1:
        raise ValueError("compare starts its own processes: run it once on one machine, not under torchrun or srun")
    _check_overrides(config, overrides, has_steps=steps is not None)
    for policy in policies:
        _check_policy(config, policy)
    pool_steps, wanted = steps_per_pool(config, policies), steps or config["trainer"].get("max_steps") or -1
    total = pool_steps * max(2, math.ceil(wanted / pool_steps))
    make_out(out, ("compare.json", "compare.png"))
    if total != wanted:
        asked = f"{wanted} were asked for, but" if wanted > 0 else "for"
        print(
            f"{total} steps a run: {asked} all policies see the same samples only over whole pools, of {pool_steps} "
            "steps each, and two of them at least. A smaller pool_size makes it quicker."
        )

    arguments = [*(part for path in configs for part in ("--config", str(path))), *overrides]
    runs: dict[str, list[dict[str, Any]]] = {policy: [] for policy in policies}
    with _alone_in(Path(out)):
        for name in (f"{policy}-{repeat}" for policy in policies for repeat in range(repeats)):
            make_out(Path(out) / name, ("compare.yaml", "output.txt", "metrics.csv", "sync/steps.csv"))
        for repeat in range(repeats):
            for policy in policies:
                folder = Path(out).resolve() / f"{policy}-{repeat}"
                started = time.monotonic()
                print(f"policy {policy}, run {repeat + 1} of {repeats}, {total} steps ... ", end="", flush=True)
                _run(config, arguments, folder, policy, total, repeat)
                print(f"{time.monotonic() - started:.0f} s", flush=True)
                runs[policy].append(
                    {
                        "steps_csv": str(folder / "sync" / "steps.csv"),
                        "val_loss": last_logged(folder / "metrics.csv", val_metric),
                    }
                )
        return _show({"arguments": arguments, "steps": total, **compare_runs(runs)}, policies, Path(out))


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / "compare.lock", blocking=False):
            yield
    except Timeout:
        raise ValueError(f"another compare writes into {folder}: give this one another folder with --out") from None


def _show(result: dict[str, Any], policies: Sequence[str], out: Path) -> dict[str, Any]:
    tokens = {sum(rank["tokens"] for rank in run["ranks"]) for policy in result["policies"] for run in policy["runs"]}
    if len(tokens) > 1:
        print(f"WARNING: the runs saw different samples ({min(tokens):,.0f} to {max(tokens):,.0f} tokens)")
        if "stream" in policies:
            print("(policy stream never empties its pool, so at the end of a run others are left in it)")
    print_table(compare_table(result["policies"]))
    if all(len(run["ranks"]) == 1 for policy in result["policies"] for run in policy["runs"]):
        print("NOTE: one rank waits for nobody. Set trainer.devices to 2 or more to see what the policies change.")
    write_json(result, out / "compare.json")
    (out / "compare.png").write_bytes(figures.png(figures.compare_figure(result)))
    print(f"Written: {out / 'compare.json'} and {out / 'compare.png'}")
    return result


def steps_per_pool(config: Any, policies: Sequence[str] = ()) -> int:
    """Optimizer steps after which every worker has handed out whole pools.

    Worker `i % num_workers` makes a rank's batch `i`, so a whole number of pools of every worker is
    `num_workers * lcm(pool_size, batch_size) / batch_size` micro-batches; accumulation takes several of them a step.
    A pool of `blocks` holds whole batches: with it the number is one that fits both.
    """
    data = config.get("data")
    settings = data.get("init_args") if data is not None else None
    if settings is None or settings.get("pool_size") is None:
        raise ValueError("the config's 'data' is not a LengthPoolDataModule (or one derived from it) with a pool_size")
    batch_size, pool_size = settings.get("batch_size") or 1, max(1, settings["pool_size"])
    samples = math.lcm(pool_size, batch_size)
    if "blocks" in policies:
        samples = math.lcm(samples, PoolSettings(batch_size, pool_size, "blocks").capacity)
    micro_batches = max(1, settings["num_workers"]) * samples // batch_size
    accumulated = config["trainer"].get("accumulate_grad_batches") or 1
    return math.lcm(micro_batches, accumulated) // accumulated


def _check_overrides(config: Any, overrides: Sequence[str], has_steps: bool) -> None:
    """Refuse options of `fit` that say other than compare does; a YAML's settings it just sets over."""
    trainer = config["trainer"]
    ways_out = dict(_SET)
    for name, value in _TRAINER.items():
        if trainer.get(name) != value:
            ways_out[f"trainer.{name}"] = f"it is {value} in every run"
    if has_steps:
        ways_out["trainer.max_steps"] = "--steps is given"
    for option in (one for one in overrides if one.startswith("--")):
        name = option.partition("=")[0].removeprefix("--").removesuffix("+").replace(".init_args", "")
        for taken, reason in ways_out.items():
            is_short = "." in name and taken.startswith(name)  # fit takes shortened names too
            if name == taken or name.startswith(f"{taken}.") or is_short:
                raise ValueError(f"compare sets {taken} itself: {reason}. Leave {option} out.")
    if config.get("ckpt_path") is not None:
        raise ValueError("compare starts every run from the beginning: take ckpt_path out of the config")
    if trainer.get("fast_dev_run"):
        raise ValueError("trainer.fast_dev_run leaves no step records to compare: take it out")


def _check_policy(config: Any, policy: str) -> None:
    """Refuse a policy that the configuration's other settings do not go with, before anything is trained."""
    settings = config.get("data", {}).get("init_args") or {}
    if unfit := unfit_settings(policy, settings):
        raise ValueError(
            f"policy {policy!r} does not go with {', '.join(unfit)} in the config. Leave the policy out with "
            "--policies, or compare with a config without these settings."
        )


def last_logged(metrics_csv: Path, name: str | None) -> float | None:
    """Return the last value of a metric in a `CSVLogger`'s file, None if it was never logged.

    Without a name, it is the first metric with 'val' and 'loss' in its name.
    """
    if not metrics_csv.is_file():
        return None
    with metrics_csv.open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = [name] if name else [column for column in rows[0] if "val" in column and "loss" in column] if rows else []
    values = [row[names[0]] for row in rows if names and row.get(names[0])]
    return float(values[-1]) if values else None


def _run(config: Any, arguments: Sequence[str], folder: Path, policy: str, steps: int, repeat: int) -> None:
    """Run `fit` in fresh processes, with its arguments and one more YAML over them."""
    trainer = config["trainer"]
    micro_batches = steps * (trainer.get("accumulate_grad_batches") or 1)
    seed = config["seed_everything"]
    folder.mkdir(parents=True, exist_ok=True)
    for before in folder.glob("sync*"):  # of a comparison that this one replaces
        shutil.rmtree(before)
    overlay = folder / "compare.yaml"
    logger = {"save_dir": str(folder.parent), "name": folder.name, "version": ""}
    overlay.write_text(
        yaml.safe_dump(
            {
                "seed_everything": (42 if isinstance(seed, bool) else seed) + repeat,
                "trainer": {
                    "logger": {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": logger},
                    "max_steps": -1,
                    **_TRAINER,
                },
                "data": {"init_args": {"policy": policy, "virtual_epoch_length": micro_batches}},
            }
        )
    )
    command = [sys.executable, "-m", "lightning_lengthpool.cli", "fit", *arguments, "--config", str(overlay)]
    callbacks = trainer.get("callbacks") or []
    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    if not any("SyncMonitor" in str(callback.get("class_path")) for callback in callbacks):
        command.append("--trainer.callbacks+=lightning_lengthpool.SyncMonitor")
    log = folder / "output.txt"
    with log.open("w") as file:
        code = _call(command, file)
    if code != 0:
        tail = log.read_text(errors="replace")[-_SHOWN_OF_A_FAILURE:]
        raise ValueError(f"the run of policy {policy} failed with exit status {code}; the end of {log}:\n{tail}")


def _call(command: list[str], output: IO[str]) -> int:
    """Run a command and return its exit status; if this process is ended, its own are too, with all their ranks."""

    def leave(*_: Any) -> None:
        sys.exit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, leave)
    process = subprocess.Popen(
        command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
    )
    try:
        return process.wait()
    finally:
        signal.signal(signal.SIGTERM, before)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
