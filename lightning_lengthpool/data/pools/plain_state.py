"""Iterator states as plain containers, so that a checkpoint loads with `weights_only=True`.

energon's datasets save nested dicts with a few objects of their own between, and our states are dataclasses. Here they
become dicts, lists, tuples, strings, bytes and numbers, and come back from them; nothing else is accepted, in either
direction, so a checkpoint that somebody else has written can do no more than name a position in the data.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from megatron.energon.flavors.webdataset.sample_loader import SliceState
from megatron.energon.state import FlexState

ClassT = TypeVar("ClassT", bound=type)

_OBJECT = "__object__"  # the key under which a dict tells which dataclass it was
_OBJECTS: dict[str, tuple[Any, frozenset[str]]] = {SliceState.__name__: (SliceState, frozenset())}


def plain_state(*plain: str) -> Callable[[ClassT], ClassT]:
    """Decorate a frozen dataclass, whose objects then have a plain form.

    The fields named hold plain containers already, which are never changed: they are not copied.
    """

    def register(cls: ClassT) -> ClassT:
        _OBJECTS[cls.__name__] = cls, frozenset(plain)
        return cls

    return register


def to_plain(value: Any, known: dict[int, Any] | None = None) -> Any:
    """Return a state in plain containers; what several of its parts share is shared there, too.

    `known` has plain forms of objects by their `id`, while these live. Raises `TypeError` for what has no plain form.
    """
    known = {} if known is None else known
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    if isinstance(value, dict):
        return {key: to_plain(item, known) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(to_plain(item, known) for item in value)
    name = type(value).__name__
    cls, plain = _OBJECTS.get(name, (None, frozenset()))
    if type(value) is not cls:
        raise TypeError(f"a data set's state holds a {type(value).__module__}.{name}, which cannot be saved")
    if id(value) not in known:
        form: dict[str, Any] = {_OBJECT: name}
        for field in dataclasses.fields(cls):
            item = getattr(value, field.name)
            form[field.name] = item if field.name in plain else to_plain(item, known)
        known[id(value)] = form
    return known[id(value)]


def from_plain(value: Any) -> Any:
    """Return a plain state with its objects, in the form in which energon's datasets restore theirs.

    Raises `ValueError` for an object that no state holds, `TypeError` for one that lacks a field or has one too many.
    """
    if isinstance(value, dict):
        name = value.get(_OBJECT)
        if name is None:
            return FlexState({key: from_plain(item) for key, item in value.items()})
        if name not in _OBJECTS:
            raise ValueError(f"the saved state of the data names an unknown object {name!r}")
        cls, plain = _OBJECTS[name]
        return cls(**{key: item if key in plain else from_plain(item) for key, item in value.items() if key != _OBJECT})
    if isinstance(value, (list, tuple)):
        return type(value)(from_plain(item) for item in value)
    return value
