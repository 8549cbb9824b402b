import json
import math
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from lightning_lengthpool.report import summary
from lightning_lengthpool.runs.steps import records
from lightning_lengthpool.runs.steps.columns import COLUMNS
from lightning_lengthpool.runs.steps.steps_file import StepsFile, read_steps


def text(table: object) -> str:
    console = Console(width=110, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_table_says_what_is_left_out(steps_csv):
    totals = records.summarize(read_steps(steps_csv))
    shown = text(summary.steps_table(totals))
    assert "18.8 %" in shown and "compute: 2 of 3 steps" in shown and "tokens: 3 of 3 steps" in shown
    assert "idle by compute" in shown and "37.5 %" in shown
    tokens_only = records.summarize(
        read_steps(steps_csv) | {name: np.full(8, np.nan) for name in ("compute_seconds", "wait_seconds")}
    )
    shown = text(summary.steps_table(tokens_only))
    assert "compute: 0 of 3 steps" in shown and "- " in shown and "idle by tokens" in shown


def test_table_of_many_ranks_shows_both_ends():
    steps = {name: np.ones(40) for name in COLUMNS} | {"rank": np.arange(40.0), "compute_seconds": np.arange(40.0)}
    shown = text(summary.steps_table(records.summarize(steps)))
    listed = [int(line.split()[0]) for line in shown.splitlines() if line.split() and line.split()[0].isdigit()]
    assert listed == [39, 38, 37, 36, 35, 34, 33, 32, 7, 6, 5, 4, 3, 2, 1, 0]
    assert "24 are not shown" in shown


def runs(folder: Path, seed: int, scale: dict[str, float], repeats: int = 2, absent: bool = False) -> dict[str, list]:
    """Made-up runs of 4 ranks and 80 steps: lengths that differ between ranks by `scale`, and compute in proportion."""
    rng = np.random.default_rng(seed)
    result: dict[str, list] = {}
    for policy, spread in scale.items():
        for repeat in range(repeats):
            common = rng.lognormal(6, 0.7, 80)
            longest = np.round(common[:, None] * rng.lognormal(0, spread, (80, 4)))
            compute = 1e-4 * longest + 0.02
            grid = {
                "step": np.repeat(np.arange(80.0)[:, None], 4, axis=1),
                "rank": np.tile(np.arange(4.0), (80, 1)),
                "samples": np.full((80, 4), 2.0),
                "tokens": longest * 2 * (0.95 - spread / 4),
                "longest": longest,
                "padded_tokens": longest * 2,
                "misses": np.zeros((80, 4)),
                "data_seconds": np.full((80, 4), 0.001),
                "compute_seconds": np.full((80, 4), np.nan) if absent else compute,
                "wait_seconds": compute.max(axis=1, keepdims=True) - compute,
                "step_seconds": np.tile(compute.max(axis=1, keepdims=True) + 0.01, 4),
            }
            path = folder / f"{policy}{repeat}.csv"
            file = StepsFile(path)
            file.start(0)
            file.append({name: grid[name].ravel() for name in COLUMNS})
            result.setdefault(policy, []).append({"steps_csv": path, "val_loss": 1.0 + repeat})
    return result


def test_compare_runs(tmp_path):
    result = summary.compare_runs(runs(tmp_path, 0, {"none": 0.6, "pool": 0.1}))
    none, pool = result["policies"]
    assert (none["policy"], none["repeats"]) == ("none", 2)
    idle = [records.summarize(read_steps(tmp_path / f"none{i}.csv"))["idle_fraction_compute"] for i in (0, 1)]
    assert none["mean"]["idle_fraction_compute"] == pytest.approx(np.mean(idle))
    assert none["std"]["idle_fraction_compute"] == pytest.approx(np.std(idle, ddof=1))
    assert (none["mean"]["val_loss"], none["std"]["val_loss"]) == (1.5, pytest.approx(0.5**0.5))
    assert pool["mean"]["idle_fraction_compute"] < none["mean"]["idle_fraction_compute"] / 2
    path = tmp_path / "out" / "result.json"
    summary.write_json(result, path)
    assert json.loads(path.read_text()) == result


def test_compare_table_shows_the_deviation_of_repeats_only(tmp_path):
    several = text(summary.compare_table(summary.compare_runs(runs(tmp_path, 0, {"none": 0.6}))["policies"]))
    assert "none (n=2)" in several and "1.5000 ± 0.7071" in several
    (tmp_path / "none0.csv").unlink()
    once = summary.compare_runs(runs(tmp_path, 0, {"none": 0.6}, repeats=1, absent=True))["policies"]
    shown = text(summary.compare_table(once))
    assert "±" not in shown
    assert next(line for line in shown.splitlines() if "idle by compute" in line).split()[-1] == "-"
    for heading in ("idle by tokens", "padding", "tokens per second", "seconds per step", "validation loss"):
        assert heading in shown


def test_json_has_none_for_nan(tmp_path):
    summary.write_json(
        {"a": float("nan"), "b": [np.float64(1.5), {"c": math.inf}], "d": np.int64(3)}, tmp_path / "x.json"
    )
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": None, "b": [1.5, {"c": None}], "d": 3}
