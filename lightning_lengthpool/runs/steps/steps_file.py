"""The file of step records, `steps.csv`: written while a run goes on, and read whatever happened to the run.

A header with `COLUMNS`, then one row for each micro-batch and rank, sorted by step, micro-batch and rank; an empty cell
is a figure that could not be measured. The file may end anywhere, for a run may be killed while it writes: what follows
the last newline is never read, nor is a last micro-batch that lacks ranks.
"""

import os
import uuid
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import IO

import numpy as np

from lightning_lengthpool.runs.steps.columns import COLUMNS, Array
from lightning_lengthpool.runs.steps.steps_lines import (
    HEADER,
    count_ranks,
    filled,
    lacks_ranks,
    text,
    whole_lines,
    whole_rows,
)

BLOCK = 100
"""Steps that a thinned file keeps or drops together, so that steps in a row stay in a row."""


class TakenError(OSError):
    """Another run has put its own file where this run's was."""


class StepsFile:
    """Write step records. Call `start` before the first `append`.

    It writes only to files that it made itself, so rows of two runs never meet in one. A second run that continues the
    file begins with a copy of the rows that it keeps, which takes the path; then `append` of the first raises
    `TakenError`, and `move` brings its own rows elsewhere.

    A file that would grow beyond `max_rows` (about 60 MB by default; None for no limit) is thinned: it keeps every
    second block of `BLOCK` steps, later every fourth, and so on (step `s` stays if `s // BLOCK` is a multiple of 2, 4,
    ...), and from then on the other blocks are not written. If even `BLOCK` steps have more rows than `max_rows`, only
    the first steps that fit are kept. The rows already there are streamed, never held in memory. A file that was
    thinned before stays thinned when it is continued without a limit.
    """

    def __init__(self, path: str | Path, max_rows: int | None = 1_000_000) -> None:
        if max_rows is not None and max_rows < 1:
            raise ValueError(f"max_rows must be at least 1, or None for no limit, got {max_rows}.")
        self.path = Path(path)
        self.max_rows = max_rows
        self._rows: int | None = None  # of the file; None before start
        self._every = 1  # one block in so many is kept: a power of two
        self._inode: tuple[int, int] | None = None  # of the file that this object made
        self._descriptor = -1  # of that file
        self._release: weakref.finalize[..., StepsFile] | None = None

    def start(self, step: int, ranks: int | None = None) -> None:
        """Begin the file, or continue that of a run which is resumed.

        Args:
            step: The first step that will be appended. At 0 the file is begun anew. Else the rows of earlier steps are
                kept, but for a part of one at the end; how far it is thinned is seen from its blocks (see `thinned`).
            ranks: Number of ranks of the records to come. A file with another number of them is moved aside, as
                `steps.before-STEP.csv`, for one file cannot hold both. Default: not looked at.

        Raises:
            ValueError: If `step` is not 0 and the file is not one of step records, or a line in it is corrupt.
                The file is left as it was.
        """
        blocks: set[int] = set()
        if step > 0 and ranks is not None and self.path.exists() and count_ranks(self.path) not in (0, ranks):
            self.path.replace(self.path.with_name(f"{self.path.stem}.before-{step}.csv"))

        def kept() -> Iterator[str]:
            for number, line in whole_rows(self.path):
                if number < step:
                    blocks.add(number // BLOCK)
                    yield line

        self._replace(kept() if step > 0 and self.path.exists() else ())
        self._every = _kept_every(blocks)

    def append(self, steps: Mapping[str, Array]) -> None:
        """Append records, in one write of whole lines.

        They are sorted as in the file, and hold all micro-batches of their steps, with all ranks.

        Raises:
            OSError: If the file cannot be written, say on a full disk; it stays as it was.
            TakenError: If another run has taken the path; nothing is written.
        """
        if self._rows is None:
            raise RuntimeError(f"StepsFile({str(self.path)!r}): call start(step) before the first append.")
        table = np.stack([steps[name] for name in COLUMNS], axis=1)
        if not len(table):
            return
        if not self.path.exists():  # removed during the run
            self._replace(())
        self._check(os.stat(self.path))
        kept = table[table[:, 0] // BLOCK % self._every == 0]
        while self.max_rows is not None and self._rows + len(kept) > self.max_rows:
            if table[-1, 0] < BLOCK * self._every:  # the first block alone is left, and stays at every level
                first_too_many = kept[max(self.max_rows - self._rows, 0), 0]
                kept = kept[kept[:, 0] < first_too_many]
                break
            self._every *= 2
            kept = table[table[:, 0] // BLOCK % self._every == 0]
            self._replace(
                line for line in whole_lines(self.path) if int(line.partition(",")[0]) // BLOCK % self._every == 0
            )
        lines = text(kept).splitlines(keepends=True)
        if not self._rows:
            self._replace(lines)  # never a part of the first micro-batch: it would not tell how many ranks are missing
        elif lines:
            self._write("".join(lines).encode())
            self._rows += len(lines)

    def move(self, path: Path) -> None:
        """Go on at another path, with all rows so far, also if another run has taken the old one.

        If the rows cannot be read any more, an `OSError` is raised and nothing is written.
        """
        rows = whole_lines(Path(f"/proc/self/fd/{self._descriptor}"))  # it has no name any more
        self.path = path
        self._replace(rows)

    def is_taken(self) -> bool:
        """Whether another run has put its own file at the path."""
        return self.path.exists() and _inode(os.stat(self.path)) != self._inode

    def _check(self, status: os.stat_result) -> None:
        if _inode(status) != self._inode:
            raise TakenError(f"another run writes {self.path}")

    def _write(self, data: bytes) -> None:
        with self.path.open("r+b", buffering=0) as file:
            self._check(os.fstat(file.fileno()))
            end = file.seek(0, os.SEEK_END)
            try:
                while data:  # once, unless the system takes only a part
                    data = data[file.write(data) :]
            except BaseException:
                file.truncate(end)  # the next append must not continue half a line
                raise

    def _replace(self, lines: Iterable[str]) -> None:
        """Write the file again as a whole; until that is done the old one stays."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_name(f"{self.path.name}.{uuid.uuid4().hex[:8]}.tmp")
        rows = 0
        try:
            with new.open("w", encoding="latin-1", newline="\n") as file:
                file.write(HEADER)
                for line in lines:
                    file.write(line)
                    rows += 1
                file.flush()
                os.fsync(file.fileno())  # else a machine that goes down may leave the new name and no content
                os.replace(new, self.path)
                self._keep(file)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
        self._rows = rows

    def _keep(self, file: IO[str]) -> None:
        """Remember the file as this object's; as long as it is open no other one gets its number."""
        if self._release is not None:
            self._release()
        self._descriptor = os.dup(file.fileno())
        self._release = weakref.finalize(self, os.close, self._descriptor)
        self._inode = _inode(os.fstat(self._descriptor))


def read_steps(path: str | Path) -> dict[str, Array]:
    """Read a `steps.csv`, also one that is being written or was cut off anywhere: an array for each of `COLUMNS`.

    An entry is a row of the whole micro-batches, NaN for an empty cell. A file cut off within its first micro-batch
    seems to have fewer ranks; `StepsFile` leaves no such file.

    Raises `ValueError`, naming the file and the line, if the header is not that of a step record file, a line that was
    not cut off is no record, or steps go back, as in a file into which two runs wrote.
    """
    path = Path(path)
    lines = (filled(line) for line in whole_lines(path))
    first = next(lines, None)
    if first is None:
        return {name: np.empty(0) for name in COLUMNS}
    try:
        table = np.loadtxt(chain([first], lines), delimiter=",", comments=None, ndmin=2)
        if table.shape[1] != len(COLUMNS) or not np.isfinite(table[:, :2]).all():
            raise ValueError(f"every row needs {len(COLUMNS)} cells, and a step and a rank")
        if (np.diff(table[:, 0]) < 0).any():
            raise ValueError("steps go back")
    except ValueError as error:
        for _ in whole_rows(path):  # slow, but finds the line
            pass
        raise ValueError(f"{path} is corrupt: {error}") from error
    rank = table[:, 1]
    starts = [0, *(np.flatnonzero(np.diff(rank) <= 0) + 1).tolist()]
    if len(starts) > 1 and lacks_ranks(rank[starts[-1] :].tolist(), rank[starts[-2] : starts[-1]].tolist()):
        table = table[: starts[-1]]
    return dict(zip(COLUMNS, table.T, strict=True))


def thinned(steps: Mapping[str, Array]) -> int:
    """Tell how far the file of some records was thinned: N, if one block of `BLOCK` steps in N was kept.

    It is the least thinning that explains the blocks missing between others, and none (1) if a block is there that
    it would have dropped: then rows were lost in another way.
    """
    return _kept_every(set((np.unique(steps["step"]) // BLOCK).astype(int).tolist()))


def _kept_every(blocks: Collection[int]) -> int:
    every = 1
    first, last = min(blocks, default=0), max(blocks, default=0)
    while all(block % (2 * every) == 0 for block in blocks) and any(
        block not in blocks for block in range(first, last, every)
    ):
        every *= 2
    return every


def _inode(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
