"""What a cost model is: the interface that `cost_models` and users' own models implement."""

import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from lightning_lengthpool.ordering.length import get_field


class CostModel(ABC):
    """What a sample costs, and a batch of samples.

    To write your own, implement `of_length`, or `cost` as well if the length is not enough. Keep settings as plain
    attributes: they make up `repr`, equality and the fingerprint. The same settings must give the same costs on every
    rank, or the ranks draw different lengths.
    """

    per_batch: float = 0.0
    """What a batch costs beyond its samples, in tokens."""

    @property
    def is_padded(self) -> bool:
        """Whether a batch costs its samples times the most expensive of them (padding); else the sum of their costs."""
        return True

    @abstractmethod
    def of_length(self, length: float) -> float:
        """The cost of a sample of `length` tokens.

        Raises:
            ValueError: If the model needs to see more of a sample than its length.
        """

    def cost(self, sample: Any, length: float) -> float:
        """The cost of a sample.

        Args:
            sample: An encoded sample: an object with attributes, or a dict.
            length: Its length in tokens, see `length.sample_length`.

        Raises:
            ValueError: If the sample lacks what the model looks at; the message names the sample's key.
        """
        return self.of_length(length)

    def of_batch(self, costs: Sequence[float]) -> float:
        """The cost of a batch of samples with these costs; 0 for no samples."""
        if not costs:
            return 0.0
        return self.per_batch + (len(costs) * max(costs) if self.is_padded else math.fsum(costs))

    def fingerprint(self) -> str:
        """Class and settings as a text, the same on any rank or machine: models with equal ones give equal costs."""
        return f"{type(self).__module__}.{self!r}"

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__qualname__}({settings})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CostModel) and self.fingerprint() == other.fingerprint()

    def __hash__(self) -> int:
        return hash(self.fingerprint())


def sample_cost(sample: Any, length: float, model: CostModel) -> float:
    """Return a sample's cost, checked: the way to ask a model that somebody else wrote.

    Raises `ValueError`, naming the sample's key, if the cost is no number, not finite or negative.
    """
    value: Any = model.cost(sample, length)
    cost = as_float(value)
    if not 0 <= cost < math.inf:
        raise ValueError(
            f"sample {get_field(sample, '__key__')!r} costs {value!r} by {model!r}, expected a finite number of at "
            "least 0"
        )
    return cost


def as_float(value: Any) -> float:
    """A number as a float, NaN if it is none."""
    return float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan
