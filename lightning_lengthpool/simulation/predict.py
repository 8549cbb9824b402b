"""What a setting would waste, predicted from lengths by simulation, with an interval."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_lengthpool.ordering.settings import PoolSettings
from lightning_lengthpool.simulation.cases import Case, Job, Lengths, Replay, Table
from lightning_lengthpool.simulation.parallel import spread
from lightning_lengthpool.simulation.uncertainty import (
    Bootstrap,
    Interval,
    Scored,
    Seconds,
    budget_variances,
    interval,
    rank_variances,
)

__all__ = ["Case", "Interval", "Lengths", "Prediction", "predict"]

_RANKS = 64  # at least so many are simulated, as several worlds if a world is smaller
_CHUNK = 32  # ranks of one job
_RESAMPLED, _RESAMPLED_RANKS, _RESAMPLED_STEPS = 12, 16, 150  # simulations of resampled lengths, with a token budget


@dataclass(frozen=True)
class Prediction:
    """What a case would waste, by the formulas of `ordering.efficiency`."""

    case: Case
    idle: Interval  # of seconds if there is a fit, else of padded tokens
    padding: Interval
    useful: Interval


def predict(
    lengths: Lengths,
    cases: Sequence[Case],
    *,
    seconds: Seconds | None = None,
    steps: int = 1000,
    progress: Callable[[int], None] | None = None,
) -> list[Prediction]:
    """Predict what each case would waste in its first steps, in the order of the cases.

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

    Work is spread over the CPU cores that this process may use; the figures do not depend on their number. Draws are
    seeded by the seed of each case's settings.

    Args:
        seconds: What a micro-batch costs, from its padded tokens and its longest sample; None for the padded tokens.
        progress: Called with the number of cases that are done, now and then.
    """
    for case in cases:
        for name in ("world_size", "accumulate"):
            if getattr(case, name) < 1:
                raise ValueError(f"{name} is {getattr(case, name)}, expected at least 1")
    table = Table(lengths)
    groups: dict[Case, list[int]] = defaultdict(list)  # cases that share a simulation
    for number, case in enumerate(cases):
        groups[_simulated(case)].append(number)
    jobs = [
        job
        for group, numbers in groups.items()
        for job in _jobs(group, max(cases[number].world_size for number in numbers), table, steps)
    ]
    bootstrap = Bootstrap(table, seconds)
    jobs_of_group = Counter(job.case for job in jobs)
    replays: dict[Case, dict[int, Replay]] = defaultdict(dict)  # by the job's first rank
    predictions: dict[int, Prediction] = {}
    for index, replay in spread(table.run, jobs, [job.seconds for job in jobs]):
        group, first = jobs[index].case, jobs[index].first
        replays[group][first] = replay
        if len(replays[group]) < jobs_of_group[group]:
            continue
        parts = sorted(replays.pop(group).items())
        whole = Replay.join([part for first, part in parts if first >= 0])
        scored = Scored(table, whole, group.accumulate, seconds, _pieces(group, whole.samples.shape[1]))
        resampled = [Scored(table, part, group.accumulate, seconds) for first, part in parts if first < 0]
        for number in groups[group]:
            predictions[number] = _prediction(cases[number], table, scored, resampled, bootstrap)
        if progress is not None:
            progress(len(predictions))
    return [predictions[number] for number in range(len(cases))]


def _simulated(case: Case) -> Case:
    """The case without what does not matter to a simulation of its ranks: one serves all sizes of worlds."""
    settings, has_reference = replace(case.settings, warmup=None, reference=None), case.has_reference
    if settings.is_off:
        settings = PoolSettings(batch_size=settings.slot_size, pool_size=0, policy="none", seed=settings.seed)
        has_reference = False
    return Case(settings, 0, case.accumulate, has_reference)


def _jobs(case: Case, world_size: int, table: Table, steps: int) -> list[Job]:
    """The jobs that simulate a case for worlds of up to so many ranks."""
    columns = table.columns(max(world_size, _RANKS))
    batches = _whole_pools(case, steps)
    jobs = [
        Job(case, tuple(columns[first : first + _CHUNK]), batches, first) for first in range(0, len(columns), _CHUNK)
    ]
    if case.settings.max_tokens is not None:
        few = tuple(columns[: min(_RESAMPLED_RANKS, max(2, world_size))])
        batches = min(steps, _RESAMPLED_STEPS) * case.accumulate
        jobs += [Job(case, few, batches, -1 - number) for number in range(_RESAMPLED)]
    return jobs


def _whole_pools(case: Case, steps: int) -> int:
    """Micro-batches for so many steps; of pools that leave as a whole as many more as use them up, for the batch with
    the longest samples comes once in each, and what it costs is a good part of all waiting."""
    settings, batches = case.settings, steps * case.accumulate
    if not settings.is_handed_out_whole or settings.batch_size is None:
        return batches
    pools = -(-batches * settings.batch_size // settings.capacity)
    whole_steps = pools * settings.capacity // settings.batch_size // case.accumulate
    return max(batches, min(whole_steps, 10 * steps) * case.accumulate)  # a huge pool would need too much memory


def _pieces(case: Case, batches: int) -> int:
    """Pieces in time whose figures are independent: pools that make the same batches in each, or else any 20."""
    settings = case.settings
    is_ordered = settings.policy == "blocks" or (settings.policy == "pool" and settings.batch_size == 1)
    if not is_ordered or case.accumulate > 1 or settings.batch_size is None:
        return 20
    pools, rest = divmod(batches, settings.capacity // settings.batch_size)
    return 20 if rest else min(pools, 20)


def _prediction(
    case: Case, table: Table, scored: Scored, resampled: Sequence[Scored], bootstrap: Bootstrap
) -> Prediction:
    ranks, width = scored.costs.shape[1], case.world_size
    is_known_world = table.ranks in (1, width)
    order = np.arange(ranks) if is_known_world else np.random.default_rng(0).permutation(ranks)
    worlds = order[: ranks // width * width].reshape(-1, width)
    figures, variances = scored.figures(worlds), scored.variances(worlds)
    differences = np.zeros((1, 3))
    if resampled:
        variances += budget_variances(figures, resampled)
    else:
        differences = bootstrap.differences(scored, worlds)
    if not is_known_world:
        variances += rank_variances(scored, table.ranks, width)
    idle, padding, useful = (
        interval(float(figures[i]), differences[:, i], float(variances[i]) ** 0.5) for i in range(3)
    )
    return Prediction(case, idle, padding, useful)
