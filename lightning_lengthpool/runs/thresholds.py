"""From which figure on a cause of waiting is named, and a rank counts as slow. All of them in one place."""

NAMED_FROM = 0.05
"""A smaller part of the time is no cause worth a sentence; below it no rank is named that waits for data either."""

BOTTLENECK_FROM = 0.1
"""A smaller wait for data is named, but not called the bottleneck."""

PADDING_FROM = 0.1
"""Share of the tokens that are padding."""

ELSEWHERE_FROM = 0.25
"""Time outside data, compute and exchange: an optimizer alone may take a good part of a small model's step."""

ELSEWHERE_RANK_FROM = 0.05
"""Of the time, by which a rank that is busy elsewhere is told from the others."""

REST_FROM = 0.1
"""Waiting without a cause: some of it is always there."""

SLOW_RANK_FACTOR = 1.1
"""For equal cost: so many times the (lower) median rank's time and a rank is slow; as much below it, fast."""

SLOW_WINDOW_FACTOR = 1.05
"""The same by the fit of one window alone, which has to confirm it."""

SLOW_STANDARD_ERRORS = 4.0
"""By so many standard errors a rank's factor has to differ from 1."""
