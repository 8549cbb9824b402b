"""How many bytes a sample keeps in memory, whatever it is made of."""

import sys
from collections.abc import Mapping
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from lightning_lengthpool.ordering.length import attributes

_WEIGHED, _WEIGHED_BYTES = 100, 2**26  # samples that are weighed, and when to stop doing so


class Scales:
    """Tells what samples add to those that are held already: what they share with these counts once."""

    def __init__(self) -> None:
        self._samples: list[Any] = []  # held, for what is gone leaves its identity to others
        self._seen: set[Any] = set()
        self._total = 0
        self.is_open = True

    def weigh(self, sample: Any) -> int:
        size = bytes_of(sample, self._seen)
        self._samples.append(sample)
        self._total += size
        if len(self._samples) >= _WEIGHED or self._total >= _WEIGHED_BYTES:
            self.is_open = False
            self._samples, self._seen = [], set()
        return size


def bytes_of(value: Any, seen: set[Any]) -> int:
    """How many bytes an object holds on to that are not counted yet.

    A storage counts once, and as a whole: a view of a large tensor or array keeps all of it in memory.

    Args:
        value: A sample, or a part of one.
        seen: What is counted; it grows.
    """
    if value is None or isinstance(value, (bool, type, FunctionType, ModuleType)) or id(value) in seen:
        return 0
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        return sys.getsizeof(value) + _once(storage.data_ptr(), storage.nbytes(), seen)
    if isinstance(value, np.ndarray):
        return _bytes_of_array(value, seen)
    total = sys.getsizeof(value)
    if isinstance(value, Mapping):
        return total + sum(bytes_of(one, seen) for item in value.items() for one in item)
    if isinstance(value, (list, tuple, set, frozenset)):
        return total + sum(bytes_of(one, seen) for one in value)
    if isinstance(value, (str, bytes, bytearray, int, float, complex)):
        return total
    if isinstance(value, memoryview):
        return total + bytes_of(value.obj, seen)
    if hasattr(value, "getbands") and hasattr(value, "size"):  # a picture of Pillow, whose pixels Python cannot see
        return total + value.size[0] * value.size[1] * len(value.getbands())
    parts = [getattr(value, name) for name in sorted(attributes(value))]
    return total + sum(bytes_of(part, seen) for part in parts)


def _bytes_of_array(array: np.ndarray, seen: set[Any]) -> int:
    base: Any = array
    while isinstance(base.base, np.ndarray):
        base = base.base
    own = sys.getsizeof(array) - (array.nbytes if array.flags.owndata else 0)
    if isinstance(base.base, (bytes, bytearray, memoryview, torch.Tensor)):
        return own + bytes_of(base.base, seen)
    inner = sum(bytes_of(one, seen) for one in base.flat) if base.dtype.hasobject else 0
    return own + _once(base.ctypes.data, base.nbytes, seen) + inner


def _once(address: int, size: int, seen: set[Any]) -> int:
    if ("storage", address) in seen:
        return 0
    seen.add(("storage", address))
    return size
