"""All checks that a person would forget, and those of the settings: each with what was found and what to do."""

import math

from lightning_lengthpool.advise import data_checks as data
from lightning_lengthpool.advise.advice import Check
from lightning_lengthpool.advise.check_context import Evidence, found, not_made, passed, some
from lightning_lengthpool.advise.facts import ranks_on_node
from lightning_lengthpool.runs.words import megabytes, number, ranks

MEMORY_SHARE = 0.5  # of a machine: the rest is for the model, batches under way and the page cache
BATCHES_IN_POOL = 10  # a pool of fewer is too small


def check_all(seen: Evidence) -> tuple[Check, ...]:
    """Make all checks, in a fixed order."""
    return (
        _pool_on(seen),
        _pool_over_batch(seen),
        _pool_in_share(seen),
        data.lengths_differ(seen),
        data.ranks_alike(seen),
        data.no_drift(seen),
        data.equal_counts(seen),
        _equal_workers(seen),
        data.tokens_agree(seen),
        data.within_limit(seen),
        _within_budget(seen),
        data.no_failures(seen),
        _memory(seen),
        _restorable(seen),
        data.read_to_the_end(seen),
        data.enough_samples(seen),
    )


def _pool_on(seen: Evidence) -> Check:
    key, title = "pool_on", "the pool is on"
    if seen.plan.is_active:
        return passed(key, title)
    if not seen.plan.is_known:
        return not_made(key, title, "lengths alone do not say whether the pool is on")
    why = "pool_size is 0" if seen.plan.policy != "none" else "policy is 'none'"
    return found(key, title, f"the pool is off: {why}", "see the recommendation")


def _pool_over_batch(seen: Evidence) -> Check:
    key, title = "pool_over_batch", "the pool holds many batches"
    if not seen.plan.is_active:
        return not_made(key, title, "there is no pool")
    batches = seen.relation.batches_per_pool
    said = f"the pool of {seen.plan.pool_size:,} holds {number(round(batches, 1))} batches"
    if batches >= BATCHES_IN_POOL:
        return passed(key, title, said)
    least = math.ceil(BATCHES_IN_POOL * seen.relation.batch_samples)
    return found(
        key,
        title,
        f"{said}: too few to find samples of like lengths",
        f"set pool_size to 10 to 100 times a batch's samples: {least:,} to {10 * least:,}",
    )


def _pool_in_share(seen: Evidence) -> Check:
    key, title = "pool_in_share", "the pools hold a part of the data set"
    share, held = seen.relation.rank_share, seen.relation.rank_samples
    if not held:
        return not_made(key, title, "there is no pool")
    if share is None:
        return not_made(key, title, "how many samples fall to a rank is not known")
    if held <= share:
        return passed(key, title, f"{held:,} of the {share:,} samples that fall to a rank")
    return found(
        key,
        title,
        f"the pools of a rank hold {held:,} samples, but only {share:,} of the data set fall to it: the first batch "
        "waits for more than an epoch, and samples meet themselves in the pool",
        f"set pool_size to {max(1, share // seen.plan.pools):,} or less, or use fewer workers",
    )


def _equal_workers(seen: Evidence) -> Check:
    key, title, workers = "equal_workers", "num_workers is the same on all ranks", seen.plan.workers_by_rank
    if seen.plan.world_size < 2:
        return not_made(key, title, "there is one rank")
    if workers is None:
        return not_made(key, title, "one configuration has one number; only a run's record tells what each rank had")
    if len(set(workers)) == 1:
        return passed(key, title, f"{workers[0]}")
    usual = max(set(workers), key=workers.count)
    other = [rank for rank, count in enumerate(workers) if count != usual]
    return found(
        key,
        title,
        f"num_workers is {usual} on most ranks, but not on {some(other)} "
        f"({', '.join(str(count) for count in sorted(set(workers)))}): batch i of a rank comes from worker "
        "i % num_workers, so these ranks draw other lengths at the same step",
        "set num_workers to the same number on all ranks",
    )


def _within_budget(seen: Evidence) -> Check:
    key, title, budget = "within_budget", "every sample fits into max_tokens", seen.plan.max_tokens
    if budget is None:
        return not_made(key, title, "there is no token budget")
    count = max(seen.survey.over_budget, int((seen.survey.costs > budget).sum()))  # those left out are in the first
    if not count:
        return passed(key, title)
    return found(
        key,
        title,
        f"{count:,} sample{'' if count == 1 else 's'} alone cost{'s' if count == 1 else ''} more than max_tokens, "
        f"{number(budget)}",
        "raise max_tokens, or say with over_budget what happens to them ('alone' or 'drop'; 'error' ends training)",
    )


def _memory(seen: Evidence) -> Check:
    key, title, cost = "memory", "the pools fit into memory", seen.cost
    if not cost.pool_samples:
        return not_made(key, title, "there is no pool")
    if cost.node_bytes is None:
        return not_made(key, title, "what a sample weighs was not measured")
    on_node = ranks_on_node(seen.plan)
    workers = "1 worker" if seen.plan.pools == 1 else f"{seen.plan.pools} workers"
    need = f"{megabytes(cost.node_bytes)} for {ranks(on_node)} of {workers}"
    if seen.machine_bytes is None:
        return not_made(key, title, f"how much memory the machine has is not known (the pools take {need})")
    have = megabytes(seen.machine_bytes)
    if cost.node_bytes <= MEMORY_SHARE * seen.machine_bytes:
        return passed(key, title, f"{need}; the machine has {have}")
    return found(
        key,
        title,
        f"the pools take {need}, and the machine has {have}, which also holds the model and the batches under way",
        "lower pool_size or num_workers; or split the encoder (preencode_sample, postencode_sample), so that the pool "
        "holds what is light",
    )


def _restorable(seen: Evidence) -> Check:
    key, title, survey = "restorable", "a resumed run gets back what its pools held", seen.survey
    if not seen.cost.pool_samples:
        return not_made(key, title, "there is no pool")
    if not seen.plan.is_known:
        return not_made(key, title, "lengths alone have no encoder")
    if survey.restore_seconds is not None:
        return passed(key, title)
    if not survey.is_complete:
        return not_made(key, title, "reading was interrupted before it was tried")
    return found(
        key,
        title,
        "the encoder cannot bring a sample back by its key, so a run that is resumed loses what its pools held",
        "mark the encoder's methods as @stateless (docs/resume.md); nothing to do if runs are never resumed",
    )
