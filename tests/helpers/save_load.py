"""The one harness for iterator states: whatever has one goes on from it with exactly the rest."""

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any


def check_save_and_load(
    start: Callable[[Any], tuple[Iterator[Any], Callable[[], Any]]],
    items: int | None = None,
    stops: Iterable[int] | None = None,
    through: Callable[[Any], Any] = copy.deepcopy,
) -> None:
    """Stop at each of `stops`, go on from the state there, and compare all that follows up to the next stop.

    Each run but the first starts where the one before has stopped, so a state that was gone on from is saved again.
    The last run goes on to the end, and once more from there.

    Args:
        start: Takes a state (None for the beginning) and gives a new iterator and a function that tells its state.
        items: Items to compare; None for a finite stream, up to its end.
        stops: After how many items to save; None for every one, from 0 to the last.
        through: What a state goes through between two runs: a file, say.
    """
    whole, _ = start(None)
    expected = [item for item, _ in zip(whole, range(10**9 if items is None else items), strict=False)]
    assert expected, "nothing to compare"
    state, done = None, 0
    for stop in [*(range(len(expected)) if stops is None else stops), len(expected)]:
        stream, state_of = start(state)
        got = [next(stream) for _ in range(stop - done)]
        assert got == expected[done:stop], f"the run that went on after item {done} differs before item {stop}"
        done, state = stop, through(state_of())
    if items is None:
        stream, _ = start(state)
        assert next(stream, None) is None, "a run that goes on at the end has nothing left"
