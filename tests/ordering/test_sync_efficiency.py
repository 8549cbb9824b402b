"""The pure parts of benchmarks/sync_efficiency.py, and the whole of it on a small trace without peers."""

import csv
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import sync_efficiency

    return sync_efficiency


def test_the_figures_of_a_case(benchmark):
    tokens = np.array([[10.0, 6.0], [4.0, 4.0], [10.0, 6.0]])
    padded = np.array([[12.0, 6.0], [4.0, 4.0], [12.0, 6.0]])
    samples = np.array([[2.0, 1.0], [1.0, 1.0], [2.0, 1.0]])
    figures = benchmark.score(tokens, padded, samples, data_mean=4.0)
    assert figures["sync"] == pytest.approx(22 / 28)
    assert figures["padding"] == pytest.approx(1 - 40 / 44)
    assert figures["useful"] == pytest.approx(40 / 56)
    assert figures["count_spread"] == pytest.approx((2 + 1 + 2) / 3)
    assert figures["neighbour_corr"] == pytest.approx(np.corrcoef([5, 6, 4, 4], [4, 4, 5, 6])[0, 1])
    assert figures["cost_cv"] == pytest.approx(np.std([12, 4, 12]) / (28 / 3))
    assert figures["length_bias"] == pytest.approx(40 / 8 / 4 - 1)


def test_samples_leave_a_stream_with_one_probability(benchmark):
    lengths = np.arange(1.0, 5000.0)
    hazard = benchmark.leaving(lengths, pool_size=100, samples=120_000, batch_size=4)
    assert hazard.shape == (10,) and np.abs(hazard - 1).max() < 0.08


def test_targets_are_told_from_rows(benchmark):
    row = {"trace": "azure_conv", "ranks": 8, "batch_size": 1, "pool_size": 1000, "sync": 0.95}
    rows = [{**row, "policy": "pool"}, {**row, "policy": "stream", "sync": 0.954}]
    found = {text: passed for text, _, _, _, passed in benchmark.targets(rows, {"mix": (0.99, 0.08, 0.05)})}
    assert found == {
        "azure_conv, 8 ranks, batch 1, stream: sync, not below pool": True,
        "azure_conv, 8 ranks, batch 1, stream: sync": False,
        "mix: steps of one class": True,
        "mix: idle / that of one class": False,
    }


def run(*arguments, folder):
    command = [sys.executable, str(BENCHMARKS / "sync_efficiency.py"), *map(str, arguments)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def test_it_runs_on_a_trace_of_mine(tmp_path):
    trace = tmp_path / "mine.csv"
    lengths = np.random.default_rng(0).lognormal(6, 1, 3000).round()
    trace.write_text("tokens\n" + "".join(f"{length:g}\n" for length in lengths))
    options = ("--trace", trace, "--out", tmp_path / "out", "--ranks", 2, "--pool_sizes", 100, "--batch_sizes", 4)
    done = run(*options, "--peers", "--cases_only", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    with open(tmp_path / "out" / "sync_efficiency.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["policy"] for row in rows if row["batch_size"]] == [
        "none",
        "pool",
        "blocks",
        "stream",
        "stream+reference",
    ]
    assert [row["policy"] for row in rows if row["max_tokens"]] == ["stream", "stream+reference"]
    useful = {row["policy"]: float(row["useful"]) for row in rows if row["batch_size"]}
    assert useful["none"] < useful["pool"] < min(useful["blocks"], useful["stream"], useful["stream+reference"])
    assert (tmp_path / "out" / "sync_efficiency_2.png").stat().st_size > 10_000
    assert "stream+reference" in done.stdout


def test_a_wrong_trace_is_named(tmp_path):
    (tmp_path / "wrong.csv").write_text("length\n3\n")
    done = run("--trace", "wrong.csv", folder=tmp_path)
    assert done.returncode and "'wrong.csv', which has no column 'tokens'" in done.stderr
