"""What rank zero does for `SyncMonitor` where there are many ranks, in CPU seconds of this process.

    python benchmarks/monitor_scale.py [--ranks 512]

The records are planted: lengths of a lognormal distribution, compute in proportion to padded tokens with 2 % noise. The
exchange is what `RunWriter.add` does with the records of 50 steps, one sample a batch, `steps.csv` included, without a
logger: the median of 5, after the first. The findings are those at the end of a fit, from 1,000 lengths of each rank.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from lightning_lengthpool.monitor.fit_monitor import SAMPLED_LENGTHS
from lightning_lengthpool.monitor.run_files import RunFiles
from lightning_lengthpool.monitor.run_log import RunLog
from lightning_lengthpool.monitor.run_writer import RunWriter
from lightning_lengthpool.runs.causes import CauseTracker, Summary
from lightning_lengthpool.runs.findings import findings
from lightning_lengthpool.runs.run_json import About
from lightning_lengthpool.runs.steps.columns import COLUMNS

STEPS = 50  # between two exchanges
SETTINGS = {
    "no pool, 1 sample a batch": {"policy": "none", "pool_size": 0, "batch_size": 1},
    "pool of 1,000, 1 sample a batch": {"policy": "pool", "pool_size": 1000, "batch_size": 1},
    "pool of 1,000, 4 samples a batch": {"policy": "pool", "pool_size": 1000, "batch_size": 4},
    "stream with max_tokens": {"policy": "stream", "pool_size": 300, "batch_size": None, "max_tokens": 4000.0},
}


def records(ranks: int, steps: int, batch_size: int = 1) -> np.ndarray:
    """Shape `[ranks, steps, columns]`."""
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(6, 1, (ranks, steps, batch_size)).round()
    longest = lengths.max(axis=2)
    compute = (0.01 + 1e-5 * batch_size * longest) * rng.lognormal(0, 0.02, longest.shape)
    slowest = compute.max(axis=0)
    columns = {
        "step": np.arange(steps),
        "rank": np.arange(ranks)[:, None],
        "samples": batch_size,
        "tokens": lengths.sum(axis=2),
        "longest": longest,
        "padded_tokens": batch_size * longest,
        "misses": 0,
        "data_seconds": rng.exponential(1e-4, longest.shape),
        "compute_seconds": compute,
        "wait_seconds": slowest - compute,
        "step_seconds": slowest + 0.003,
    }
    return np.stack([np.broadcast_to(columns[name], longest.shape) for name in COLUMNS], axis=2).astype(np.float64)


def exchange(ranks: int) -> float:
    rows, seconds = records(ranks, 6 * STEPS), []
    with tempfile.TemporaryDirectory() as folder:
        hosts = ["host"] * ranks
        files, about = RunFiles(Path(folder), 1_000_000), About(hosts=hosts, workers_by_rank=[1] * ranks)
        writer = RunWriter(RunLog(hosts), files, [], about, measured=True)
        writer.start(0, None, {})
        for first in range(0, 6 * STEPS, STEPS):
            part = rows[:, first : first + STEPS].copy()
            started = time.process_time()
            writer.add(part)
            seconds.append(time.process_time() - started)
    return float(np.median(seconds[1:]))


def summary(ranks: int, batch_size: int) -> Summary:
    tracker, flat = CauseTracker(), records(ranks, 2 * STEPS + 1, batch_size).transpose(1, 0, 2)
    tracker.add(dict(zip(COLUMNS, flat.reshape(-1, len(COLUMNS)).T, strict=True)))
    return tracker.summary()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=512)
    options = parser.parse_args()
    print(f"{options.ranks} ranks: {1e3 * exchange(options.ranks):.0f} ms for {STEPS} steps", flush=True)
    rng = np.random.default_rng(1)
    lengths = [rng.lognormal(6, 1, SAMPLED_LENGTHS).round() for _ in range(options.ranks)]
    for name, settings in SETTINGS.items():
        of_run = summary(options.ranks, settings["batch_size"] or 4)
        started = time.process_time()
        sentences = findings(of_run, lengths=lengths, settings=settings)
        print(f"findings, {name}: {time.process_time() - started:.1f} s: {sentences[0]}", flush=True)


if __name__ == "__main__":
    main()
