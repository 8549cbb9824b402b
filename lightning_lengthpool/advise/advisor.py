"""Lengths of a data set and today's settings -> what is wasted, why, and one recommendation with its reasons."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_lengthpool.advise.advice import Advice, Plan
from lightning_lengthpool.advise.check_context import Evidence
from lightning_lengthpool.advise.checks import MEMORY_SHARE, check_all
from lightning_lengthpool.advise.choice import Choice, choose, needs_stream, recommend
from lightning_lengthpool.advise.facts import bound, cost_of, describe, ranks_on_node, relate
from lightning_lengthpool.ordering.settings import PoolSettings
from lightning_lengthpool.runs.causes import Summary
from lightning_lengthpool.runs.distribution import difference_of_ranks
from lightning_lengthpool.runs.run import Run
from lightning_lengthpool.runs.words import number, ranks
from lightning_lengthpool.simulation.choose import (
    POOL_SIZES,
    batch_samples,
    cases_to_try,
    samples_without_pool,
    sizes_to_try,
)
from lightning_lengthpool.simulation.predict import Case, Lengths, predict
from lightning_lengthpool.simulation.uncertainty import Seconds, costs_of

if TYPE_CHECKING:
    from lightning_lengthpool.advise.scan.scan import Survey

__all__ = ["Advice", "Plan", "advise"]

Array = NDArray[np.float64]


def advise(
    survey: "Survey",
    plan: Plan,
    *,
    world_sizes: Sequence[int],
    pool_sizes: Sequence[int] | None = None,
    run: Run | None = None,
    machine_bytes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Advice:
    """Say what today's settings waste, what others would, and what to do.

    Predicted are today's settings, and at today's and each given world size no pool and the sweep: each policy that
    goes with the settings at each pool size; at today's world size 'stream' with `reference_lengths` as well.

    Args:
        survey: The data.
        plan: Today's settings.
        world_sizes: Data-parallel ranks to predict for, beside today's.
        pool_sizes: To predict for, beside today's; by default `POOL_SIZES`. Those smaller than a batch are left out.
        run: A measured run: where its time went, and what a step takes by its tokens, which idle is then predicted by.
        machine_bytes: Memory of one machine.
        progress: Called with the number of settings that are predicted, and of all of them.

    Raises:
        ValueError: If no length above 0 was read, or a number is out of its range; the message names it.
    """
    lengths = survey.lengths
    if not len(lengths):
        raise ValueError("no length was read, so there is nothing to go by")
    if not lengths.any():
        raise ValueError(f"all {len(lengths):,} lengths are 0, expected some tokens to go by")
    for name, values in (("world_sizes", world_sizes), ("pool_sizes", pool_sizes or ())):
        for value in values:
            if value < 1:
                raise ValueError(f"{name} has {value}, expected integers of at least 1")
    batch = batch_samples(survey.costs, plan.batch_size, plan.max_tokens)
    summary = None if run is None else run.causes
    price = _price(survey, plan, batch, summary, "" if run is None else run.name)
    difference = None
    if survey.has_ranks:
        difference = difference_of_ranks([costs_of(price.seconds, batch * own, own) for own in price.by_rank])
    is_iid = difference is None or not difference.is_sure
    known = _known(survey, plan, price, is_iid)

    worlds = list(dict.fromkeys((plan.world_size, *world_sizes)))
    rank_samples = None if survey.rank_samples is None else min(survey.rank_samples)
    room = None
    if machine_bytes is not None and survey.sample_bytes:
        room = MEMORY_SHARE * machine_bytes / (survey.sample_bytes * plan.pools * ranks_on_node(plan))
    wanted = (*(pool_sizes or POOL_SIZES), *([plan.pool_size] if plan.is_active else []))
    sizes = sizes_to_try(wanted, batch, pools=plan.pools, rank_samples=rank_samples, room=room)
    off = PoolSettings(samples_without_pool(survey.costs, plan.batch_size, plan.max_tokens), 0, "none", plan.seed)
    baselines = {world: Case(off, world, plan.accumulate) for world in worlds}
    sweep = [case for world in worlds for case in _sweep(plan, survey, world, sizes, is_iid)]
    now = plan.case if plan.is_active else baselines[plan.world_size]
    cases = list(dict.fromkeys((now, *baselines.values(), *sweep)))
    shown = None if progress is None else (lambda done: progress(done, len(cases)))
    found = predict(known, cases, seconds=price.seconds, progress=shown)
    predicted = dict(zip(cases, found, strict=True))
    today = predicted[now]

    costs = {case: cost_of(case, plan, survey, batch) for case in cases}
    choice = Choice(
        plan=plan,
        today=today,
        baseline=predicted[baselines[plan.world_size]],
        candidates=[predicted[case] for case in sweep if case.world_size == plan.world_size],
        costs=costs,
        machine_bytes=machine_bytes,
        rank_share=rank_samples,
    )
    best = choose(choice)
    relation = relate(plan, survey, batch, best.case)
    evidence = Evidence(
        survey=survey,
        plan=plan,
        today=today,
        baselines=[predicted[case] for case in baselines.values()],
        cost=costs[now],
        relation=relation,
        difference=difference,
        machine_bytes=machine_bytes,
    )
    checks = check_all(evidence)
    elsewhere = [replace(best.case, world_size=world) for world in worlds[1:]]
    others = [predicted[case] for case in elsewhere if case in predicted]
    # a token budget lets batches of any lengths cost about the same
    floor = 0.0 if difference is None or is_iid or plan.max_tokens is not None else difference.floor
    bottleneck = bound(today, best, floor, summary, "" if run is None else run.name, price.basis)
    return Advice(
        plan=plan,
        pool=_said_of_pool(plan),
        distribution=replace(
            describe(lengths, plan.world_size if plan.world_size > 1 else max(worlds), max(1, round(batch))),
            drawn_from=survey.drawn_from,
        ),
        basis=price.basis,
        today=today,
        predictions=tuple(found),
        costs=tuple(costs[case] for case in dict.fromkeys((now, best.case))),
        relation=relation,
        bottleneck=bottleneck,
        checks=checks,
        recommendation=recommend(choice, best, checks, others, bottleneck.run),
    )


class _Price(NamedTuple):
    """What idle is predicted in."""

    by_rank: list[Array]  # of each sample
    seconds: Seconds | None  # what a batch costs, by its samples times the largest of these, and that; None: the former
    basis: str


def _price(survey: "Survey", plan: Plan, batch: float, summary: Summary | None, name: str) -> _Price:
    lengths, fitted = survey.lengths_by_rank(), None if summary is None else summary.seconds
    costs = "" if plan.cost is None else f"the costs of {plan.cost}"
    if costs and not plan.is_padded and batch > 1:
        costs += ", as if all samples of a batch were as dear as its dearest"
    if costs and not _tells_cost(survey):
        return _Price(survey.costs_by_rank(), None, costs)
    if fitted is not None:
        return _Price(lengths, fitted, f"seconds, by a fit of the run {name}")
    if not costs:
        return _Price(lengths, None, "padded tokens")
    known, first = np.unique(survey.lengths, return_index=True)

    def seconds(padded: Array, longest: Array) -> Array:
        samples = np.divide(padded, longest, out=np.zeros_like(padded), where=longest > 0)
        priced: Array = samples * np.interp(longest, known, survey.costs[first])
        return priced

    return _Price(lengths, seconds, costs)


def _known(survey: "Survey", plan: Plan, price: _Price, is_iid: bool) -> Lengths:
    """The lengths as the prediction takes them; ranks of which nothing was read are left out."""
    by_rank, costs, labels = price.by_rank, survey.costs_by_rank(), survey.classes_by_rank()
    read = [rank for rank, own in enumerate(by_rank) if len(own)]
    return Lengths(
        tuple(by_rank[rank] for rank in read),
        is_iid=is_iid,
        costs=None if plan.cost is None else tuple(costs[rank] for rank in read),
        classes=None if labels is None else tuple(labels[rank] for rank in read),
    )


def _sweep(plan: Plan, survey: "Survey", world_size: int, sizes: Sequence[int], is_iid: bool) -> list[Case]:
    """The cases of one world size; with reference lengths, one question more, at today's only.

    Where the ranks' lengths are distributed differently, a reference is left out: at first each pool lets the lengths
    go that all have, and only later what has piled up in it, which a prediction of some steps does not see.
    """
    return cases_to_try(
        replace(plan, world_size=world_size).with_pool,
        sizes,
        needs_stream=needs_stream(plan) or survey.classes is not None,
        may_refer=world_size == plan.world_size > 1 and is_iid and _tells_cost(survey),
    )


def _tells_cost(survey: "Survey") -> bool:
    """Whether a sample's length tells what it costs: a file of lengths is no use otherwise."""
    order = np.lexsort((survey.costs, survey.lengths))
    lengths, costs = survey.lengths[order], survey.costs[order]
    steps = np.diff(costs)
    return bool((steps >= 0).all() and (steps[np.diff(lengths) == 0] == 0).all())


def _said_of_pool(plan: Plan) -> tuple[str, ...]:
    """Whether the pool is active, and how it is set."""
    rest = [f"batch_size {plan.batch_size}"] if plan.batch_size is not None else []
    rest += [f"max_tokens {number(plan.max_tokens)}"] if plan.max_tokens is not None else []
    rest += [f"num_workers {plan.num_workers}", f"{ranks(plan.world_size)} (data-parallel)"]
    rest += [f"{plan.accumulate} micro-batches a step"] if plan.accumulate > 1 else []
    if not plan.is_known and not plan.is_active:
        return (f"lengths alone: no configuration, so no pool; taken to be {', '.join(rest)}",)
    if not plan.is_active:
        why = "policy is 'none'" if plan.policy == "none" else "pool_size is 0"
        return (f"the pool is off ({why}); {', '.join(rest)}",)
    extra = [f"seed {plan.seed}"]
    extra += ["reference_lengths"] if plan.has_reference else []
    extra += ["classes"] if plan.class_shares is not None else []
    extra += [f"cost {plan.cost}"] if plan.cost is not None else []
    extra += [f"pool_warmup from {plan.warmup[0]} over {plan.warmup[1]} pools"] if plan.warmup is not None else []
    return (f"the pool is active: policy {plan.policy}, pool_size {plan.pool_size}; {', '.join((*rest, *extra))}",)
