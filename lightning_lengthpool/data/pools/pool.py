"""What a pool is set to, and what it hands out: the one interface of `flush_pool` and `stream_pool`."""

import math
import numbers
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from megatron.energon import SavableDataset
from megatron.energon.wrappers.base import BaseWrapperDataset

from lightning_lengthpool.cost_models import CostModel, sample_cost
from lightning_lengthpool.ordering.length import LengthFn, sample_length
from lightning_lengthpool.ordering.order import get_policy
from lightning_lengthpool.ordering.sorted_pool import Reference

if TYPE_CHECKING:
    from lightning_lengthpool.data.pools.arrivals import Arrivals

OVER_BUDGET = ("error", "alone", "drop")
ClassFn = Callable[[Any], str]


class Size(NamedTuple):
    """A sample's length in tokens, and its cost."""

    length: float
    cost: float


class Entry(NamedTuple):
    """A sample that has left the pool, and its length."""

    sample: Any
    length: float


class Slot(NamedTuple):
    """What one batch is made of.

    Attributes:
        entries: The samples that are there.
        costs: The costs that belong there: also of samples that have left out of their turn.
        kind: The samples' class, None without classes.
        meant: The class that the slot is meant for on all ranks, see `stream.Block`.
    """

    entries: list[Entry]
    costs: list[float]
    kind: Hashable = None
    meant: Hashable = None

    @property
    def missed(self) -> bool:
        """Whether the samples are of another class than the slot is meant for."""
        return self.kind != self.meant


class Pool(Protocol):
    """One worker's pool: samples come in, and leave by slots.

    Attributes:
        snapshot: The last one, plain, None before the first; never changed in place.
        warning: Something that the user should know; whoever passes it on sets it to None.
        arrivals: What has come in.
        differences: What `start` has found to be otherwise than it was saved, a sentence each.
    """

    snapshot: dict[str, Any] | None
    warning: str | None
    arrivals: "Arrivals"
    differences: list[str]

    def reset(self) -> None:
        """Forget everything; the dataset is left as it is."""

    def start(self, *, lose_pool: bool = False) -> Iterator[Any]:
        """Start to read the data, after a `restore` with the samples brought back that were held.

        Args:
            lose_pool: Go on without the samples that would have to be re-read by their keys.

        Returns:
            The upstream for the other methods.
        """

    def take_slot(self, upstream: Iterator[Any]) -> Slot | None:
        """Hand out the next slot; None at the end of a finite stream."""

    def take_nearest(self, upstream: Iterator[Any], slot: Slot) -> Slot:
        """Return the slot with other samples, as near as there are to its costs; none only if there are no more."""

    def place(self) -> dict[str, Any]:
        """What has changed since the snapshot, plain."""

    def restore(self, snapshot: dict[str, Any] | None, place: dict[str, Any]) -> None:
        """Go on from a place; the samples are re-read by `start`. Without a snapshot that is the beginning."""


def rewind(dataset: SavableDataset) -> None:
    """Let a stream begin anew."""
    dataset.reset_state_deep() if isinstance(dataset, BaseWrapperDataset) else dataset.reset_state_own()


@dataclass(frozen=True)
class PoolWarmup:
    """The first pools are small, so that the first batch comes soon; each is larger than the one before.

    Args:
        initial: Samples of the first pool, at least 1 and at most pool_size; with policy 'blocks' at least batch_size.
        flushes: Pools until one has pool_size samples: pool `i` has `initial + (pool_size - initial) * i // flushes`.

    Raises:
        ValueError: If a number is no integer or less than 1.
    """

    initial: int
    flushes: int

    def __post_init__(self) -> None:
        for name in ("initial", "flushes"):
            value = check_integer(f"pool_warmup.{name}", getattr(self, name), minimum=1)
            object.__setattr__(self, name, value)


@dataclass(frozen=True)
class PoolSettings:
    """What makes a pool: the same on all ranks and workers.

    Args:
        pool_size: Samples that one worker of one rank holds to choose from; 0 switches the pool off.
        policy: How samples leave the pool, a name from `order.POLICIES`.
        seed: Seed of the random sequence that all ranks share.
        length_fn: Takes an encoded sample and gives its length; None takes `total_len`, else `len(tokens)`,
            else `len(input_ids)`.
        cost: What samples cost, by which they are sorted; None takes the length, and a batch then costs its padded
            tokens.
        warmup: How the first pools grow; None for pools of one size. Only for policies that hand out whole pools.
        max_tokens: What a batch's samples may cost together, None for `batch_size` samples a batch. A sample that costs
            nothing counts one token. Like all that follows only for policy 'stream'.
        over_budget: What happens to a sample that alone costs more: 'error', 'alone' (a batch of its own) or 'drop'.
        reference: Costs that all ranks aim at; None for none.
        class_fn: Takes an encoded sample and names its class; a batch then holds one class. None for no classes.
        class_shares: Share of the batches that each class has, adding up to 1; with `class_fn`.

    Raises:
        ValueError: If a setting is out of its range or goes with another policy; the message names it, its value and
            what was expected.
    """

    pool_size: int = 1000
    policy: str = "pool"
    seed: int = 42
    length_fn: LengthFn | None = None
    cost: CostModel | None = None
    warmup: PoolWarmup | None = None
    max_tokens: float | None = None
    over_budget: str = "error"
    reference: Reference | None = None
    class_fn: ClassFn | None = None
    class_shares: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        pool_size = check_integer("pool_size", self.pool_size, minimum=0, hint="0 switches the pool off")
        object.__setattr__(self, "pool_size", pool_size)  # a NumPy integer is none for `random`
        object.__setattr__(self, "seed", check_integer("seed", self.seed))
        get_policy(self.policy)
        for name, takes in (("length_fn", "gives its length"), ("class_fn", "names its class")):
            function = getattr(self, name)
            if function is not None and not callable(function):
                expected = f"a callable that takes an encoded sample and {takes}"
                raise ValueError(f"{name} is {function!r}, expected {expected}")
        if self.cost is not None and not isinstance(self.cost, CostModel):
            raise ValueError(f"cost is {self.cost!r}, expected a cost model, e.g. cost_models.QuadraticCost")
        if self.max_tokens is not None:
            check_positive("max_tokens", self.max_tokens)
        if self.over_budget not in OVER_BUDGET:
            raise ValueError(f"over_budget is {self.over_budget!r}, expected one of: {', '.join(OVER_BUDGET)}")
        require_stream(
            self.policy,
            self.pool_size,
            max_tokens=self.max_tokens,
            reference_lengths=self.reference,
            class_fn=self.class_fn,
            class_shares=self.class_shares,
        )
        if (self.class_fn is None) != (self.class_shares is None):
            raise ValueError("class_fn and class_shares go together: set both, or neither")
        if self.class_shares is not None:
            _check_shares(self.class_shares)
            # in one order on all ranks, whatever the order in which they were written down
            object.__setattr__(self, "class_shares", dict(sorted(self.class_shares.items())))
        if self.warmup is not None and not isinstance(self.warmup, PoolWarmup):
            raise ValueError(f"pool_warmup is {self.warmup!r}, expected PoolWarmup(initial=..., flushes=...)")
        if self.over_budget != "error" and self.max_tokens is None:
            raise ValueError(f"over_budget is {self.over_budget!r}, but there is no max_tokens to be over. Set it.")
        if self.warmup is not None and (self.policy not in ("pool", "blocks") or self.warmup.initial > self.pool_size):
            raise ValueError(
                f"pool_warmup is {self.warmup} with policy {self.policy!r} and pool_size {self.pool_size}: it is for "
                "policies 'pool' and 'blocks', which hand out whole pools, and initial is at most pool_size"
            )

    def check_batch_size(self, batch_size: int | None) -> None:
        """Check that batches of this size can be had from such a pool.

        Args:
            batch_size: Samples of a batch; with `max_tokens` at most; None for no number of its own.

        Raises:
            ValueError: If not.
        """
        if batch_size is not None:
            check_integer("batch_size", batch_size, minimum=1)
        if self.policy not in ("blocks", "stream") or not self.pool_size or batch_size is None:
            return
        least = {"pool_size": self.pool_size}
        if self.warmup is not None:
            least["pool_warmup.initial"] = self.warmup.initial
        for name, value in least.items():
            if value < batch_size:
                raise ValueError(
                    f"{name} is {value}, less than batch_size {batch_size}, and with policy {self.policy!r} a batch "
                    "comes from one pool. 10 to 100 times batch_size is a good start."
                )

    def measure(self, sample: Any) -> Size:
        """A sample's length and cost.

        Raises:
            ValueError: If one of them is not a finite number of at least 0; the message names the sample's key.
        """
        length = self.length_of(sample)
        return Size(length, self.cost_of(sample, length))

    def length_of(self, sample: Any) -> float:
        """A sample's length in tokens, see `length.sample_length`."""
        return sample_length(sample, self.length_fn)

    def cost_of(self, sample: Any, length: float) -> float:
        """What a sample of a known length costs, see `cost_models.sample_cost`."""
        return length if self.cost is None else sample_cost(sample, length, self.cost)

    def __str__(self) -> str:
        set_to = {name: value for name, value in vars(self).items() if value is not None and name != "reference"}
        return f"PoolSettings({', '.join(f'{name}={value!r}' for name, value in set_to.items())})"


def require_stream(policy: str, pool_size: int, **options: Any) -> None:
    """Raise a `ValueError` that names an option which is set and needs policy 'stream', if it is another one."""
    for name, value in options.items():
        if value is not None and (policy != "stream" or not pool_size):
            shown = "set" if isinstance(value, Reference) else repr(value)
            why = (
                "batches of as many samples as fit would be of other numbers on each rank, and a pool that is handed "
                "out as a whole would take unequal numbers of steps"
                if name == "max_tokens"
                else "only there a batch is chosen anew at each step"
            )
            raise ValueError(
                f"{name} is {shown} with policy {policy!r} and pool_size {pool_size}, expected policy 'stream' with a "
                f"pool: {why}. Set policy to 'stream', or leave {name} out."
            )


def check_integer(name: str, value: Any, *, minimum: int | None = None, hint: str = "") -> int:
    """Return `value` as an int; raise a `ValueError` that names the setting if it is no integer or below `minimum`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or (minimum is not None and value < minimum):
        bound = "" if minimum is None else f" of at least {minimum}"
        raise ValueError(f"{name} is {value!r}, expected an integer{bound}" + (f" ({hint})" if hint else ""))
    return int(value)


def check_positive(name: str, value: Any) -> None:
    """Raise a `ValueError` that names the setting if it is no finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 < value < math.inf:
        raise ValueError(f"{name} is {value!r}, expected a finite number above 0")


def _check_shares(shares: Mapping[str, float]) -> None:
    if not isinstance(shares, Mapping) or not shares or not all(isinstance(name, str) for name in shares):
        raise ValueError(f"class_shares is {shares!r}, expected the share of each class by its name")
    for name, share in shares.items():
        check_positive(f"class_shares[{name!r}]", share)
    if abs(math.fsum(shares.values()) - 1) > 1e-6:
        raise ValueError(
            f"class_shares is {dict(shares)}, which adds up to {math.fsum(shares.values()):g}: the shares of all "
            "batches must add up to 1"
        )
