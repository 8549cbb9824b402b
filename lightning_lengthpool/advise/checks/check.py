"""What a check looks at, and how it says what came of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from lightning_lengthpool.advise.advice import Check, Cost, Plan, Relation
from lightning_lengthpool.runs.distribution import Difference
from lightning_lengthpool.runs.formatting import ranks_named
from lightning_lengthpool.simulation.predict import Prediction

if TYPE_CHECKING:
    from lightning_lengthpool.advise.scan.length_scan import LengthScan


@dataclass(frozen=True)
class CheckContext:
    """What the checks look at."""

    scan: "LengthScan"
    plan: Plan
    today: Prediction
    baselines: Sequence[Prediction]  # without a pool, of all world sizes
    cost: Cost  # what today's settings take
    relation: Relation
    difference: Difference | None  # between the ranks; None if that cannot be told
    machine_bytes: int | None  # memory of a machine


class Outcome(NamedTuple):
    """See `advice.Check`."""

    result: Literal["passed", "found", "not made"]
    sentence: str
    action: str = ""


Make = Callable[[CheckContext], Outcome]


def passed(sentence: str = "") -> Outcome:
    """Nothing to fix."""
    return Outcome("passed", sentence)


def found(sentence: str, action: str) -> Outcome:
    """Something to fix."""
    return Outcome("found", sentence, action)


def not_made(why: str) -> Outcome:
    """It could not be made, or does not apply."""
    return Outcome("not made", why)


class CheckList:
    """Checks in the order in which they are added."""

    def __init__(self) -> None:
        self._checks: list[tuple[str, str, Make]] = []

    def add(self, title: str) -> Callable[[Make], Make]:
        """Add the function below: its name is the check's key, `title` says what is well if it passes."""

        def register(make: Make) -> Make:
            self._checks.append((make.__name__, title, make))
            return make

        return register

    def make(self, context: CheckContext) -> tuple[Check, ...]:
        """Make them all."""
        return tuple(Check(key, title, *make(context)) for key, title, make in self._checks)


def first_ranks(numbers: Sequence[int]) -> str:
    """Ranks by their numbers, the first eight."""
    return ranks_named(numbers[:8]) + (" and others" if len(numbers) > 8 else "")
