"""A sample's length in tokens, whatever the sample looks like."""

import math
import numbers
from collections.abc import Callable
from typing import Any

LengthFn = Callable[[Any], float]


def get_field(sample: Any, name: str) -> Any:
    """Return the attribute or dict key `name` of a sample, None where it has none."""
    return sample.get(name) if isinstance(sample, dict) else getattr(sample, name, None)


def field_names(sample: Any) -> str:
    """List what a sample has, for an error."""
    names = sorted(sample if isinstance(sample, dict) else getattr(sample, "__dict__", {}))
    return ", ".join(map(repr, names)) or "no fields"


def sample_length(sample: Any, length_fn: LengthFn | None = None) -> float:
    """Return a sample's length in tokens.

    Args:
        sample: An encoded sample: an object with attributes, or a dict.
        length_fn: Takes the sample and gives its length. None: `total_len` if the sample has one, else
            `len(tokens)`.

    Raises:
        ValueError: If the sample has no length, or one that is no number, not finite or negative; the message names
            the sample's key.
    """
    if length_fn is not None:
        value, origin = length_fn(sample), getattr(length_fn, "__qualname__", repr(length_fn))
    elif (value := get_field(sample, "total_len")) is not None:
        origin = "total_len"
    elif (tokens := get_field(sample, "tokens")) is not None:
        value, origin = len(tokens), "len(tokens)"
    else:
        raise ValueError(
            f"sample {get_field(sample, '__key__')!r} ({type(sample).__name__}) has no length: it has neither "
            f"'total_len' nor 'tokens', only {field_names(sample)}. Let the encoder set one of "
            "the two, or name a function with length_fn (in YAML: 'length_fn: my_package.my_length')."
        )
    if hasattr(value, "item"):  # a tensor or array of one number
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not (0 <= value < math.inf):
        raise ValueError(
            f"sample {get_field(sample, '__key__')!r} has the length {value!r} (from {origin}), "
            "expected a finite number of at least 0"
        )
    return value
