"""Iterator states as plain containers, so that a checkpoint loads with `weights_only=True`.

energon's datasets save nested dicts with a few objects of their own between, and our states are dataclasses. Here they
become dicts, lists, tuples, strings, bytes and numbers, and come back from them; nothing else is accepted, in either
direction, so a checkpoint that somebody else has written can do no more than name a position in the data.
"""

import dataclasses
from typing import Any, TypeVar

from megatron.energon.flavors.webdataset.sample_loader import SliceState
from megatron.energon.state import FlexState

ClassT = TypeVar("ClassT", bound=type)

_OBJECT = "__object__"  # the key under which a dict tells which dataclass it was
_OBJECTS: dict[str, type] = {SliceState.__name__: SliceState}


def plain_state(cls: ClassT) -> ClassT:
    """Decorate a dataclass, whose objects then have a plain form."""
    _OBJECTS[cls.__name__] = cls
    return cls


def to_plain(value: Any, known: dict[int, Any] | None = None) -> Any:
    """Return a copy of a state in plain containers; what several of its parts share is copied once.

    Args:
        value: The state.
        known: Plain forms of objects by their `id`, while these live.

    Raises:
        TypeError: If there is something in it that has no plain form; the message names its type.
    """
    known = {} if known is None else known
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    if isinstance(value, dict):
        return {key: to_plain(item, known) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(to_plain(item, known) for item in value)
    if type(value) in _OBJECTS.values():
        if id(value) not in known:
            fields = {field.name: to_plain(getattr(value, field.name), known) for field in dataclasses.fields(value)}
            known[id(value)] = {_OBJECT: type(value).__name__, **fields}
        return known[id(value)]
    raise TypeError(
        f"a data set's state holds a {type(value).__module__}.{type(value).__name__}, which cannot be saved"
    )


def from_plain(value: Any) -> Any:
    """Return a copy of a plain state with its objects, in the form in which energon's datasets restore theirs.

    Raises:
        ValueError: If it names an object that no state holds.
        TypeError: If an object lacks a field, or has one too many.
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
    return dataclasses.replace(value) if type(value) in _OBJECTS.values() else value
