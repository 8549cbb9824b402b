"""The one interface of `flush_pool` and `stream_pool`, and what they hand out."""

from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from megatron.energon import SavableDataset
from megatron.energon.wrappers.base import BaseWrapperDataset

if TYPE_CHECKING:
    from lightning_lengthpool.data.pools.arrivals import Arrivals


SNAPSHOT_SAMPLES = 1000
"""Samples between two snapshots of a pool, if it is smaller: without a pool each sample would take one."""


class Entry(NamedTuple):
    """A sample that has left the pool, and its length."""

    sample: Any
    length: float


class Slot(NamedTuple):
    """What one batch is made of.

    Attributes:
        entries: The samples that are there.
        costs: The costs that belong there: also of samples that have left out of their turn.
        kind: The samples' class, None without classes.
        meant: The class that the slot is meant for on all ranks, see `stream.Block`.
    """

    entries: list[Entry]
    costs: list[float]
    kind: Hashable = None
    meant: Hashable = None

    @property
    def missed(self) -> bool:
        """Whether the samples are of another class than the slot is meant for."""
        return self.kind != self.meant


class Pool(Protocol):
    """One worker's pool: samples come in, and leave by slots.

    Attributes:
        snapshot: The last one, plain, None before the first; never changed in place.
        warning: Something that the user should know; whoever passes it on sets it to None.
        arrivals: What has come in.
        differences: What `start` has found to be otherwise than it was saved, a sentence each.
    """

    snapshot: dict[str, Any] | None
    warning: str | None
    arrivals: "Arrivals"
    differences: list[str]

    def reset(self) -> None:
        """Forget everything; the dataset is left as it is."""

    def start(self, *, lose_pool: bool = False) -> Iterator[Any]:
        """Start to read the data, after a `restore` with the samples brought back that were held.

        Args:
            lose_pool: Go on without the samples that would have to be re-read by their keys.

        Returns:
            The upstream for the other methods.
        """

    def take_slot(self, upstream: Iterator[Any]) -> Slot | None:
        """Hand out the next slot; None at the end of a finite stream."""

    def take_nearest(self, upstream: Iterator[Any], slot: Slot) -> Slot:
        """Return the slot with other samples, as near as there are to its costs; none only if there are no more."""

    def place(self) -> dict[str, Any]:
        """What has changed since the snapshot, plain."""

    def restore(self, snapshot: dict[str, Any] | None, place: dict[str, Any]) -> None:
        """Go on from a place; the samples are re-read by `start`. Without a snapshot that is the beginning."""


def rewind(dataset: SavableDataset) -> None:
    """Let a stream begin anew."""
    dataset.reset_state_deep() if isinstance(dataset, BaseWrapperDataset) else dataset.reset_state_own()
