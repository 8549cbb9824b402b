"""How well each policy synchronises the ranks, beside other packages' samplers, on the lengths of your data.

    python benchmarks/sync_efficiency.py --trace lengths.csv --out results

A trace is a CSV with a column `tokens`, one row a sample. Each rank draws 4,000 of them with replacement, from one
generator, and goes through these again and again, as training does over epochs; all 4,000 / batch_size steps are scored
(with a token budget, of twice the longest sample: as many as 4,000 samples of full batches make). Our policies run
through `simulate`, so through the code that orders training; `--pipeline` checks that against energon data sets and the
data module's loaders. The peers run through their published packages (`pip install 'lightning_lengthpool[bench]'`);
what each is, and what it needs to know, stands in `peers.py`.

`sync_efficiency.csv` and the tables have, for each case: `sync`, `padding` and `useful` (of padded tokens, see
`ordering.efficiency`), `count_spread` (most samples on a rank / fewest, mean over steps), `neighbour_corr`
(correlation of a rank's mean length with that of its next step: 0 is a random order), `cost_cv` (coefficient of
variation over time of the slowest rank's padded tokens), and `length_bias` (mean length of what was trained on / of the
data, - 1: a sampler that puts some lengths off until later shows here). A peer whose pool cannot be chosen has no
`pool_size`. 'blocks' with one sample a batch is 'pool', so it is left out.
"""

import argparse
import csv
import itertools
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from peers import PEERS, Case, Step
from rich.console import Console
from rich.table import Table

from lightning_lengthpool.ordering import efficiency
from lightning_lengthpool.ordering.lengths_file import read_lengths
from lightning_lengthpool.ordering.policies import order_blocks, order_pool
from lightning_lengthpool.ordering.reference_costs import ReferenceCosts
from lightning_lengthpool.ordering.settings import PoolSettings
from lightning_lengthpool.ordering.sorted_pool import SortedPool
from lightning_lengthpool.simulation.simulate import Simulation, simulate

SAMPLES = 4000  # of each rank
REFERENCE = 5000  # lengths in the reference file
SETTING = ("trace", "ranks", "batch_size", "max_tokens", "pool_size", "policy")
FIGURES = ("sync", "padding", "useful", "count_spread", "neighbour_corr", "cost_cv", "length_bias")
OURS = ("none", "pool", "blocks", "stream", "stream+reference")
Row = dict[str, Any]


class Task(NamedTuple):
    """Cases that share the lengths of the ranks."""

    trace: str
    lengths: np.ndarray
    ranks: int
    batch_size: int | None
    pool_sizes: Sequence[int]
    peers: Mapping[str, Sequence[int]]  # name -> pool sizes

    @property
    def max_tokens(self) -> float | None:
        return 2 * float(self.lengths.max()) if self.batch_size is None else None


def rank_lengths(lengths: np.ndarray, ranks: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.choice(lengths, SAMPLES) for _ in range(ranks)]


def reference_of(lengths: np.ndarray) -> np.ndarray:
    return np.random.default_rng(1).choice(lengths, REFERENCE)


def aimed_at(lengths: np.ndarray) -> ReferenceCosts:
    return ReferenceCosts({None: reference_of(lengths)})


def score(tokens: np.ndarray, padded: np.ndarray, samples: np.ndarray, data_mean: float) -> dict[str, float]:
    """The figures of one case; all arrays are `[steps, ranks]`."""
    mean, slowest = tokens / samples, padded.max(axis=1)
    return {
        "sync": efficiency.sync_efficiency(padded),
        "padding": efficiency.padding_fraction(tokens, padded),
        "useful": efficiency.useful_fraction(tokens, padded),
        "count_spread": float((samples.max(axis=1) / samples.min(axis=1)).mean()),
        "neighbour_corr": float(np.corrcoef(mean[:-1].ravel(), mean[1:].ravel())[0, 1]),
        "cost_cv": float(slowest.std() / slowest.mean()),
        "length_bias": float(tokens.sum() / samples.sum() / data_mean - 1),
    }


def of_steps(steps: Iterator[Step], count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, padded tokens and samples of a peer's steps."""
    batches = [
        [(sum(batch), len(batch) * max(batch), len(batch)) for batch in step] for step in itertools.islice(steps, count)
    ]
    tokens, padded, samples = np.moveaxis(np.array(batches, dtype=np.float64), 2, 0)
    return tokens, padded, samples


def run(task: Task) -> list[Row]:
    """All cases of a task."""
    own = rank_lengths(task.lengths, task.ranks)
    mean = float(np.mean(own))
    steps = SAMPLES // task.batch_size if task.batch_size else int(SAMPLES * mean / task.max_tokens)
    setting = {"trace": task.trace, "ranks": task.ranks, "batch_size": task.batch_size, "max_tokens": task.max_tokens}
    rows = []

    def add(policy: str, pool_size: int | None, *arrays: np.ndarray) -> None:
        rows.append({**setting, "pool_size": pool_size, "policy": policy, **score(*arrays, mean)})

    def ours(policy: str, pool_size: int) -> Simulation:
        name, _, reference = policy.partition("+")
        settings = PoolSettings(
            task.batch_size,
            pool_size,
            name,
            max_tokens=task.max_tokens,
            reference=aimed_at(task.lengths) if reference else None,
        )
        return simulate(own, settings, steps, is_cycle=True)

    for policy in OURS:
        if task.max_tokens is not None and not policy.startswith("stream"):
            continue  # a budget is for 'stream'
        if policy == "blocks" and task.batch_size == 1:
            continue
        for pool_size in [0] if policy == "none" else task.pool_sizes:
            result = ours(policy, pool_size)
            add(policy, pool_size, result.tokens, result.padded, result.samples)
    for name, pool_sizes in task.peers.items():
        for pool_size in pool_sizes if PEERS[name].streams else pool_sizes[:1]:
            case = Case(own, pool_size, task.batch_size, task.max_tokens, steps)
            arrays = of_steps(PEERS[name].run(case), steps)
            add(name, pool_size if PEERS[name].streams else None, *arrays)
    return rows


# ---- the targets


def find(rows: Sequence[Row], **setting: Any) -> Row | None:
    found = [row for row in rows if all(row[name] == value for name, value in setting.items())]
    return found[0] if found else None


BATCH_4 = {"azure_conv": 0.94, "azure_code": 0.95, "omnibal_ai2d_train_12k": 0.965, "omnibal_chartqa_train_18k": 0.988}
BATCH_1 = {"azure_conv": 0.955, "azure_code": 0.955, "omnibal_ai2d_train_12k": 0.97, "omnibal_chartqa_train_18k": 0.99}
BUDGET = {"azure_conv": 0.93, "azure_code": 0.93, "omnibal_ai2d_train_12k": 0.975, "omnibal_chartqa_train_18k": 0.985}


def targets(
    rows: Sequence[Row], mixes: Mapping[str, tuple[float, float, float]]
) -> Iterator[tuple[str, float, str, float, bool]]:
    """What our policies are held against: text, measured, '>=' or '<=', bound, whether it passes."""

    def check(text: str, row: Row | None, figure: str, sign: str, bound: float) -> Any:
        if row is not None:
            value = row[figure]
            yield text, value, sign, bound, value >= bound if sign == ">=" else value <= bound

    for trace in BATCH_4:
        at = {"trace": trace, "pool_size": 1000}
        for policy in ("stream", "stream+reference"):
            for ranks, batch_size in itertools.product((8, 64), (1, 4)):
                row = find(rows, **at, policy=policy, ranks=ranks, batch_size=batch_size)
                base = find(rows, **at, policy="pool", ranks=ranks, batch_size=batch_size)
                if base is not None:
                    text = f"{trace}, {ranks} ranks, batch {batch_size}, {policy}: sync, not below pool"
                    yield from check(text, row, "sync", ">=", base["sync"])
            row = find(rows, **at, policy=policy, ranks=8, batch_size=None)
            text = f"{trace}, 8 ranks, token budget, {policy}"
            yield from check(f"{text}: useful", row, "useful", ">=", BUDGET[trace])
            yield from check(f"{text}: cost_cv", row, "cost_cv", "<=", 0.10)
        for batch_size, figure, bounds in ((4, "useful", BATCH_4), (1, "sync", BATCH_1)):
            row = find(rows, **at, policy="stream", ranks=8, batch_size=batch_size)
            yield from check(
                f"{trace}, 8 ranks, batch {batch_size}, stream: {figure}", row, figure, ">=", bounds[trace]
            )
    for policy, ranks, batch_size, figure, bound in (
        ("stream+reference", 8, 1, "sync", 0.97),
        ("stream+reference", 64, 1, "sync", 0.945),
        ("stream+reference", 64, 4, "useful", 0.93),
        ("stream", 64, 4, "useful", 0.90),
    ):
        row = find(rows, trace="azure_conv", pool_size=1000, policy=policy, ranks=ranks, batch_size=batch_size)
        yield from check(f"azure_conv, {ranks} ranks, batch {batch_size}, {policy}: {figure}", row, figure, ">=", bound)
    for text, (same, idle, one) in mixes.items():
        yield f"{text}: steps of one class", same, ">=", 0.98, same >= 0.98
        yield f"{text}: idle / that of one class", idle / one, "<=", 1.5, idle / one <= 1.5


# ---- what ordering costs, classes, and whether all samples leave alike


def ordering_cost(lengths: np.ndarray, pool_size: int = 10_000) -> Iterator[tuple[str, float]]:
    """Microseconds of CPU a sample, of one worker's pool."""
    drawn = np.random.default_rng(2).choice(lengths, 4 * pool_size).tolist()
    for name, order, batch_size in (("pool", order_pool, 1), ("blocks", order_blocks, 4)):
        started = time.process_time()
        order(drawn[:pool_size], pool_size, 0, 42, batch_size)
        yield f"{name}, batch {batch_size}", (time.process_time() - started) / pool_size * 1e6
    for (text, options), aim in itertools.product(
        (
            ("batch 1", {"batch_size": 1}),
            ("batch 4", {"batch_size": 4}),
            ("token budget", {"batch_size": None, "max_tokens": 2 * float(lengths.max())}),
        ),
        (None, aimed_at(lengths)),
    ):
        pool = SortedPool(PoolSettings(pool_size=pool_size, policy="stream", reference=aim, **options))
        for number, length in enumerate(drawn[:pool_size]):
            pool.add(number, length)
        number, slot = pool_size, 0
        started = time.process_time()
        while number < len(drawn) - pool_size // 2:
            for _ in pool.take(slot).numbers:
                pool.add(number, drawn[number])
                number += 1
            slot += 1
        spent = time.process_time() - started
        yield f"stream{'+reference' if aim else ''}, {text}", spent / (number - pool_size) * 1e6


def packed_mix(lengths: np.ndarray, batch_size: int, with_reference: bool) -> tuple[float, float, float]:
    """30 % of each rank's samples, at random, are of a class of their own; 8 ranks, pool_size 1000.

    Returns:
        The share of steps at which all ranks have one class; the idle fraction (both are means of five choices of these
        samples); that without classes.
    """
    own, drawn, steps = rank_lengths(lengths, 8), reference_of(lengths), SAMPLES // batch_size
    settings = PoolSettings(batch_size, 1000, "stream")
    of_one_class = replace(settings, reference=aimed_at(lengths)) if with_reference else settings
    one = simulate(own, of_one_class, steps, is_cycle=True)
    found = []
    for seed in range(5):  # which are packed
        rng = np.random.default_rng(seed)
        classes = [(rng.random(SAMPLES) < 0.3).astype(int) for _ in own]
        is_packed = rng.random(REFERENCE) < 0.3  # as a file of lengths would tell them
        if with_reference:
            settings = replace(settings, reference=ReferenceCosts({0: drawn[~is_packed], 1: drawn[is_packed]}))
        mixed = simulate(own, settings, steps, classes=classes, is_cycle=True)
        same = (mixed.classes == mixed.classes[:, :1]).all(axis=1).mean()
        found.append((float(same), efficiency.idle_fraction(mixed.padded)))
    same, idle = np.mean(found, axis=0)
    return float(same), float(idle), efficiency.idle_fraction(one.padded)


def leaving(lengths: np.ndarray, pool_size: int = 1000, samples: int = 100_000, **options: Any) -> np.ndarray:
    """How likely a sample is to leave at a step, by tenths of the lengths, over the mean of all.

    Of each tenth: how many have left, over the steps that they spent in the pool.
    """
    drawn = np.random.default_rng(4).choice(lengths, samples).tolist()
    came, left = np.zeros(samples), np.full(samples, -1.0)
    pool = SortedPool(PoolSettings(pool_size=pool_size, policy="stream", **options))
    number = slot = 0
    while True:
        while len(pool) < pool_size and number < samples:
            pool.add(number, drawn[number])
            came[number], number = slot, number + 1
        if number == samples:
            break
        left[pool.take(slot).numbers] = slot + 1
        slot += 1
    stayed = np.where(left < 0, slot, left) - came
    ranks = np.argsort(np.argsort(drawn, kind="stable")) * 10 // samples
    hazard = np.array([(left[ranks == tenth] >= 0).sum() / stayed[ranks == tenth].sum() for tenth in range(10)])
    return hazard / ((left >= 0).sum() / stayed.sum())


# ---- output


def table_of(rows: Sequence[Row], title: str) -> Table:
    table = Table("policy", "pool_size", *FIGURES, title=title)
    for row in rows:
        figures = (f"{row[name]:.1f}" if name == "count_spread" else f"{row[name]:.3f}" for name in FIGURES)
        table.add_row(row["policy"], "" if row["pool_size"] is None else f"{row['pool_size']:,}", *figures)
    return table


def write_csv(rows: Sequence[Row], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*SETTING, *FIGURES], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow(
                {name: "" if row[name] is None else row[name] for name in SETTING}
                | {name: f"{row[name]:.5f}" for name in FIGURES}
            )


LINES = {
    "none": ("#777777", ":"),
    "pool": ("#E69F00", "-"),
    "blocks": ("#56B4E9", "-"),
    "stream": ("#0072B2", "-"),
    "stream+reference": ("#0072B2", "--"),
    "hf_grouped": ("#CC79A7", "v"),
    "hf_rebalance": ("#CC79A7", "^"),
    "lhotse": ("#009E73", "x"),
    "lhotse_tuned": ("#009E73", "o"),
    "lhotse_shared": ("#009E73", "s"),
    "odb": ("#D55E00", "D"),
}


def draw(rows: Sequence[Row], ranks: int, path: Path) -> None:
    """The useful fraction against the pool size: a row for each way to form batches, a column for each trace."""
    from matplotlib.figure import Figure

    traces = list(dict.fromkeys(row["trace"] for row in rows))
    kinds = list(dict.fromkeys(row["batch_size"] for row in rows))
    figure = Figure(figsize=(3.2 * len(traces) + 1.6, 2.9 * len(kinds)), dpi=150, layout="constrained")
    axes = figure.subplots(len(kinds), len(traces), squeeze=False)
    labels: dict[str, Any] = {}
    for (i, kind), (j, trace) in itertools.product(enumerate(kinds), enumerate(traces)):
        here = [r for r in rows if (r["trace"], r["ranks"], r["batch_size"]) == (trace, ranks, kind)]
        sizes = sorted({row["pool_size"] for row in here if row["pool_size"]})
        for policy, (colour, mark) in LINES.items():
            points = sorted((row["pool_size"] or 0, row["useful"]) for row in here if row["policy"] == policy)
            if not points:
                continue
            if policy in OURS:
                x, y = ((sizes[0], sizes[-1]), (points[0][1],) * 2) if policy == "none" else zip(*points, strict=True)
                (labels[policy],) = axes[i][j].plot(x, y, mark, color=colour, linewidth=1.6)
            else:
                x, y = zip(*((size or sizes[-1] * 1.3, useful) for size, useful in points), strict=True)
                (labels[policy],) = axes[i][j].plot(x, y, mark, color=colour, markersize=5, fillstyle="none")
        axes[i][j].set_xscale("log")
        axes[i][j].set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes[i][j].minorticks_off()
        axes[i][j].set_ylim(top=1)
        axes[i][j].spines[["top", "right"]].set_visible(False)
        if i == 0:
            axes[i][j].set_title(trace, fontsize=10)
        if j == 0:
            what = "token budget" if kind is None else f"batch size {kind}"
            axes[i][j].set_ylabel(f"{what}\nuseful fraction", fontsize=9)
        if i == len(kinds) - 1:
            axes[i][j].set_xlabel("pool_size", fontsize=9)
        axes[i][j].tick_params(labelsize=8)
    figure.legend(labels.values(), labels.keys(), loc="outside right upper", frameon=False, fontsize=9)
    figure.suptitle(f"{ranks} ranks; a peer without a pool of its own stands right of the last pool size", fontsize=10)
    figure.savefig(path)


def read_trace(path: Path) -> np.ndarray:
    try:
        return read_lengths(path, "--trace").tokens
    except (OSError, ValueError) as error:
        sys.exit(str(error))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--trace", type=Path, nargs="+", required=True, help="CSVs with a column `tokens`, one row a sample"
    )
    parser.add_argument("--out", type=Path, default=Path("sync_efficiency"), help="folder of the results")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--batch_sizes", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--no_budget", action="store_true", help="no token budget")
    parser.add_argument("--pool_sizes", type=int, nargs="+", default=[100, 300, 1000, 4000])
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), help="default: all, the slow ones up to 8 ranks")
    parser.add_argument("--peer_pool_sizes", type=int, nargs="+", default=[1000])
    parser.add_argument("--cases_only", action="store_true", help="no ordering cost, packed mix, soundness and targets")
    parser.add_argument("--pipeline", action="store_true", help="check the simulation against energon and its loaders")
    options = parser.parse_args()
    traces = {path.stem: read_trace(path) for path in options.trace}
    console = Console(width=120)
    if options.pipeline:
        from pipeline import compare

        compare({name: (rank_lengths(own, 8), reference_of(own)) for name, own in traces.items()}, console)
        return
    names = PEERS if options.peers is None else options.peers
    installed = {name: PEERS[name].version() for name in names}
    for name, version in installed.items():
        console.print(f"{name}: {PEERS[name].package} {version or 'is not installed, so left out'}", highlight=False)
    tasks = []
    for (trace, lengths), ranks in itertools.product(traces.items(), options.ranks):
        for batch_size in [*options.batch_sizes, *([] if options.no_budget else [None])]:
            peers = {
                name: options.peer_pool_sizes
                for name, version in installed.items()
                if version and PEERS[name].fits(batch_size) and (options.peers or ranks <= PEERS[name].most_ranks)
            }
            tasks.append(Task(trace, lengths, ranks, batch_size, options.pool_sizes, peers))
    started, results = time.perf_counter(), {}
    with ProcessPoolExecutor(min(len(tasks), os.cpu_count() or 1)) as executor:
        # the longest first
        waiting = {executor.submit(run, task): task for task in sorted(tasks, key=lambda task: -task.ranks)}
        for done in as_completed(waiting):
            task = waiting[done]
            results[task.trace, task.ranks, task.batch_size] = done.result()
            print(f"{len(results)} of {len(tasks)}", end="\r", file=sys.stderr, flush=True)
    rows = [row for task in tasks for row in results[task.trace, task.ranks, task.batch_size]]
    options.out.mkdir(parents=True, exist_ok=True)
    write_csv(rows, options.out / "sync_efficiency.csv")
    for ranks in options.ranks:
        draw(rows, ranks, options.out / f"sync_efficiency_{ranks}.png")
    for task in tasks:
        what = f"max_tokens {task.max_tokens:,.0f}" if task.batch_size is None else f"batch_size {task.batch_size}"
        here = results[task.trace, task.ranks, task.batch_size]
        console.print(table_of(here, f"{task.trace}, {task.ranks} ranks, {what}"))
    console.print(f"{len(rows)} cases in {time.perf_counter() - started:.0f} s, in {options.out}", highlight=False)
    if not options.cases_only:
        report(rows, traces, console)


def report(rows: Sequence[Row], traces: Mapping[str, np.ndarray], console: Console) -> None:
    """What is no case of its own: cost, classes, soundness, and the targets."""
    table = Table("policy", *traces, title="What ordering costs at pool_size 10,000: microseconds of CPU a sample")
    costs = {trace: dict(ordering_cost(own)) for trace, own in traces.items()}
    for policy in next(iter(costs.values())):
        table.add_row(policy, *(f"{costs[trace][policy]:.1f}" for trace in traces))
    console.print(table)

    title = "Packed mix: 30 % of the samples are of a class of their own (8 ranks, pool_size 1000)"
    table = Table("trace", "batch", "reference", "same class", "idle", "idle of one class", "ratio", title=title)
    mixes = {}
    for (trace, own), batch_size, aim in itertools.product(traces.items(), (1, 4), (False, True)):
        same, idle, one = packed_mix(own, batch_size, aim)
        mixes[f"{trace}, batch {batch_size}, packed mix, stream{'+reference' if aim else ''}"] = same, idle, one
        figures = f"{100 * same:.1f} %", f"{100 * idle:.2f} %", f"{100 * one:.2f} %", f"{idle / one:.2f}"
        table.add_row(trace, str(batch_size), "yes" if aim else "no", *figures)
    console.print(table)

    title = "How likely a sample is to leave at a step, by tenths of the lengths, over the mean (pool_size 1000)"
    table = Table("trace", "policy", "least", "most", title=title)
    for trace, own in traces.items():
        for aim in (None, aimed_at(own)):
            for what, batch_size, budget in (("batch 4", 4, None), ("token budget", None, 2 * float(own.max()))):
                hazard = leaving(own, batch_size=batch_size, max_tokens=budget, reference=aim)
                policy = f"stream{'+reference' if aim else ''}, {what}"
                table.add_row(trace, policy, f"{hazard.min():.3f}", f"{hazard.max():.3f}")
    console.print(table)

    found = list(targets(rows, mixes))
    most = max(max(own.values()) for own in costs.values())
    found.append(
        ("microseconds of ordering a sample, pool_size 10,000, the most expensive", most, "<=", 20.0, most <= 20)
    )
    table = Table("target at pool_size 1000", "measured", "bound", "", title="Targets")
    for text, value, sign, bound, passed in found:
        table.add_row(text, f"{value:.4f}", f"{sign} {bound:.4f}", "PASS" if passed else "FAIL")
    console.print(table)


if __name__ == "__main__":
    main()
