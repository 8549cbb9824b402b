"""What the split of the idle time means, in sentences, each with what to do about it."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_lengthpool.ordering import efficiency
from lightning_lengthpool.ordering.settings import PoolSettings
from lightning_lengthpool.ordering.stream.blocks import even_slots
from lightning_lengthpool.runs.causes import Summary
from lightning_lengthpool.runs.distribution import non_iid
from lightning_lengthpool.simulation.simulate import simulate

Array = NDArray[np.float64]

NAMED_FROM = 0.05  # a smaller part of the time is no cause worth a sentence
BOTTLENECK_FROM = 0.1  # a smaller wait for data is named, but not called so
PADDING_FROM = 0.1
ELSEWHERE_FROM = 0.25  # an optimizer alone may take a good part of a small model's step
REST_FROM = 0.1  # the same of what has no cause: some of it is always there
POOL_SIZES = (100, 300, 1000, 3000)
_FEW_STEPS = 100  # of many ranks: with even slots as good as 300 others
_FEW_SLOTS = 1000
_SEED = 42
WORTH = 0.02  # a setting that gains less than this is not worth a change

BY_TOKENS = " (by padded tokens; compute could not be measured)"


def findings(
    summary: Summary,
    *,
    hosts: Sequence[str] | None = None,
    lengths: Sequence[Array] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> list[str]:
    """Say why the ranks wait, the largest cause first, and what to do.

    Args:
        summary: What a `CauseTracker` has seen.
        hosts: The host of each rank, in the order of `summary.ranks`.
        lengths: For each rank the lengths of samples that it has seen, in tokens; without them no pool size can be
            recommended by its predicted effect.
        settings: The data module's `policy`, `pool_size`, `batch_size`, `num_workers` and, if it has one, `max_tokens`;
            empty for another one, which is taken to have no pool, and batches of as many samples as there were on
            average.

    Returns:
        Plain sentences without a full stop.
    """
    settings = dict(settings or {}) | {"samples": max(1, round(np.nan_to_num(summary.samples, nan=1.0)))}
    if math.isnan(summary.idle):
        return ["no step was measured"]
    found: list[tuple[float, str]] = []
    if summary.data >= NAMED_FROM:
        found.append((summary.data, _data_sentence(summary, settings)))
    if len(summary.ranks) == 1:
        return ["one rank waits for nobody", *(sentence for _, sentence in found)]
    if lengths is not None:
        settings["mean_length"] = np.concatenate(list(lengths)).mean()
        difference = _distribution(summary, lengths, settings)
        if difference is None:
            # one distribution, of which all samples together tell more than each rank's few
            lengths = [np.concatenate(list(lengths))] * len(lengths)
        else:
            found.append(difference)
    if summary.lengths >= NAMED_FROM:
        found.append((summary.lengths, _lengths_sentence(summary, lengths, settings)))
    found += [(summary.slow_rank, sentence) for sentence in _uneven_sentences(summary, hosts)]
    if summary.rest >= REST_FROM:
        found.append(
            (
                summary.rest,
                f"compute that varies from step to step for equal cost causes {_percent(summary.rest)} idle: look for "
                "too few CPU cores, garbage collection, other processes or throttling, or for a cost that lengths do "
                "not tell (pictures, packed samples)",
            )
        )
    if summary.micro_batches > 1 and summary.idle_micro_batches - summary.idle_compute >= NAMED_FROM:
        found.append(
            (
                summary.idle_micro_batches,
                f"micro-batches differ by {_percent(summary.idle_micro_batches)} idle and steps by "
                f"{_percent(summary.idle_compute)}: where the ranks meet before each micro-batch, as Lightning makes "
                "them, accumulation does not even this out",
            )
        )
    if summary.padding >= PADDING_FROM:
        found.append((0.0, f"{_percent(summary.padding)} of the tokens are padding: batches of like lengths save it"))
    if summary.elsewhere >= ELSEWHERE_FROM:
        longest = f", longest on {_ranks(summary.elsewhere_ranks)}" if summary.elsewhere_ranks else ""
        found.append(
            (
                -1.0,  # no waiting for each other, so after all that is
                f"{_percent(summary.elsewhere)} of the time is spent outside data, compute and exchange{longest}: "
                "look at callbacks, logging, transfers to the device and the optimizer",
            )
        )
    if not found:
        return [f"nothing stands out: idle is {100 * summary.idle:.1f} %" + _basis(summary)]
    # a part that is not known (NaN, of a rank once measured) goes last
    return [sentence for _, sentence in sorted(found, key=lambda item: -np.nan_to_num(item[0]))]


def compact_ranges(numbers: Iterable[int]) -> str:
    """Write numbers as ranges.

    Example:
        >>> compact_ranges([0, 1, 2, 3, 7, 8])
        '0-3, 7, 8'
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def _data_sentence(summary: Summary, settings: Mapping[str, Any]) -> str:
    workers = f" (num_workers is {settings['num_workers']})" if "num_workers" in settings else ""
    ranks, idle = _ranks(summary.data_ranks), _percent(summary.data)
    start = f"data loading is the bottleneck on {ranks} ({idle} idle)"
    if summary.data < BOTTLENECK_FROM:
        start = f"waiting for data costs {idle} idle on {ranks}"
    return f"{start}: use more workers{workers}, or a cheaper encoder"


def _uneven_sentences(summary: Summary, hosts: Sequence[str] | None) -> list[str]:
    """One sentence for each host that has slow ranks, and each that has fast ones, the slowest first."""
    groups: dict[tuple[str, bool], list[int]] = defaultdict(list)
    for rank, factor in summary.uneven.items():
        groups[hosts[summary.ranks.index(rank)] if hosts else "", factor > 1].append(rank)
    costs = "" if math.isnan(summary.slow_rank) else f" ({_percent(summary.slow_rank)} idle)"
    if len(groups) > 1:
        costs = costs.replace(" idle", " idle in all")
    sentences = []
    for (host, is_slow), ranks in groups.items():
        factors = sorted(summary.uneven[rank] for rank in ranks)
        low, high = f"{factors[0]:.2f}", f"{factors[-1]:.2f}"
        one = len(ranks) == 1
        advice = (
            f"check {'its device' if one else 'their devices'} for throttling (clocks, temperature, power limit) and "
            "the host for other processes and CPU affinity"
            if is_slow
            else f"{'it waits' if one else 'they wait'} for the slower ones: use equal hardware on all ranks"
        )
        sentence = (
            f"{_ranks(ranks)}{f' on host {host}' if host else ''} take{'s' if one else ''} "
            f"{low if low == high else f'{low} to {high}'} x the median rank's time for equal cost{costs}: {advice}"
        )
        sentences.append((factors[-1], sentence))
    return [sentence for _, sentence in sorted(sentences, reverse=True)]


def _lengths_sentence(summary: Summary, lengths: Sequence[Array] | None, settings: Mapping[str, Any]) -> str:
    start = f"lengths cause {_percent(summary.lengths)} idle{_basis(summary)}: "
    if "policy" not in settings:
        start += "with LengthPoolDataModule, "
    policy, pool_size = settings.get("policy", "none"), settings.get("pool_size", 0)
    pooled = policy != "none" and pool_size > 0
    if lengths is None:
        return start + (f"raise pool_size (it is {pool_size})" if pooled else "switch the pool on, e.g. pool_size 1000")
    predict = cache(partial(_predict, summary, lengths, settings))
    present = predict(policy if pooled else "none", pool_size)
    best = _smallest_good(predict, policy, _candidates(settings), _batch_size(settings))
    predicted = predict(*best)
    if present.waste - predicted.waste < WORTH:
        setting = f"policy {policy} with pool_size {pool_size}" if pooled else "no pool"
        return (
            f"{start}the present setting ({setting}) is already near the best that a pool can do here, about "
            f"{_percent(present.idle)} (predicted)"
        )
    change = "" if best[0] == policy and pooled else f"policy {best[0]} with "
    padding = f" idle and {_percent(predicted.padding)} padding" if present.padding >= WORTH else ""
    return f"{start}{change}pool_size {best[1]} would leave about {_percent(predicted.idle)}{padding} (predicted)"


def _smallest_good(
    predict: Callable[[str, int], "_Prediction"], policy: str, names: Sequence[str], batch_size: int
) -> tuple[str, int]:
    """The policy and the smallest pool size that waste about as little as any: with `policy`, if it can.

    A larger pool wastes no more, so sizes are tried from the largest one down: to simulate many ranks takes time.
    """
    sizes = [size for size in POOL_SIZES if size >= batch_size] or [10 * batch_size]
    enough = min(predict(name, sizes[-1]).waste for name in names) + WORTH
    best, size = list(names), sizes[-1]
    for smaller in reversed(sizes):
        good = [name for name in best if predict(name, smaller).waste <= enough]
        if not good:
            break
        best, size = [policy] if policy in good else good, smaller
    return min(best, key=lambda name: predict(name, size).waste), size


def _candidates(settings: Mapping[str, Any]) -> list[str]:
    """The policies that may be recommended."""
    if settings.get("max_tokens") is not None:
        return ["stream"]
    # with one sample a batch 'blocks' is 'pool' by another name
    return ["pool", "stream"] if _batch_size(settings) == 1 else ["pool", "blocks", "stream"]


def _distribution(summary: Summary, lengths: Sequence[Array], settings: Mapping[str, Any]) -> tuple[float, str] | None:
    """What it costs that the ranks' lengths are distributed differently, if they are."""
    batch_size, rng = _batch_size(settings), np.random.default_rng(0)
    # each sample once: samples drawn again and again would make chance differences look certain
    batches = min(len(own) for own in lengths) // batch_size
    if not batches:
        return None
    drawn = np.stack([rng.permutation(own)[: batches * batch_size].reshape(batches, batch_size) for own in lengths], 1)
    longest = drawn.max(axis=2)
    costs = _costs(summary, batch_size * longest, longest)
    if not non_iid(costs, deepcopy(rng), deals=1).differs:  # nor would it with the other deals, which take their time
        return None
    result = non_iid(costs, rng)
    if not result.differs:
        return None
    return result.excess, (
        f"the ranks' lengths are distributed differently, which would leave {_percent(result.floor)} idle with any "
        f"pool (predicted; {_percent(result.chance)} would be chance): deal the samples to the ranks at random, e.g. "
        "by shuffling them over the shards"
    )


class _Prediction(NamedTuple):
    """Fractions that lengths alone would cause."""

    idle: float
    padding: float

    @property
    def waste(self) -> float:
        return 1 - (1 - self.idle) * (1 - self.padding)


def _batch_size(settings: Mapping[str, Any]) -> int:
    return int(settings.get("batch_size") or settings["samples"])


def _predict(
    summary: Summary, lengths: Sequence[Array], settings: Mapping[str, Any], policy: str, pool_size: int
) -> _Prediction:
    max_tokens = settings.get("max_tokens") if policy == "stream" and pool_size else None
    batch_size = settings.get("batch_size") if max_tokens is not None else _batch_size(settings)
    micro_batches = max(1, round(summary.micro_batches))
    samples_per_step = _batch_size(settings) * micro_batches
    if max_tokens is not None:
        samples_per_step = max(1, round(max_tokens / settings["mean_length"])) * micro_batches
    ranks, slots = len(lengths), None
    if policy == "stream":  # slower to simulate, and no pools that would have to be whole
        samples = max(300, min(12_000, 40_000 // ranks))
        steps = max(1, min(samples // samples_per_step, max(_FEW_STEPS, 40_000 // ranks)))
        if steps * micro_batches <= _FEW_SLOTS:
            slots = even_slots(_SEED, steps * micro_batches)
    else:
        # one largest pool or more; of few ranks more, for they leave more to chance
        steps = max(1, max(max(POOL_SIZES), min(12_000, 200_000 // ranks)) // samples_per_step)
    pool = PoolSettings(batch_size=batch_size, pool_size=pool_size, policy=policy, seed=_SEED, max_tokens=max_tokens)
    result = simulate(lengths, pool, steps * micro_batches, slots=slots)
    costs = _costs(summary, result.padded, result.longest)
    return _Prediction(
        efficiency.idle_fraction(costs.reshape(steps, micro_batches, -1).sum(axis=1)),
        efficiency.padding_fraction(result.tokens, result.padded),
    )


def _costs(summary: Summary, padded: Array, longest: Array) -> Array:
    """Seconds by the reference fit, else padded tokens."""
    if summary.by == "tokens" or summary.reference is None:
        return padded
    return np.maximum(summary.reference.seconds(padded, longest), 0.0)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {compact_ranges(ranks)}"


def _basis(summary: Summary) -> str:
    return BY_TOKENS if summary.by == "tokens" else ""


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.0f} %"
