"""The file of lengths that all ranks aim at: a CSV with a column `tokens` and, for classes, a column `class`."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from lightning_lengthpool.ordering.cost_model import CostModel
from lightning_lengthpool.ordering.lengths_file import read_lengths
from lightning_lengthpool.ordering.reference_costs import Array, ReferenceCosts
from lightning_lengthpool.ordering.settings import ClassFn, PoolSettings, require_stream
from lightning_lengthpool.ordering.stream.budget import batch_shares


@dataclass(frozen=True)
class ReferenceLengths:
    """Lengths of samples of the data set, the same on all ranks."""

    path: str  # for messages
    lengths: Mapping[str | None, Array]  # in tokens, by class; of class None if the file tells no classes

    @cached_property
    def digest(self) -> str:
        """A text that differs if the lengths do; their order in the file does not matter."""
        rows = []
        for name, of_class in self.lengths.items():  # of a large file most lengths occur many times
            # as bits, for 0.0 and -0.0 are written differently
            bits, counts = np.unique(of_class.view(np.int64), return_counts=True)
            lengths = bits.view(np.float64).tolist()
            rows += [(f"{name}:{length!r}", count) for length, count in zip(lengths, counts.tolist(), strict=True)]
        digest, separator = hashlib.sha256(), ""
        for row, count in sorted(rows):
            digest.update((separator + "\n".join([row] * count)).encode())
            separator = "\n"
        return digest.hexdigest()[:12]

    def __str__(self) -> str:
        return f"{sum(map(len, self.lengths.values()))} lengths ({self.digest})"

    def costs(self, model: CostModel | None, *, by_class: bool) -> ReferenceCosts:
        """What samples of these lengths cost (their lengths without a model), by class or all together.

        Raises `ValueError` if the file lacks classes that are needed, or if the model cannot tell from the length.
        """
        if by_class and None in self.lengths:
            raise ValueError(
                f"reference_lengths is {self.path!r}, which has no column 'class', but a batch is to hold one class. "
                "Write the class of each sample into the file, or leave class_fn and class_shares out."
            )
        grouped = self.lengths if by_class else {None: np.concatenate([*self.lengths.values()])}
        if model is None:
            return ReferenceCosts(grouped)
        try:
            return ReferenceCosts({name: _costs(lengths, model) for name, lengths in grouped.items()})
        except ValueError as error:
            raise ValueError(
                f"reference_lengths is {self.path!r}, whose lengths have no cost by {model!r}: {error} Leave "
                "reference_lengths out, or choose a cost model that needs the length alone."
            ) from error


def _costs(lengths: Array, model: CostModel) -> Array:
    """What a sample of each length costs; each length that occurs is asked for once."""
    known, index = np.unique(lengths, return_inverse=True)
    costs: Array = np.array([model.of_length(length) for length in known.tolist()])[index]
    return costs


def read_reference_lengths(path: str | Path) -> ReferenceLengths:
    """Read the file; errors are those of `lengths_file.read_lengths`."""
    return ReferenceLengths(str(path), read_lengths(path, "reference_lengths").by_class())


def check_reference(settings: PoolSettings, path: object, class_fn: ClassFn | None) -> None:
    """Check what of a pool's settings goes with a file that is not read yet.

    `settings` are without `class_fn` where the file is to tell the shares. Raises `ValueError` if the policy takes no
    such settings, or if nothing tells the classes' shares.
    """
    for name, value in (("reference_lengths", path), ("class_fn", class_fn)):
        if value is not None:
            require_stream(settings.policy, settings.pool_size, name, repr(value))
    if class_fn is not None and settings.class_shares is None and path is None:
        raise ValueError(
            "class_fn is set, but nothing tells how many batches each class has. Set class_shares, say {packed: 0.3, "
            "single: 0.7}, or reference_lengths with a column 'class'."
        )


def with_reference(settings: PoolSettings, file: ReferenceLengths | None, class_fn: ClassFn | None) -> PoolSettings:
    """Add to a pool's settings what stands in the file.

    With `class_fn` but without `class_shares` the shares are the file's: of its samples, or with a token budget of the
    batches that these make. Raises `ValueError` if the file's classes are not those of `class_shares`, and as
    `ReferenceLengths.costs`.
    """
    if file is None:
        return settings
    reference = file.costs(settings.cost, by_class=class_fn is not None)
    if settings.max_tokens is not None and settings.over_budget == "drop":  # what never comes in is no aim
        fitting = {name: costs[costs <= settings.max_tokens] for name, costs in reference.costs.items()}
        for name, costs in fitting.items():
            if not len(costs):
                whose = "" if name is None else f" of class {name!r}"
                raise ValueError(
                    f"all lengths{whose} in reference_lengths {file.path!r} cost more than max_tokens "
                    f"({settings.max_tokens:g}), and over_budget is 'drop': nothing would be left of them"
                )
        reference = ReferenceCosts(fitting)
    shares = settings.class_shares
    if class_fn is not None:
        if shares is None:
            held = {name: _batches(costs, settings) for name, costs in reference.costs.items()}
            shares = {str(name): batches / sum(held.values()) for name, batches in held.items()}
        if set(shares) != set(reference.costs):
            raise ValueError(
                f"class_shares names the classes {', '.join(sorted(shares))}, but reference_lengths {file.path!r} has "
                f"{', '.join(sorted(map(str, reference.costs)))}: they must be the same"
            )
    return replace(settings, reference=reference, class_fn=class_fn, class_shares=shares)


def _batches(costs: Array, settings: PoolSettings) -> float:
    return float(len(costs)) if settings.max_tokens is None else batches_of(costs, settings) * len(costs)


def batches_of(costs: Array, settings: PoolSettings) -> float:
    """About how many batches a sample makes on average, with a token budget; of costs `[samples]`, at least one."""
    assert settings.max_tokens is not None
    shares = batch_shares(np.asarray(costs, dtype=np.float64), settings.max_tokens, settings.batch_size)
    if settings.over_budget == "drop":
        shares = np.where(np.asarray(costs) > settings.max_tokens, 0.0, shares)
    return float(shares.mean())
