"""What can be said of lengths and settings without a judgement: distribution, costs, relations, bounds."""

import math
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from lightning_lengthpool.advise.advice import Bottleneck, Causes, Cost, Distribution, Outliers, Plan, Relation, Verdict
from lightning_lengthpool.ordering.sorted_pool import HISTORY, SNAPSHOT_SAMPLES
from lightning_lengthpool.runs.formatting import number, percent, ranks
from lightning_lengthpool.runs.run import Run
from lightning_lengthpool.runs.thresholds import NAMED_FROM
from lightning_lengthpool.simulation.cases import Case
from lightning_lengthpool.simulation.choose import waste
from lightning_lengthpool.simulation.predict import Prediction

if TYPE_CHECKING:
    from lightning_lengthpool.advise.scan.length_scan import LengthScan

Array = NDArray[np.float64]

PERCENTILES = (5, 25, 50, 75, 90, 95, 99, 100)
OUTLIERS = (0.01, 0.05)
_BINS = 12
_SPREAD = 8.0  # longest of most / shortest of most, from which on a histogram is logarithmic
_FEW = 100  # lengths, of which nothing can be said about the longest 1 %
_COST_BYTES = 8  # of a cost that 'stream' remembers


def describe(lengths: Array, world_size: int, batch_size: int, drawn_from: int | None = None) -> Distribution:
    """Describe lengths.

    Args:
        lengths: One or more.
        world_size: Ranks to which the share of outliers applies.
        batch_size: Samples of a batch, for the same.
        drawn_from: How many lengths these were drawn from.
    """
    mean = float(lengths.mean())
    cv = float(lengths.std() / mean) if mean > 0 else 0.0
    edges = _edges(lengths)
    long = tuple(outliers(lengths, share, world_size, batch_size) for share in OUTLIERS)
    if len(lengths) < _FEW or world_size < 2 or cv == 0:
        long = ()
    return Distribution(
        count=len(lengths),
        mean=mean,
        cv=cv,
        percentiles={q: float(np.percentile(lengths, q)) for q in PERCENTILES},
        edges=edges,
        counts=np.histogram(lengths, edges)[0],
        variance=_variance(cv),
        outliers=long,
        dominates=bool(long) and long[-1].of_waiting > 0.5,
        drawn_from=drawn_from,
    )


def _variance(cv: float) -> Literal["no", "low", "moderate", "high"]:
    if cv < 0.05:
        return "no"
    if cv < 0.3:
        return "low"
    return "moderate" if cv < 0.7 else "high"


def expected_longest(lengths: Array, count: int) -> float:
    """The expected longest of c lengths drawn with replacement: `sum_i x_i ((i / n)**c - ((i - 1) / n)**c)`.

    Args:
        lengths: Ascending, `[n]`; x_i is the i-th.
        count: c, at least 1.
    """
    cumulative = (np.arange(len(lengths) + 1) / len(lengths)) ** count
    return float(np.diff(cumulative) @ lengths)


def outliers(lengths: Array, share: float, world_size: int, batch_size: int) -> Outliers:
    """What the longest samples do where batches are drawn at random, without a pool.

    With R ranks and B samples a batch the longest of `R B` samples sets a step's padded tokens, while a rank has the
    longest of its own B: `waiting = E max_RB - E max_B` and `idle = 1 - E max_B / E max_RB`. A step's longest sample is
    one of the longest share s with probability `1 - (1 - s)**(R B)`; what of the waiting is due to them is
    `1 - waiting without them / waiting`, where the others are drawn in their place.

    Args:
        lengths: In any order, `[n]`.
        share: s, of which `max(1, round(s n))` samples are meant.
        world_size: R.
        batch_size: B.
    """
    ordered = np.sort(lengths)
    rest = ordered[: len(ordered) - max(1, round(share * len(ordered)))]
    rest = rest if len(rest) else ordered
    own, step = (expected_longest(ordered, n) for n in (batch_size, world_size * batch_size))
    own_rest, step_rest = (expected_longest(rest, n) for n in (batch_size, world_size * batch_size))
    waiting = step - own
    return Outliers(
        share=share,
        above=float(rest[-1]),
        of_steps=1 - (1 - share) ** (world_size * batch_size),
        of_waiting=1 - (step_rest - own_rest) / waiting if waiting > 0 else math.nan,
        idle=waiting / step if step > 0 else math.nan,
        idle_without=1 - own_rest / step_rest if step_rest > 0 else math.nan,
        world_size=world_size,
    )


def _edges(lengths: Array) -> Array:
    """Edges of a histogram's bins, round where it can be; on a logarithmic axis if the lengths spread widely."""
    low, high = float(lengths.min()), float(lengths.max())
    if low == high:
        return np.array([low, high + 1])
    first, most = np.percentile(lengths, (5, 99))
    if first > 0 and most / first > _SPREAD:
        inner = np.geomspace(max(low, first / 4), high, _BINS + 1)[1:-1]
    else:
        inner = np.linspace(low, high, _BINS + 1)[1:-1]
    step = 10.0 ** np.floor(np.log10(inner) - 1)  # two digits
    inner = np.round(inner / step) * step if high - low > 20 * step.min() else inner
    return np.unique(np.concatenate(([low], inner[(inner > low) & (inner < high)], [high])))


def full_pool(case: Case) -> int:
    """Samples of a full pool; 0 without one."""
    return 0 if case.settings.is_off else case.settings.capacity


def cost_of(case: Case, plan: Plan, scan: "LengthScan", batch: float) -> Cost:
    """What a setting takes.

    A pool of 'stream' is always full; one of 'pool' and 'blocks' fills while the last one is handed out, one sample in
    for each one out, so that both hold one pool's samples, and training never stops for a refill. A checkpoint is
    restored from the pool's last snapshot, taken when a pool is full (of small ones after 1,000 samples): samples
    that are still held are brought back by their keys, and those that came in since are read again.

    Args:
        case: The setting.
        plan: For the rest of the settings.
        scan: For what a sample weighs and takes.
        batch: Samples of a batch.
    """
    size, encode = full_pool(case), scan.encode_seconds
    worker = rank = node = None
    if scan.sample_bytes is not None:
        worker = size * scan.sample_bytes + (HISTORY * size * _COST_BYTES if case.settings.is_stream else 0)
        rank = worker * plan.pools_per_rank
        node = rank * plan.ranks_on_node
    a_batch = None if encode is None else batch * encode
    if plan.settings.max_tokens is None and scan.batch_seconds is not None:
        a_batch = scan.batch_seconds  # with what follows the pool
    first = size or batch
    if plan.settings.warmup is not None and case.policy in ("pool", "blocks"):
        first = plan.settings.warmup.initial
    restore = None if size else 0.0
    if size and scan.restore_seconds is not None and encode is not None:
        restore = size * scan.restore_seconds + max(size, SNAPSHOT_SAMPLES) * encode
    return Cost(
        case=case,
        pool_samples=size,
        worker_bytes=worker,
        rank_bytes=rank,
        node_bytes=node,
        first_batch_seconds=None if encode is None or a_batch is None else max(0.0, first - batch) * encode + a_batch,
        stall_seconds=0.0,
        batch_seconds=None if a_batch is None else a_batch / plan.pools_per_rank,
        restore_seconds=restore,
    )


def relate(plan: Plan, scan: "LengthScan", batch: float, best: Case) -> Relation:
    """How pool_size, batch_size and num_workers go together today, and in the recommended setting."""
    budget, share = plan.settings.max_tokens, scan.fewest_of_rank()
    size = 0 if plan.is_off else full_pool(plan.case)
    held = size * plan.pools_per_rank
    relation = [f"a batch has {number(round(batch, 1))} sample{'' if batch == 1 else 's'}"]
    if budget is not None:
        relation[0] += f" on average, as many as fit into max_tokens {number(budget)}"
    if not size:
        relation.append("there is no pool to choose them from")
    else:
        relation.append(f"a pool of {size:,} holds {number(size / batch)} batches (10 to 100 are a good start)")
        workers = f"each of the {plan.num_workers} workers has" if plan.num_workers > 1 else "the only worker has"
        workers = workers if plan.num_workers else "the training process has (num_workers is 0)"
        relation.append(f"{workers} a pool of its own, and so a rank holds {held:,} samples to choose from")
        if share is not None:
            part = "all of them" if held >= share else f"{percent(held / share)} of them"
            relation.append(f"{share:,} samples of the data set fall to a rank, and its pools hold {part}")
            if held > share:
                relation.append("a pool larger than its worker's share is not full before an epoch is over")
    if (best.policy, full_pool(best)) != (plan.settings.policy, size) and (then := full_pool(best)):
        relation.append(
            f"the recommended pool of {then:,} would hold {number(then / batch)} batches, and a rank "
            f"{then * plan.pools_per_rank:,} samples to choose from"
        )
    return Relation(batch, size / batch, held, share, tuple(relation))


def bound(
    today: Prediction, best: Prediction, verdict: Verdict, floor: float, causes: Causes | None, basis: str
) -> Bottleneck:
    """Whether synchronisation can be the bottleneck.

    Args:
        today: The prediction for today's settings.
        best: That for the recommended ones.
        verdict: What is recommended.
        floor: The idle fraction that no pool can go below: 0 if the ranks' lengths are distributed alike.
        causes: Where the time of a measured run went.
        basis: What idle is predicted in.
    """
    world_size, idle = today.case.world_size, today.idle.mean
    speed_up, reachable = 1 / (1 - idle), max(1.0, (1 - floor) / (1 - idle))
    useful = 1 / today.useful.mean if today.useful.mean > 0 else math.nan
    if world_size == 1:
        sentences = ["one rank waits for nobody: only padding can be saved"]
    else:
        sentences = [
            f"the lengths alone leave {ranks(world_size)} {percent(idle)} idle today (predicted, in {basis}): if no "
            f"rank ever waited, steps would be at most {number(round(speed_up, 2))} x as fast"
        ]
        if floor >= 0.01:
            sentences.append(
                f"the ranks' lengths are distributed differently: any pool leaves about {percent(floor)} idle, so a "
                f"pool makes steps at most {number(round(reachable, 2))} x as fast"
            )
    if today.padding.mean >= 0.02:
        sentences.append(
            f"with {percent(today.padding.mean)} padding saved as well it would be at most "
            f"{number(round(useful, 2))} x the real tokens a second, if a step takes as long as its padded tokens say"
        )
    gain = best.useful.mean / today.useful.mean - 1 if today.useful.mean > 0 else 0.0
    if verdict == "change" and gain > 0.005:
        sentences.append(f"the recommended setting would give {number(round(1 + gain, 2))} x the real tokens a second")
    if causes is not None:
        sentences += _measured(causes, verdict, waste(today) - waste(best))
    return Bottleneck(today.idle, floor, speed_up, reachable, useful, causes, tuple(sentences))


def causes_of(run: Run) -> Causes:
    """Where the time of a measured run went."""
    split = run.causes
    return Causes(run.name, split.steps, split.by, split.idle, split.lengths, split.slow_rank, split.data, split.rest)


def _measured(run: Causes, verdict: Verdict, saved: float) -> list[str]:
    if math.isnan(run.idle):
        return [f"in the run {run.name} no step was measured"]
    if run.by == "tokens":
        return [
            f"in the run {run.name} compute could not be measured: by padded tokens the ranks were idle "
            f"{percent(run.idle)} of the time"
        ]
    sentences = [
        f"measured in {run.name}: {percent(run.idle)} idle, of which lengths {percent(run.lengths)}, ranks of unequal "
        f"speed {percent(run.slow_rank)}, waiting for data {percent(run.data)}, the rest {percent(run.rest)}"
    ]
    if run.lengths >= NAMED_FROM:
        sentences.append(
            f"without the waiting for lengths its steps would be at most {number(round(1 / (1 - run.lengths), 2))} x "
            "as fast; that part a pool can save"
        )
    elif verdict == "change":
        sentences.append(
            f"lengths cost it only {percent(run.lengths)}; the recommended setting saves about "
            f"{number(round(100 * saved, 1))} points of today's waiting and padding (predicted)"
        )
    else:
        sentences.append("lengths were hardly a cause of waiting in it, so a better pool would not have made it faster")
    if run.data >= NAMED_FROM:
        first = "data loading is the bottleneck" if run.data >= run.lengths else "data loading is slow"
        sentences.append(f"{first}, and the pool will not help that: use more workers, or a cheaper encoder")
    if run.slow_rank >= NAMED_FROM:
        sentences.append(
            "some ranks are slower than the others for equal lengths, and the pool will not help that: `report` names "
            "them; check their devices and hosts"
        )
    return sentences
