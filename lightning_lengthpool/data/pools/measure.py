"""Measures samples on their way into a pool: a function that fails for a sample costs that sample only."""

from collections.abc import Callable
from typing import Any, NamedTuple

from megatron.energon import WorkerConfig
from megatron.energon.errors import ErrorContext, FatalSampleError
from megatron.energon.task_encoder.base import get_failure_tolerance

from lightning_lengthpool.ordering.settings import ClassFn, PoolSettings

_FAILED = object()


class Measured(NamedTuple):
    """A sample's length in tokens, its cost, and what `class_fn` says (None without classes)."""

    length: float
    cost: float
    class_name: Any = None


class Measurer:
    """Measures a sample; None where that fails, and energon's error handler then shows the sample and the error.

    `failure_tolerance` failures of one function in a row end the iteration with a `FatalSampleError`, unless the
    function says so itself (`@stateless(failure_tolerance=...)`); 0 for no limit. `class_fn` is given where there is
    one before its shares are known.
    """

    def __init__(
        self,
        settings: PoolSettings,
        worker_config: WorkerConfig,
        failure_tolerance: int | None,
        class_fn: ClassFn | None = None,
    ) -> None:
        self._settings, self._class_fn = settings, class_fn or settings.class_fn
        cost, length_fn = settings.cost, settings.length_fn
        self._errors = {
            setting: ErrorContext(
                name=name,
                handler=worker_config.global_error_handler,
                tolerance=get_failure_tolerance(function, failure_tolerance),
            )
            for setting, function, name in (
                ("length_fn", length_fn, f"length_fn {_name(length_fn)}" if length_fn else "the sample's length"),
                ("cost", None if cost is None else cost.cost, f"cost {cost!r}"),
                ("class_fn", self._class_fn, f"class_fn {_name(self._class_fn)}"),
            )
        }

    def __call__(self, sample: Any) -> Measured | None:
        settings, class_name = self._settings, None
        if (length := self._ask("length_fn", settings.length_of, sample)) is _FAILED:
            return None
        if (cost := self._ask("cost", settings.cost_of, sample, length)) is _FAILED:
            return None
        if self._class_fn is not None and (class_name := self._ask("class_fn", self._class_fn, sample)) is _FAILED:
            return None
        return Measured(length, cost, class_name)

    def _ask(self, setting: str, function: Callable[..., Any], sample: Any, *given: Any) -> Any:
        try:
            with self._errors[setting].handle_errors(sample):
                return function(sample, *given)
        except FatalSampleError as fatal:
            error = fatal.__context__
            raise FatalSampleError(f"{fatal} The last error was {type(error).__name__}: {error}") from error
        return _FAILED


def _name(function: Any) -> str:
    return f"{function.__module__}.{function.__qualname__}" if hasattr(function, "__qualname__") else repr(function)
