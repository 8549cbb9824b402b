"""Lengths of a data set and today's settings -> what is wasted, why, and one recommendation with its reasons."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_lengthpool.advise.advice import Advice, Plan
from lightning_lengthpool.advise.checks.check import CheckContext
from lightning_lengthpool.advise.checks.checks import CHECKS, MEMORY_SHARE
from lightning_lengthpool.advise.choice import Choice, recommend
from lightning_lengthpool.advise.facts import bound, causes_of, cost_of, describe, relate
from lightning_lengthpool.runs.distribution import difference_of_ranks
from lightning_lengthpool.runs.formatting import number, ranks
from lightning_lengthpool.runs.run import Run
from lightning_lengthpool.simulation.cases import Case, Lengths
from lightning_lengthpool.simulation.choose import (
    POOL_SIZES,
    Chooser,
    batch_samples,
    cases_to_try,
    sizes_to_try,
)
from lightning_lengthpool.simulation.predict import predict
from lightning_lengthpool.simulation.uncertainty import Seconds, costs_of

if TYPE_CHECKING:
    from lightning_lengthpool.advise.scan.length_scan import LengthScan

Array = NDArray[np.float64]

__all__ = ["POOL_SIZES", "advise"]


def advise(
    scan: "LengthScan",
    plan: Plan,
    *,
    world_sizes: Sequence[int],
    pool_sizes: Sequence[int] = POOL_SIZES,
    run: Run | None = None,
    machine_bytes: int | None = None,
    steps: int = 1000,
    progress: Callable[[int, int], None] | None = None,
) -> Advice:
    """Say what today's settings waste, what others would, and what to do.

    Predicted are today's settings, and at today's and each given world size no pool and the sweep: each policy that
    goes with the settings at each pool size; at today's world size 'stream' with `reference_lengths` as well.

    Args:
        scan: The data.
        plan: Today's settings.
        world_sizes: Data-parallel ranks to predict for, beside today's.
        pool_sizes: To predict for, beside today's. Those smaller than a batch are left out.
        run: A measured run: where its time went, and what a step takes by its tokens, which idle is then predicted by.
        machine_bytes: Memory of one machine.
        steps: Steps that are simulated.
        progress: Called with the number of settings that are predicted, and of all of them.

    Raises:
        ValueError: If no length above 0 was read, or a number is out of its range; the message names it.
    """
    lengths = scan.lengths
    if not len(lengths):
        raise ValueError("no length was read, so there is nothing to go by")
    if not lengths.any():
        raise ValueError(f"all {len(lengths):,} lengths are 0, expected some tokens to go by")
    for name, values in (("world_sizes", world_sizes), ("pool_sizes", pool_sizes)):
        for value in values:
            if value < 1:
                raise ValueError(f"{name} has {value}, expected integers of at least 1")
    settings = plan.settings
    batch = batch_samples(scan.costs, settings.batch_size, settings.max_tokens)
    measure = _measure(scan, plan, batch, run)
    difference = None
    if scan.has_ranks:
        difference = difference_of_ranks([costs_of(measure.seconds, batch * rank, rank) for rank in measure.by_rank])
    is_iid = difference is None or not difference.is_sure

    worlds = list(dict.fromkeys((plan.world_size, *world_sizes)))
    baseline = plan.without_pool(scan.costs)
    now = baseline if plan.is_off else plan.case
    room = None
    if machine_bytes is not None and scan.sample_bytes:
        room = MEMORY_SHARE * machine_bytes / (scan.sample_bytes * plan.pools_per_rank * plan.ranks_on_node)
    sizes = sizes_to_try(
        [*pool_sizes, *([] if plan.is_off else [settings.pool_size])],
        batch,
        pools=plan.pools_per_rank,
        rank_samples=scan.fewest_of_rank(),
        room=room,
    )
    # Where the ranks' lengths are distributed differently, a reference is left out: at first each pool lets the lengths
    # go that all have, and only later what has piled up in it, which a prediction of some steps does not see.
    may_refer = plan.world_size > 1 and is_iid and _tells_cost(scan)
    needs_stream = plan.needs_stream or scan.classes is not None
    sweep = cases_to_try(plan.with_pool, sizes, needs_stream=needs_stream, may_refer=may_refer)
    elsewhere = [
        replace(case, world_size=world)
        for world in worlds[1:]
        for case in sweep
        if case.has_reference == plan.has_reference
    ]
    baselines = [replace(baseline, world_size=world) for world in worlds]
    cases = list(dict.fromkeys((now, *baselines, *sweep, *elsewhere)))
    shown = None if progress is None else (lambda done: progress(done, len(cases)))
    known = _known(scan, plan, measure, is_iid)
    predictions = predict(known, cases, seconds=measure.seconds, steps=steps, progress=shown)
    predicted = dict(zip(cases, predictions, strict=True))

    costs = {case: cost_of(case, plan, scan, batch) for case in cases}
    causes = None if run is None else causes_of(run)

    def fits(case: Case) -> bool:
        need = costs[case].node_bytes
        return need is None or machine_bytes is None or need <= MEMORY_SHARE * machine_bytes

    choice = Choice(
        plan,
        Chooser(
            today=predicted[now],
            baseline=predicted[baseline],
            needs_stream=plan.needs_stream,
            pools=plan.pools_per_rank,
            rank_samples=scan.fewest_of_rank(),
            fits=fits,
        ),
        [predicted[case] for case in sweep],
        costs,
        machine_bytes,
        causes if run is not None and _is_of_today(run, plan) else None,
    )
    best = choice.best
    relation = relate(plan, scan, batch, best.case)
    checks = CHECKS.make(
        CheckContext(
            scan=scan,
            plan=plan,
            today=choice.today,
            baselines=[predicted[case] for case in baselines],
            cost=costs[now],
            relation=relation,
            difference=difference,
            machine_bytes=machine_bytes,
        )
    )
    others = [replace(best.case, world_size=world) for world in worlds[1:]]
    # a token budget lets batches of any lengths cost about the same
    floor = 0.0 if difference is None or is_iid or settings.max_tokens is not None else difference.floor
    world_size = plan.world_size if plan.world_size > 1 else max(worlds)
    return Advice(
        plan=plan,
        pool=_pool_in_words(plan),
        distribution=describe(lengths, world_size, max(1, round(batch)), scan.drawn_from),
        basis=measure.basis,
        today=choice.today,
        predictions=tuple(predictions),
        costs=tuple(costs[case] for case in dict.fromkeys((now, best.case))),
        relation=relation,
        bottleneck=bound(choice.today, best, choice.verdict, floor, causes, measure.basis),
        checks=checks,
        recommendation=recommend(choice, checks, [predicted[case] for case in others if case in predicted], causes),
    )


class _Measure(NamedTuple):
    """What idle is predicted in."""

    by_rank: list[Array]  # of each sample
    seconds: Seconds | None  # what a batch costs, by its samples times the largest of these, and that; None: the former
    basis: str


def _measure(scan: "LengthScan", plan: Plan, batch: float, run: Run | None) -> _Measure:
    settings, lengths = plan.settings, scan.lengths_by_rank()
    costs = "" if settings.cost is None else f"the costs of {settings.cost!r}"
    if costs and not settings.is_padded and batch > 1:
        costs += ", as if all samples of a batch were as expensive as its most expensive one"
    if costs and not _tells_cost(scan):
        return _Measure(scan.costs_by_rank(), None, costs)
    if run is not None and run.causes.seconds is not None:
        return _Measure(lengths, run.causes.seconds, f"seconds, by a fit of the run {run.name}")
    if not costs:
        return _Measure(lengths, None, "padded tokens")
    known, first = np.unique(scan.lengths, return_index=True)

    def seconds(padded: Array, longest: Array) -> Array:
        samples = np.divide(padded, longest, out=np.zeros_like(padded), where=longest > 0)
        batch_costs: Array = samples * np.interp(longest, known, scan.costs[first])
        return batch_costs

    return _Measure(lengths, seconds, costs)


def _is_of_today(run: Run, plan: Plan) -> bool:
    """Whether a run has measured seconds under today's settings."""
    settings, about = plan.settings, run.about.settings
    if run.causes.by != "seconds" or math.isnan(run.causes.lengths) or len(run.ranks) != plan.world_size:
        return False
    names = ("policy", "batch_size") if plan.is_off else ("policy", "pool_size", "batch_size")
    return all(name in about and about[name] == getattr(settings, name) for name in names)


def _known(scan: "LengthScan", plan: Plan, measure: _Measure, is_iid: bool) -> Lengths:
    """The lengths as the prediction takes them; ranks of which nothing was read are left out."""
    costs, classes = scan.costs_by_rank(), scan.classes_by_rank()
    read = [rank for rank, lengths in enumerate(measure.by_rank) if len(lengths)]
    return Lengths(
        tuple(measure.by_rank[rank] for rank in read),
        is_iid=is_iid,
        costs=None if plan.settings.cost is None else tuple(costs[rank] for rank in read),
        classes=None if classes is None else tuple(classes[rank] for rank in read),
    )


def _tells_cost(scan: "LengthScan") -> bool:
    """Whether a sample's length tells what it costs: a file of lengths is no use otherwise."""
    order = np.lexsort((scan.costs, scan.lengths))
    lengths, costs = scan.lengths[order], scan.costs[order]
    steps = np.diff(costs)
    return bool((steps >= 0).all() and (steps[np.diff(lengths) == 0] == 0).all())


def _pool_in_words(plan: Plan) -> tuple[str, ...]:
    """Whether the pool is active, and how it is set."""
    settings = plan.settings
    rest = [] if settings.batch_size is None else [f"batch_size {settings.batch_size}"]
    rest += [] if settings.max_tokens is None else [f"max_tokens {number(settings.max_tokens)}"]
    rest += [f"num_workers {plan.num_workers}", f"{ranks(plan.world_size)} (data-parallel)"]
    rest += [f"{plan.accumulate} micro-batches a step"] if plan.accumulate > 1 else []
    if plan.is_off and not plan.is_known:
        return (f"lengths alone: no configuration, so no pool; taken to be {', '.join(rest)}",)
    if plan.is_off:
        why = "policy is 'none'" if settings.policy == "none" else "pool_size is 0"
        return (f"the pool is off ({why}); {', '.join(rest)}",)
    rest.append(f"seed {settings.seed}")
    rest += ["reference_lengths"] if plan.has_reference else []
    rest += [] if settings.class_shares is None else ["classes"]
    rest += [] if settings.cost is None else [f"cost {settings.cost!r}"]
    if settings.warmup is not None:
        rest.append(f"pool_warmup from {settings.warmup.initial} over {settings.warmup.flushes} pools")
    return (f"the pool is active: policy {settings.policy}, pool_size {settings.pool_size}; {', '.join(rest)}",)
