"""All checks that a person would forget, of data and settings: each says what was found and what to do."""

import math

from lightning_lengthpool.advise.checks.check import (
    CheckContext,
    CheckList,
    Outcome,
    first_ranks,
    found,
    not_made,
    passed,
)
from lightning_lengthpool.ordering.efficiency import WORTH
from lightning_lengthpool.runs.distribution import SURE, drift_of
from lightning_lengthpool.runs.formatting import megabytes, number, percent, ranks
from lightning_lengthpool.simulation.choose import waste

MEMORY_SHARE = 0.5  # of a machine: the rest is for the model, batches under way and the page cache
BATCHES_IN_POOL = 10  # a pool of fewer is too small
STRETCH = 1000  # samples of a stretch, where no pool says how many it sees
_TOLERANCE = 0.02  # of a batch's tokens
_SPECIAL = 2.0  # tokens of each batch that a tokenizer may add
_UNEQUAL = 0.02  # of a rank's samples
_WIDE = 0.1  # interval of a fraction
_DRIFT = 0.05  # standard deviation of the stretches' mean quantiles
_FEW = 40  # samples, which tell nothing
_NO_POOL = not_made("there is no pool")

CHECKS = CheckList()


@CHECKS.add("the pool is on")
def pool_on(context: CheckContext) -> Outcome:
    if not context.plan.is_off:
        return passed()
    if not context.plan.is_known:
        return not_made("lengths alone do not say whether the pool is on")
    why = "pool_size is 0" if context.plan.settings.policy != "none" else "policy is 'none'"
    return found(f"the pool is off: {why}", "see the recommendation")


@CHECKS.add("the pool holds many batches")
def pool_over_batch(context: CheckContext) -> Outcome:
    if context.plan.is_off:
        return _NO_POOL
    batches = context.relation.batches_per_pool
    size = f"the pool of {context.plan.settings.pool_size:,} holds {number(round(batches, 1))} batches"
    if batches >= BATCHES_IN_POOL:
        return passed(size)
    least = math.ceil(BATCHES_IN_POOL * context.relation.batch_samples)
    return found(
        f"{size}: too few to find samples of like lengths",
        f"set pool_size to 10 to 100 times a batch's samples: {least:,} to {10 * least:,}",
    )


@CHECKS.add("the pools hold a part of the data set")
def pool_in_share(context: CheckContext) -> Outcome:
    share, held = context.relation.rank_share, context.relation.rank_samples
    if not held:
        return _NO_POOL
    if share is None:
        return not_made("how many samples fall to a rank is not known")
    if held <= share:
        return passed(f"{held:,} of the {share:,} samples that fall to a rank")
    return found(
        f"the pools of a rank hold {held:,} samples, but only {share:,} of the data set fall to it: the first batch "
        "waits for more than an epoch, and samples meet themselves in the pool",
        f"set pool_size to {max(1, share // context.plan.pools_per_rank):,} or less, or use fewer workers",
    )


@CHECKS.add("lengths differ enough for a pool")
def lengths_differ(context: CheckContext) -> Outcome:
    worst = max(context.baselines, key=waste)
    if worst.case.world_size == 1 and worst.case.batch_size == 1:
        return not_made("one rank with one sample a batch wastes nothing, whatever the lengths")
    lost = (
        f"{percent(waste(worst))} is lost to waiting and padding without a pool at {ranks(worst.case.world_size)} "
        "(predicted)"
    )
    if waste(worst) >= WORTH:
        return passed(lost)
    return found(f"the lengths are nearly equal: only {lost}", "a pool is not worth it here")


@CHECKS.add("all ranks have lengths of one distribution")
def ranks_alike(context: CheckContext) -> Outcome:
    scan, difference = context.scan, context.difference
    if difference is None:
        if not scan.has_ranks or not context.plan.is_known:
            return not_made("lengths alone do not tell which rank reads them")
        return not_made("there is one rank" if scan.ranks < 2 else "too few samples of each rank were read")
    if not difference.is_sure:
        return passed()
    means = [float(lengths.mean()) for lengths in scan.lengths_by_rank() if len(lengths)]
    limit = (
        f"no pool can go below about {percent(difference.floor)} idle (predicted; {percent(difference.chance)} would "
        "be chance)"
    )
    if context.plan.settings.max_tokens is not None:
        limit = "max_tokens lets their batches cost about the same, but those with long samples get through fewer"
    return found(
        f"the ranks' lengths are distributed differently (means from {number(min(means))} to {number(max(means))} "
        f"tokens): {limit}",
        "shuffle the samples over the shards and let each blended source give to all ranks",
    )


@CHECKS.add("lengths come in random order")
def no_drift(context: CheckContext) -> Outcome:
    """A pool sees a stretch of its stream; is that like all of it?"""
    if not context.scan.has_ranks or not context.plan.is_known:
        return not_made("lengths alone do not tell in which order they are read")
    stretch = STRETCH if context.plan.is_off else context.plan.settings.pool_size
    drift = drift_of([stream.lengths for stream in context.scan.streams], stretch)
    if drift is None:
        return not_made("too few samples of each worker were read")
    if drift.size < _DRIFT or drift.deviations < SURE:
        return passed()
    return found(
        f"the lengths change along the data: the mean length of one stretch is up to {number(drift.ratio)} x that of "
        "another of the same worker, and a pool sees one stretch at a time, so the ranks choose from unlike samples",
        "shuffle the samples over the shards; or set shuffle_buffer_size, or max_samples_per_sequence lower, so that "
        "several shards are read at once",
    )


@CHECKS.add("all ranks have equally many samples")
def equal_counts(context: CheckContext) -> Outcome:
    counts = context.scan.rank_samples
    if counts is None:
        return not_made("how many samples fall to a rank is not known")
    if len(counts) < 2:
        return not_made("there is one rank")
    low, high = min(counts), max(counts)
    if high - low <= max(1, _UNEQUAL * high):
        return passed(f"{low:,}" if low == high else f"{low:,} to {high:,}")
    by_rank = zip(context.scan.ranks_read(), counts, strict=False)
    few = [rank for rank, count in by_rank if count < (1 - _UNEQUAL) * high]
    return found(
        f"the ranks have {low:,} to {high:,} samples, the fewest on {first_ranks(few)}: these see theirs more often "
        "than the others",
        "make shards of about equal size, at least ranks x workers of them (energon prepare, or a smaller shard size)",
    )


@CHECKS.add("num_workers is the same on all ranks")
def equal_workers(context: CheckContext) -> Outcome:
    workers = context.plan.workers_by_rank
    if context.plan.world_size < 2:
        return not_made("there is one rank")
    if workers is None:
        return not_made("one configuration has one number; only a run's record tells what each rank had")
    if len(set(workers)) == 1:
        return passed(f"{workers[0]}")
    usual = max(set(workers), key=workers.count)
    others = first_ranks([rank for rank, count in enumerate(workers) if count != usual])
    return found(
        f"num_workers is {usual} on most ranks, but not on {others} ({', '.join(map(str, sorted(set(workers))))}): "
        "batch i of a rank comes from worker i % num_workers, so these ranks draw other lengths at the same step",
        "set num_workers to the same number on all ranks",
    )


@CHECKS.add("the length function agrees with the batches")
def tokens_agree(context: CheckContext) -> Outcome:
    checks = context.scan.batch_checks
    if not checks:
        return not_made("no batch with a field to compare with was seen")
    wrong = [c for c in checks if abs(c.counted - c.expected) > max(_SPECIAL, _TOLERANCE * max(c.counted, c.expected))]
    if not wrong:
        return passed(f"{len(checks)} batch{'' if len(checks) == 1 else 'es'}, by {checks[0].field}")
    worst = max(wrong, key=lambda check: abs(check.counted - check.expected))
    return found(
        f"in {len(wrong)} of {len(checks)} batches the length function says other than the batch: {worst.expected:g} "
        f"tokens where {worst.field} says {worst.counted:g} (sample {worst.key!r})",
        "let length_fn, or the encoder's total_len, count all tokens that enter the model (after truncation, with "
        "special tokens and image patches)",
    )


@CHECKS.add("no sample is longer than the model takes")
def within_limit(context: CheckContext) -> Outcome:
    if context.plan.max_length is None:
        return not_made("the model's limit is not known; name it with --max_length")
    name, limit = context.plan.max_length
    lengths = context.scan.lengths
    count, longest = int((lengths > limit).sum()), float(lengths.max())
    if not count:
        drawn = "" if context.scan.drawn_from is None else " of those drawn"
        return passed(f"the longest{drawn} has {number(longest)} of {limit:,} tokens ({name})")
    return found(
        f"{count:,} of {len(lengths):,} samples ({percent(count / len(lengths))}) are longer than {name}, {limit:,} "
        f"tokens; the longest has {number(longest)}",
        f"cut or leave out such samples in the encoder, or raise {name}",
    )


@CHECKS.add("every sample fits into max_tokens")
def within_budget(context: CheckContext) -> Outcome:
    budget = context.plan.settings.max_tokens
    if budget is None:
        return not_made("there is no token budget")
    count = max(context.scan.over_budget, int((context.scan.costs > budget).sum()))  # those left out are in the first
    if not count:
        return passed()
    return found(
        f"{count:,} sample{'' if count == 1 else 's'} alone cost{'s' if count == 1 else ''} more than max_tokens, "
        f"{number(budget)}",
        "raise max_tokens, or say with over_budget what happens to them ('alone' or 'drop'; 'error' ends training)",
    )


@CHECKS.add("every sample can be encoded")
def no_failures(context: CheckContext) -> Outcome:
    if not context.plan.is_known:
        return not_made("lengths alone have no encoder")
    if not context.scan.failed:
        return passed()
    first = "" if context.scan.failed_key is None else f", the first is {context.scan.failed_key}"
    return found(f"{context.scan.failed:,} samples failed{first}", "fix them or the encoder; fit leaves them out")


@CHECKS.add("the pools fit into memory")
def memory(context: CheckContext) -> Outcome:
    need_bytes, plan = context.cost.node_bytes, context.plan
    if not context.cost.pool_samples:
        return _NO_POOL
    if need_bytes is None:
        return not_made("what a sample weighs was not measured")
    workers = "1 worker" if plan.pools_per_rank == 1 else f"{plan.pools_per_rank} workers"
    need = f"{megabytes(need_bytes)} for {ranks(plan.ranks_on_node)} of {workers}"
    if context.machine_bytes is None:
        return not_made(f"how much memory the machine has is not known (the pools take {need})")
    have = megabytes(context.machine_bytes)
    if need_bytes <= MEMORY_SHARE * context.machine_bytes:
        return passed(f"{need}; the machine has {have}")
    return found(
        f"the pools take {need}, and the machine has {have}, which also holds the model and the batches under way",
        "lower pool_size or num_workers; or split the encoder (preencode_sample, postencode_sample), so that the pool "
        "holds what is light",
    )


@CHECKS.add("a resumed run gets back what its pools held")
def restorable(context: CheckContext) -> Outcome:
    if not context.cost.pool_samples:
        return _NO_POOL
    if not context.plan.is_known:
        return not_made("lengths alone have no encoder")
    if context.scan.restore_seconds is not None:
        return passed()
    if not context.scan.is_complete:
        return not_made("reading was interrupted before it was tried")
    return found(
        "the encoder cannot bring a sample back by its key, so a run that is resumed loses what its pools held",
        "mark the encoder's methods as @stateless (docs/resume.md); nothing to do if runs are never resumed",
    )


@CHECKS.add("reading was not interrupted")
def read_to_the_end(context: CheckContext) -> Outcome:
    if context.scan.is_complete:
        return passed()
    asked = f" of {context.scan.asked:,}" if context.scan.asked else ""
    return found(
        f"reading stopped after {len(context.scan.lengths):,}{asked} samples",
        "let it read to the end for firmer figures",
    )


@CHECKS.add("enough samples were read")
def enough_samples(context: CheckContext) -> Outcome:
    count, width = len(context.scan.lengths), context.today.idle.high - context.today.idle.low
    figures = f"{count:,}, which tell idle to within {100 * width / 2:.1f} points"
    if width <= _WIDE and count >= _FEW:
        return passed(figures)
    return found(f"few samples were read: {figures}", "read more with --samples")
