"""What the advisor takes and gives, as plain data: a plan of today's settings, and the parts of an advice."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lightning_lengthpool.cost_models import PackedCost
from lightning_lengthpool.ordering.settings import PoolSettings
from lightning_lengthpool.simulation.predict import Case, Interval, Prediction

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Plan:
    """The settings of today.

    Attributes:
        policy: Of the data module, as are `pool_size`, `batch_size`, `max_tokens`, `num_workers` and `seed`.
        pool_size: See `policy`.
        batch_size: See `policy`.
        max_tokens: See `policy`.
        num_workers: See `policy`; 0 loads in the training process.
        world_size: Data-parallel ranks.
        accumulate: Micro-batches of a step.
        seed: See `policy`.
        has_reference: Whether `reference_lengths` is set.
        class_shares: Share of the batches that each class has; None without classes, or for those of the lengths.
        max_length: Name of the setting that limits a sample's length, and the limit; None if none is known.
        is_active: Whether there is a pool: a LengthPoolDataModule with a policy and a pool_size above 0.
        workers_by_rank: `num_workers` of each rank, as a run has reported them; None if that is not known.
        cost: The cost model in words; None if a sample costs its length.
        is_known: Whether there is a configuration; False for a list of lengths alone.
        is_padded: Whether a batch costs its samples times the dearest of them, see `cost_models.CostModel.is_padded`.
        warmup: `(initial, flushes)` of `pool_warmup`.
        ranks_per_node: Ranks that share a machine's memory; None if that is not known.
        lengths_file: Where the surveyed lengths are written to, for `reference_lengths`.
    """

    policy: str = "none"
    pool_size: int = 0
    batch_size: int | None = 1
    max_tokens: float | None = None
    num_workers: int = 0
    world_size: int = 1
    accumulate: int = 1
    seed: int = 42
    has_reference: bool = False
    class_shares: Mapping[str, float] | None = None
    max_length: tuple[str, int] | None = None
    is_active: bool = False
    workers_by_rank: tuple[int, ...] | None = None
    cost: str | None = None
    is_known: bool = True
    is_padded: bool = True
    warmup: tuple[int, int] | None = None
    ranks_per_node: int | None = None
    lengths_file: str = "lengths.csv"

    @property
    def pools(self) -> int:
        """Pools of a rank: one for each worker, or one in the training process."""
        return max(1, self.num_workers)

    @property
    def case(self) -> Case:
        """The settings as a case; without a pool one of policy 'none'."""
        if not self.is_active:
            settings = PoolSettings(self.batch_size or 1, 0, "none", self.seed)
            return Case(settings, self.world_size, self.accumulate)
        return self.with_pool(self.policy, self.pool_size)

    def with_pool(self, policy: str, pool_size: int) -> Case:
        """The case of another pool."""
        settings = PoolSettings(
            batch_size=self.batch_size if self.max_tokens is not None else self.batch_size or 1,
            pool_size=pool_size,
            policy=policy,
            seed=self.seed,
            cost=None if self.is_padded else PackedCost(k=1.0),
            max_tokens=self.max_tokens,
            class_shares=self.class_shares if policy == "stream" else None,
        )
        return Case(settings, self.world_size, self.accumulate, self.has_reference)


@dataclass(frozen=True)
class Outliers:
    """The longest samples, and what they do where the ranks have no pool; see `advice_facts.outliers`.

    Attributes:
        share: Share of the samples that are meant.
        above: They are longer than this, in tokens.
        of_steps: Share of the steps whose longest sample is one of them.
        of_waiting: Share of the waiting that would go without them; negative if there would be more.
        idle: The idle fraction with them.
        idle_without: And without them.
        world_size: The ranks to which this applies.
    """

    share: float
    above: float
    of_steps: float
    of_waiting: float
    idle: float
    idle_without: float
    world_size: int


@dataclass(frozen=True)
class Distribution:
    """How the lengths are distributed.

    Attributes:
        count: Samples that were read.
        mean: In tokens.
        cv: Coefficient of variation: standard deviation / mean.
        percentiles: 5, 25, 50, 75, 90, 95 and 99, and 100 for the longest, in tokens.
        edges: Of the histogram's bins, `[bins + 1]`.
        counts: Samples in each bin, `[bins]`; the upper edge belongs to the last bin alone.
        variance: "no", "low", "moderate" or "high": in words.
        outliers: The longest 1 % and 5 % of the samples; empty if there are too few, or only one rank.
        dominates: Whether the longest 5 % cause more than half of the waiting.
        drawn_from: The number of lengths from which these were drawn at random; None if all are here.
    """

    count: int
    mean: float
    cv: float
    percentiles: Mapping[int, float]
    edges: Array
    counts: NDArray[np.int64]
    variance: Literal["no", "low", "moderate", "high"]
    outliers: tuple[Outliers, ...]
    dominates: bool
    drawn_from: int | None = None


@dataclass(frozen=True)
class Cost:
    """What a setting takes on a rank; None where it was not measured.

    Attributes:
        case: The setting.
        pool_samples: Samples that a worker's pool holds, of 'pool' and 'blocks' with those that come in.
        worker_bytes: Of these, and of the costs that 'stream' remembers.
        rank_bytes: The same of all workers of a rank.
        node_bytes: The same of all ranks of a machine.
        first_batch_seconds: Until the first pool is full.
        stall_seconds: How long training stops for a pool to fill after that: 0, for one sample comes in for each that
            leaves.
        batch_seconds: A rank's workers' time for a batch, as without a pool: a step that is shorter waits for data.
        restore_seconds: To bring back a pool from a checkpoint, at most.
    """

    case: Case
    pool_samples: int
    worker_bytes: float | None
    rank_bytes: float | None
    node_bytes: float | None
    first_batch_seconds: float | None
    stall_seconds: float
    batch_seconds: float | None
    restore_seconds: float | None


@dataclass(frozen=True)
class Relation:
    """How pool_size, batch_size and num_workers go together.

    Attributes:
        batch_samples: Samples of a batch; with a token budget on average.
        batches_per_pool: Batches that a full pool holds; 0 without one.
        rank_samples: Samples that the pools of all workers of a rank hold together.
        rank_share: Samples of the data set that fall to a rank, the fewest of any; None if that is not known.
        sentences: What it means.
    """

    batch_samples: float
    batches_per_pool: float
    rank_samples: int
    rank_share: int | None
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
    """Whether synchronisation can be the bottleneck.

    Attributes:
        idle: Today's idle fraction, predicted.
        floor: The idle fraction that no pool can go below, about.
        speed_up_any: How many times as fast steps are at most if nobody ever waits.
        speed_up_pool: The same if ranks wait as little as any pool can make them.
        speed_up_useful: The same if there were no padding either.
        run: The causes in a measured run; None without one.
        sentences: What it means.
    """

    idle: Interval
    floor: float
    speed_up_any: float
    speed_up_pool: float
    speed_up_useful: float
    run: Causes | None
    sentences: tuple[str, ...]


@dataclass(frozen=True)
class Check:
    """Something that a person would forget to look at.

    Attributes:
        key: Its name, which stays the same.
        title: What is well if it passes.
        result: 'passed', 'found' (something to mend) or 'not made'.
        sentence: What was found, or why the check was not made; may be empty if it passed.
        action: What to do; empty unless something was found.
    """

    key: str
    title: str
    result: Literal["passed", "found", "not made"]
    sentence: str
    action: str = ""


@dataclass(frozen=True)
class Recommendation:
    """What to do.

    Attributes:
        kind: 'change' settings, 'keep' them, or 'no pool': it is not worth it here.
        case: The recommended setting.
        sentence: In words.
        reasons: Why.
        yaml: Lines to paste; empty if nothing changes.
        prediction: What the case would waste.
    """

    kind: Literal["change", "keep", "no pool"]
    case: Case
    sentence: str
    reasons: tuple[str, ...]
    yaml: str
    prediction: Prediction


@dataclass(frozen=True)
class Advice:
    """All that the advisor says, in the order in which it is printed.

    Attributes:
        plan: The settings of today.
        pool: Whether the pool is active and how it is set, in sentences.
        distribution: How the lengths are distributed.
        basis: What idle is predicted in: padded tokens, the costs of a cost model, or seconds by a fit of a run.
        today: The prediction for today's settings.
        predictions: Those of all cases: today's and, for each world size, none and the sweep.
        costs: What today's and, if it is another one, the recommended setting take.
        relation: How pool_size, batch_size and num_workers go together.
        bottleneck: Whether synchronisation can be the bottleneck.
        checks: In a fixed order.
        recommendation: One.
    """

    plan: Plan
    pool: tuple[str, ...]
    distribution: Distribution
    basis: str
    today: Prediction
    predictions: tuple[Prediction, ...]
    costs: tuple[Cost, ...]
    relation: Relation
    bottleneck: Bottleneck
    checks: tuple[Check, ...]
    recommendation: Recommendation

    def as_json(self) -> dict[str, Any]:
        """The same as dicts, lists, texts and numbers; what is NaN or infinite becomes None.

        The keys are the names of the attributes, of the parts as well: say
        `advice["predictions"][0]["case"]["pool_size"]` and `advice["today"]["idle"]["mean"]`.
        """
        plain: dict[str, Any] = _plain(self)
        return plain


def _plain(value: Any) -> Any:
    if isinstance(value, Case):
        names = ("policy", "pool_size", "batch_size", "max_tokens", "world_size", "accumulate", "has_reference")
        return {name: _plain(getattr(value, name)) for name in names}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
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
