"""`advise`: what the length pool would do for a configuration's data, before anything is trained."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from lightning_lengthpool.advise.advisor import Advice, Plan, advise
from lightning_lengthpool.advise.output import print_advice
from lightning_lengthpool.advise.plan import limit, machine_bytes, make_data, plan_of, workers_by_rank
from lightning_lengthpool.advise.scan.scan import Survey, survey, survey_of_lengths
from lightning_lengthpool.data.datamodule import LengthPoolDataModule
from lightning_lengthpool.ordering.lengths_file import read_lengths, write_lengths
from lightning_lengthpool.ordering.local_paths import file_path
from lightning_lengthpool.ordering.settings import check_integer, check_positive
from lightning_lengthpool.report.out_folder import make_out
from lightning_lengthpool.report.tables import write_json
from lightning_lengthpool.runs.run import Run, load_run

ADVICE, FIGURE, LENGTHS = "advice.json", "advice.png", "lengths.csv"  # in the folder of the results
MOST = 200_000  # lengths of a file that are used: more take minutes and gigabytes, and hardly tell more


class _Subject(NamedTuple):
    """What is advised on: the data, today's settings, and what had to be assumed."""

    survey: Survey
    plan: Plan
    notes: Sequence[str]


def advise_config(
    config: Any,
    *,
    world_size: str | None = None,
    samples: int = 5000,
    run: str | None = None,
    max_length: int | None = None,
    out: str = "runs/advise",
) -> Advice:
    """Advise on a configuration, and print and write the advice.

    Only its data module is made, neither model nor trainer nor callbacks.

    Args:
        config: The whole configuration, parsed.
        world_size: Numbers of data-parallel ranks with commas between them; the first one is that of the run. None for
            the configuration's.
        samples: How many samples to read.
        run: A measured run, for `runs.load_run`.
        max_length: The most tokens that the model takes; None for a setting of the model's that says so.
        out: Folder for `advice.json`, `advice.png` and `lengths.csv`.

    Raises:
        FileNotFoundError, ValueError: If an input is wrong; the message names it, and the way out.
        KeyboardInterrupt: If reading was interrupted before a sample came.
    """
    _refuse_launchers()
    check_integer("--samples", samples, minimum=1)
    worlds = _worlds(world_size)
    measured = None if run is None else load_run(run)
    module = make_data(config)
    plan, notes = plan_of(module, config, worlds, max_length, measured)
    _make_folder(out, module.reference_lengths)
    plan = replace(plan, lengths_file=str(Path(out) / LENGTHS))
    found = _read(module, plan.world_size, samples, out)
    return _advise(_Subject(found, plan, notes), worlds, measured, out)


def advise_lengths(
    lengths: str,
    *,
    world_size: str | None = None,
    batch_size: int | None = None,
    pool_size: int | None = None,
    max_tokens: float | None = None,
    run: str | None = None,
    max_length: int | None = None,
    out: str = "runs/advise",
) -> Advice:
    """Advise on a file of lengths alone, and print and write the advice.

    Args:
        lengths: A CSV file with a column `tokens`, and maybe `class` and `rank`. Of more than 200,000 lengths as many
            are drawn at random, the same ones each time, and the advice says so.
        world_size: As for `advise_config`; None only with a column `rank`, for as many as it names.
        batch_size: Samples of a batch; with `max_tokens` at most, or None.
        pool_size: Samples of a worker's pool; None if there is none yet.
        max_tokens: What a batch may cost.
        run: As for `advise_config`.
        max_length: The most tokens that the model takes.
        out: As for `advise_config`.

    Raises:
        FileNotFoundError, ValueError: As `advise_config`.
    """
    _refuse_launchers()
    worlds = _worlds(world_size)
    if batch_size is None and max_tokens is None:
        raise ValueError("--lengths needs --batch_size, or --max_tokens for batches of as many samples as fit")
    for name, value, least in (("--batch_size", batch_size, 1), ("--pool_size", pool_size, 0)):
        if value is not None:
            check_integer(name, value, minimum=least)
    if max_tokens is not None:
        check_positive("--max_tokens", max_tokens)
    if pool_size and batch_size and pool_size < batch_size:
        raise ValueError(
            f"--pool_size is {pool_size}, less than --batch_size {batch_size}: expected 10 to 100 times it"
        )
    measured = None if run is None else load_run(run)
    lengths = str(file_path(lengths, "--lengths"))
    rows = read_lengths(lengths, "--lengths", has_ranks=True)
    if not worlds and rows.ranks is None:
        raise ValueError(f"--lengths needs --world_size, for {lengths!r} has no column 'rank'")
    used = rows.sample(MOST)
    found = survey_of_lengths(
        used.tokens,
        ranks=worlds[0] if worlds else len(np.unique(rows.ranks)),
        classes=used.labels(),
        rank_of=used.ranks,
        drawn_from=len(rows) if len(used) < len(rows) else None,
    )
    over = 0 if max_tokens is None else int((rows.tokens > max_tokens).sum())
    plan = Plan(
        policy="none" if not pool_size else "pool" if max_tokens is None else "stream",
        pool_size=pool_size or 0,
        batch_size=batch_size,
        max_tokens=max_tokens,
        world_size=found.ranks,
        max_length=limit(max_length, None),
        is_active=bool(pool_size),
        workers_by_rank=workers_by_rank(measured),
        is_known=False,
        lengths_file=str(Path(out) / LENGTHS),
    )
    notes = (
        [f"{over} samples alone cost more than --max_tokens {max_tokens:g}: each is a batch of its own"] if over else []
    )
    if len(used) < len(rows):
        notes.append(f"the longest of all {len(rows):,} lengths has {float(rows.tokens.max()):,.15g} tokens")
    _make_folder(out, lengths)
    _write_lengths(found, out, source=lengths)
    return _advise(_Subject(found, plan, notes), worlds, measured, out)


def _read(module: LengthPoolDataModule, ranks: int, samples: int, out: str) -> Survey:
    with _bar("reading samples", samples) as bar:
        found = survey(module, ranks, samples, progress=bar.update)
    if not found.is_complete:
        print(f"Interrupted: the advice is on the {len(found.lengths):,} samples that were read", file=sys.stderr)
    _write_lengths(found, out, source=module.reference_lengths)
    return found


def _worlds(text: str | None) -> list[int]:
    if text is None:
        return []
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(
            f"--world_size is {text!r}, expected integers of at least 1 with commas between them: 8,64,512"
        )
    return [int(part) for part in parts]


def _make_folder(out: str, source: str | Path | None) -> None:
    """Before the data are read: a folder that cannot be written to shows at once."""
    make_out(out, [ADVICE, FIGURE, *([] if _is_in_use(out, source) else [LENGTHS])])


def _is_in_use(out: str, source: str | Path | None) -> bool:
    """Whether the lengths in the folder are those that the advice, or training, takes: they are not written over."""
    path = Path(out) / LENGTHS
    return source is not None and path.exists() and Path(source).exists() and path.samefile(source)


def _refuse_launchers() -> None:
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 or int(os.environ.get("SLURM_NTASKS", 1)) > 1:
        raise ValueError("advise needs no ranks but its own processes: run it once, not under torchrun or srun")


# ---- what comes of it


def _advise(subject: _Subject, worlds: Sequence[int], run: Run | None, out: str) -> Advice:
    with _bar("simulating", None) as bar:
        advice = advise(
            subject.survey,
            subject.plan,
            world_sizes=worlds or [subject.plan.world_size],
            run=run,
            machine_bytes=machine_bytes(),
            progress=_shown_on(bar),
        )
    for note in subject.notes:
        print(f"NOTE: {note}")
    print_advice(advice)
    from lightning_lengthpool.advise.figure import advice_figure  # Matplotlib takes its time to load
    from lightning_lengthpool.report.figures import png

    folder = Path(out)
    write_json(advice.as_json(), folder / ADVICE)
    (folder / FIGURE).write_bytes(png(advice_figure(advice)))
    print(f"Lengths: {subject.plan.lengths_file}. Written: {folder / 'advice.json'} and {folder / 'advice.png'}")
    return advice


def _bar(name: str, total: int | None) -> Any:
    """A progress bar, on a terminal only."""
    return tqdm(desc=name, total=total, disable=None, leave=False, file=sys.stderr)


def _shown_on(bar: Any) -> Callable[[int, int], None]:
    def show(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    return show


def _write_lengths(found: Survey, out: str, source: str | Path | None = None) -> None:
    """Write the lengths, as `reference_lengths` reads them; never over the file that they come from, or one in use."""
    path = Path(out) / LENGTHS
    if _is_in_use(out, source):
        print(f"Kept as it is, for it is in use: {path}")
        return
    write_lengths(path, found.lengths, found.classes)
