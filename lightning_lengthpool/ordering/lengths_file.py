"""A file of lengths: a CSV with a column `tokens`, and maybe `class` and `rank`. One reader and one writer."""

import csv
import math
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_lengthpool.ordering.local_paths import file_path

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

_DIGITS = 18  # of a rank: as many as fit into 64 bits


@dataclass(frozen=True)
class LengthRows:
    """The rows of a file of lengths, column by column: 8 bytes a cell, so that ten million rows are no matter."""

    tokens: Array
    names: tuple[str, ...] | None = None  # of the classes, in the order in which they first come
    classes: Indices | None = None  # of each row, as an index into `names`
    ranks: Indices | None = None  # None also if the column was not asked for

    def __len__(self) -> int:
        return len(self.tokens)

    def labels(self) -> list[str] | None:
        """The class of each row by its name; None without classes."""
        if self.names is None or self.classes is None:
            return None
        return [self.names[index] for index in self.classes.tolist()]

    def by_class(self) -> dict[str | None, Array]:
        """The lengths of each class in the order of the file; without classes all are of class None."""
        if self.names is None or self.classes is None:
            return {None: self.tokens}
        order = np.argsort(self.classes, kind="stable")
        ends = np.cumsum(np.bincount(self.classes, minlength=len(self.names)))[:-1]
        return dict(zip(self.names, np.split(self.tokens[order], ends), strict=True))

    def sample(self, most: int) -> "LengthRows":
        """At most so many rows, drawn at random, in their order; the same ones each time."""
        if len(self) <= most:
            return self
        drawn = np.sort(np.random.default_rng(0).choice(len(self), most, replace=False, shuffle=False))
        classes, ranks = (None if column is None else column[drawn] for column in (self.classes, self.ranks))
        return LengthRows(self.tokens[drawn], self.names, classes, ranks)


def read_lengths(path: str | Path, setting: str, *, has_ranks: bool = False) -> LengthRows:
    """Read a CSV file with a column `tokens`, and maybe `class` and `rank`; `setting` names it in messages.

    Without `has_ranks` the column `rank` is not read, and may hold anything. Raises `FileNotFoundError` if the file is
    not there, and `ValueError` if it has no column `tokens` or no rows, or (naming the line) if a row is wrong.
    """
    path = file_path(path, setting)
    if not Path(path).is_file():
        raise FileNotFoundError(f"{setting} is {str(path)!r}, but no file is there")
    with open(path, newline="", encoding="utf-8-sig", errors="replace") as file:  # spreadsheets put a mark before it
        reader = csv.reader(file, skipinitialspace=True)
        where = f"of {setting} {str(path)!r}"
        try:
            return _read(reader, f"{setting} is {str(path)!r}", has_ranks)
        except _Wrong as error:
            raise ValueError(f"line {reader.line_num} {where} {error}") from None
        except csv.Error as error:
            raise ValueError(f"line {reader.line_num} {where} cannot be read: {error}") from error


def write_lengths(
    path: str | Path,
    tokens: Iterable[float],
    classes: Iterable[str] | None = None,
    ranks: Iterable[int] | None = None,
) -> None:
    """Write a file of lengths, as `read_lengths` reads it: all of it or, if that fails, nothing."""
    columns: dict[str, Iterable[Any]] = {"tokens": (f"{length:.15g}" for length in tokens)}
    columns |= {} if classes is None else {"class": classes}
    columns |= {} if ranks is None else {"rank": ranks}
    new = Path(f"{path}.tmp")
    try:
        with new.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(columns)
            writer.writerows(zip(*columns.values(), strict=True))
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def _read(reader: Any, file: str, has_ranks: bool) -> LengthRows:
    header: list[str] = next(reader, [])
    if "tokens" not in header:
        raise ValueError(
            f"{file}, which has no column 'tokens': its first line has to name the columns ('tokens', or "
            f"'tokens,class'), and is {','.join(header)!r}"
        )
    column = {name: index for index, name in enumerate(header)}
    of_length, of_class, of_rank = column["tokens"], column.get("class"), column.get("rank") if has_ranks else None
    tokens, classes, ranks = array("d"), array("q"), array("q")
    names: dict[str, int] = {}
    for row in _filled(reader, len(header)):
        try:
            length = float(row[of_length])  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise _Wrong(f"has the length {row[of_length]!r}, expected a number of tokens") from None
        if not 0 <= length < math.inf:
            raise _Wrong(f"has the length {length:g}, expected a finite number of at least 0")
        tokens.append(length)
        if of_class is not None:
            if not (name := row[of_class]):
                raise _Wrong("names no class, though the file has a column for it")
            classes.append(names.setdefault(name, len(names)))
        if of_rank is not None:
            rank = row[of_rank]
            if rank is None or not rank.strip().isdecimal() or len(rank) > _DIGITS:
                raise _Wrong(f"has the rank {rank!r}, expected an integer of at least 0")
            ranks.append(int(rank))
    if not tokens:
        raise ValueError(f"{file}, which has no lengths below its first line")
    return LengthRows(
        np.frombuffer(tokens, dtype=np.float64),
        None if of_class is None else tuple(names),
        None if of_class is None else np.frombuffer(classes, dtype=np.int64),
        None if of_rank is None else np.frombuffer(ranks, dtype=np.int64),
    )


class _Wrong(ValueError):
    """What is wrong with the line that was read last."""


def _filled(reader: Any, width: int) -> Iterator[Sequence[str | None]]:
    """The rows that are not empty, with None for cells that are missing."""
    for row in reader:
        if len(row) >= width:
            yield row
        elif row:
            yield [*row, *[None] * (width - len(row))]
