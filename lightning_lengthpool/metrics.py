"""The figures of `cost.py` as torchmetrics metrics, equal to them on the same numbers.

Each `update` takes numbers gathered from all ranks, shape `[steps, ranks]`, so no metric needs to
communicate. Steps in which any rank's number is NaN (it could not be measured) are left out. States are
float64 sums over steps: `compute` gives the figure over all updates, `forward` (calling the metric) that of
the rows just given. Before the first complete step, and where the total is 0, a figure is NaN.

Where every rank is fed the same gathered numbers, torchmetrics' own synchronisation changes nothing (all
figures are ratios); pass `sync_on_compute=False` to save it.
"""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


class _OverRanks(Metric):
    """Sums over steps, of numbers with one column a rank."""

    full_state_update = False
    is_differentiable = False
    _sums: tuple[str, ...]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name in self._sums:
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def _complete(self, **named: Any) -> list[Tensor]:
        """Check the arguments and keep the steps in which every rank has a number."""
        values = {name: torch.as_tensor(v, dtype=torch.float64, device=self.device) for name, v in named.items()}
        shapes = {name: list(value.shape) for name, value in values.items()}
        if any(len(shape) != 2 for shape in shapes.values()) or len({tuple(s) for s in shapes.values()}) > 1:
            raise ValueError(f"Every argument needs the same shape [steps, ranks], got {shapes}.")
        for name, value in values.items():
            if (value < 0).any() or value.isinf().any():
                raise ValueError(f"{name} must be finite and not negative.")
        keep = ~torch.stack(list(values.values())).isnan().any(dim=2).any(dim=0)
        return [value[keep] for value in values.values()]


class IdleFraction(_OverRanks):
    """Share of the ranks' time spent waiting for the slowest rank, see `cost.idle_fraction`.

    Example:
        >>> metric = IdleFraction()
        >>> metric.update(torch.tensor([[1.0, 3.0], [2.0, 2.0]]))
        >>> round(metric.compute().item(), 3)
        0.2
    """

    higher_is_better = False
    _sums = ("mean_cost", "slowest_cost")
    mean_cost: Tensor
    slowest_cost: Tensor

    def update(self, costs: Tensor) -> None:
        """Add steps.

        Args:
            costs: Padded tokens or compute seconds, shape `[steps, ranks]`.

        Raises:
            ValueError: If the shape is another, or a cost is negative or infinite.
        """
        (costs,) = self._complete(costs=costs)
        if len(costs):
            self.mean_cost += costs.mean(dim=1).sum()
            self.slowest_cost += costs.amax(dim=1).sum()

    def compute(self) -> Tensor:
        """The idle fraction, a float64 scalar."""
        return 1.0 - self.mean_cost / self.slowest_cost


class PaddingFraction(_OverRanks):
    """Share of the tokens trained on that is padding, see `cost.padding_fraction`.

    Example:
        >>> metric = PaddingFraction()
        >>> metric.update(tokens=torch.tensor([[12.0, 8.0]]), padded=torch.tensor([[15.0, 10.0]]))
        >>> round(metric.compute().item(), 3)
        0.2
    """

    higher_is_better = False
    _sums = ("tokens", "padded_tokens")
    tokens: Tensor
    padded_tokens: Tensor

    def update(self, tokens: Tensor, padded: Tensor) -> None:
        """Add steps.

        Args:
            tokens: Real tokens, shape `[steps, ranks]`.
            padded: Tokens with padding, the same shape.

        Raises:
            ValueError: If the shapes are others, or a number is negative or infinite.
        """
        tokens, padded = self._complete(tokens=tokens, padded=padded)
        self.tokens += tokens.sum()
        self.padded_tokens += padded.sum()

    def compute(self) -> Tensor:
        """The padding fraction, a float64 scalar."""
        return 1.0 - self.tokens / self.padded_tokens


class UsefulFraction(_OverRanks):
    """Share of the ranks' capacity that real tokens fill, see `cost.useful_fraction`.

    Example:
        >>> metric = UsefulFraction()
        >>> metric.update(tokens=torch.tensor([[6.0, 8.0]]), padded=torch.tensor([[8.0, 10.0]]))
        >>> round(metric.compute().item(), 3)
        0.7
    """

    higher_is_better = True
    _sums = ("tokens", "capacity")
    tokens: Tensor
    capacity: Tensor

    def update(self, tokens: Tensor, padded: Tensor) -> None:
        """Add steps; arguments and errors as for `PaddingFraction.update`."""
        tokens, padded = self._complete(tokens=tokens, padded=padded)
        if len(padded):
            self.tokens += tokens.sum()
            self.capacity += padded.shape[1] * padded.amax(dim=1).sum()

    def compute(self) -> Tensor:
        """The useful fraction, a float64 scalar."""
        return self.tokens / self.capacity


class RankSpread(_OverRanks):
    """Spread of a number over the ranks at each step: mean, min, max and population variance, averaged over
    steps.

    Example:
        >>> metric = RankSpread()
        >>> metric.update(torch.tensor([[1.0, 3.0], [2.0, 2.0]]))
        >>> {name: value.item() for name, value in metric.compute().items()}
        {'mean': 2.0, 'min': 1.5, 'max': 2.5, 'variance': 0.5}
    """

    _sums = ("steps", "mean_sum", "min_sum", "max_sum", "variance_sum")
    steps: Tensor
    mean_sum: Tensor
    min_sum: Tensor
    max_sum: Tensor
    variance_sum: Tensor

    def update(self, values: Tensor) -> None:
        """Add steps.

        Args:
            values: Any number not negative, shape `[steps, ranks]`.

        Raises:
            ValueError: If the shape is another, or a value is negative or infinite.
        """
        (values,) = self._complete(values=values)
        if len(values):
            self.steps += len(values)
            self.mean_sum += values.mean(dim=1).sum()
            self.min_sum += values.amin(dim=1).sum()
            self.max_sum += values.amax(dim=1).sum()
            self.variance_sum += values.var(dim=1, correction=0).sum()

    def compute(self) -> dict[str, Tensor]:
        """The four averages over steps, float64 scalars under `mean`, `min`, `max` and `variance`."""
        return {name: getattr(self, f"{name}_sum") / self.steps for name in ("mean", "min", "max", "variance")}
