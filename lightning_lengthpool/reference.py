"""The file of lengths that all ranks aim at: a CSV with a column `tokens` and, for classes, a column `class`."""

import csv
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lightning_lengthpool.cost_models import CostModel
from lightning_lengthpool.order import batch_shares
from lightning_lengthpool.paths import file_path
from lightning_lengthpool.pool import ClassFn, PoolSettings
from lightning_lengthpool.stream import Array, Reference


@dataclass(frozen=True)
class ReferenceLengths:
    """Lengths of samples of the data set, the same on all ranks.

    Args:
        path: The file, for messages.
        lengths: Lengths in tokens, by class; of class None if the file tells no classes.
    """

    path: str
    lengths: Mapping[str | None, list[float]]

    @cached_property
    def digest(self) -> str:
        """A text that differs if the lengths do; their order in the file does not matter."""
        rows = sorted(f"{kind}:{length!r}" for kind, own in self.lengths.items() for length in own)
        return hashlib.sha256("\n".join(rows).encode()).hexdigest()[:12]

    def __str__(self) -> str:
        return f"{sum(map(len, self.lengths.values()))} lengths ({self.digest})"

    def costs(self, model: CostModel | None, *, by_class: bool) -> Reference:
        """What samples of these lengths cost.

        Args:
            model: None if a sample costs its length.
            by_class: Whether each class has costs of its own.

        Raises:
            ValueError: If the file lacks classes that are needed, or if the model cannot tell from the length.
        """
        if by_class and None in self.lengths:
            raise ValueError(
                f"reference_lengths is {self.path!r}, which has no column 'class', but a batch is to hold one class. "
                "Write the class of each sample into the file, or leave class_fn and class_shares out."
            )
        grouped: dict[str | None, list[float]] = dict(self.lengths)
        if not by_class:
            grouped = {None: [length for own in self.lengths.values() for length in own]}
        if model is None:
            return Reference(grouped)
        try:
            return Reference({kind: [model.of_length(length) for length in own] for kind, own in grouped.items()})
        except ValueError as error:
            raise ValueError(
                f"reference_lengths is {self.path!r}, whose lengths have no cost by {model!r}: {error} Leave "
                "reference_lengths out, or choose a cost model that needs the length alone."
            ) from error


class LengthRow(NamedTuple):
    """A row of a file of lengths; class and rank are None if the file has no column for them."""

    tokens: float
    kind: str | None
    rank: int | None


def read_reference_lengths(path: str | Path) -> ReferenceLengths:
    """Read the file.

    Raises:
        FileNotFoundError: If it is not there.
        ValueError: If it has no column `tokens` or no rows, or a row is wrong; the message names the line.
    """
    lengths: dict[str | None, list[float]] = {}
    for row in read_lengths(path, "reference_lengths"):
        lengths.setdefault(row.kind, []).append(row.tokens)
    return ReferenceLengths(str(path), lengths)


def read_lengths(path: str | Path, setting: str, *, has_ranks: bool = False) -> list[LengthRow]:
    """Read a file of lengths.

    Args:
        path: A CSV file with a column `tokens`, and maybe `class` and `rank`.
        setting: What names the file, for messages.
        has_ranks: Whether a column `rank` is read; else it may hold anything.

    Raises:
        FileNotFoundError, ValueError: As `read_reference_lengths`.
    """
    path = file_path(path, setting)
    if not Path(path).is_file():
        raise FileNotFoundError(f"{setting} is {str(path)!r}, but no file is there")
    rows: list[LengthRow] = []
    with open(path, newline="", encoding="utf-8-sig", errors="replace") as file:  # spreadsheets put a mark before it
        reader = csv.DictReader(file, skipinitialspace=True)
        try:
            names = reader.fieldnames or []
            if "tokens" not in names:
                raise ValueError(
                    f"{setting} is {str(path)!r}, which has no column 'tokens': its first line has to name the "
                    f"columns ('tokens', or 'tokens,class'), and is {','.join(names)!r}"
                )
            for row in reader:
                where = f"line {reader.line_num} of {setting} {str(path)!r}"
                rows.append(_read_row(row, where, has_ranks=has_ranks))
        except csv.Error as error:
            where = f"line {reader.reader.line_num} of {setting} {str(path)!r}"
            raise ValueError(f"{where} cannot be read: {error}") from error
    if not rows:
        raise ValueError(f"{setting} is {str(path)!r}, which has no lengths below its first line")
    return rows


def _read_row(row: Mapping[str, str | None], where: str, *, has_ranks: bool) -> LengthRow:
    try:
        length = float(row["tokens"])  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ValueError(f"{where} has the length {row['tokens']!r}, expected a number of tokens") from None
    if not 0 <= length < math.inf:
        raise ValueError(f"{where} has the length {length:g}, expected a finite number of at least 0")
    kind = row.get("class")
    if kind == "" or (kind is None and "class" in row):
        raise ValueError(f"{where} names no class, though the file has a column for it")
    rank = row.get("rank")
    if not has_ranks or "rank" not in row:
        return LengthRow(length, kind, None)
    if rank is None or not rank.strip().isdecimal():
        raise ValueError(f"{where} has the rank {rank!r}, expected an integer of at least 0")
    return LengthRow(length, kind, int(rank))


def with_reference(
    settings: PoolSettings, file: ReferenceLengths | None, class_fn: ClassFn | None, batch_size: int | None
) -> PoolSettings:
    """Add to a pool's settings what stands in the file.

    Args:
        settings: The pool, with `class_shares` if they were set.
        file: None without a file.
        class_fn: Names a sample's class; None for no classes. Without `class_shares` they are the file's: of its
            samples, or with a token budget of the batches that these make.
        batch_size: Samples of a batch; with a budget, at most.

    Raises:
        ValueError: If the file's classes are not those of `class_shares`, and as `ReferenceLengths.costs`.
    """
    if file is None:
        return settings
    reference = file.costs(settings.cost, by_class=class_fn is not None)
    if settings.max_tokens is not None and settings.over_budget == "drop":  # what never comes in is no aim
        fitting = {kind: costs[costs <= settings.max_tokens] for kind, costs in reference.costs.items()}
        for kind, costs in fitting.items():
            if not len(costs):
                whose = "" if kind is None else f" of class {kind!r}"
                raise ValueError(
                    f"all lengths{whose} in reference_lengths {file.path!r} cost more than max_tokens "
                    f"({settings.max_tokens:g}), and over_budget is 'drop': nothing would be left of them"
                )
        reference = Reference(fitting)
    shares = settings.class_shares
    if class_fn is not None:
        if shares is None:
            held = {kind: _batches(costs, settings, batch_size) for kind, costs in reference.costs.items()}
            shares = {str(kind): batches / sum(held.values()) for kind, batches in held.items()}
        if set(shares) != set(reference.costs):
            raise ValueError(
                f"class_shares names the classes {', '.join(sorted(shares))}, but reference_lengths {file.path!r} has "
                f"{', '.join(sorted(map(str, reference.costs)))}: they must be the same"
            )
    return replace(settings, reference=reference, class_fn=class_fn, class_shares=shares)


def _batches(costs: Array, settings: PoolSettings, batch_size: int | None) -> float:
    return float(len(costs)) if settings.max_tokens is None else batches_of(costs, settings, batch_size) * len(costs)


def batches_of(costs: Array, settings: PoolSettings, batch_size: int | None) -> float:
    """About how many batches a sample makes on average, with a token budget.

    Args:
        costs: Of samples, shape `[samples]`, at least one.
        settings: The pool, with a budget.
        batch_size: Samples of a batch at most; None for no limit.
    """
    assert settings.max_tokens is not None
    shares = batch_shares(np.asarray(costs, dtype=np.float64), settings.max_tokens, batch_size)
    if settings.over_budget == "drop":
        shares = np.where(np.asarray(costs) > settings.max_tokens, 0.0, shares)
    return float(shares.mean())
