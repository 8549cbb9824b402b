"""What the split of the idle time means, in sentences, each with what to do about it."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_lengthpool.ordering.efficiency import WORTH
from lightning_lengthpool.ordering.settings import PoolSettings
from lightning_lengthpool.runs.causes import Summary
from lightning_lengthpool.runs.distribution import Difference, difference_of_ranks
from lightning_lengthpool.runs.formatting import percent, ranks_named, setting
from lightning_lengthpool.runs.thresholds import BOTTLENECK_FROM, ELSEWHERE_FROM, NAMED_FROM, PADDING_FROM, REST_FROM
from lightning_lengthpool.simulation.cases import Case
from lightning_lengthpool.simulation.choose import (
    POOL_SIZES,
    Chooser,
    batch_samples,
    cases_to_try,
    samples_without_pool,
    sizes_to_try,
)
from lightning_lengthpool.simulation.predict import Prediction
from lightning_lengthpool.simulation.quick import predict_quickly
from lightning_lengthpool.simulation.uncertainty import costs_of

Array = NDArray[np.float64]


BY_TOKENS = " (by padded tokens; compute could not be measured)"


def findings(
    summary: Summary,
    *,
    hosts: Sequence[str] | None = None,
    lengths: Sequence[Array] | None = None,
    settings: Mapping[str, Any] | None = None,
    difference: Difference | None = None,
) -> list[str]:
    """Say why the ranks wait, the largest cause first, and what to do: plain sentences without a full stop.

    Args:
        hosts: The host of each rank, in the order of `summary.ranks`.
        lengths: For each rank the lengths of samples that it has seen, in tokens; without them no pool size can be
            recommended by its predicted effect.
        settings: The data module's, see `run_json.About`; empty for another one, which is taken to have no pool, and
            batches of as many samples as there were on average.
        difference: What `difference_in` says of these; None to ask it.
    """
    settings = settings or {}
    if math.isnan(summary.idle):
        return ["no step was measured"]
    reasons: list[tuple[float, str]] = []
    if summary.data >= NAMED_FROM:
        reasons.append((summary.data, _data_sentence(summary, settings)))
    if len(summary.ranks) == 1:
        return ["one rank waits for nobody", *(sentence for _, sentence in reasons)]
    if lengths is not None and difference is None:
        difference = difference_in(summary, lengths, settings)
    is_iid = difference is None or not difference.is_sure
    if difference is not None and difference.is_sure:
        reasons.append((difference.excess, _difference_sentence(difference, settings.get("max_tokens"))))
    if lengths is not None and is_iid:
        # one distribution, of which all samples together tell more than each rank's few
        lengths = [np.concatenate(list(lengths))] * len(lengths)
    if summary.lengths >= NAMED_FROM:
        reasons.append((summary.lengths, _lengths_sentence(summary, lengths, settings, is_iid)))
    reasons += [(summary.slow_rank, sentence) for sentence in _uneven_sentences(summary, hosts)]
    if summary.rest >= REST_FROM:
        reasons.append(
            (
                summary.rest,
                f"compute that varies from step to step for equal cost causes {percent(summary.rest)} idle: look for "
                "too few CPU cores, garbage collection, other processes or throttling, or for a cost that lengths do "
                "not tell (pictures, packed samples)",
            )
        )
    if summary.micro_batches > 1 and summary.idle_micro_batches - summary.idle_compute >= NAMED_FROM:
        reasons.append(
            (
                summary.idle_micro_batches,
                f"micro-batches differ by {percent(summary.idle_micro_batches)} idle and steps by "
                f"{percent(summary.idle_compute)}: where the ranks meet before each micro-batch, as Lightning makes "
                "them, accumulation does not even this out",
            )
        )
    if summary.padding >= PADDING_FROM:
        reasons.append((0.0, f"{percent(summary.padding)} of the tokens are padding: batches of like lengths save it"))
    if summary.elsewhere >= ELSEWHERE_FROM:
        longest = f", longest on {ranks_named(summary.elsewhere_ranks)}" if summary.elsewhere_ranks else ""
        reasons.append(
            (
                -1.0,  # no waiting for each other, so after all that is
                f"{percent(summary.elsewhere)} of the time is spent outside data, compute and exchange{longest}: "
                "look at callbacks, logging, transfers to the device and the optimizer",
            )
        )
    if not reasons:
        return [f"nothing stands out: idle is {percent(summary.idle)}" + _basis(summary)]
    # a part that is not known (NaN, of a rank once measured) goes last
    return [sentence for _, sentence in sorted(reasons, key=lambda reason: -np.nan_to_num(reason[0]))]


def _data_sentence(summary: Summary, settings: Mapping[str, Any]) -> str:
    workers = f" (num_workers is {settings['num_workers']})" if "num_workers" in settings else ""
    ranks, idle = ranks_named(summary.data_ranks), percent(summary.data)
    start = f"data loading is the bottleneck on {ranks} ({idle} idle)"
    if summary.data < BOTTLENECK_FROM:
        start = f"waiting for data costs {idle} idle on {ranks}"
    return f"{start}: use more workers{workers}, or a cheaper encoder"


def _uneven_sentences(summary: Summary, hosts: Sequence[str] | None) -> list[str]:
    """One sentence for each host that has slow ranks, and each that has fast ones, the slowest first."""
    groups: dict[tuple[str, bool], list[int]] = defaultdict(list)
    for rank, factor in summary.uneven.items():
        groups[hosts[summary.ranks.index(rank)] if hosts else "", factor > 1].append(rank)
    costs = "" if math.isnan(summary.slow_rank) else f" ({percent(summary.slow_rank)} idle)"
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
            f"{ranks_named(ranks)}{f' on host {host}' if host else ''} take{'s' if one else ''} "
            f"{low if low == high else f'{low} to {high}'} x the median rank's time for equal cost{costs}: {advice}"
        )
        sentences.append((factors[-1], sentence))
    return [sentence for _, sentence in sorted(sentences, reverse=True)]


def _lengths_sentence(
    summary: Summary, lengths: Sequence[Array] | None, settings: Mapping[str, Any], is_iid: bool
) -> str:
    start = f"lengths cause {percent(summary.lengths)} idle{_basis(summary)}: "
    if "policy" not in settings:
        start += "with LengthPoolDataModule, "
    if lengths is None:
        raised = f"raise pool_size (it is {settings.get('pool_size')})"
        return start + (raised if _has_pool(settings) else "switch the pool on, e.g. pool_size 1000")
    chooser, best = choose_setting(summary, lengths, settings, is_iid)
    today = chooser.today
    left = f"{percent(best.idle.mean)} idle"
    if today.padding.mean >= WORTH:
        left += f" and {percent(best.padding.mean)} padding"
    if best.case == today.case or best.case.settings.is_off:
        return (
            f"{start}the present setting ({setting(today.case)}) is already near the best that a pool can do here, "
            f"about {percent(today.idle.mean)} (predicted)"
        )
    why = ""
    if not chooser.is_within_share(today.case):
        why = f"; today's pools hold more than the {chooser.rank_samples:,} samples that fall to a rank"
    if best.case.has_reference and not today.case.has_reference:
        why += "; the lengths.csv beside steps.csv has such lengths"
    return f"{start}{setting(best.case)} would leave about {left} (predicted){why}"


def choose_setting(
    summary: Summary, lengths: Sequence[Array], settings: Mapping[str, Any], is_iid: bool
) -> tuple[Chooser, Prediction]:
    """The setting to recommend after a run, by the rule by which `advise` recommends one before it, and what chose it.

    `summary` tells what a batch costs and how many are accumulated; `is_iid`, whether the ranks' lengths are
    distributed alike.
    """
    costs = lengths[0] if is_iid else np.concatenate(list(lengths))
    batch_size, max_tokens = _batch_size(summary, settings), settings.get("max_tokens")
    accumulate = max(1, round(np.nan_to_num(summary.micro_batches, nan=1.0)))
    has_reference = settings.get("has_reference", False)

    def with_pool(policy: str, pool_size: int) -> Case:
        pool = PoolSettings(batch_size, pool_size, policy, max_tokens=max_tokens)
        return Case(pool, len(lengths), accumulate, has_reference)

    @cache
    def predict(case: Case) -> Prediction:
        batch = batch_samples(costs, case.settings.batch_size, case.settings.max_tokens)
        return predict_quickly(lengths, case, batch, summary.seconds)

    off = Case(PoolSettings(samples_without_pool(costs, batch_size, max_tokens), 0, "none"), len(lengths), accumulate)
    today = with_pool(settings["policy"], settings["pool_size"]) if _has_pool(settings) else off
    needs_stream = max_tokens is not None or has_reference or settings.get("has_classes", False)
    chooser = Chooser(
        predict(today),
        predict(off),
        needs_stream=needs_stream,
        pools=max(1, settings.get("num_workers") or 0),
        rank_samples=settings.get("rank_samples"),
    )
    sizes = sizes_to_try(
        (*POOL_SIZES, today.pool_size),
        batch_samples(costs, batch_size, max_tokens),
        pools=chooser.pools,
        rank_samples=chooser.rank_samples,
    )
    may_refer = is_iid and len(lengths) > 1
    cases = cases_to_try(with_pool, sizes, needs_stream=needs_stream, may_refer=may_refer)
    return chooser, chooser.search(cases, predict)


def difference_in(summary: Summary, lengths: Sequence[Array], settings: Mapping[str, Any]) -> Difference | None:
    """How differently the ranks' lengths are distributed; in seconds where these were measured."""
    pooled = np.concatenate(list(lengths))
    batch = batch_samples(pooled, _batch_size(summary, settings), settings.get("max_tokens"))
    return difference_of_ranks([costs_of(summary.seconds, batch * of_rank, of_rank) for of_rank in lengths])


def _has_pool(settings: Mapping[str, Any]) -> bool:
    return "policy" in settings and not PoolSettings(None, settings.get("pool_size") or 0, settings["policy"]).is_off


def _batch_size(summary: Summary, settings: Mapping[str, Any]) -> int | None:
    """Samples of a batch, with a token budget at most; as many as there were on average where it is not said."""
    batch_size: int | None = settings.get("batch_size")
    if batch_size or settings.get("max_tokens") is not None:
        return batch_size
    average = max(1, round(float(np.nan_to_num(summary.samples, nan=1.0))))
    return min(average, int(settings["pool_size"])) if _has_pool(settings) else average


def _difference_sentence(difference: Difference, max_tokens: float | None) -> str:
    limit = (
        f"which would leave {percent(difference.floor)} idle with any pool (predicted; {percent(difference.chance)} "
        "would be chance)"
    )
    if max_tokens is not None:
        limit = "so with max_tokens those with long samples get through fewer of them"
    return (
        f"the ranks' lengths are distributed differently, {limit}: deal the samples to the ranks at random, e.g. by "
        "shuffling them over the shards"
    )


def _basis(summary: Summary) -> str:
    return BY_TOKENS if summary.by == "tokens" else ""
