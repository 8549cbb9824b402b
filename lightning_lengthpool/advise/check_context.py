"""What the checks of an advice look at, and how they say what came of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_lengthpool.advise.advice import Check, Cost, Plan, Relation
from lightning_lengthpool.runs.distribution import Difference
from lightning_lengthpool.runs.words import ranks_named
from lightning_lengthpool.simulation.predict import Prediction

if TYPE_CHECKING:
    from lightning_lengthpool.advise.scan.scan import Survey


@dataclass(frozen=True)
class Evidence:
    """What the checks look at.

    Attributes:
        survey: The data.
        plan: Today's settings.
        today: The prediction for them.
        baselines: The predictions without a pool, of all world sizes.
        cost: What today's settings take.
        relation: How they go together.
        difference: How the ranks differ; None if that cannot be told.
        machine_bytes: Memory of a machine.
    """

    survey: "Survey"
    plan: Plan
    today: Prediction
    baselines: Sequence[Prediction]
    cost: Cost
    relation: Relation
    difference: Difference | None
    machine_bytes: int | None


def passed(key: str, title: str, sentence: str = "") -> Check:
    """A check that found nothing to mend."""
    return Check(key, title, "passed", sentence)


def found(key: str, title: str, sentence: str, action: str) -> Check:
    """A check that found something to mend."""
    return Check(key, title, "found", sentence, action)


def not_made(key: str, title: str, why: str) -> Check:
    """A check that could not be made, or does not apply."""
    return Check(key, title, "not made", why)


def some(numbers: Sequence[int]) -> str:
    """Ranks by their numbers, the first eight.

    Example:
        >>> some([3]), some([0, 1, 2, 7])
        ('rank 3', 'ranks 0-2, 7')
    """
    return ranks_named(numbers[:8]) + (" and others" if len(numbers) > 8 else "")
