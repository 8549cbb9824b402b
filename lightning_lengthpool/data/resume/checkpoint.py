"""What a checkpoint holds of the data: each rank's iterator state, and the settings under which it is one."""

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_lengthpool.data.pools.dataset import WorkerState
from lightning_lengthpool.data.pools.plain_state import from_plain
from lightning_lengthpool.data.reading.data_identity import check_same_data
from lightning_lengthpool.data.train_loader import RankState

VERSION = 3

FRESH = "To let the data start from the beginning on purpose set 'resume: fresh'."

# What a checkpoint looks like: a type, a dict of what its keys hold, or a list of what each item is.
_WORKER = {"pool": dict, "slots": int, "indices": [int]}
_RANK = {"workers": [(_WORKER, None)], "batches": int, "position": int}
_SAVED = {"version": int, "settings": dict, "batches": int, "ranks": [_RANK]}
_SHAPE = {"ranks": int, "num_workers": int}


class IncompleteStateError(ValueError):
    """A checkpoint tells that it lacks the data state, for a rank did not answer or its data cannot be saved."""


def beginning() -> dict[str, Any]:
    """What a checkpoint holds before the first batch: no state, which fits all settings."""
    return {"version": VERSION, "settings": {}, "batches": 0, "ranks": []}


def join(settings: Mapping[str, Any], batches: int, ranks: Sequence[Any]) -> dict[str, Any]:
    """What goes into the checkpoint; of `ranks`, the plain states by data rank, one that is not known is None."""
    missing = [rank for rank, state in enumerate(ranks) if state is None]
    if missing:
        warnings.warn(
            f"the checkpoint lacks the data state of rank(s) {missing}, which did not answer: a run that resumes from "
            "it starts the data from the beginning. The model's state is complete.",
            stacklevel=2,
        )
    workers = [worker for rank in ranks if rank is not None for worker in rank["workers"] if worker is not None]
    snapshots = [worker["pool"]["snapshot"] for worker in workers]
    if problems := {snapshot["error"] for snapshot in snapshots if snapshot is not None and snapshot["error"]}:
        warnings.warn(
            f"the checkpoint lacks the data state ({'; '.join(sorted(problems))}): a run that resumes from it starts "
            "the data from the beginning. The model's state is complete.",
            stacklevel=2,
        )
    states = [] if missing or problems else list(ranks)
    return {"version": VERSION, "settings": dict(settings), "batches": batches, "ranks": states}


def choose(offers: Mapping[int, Mapping[int, Any]], wanted: int, ranks: int) -> tuple[int, list[Any]]:
    """Choose one state of each rank, all of them after the same batch.

    `offers` has, by data rank and number of batches, the states after a rank's last batches. Returns a number of
    batches, and the states after these by data rank, None for a rank that offers none. If not all offer the `wanted`
    one it is, with a warning, the largest that all of them do.
    """
    by_rank = [offers.get(rank, {}) for rank in range(ranks)]
    common = set.intersection(*(set(own) for own in by_rank))
    batches = wanted if wanted in common or not common else max(common)
    if batches != wanted:
        warnings.warn(
            f"the ranks were saved between batches {batches} and {wanted}, where no common data state exists after "
            f"batch {wanted}: a run that resumes from this checkpoint trains on other batches than the uninterrupted "
            f"run, for its data go on from batch {batches} and its model from batch {wanted}.",
            stacklevel=2,
        )
    return batches, [own.get(batches) for own in by_rank]


def check(saved: Any) -> None:
    """Check that what a checkpoint holds looks like a data state of this version."""
    problem = None
    if isinstance(saved, Mapping) and isinstance(saved.get("version"), int) and saved["version"] != VERSION:
        problem = f"is of version {saved['version']}, and this release reads version {VERSION}"
    elif fault := _fault(saved, _SAVED, "it") or _miscount(saved):
        problem = f"is damaged or of another program: {fault}"
    if problem is not None:
        raise ValueError(f"the data state in the checkpoint {problem}. Resume with the release that wrote it. {FRESH}")


def _miscount(saved: Mapping[str, Any]) -> str | None:
    """What does not add up in a state that has the right form."""
    if saved["batches"] == 0:
        return None
    if fault := _fault(saved["settings"], _SHAPE, "it['settings']"):
        return fault
    ranks, workers = saved["settings"]["ranks"], max(1, saved["settings"]["num_workers"])
    if saved["ranks"] and len(saved["ranks"]) != ranks:
        return f"it has the states of {len(saved['ranks'])} ranks, expected {ranks}"
    for rank, state in enumerate(saved["ranks"]):
        if len(state["workers"]) != workers or state["batches"] != saved["batches"]:
            return (
                f"rank {rank} has {len(state['workers'])} workers after {state['batches']} batches, expected {workers} "
                f"after {saved['batches']}"
            )
    return None


def _fault(value: Any, form: Any, name: str) -> str | None:
    """What is wrong with a value that should have a form, None if nothing is."""
    if isinstance(form, tuple):  # this form, or None
        return None if value is None else _fault(value, form[0], name)
    if isinstance(form, list):
        if not isinstance(value, (list, tuple)):
            return f"{name} is {value!r:.100}, expected a list"
        return next(filter(None, (_fault(item, form[0], f"{name}[{i}]") for i, item in enumerate(value))), None)
    if isinstance(form, dict):
        if not isinstance(value, Mapping):
            return f"{name} is {value!r:.100}, expected a dict"
        if missing := sorted(set(form) - set(value)):
            return f"{name} lacks {', '.join(map(repr, missing))}"
        return next(filter(None, (_fault(value[key], form[key], f"{name}[{key!r}]") for key in form)), None)
    if not isinstance(value, form) or isinstance(value, bool):
        return f"{name} is {value!r:.100}, expected {form.__name__}"
    return None


def split(
    saved: Mapping[str, Any], settings: Mapping[str, Any], rank: int, *, accumulated: int = 1
) -> RankState | None:
    """Find a rank's state in a checkpoint, also of another shape with the same number of workers in all.

    None for the beginning. `accumulated`, the micro-batches of an optimizer step, serves to name a step in an error.
    Raises `IncompleteStateError` if the checkpoint lacks the states, `ValueError` if it is malformed or the settings do
    not fit.
    """
    check(saved)
    if saved["batches"] == 0:
        return None
    before = saved["settings"]
    check_settings_fit(before, settings)
    if not saved["ranks"]:
        raise IncompleteStateError("the checkpoint lacks the data state")
    old, new = (max(1, values["num_workers"]) for values in (before, settings))
    if before["ranks"] * old != settings["ranks"] * new:
        raise ValueError(
            f"the checkpoint was saved with {before['ranks']} ranks x {old} workers, and now there are "
            f"{settings['ranks']} x {new}. The data can go on with another shape only if ranks x workers stays "
            f"{before['ranks'] * old}: set num_workers accordingly. {FRESH}"
        )
    if old == new:
        return _rank_state(saved["ranks"][rank], rank)
    batches = saved["batches"]
    if batches % old:
        every = math.lcm(old, accumulated) // accumulated
        step = math.ceil(batches / accumulated / every) * every
        raise ValueError(
            f"the checkpoint was saved after {batches} batches of each rank, when its {old} workers stood at unequal "
            f"counts. With other numbers of ranks and workers the data can go on from a checkpoint of step {step}, and "
            f"of every {every} steps; from this one with num_workers {before['num_workers']}. {FRESH}"
        )
    workers = [worker for number, state in enumerate(saved["ranks"]) for worker in _rank_state(state, number).workers]
    position = saved["ranks"][0]["position"]
    return RankState(tuple(workers[rank * new : (rank + 1) * new]), batches * new // old, position * new // old)


def _rank_state(saved: Mapping[str, Any], rank: int) -> RankState:
    workers = []
    for number, worker in enumerate(saved["workers"]):
        try:
            state = from_plain(worker)
            if state is not None and not isinstance(state, WorkerState):
                raise TypeError(f"it is a {type(state).__name__}")
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"rank {rank}, worker {number}: its part of the data state in the checkpoint cannot be restored "
                f"({error}): it is damaged. {FRESH}"
            ) from error
        workers.append(state)
    return RankState(tuple(workers), saved["batches"], saved["position"])


def check_settings_fit(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Check that a state which was taken with some settings has a meaning with others; its shape is not looked at."""
    check_same_data(before.get("path"), now["path"], FRESH)
    for name in sorted(set(now) | set(before)):
        if name not in ("ranks", "num_workers", "path") and before.get(name) != now.get(name):
            raise ValueError(
                f"the checkpoint was saved with {name} {before.get(name)!r}, and now it is {now.get(name)!r}: its data "
                f"state has no meaning here. Set {name} as it was to go on exactly. {FRESH}"
            )
