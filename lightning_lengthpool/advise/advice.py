"""What the advisor takes and gives, as plain data: a plan of today's settings, and the parts of an advice."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lightning_lengthpool.ordering.settings import PoolSettings
from lightning_lengthpool.simulation.cases import Case
from lightning_lengthpool.simulation.choose import samples_without_pool
from lightning_lengthpool.simulation.predict import Interval, Prediction

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Plan:
    """The settings of today."""

    settings: PoolSettings
    num_workers: int = 0  # worker processes of a rank; 0 loads in the training process
    world_size: int = 1  # data-parallel ranks
    accumulate: int = 1  # micro-batches of a step
    has_reference: bool = False  # whether `reference_lengths` is set, be its file there or not
    max_length: tuple[str, int] | None = None  # name of the setting that limits a sample's length, and the limit
    workers_by_rank: tuple[int, ...] | None = None  # `num_workers` of each rank, as a run has reported them
    is_known: bool = True  # whether there is a configuration; False for a list of lengths alone
    has_pool: bool = True  # False for lengths alone without a pool; the settings then say how one would be
    ranks_per_node: int | None = None  # ranks that share a machine's memory; None if that is not known
    lengths_file: str = "lengths.csv"  # where the lengths that were read are written to, for `reference_lengths`

    @property
    def is_off(self) -> bool:
        """Whether there is no pool today."""
        return self.settings.is_off or not self.has_pool

    @property
    def pools_per_rank(self) -> int:
        """Pools of a rank: one for each worker, or one in the training process."""
        return max(1, self.num_workers)

    @property
    def ranks_on_node(self) -> int:
        """Ranks that share a machine's memory; where that is not known as many as there are, up to 8."""
        return self.ranks_per_node or min(self.world_size, 8)

    @property
    def needs_stream(self) -> bool:
        """Whether other settings go with policy 'stream' alone."""
        settings = self.settings
        return settings.max_tokens is not None or self.has_reference or settings.class_shares is not None

    @property
    def case(self) -> Case:
        """The settings as a case."""
        return self.with_pool(self.settings.policy, self.settings.pool_size)

    def with_pool(self, policy: str, pool_size: int) -> Case:
        """The same with another pool."""
        # pool_warmup goes with some policies only, and predictions are without it
        settings = replace(self.settings, policy=policy, pool_size=pool_size, warmup=None)
        return Case(settings, self.world_size, self.accumulate, self.has_reference)

    def without_pool(self, costs: Array) -> Case:
        """The same without a pool: batches of as many samples; with a token budget of as many as always fit."""
        now = self.settings
        samples = samples_without_pool(costs, now.batch_size, now.max_tokens)
        settings = PoolSettings(samples, 0, "none", now.seed, now.length_fn, now.cost)
        return Case(settings, self.world_size, self.accumulate)


@dataclass(frozen=True)
class Outliers:
    """The longest samples, and what they do where the ranks have no pool; see `facts.outliers`."""

    share: float  # of the samples that are meant
    above: float  # they are longer than this, in tokens
    of_steps: float  # share of the steps whose longest sample is one of them
    of_waiting: float  # share of the waiting that would go without them; negative if there would be more
    idle: float  # the idle fraction with them
    idle_without: float
    world_size: int  # the ranks to which this applies


@dataclass(frozen=True)
class Distribution:
    """How the lengths are distributed, in tokens."""

    count: int  # samples that were read
    mean: float
    cv: float  # coefficient of variation: standard deviation / mean
    percentiles: Mapping[int, float]  # 5, 25, 50, 75, 90, 95 and 99, and 100 for the longest
    edges: Array  # of the histogram's bins, [bins + 1]
    counts: NDArray[np.int64]  # samples in each bin, [bins]; the upper edge belongs to the last bin alone
    variance: Literal["no", "low", "moderate", "high"]  # in words
    outliers: tuple[Outliers, ...]  # the longest 1 % and 5 %; empty if there are too few, or only one rank
    dominates: bool  # whether the longest 5 % cause more than half of the waiting
    drawn_from: int | None = None  # how many lengths these were drawn from at random; None if all are here


@dataclass(frozen=True)
class Cost:
    """What a setting takes on a rank, in bytes and seconds; None where it was not measured."""

    case: Case
    pool_samples: int  # that a worker's pool holds, of 'pool' and 'blocks' with those that come in
    worker_bytes: float | None  # of these, and of the costs that 'stream' remembers
    rank_bytes: float | None  # the same of all workers of a rank
    node_bytes: float | None  # the same of all ranks of a machine
    first_batch_seconds: float | None  # until the first pool is full
    stall_seconds: float  # how long training stops for a refill: 0, for one sample comes in for each that leaves
    batch_seconds: float | None  # a rank's workers' time for a batch: a step that is shorter waits for data
    restore_seconds: float | None  # to bring back a pool from a checkpoint, at most


@dataclass(frozen=True)
class Relation:
    """How pool_size, batch_size and num_workers go together."""

    batch_samples: float  # samples of a batch; with a token budget on average
    batches_per_pool: float  # that a full pool holds; 0 without one
    rank_samples: int  # that the pools of all workers of a rank hold together
    rank_share: int | None  # samples of the data set that fall to a rank, the fewest of any; None if not known
    sentences: tuple[str, ...]


@dataclass(frozen=True)
class Causes:
    """Where the time of a measured run went; shares of the ranks' time, see `causes.Split`."""

    name: str
    steps: int
    by: str
    idle: float
    lengths: float
    slow_rank: float
    data: float
    rest: float


@dataclass(frozen=True)
class Bottleneck:
    """Whether synchronisation can be the bottleneck: how many times as fast steps are at most, if ..."""

    idle: Interval  # today's idle fraction, predicted
    floor: float  # the idle fraction that no pool can go below, about
    speed_up_any: float  # ... nobody ever waits
    speed_up_pool: float  # ... ranks wait as little as any pool can make them
    speed_up_useful: float  # ... there is no padding either
    run: Causes | None  # the causes in a measured run
    sentences: tuple[str, ...]


@dataclass(frozen=True)
class Check:
    """Something that a person would forget to look at."""

    key: str  # its name, which stays the same
    title: str  # what is well if it passes
    result: Literal["passed", "found", "not made"]  # 'found' is something to fix
    sentence: str  # what was found, or why the check was not made; may be empty if it passed
    action: str = ""  # what to do; empty unless something was found


Verdict = Literal["change", "keep", "no pool"]


@dataclass(frozen=True)
class Recommendation:
    """What to do."""

    verdict: Verdict  # change the settings, keep them, or use no pool, which is not worth it here
    case: Case  # the recommended setting
    sentence: str
    reasons: tuple[str, ...]
    not_best: str  # why it is not the setting with the best figures of the sweep; empty if it is
    yaml: str  # lines to paste; empty if nothing changes
    prediction: Prediction  # what the case would waste


@dataclass(frozen=True)
class Advice:
    """All that the advisor says, in the order in which it is printed."""

    plan: Plan
    pool: tuple[str, ...]  # whether the pool is active and how it is set, in sentences
    distribution: Distribution
    basis: str  # what idle is predicted in: padded tokens, the costs of a cost model, or seconds by a fit of a run
    today: Prediction
    predictions: tuple[Prediction, ...]  # of all cases: today's and, for each world size, none and the sweep
    costs: tuple[Cost, ...]  # what today's and, if it is another one, the recommended setting take
    relation: Relation
    bottleneck: Bottleneck
    checks: tuple[Check, ...]  # in a fixed order
    recommendation: Recommendation

    def as_json(self) -> dict[str, Any]:
        """The same as dicts, lists, texts and numbers; what is NaN or infinite becomes None.

        The keys are the names of the attributes, of the parts as well: say
        `advice["predictions"][0]["case"]["pool_size"]` and `advice["today"]["idle"]["mean"]`. A pool's settings stand
        beside the other attributes of a plan or case.
        """
        plain: dict[str, Any] = _plain(self)
        return plain


def _plain(value: Any) -> Any:
    if isinstance(value, PoolSettings):
        names = ("policy", "pool_size", "batch_size", "max_tokens", "over_budget", "seed", "class_shares", "warmup")
        cost = None if value.cost is None else repr(value.cost)
        return {**{name: _plain(getattr(value, name)) for name in names}, "cost": cost, "is_padded": value.is_padded}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {**fields.pop("settings", {}), **fields}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return _plain(value._asdict())
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
