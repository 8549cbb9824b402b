"""What a setting would waste, predicted from lengths by simulation, with an interval."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_lengthpool.ordering.settings import PoolSettings
from lightning_lengthpool.simulation.cases import Case, Job, Lengths, Replay, Table
from lightning_lengthpool.simulation.parallel import spread
from lightning_lengthpool.simulation.uncertainty import Bootstrap, Interval, Scored, Seconds, interval, rank_variances

__all__ = ["Case", "Interval", "Lengths", "Prediction", "predict"]

_RANKS = 64  # at least so many are simulated, as several worlds if a world is smaller
_CHUNK = 32  # ranks of one piece of work
_BUDGET = 12, 16, 150  # simulations with a token budget of resampled lengths; ranks and steps of each


@dataclass(frozen=True)
class Prediction:
    """What a case would waste, by `cost`'s formulas.

    Attributes:
        case: The setting.
        idle: The idle fraction: of seconds if there is a fit, else of padded tokens.
        padding: The padding fraction.
        useful: The useful fraction, of tokens.
    """

    case: Case
    idle: Interval
    padding: Interval
    useful: Interval


def predict(
    lengths: Lengths,
    cases: Sequence[Case],
    *,
    seconds: Seconds | None = None,
    steps: int = 1000,
    seed: int = 42,
    progress: Callable[[int], None] | None = None,
) -> list[Prediction]:
    """Predict what each case would waste in its first steps.

    An interval covers two sources of error. That few lengths are known is shown by the bootstrap (Efron 1979,
    "Bootstrap methods: another look at the jackknife"), here of the lengths of each rank and class, or of all ranks if
    these are of one distribution; where a world of unlike ranks is not the one surveyed also of the ranks. That a
    simulation is finite is shown by the spread of its parts (batch means, Law and Carson 1979): blocks of steps in a
    row, and worlds of different ranks or, if there are few, the jackknife over ranks. With `max_tokens`, where lengths
    also decide which samples make a batch, small simulations of resampled lengths take the place of the first.

    In trials with 5,000 lengths drawn from a trace, idle's interval held the figure of the whole trace in 87 to 99 of
    100 where the longest lengths are no rarity (two traces, 8 and 64 ranks). The bootstrap knows no length beyond the
    longest that is known: where a few samples are far longer than the rest, idle may well be above `high`. On a trace
    whose longest sample is twice the next one it held in 50 to 85 of 100 at 8 ranks, and in 26 to 54 at 64. See
    `benchmarks/advise_speed.py`.

    Work is spread over the CPU cores that this process may use; the figures do not depend on their number.

    Args:
        lengths: What is known of the data set.
        cases: The settings.
        seconds: What a micro-batch costs, from its padded tokens and its longest sample; None for the padded tokens.
        steps: Steps that are simulated.
        seed: Seed of the policies, and of the draws.
        progress: Called with the number of cases that are done, now and then.

    Returns:
        One prediction a case, in their order.

    Raises:
        ValueError: If a case or the lengths are out of their range; the message names what is.
    """
    for case in cases:
        for name in ("world_size", "accumulate"):
            if getattr(case, name) < 1:
                raise ValueError(f"{name} is {getattr(case, name)}, expected at least 1")
    table = Table(lengths)
    groups: dict[Case, list[int]] = defaultdict(list)  # cases that differ in world_size only share a simulation
    for number, case in enumerate(cases):
        groups[_canonical(case)].append(number)
    jobs: list[Job] = []
    for group, numbers in groups.items():
        world = max(cases[number].world_size for number in numbers)
        columns = table.columns(max(world, _RANKS))
        jobs += [
            Job(group, tuple(columns[first : first + _CHUNK]), _whole_pools(group, steps), seed, first)
            for first in range(0, len(columns), _CHUNK)
        ]
        if group.max_tokens is not None:
            count, ranks, short = _BUDGET
            few = tuple(table.columns(_RANKS)[: min(ranks, max(2, world))])
            jobs += [
                Job(group, few, min(steps, short) * group.accumulate, seed, -1 - number) for number in range(count)
            ]
    left = {group: sum(job.case == group for job in jobs) for group in groups}
    found: dict[Case, dict[int, Replay]] = defaultdict(dict)
    predictions: dict[int, Prediction] = {}
    bootstrap = Bootstrap(table, seconds, seed)
    for index, replay in spread(table.run, jobs, [job.seconds for job in jobs]):
        job = jobs[index]
        found[job.case][job.first] = replay
        left[job.case] -= 1
        if not left[job.case]:
            parts = found.pop(job.case)
            whole = Replay.join([parts[first] for first in sorted(parts) if first >= 0])
            scored = Scored(table, whole, job.case.accumulate, seconds, _pieces(job.case, whole.samples.shape[1]))
            small = [Scored(table, parts[first], job.case.accumulate, seconds) for first in sorted(parts) if first < 0]
            for number in groups[job.case]:
                predictions[number] = _prediction(cases[number], table, scored, small, bootstrap)
            if progress is not None:
                progress(len(predictions))
    return [predictions[number] for number in range(len(cases))]


def _canonical(case: Case) -> Case:
    """The case without what does not matter to a simulation of its ranks."""
    if case.policy == "none" or not case.pool_size:
        case = replace(case, policy="none", pool_size=0, max_tokens=None, has_reference=False)
    return replace(case, world_size=0)


def _whole_pools(case: Case, steps: int) -> int:
    """Micro-batches for so many steps; of pools that leave as a whole as many more as use them up, for the batch with
    the longest samples comes once in each, and what it costs is a good part of all waiting."""
    batches = steps * case.accumulate
    if case.policy not in ("pool", "blocks") or case.batch_size is None:
        return batches
    size = _capacity(case)
    whole = -(-batches * case.batch_size // max(1, size)) * size // case.batch_size // case.accumulate
    return max(batches, min(whole, 10 * steps) * case.accumulate)  # a huge pool would need too much memory


def _capacity(case: Case) -> int:
    return PoolSettings(batch_size=case.batch_size, pool_size=case.pool_size, policy=case.policy).capacity


def _pieces(case: Case, batches: int) -> int:
    """Pieces in time whose figures are independent: pools that make the same batches in each, or else any 20."""
    is_ordered = case.policy == "blocks" or (case.policy == "pool" and case.batch_size == 1)
    if not is_ordered or case.accumulate > 1 or case.batch_size is None:
        return 20
    pools, rest = divmod(batches, _capacity(case) // case.batch_size)
    return 20 if rest else min(pools, 20)


def _prediction(case: Case, table: Table, scored: Scored, small: Sequence[Scored], bootstrap: Bootstrap) -> Prediction:
    ranks, width = scored.costs.shape[1], case.world_size
    order = np.arange(ranks)
    is_surveyed = table.ranks in (1, width)
    if not is_surveyed:
        order = np.random.default_rng(0).permutation(ranks)
    worlds = order[: ranks // width * width].reshape(-1, width)
    figures, variances = scored.figures(worlds), scored.chance(worlds) ** 2
    if small:
        found = np.array([own.figures(np.arange(own.costs.shape[1])[None]) for own in small])
        by_chance = np.mean([own.chance(np.arange(own.costs.shape[1])[None]) ** 2 for own in small], axis=0)
        found_variance = found.var(axis=0, ddof=1)
        waste, base = np.abs(figures - [0, 0, 1]), np.abs(found.mean(axis=0) - [0, 0, 1])
        # what these waste themselves may be another part of it: few ranks wait less
        variances += np.maximum(found_variance - by_chance, found_variance / 4) * (waste / np.maximum(base, 1e-9)) ** 2
        differences = np.zeros((1, 3))
    else:
        differences = bootstrap.differences(scored, worlds)
    if not is_surveyed:
        variances += rank_variances(scored, table.ranks, width)
    return Prediction(
        case,
        *(
            interval(float(value), own, math.sqrt(variance))
            for value, own, variance in zip(figures, differences.T, variances, strict=True)
        ),
    )
