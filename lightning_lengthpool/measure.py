"""Measures samples on their way into a pool: a function that fails for a sample costs that sample only."""

from collections.abc import Callable
from typing import Any

from megatron.energon import WorkerConfig
from megatron.energon.errors import ErrorContext, FatalSampleError
from megatron.energon.task_encoder.base import get_failure_tolerance

from lightning_lengthpool.pool import PoolSettings, Size


class Measurer:
    """Tells a sample's size, or None where that fails, which energon's error handler then tells.

    Args:
        settings: The pool, which says how to measure.
        worker_config: Has the error handler.
        failure_tolerance: Failures in a row, of one function, after which it ends with the last one's error, unless the
            function says so itself (`@stateless(failure_tolerance=...)`); 0 for no limit.
    """

    def __init__(self, settings: PoolSettings, worker_config: WorkerConfig, failure_tolerance: int | None) -> None:
        self._settings = settings
        cost = settings.cost
        functions = {
            "length_fn": (settings.length_fn, _name(settings.length_fn)),
            "cost": (None if cost is None else cost.cost, repr(cost)),
            "class_fn": (settings.class_fn, _name(settings.class_fn)),
        }
        self._errors = {
            setting: ErrorContext(
                name=f"{setting} {name}",
                handler=worker_config.global_error_handler,
                tolerance=get_failure_tolerance(function, failure_tolerance),
            )
            for setting, (function, name) in functions.items()
        }

    def __call__(self, sample: Any) -> Size | None:
        settings, kind = self._settings, None
        if (length := self._ask("length_fn", settings.length_of, sample)) is None:
            return None
        if (cost := self._ask("cost", settings.cost_of, sample, length)) is None:
            return None
        if settings.class_fn is not None and (kind := self._ask("class_fn", settings.class_of, sample)) is None:
            return None
        return Size(length, cost, kind)

    def _ask(self, setting: str, function: Callable[..., Any], sample: Any, *given: Any) -> Any:
        try:
            with self._errors[setting].handle_errors(sample):
                return function(sample, *given)
        except FatalSampleError as fatal:
            error = fatal.__context__
            raise FatalSampleError(f"{fatal} The last error was {type(error).__name__}: {error}") from error
        return None


def _name(function: Any) -> str:
    """What a user calls a function."""
    return f"{function.__module__}.{function.__qualname__}" if hasattr(function, "__qualname__") else repr(function)
