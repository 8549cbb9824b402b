"""Which samples of the data set a sample was made of, as energon's restore key tells.

A restore key has one part for each energon data set that the sample went through, the outermost one first: the class's
name, and numbers or inner keys behind it (`add_sample_restore_key`). A blend writes down which source it took, the
reader which sample of the shards; these stay the same when the data come again. A `MapDataset` and a `PackingDataset`
write down which run of the encoder it was, which does not.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from megatron.energon.wrappers import MapDataset, PackingDataset

Key = tuple[Any, ...]


class Origin(NamedTuple):
    """A sample of the data set.

    Attributes:
        key: Its key, the same each time it is read.
        is_first: Whether this is the first sample that the encoder made of it in this run.
    """

    key: Key
    is_first: bool


def origins(restore_key: Key) -> list[Origin]:
    """The samples that a sample was made of: several of a pack, else one."""
    key: list[Any] = []
    is_first = True
    for name, numbers in _parts(restore_key):
        packed = [number for number in numbers if isinstance(number, tuple)]
        if name == PackingDataset.__name__:
            if packed:
                return [origin for inner in packed for origin in origins(inner)]
        elif name == MapDataset.__name__:
            is_first &= not any(numbers[1:])  # of a generator: the run, and the number of the sample in it
        else:
            key += [name, *numbers]
    return [Origin(tuple(key), is_first)]


def _parts(restore_key: Key) -> Iterator[tuple[str, Key]]:
    """A key's parts: the name of a data set's class, and what it wrote down."""
    starts = [index for index, part in enumerate(restore_key) if isinstance(part, str)]
    for start, stop in zip(starts, [*starts[1:], len(restore_key)], strict=True):
        yield restore_key[start], restore_key[start + 1 : stop]
