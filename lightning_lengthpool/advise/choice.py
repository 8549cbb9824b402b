"""Which setting to recommend, of those that were predicted, and why."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_lengthpool.advise.advice import Causes, Check, Cost, Plan, Recommendation
from lightning_lengthpool.advise.checks import MEMORY_SHARE
from lightning_lengthpool.ordering.efficiency import WORTH
from lightning_lengthpool.runs.findings import NAMED_FROM
from lightning_lengthpool.runs.words import duration, interval, megabytes, number, percent, ranks, setting
from lightning_lengthpool.simulation.choose import Chooser, waste
from lightning_lengthpool.simulation.predict import Case, Prediction


@dataclass(frozen=True)
class Choice:
    """What the recommendation is made of.

    Attributes:
        plan: Today's settings.
        today: The prediction for them.
        baseline: That without a pool.
        candidates: Predictions of settings at the same world size.
        costs: What each case takes, today's included.
        machine_bytes: Memory of a machine; None if it is not known.
        rank_share: Samples of the data set that fall to a rank; None if that is not known.
    """

    plan: Plan
    today: Prediction
    baseline: Prediction
    candidates: Sequence[Prediction]
    costs: dict[Case, Cost]
    machine_bytes: int | None
    rank_share: int | None

    def fits(self, case: Case) -> bool:
        """Whether the pools of a case fit into memory, as far as is known."""
        need = self.costs[case].node_bytes
        return need is None or self.machine_bytes is None or need <= MEMORY_SHARE * self.machine_bytes

    @property
    def chooser(self) -> Chooser:
        """The rule by which one is chosen."""
        return Chooser(
            self.today,
            self.baseline,
            needs_stream=needs_stream(self.plan),
            pools=self.plan.pools,
            rank_samples=self.rank_share,
            fits=self.fits,
        )

    def is_within_share(self, case: Case) -> bool:
        """Whether a rank has enough samples to fill its pools."""
        return self.chooser.is_within_share(case)


def choose(choice: Choice) -> Prediction:
    """The setting to recommend."""
    return choice.chooser.choose(choice.candidates)


def needs_stream(plan: Plan) -> bool:
    """Whether other settings go with policy 'stream' alone."""
    return plan.max_tokens is not None or plan.has_reference or plan.class_shares is not None


def recommend(
    choice: Choice, best: Prediction, checks: Sequence[Check], others: Sequence[Prediction], run: Causes | None = None
) -> Recommendation:
    """Put the choice in words.

    Args:
        choice: From what was chosen.
        best: What `choose` has chosen.
        checks: What was found beside the lengths.
        others: Predictions of the same setting at other world sizes.
        run: Where the time of a measured run went.
    """
    plan, today = choice.plan, choice.today
    now, then = waste(today), waste(best)
    where = f"at {ranks(plan.world_size)}"
    if best.case == today.case and plan.is_active:
        kind, sentence = "keep", f"change nothing: {setting(best.case)} is near the best that a pool can do here"
    elif best.case.policy == "none":
        kind, sentence = "no pool", _no_pool(choice)
    else:
        kind, sentence = "change", f"use {setting(best.case)} ({_from(choice)})"
    reasons = [
        f"{_named(today.case, 'today')}: {interval(today.idle)} idle, {percent(today.padding.mean)} padding, "
        f"{percent(today.useful.mean)} useful {where} (predicted)"
    ]
    if best.case != today.case:
        reasons.append(
            f"{_named(best.case, 'then')}: {interval(best.idle)} idle, {percent(best.padding.mean)} padding, "
            f"{percent(best.useful.mean)} useful (predicted)"
        )
    reasons += _why(choice, best, now, then)
    is_unlike = any(check.key == "ranks_alike" and check.result == "found" for check in checks)
    if kind != "change" and plan.is_active and not is_unlike:  # else a smaller pool is as good only until it is mended
        reasons += _could_be_smaller(choice, best)
    reasons += [
        f"at {ranks(found.case.world_size)} the same setting would leave {percent(found.idle.mean)} idle (predicted)"
        for found in others
        if abs(found.idle.mean - best.idle.mean) >= WORTH
    ]
    reasons += _limits(checks, plan)
    reasons += [] if run is None else _other_causes(run)
    return Recommendation(kind, best.case, sentence, tuple(reasons), yaml_lines(plan, best.case), best)  # type: ignore[arg-type]


def _no_pool(choice: Choice) -> str:
    plan = choice.plan
    if not choice.fits(choice.today.case):
        return "switch the pool off: there is no room for one in memory, unless you use fewer workers"
    if waste(choice.baseline) >= WORTH:
        why = "none that is possible gains two points"
    elif plan.world_size == 1:
        why = "one rank waits for nobody, and there is little padding to save"
    else:
        why = "lengths are nearly equal"
    return f"a pool is not worth it here: {why}" + ("; leave it as it is, or switch it off" if plan.is_active else "")


def yaml_lines(plan: Plan, case: Case) -> str:
    """The lines to paste: the settings of the data module that change; none if it is to stay as it is."""
    now = plan.case
    lines: list[str] = []
    if case.policy == "none":
        lines = ["policy: none"] if plan.is_active else []
    else:
        if case.policy != plan.policy or not plan.is_known:
            lines.append(f"policy: {case.policy}")
        if case.pool_size != plan.pool_size or not plan.is_known:
            lines.append(f"pool_size: {case.pool_size}")
        if case.has_reference and not now.has_reference:
            is_plain = re.fullmatch(r"[\w./-]+", plan.lengths_file)
            lines.append(f"reference_lengths: {plan.lengths_file if is_plain else json.dumps(plan.lengths_file)}")
        if case.max_tokens is not None and not plan.is_known:
            budget = int(case.max_tokens) if case.max_tokens == int(case.max_tokens) else case.max_tokens
            lines.append(f"max_tokens: {budget}")
        if lines and case.policy == "stream" and plan.warmup is not None:
            lines.append("pool_warmup: null")
    return (
        "".join(f"{line}\n" for line in ["data:", "  init_args:", *(f"    {line}" for line in lines)]) if lines else ""
    )


def _from(choice: Choice) -> str:
    today = choice.today.case
    return f"now: {setting(today)}" if choice.plan.is_known or choice.plan.is_active else "no setting is known"


def _named(case: Case, when: str) -> str:
    return f"{when} ({setting(case)})"


def _why(choice: Choice, best: Prediction, now: float, then: float) -> list[str]:
    plan, today, case = choice.plan, choice.today, best.case
    said = []
    if not choice.fits(today.case):
        said.append(
            f"today's pools take {megabytes(choice.costs[today.case].node_bytes)} of the machine's "
            f"{megabytes(choice.machine_bytes)}"
        )
    if not choice.is_within_share(today.case):
        said.append("today's pools hold more samples than fall to a rank")
    larger = [found for found in choice.candidates if not choice.fits(found.case) and waste(found) < then - WORTH]
    if larger:
        said.append(
            f"{setting(min(larger, key=waste).case)} would leave {percent(min(larger, key=waste).idle.mean)} idle, but "
            "takes more memory than there is"
        )
    small = [
        found for found in choice.candidates if not choice.is_within_share(found.case) and waste(found) < then - WORTH
    ]
    if small:
        said.append("larger pools would hold more than a rank's share of the data set, and were left out")
    if case == today.case or case.policy == "none":
        return said
    if case.policy in ("blocks", "stream") and today.case.policy in ("none", "pool") and _per_batch(case) != 1:
        said.append(
            "batches are then of samples of about one length, which saves the padding; where batch statistics must be "
            "those of random batches (contrastive losses, batch normalisation) stay with 'pool'"
        )
    if case.has_reference and not today.case.has_reference:
        said.append(
            f"with {plan.lengths_file} all ranks aim at the same lengths; it must be the same file on all ranks, and "
            "be written again when the data or the encoder change"
        )
    cost = choice.costs[case]
    if cost.rank_bytes is not None or cost.first_batch_seconds is not None:
        first = duration(cost.first_batch_seconds)
        said.append(f"it takes {megabytes(cost.rank_bytes)} a rank, and {first} until the first batch")
    if now - then >= WORTH:
        gain = best.useful.mean / today.useful.mean if today.useful.mean > 0 else math.nan
        said.append(f"{number(round(gain, 2))} x the real tokens in the same time, if steps wait for lengths alone")
    return said


def _could_be_smaller(choice: Choice, best: Prediction) -> list[str]:
    """Say so if a smaller pool of the same policy is as good."""
    case = best.case
    smaller = [
        found.case.pool_size
        for found in choice.candidates
        if found.case.policy == case.policy
        and found.case.has_reference == case.has_reference
        and found.case.pool_size < case.pool_size
        and waste(found) < waste(best) + WORTH / 2
    ]
    return (
        [f"pool_size {min(smaller)} would do about as well, with less memory and an earlier first batch"]
        if smaller
        else []
    )


def _per_batch(case: Case) -> int | None:
    return case.batch_size if case.max_tokens is None else None


def _limits(checks: Sequence[Check], plan: Plan) -> list[str]:
    """What the recommendation does not mend."""
    hints = {
        "ranks_alike": "the ranks' lengths are distributed differently: mend that first, no pool can",
        "no_drift": "the lengths change along the data, so a pool will do less than predicted until that is mended",
        "tokens_agree": "the length function disagrees with the batches: mend that first, or all figures here are off",
        "enough_samples": "few samples were read, so the figures are rough",
    }
    if plan.max_tokens is not None:
        del hints["ranks_alike"]  # a budget evens it out
    return [hints[check.key] for check in checks if check.result == "found" and check.key in hints]


def _other_causes(run: Causes) -> list[str]:
    """What held a measured run up more than lengths did."""
    parts = {"data": run.data, "slow ranks": run.slow_rank}
    return [
        f"in the run {run.name} more was lost to waiting for {cause} than to lengths: mend that first"
        for cause, part in parts.items()
        if part >= max(NAMED_FROM, run.lengths)
    ]
