"""Checks of the data that a person would forget, each with what was found and what to do."""

from lightning_lengthpool.advise.advice import Check
from lightning_lengthpool.advise.check_context import Evidence, found, not_made, passed, some
from lightning_lengthpool.ordering.efficiency import WORTH
from lightning_lengthpool.runs.distribution import SURE, drift_of
from lightning_lengthpool.runs.words import number, percent, ranks
from lightning_lengthpool.simulation.choose import waste

STRETCH = 1000  # samples of a stretch, where no pool says how many it sees
_TOLERANCE = 0.02  # of a batch's tokens
_SPECIAL = 2.0  # tokens of each batch that a tokenizer may add
_UNEQUAL = 0.02  # of a rank's samples
_WIDE = 0.1  # interval of a fraction
_DRIFT = 0.05  # standard deviation of the stretches' mean places, which are from 0 to 1
_FEW = 40  # samples, which tell nothing


def lengths_differ(seen: Evidence) -> Check:
    """Whether there is anything to save."""
    key, title = "lengths_differ", "lengths differ enough for a pool"
    worst = max(seen.baselines, key=waste)
    if worst.case.world_size == 1 and worst.case.batch_size == 1:
        return not_made(key, title, "one rank with one sample a batch wastes nothing, whatever the lengths")
    where = ranks(worst.case.world_size)
    said = f"{percent(waste(worst))} is lost to waiting and padding without a pool at {where} (predicted)"
    if waste(worst) >= WORTH:
        return passed(key, title, said)
    return found(key, title, f"the lengths are nearly equal: only {said}", "a pool is not worth it here")


def ranks_alike(seen: Evidence) -> Check:
    """Whether a pool can match the ranks' lengths at all."""
    key, title, difference = "ranks_alike", "all ranks have lengths of one distribution", seen.difference
    if difference is None:
        why = "too few samples of each rank were read"
        if not seen.survey.has_ranks or not seen.plan.is_known:
            why = "lengths alone do not tell which rank reads them"
        elif seen.survey.ranks < 2:
            why = "there is one rank"
        return not_made(key, title, why)
    if not difference.is_sure:
        return passed(key, title)
    means = [float(own.mean()) for own in seen.survey.lengths_by_rank() if len(own)]
    limit = (
        f"no pool can go below about {percent(difference.floor)} idle (predicted; {percent(difference.chance)} would "
        "be chance)"
    )
    if seen.plan.max_tokens is not None:
        limit = "max_tokens lets their batches cost about the same, but those with long samples get through fewer"
    return found(
        key,
        title,
        f"the ranks' lengths are distributed differently (means from {number(min(means))} to {number(max(means))} "
        f"tokens): {limit}",
        "shuffle the samples over the shards and let each blended source give to all ranks",
    )


def no_drift(seen: Evidence) -> Check:
    """Whether a pool, which sees a stretch of its stream, sees what the others see."""
    key, title = "no_drift", "lengths come in random order"
    if not seen.survey.has_ranks or not seen.plan.is_known:
        return not_made(key, title, "lengths alone do not tell in which order they are read")
    stretch = seen.plan.pool_size if seen.plan.is_active else STRETCH
    drift = drift_of([stream.lengths for stream in seen.survey.streams], stretch)
    if drift is None:
        return not_made(key, title, "too few samples of each worker were read")
    if drift.size < _DRIFT or drift.deviations < SURE:
        return passed(key, title)
    return found(
        key,
        title,
        f"the lengths change along the data: the mean length of one stretch is up to {number(drift.ratio)} x that of "
        "another of the same worker, and a pool sees one stretch at a time, so the ranks choose from unlike samples",
        "shuffle the samples over the shards; or set shuffle_buffer_size, or max_samples_per_sequence lower, so that "
        "several shards are read at once",
    )


def equal_counts(seen: Evidence) -> Check:
    """Whether all ranks have equally many samples."""
    key, title, counts = "equal_counts", "all ranks have equally many samples", seen.survey.rank_samples
    if counts is None:
        return not_made(key, title, "how many samples fall to a rank is not known")
    if len(counts) < 2:
        return not_made(key, title, "there is one rank")
    low, high = min(counts), max(counts)
    if high - low <= max(1, _UNEQUAL * high):
        return passed(key, title, f"{low:,}" if low == high else f"{low:,} to {high:,}")
    numbers = seen.survey.surveyed_ranks()
    few = [rank for rank, count in zip(numbers, counts, strict=False) if count < (1 - _UNEQUAL) * high]
    return found(
        key,
        title,
        f"the ranks have {low:,} to {high:,} samples, the fewest on {some(few)}: these see theirs more often than "
        "the others",
        "make shards of about equal size, at least ranks x workers of them (energon prepare, or a smaller shard size)",
    )


def tokens_agree(seen: Evidence) -> Check:
    """Whether the length function says what the batches hold."""
    key, title, checks = "tokens_agree", "the length function agrees with the batches", seen.survey.batch_checks
    if not checks:
        return not_made(key, title, "no batch with a field to compare with was seen")
    off = [c for c in checks if abs(c.found - c.expected) > max(_SPECIAL, _TOLERANCE * max(c.found, c.expected))]
    if not off:
        return passed(key, title, f"{len(checks)} batch{'' if len(checks) == 1 else 'es'}, by {checks[0].field}")
    worst = max(off, key=lambda check: abs(check.found - check.expected))
    return found(
        key,
        title,
        f"in {len(off)} of {len(checks)} batches the length function says other than the batch: {worst.expected:g} "
        f"tokens where {worst.field} says {worst.found:g} (sample {worst.key!r})",
        "let length_fn, or the encoder's total_len, count all tokens that enter the model (after truncation, with "
        "special tokens and image patches)",
    )


def within_limit(seen: Evidence) -> Check:
    """Whether the model takes all samples."""
    key, title = "within_limit", "no sample is longer than the model takes"
    if seen.plan.max_length is None:
        return not_made(key, title, "the model's limit is not known; name it with --max_length")
    name, limit = seen.plan.max_length
    lengths = seen.survey.lengths
    count, longest = int((lengths > limit).sum()), float(lengths.max())
    if not count:
        drawn = "" if seen.survey.drawn_from is None else " of those drawn"
        return passed(key, title, f"the longest{drawn} has {number(longest)} of {limit:,} tokens ({name})")
    return found(
        key,
        title,
        f"{count:,} of {len(lengths):,} samples ({percent(count / len(lengths))}) are longer than {name}, {limit:,} "
        f"tokens; the longest has {number(longest)}",
        f"cut or leave out such samples in the encoder, or raise {name}",
    )


def no_failures(seen: Evidence) -> Check:
    """Whether samples fail in the encoder."""
    key, title, survey = "no_failures", "every sample can be encoded", seen.survey
    if not seen.plan.is_known:
        return not_made(key, title, "lengths alone have no encoder")
    if not survey.failed:
        return passed(key, title)
    first = "" if survey.failed_key is None else f", the first is {survey.failed_key}"
    return found(
        key, title, f"{survey.failed:,} samples failed{first}", "mend them or the encoder; fit leaves them out"
    )


def read_to_the_end(seen: Evidence) -> Check:
    """Whether the survey read what it was to read."""
    key, title = "read_to_the_end", "reading was not interrupted"
    if seen.survey.is_complete:
        return passed(key, title)
    count = len(seen.survey.lengths)
    asked = f" of {seen.survey.asked:,}" if seen.survey.asked else ""
    return found(
        key, title, f"reading stopped after {count:,}{asked} samples", "let it read to the end for firmer figures"
    )


def enough_samples(seen: Evidence) -> Check:
    """Whether the figures are firm."""
    key, title, idle = "enough_samples", "enough samples were read", seen.today.idle
    count, width = len(seen.survey.lengths), idle.high - idle.low
    said = f"{count:,}, which tell idle to within {100 * width / 2:.1f} points"
    if width <= _WIDE and count >= _FEW:
        return passed(key, title, said)
    return found(key, title, f"few samples were read: {said}", "read more with --samples")
