"""The lines of `steps.csv`: how a record becomes one, and which of a file's lines count."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from lightning_lengthpool.runs.steps.columns import COLUMNS, Array

HEADER = ",".join(COLUMNS) + "\n"


def filled(line: str) -> str:
    """Write out the empty cells, which NumPy's reader does not know."""
    return line.replace(",,", ",nan,").replace(",,", ",nan,").replace(",\n", ",nan\n")


def text(table: Array) -> str:
    """The lines of some rows: seconds with 6 decimals, all else with up to 15 digits, and nothing for NaN."""
    cells: list[float | None] = [None] * table.size
    formats = []
    for index, (name, column) in enumerate(zip(COLUMNS, table.T, strict=True)):
        form = "%.6f" if name.endswith("seconds") else "%.15g"
        # the same text in a third of the time: most columns are counts
        if form == "%.15g" and ((np.rint(column) == column) & (column < 1e15) & ~np.signbit(column)).all():
            form, column = "%d", column.astype(np.int64)
        formats.append(form)
        cells[index :: len(COLUMNS)] = column.tolist()
    line = ",".join(formats) + "\n"
    return (line * len(table) % tuple(cells)).replace("nan", "")


def whole_lines(path: Path) -> Iterator[str]:
    """Yield the lines after the header; without the last one if it has no newline, for it may be a part.

    (The NUL bytes that some file systems leave after a crash are such a part.)
    """
    with path.open(encoding="latin-1", newline="\n") as file:  # of which any byte is a character
        header = file.readline()
        if header != HEADER and not HEADER.startswith(header.rstrip("\0")):
            raise ValueError(
                f"{path} is not a step record file: expected the header {','.join(COLUMNS)}. Give the path of "
                "another file, or move this one away."
            )
        for line in file:
            if line.endswith("\n"):
                yield line


def whole_rows(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the step and the line of each row, but for a last micro-batch that lacks ranks; check each line."""
    batch: list[tuple[int, str]] = []
    ranks: list[int] = []
    previous: list[int] = []
    for number, line in enumerate(whole_lines(path), start=2):
        try:
            step, rank = _step_and_rank(line)
        except ValueError:
            raise ValueError(
                f"{path}, line {number} is no step record: {line[:200]!r}. Take the line out, or move the file away."
            ) from None
        if batch and step < batch[-1][0]:
            raise ValueError(
                f"{path}, line {number}: step {step} comes after step {batch[-1][0]}, so the file holds rows of more "
                "than one run. Each run needs a file of its own; move this one away."
            )
        if ranks and rank <= ranks[-1]:
            yield from batch
            batch, ranks, previous = [], [], ranks
        batch.append((step, line))
        ranks.append(rank)
    if not lacks_ranks(ranks, previous):
        yield from batch


def count_ranks(path: Path) -> int:
    """The number of ranks of a file's first micro-batch."""
    ranks: list[int] = []
    for _, line in whole_rows(path):
        rank = _step_and_rank(line)[1]
        if ranks and rank <= ranks[-1]:
            break
        ranks.append(rank)
    return len(ranks)


def _step_and_rank(line: str) -> tuple[int, int]:
    step, rank, *others = line.split(",")
    if len(others) != len(COLUMNS) - 2:
        raise ValueError
    for cell in others:
        float(cell.strip() or "nan")
    return int(step), int(rank)


def lacks_ranks(ranks: Sequence[float], previous: Sequence[float]) -> bool:
    """Whether a micro-batch is the beginning of what the one before it was."""
    return len(ranks) < len(previous) and ranks == previous[: len(ranks)]
