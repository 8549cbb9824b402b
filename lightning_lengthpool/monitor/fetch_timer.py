"""How long the training loop waits for a batch of any loader."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer


class FetchTimer:
    """Time each fetch of Lightning's training loop, between the two calls with which it starts and stops its profiler.

    It is made in `on_train_start` or later.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._loop = trainer, trainer.fit_loop.epoch_loop
        self._started = float("nan")
        self._fetches: deque[tuple[float, float]] = deque(maxlen=64)  # Lightning fetches a batch or so ahead
        before, after = self._loop._on_before_fetch, self._loop._on_after_fetch

        def start(*args: Any) -> None:
            self._started = time.perf_counter()
            before(*args)

        def stop(*args: Any) -> None:
            after(*args)
            self._fetches.append((self._started, time.perf_counter() - self._started))

        hooks: dict[str, Callable[..., None]] = {"_on_before_fetch": start, "_on_after_fetch": stop}
        self._loop.__dict__.update(hooks)  # on the object, over the methods of its class

    def last(self) -> tuple[float, float] | None:
        """When the fetch of the batch that is trained on now began, on `time.perf_counter`, and how long it took.

        None where it was not seen: the first batches of a loader without a length, which are fetched before training
        starts, and a `training_step` that fetches by itself (`dataloader_iter`).
        """
        ahead = len(getattr(self._trainer.fit_loop._data_fetcher, "batches", ()))
        return self._fetches[-1 - ahead] if len(self._fetches) > ahead else None

    def remove(self) -> None:
        """Leave the loop as it was."""
        for name in ("_on_before_fetch", "_on_after_fetch"):
            self._loop.__dict__.pop(name, None)
