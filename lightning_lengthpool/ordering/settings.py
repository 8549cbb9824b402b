"""What makes a pool: one frozen dataclass, in which every rule about its settings stands once.

The data module builds it from its flat signature; pools, simulation and advisor take it as it is.
"""

import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightning_lengthpool.ordering.cost_model import CostModel, as_float, sample_cost
from lightning_lengthpool.ordering.length import LengthFn, sample_length
from lightning_lengthpool.ordering.policies import POLICIES
from lightning_lengthpool.ordering.reference_costs import ReferenceCosts

OVER_BUDGET = ("error", "alone", "drop")
STREAM_SETTINGS = ("reference_lengths", "max_tokens", "class_shares", "class_fn")
"""What goes with policy 'stream' alone."""
GOOD_SIZE = "10 to 100 times batch_size is a good start."
ClassFn = Callable[[Any], str]


class Size(NamedTuple):
    """A sample's length in tokens, and its cost."""

    length: float
    cost: float


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
    """What makes a pool and its batches: the same on all ranks and workers.

    Args:
        batch_size: Samples of a batch; with `max_tokens` at most. None only with `max_tokens`, or where a sample is a
            batch (packs).
        pool_size: Samples that one worker of one rank holds to choose from; 0 switches the pool off.
        policy: How samples leave the pool, one of `POLICIES`.
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
        class_shares: Share of the batches that each class has, adding up to 1; needed with `class_fn`, which
            names classes by texts; where no function is asked, as in a simulation, numbers do as well.

    Raises:
        ValueError: If a setting is out of its range or goes with another policy; the message names it, its value and
            what was expected.
    """

    batch_size: int | None = 1
    pool_size: int = 1000
    policy: str = "pool"
    seed: int = 42
    length_fn: LengthFn | None = None
    cost: CostModel | None = None
    warmup: PoolWarmup | None = None
    max_tokens: float | None = None
    over_budget: str = "error"
    reference: ReferenceCosts | None = None
    class_fn: ClassFn | None = None
    class_shares: Mapping[Any, float] | None = None

    def __post_init__(self) -> None:
        # a NumPy integer is none for `random`
        pool_size = check_integer("pool_size", self.pool_size, minimum=0, hint="0 switches the pool off")
        object.__setattr__(self, "pool_size", pool_size)
        object.__setattr__(self, "seed", check_integer("seed", self.seed))
        if self.batch_size is not None:
            object.__setattr__(self, "batch_size", check_integer("batch_size", self.batch_size, minimum=1))
        check_one_of("policy", self.policy, POLICIES)
        check_one_of("over_budget", self.over_budget, OVER_BUDGET)
        for name, takes in (("length_fn", "gives its length"), ("class_fn", "names its class")):
            function = getattr(self, name)
            if function is not None and not callable(function):
                expected = f"a callable that takes an encoded sample and {takes}"
                raise ValueError(f"{name} is {function!r}, expected {expected}")
        if self.cost is not None and not isinstance(self.cost, CostModel):
            raise ValueError(f"cost is {self.cost!r}, expected a cost model, e.g. cost_models.QuadraticCost")
        if self.max_tokens is not None:
            check_positive("max_tokens", self.max_tokens)
        for name in STREAM_SETTINGS:
            value = self.reference if name == "reference_lengths" else getattr(self, name)
            if value is not None:
                require_stream(self.policy, self.pool_size, name, "set" if value is self.reference else repr(value))
        if self.over_budget != "error" and self.max_tokens is None:
            raise ValueError(f"over_budget is {self.over_budget!r}, but there is no max_tokens to be over. Set it.")
        if self.class_fn is not None and self.class_shares is None:
            raise ValueError("class_fn and class_shares go together: set both, or neither")
        if self.class_shares is not None:
            _check_shares(self.class_shares, str if self.class_fn is not None else (str, int))
            # in one order on all ranks, whatever the order in which they were written down
            object.__setattr__(self, "class_shares", dict(sorted(self.class_shares.items(), key=lambda item: item[0])))
        self._check_warmup()
        self._check_batch_comes_from_one_pool()

    def __hash__(self) -> int:
        return hash((self.batch_size, self.pool_size, self.policy, self.seed, self.max_tokens))

    # ---- what follows from the settings

    @property
    def is_off(self) -> bool:
        """Whether samples leave as they come."""
        return self.policy == "none" or not self.pool_size

    @property
    def is_stream(self) -> bool:
        """Whether the pool stays full, and each slot takes a block of it."""
        return self.policy == "stream" and not self.is_off

    @property
    def is_handed_out_whole(self) -> bool:
        """Whether all of a pool leaves before the next one does."""
        return not self.is_off and not self.is_stream

    @property
    def is_padded(self) -> bool:
        """Whether a batch costs its samples times the most expensive of them; else the sum of their costs."""
        return self.cost is None or self.cost.is_padded

    @property
    def slot_size(self) -> int:
        """Samples of a slot: `batch_size`, 1 where a sample is a batch; with `max_tokens` there is no such number."""
        return self.batch_size or 1

    @property
    def capacity(self) -> int:
        """Samples of a full pool: `pool_size`, rounded down to whole batches where a batch comes from one pool.

        Example:
            >>> PoolSettings(batch_size=3, pool_size=10, policy="blocks").capacity
            9
        """
        if self.is_off:
            return 1
        return self.pool_size // self._granularity * self._granularity

    def size_of_pool(self, pool: int) -> int:
        """Samples of one of the pools that leave as a whole, by its 0-based number in its worker's stream.

        Example:
            >>> settings = PoolSettings(pool_size=10, warmup=PoolWarmup(initial=4, flushes=2))
            >>> [settings.size_of_pool(pool) for pool in range(4)]
            [4, 7, 10, 10]
        """
        warmup = self.warmup
        if self.is_off or warmup is None or pool >= warmup.flushes:
            return self.capacity
        size = warmup.initial + (self.pool_size - warmup.initial) * pool // warmup.flushes
        return size // self._granularity * self._granularity

    def samples_of_pools(self, pools: range) -> int:
        """Samples of several such pools in a row."""
        growing = 0 if self.warmup is None else self.warmup.flushes
        first = range(pools.start, max(pools.start, min(pools.stop, growing)))
        return sum(map(self.size_of_pool, first)) + (len(pools) - len(first)) * self.capacity

    @property
    def _granularity(self) -> int:
        """Of what number of samples a pool holds a multiple."""
        needs_whole_batches = self.policy == "blocks" or (self.is_stream and self.max_tokens is None)
        return self.slot_size if needs_whole_batches else 1

    # ---- what a sample is to the pool

    def measure(self, sample: Any) -> Size:
        """A sample's length and cost, checked."""
        length = self.length_of(sample)
        return Size(length, self.cost_of(sample, length))

    def length_of(self, sample: Any) -> float:
        """A sample's length in tokens, see `length.sample_length`."""
        return sample_length(sample, self.length_fn)

    def cost_of(self, sample: Any, length: float) -> float:
        """What a sample of a known length costs, see `cost_model.sample_cost`."""
        return length if self.cost is None else sample_cost(sample, length, self.cost)

    def identity(self) -> dict[str, Any]:
        """What an iterator state depends on, plain: with other values it would lead to other batches.

        Functions are told by their names; what stands in `reference` is not told.
        """
        cost, warmup, shares, budget = self.cost, self.warmup, self.class_shares, self.max_tokens
        return {
            "batch_size": self.batch_size,
            "pool_size": self.pool_size,
            "policy": self.policy,
            "seed": self.seed,
            "length_fn": _function_name(self.length_fn),
            "class_fn": _function_name(self.class_fn),
            "cost": None if cost is None else cost.fingerprint(),
            "pool_warmup": None if warmup is None else str(warmup),
            "max_tokens": None if budget is None else float(budget),
            "over_budget": None if budget is None else self.over_budget,
            "class_shares": None if shares is None else {name: float(share) for name, share in shares.items()},
        }

    def __str__(self) -> str:
        set_to = {name: value for name, value in vars(self).items() if value is not None and name != "reference"}
        shown = (f"{name}={getattr(value, '__qualname__', repr(value))}" for name, value in set_to.items())
        return f"PoolSettings({', '.join(shown)})"

    # ---- which setting goes with which

    def _check_warmup(self) -> None:
        if self.warmup is None:
            return
        if not isinstance(self.warmup, PoolWarmup):
            raise ValueError(f"pool_warmup is {self.warmup!r}, expected PoolWarmup(initial=..., flushes=...)")
        if not self.is_handed_out_whole or self.warmup.initial > self.pool_size:
            raise ValueError(
                f"pool_warmup is {self.warmup} with policy {self.policy!r} and pool_size {self.pool_size}: it is for "
                "policies 'pool' and 'blocks', which hand out whole pools, and initial is at most pool_size"
            )

    def _check_batch_comes_from_one_pool(self) -> None:
        if self.is_off or self.policy not in ("blocks", "stream") or self.batch_size is None:
            return
        initial = self.pool_size if self.warmup is None else self.warmup.initial
        for name, value in (("pool_size", self.pool_size), ("pool_warmup.initial", initial)):
            if value < self.batch_size:
                raise ValueError(
                    f"{name} is {value}, less than batch_size {self.batch_size}, and with policy {self.policy!r} a "
                    f"batch comes from one pool. {GOOD_SIZE}"
                )


def unfit_settings(policy: str, settings: Mapping[str, Any]) -> list[str]:
    """The names of the data module's settings that are set and do not go with a policy, whatever its pool."""
    unfit = [] if policy == "stream" else list(STREAM_SETTINGS)
    unfit += ["pool_warmup"] if policy in ("none", "stream") else []
    return [name for name in unfit if settings.get(name) is not None]


def require_stream(policy: str, pool_size: int, name: str, shown: str = "set") -> None:
    """Raise a `ValueError` that names an option which needs policy 'stream', if the policy is another one."""
    if policy == "stream" and pool_size:
        return
    why = (
        "batches of as many samples as fit would be of other numbers on each rank, and a pool that is handed out as a "
        "whole would take unequal numbers of steps"
        if name == "max_tokens"
        else "only there a batch is chosen anew at each step"
    )
    raise ValueError(
        f"{name} is {shown} with policy {policy!r} and pool_size {pool_size}, expected policy 'stream' with a pool: "
        f"{why}. Set policy to 'stream', or leave {name} out."
    )


def check_integer(name: str, value: Any, *, minimum: int | None = None, hint: str = "") -> int:
    """Return `value` as an int; raise a `ValueError` if it is no integer or below `minimum`."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or (minimum is not None and value < minimum):
        bound = "" if minimum is None else f" of at least {minimum}"
        raise ValueError(f"{name} is {value!r}, expected an integer{bound}" + (f" ({hint})" if hint else ""))
    return int(value)


def check_positive(name: str, value: Any) -> None:
    """Raise a `ValueError` if `value` is no finite number above 0."""
    if not 0 < as_float(value) < math.inf:
        raise ValueError(f"{name} is {value!r}, expected a finite number above 0")


def check_one_of(name: str, value: Any, expected: tuple[str, ...]) -> None:
    """Raise a `ValueError` if `value` is not one of those expected."""
    if value not in expected:
        raise ValueError(f"{name} is {value!r}, expected one of: {', '.join(expected)}")


def _check_shares(shares: Mapping[Any, float], names: Any) -> None:
    if not isinstance(shares, Mapping) or not shares or not all(isinstance(name, names) for name in shares):
        raise ValueError(f"class_shares is {shares!r}, expected the share of each class by its name")
    for name, share in shares.items():
        check_positive(f"class_shares[{name!r}]", share)
    if abs(math.fsum(shares.values()) - 1) > 1e-6:
        raise ValueError(
            f"class_shares is {dict(shares)}, which adds up to {math.fsum(shares.values()):g}: the shares of all "
            "batches must add up to 1"
        )


def _function_name(function: Callable[..., Any] | None) -> str | None:
    return None if function is None else getattr(function, "__qualname__", type(function).__qualname__)
