"""Which setting to recommend, of those that were predicted, and why."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_lengthpool.advise.advice import Causes, Check, Cost, Plan, Recommendation, Verdict
from lightning_lengthpool.advise.facts import full_pool
from lightning_lengthpool.ordering import efficiency
from lightning_lengthpool.ordering.efficiency import WORTH
from lightning_lengthpool.runs.formatting import duration, interval, megabytes, number, percent, ranks, setting
from lightning_lengthpool.runs.thresholds import NAMED_FROM
from lightning_lengthpool.simulation.cases import Case
from lightning_lengthpool.simulation.choose import Chooser, waste
from lightning_lengthpool.simulation.predict import Prediction


@dataclass(frozen=True)
class Choice:
    """What is chosen, and from what: one verdict for all that is said."""

    plan: Plan
    chooser: Chooser
    candidates: Sequence[Prediction]  # at today's world size
    costs: Mapping[Case, Cost]  # of all cases
    machine_bytes: int | None  # memory of a machine; None if it is not known
    measured: Causes | None = None  # where the time of a run of today's settings went, by its seconds

    @property
    def today(self) -> Prediction:
        """The prediction for today's settings."""
        return self.chooser.today

    @cached_property
    def best(self) -> Prediction:
        """The setting to use: the chooser's, unless a run of today's settings has measured too little to save."""
        best = self.chooser.choose(self.candidates)
        is_possible = self.chooser.is_possible(self.today.case)
        return self.today if is_possible and not best.case.settings.is_off and self.is_measured_out(best) else best

    def is_measured_out(self, other: Prediction) -> bool:
        """Whether a run of today's settings lost so little to lengths that another setting cannot save enough."""
        if self.measured is None:
            return False
        idle = max(other.idle.mean, self.today.idle.mean - self.measured.lengths)
        return waste(self.today) - efficiency.waste(idle, other.padding.mean) < self.chooser.worth

    @property
    def verdict(self) -> Verdict:
        """What the best setting means."""
        if self.best.case == self.today.case and not self.plan.is_off:
            return "keep"
        return "no pool" if self.best.case.settings.is_off else "change"


def recommend(
    choice: Choice,
    checks: Sequence[Check] = (),
    others: Sequence[Prediction] = (),
    run: Causes | None = None,
) -> Recommendation:
    """Put the choice in words.

    Args:
        choice: What is chosen, and from what.
        checks: What was found beside the lengths.
        others: Predictions of the same setting at other world sizes.
        run: Where the time of a measured run went.
    """
    plan, today, best, verdict = choice.plan, choice.today, choice.best, choice.verdict
    if verdict == "keep":
        sentence = f"change nothing: no other setting is worth a change from {setting(best.case)}"
    elif verdict == "no pool":
        sentence = _no_pool(choice)
    else:
        now = f"now: {setting(today.case)}" if plan.is_known or not plan.is_off else "no setting is known"
        sentence = f"use {setting(best.case)} ({now})"
    reasons = [f"today ({setting(today.case)}): {_figures(today)} at {ranks(plan.world_size)} (predicted)"]
    if best.case != today.case:
        reasons.append(f"then ({setting(best.case)}): {_figures(best)} (predicted)")
    if not choice.chooser.fits(today.case):
        need, have = megabytes(choice.costs[today.case].node_bytes), megabytes(choice.machine_bytes)
        reasons.append(f"today's pools take {need} of the machine's {have}")
    if not choice.chooser.is_within_share(today.case):
        reasons.append("today's pools hold more samples than fall to a rank")
    not_best = _not_best(choice)
    reasons += [not_best] if not_best else []
    reasons += _consequences(choice) if verdict == "change" else []
    is_unlike = any(check.key == "ranks_alike" and check.result == "found" for check in checks)
    if verdict != "change" and not plan.is_off and not is_unlike:  # else a smaller pool is as good until that is fixed
        reasons += _could_be_smaller(choice)
    reasons += [
        f"at {ranks(other.case.world_size)} the same setting would leave {percent(other.idle.mean)} idle (predicted)"
        for other in others
        if abs(other.idle.mean - best.idle.mean) >= WORTH
    ]
    reasons += _not_solved(checks, plan)
    reasons += [] if run is None else _other_causes(run)
    return Recommendation(verdict, best.case, sentence, tuple(reasons), not_best, yaml_lines(plan, best.case), best)


def _figures(prediction: Prediction) -> str:
    return (
        f"{interval(prediction.idle)} idle, {percent(prediction.padding.mean)} padding, "
        f"{percent(prediction.useful.mean)} useful"
    )


def _no_pool(choice: Choice) -> str:
    plan = choice.plan
    if not choice.chooser.fits(choice.today.case):
        return "switch the pool off: there is no room for one in memory, unless you use fewer workers"
    if waste(choice.chooser.baseline) >= WORTH:
        why = "none that is possible gains two points"
    elif plan.world_size == 1:
        why = "one rank waits for nobody, and there is little padding to save"
    else:
        why = "lengths are nearly equal"
    return f"a pool is not worth it here: {why}" + ("" if plan.is_off else "; leave it as it is, or switch it off")


def yaml_lines(plan: Plan, case: Case) -> str:
    """The lines to paste: the settings of the data module that change; none if it is to stay as it is."""
    now, then = plan.settings, case.settings
    lines: list[str] = []
    if then.is_off:
        lines = [] if plan.is_off else ["policy: none"]
    else:
        if then.policy != now.policy or not plan.is_known:
            lines.append(f"policy: {then.policy}")
        if then.pool_size != now.pool_size or not plan.is_known:
            lines.append(f"pool_size: {then.pool_size}")
        if case.has_reference and not plan.has_reference:
            is_plain = re.fullmatch(r"[\w./-]+", plan.lengths_file)
            lines.append(f"reference_lengths: {plan.lengths_file if is_plain else json.dumps(plan.lengths_file)}")
        if then.max_tokens is not None and not plan.is_known:
            budget = int(then.max_tokens) if then.max_tokens == int(then.max_tokens) else then.max_tokens
            lines.append(f"max_tokens: {budget}")
        if lines and then.is_stream and now.warmup is not None:
            lines.append("pool_warmup: null")
    return "".join(f"{line}\n" for line in ("data:", "  init_args:", *(f"    {line}" for line in lines)) if lines)


def _not_best(choice: Choice) -> str:
    """Why the setting is not the one with the best figures; empty if it is."""
    best, chooser = choice.best, choice.chooser
    rows = [*choice.candidates, chooser.baseline]
    least = min(rows, key=waste)
    possible = min([best, *(row for row in rows if chooser.is_possible(row.case))], key=waste)
    parts = []
    if _points(least, possible):
        why = "its pools would hold more than a rank's share of the data set"
        if not chooser.fits(least.case):
            why = "it takes more memory than there is"
        parts.append(f"{setting(least.case)} would leave {percent(least.idle.mean)} idle, but {why}")
    if points := _points(possible, best):
        best_possible = f"the best{' that is possible' if parts else ''} ({setting(possible.case)})"
        parts.append(
            f"{setting(best.case)} is within {points} points of {best_possible}, and {_less(choice, possible)}"
        )
    return "; ".join(parts)


def _points(better: Prediction, other: Prediction) -> str:
    """By how many points of waste one setting is better; empty if that is not visible."""
    points = f"{100 * (waste(other) - waste(better)):.1f}"
    return points if float(points) > 0 else ""


def _less(choice: Choice, other: Prediction) -> str:
    """Why the best setting is preferred to one with better figures: what it takes less."""
    case, run = choice.best.case, choice.measured
    if run is not None and case == choice.today.case and choice.is_measured_out(other):
        return f"the run {run.name} of today's settings lost only {percent(run.lengths)} to lengths"
    less = []
    if case.settings.is_off:
        less.append("needs no pool")
    elif full_pool(case) < full_pool(other.case):
        less.append(f"holds {percent(full_pool(case) / full_pool(other.case))} of its samples in memory")
    if case.policy == choice.today.case.policy != other.case.policy:
        less.append("needs no other policy")
    if other.case.has_reference and not case.has_reference:
        less.append("needs no file of reference lengths")
    each = f"each change has to save {number(round(100 * choice.chooser.worth, 1))} points"
    return f"{', '.join(less)}: {each}" if less else each


def _consequences(choice: Choice) -> list[str]:
    """What comes with a change."""
    plan, today, best, case = choice.plan, choice.today, choice.best, choice.best.case
    sentences = []
    is_one = case.max_tokens is None and case.settings.slot_size == 1
    if case.policy in ("blocks", "stream") and today.case.policy in ("none", "pool") and not is_one:
        sentences.append(
            "batches are then of samples of about one length, which saves the padding; where batch statistics must be "
            "those of random batches (contrastive losses, batch normalisation) stay with 'pool'"
        )
    if case.has_reference and not today.case.has_reference:
        sentences.append(
            f"with {plan.lengths_file} all ranks aim at the same lengths; it must be the same file on all ranks, and "
            "be written again when the data or the encoder change"
        )
    cost = choice.costs[case]
    if cost.rank_bytes is not None or cost.first_batch_seconds is not None:
        first = duration(cost.first_batch_seconds)
        sentences.append(f"it takes {megabytes(cost.rank_bytes)} a rank, and {first} until the first batch")
    if waste(today) - waste(best) >= WORTH:
        gain = number(round(best.useful.mean / today.useful.mean if today.useful.mean > 0 else math.nan, 2))
        sentences.append(f"{gain} x the real tokens in the same time, if steps wait for lengths alone")
    return sentences


def _could_be_smaller(choice: Choice) -> list[str]:
    """Say so if a smaller pool of the same policy is as good."""
    case = choice.best.case
    smaller = [
        row.case.pool_size
        for row in choice.candidates
        if (row.case.policy, row.case.has_reference) == (case.policy, case.has_reference)
        and row.case.pool_size < case.pool_size
        and waste(row) < waste(choice.best) + WORTH / 2
    ]
    if not smaller:
        return []
    return [f"pool_size {min(smaller)} would do about as well, with less memory and an earlier first batch"]


def _not_solved(checks: Sequence[Check], plan: Plan) -> list[str]:
    """What the recommendation does not solve."""
    hints = {
        "ranks_alike": "the ranks' lengths are distributed differently: fix that first, no pool can",
        "no_drift": "the lengths change along the data, so a pool will do less than predicted until that is fixed",
        "tokens_agree": "the length function disagrees with the batches: fix that first, or all figures here are off",
        "enough_samples": "few samples were read, so the figures are rough",
    }
    if plan.settings.max_tokens is not None:
        del hints["ranks_alike"]  # a budget evens it out
    return [hints[check.key] for check in checks if check.result == "found" and check.key in hints]


def _other_causes(run: Causes) -> list[str]:
    """What held a measured run up more than lengths did."""
    parts = {"data": run.data, "slow ranks": run.slow_rank}
    return [
        f"in the run {run.name} more was lost to waiting for {cause} than to lengths: fix that first"
        for cause, part in parts.items()
        if part >= max(NAMED_FROM, run.lengths)
    ]
