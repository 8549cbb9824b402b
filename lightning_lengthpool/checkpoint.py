"""What a checkpoint holds of the data: each rank's place, and the settings under which it is one.

The ranks do not meet in a collective to save: a checkpoint may be written by a rank that is alone, in an exception
handler or a signal's, and would then wait for ever. Each rank leaves its place in the process group's store, and rank
zero, which writes the file, picks them up.
"""

import math
import pickle
import sys
import warnings
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_lengthpool.data_identity import check_same_data

VERSION = 1
GATHER_SECONDS = 60.0  # how long rank zero waits for the others' places
ALONE_SECONDS = 5.0  # the same while an exception is handled: the others may be gone

AFRESH = "To start the data afresh on purpose set 'resume: fresh'."


def gather(own: Any, rank: int, ranks: int, name: str, *, last: str = "") -> list[Any]:
    """Collect one object from each data rank on global rank zero, without a collective.

    Args:
        own: This rank's object.
        rank: The data rank.
        ranks: Number of data ranks.
        name: Of this collection: the same on all ranks, and another one for other contents.
        last: Name of the last collection, which is cleared away. Not at once: ranks may still bring the same again.

    Returns:
        On global rank zero all ranks' objects, None for one that did not come in time. Elsewhere only one's own.
    """
    found: list[Any] = [None] * ranks
    found[rank] = own
    if ranks == 1 or not (dist.is_available() and dist.is_initialized()):
        return found
    store = dist.distributed_c10d._get_default_store()
    store.set(f"lengthpool/{name}/{rank}", pickle.dumps(own))
    if dist.get_rank() != 0:
        return found
    if last not in ("", name):
        for other in range(ranks):
            store.delete_key(f"lengthpool/{last}/{other}")
    seconds = ALONE_SECONDS if sys.exc_info()[0] is not None else GATHER_SECONDS
    for other in range(ranks):
        if other != rank:
            key = f"lengthpool/{name}/{other}"
            try:
                store.wait([key], timedelta(seconds=seconds))
                found[other] = pickle.loads(store.get(key))
            except RuntimeError:  # it did not come; the next one has had its time too
                seconds = 0.1
    return found


def join(settings: Mapping[str, Any], ranks: Sequence[Any]) -> dict[str, Any]:
    """What goes into the checkpoint.

    Args:
        settings: What the places depend on.
        ranks: The places, by data rank; None for a rank whose place is not known.
    """
    missing = [rank for rank, state in enumerate(ranks) if state is None]
    if missing:
        warnings.warn(
            f"the checkpoint lacks the place in the data of rank(s) {missing}, which did not answer: a run that "
            "resumes from it starts the data afresh. The model's state is complete.",
            stacklevel=2,
        )
    problems = {state["snapshot"].get("error") for rank in ranks if rank for state in rank["workers"] if state}
    if problems := problems - {None}:
        warnings.warn(
            f"the checkpoint lacks the place in the data ({'; '.join(sorted(problems))}): a run that resumes from it "
            "starts the data afresh. The model's state is complete.",
            stacklevel=2,
        )
    return {"version": VERSION, "settings": dict(settings), "ranks": [] if missing or problems else list(ranks)}


def split(
    saved: Mapping[str, Any], settings: Mapping[str, Any], rank: int, *, accumulated: int = 1
) -> dict[str, Any] | None:
    """Find a rank's place in a checkpoint, also of another shape with the same number of workers in all.

    Args:
        saved: As `join` made it.
        settings: What the places depend on, now; `ranks` and `num_workers` among them.
        rank: The data rank.
        accumulated: Micro-batches of an optimizer step, to name a step in an error.

    Returns:
        The rank's place, None if the checkpoint lacks it.

    Raises:
        ValueError: If the settings do not fit; the message names what was saved, what is now, and the way out.
    """
    if saved["version"] != VERSION:
        raise ValueError(
            f"the checkpoint's place in the data is of version {saved['version']}, not {VERSION}. {AFRESH}"
        )
    before = saved["settings"]
    shape = ("ranks", "num_workers")
    later = {"length_fn"} - set(before)  # of which the first checkpoints did not know
    check_same_data(before.get("path"), settings["path"], AFRESH)
    for name in sorted((set(settings) | set(before)) - later - {"path"}):
        if name not in shape and before.get(name) != settings.get(name):
            raise ValueError(
                f"the checkpoint was saved with {name} {before.get(name)!r}, and now it is {settings.get(name)!r}: its "
                f"place in the data has no meaning here. Set {name} as it was to go on exactly. {AFRESH}"
            )
    if not saved["ranks"]:
        warnings.warn("the checkpoint lacks the place in the data: the data start afresh", stacklevel=2)
        return None
    old, new = (max(1, values["num_workers"]) for values in (before, settings))
    if before["ranks"] * old != settings["ranks"] * new:
        raise ValueError(
            f"the checkpoint was saved with {before['ranks']} ranks x {old} workers, and now there are "
            f"{settings['ranks']} x {new}. The data can go on with another shape only if ranks x workers stays "
            f"{before['ranks'] * old}: set num_workers accordingly. {AFRESH}"
        )
    if old == new:
        return saved["ranks"][rank]
    batches = saved["ranks"][0]["batches"]
    if batches % old:
        every = math.lcm(old, accumulated) // accumulated
        step = math.ceil(batches / accumulated / every) * every
        raise ValueError(
            f"the checkpoint was saved after {batches} batches of each rank, when its {old} workers stood at unequal "
            f"counts. With other numbers of ranks and workers the data can go on from a checkpoint of step {step}, and "
            f"of every {every} steps; from this one with num_workers {before['num_workers']}. {AFRESH}"
        )
    workers = [worker for place in saved["ranks"] for worker in place["workers"]]
    return {
        "workers": workers[rank * new : (rank + 1) * new],
        "batches": batches * new // old,
        "position": saved["ranks"][0]["position"] * new // old,
    }
