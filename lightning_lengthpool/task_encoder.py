"""Puts the length pool into any energon `TaskEncoder`, without the user changing a line of it.

energon builds its pipeline through the encoder's `build_batch`, after encoding and before batching. `with_length_pool`
returns a copy of the encoder whose class has one more base between the user's classes and `TaskEncoder`, so that
everything else, also a `build_batch` of the user's own which calls `super().build_batch(...)`, stays as it was.

Without packing the pool sits before `postencode_sample`, so that it holds light samples. With packing it sits after
energon's packing, which would mix its order up again, and holds packs.
"""

import copy
import inspect
import types
import warnings

from megatron.energon import SavableDataset, TaskEncoder, WorkerConfig
from megatron.energon.task_encoder.base import get_failure_tolerance, get_stateless
from megatron.energon.wrappers import LogSampleDataset

from lightning_lengthpool.dataset import LengthPoolDataset, PoolSettings

_STATELESS_METHODS = (
    "cook_crude_sample",
    "encode_sample",
    "preencode_sample",
    "postencode_sample",
    "pack_selected_samples",
    "batch",
    "encode_batch",
)


class _LengthPoolSeam(TaskEncoder):
    """The base that `with_length_pool` slips in below the user's classes."""

    _pool_settings: PoolSettings

    def build_batch(
        self,
        dataset: SavableDataset,
        *,
        batch_size: int | None,
        batch_drop_last: bool = False,
        packing_buffer_size: int | None = None,
        worker_config: WorkerConfig,
    ) -> SavableDataset:
        postencode = self.postencode_sample if self._is_overridden(self.postencode_sample) else None
        if packing_buffer_size is not None:
            dataset = super().build_batch(
                dataset,
                batch_size=None,
                packing_buffer_size=packing_buffer_size,
                worker_config=worker_config,
            )
            postencode = None  # energon's packing has applied it
        return LengthPoolDataset(
            dataset,
            batch_size=batch_size or 1,
            settings=self._pool_settings,
            # As in energon: without a batch size a pack is the batch, and it is neither collated nor encoded.
            batch=None if batch_size is None else self.batch,
            encode_batch=self.encode_batch if self._is_overridden(self.encode_batch) else None,
            postencode=postencode,
            failure_tolerance=get_failure_tolerance(self.batch, self.__default_failure_tolerance__),
            worker_config=worker_config,
        )


def with_length_pool(task_encoder: TaskEncoder, settings: PoolSettings) -> TaskEncoder:
    """Return a copy of `task_encoder` whose training batches come out of a length pool.

    Args:
        task_encoder: Any energon task encoder; it is left as it is.
        settings: The pool.

    Raises:
        TypeError: If `task_encoder` is not an instance of energon's `TaskEncoder`.
        ValueError: If the encoder groups samples for batches (`batch_group_criterion`), or if `batch` or
            `encode_batch` is a generator: a slot is exactly one batch on every rank.
    """
    if not isinstance(task_encoder, TaskEncoder):
        kind = f"the class {task_encoder.__name__}" if isinstance(task_encoder, type) else repr(task_encoder)
        raise TypeError(f"task_encoder is {kind}, expected an instance of megatron.energon.TaskEncoder")
    cls = type(task_encoder)
    if task_encoder._is_overridden(task_encoder.batch_group_criterion):
        raise ValueError(
            f"{_name(cls, 'batch_group_criterion')} forms groups of samples for batches, which would undo the order of "
            "the length pool. Remove it: samples of like length already leave the pool together on all ranks."
        )
    for method in ("batch", "encode_batch"):
        if inspect.isgeneratorfunction(inspect.unwrap(getattr(task_encoder, method))):
            raise ValueError(
                f"{_name(cls, method)} is a generator. Every rank must make exactly one batch of each slot, or the "
                "ranks drift apart: return one batch instead of yielding several."
            )
    bases = (cls, _LengthPoolSeam)
    pooled = copy.copy(task_encoder)
    pooled.__class__ = types.new_class(
        cls.__name__,
        bases,
        exec_body=lambda ns: ns.update(__module__=cls.__module__, _pool_settings=settings),
    )
    return pooled


def require_length_pool(dataset: SavableDataset, task_encoder: TaskEncoder) -> None:
    """Check that the data set which the encoder has built ends in a length pool.

    Raises:
        ValueError: If a method of the user's own builds its batches around the pool; the message names it.
    """
    if isinstance(dataset, LogSampleDataset):
        dataset = dataset.dataset
    if isinstance(dataset, LengthPoolDataset):
        return
    cls = type(task_encoder)
    overridden = [name for name in ("build_batch", "build_train_datasets") if _owner(cls, name) is not TaskEncoder]
    raise ValueError(
        f"{' and '.join(_name(_owner(cls, name), name) for name in overridden)} cannot be combined with the length "
        "pool, which has to form the batches as the last thing that happens to the samples. End the method with "
        "'return super().build_batch(dataset, ...)', or remove it: the pool forms the batches with the encoder's own "
        "batch() and encode_batch()."
    )


def warn_not_stateless(task_encoder: TaskEncoder) -> None:
    """Warn of each method of the encoder that energon cannot repeat when it restores a sample."""
    methods = [getattr(task_encoder, name) for name in _STATELESS_METHODS]
    methods = [method for method in methods if task_encoder._is_overridden(method)]
    methods += [cooker.cook for cooker in task_encoder.cookers]
    for method in methods:
        if not get_stateless(method):
            name = getattr(method, "__qualname__", repr(method))
            warnings.warn(
                f"{name} is not marked @stateless: a checkpoint cannot restore its samples. If its result depends on "
                "the sample alone, decorate it with @megatron.energon.stateless; if it draws random numbers, with "
                "@stateless(restore_seeds=True).",
                stacklevel=2,
            )


def _owner(cls: type, method: str) -> type:
    """Return the class of the user's, or energon's, that defines `method` for `cls`."""
    return next(base for base in cls.__mro__ if method in vars(base) and base is not _LengthPoolSeam)


def _name(cls: type, method: str) -> str:
    return f"{cls.__module__}.{cls.__qualname__}.{method}"
