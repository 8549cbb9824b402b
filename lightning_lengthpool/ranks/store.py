"""What ranks hand to rank zero through the process group's store, without a collective.

A checkpoint may be written in a signal's handler or an exception's, when the other ranks are anywhere in a step, in a
collective that waits for this very rank, or gone. So no rank has to come to a meeting point: a thread of each rank
answers for it (`Offers`), or each rank leaves what it has and goes on (`gather`).

What lies in the store is plain: containers, strings, numbers, bytes and tensors, as in a checkpoint. It is read with
`weights_only=True`, and deleted once it is read.
"""

import contextlib
import io
import sys
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

SECONDS = 60.0  # how long rank zero waits for the other ranks
ALONE_SECONDS = 5.0  # the same while an exception is handled: the others may be gone
LAST = "last"  # the question after which a rank answers no more
_STOP = "stop"


def is_distributed() -> bool:
    """Whether this process belongs to a process group of several."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def is_rank_zero() -> bool:
    """Whether this process is the first of its process group, or has none."""
    return not is_distributed() or dist.get_rank() == 0


def patience() -> float:
    """Seconds that rank zero should wait for the other ranks here."""
    return ALONE_SECONDS if sys.exc_info()[0] is not None else SECONDS


class Offers:
    """What each rank answers at any moment to the questions of rank zero.

    Made on all ranks alike, while a process group exists. On the ranks other than zero a thread waits in the store for
    a question and answers it, whatever the rank's main thread is doing then.

    `token` is a name that nothing else in this process group has, now or later; the same on all ranks. `offer` is a
    method that takes a question and gives this rank's plain answer, called in the thread; its object is not kept alive.
    """

    def __init__(self, token: str, offer: Callable[[str], Any]) -> None:
        self._prefix = f"lengthpool/{token}"
        self._store = dist.distributed_c10d._get_default_store()
        self._ranks = range(1, dist.get_world_size())
        self._asked = 0
        self._missing: list[int] = []
        self.close: Callable[[], None] = lambda: None
        self._thread: _Answers | None = None
        if dist.get_rank() != 0:
            self._thread = thread = _Answers(self._store, self._prefix, dist.get_rank(), weakref.WeakMethod(offer))
            thread.start()
            self.close = weakref.finalize(self, thread.stop, self._store)  # at the latest when the process ends

    def await_last(self, seconds: float) -> None:
        """Wait until rank zero has asked its last question; to be called on the other ranks."""
        if self._thread is not None:
            self._thread.join(seconds)
        self.close()

    def collect(self, question: str, seconds: float) -> list[Any]:
        """Ask all other ranks, and wait `seconds` for all of them together; to be called on rank zero alone.

        Their answers come in no particular order, fewer if some did not answer.
        """
        deadline = time.monotonic() + seconds
        try:
            for rank in self._missing:  # whose answer may have come too late
                self._store.delete_key(_key(self._prefix, self._asked - 1, "answer", rank))
            for rank in self._ranks:
                self._store.set(_key(self._prefix, self._asked, "ask", rank), question)
        except RuntimeError:  # the process group has gone
            return []
        keys = {rank: _key(self._prefix, self._asked, "answer", rank) for rank in self._ranks}
        answers = {rank: _take(self._store, key, deadline) for rank, key in keys.items()}
        self._asked += 1
        self._missing = [rank for rank, answer in answers.items() if answer is None]
        return [_unpack(answer) for answer in answers.values() if answer is not None]


class _Answers(threading.Thread):
    """Answers rank zero's questions until there is nothing to offer any more, or nobody who asks."""

    def __init__(self, store: Any, prefix: str, rank: int, offer: Callable[[], Callable[[str], Any] | None]) -> None:
        super().__init__(name="lengthpool-offers", daemon=True)
        # A store may be used by one thread at a time, so this one has a connection of its own.
        self._waiting, self._prefix, self._rank, self._offer = store.clone(), prefix, rank, offer
        self._number = 0

    def run(self) -> None:
        while True:
            ask = _key(self._prefix, self._number, "ask", self._rank)
            try:
                self._waiting.wait([ask], timedelta(hours=1))
                question = self._waiting.get(ask).decode()
                self._waiting.delete_key(ask)
                offer = self._offer()
                if question == _STOP or offer is None:
                    return
                self._waiting.set(_key(self._prefix, self._number, "answer", self._rank), _pack(offer(question)))
            except dist.DistStoreError:  # nobody has asked for an hour
                continue
            except RuntimeError:  # the store has gone, and the run with it
                return
            if question == LAST:
                return
            self._number += 1

    def stop(self, store: Any) -> None:
        if not self.is_alive():
            return
        with contextlib.suppress(RuntimeError):
            store.set(_key(self._prefix, self._number, "ask", self._rank), _STOP)
            self.join(timeout=1)


def gather(value: Any, rank: int, ranks: int, name: str, *, last: str = "", seconds: float | None = None) -> list[Any]:
    """Collect one plain object from each data rank on global rank zero, without a collective.

    There it returns all ranks' objects, None for one that did not come in time; elsewhere only this rank's. `name` is
    one that nothing else in this process group has, the same on all ranks; `last` that of the last collection, of which
    an object may have come too late. It waits `seconds` in all; None for `patience`.
    """
    values: list[Any] = [None] * ranks
    values[rank] = value
    if ranks == 1 or not is_distributed():
        return values
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() != 0:
        store.set(f"lengthpool/{name}/{rank}", _pack(value))  # type: ignore[arg-type]  # bytes do as well
        return values
    deadline = time.monotonic() + (patience() if seconds is None else seconds)
    for other in set(range(ranks)) - {rank}:
        if last:
            store.delete_key(f"lengthpool/{last}/{other}")
        if (packed := _take(store, f"lengthpool/{name}/{other}", deadline)) is not None:
            values[other] = _unpack(packed)
    return values


def _key(prefix: str, number: int, word: str, rank: int) -> str:
    return f"{prefix}/{number}/{word}/{rank}"


def _take(store: Any, key: str, deadline: float) -> bytes | None:
    """Read and delete a key; None if it does not come in time."""
    try:
        store.wait([key], timedelta(seconds=max(0.1, deadline - time.monotonic())))
        value: bytes = store.get(key)
        store.delete_key(key)
    except RuntimeError:
        return None
    return value


def _pack(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _unpack(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)
