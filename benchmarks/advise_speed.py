"""How long the predictions of `advise` take, and how often their intervals hold.

    python benchmarks/advise_speed.py
    python benchmarks/advise_speed.py --lengths 10000000
    python benchmarks/advise_speed.py --coverage FILE.csv [--trials 100] [--samples 5000]

The first predicts for 20,000 lengths, 5 pool sizes, 3 policies and 8, 64 and 512 ranks, 1,000 steps a case. The
second writes a file of so many lengths, and lets `advise --lengths` advise on it for 64 ranks. The coverage draws
some of the lengths in a file (column `tokens`) again and again, predicts from these, and counts how often the
interval holds the mean of long simulations on all of them.
"""

import argparse
import itertools
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from lightning_lengthpool.advise.command import advise_lengths
from lightning_lengthpool.ordering.lengths_file import read_lengths, write_lengths
from lightning_lengthpool.ordering.settings import PoolSettings
from lightning_lengthpool.simulation.predict import Case, Lengths, predict

POOL_SIZES = (100, 300, 1000, 3000, 10_000)
LENGTHS = np.random.default_rng(0).lognormal(6, 1, 20_000).round()
FIGURES = ("idle", "padding", "useful")


def sweep(batch_size: int) -> float:
    """Seconds of the whole sweep, of 1,000 steps a case."""
    policies = ("pool", "blocks", "stream")
    cases = [
        Case(PoolSettings(batch_size, size, policy), ranks)
        for policy, size, ranks in itertools.product(policies, POOL_SIZES, (8, 64, 512))
    ]
    started = time.perf_counter()
    predict(Lengths((LENGTHS,)), cases)
    return time.perf_counter() - started


def coverage(lengths: np.ndarray, samples: int, trials: int, batch_size: int) -> Table:
    """How often an interval of 90 % holds, in per cent."""
    pools = [("none", 0), *itertools.product(("pool", "blocks", "stream"), (100, 300, 1000))]

    def cases(seed: int) -> list[Case]:
        settings = [PoolSettings(batch_size, size, policy, seed) for policy, size in pools]
        return [Case(own, ranks) for own in settings for ranks in (8, 64)]

    def figures(known: np.ndarray, seed: int) -> np.ndarray:
        """`[cases, figures, (mean, low, high)]`."""
        found = predict(Lengths((known,)), cases(seed))
        return np.array([[getattr(own, name) for name in FIGURES] for own in found])

    truth = np.mean([figures(lengths, 1000 + seed)[:, :, 0] for seed in range(10)], axis=0)
    drawn = [np.random.default_rng(trial).choice(lengths, samples) for trial in range(trials)]
    found = np.array([figures(own, trial) for trial, own in enumerate(drawn)])
    holds = (found[..., 1] <= truth) & (truth <= found[..., 2])
    half = (found[..., 2] - found[..., 1]).mean(axis=0) / 2
    table = Table("policy", "pool", "ranks", *(f"{name}: %, half a width, holds in %" for name in FIGURES))
    for case, value, width, share in zip(cases(0), truth, half, holds.mean(axis=0), strict=True):
        cells = (f"{100 * v:5.1f} {100 * w:5.2f} {100 * s:4.0f}" for v, w, s in zip(value, width, share, strict=True))
        table.add_row(case.settings.policy, str(case.settings.pool_size), str(case.world_size), *cells)
    return table


def advise_on_file(count: int) -> float:
    """Seconds of `advise --lengths` on a file of so many lengths."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "in.csv"
        lengths = np.random.default_rng(0).lognormal(6, 1, count).round()
        write_lengths(path, lengths)
        del lengths
        started = time.perf_counter()
        advise_lengths(str(path), world_size="64", batch_size=4, out=f"{folder}/out")
        return time.perf_counter() - started


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--coverage", type=Path, metavar="FILE.csv")
    parser.add_argument("--lengths", type=int, metavar="N")
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--samples", type=int, default=5000)
    parser.add_argument("--batch_size", type=int, default=4)
    options = parser.parse_args()
    if options.coverage is None:
        if options.lengths is not None:
            print(f"{options.lengths:,} lengths: {advise_on_file(options.lengths):.1f} s", flush=True)
        for batch_size in () if options.lengths is not None else (1, 4):
            print(f"batch size {batch_size}: {sweep(batch_size):.1f} s", flush=True)
        peak = sum(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        print(f"memory at most {peak / 1e6:.2f} GB for this process and the largest of the others")
    else:
        known = read_lengths(options.coverage, "--coverage").tokens
        Console(width=140).print(coverage(known, options.samples, options.trials, options.batch_size))
