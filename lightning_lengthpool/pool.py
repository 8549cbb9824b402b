"""One worker's pool: samples come in, are ordered, and leave by places.

While one pool is handed out the next one fills, one sample in for each place handed out: training never waits for a
whole pool but the first. So at most `2 * pool_size` samples are held.

The pool's place in the data is saved without the samples. A snapshot, taken when a pool is full, holds that pool's
keys and the state of the data at that moment; what has changed since is a few numbers. Restoring re-reads what is left
of the pool by its keys, and reads on from that state of the data for what had come in since.
"""

import numbers
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.energon import SavableDataset
from megatron.energon.wrappers.base import BaseWrapperDataset
from megatron.energon.wrappers.buffer import SavableSampleBuffer

from lightning_lengthpool.length import LengthFn, sample_length
from lightning_lengthpool.order import get_policy
from lightning_lengthpool.state import from_plain, to_plain

# Samples between two snapshots, if a pool is smaller: without a pool each sample would take one.
_SNAPSHOT_SAMPLES = 1000


@dataclass(frozen=True)
class PoolSettings:
    """What makes a pool: the same on all ranks and workers.

    Args:
        pool_size: Samples that one worker of one rank holds to choose from; 0 switches the pool off.
        policy: How samples leave the pool, a name from `order.POLICIES`.
        seed: Seed of the random sequence that all ranks share.
        length_fn: Takes an encoded sample and gives its length; None takes `total_len`, else `len(tokens)`.

    Raises:
        ValueError: If `pool_size` is negative or no integer, `seed` is no integer, or the policy is unknown.
    """

    pool_size: int = 1000
    policy: str = "pool"
    seed: int = 42
    length_fn: LengthFn | None = None

    def __post_init__(self) -> None:
        pool_size = check_integer("pool_size", self.pool_size, minimum=0, hint="0 switches the pool off")
        object.__setattr__(self, "pool_size", pool_size)  # a NumPy integer is none for `random`
        object.__setattr__(self, "seed", check_integer("seed", self.seed))
        get_policy(self.policy)
        if self.length_fn is not None and not callable(self.length_fn):
            raise ValueError(f"length_fn is {self.length_fn!r}, expected a callable that takes an encoded sample")

    @property
    def places(self) -> int:
        """Places of one pool; without a pool each sample is a pool of its own."""
        return 1 if self.policy == "none" else max(1, self.pool_size)


class Entry(NamedTuple):
    """A sample that has left the pool, and its length."""

    sample: Any
    length: float


def check_integer(name: str, value: Any, *, minimum: int | None = None, hint: str = "") -> int:
    """Return `value` as an int; raise a `ValueError` that names the setting if it is no integer or below `minimum`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or (minimum is not None and value < minimum):
        bound = "" if minimum is None else f" of at least {minimum}"
        raise ValueError(f"{name} is {value!r}, expected an integer{bound}" + (f" ({hint})" if hint else ""))
    return int(value)


class LengthPool:
    """The pool over one worker's stream of encoded samples.

    Args:
        dataset: The stream; `restore_sample` re-reads one of its samples by key.
        settings: The pool.
    """

    _saved = ("_turns", "_arrived", "_taken", "_cursor", "_holes")

    def __init__(self, dataset: SavableDataset, settings: PoolSettings) -> None:
        self.dataset = dataset
        self.settings = settings
        self._policy = get_policy(settings.policy if settings.pool_size else "none")
        self.reset()

    def reset(self) -> None:
        """Forget everything; the dataset is left as it is."""
        config = self.dataset.worker_config
        # The pool that is handed out lies in reverse order, so that the next sample is popped from the end.
        self._ready = SavableSampleBuffer(self.dataset, worker_config=config)
        self._ready_lengths: list[float] = []
        self._incoming = SavableSampleBuffer(self.dataset, worker_config=config)
        self._incoming_lengths: list[float] = []
        self._places = 0  # of the pool that is handed out
        self._cursor = 0  # the next of these
        self._holes: dict[int, float] = {}  # those whose sample left out of its turn -> the length that belongs there
        self.snapshot: dict[str, Any] | None = None
        self._turns = 0  # pools ordered since the snapshot
        self._arrived = 0  # samples that have come in since the snapshot
        self._taken: list[int] = []  # which of these have left out of their turn
        self._pending = False  # a place is to be restored

    # ---- handing out

    def take_place(self, upstream: Iterator[Any]) -> tuple[Entry | None, float] | None:
        """Hand out the next place, and let one sample in.

        Returns:
            The place's sample (None if that has left out of its turn) and the length that belongs there; None at the
            end of a finite stream.
        """
        if self._cursor == self._places and not self._turn(upstream):
            return None
        place, self._cursor = self._cursor, self._cursor + 1
        entry = None
        if place in self._holes:
            length = self._holes.pop(place)
        else:
            length = self._ready_lengths.pop()
            entry = Entry(self._ready.pop(-1), length)
        self._fill(upstream, 1)
        return entry, length

    def take_nearest(self, upstream: Iterator[Any], length: float) -> Entry | None:
        """Take the sample nearest to `length` out of its turn, from both pools; None if there are no more samples."""
        if not self._ready_lengths and not self._incoming_lengths:
            self._fill(upstream, 1)
        candidates = [
            (abs(other - length), is_ready, index)  # a tie goes to the incoming pool, which leaves no hole
            for is_ready, lengths in enumerate((self._incoming_lengths, self._ready_lengths))
            for index, other in enumerate(lengths)
        ]
        if not candidates:
            return None
        _, is_ready, index = min(candidates)
        if is_ready:
            self._holes[self._left()[index]] = self._ready_lengths[index]
            return Entry(self._ready.pop(index), self._ready_lengths.pop(index))
        waiting = [number for number in range(self._arrived) if number not in self._taken]
        self._taken.append(waiting[self._turns * self.settings.places + index])
        return Entry(self._incoming.pop(index), self._incoming_lengths.pop(index))

    def _left(self) -> list[int]:
        """The places that still have their sample, as they lie in `_ready`: the last one first."""
        return [place for place in range(self._places - 1, self._cursor - 1, -1) if place not in self._holes]

    def _fill(self, upstream: Iterator[Any], samples: int) -> None:
        """Let up to `samples` samples in, as long as the incoming pool has room."""
        for _ in range(min(samples, self.settings.places - len(self._incoming_lengths))):
            try:
                sample = next(upstream)
            except StopIteration:
                return
            self._arrived += 1
            self._let_in(sample)

    def _let_in(self, sample: Any) -> None:
        length = sample_length(sample, self.settings.length_fn)  # first: the two must not fall out of step if it raises
        self._incoming.append(sample)
        self._incoming_lengths.append(length)

    def _turn(self, upstream: Iterator[Any]) -> bool:
        """Order the incoming pool and start to hand it out; False if there is nothing left."""
        self._fill(upstream, self.settings.places)
        if not self._incoming_lengths:
            return False
        self._turns += 1
        self._order()
        self._cursor = 0
        if self.snapshot is None or self._arrived >= _SNAPSHOT_SAMPLES:
            pools = self._pools()
            self._turns, self._arrived, self._taken = 0, 0, []
            self.snapshot = {"pools": pools, "keys": self._ready.restore_key()[::-1]}
            try:
                self.snapshot = to_plain(self.snapshot | {"data": self.dataset.save_state()})
            except TypeError as error:
                self.snapshot = {"pools": pools, "error": str(error)}
        return True

    def _pools(self) -> int:
        """Pools ordered so far."""
        return self._turns + (self.snapshot["pools"] if self.snapshot else 0)

    def _order(self) -> None:
        """Make the incoming samples the pool that is handed out."""
        samples, keys = self._incoming.flush()
        size = self.settings.places
        # Counted in pools and not in samples that came, so that a rank which has lost a sample keeps the others' seed.
        order = self._policy(self._incoming_lengths, size, (self._pools() - 1) * size, self.settings.seed)[::-1]
        self._ready.extend([samples[i] for i in order], [keys[i] for i in order])
        self._ready_lengths = [self._incoming_lengths[i] for i in order]
        self._incoming_lengths = []
        self._places = len(order)

    # ---- saving and restoring

    def place(self) -> dict[str, Any]:
        """What has changed since the snapshot, plain."""
        return {name.lstrip("_"): to_plain(getattr(self, name)) for name in self._saved}

    def restore(self, snapshot: dict[str, Any] | None, place: dict[str, Any]) -> None:
        """Go on from a place; the samples are re-read by `start`. Without a snapshot that is the beginning."""
        self.reset()
        if snapshot is None:
            deep = isinstance(self.dataset, BaseWrapperDataset)
            self.dataset.reset_state_deep() if deep else self.dataset.reset_state_own()
            return
        self.snapshot = to_plain(snapshot)
        for name in self._saved:
            setattr(self, name, to_plain(place[name.lstrip("_")]))
        self.dataset.restore_state(from_plain(snapshot["data"]))
        self._pending = True

    def start(self, *, lose_pool: bool = False) -> Iterator[Any]:
        """Start to read the data, after a `restore` with the samples brought back that were held.

        Args:
            lose_pool: Do not re-read what was left of the pool that was being handed out, but go on with the next.

        Returns:
            The upstream for the other methods.
        """
        if not self._pending:
            return iter(self.dataset)
        self._pending = False
        keys, size = from_plain(self.snapshot["keys"]), self.settings.places
        if self._turns == 0 and not lose_pool:
            self._places = len(keys)
            self._ready.restore_state({"__class__": "SavableSampleBuffer", "_restore_keys": self._keys_left(keys)})
            self._ready.worker_start()
            self._ready_lengths = [sample_length(sample, self.settings.length_fn) for sample in self._ready.buffer]
        upstream = iter(self.dataset)
        # Of what has come in since, earlier pools are gone, the next `size` samples are the pool that is handed out,
        # and the rest is the one that fills.
        taken, waiting = set(self._taken), 0
        for number in range(self._arrived):
            sample = next(upstream)
            if number not in taken:
                if waiting >= (self._turns - 1) * size:
                    self._let_in(sample)
                waiting += 1
        if self._turns:
            samples, keys = self._incoming.flush()
            lengths = self._incoming_lengths
            self._incoming.extend(samples[:size], keys[:size])
            self._incoming_lengths = lengths[:size]
            self._order()
            self._keep([] if lose_pool else self._left())
            self._incoming.extend(samples[size:], keys[size:])
            self._incoming_lengths = lengths[size:]
        if lose_pool:
            self._places, self._holes = self._cursor, {}
        return upstream

    def _keys_left(self, keys: list[Any]) -> list[Any]:
        return [keys[place] for place in self._left()]

    def _keep(self, places: list[int]) -> None:
        """Keep these places of a pool that was just ordered: the others had been handed out before."""
        indices = [self._places - 1 - place for place in places]
        samples, keys = self._ready.flush()
        self._ready.extend([samples[i] for i in indices], [keys[i] for i in indices])
        self._ready_lengths = [self._ready_lengths[i] for i in indices]
