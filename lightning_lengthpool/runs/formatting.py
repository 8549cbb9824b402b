"""Numbers in words: with as many digits as they deserve."""

import math
from collections.abc import Iterable

from lightning_lengthpool.simulation.predict import Case, Interval


def percent(fraction: float) -> str:
    """A fraction in percent.

    Example:
        >>> percent(0.0456), percent(0.123), percent(0.99961)
        ('4.6 %', '12 %', '100 %')
    """
    if math.isnan(fraction):
        return "-"
    return f"{_digits(100 * fraction)} %"


def interval(value: Interval) -> str:
    """An interval in percent.

    Example:
        >>> interval(Interval(0.0456, 0.04, 0.101))
        '4.6 % (4.0 to 10.1)'
    """
    if math.isnan(value.mean):
        return "-"
    return f"{100 * value.mean:.1f} % ({100 * value.low:.1f} to {100 * value.high:.1f})"


def number(value: float) -> str:
    """A number with about three digits.

    Example:
        >>> number(0.1234), number(2.5), number(12.345), number(1234.5)
        ('0.12', '2.5', '12.3', '1,234')
    """
    if abs(value) >= 100 or value == round(value):
        return f"{value:,.0f}"
    return f"{value:.{1 if abs(value) >= 10 else 2}f}".rstrip("0").rstrip(".")


def megabytes(size: float | None) -> str:
    """Bytes as MB.

    Example:
        >>> megabytes(1_234_567), megabytes(2.5e9), megabytes(2_000), megabytes(None)
        ('1.2 MB', '2,500 MB', 'under 0.1 MB', 'not known')
    """
    if size is None:
        return "not known"
    if 0 < size < 1e5:
        return "under 0.1 MB"
    return f"{size / 1e6:.1f} MB" if 0 < size < 1e7 else f"{size / 1e6:,.0f} MB"


def duration(seconds: float | None) -> str:
    """Seconds as seconds, minutes or hours.

    Example:
        >>> duration(0.0123), duration(4.25), duration(40.2), duration(300), duration(0), duration(None)
        ('12 ms', '4.2 s', '40 s', '5.0 min', '0 s', 'not known')
    """
    if seconds is None:
        return "not known"
    if seconds == 0:
        return "0 s"
    if seconds < 0.9995e-3:
        return "under 1 ms"
    for factor, unit, until in ((1e3, "ms", 1.0), (1.0, "s", 120.0), (1 / 60, "min", 7200.0)):
        if seconds < until:
            value = seconds * factor
            return f"{value:.1f} {unit}" if value < 10 and unit != "ms" else f"{value:.0f} {unit}"
    return f"{seconds / 3600:.1f} h"


def setting(case: Case) -> str:
    """The pool of a case.

    Example:
        >>> from lightning_lengthpool.ordering.settings import PoolSettings
        >>> setting(Case(PoolSettings(policy="stream"), world_size=8, has_reference=True))
        'stream, pool_size 1000, reference_lengths'
        >>> setting(Case(PoolSettings(policy="none"), world_size=8))
        'no pool'
    """
    settings = case.settings
    if settings.is_off:
        return "no pool"
    return f"{settings.policy}, pool_size {settings.pool_size}" + (", reference_lengths" if case.has_reference else "")


def ranks(count: int) -> str:
    """How many ranks.

    Example:
        >>> ranks(1), ranks(512)
        ('1 rank', '512 ranks')
    """
    return f"{count:,} rank{'' if count == 1 else 's'}"


def compact_ranges(numbers: Iterable[int]) -> str:
    """Write numbers as ranges.

    Example:
        >>> compact_ranges([0, 1, 2, 3, 7, 8])
        '0-3, 7, 8'
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def ranks_named(numbers: Iterable[int]) -> str:
    """Ranks by their numbers.

    Example:
        >>> ranks_named([3]), ranks_named([0, 1, 2, 7])
        ('rank 3', 'ranks 0-2, 7')
    """
    named = list(numbers)
    return f"rank{'' if len(named) == 1 else 's'} {compact_ranges(named)}"


def _digits(value: float) -> str:
    return f"{value:.1f}" if abs(value) < 9.95 else f"{value:.0f}"
