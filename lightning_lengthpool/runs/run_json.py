"""`run.json`, beside a run's `steps.csv`: which run it is, its hosts, workers and settings."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

NAME = "run.json"


@dataclass(frozen=True)
class About:
    """What `run.json` holds; None for what it does not tell."""

    run: str | None = None
    """Names the run's records: a checkpoint holds it too, so that a resumed run knows which ones are its own."""
    hosts: list[str] | None = None
    """Host of each data rank."""
    workers_by_rank: list[int | None] | None = None
    """Worker processes of each data rank; None where that is not known."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The data module's `policy`, `pool_size`, `batch_size`, `num_workers`, `max_tokens`; `has_reference` and
    `has_classes`; and `rank_samples`, the samples of the data set that fall to a rank. Those that are known."""


def write_about(folder: Path, about: About) -> None:
    (folder / NAME).write_text(json.dumps(asdict(about)) + "\n", encoding="utf-8")


def read_about(folder: Path) -> About:
    """Read the file; an empty `About` if there is none. Raises `ValueError` if its content is not as expected."""
    path = folder / NAME
    if not path.is_file():
        return About()
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"it holds {_shown(content)}, expected an object")
        known = {key: content[key] for key in _CHECKS if content.get(key) is not None}
        _check(known, _CHECKS, "")
        _check(known.get("settings", {}), _SETTINGS, "settings.")
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} cannot be used ({error}); move it away, it only names the run, its hosts, workers and settings"
        ) from None
    return About(**known)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _list_of(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(check, value))


_Checks = Mapping[str, tuple[Callable[[Any], bool], str]]

_CHECKS: _Checks = {
    "run": (lambda value: isinstance(value, str), "a text"),
    "hosts": (_list_of(lambda one: isinstance(one, str)), "a list of texts"),
    "workers_by_rank": (_list_of(lambda one: one is None or _is_count(one)), "a list of integers of at least 0"),
    "settings": (lambda value: isinstance(value, dict), "an object"),
}
_SETTINGS: _Checks = {
    "policy": (lambda value: isinstance(value, str), "a text"),
    "pool_size": (_is_count, "an integer of at least 0"),
    "batch_size": (
        lambda value: value is None or (_is_count(value) and value > 0),
        "an integer of at least 1, or null",
    ),
    "has_reference": (lambda value: isinstance(value, bool), "true or false"),
    "has_classes": (lambda value: isinstance(value, bool), "true or false"),
    "rank_samples": (lambda value: value is None or _is_count(value), "an integer of at least 0, or null"),
    "num_workers": (lambda value: value is None or _is_count(value), "an integer of at least 0, or null"),
    "max_tokens": (
        lambda value: value is None or (type(value) in (int, float) and 0 < value < math.inf),
        "a positive number, or null",
    ),
}


def _check(values: Mapping[str, Any], checks: _Checks, prefix: str) -> None:
    for key, (is_good, expected) in checks.items():
        if key in values and not is_good(values[key]):
            raise ValueError(f"{prefix}{key} is {_shown(values[key])}, expected {expected}")


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:79] + "…"
