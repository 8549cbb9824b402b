"""The saved place of a data stream as plain containers, so that a checkpoint loads with `weights_only=True`.

energon's datasets save nested dicts with a few objects of their own between. Here they become dicts, lists, tuples,
strings, bytes and numbers, and come back from them; nothing else is accepted, in either direction, so a checkpoint that
somebody else has written can do no more than name a place in the data.
"""

import dataclasses
from typing import Any

from megatron.energon.flavors.webdataset.sample_loader import SliceState
from megatron.energon.state import FlexState

_OBJECTS = {cls.__name__: cls for cls in (SliceState,)}
_OBJECT = "__object__"  # the key under which a dict tells which of these it was


def to_plain(value: Any) -> Any:
    """Return a copy of a state in plain containers.

    Raises:
        TypeError: If there is something in it that has no plain form; the message names its type.
    """
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(to_plain(item) for item in value)
    if type(value) in _OBJECTS.values():
        fields = {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {_OBJECT: type(value).__name__, **fields}
    raise TypeError(
        f"a data set's state holds a {type(value).__module__}.{type(value).__name__}, which cannot be saved"
    )


def from_plain(value: Any) -> Any:
    """Return a copy of a plain state in the form in which energon's datasets restore it.

    Raises:
        ValueError: If it names an object that no data set's state holds.
    """
    if isinstance(value, dict):
        fields = {key: from_plain(item) for key, item in value.items() if key != _OBJECT}
        if _OBJECT not in value:
            return FlexState(fields)
        if value[_OBJECT] not in _OBJECTS:
            raise ValueError(f"the saved state of the data names an unknown object {value[_OBJECT]!r}")
        return _OBJECTS[value[_OBJECT]](**fields)
    if isinstance(value, (list, tuple)):
        return type(value)(from_plain(item) for item in value)
    return value
