"""A sample's length in tokens, whatever the sample looks like."""

import dataclasses
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

LengthFn = Callable[[Any], float]
TOKEN_FIELDS = ("tokens", "input_ids")
"""Where a sample without a `total_len` has its tokens, in one dimension; the first one that is there counts."""


def get_field(sample: Any, name: str) -> Any:
    """Return the attribute or dict key `name` of a sample, None where it has none."""
    return sample.get(name) if isinstance(sample, Mapping) else getattr(sample, name, None)


def attributes(value: Any) -> set[str]:
    """Return the names of what an object holds: fields of a dataclass, slots, and plain attributes."""
    names = set(getattr(value, "__dict__", ()))
    if isinstance(value, tuple):
        names |= set(getattr(value, "_fields", ()))
    if dataclasses.is_dataclass(value):
        names |= {field.name for field in dataclasses.fields(value)}
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        names |= {slots} if isinstance(slots, str) else set(slots)
    return {name for name in names if hasattr(value, name)}


def field_names(sample: Any) -> str:
    """List what a sample has, for an error."""
    names = sorted(map(str, sample if isinstance(sample, Mapping) else attributes(sample)))
    return ", ".join(map(repr, names)) or "no fields"


def sample_length(sample: Any, length_fn: LengthFn | None = None) -> float:
    """Return a sample's length in tokens: what `length_fn` says of the sample.

    Without it: `total_len` if the sample has one, else `len(tokens)`, else `len(input_ids)`. Raises `ValueError`,
    naming the sample's key, if it has no length, or one that is no number, not finite or negative, or tokens that are
    not in one dimension.
    """
    if length_fn is not None:
        return _checked(sample, length_fn(sample), getattr(length_fn, "__qualname__", repr(length_fn)))
    if (value := get_field(sample, "total_len")) is not None:
        return _checked(sample, value, "total_len")
    for name in TOKEN_FIELDS:
        if (tokens := get_field(sample, name)) is not None:
            return _count(sample, name, tokens)
    wanted = " nor ".join(map(repr, ("total_len", *TOKEN_FIELDS)))
    raise ValueError(
        f"sample {get_field(sample, '__key__')!r} ({type(sample).__name__}) has no length: it has neither {wanted}, "
        f"only {field_names(sample)}. Let the encoder set one of them, or name a function with length_fn (in YAML: "
        "'length_fn: my_package.my_length')."
    )


def _checked(sample: Any, value: Any, origin: str) -> float:
    if hasattr(value, "item"):  # a tensor or array
        shape = tuple(getattr(value, "shape", ()))
        if math.prod(shape) != 1:
            raise ValueError(
                f"sample {get_field(sample, '__key__')!r} has a length of shape {shape} (from {origin}), expected one "
                "number"
            )
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 <= float(value) < math.inf:
        raise ValueError(
            f"sample {get_field(sample, '__key__')!r} has the length {value!r} (from {origin}), "
            "expected a finite number of at least 0"
        )
    return value  # type: ignore[return-value]  # a number of any kind


def _count(sample: Any, name: str, tokens: Any) -> int:
    shape = _shape(tokens)
    if shape is not None and len(shape) == 1:
        return int(shape[0])
    given = f"a {type(tokens).__name__}" + ("" if shape is None else f" of shape {shape}")
    raise ValueError(
        f"sample {get_field(sample, '__key__')!r} has {name!r} which is {given}, expected one dimension of tokens, "
        "which tells its length. Let the encoder give them in one dimension (a tokenizer's return_tensors adds "
        "another: take [0]) or set 'total_len', or name a function with length_fn."
    )


def _shape(value: Any) -> tuple[int, ...] | None:
    """The shape of a tensor, an array or nested lists; () of a number; None of what holds no tokens."""
    if hasattr(value, "shape"):
        return tuple(value.shape)
    if isinstance(value, (numbers.Number, type(None))):
        return ()
    if isinstance(value, (str, Mapping)) or not hasattr(value, "__len__"):
        return None
    if not len(value) or not hasattr(value, "__getitem__"):
        return (len(value),)
    return (len(value), *(_shape(value[0]) or ()))
