"""The figures of `ordering.efficiency` as torchmetrics metrics, equal to them on the same numbers.

Every process updates its metric with the numbers of its own rank: one number a step, or `[steps]` of them.
`compute` joins the ranks' numbers side by side, so that the n-th step since `reset` of each rank meets the n-th
of the others, and gives the figure over all ranks, the same on each. Nothing is communicated before that:

    class Model(LightningModule):
        def __init__(self):
            super().__init__()
            self.idle = IdleFraction()

        def training_step(self, batch, batch_idx):
            self.idle.update(batch["tokens"].numel())
            self.log("idle", self.idle, on_step=False, on_epoch=True)  # Lightning computes it and resets it

Numbers that were gathered from all ranks before have the shape `[steps, ranks]`; such a metric needs no
synchronisation: pass `sync_on_compute=False`.

A step in which the number of any rank is NaN (it could not be measured) is left out. Before the first step,
and where the total is 0, a figure is NaN. Calling a metric (`forward`) updates it and returns the figure of
the numbers just given alone; those of one rank say nothing about the others (one rank never waits).

All but `PaddingFraction` keep every step until `reset`, 8 bytes a number and about 1 kB an update: reset them
after each window. Numbers are kept in float64, whatever dtype the module around them is turned to. Numbers are
checked, for which those on a GPU are waited for: give plain numbers where you have them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors


class _OverRanks(Metric):
    """What all metrics share: how numbers come in, and that they stay float64."""

    full_state_update = False
    is_differentiable = False

    def __init__(self, **kwargs: Any) -> None:
        # with torchmetrics' cache a rank without new steps would not join the gather of those that have some
        super().__init__(**{"compute_with_cache": False} | kwargs)

    def _table(self, **named: Any) -> Tensor:
        """Check the arguments of an update; return them with shape `[arguments, steps, ranks]`."""
        values = {name: torch.as_tensor(value, dtype=torch.float64).detach() for name, value in named.items()}
        shapes = {name: list(value.shape) for name, value in values.items()}
        shape = next(iter(shapes.values()))
        if any(other != shape for other in shapes.values()) or len(shape) > 2 or shape[1:] == [0]:
            raise ValueError(f"Give numbers, or one shape throughout, [steps] or [steps, ranks]; got {shapes}.")
        for name, value in values.items():
            if (value < 0).any() or value.isinf().any():
                raise ValueError(f"{name} must be finite and not negative (NaN: not measured).")
        stacked = torch.stack([value.to(self.device) for value in values.values()])
        return stacked.reshape(len(values), -1, shape[1] if len(shape) == 2 else 1)

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> torch.nn.Module:
        # Lightning's half precision turns the metrics of a module as well, and no sum would survive that
        def to_device_only(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(to_device_only, exclude_state)


class _PerStep(_OverRanks):
    """Keeps the numbers of every step, for only once all ranks' are known is a step's slowest rank."""

    _state: str  # its name differs between the classes, else a MetricCollection may take two states for one
    _arguments = 1
    _missing = 0.0  # what a rank counts as in the steps that it lacks and others have

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state(self._state, [], dist_reduce_fx=None)

    def _add(self, **named: Any) -> None:
        getattr(self, self._state).append(self._table(**named))

    def _joined(self) -> Tensor:
        """All updates one below another, shape `[arguments, steps, ranks]`."""
        tables = getattr(self, self._state)
        if len({table.shape[2] for table in tables}) > 1:
            raise ValueError(f"Updates need one number of ranks, got {[table.shape[2] for table in tables]}.")
        if not tables:
            return torch.empty(self._arguments, 0, 1, dtype=torch.float64, device=self.device)
        return torch.cat(tables, dim=1)

    def _complete(self) -> Tensor:
        """The same, without the steps in which a number is NaN."""
        table = self._joined()
        return table[:, ~table.isnan().any(dim=2).any(dim=0)]

    def _copy_state_dict(self) -> dict[str, Any]:
        # no table is ever changed, so forward need not copy all of them at each step
        return {self._state: list(getattr(self, self._state))}

    def _sync_dist(
        self, dist_sync_fn: Callable[..., Any] = gather_all_tensors, process_group: Any | None = None
    ) -> None:
        # One table from every process, also from one without updates: torchmetrics gathers each element of a list,
        # and would wait for ever where lists differ in length.
        setattr(self, self._state, [self._joined()])
        super()._sync_dist(dist_sync_fn, process_group)
        tables = getattr(self, self._state)  # one a process
        steps = max(table.shape[1] for table in tables)
        padded = [
            torch.nn.functional.pad(table, (0, 0, 0, steps - table.shape[1]), value=self._missing) for table in tables
        ]
        setattr(self, self._state, [torch.cat(padded, dim=2)])


class IdleFraction(_PerStep):
    """Share of the ranks' time spent waiting for the slowest rank, see `efficiency.idle_fraction`.

    A rank with fewer steps than another costs 0 in those that it lacks: it waits.

    Example:
        >>> metric = IdleFraction()
        >>> metric.update(torch.tensor([[1.0, 3.0], [2.0, 2.0]]))  # two steps of two ranks
        >>> round(metric.compute().item(), 3)
        0.2
    """

    higher_is_better = False
    _state = "costs"

    def update(self, costs: Any) -> None:
        """Add steps.

        Args:
            costs: Padded tokens or compute seconds: a number, or shape `[steps]` or `[steps, ranks]`.

        Raises:
            ValueError: If the shape is another, or a cost is negative or infinite.
        """
        self._add(costs=costs)

    def compute(self) -> Tensor:
        """The idle fraction, a float64 scalar.

        Raises:
            ValueError: If the updates had different numbers of ranks.
        """
        (costs,) = self._complete()
        idle: Tensor = 1.0 - costs.mean(dim=1).sum() / costs.amax(dim=1).sum()
        return idle


class PaddingFraction(_OverRanks):
    """Share of the tokens trained on that is padding, see `efficiency.padding_fraction`.

    It is a ratio of sums, so ranks need not have the same steps, and a NaN leaves out the one number that it
    pairs with, not the step.

    Example:
        >>> metric = PaddingFraction()
        >>> metric.update(tokens=12, padded=15)
        >>> metric.update(tokens=[3, 5], padded=[5, 5])
        >>> round(metric.compute().item(), 3)
        0.2
    """

    higher_is_better = False
    sums: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("sums", torch.zeros(2, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, tokens: Any, padded: Any) -> None:
        """Add steps.

        Args:
            tokens: Real tokens: a number, or shape `[steps]` or `[steps, ranks]`.
            padded: Tokens with padding, the same shape.

        Raises:
            ValueError: If the shapes are others, or a number is negative or infinite.
        """
        pairs = self._table(tokens=tokens, padded=padded)
        self.sums += pairs[:, ~pairs.isnan().any(dim=0)].sum(dim=1)

    def compute(self) -> Tensor:
        """The padding fraction, a float64 scalar."""
        tokens, padded = self.sums
        padding: Tensor = 1.0 - tokens / padded
        return padding


class UsefulFraction(_PerStep):
    """Share of the ranks' capacity that real tokens fill, see `efficiency.useful_fraction`.

    A rank with fewer steps than another has no tokens in those that it lacks: it waits.

    Example:
        >>> metric = UsefulFraction()
        >>> metric.update(tokens=torch.tensor([[6.0, 8.0]]), padded=torch.tensor([[8.0, 10.0]]))
        >>> round(metric.compute().item(), 3)
        0.7
    """

    higher_is_better = True
    _state = "tokens_and_padded"
    _arguments = 2

    def update(self, tokens: Any, padded: Any) -> None:
        """Add steps; arguments and errors as for `PaddingFraction.update`."""
        self._add(tokens=tokens, padded=padded)

    def compute(self) -> Tensor:
        """The useful fraction, a float64 scalar.

        Raises:
            ValueError: If the updates had different numbers of ranks.
        """
        tokens, padded = self._complete()
        useful: Tensor = tokens.sum() / (padded.shape[1] * padded.amax(dim=1).sum())
        return useful


class RankSpread(_PerStep):
    """Spread of a number over the ranks at each step: mean, min, max and population variance, averaged over
    steps.

    Only the steps that all ranks have are counted. Lightning logs no metric of several figures as an object;
    compute and reset it yourself:

        def on_train_epoch_end(self):
            self.log_dict({f"tokens_{name}": value for name, value in self.spread.compute().items()})
            self.spread.reset()

    Example:
        >>> metric = RankSpread()
        >>> metric.update(torch.tensor([[1.0, 3.0], [2.0, 2.0]]))
        >>> {name: value.item() for name, value in metric.compute().items()}
        {'mean': 2.0, 'min': 1.5, 'max': 2.5, 'variance': 0.5}
    """

    _state = "values"
    _missing = torch.nan

    def update(self, values: Any) -> None:
        """Add steps.

        Args:
            values: Any number not negative, or shape `[steps]` or `[steps, ranks]`.

        Raises:
            ValueError: If the shape is another, or a value is negative or infinite.
        """
        self._add(values=values)

    def compute(self) -> dict[str, Tensor]:
        """The four averages over steps, float64 scalars under `mean`, `min`, `max` and `variance`.

        Raises:
            ValueError: If the updates had different numbers of ranks.
        """
        (values,) = self._complete()
        mean = values.mean(dim=1)
        per_step = {
            "mean": mean,
            "min": values.amin(dim=1),
            "max": values.amax(dim=1),
            "variance": (values - mean[:, None]).square().mean(dim=1),
        }
        return {name: value.mean() for name, value in per_step.items()}
