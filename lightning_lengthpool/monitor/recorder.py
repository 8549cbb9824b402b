"""What one rank keeps: its step records, made from marks in time, and a sample of its lengths. It knows no Trainer."""

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_lengthpool.ordering import efficiency
from lightning_lengthpool.runs.steps.columns import COLUMNS


@dataclass
class _MicroBatch:
    """What is known of one micro-batch; the marks are opaque until `_elapsed` reads them."""

    step: int
    lengths: tuple[float, ...]
    data_seconds: float
    began: float
    missed: bool = False
    seconds: float = float("nan")
    started: Any = None
    last_gradient: Any = None
    pieces: list[tuple[Any, Any, Any]] = field(default_factory=list)  # compute began, ended; waiting ended
    collectives: int | None = None  # issued so far and accounted for
    reduced: bool = False  # reductions were launched
    reducing: bool = False  # reductions are launched, but the backward pass has not returned
    hidden: bool = False


class StepRecorder:
    """Accumulate one rank's step records from marks in time.

    Calls of one micro-batch, in order: `begin`, `start_compute`, any number of rounds of `start_backward`,
    `mark_gradient` (and `after_reduction`, where there is one) and `end_backward`, then `end`. Other calls between
    two micro-batches are ignored.

    A rank's compute runs from `start_compute` to the last gradient, and goes on where a backward pass has returned, if
    another one follows. The rest up to the last return is waiting; so is the time in which a reduction is launched
    before the last gradient, for a communication hook may block there. A collective issued within compute hides how
    long it waited, so compute is absent then: most calls take the number of `collectives` that this process has
    issued so far, None if that is not known.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._open: _MicroBatch | None = None
        self._done: list[_MicroBatch] = []
        self._last_end = float("-inf")
        self._partial = False  # whether the last one was a part of a step that goes on
        self._in_a_row = False  # whether the next micro-batch begins where the last one ended

    def begin(
        self,
        step: int,
        lengths: Sequence[float],
        fetch_started: float | None = None,
        data_seconds: float = float("nan"),
        missed: bool = False,
    ) -> None:
        """Open a micro-batch of optimizer step `step`; its samples' lengths are in tokens.

        It begins where the previous one ended; after an `interrupt` when fetching it began, by default now. `missed`:
        it is of another class than its slot is meant for on all ranks.
        """
        began = self._clock() if fetch_started is None else max(fetch_started, self._last_end)
        began = self._last_end if self._in_a_row else began
        self._open = _MicroBatch(step, tuple(map(float, lengths)), data_seconds, began, missed)

    def start_compute(self, collectives: int | None = 0) -> None:
        """Own compute begins; only the first call counts."""
        if self._open is not None and self._open.started is None:
            self._open.started, self._open.collectives = self._mark(), collectives

    def start_backward(self, collectives: int | None = 0) -> None:
        """A backward pass begins."""
        if self._open is not None:
            self._check(self._open, collectives)
            self._open.hidden |= self._open.reducing  # the return of an earlier one was not seen

    def mark_gradient(self, collectives: int | None = 0) -> None:
        """A local gradient is ready, and no reduction that it completes is launched yet."""
        if self._open is not None and self._open.started is not None:
            self._open.last_gradient = self._mark(self._open.last_gradient)
            self._check(self._open, collectives)

    def after_reduction(self, collectives: int | None = 0) -> None:
        """The reductions that the last gradient completed, if any, are launched."""
        if self._open is not None and self._open.last_gradient is not None and collectives != self._open.collectives:
            self._end_piece(self._open, collectives)
            self._open.reducing = self._open.reduced = True

    def end_backward(self, collectives: int | None = 0) -> None:
        """A backward pass has returned, reductions included."""
        if self._open is not None and (self._open.last_gradient is not None or self._open.reducing):
            self._open.reduced |= collectives != self._open.collectives
            self._end_piece(self._open, collectives)
            self._open.reducing = False

    def interrupt(self) -> None:
        """Something else comes between the last micro-batch and the next: a validation, a checkpoint, a new epoch."""
        self._in_a_row = False

    def end(self, *, needs_reduction: bool = False) -> None:
        """Close the micro-batch.

        With `needs_reduction`, one that launched no reduction is only a part of a step. Compute is then absent, in the
        rest of the step as well: who accumulates by hand does not say what belongs together.
        """
        if self._open is not None:
            self._last_end, self._in_a_row = self._clock(), True
            self._open.seconds = self._last_end - self._open.began
            # a backward pass whose return was not seen: neither was its waiting
            self._open.hidden |= self._open.reducing or self._open.last_gradient is not None
            if needs_reduction and self._open.pieces:
                self._open.hidden |= self._partial or not self._open.reduced
                self._partial = not self._open.reduced
            self._done.append(self._open)
            self._open = None

    def __len__(self) -> int:
        """How many micro-batches are closed and not taken."""
        return len(self._done)

    def take(self, rank: int) -> NDArray[np.float64]:
        """Return the closed micro-batches, shape `[micro-batches, columns]` as in `COLUMNS`, and drop them."""
        rows = [self._row(micro_batch, rank) for micro_batch in self._done]
        self._done = []
        return np.array(rows, dtype=np.float64).reshape(-1, len(COLUMNS))

    def _end_piece(self, micro: _MicroBatch, collectives: int | None) -> None:
        """A piece of compute ended at the last gradient, and waiting ends now."""
        began, ended = micro.started, micro.last_gradient
        if ended is None:  # no gradient since the last reduction was launched: it has been waiting on
            began, ended, _ = micro.pieces.pop()
        now = self._mark()
        micro.pieces.append((began, ended, now))
        micro.started, micro.last_gradient, micro.collectives = now, None, collectives

    def _check(self, micro: _MicroBatch, collectives: int | None) -> None:
        if collectives is None or collectives != micro.collectives:
            micro.hidden = True

    def _row(self, micro: _MicroBatch, rank: int) -> list[float]:
        compute = wait = float("nan")
        if micro.pieces and not micro.hidden:
            compute = sum(self._elapsed(began, ended) for began, ended, _ in micro.pieces)
            wait = sum(self._elapsed(ended, waited) for _, ended, waited in micro.pieces)
        lengths = micro.lengths
        sizes = [len(lengths), sum(lengths), max(lengths, default=0.0), efficiency.padded_tokens(lengths)]
        return [micro.step, rank, *sizes, micro.missed, micro.data_seconds, compute, wait, micro.seconds]

    def _mark(self, previous: Any = None) -> Any:
        """Mark this moment on the device's time line; `previous` is the mark that it replaces."""
        return self._clock()

    def _elapsed(self, start: Any, end: Any) -> float:
        """Seconds between two marks; called only when the records are taken."""
        return float(end - start)


class CudaStepRecorder(StepRecorder):
    """Marks are events on the current stream, so no step is synchronized. Untested on a GPU."""

    def _mark(self, previous: torch.cuda.Event | None = None) -> torch.cuda.Event:
        # a module may have thousands of gradients to mark: one event is recorded again and again
        event = previous or torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _elapsed(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000


class Reservoir:
    """Keep a uniform sample of all numbers seen (algorithm R: Vitter, "Random sampling with a reservoir", 1985).

    It has a random sequence of its own; no other one is touched.
    """

    def __init__(self, size: int, seed: int = 0) -> None:
        self._size, self._seen, self._kept = size, 0, list[float]()
        self._random = random.Random(seed)

    def add(self, numbers: Iterable[float]) -> None:
        for number in numbers:
            self._seen += 1
            if len(self._kept) < self._size:
                self._kept.append(float(number))
            elif (slot := int(self._random.random() * self._seen)) < self._size:
                self._kept[slot] = float(number)

    def padded(self) -> NDArray[np.float64]:
        """The kept numbers, with NaN up to the size, so that ranks can exchange them. Shape `[size]`."""
        return np.array(self._kept + [np.nan] * (self._size - len(self._kept)))
