"""What the two pools have in common: their interface, what they hand out, and how they start."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

from megatron.energon import SavableDataset

from lightning_lengthpool.data.pools.arrivals import Arrivals, Replay
from lightning_lengthpool.data.pools.measure import Measurer
from lightning_lengthpool.data.pools.plain_state import from_plain, to_plain
from lightning_lengthpool.ordering.settings import PoolSettings
from lightning_lengthpool.ordering.sorted_pool import SNAPSHOT_SAMPLES


class Entry(NamedTuple):
    """A sample that has left the pool, and its length."""

    sample: Any
    length: float


class Slot(NamedTuple):
    """What one batch is made of."""

    entries: list[Entry]  # the samples that are there
    costs: list[float]  # that belong there: also of samples that have left out of their turn
    class_name: Hashable = None  # the samples'; None without classes
    meant: Hashable = None  # the class that the slot is meant for on all ranks, see `sorted_pool.Block`

    @property
    def missed(self) -> bool:
        """Whether the samples are of another class than the slot is meant for."""
        return self.class_name != self.meant


StateT = TypeVar("StateT")  # FlushState or StreamState: a snapshot, None before the first, and what has changed since


class Pool(ABC, Generic[StateT]):
    """One worker's pool over a stream of encoded samples: samples come in, and leave by slots.

    Samples are re-read by key with the stream's `restore_sample`; at least `snapshot_samples` come in between two
    snapshots. `warning` is something that the user should know; whoever passes it on sets it to None. `differences` are
    what `start` has found to be otherwise than it was saved, a sentence each.
    """

    def __init__(
        self,
        dataset: SavableDataset,
        settings: PoolSettings,
        failure_tolerance: int | None = 100,
        snapshot_samples: int = SNAPSHOT_SAMPLES,
        arrivals: Arrivals | None = None,
    ) -> None:
        self.dataset, self.settings = dataset, settings
        self.arrivals = arrivals or Arrivals()
        self.warning: str | None = None
        self.differences: list[str] = []
        self._snapshot_samples = snapshot_samples
        self._measure = Measurer(settings, dataset.worker_config, failure_tolerance)
        self._upstream: Iterator[Any] = iter(())

    def start(self, state: StateT | None = None, *, lose: bool = False) -> Iterator[Slot]:
        """Start to read the data, and return the slots, up to the end of a finite stream.

        With a state, bring back what a new pool would have held then; with `lose` go on without the samples that would
        have to be re-read by their keys.
        """
        saved: Any = state
        if saved is None or saved.snapshot is None:
            self._upstream = iter(self.dataset)
            return iter(self._take_slot, None)
        self.dataset.restore_state(from_plain(saved.snapshot.data))
        self.arrivals.restore(saved.snapshot.arrivals)
        replay = Replay(self.dataset, self.settings)
        self._go_on(saved, None if lose else replay)
        if not lose:
            replay.compare(self.arrivals.state(), saved.arrivals)
        self.differences = replay.differences
        return iter(self._take_slot, None)

    @abstractmethod
    def state(self) -> StateT:
        """The iterator state after the last slot."""

    @abstractmethod
    def take_nearest(self, slot: Slot) -> Slot:
        """Return the slot with other samples, as near as there are to its costs; none only if there are no more."""

    @abstractmethod
    def _go_on(self, state: StateT, replay: Replay | None) -> None:
        """Become what the pool was, and open the upstream; without a `replay` no sample is re-read by its key."""

    @abstractmethod
    def _take_slot(self) -> Slot | None:
        """Hand out the next slot; None at the end of a finite stream."""

    def _saved(self, keys: list[Any]) -> dict[str, Any]:
        """Fields of a snapshot: the keys and energon's state of the data, or why they cannot be saved."""
        try:
            return {"keys": to_plain(keys), "data": to_plain(self.dataset.save_state())}
        except TypeError as error:
            return {"keys": [], "data": None, "error": str(error)}
