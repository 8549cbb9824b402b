"""`advise`: what the length pool would do for a configuration's data, before anything is trained."""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from lightning_lengthpool.advise.advice import Advice, Plan
from lightning_lengthpool.advise.advisor import POOL_SIZES, advise
from lightning_lengthpool.advise.from_config import limit, machine_bytes, make_data, plan_of, workers_by_rank
from lightning_lengthpool.advise.output import print_advice
from lightning_lengthpool.advise.scan.length_scan import LengthScan, scan_of_lengths
from lightning_lengthpool.advise.scan.scan import scan_lengths
from lightning_lengthpool.ordering.lengths_file import read_lengths, write_lengths
from lightning_lengthpool.ordering.local_paths import file_path
from lightning_lengthpool.ordering.settings import PoolSettings, check_integer, check_positive
from lightning_lengthpool.report.out_folder import make_out
from lightning_lengthpool.report.summary import write_json
from lightning_lengthpool.runs.run import Run, load_run

ADVICE, FIGURE, LENGTHS = "advice.json", "advice.png", "lengths.csv"  # in the folder of the results
MOST_LENGTHS = 200_000  # more take minutes and gigabytes, and hardly tell more


def advise_config(
    config: Any,
    *,
    world_size: str | None = None,
    samples: int = 5000,
    pool_sizes: str | None = None,
    run: str | None = None,
    max_length: int | None = None,
    out: str = "runs/advise",
) -> Advice:
    """Advise on a configuration, and print and write the advice.

    Only its data module is made, neither model nor trainer nor callbacks.

    Args:
        config: The whole configuration, parsed.
        world_size: N[,N...]: numbers of data-parallel ranks to predict for; the first one is that of the run. By
            default the configuration's, or as many as the file's column 'rank' names.
        samples: How many samples to read, over all ranks, about; only with a configuration.
        pool_sizes: N[,N...]: to predict for, beside today's. By default 100,300,1000,3000,10000.
        run: What a run measured: a steps.csv, or a folder with one below it.
        max_length: The most tokens that the model takes; by default a setting of the model's that says so.
        out: Folder for `advice.json`, `advice.png` and `lengths.csv`.

    Raises:
        FileNotFoundError, ValueError: If an input is wrong; the message names it, and the way out.
        KeyboardInterrupt: If reading was interrupted before a sample came.
    """
    _refuse_launchers()
    check_integer("--samples", samples, minimum=1)
    worlds, sizes = _integers("--world_size", world_size), _integers("--pool_sizes", pool_sizes)
    measured = None if run is None else load_run(run)
    module = make_data(config)
    plan, notes = plan_of(module, config, worlds, max_length, measured)
    _make_folder(out, module.reference_lengths)
    plan = replace(plan, lengths_file=str(Path(out) / LENGTHS))
    with _bar("reading samples", samples) as bar:
        scan = scan_lengths(
            module.source, module.settings, plan.world_size, samples, class_fn=module.class_fn, progress=bar.update
        )
    if not scan.is_complete:
        print(f"Interrupted: the advice is on the {len(scan.lengths):,} samples that were read", file=sys.stderr)
    _write_lengths(scan, out, source=module.reference_lengths)
    return _advise(scan, plan, worlds, sizes, measured, out, notes)


def advise_lengths(
    lengths: str,
    *,
    world_size: str | None = None,
    batch_size: int | None = None,
    pool_size: int | None = None,
    max_tokens: float | None = None,
    most_lengths: int = MOST_LENGTHS,
    pool_sizes: str | None = None,
    run: str | None = None,
    max_length: int | None = None,
    out: str = "runs/advise",
) -> Advice:
    """Advise on a file of lengths alone, and print and write the advice.

    Args:
        lengths: A CSV file with a column `tokens`, and maybe `class` and `rank`.
        world_size: As for `advise_config`; None only with a column `rank`, for as many as it names.
        batch_size: Samples of a batch; with max_tokens at most, or None.
        pool_size: Samples of a worker's pool; None if there is none yet.
        max_tokens: What a batch may cost, in padded tokens.
        most_lengths: Of more lengths as many are drawn at random, the same ones each time, and the advice says so.
        pool_sizes: As for `advise_config`.
        run: As for `advise_config`.
        max_length: The most tokens that the model takes.
        out: As for `advise_config`.

    Raises:
        FileNotFoundError, ValueError: As `advise_config`.
    """
    _refuse_launchers()
    worlds, sizes = _integers("--world_size", world_size), _integers("--pool_sizes", pool_sizes)
    if batch_size is None and max_tokens is None:
        raise ValueError("--lengths needs --batch_size, or --max_tokens for batches of as many samples as fit")
    for name, value, least in (
        ("batch_size", batch_size, 1),
        ("pool_size", pool_size, 0),
        ("most_lengths", most_lengths, 1),
    ):
        if value is not None:
            check_integer(f"--{name}", value, minimum=least)
    if max_tokens is not None:
        check_positive("--max_tokens", max_tokens)
    if pool_size and batch_size and pool_size < batch_size:
        raise ValueError(
            f"--pool_size is {pool_size}, less than --batch_size {batch_size}: expected 10 to 100 times it"
        )
    measured = None if run is None else load_run(run)
    lengths = str(file_path(lengths, "--lengths"))
    rows = read_lengths(lengths, "--lengths", has_ranks=True)
    if worlds:
        world = worlds[0]
    elif rows.ranks is not None:
        world = len(np.unique(rows.ranks))
    else:
        raise ValueError(f"--lengths needs --world_size, for {lengths!r} has no column 'rank'")
    used = rows.sample(most_lengths)
    scan = scan_of_lengths(
        used.tokens,
        ranks=world,
        classes=used.labels(),
        rank_of=used.ranks,
        drawn_from=len(rows) if len(used) < len(rows) else None,
    )
    if max_tokens is not None:  # goes with 'stream' only, also where there is no pool yet
        settings = PoolSettings(batch_size, pool_size or max(1000, batch_size or 1), "stream", max_tokens=max_tokens)
    else:
        settings = PoolSettings(batch_size, pool_size or 0, "pool" if pool_size else "none")
    plan = Plan(
        settings,
        world_size=scan.ranks,
        max_length=limit(max_length, None),
        workers_by_rank=workers_by_rank(measured),
        is_known=False,
        has_pool=bool(pool_size),
        lengths_file=str(Path(out) / LENGTHS),
    )
    notes = []
    if max_tokens is not None and (over := int((rows.tokens > max_tokens).sum())):
        notes.append(f"{over} samples alone cost more than --max_tokens {max_tokens:g}: each is a batch of its own")
    if len(used) < len(rows):
        notes.append(f"the longest of all {len(rows):,} lengths has {float(rows.tokens.max()):,.15g} tokens")
    _make_folder(out, lengths)
    _write_lengths(scan, out, source=lengths)
    return _advise(scan, plan, worlds, sizes, measured, out, notes)


def _refuse_launchers() -> None:
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 or int(os.environ.get("SLURM_NTASKS", 1)) > 1:
        raise ValueError("advise needs no ranks but its own processes: run it once, not under torchrun or srun")


def _integers(option: str, text: str | None) -> list[int]:
    if text is None:
        return []
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"{option} is {text!r}, expected integers of at least 1 with commas between them: 8,64,512")
    return [int(part) for part in parts]


def _make_folder(out: str, source: str | Path | None) -> None:
    """Before the data are read: a folder that cannot be written to shows at once."""
    make_out(out, [ADVICE, FIGURE, *([] if _is_in_use(out, source) else [LENGTHS])])


def _is_in_use(out: str, source: str | Path | None) -> bool:
    """Whether the lengths in the folder are those that the advice, or training, takes: they are not written over."""
    path = Path(out) / LENGTHS
    return source is not None and path.exists() and Path(source).exists() and path.samefile(source)


def _write_lengths(scan: LengthScan, out: str, source: str | Path | None = None) -> None:
    """Write the lengths, as `reference_lengths` reads them; never over the file that they come from, or one in use."""
    path = Path(out) / LENGTHS
    if _is_in_use(out, source):
        print(f"Kept as it is, for it is in use: {path}")
        return
    write_lengths(path, scan.lengths, scan.classes)


def _advise(
    scan: LengthScan,
    plan: Plan,
    worlds: Sequence[int],
    pool_sizes: Sequence[int],
    run: Run | None,
    out: str,
    notes: Sequence[str],
) -> Advice:
    """Make the advice, print it and write it."""
    with _bar("simulating", None) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        advice = advise(
            scan,
            plan,
            world_sizes=worlds or [plan.world_size],
            pool_sizes=pool_sizes or POOL_SIZES,
            run=run,
            machine_bytes=machine_bytes(),
            progress=show,
        )
    for note in notes:
        print(f"NOTE: {note}")
    print_advice(advice)
    from lightning_lengthpool.advise.figure import advice_figure  # Matplotlib takes its time to load
    from lightning_lengthpool.report.figures import png

    folder = Path(out)
    write_json(advice.as_json(), folder / ADVICE)
    (folder / FIGURE).write_bytes(png(advice_figure(advice)))
    print(f"Lengths: {plan.lengths_file}. Written: {folder / ADVICE} and {folder / FIGURE}")
    return advice


def _bar(name: str, total: int | None) -> Any:
    """A progress bar, on a terminal only."""
    return tqdm(desc=name, total=total, disable=None, leave=False, file=sys.stderr)
