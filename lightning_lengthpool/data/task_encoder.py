"""Puts the length pool into any energon `TaskEncoder`, without the user changing a line of it.

energon builds its pipeline through `TaskEncoder.build_batch`, after encoding and before batching. `length_pool` puts
the pool in that method's place while a data set is built, and only then: the encoder itself is neither copied nor
derived from, so whatever its class looks like it stays the same object, and a `build_batch` of the user's own which
calls `super().build_batch(...)` finds the pool there as well.

Without packing the pool sits before `postencode_sample`, so that it holds light samples. With packing it sits after
energon's packing, which would mix its order up again, and holds packs.
"""

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from megatron.energon import SavableDataset, TaskEncoder, WorkerConfig
from megatron.energon.task_encoder.base import get_stateless
from megatron.energon.wrappers import LogSampleDataset

from lightning_lengthpool.data.pools.dataset import LengthPoolDataset
from lightning_lengthpool.data.reading.restorable import make_restorable
from lightning_lengthpool.data.reading.shards import parts_of
from lightning_lengthpool.ordering.settings import PoolSettings
from lightning_lengthpool.ordering.sorted_pool import SNAPSHOT_SAMPLES

_STATELESS_METHODS = (
    "cook_crude_sample",
    "encode_sample",
    "preencode_sample",
    "postencode_sample",
    "pack_selected_samples",
    "batch",
    "encode_batch",
)


_NO_CODE = (lambda: None).__code__


_build_batch = TaskEncoder.build_batch  # energon's own, for the packing


@contextmanager
def length_pool(
    task_encoder: TaskEncoder,
    settings: PoolSettings,
    failure_tolerance: int | None = None,
    skip_tolerance: int = 0,
    snapshot_samples: int = SNAPSHOT_SAMPLES,
) -> Iterator[None]:
    """Within this context, training data sets that `task_encoder` builds end in a length pool.

    `failure_tolerance` holds for energon's wrappers, too; None for the encoder's own. The rest is as in
    `LengthPoolDataset`.
    """

    def build_batch(
        self: TaskEncoder,
        dataset: SavableDataset,
        *,
        batch_size: int | None,
        batch_drop_last: bool = False,
        packing_buffer_size: int | None = None,
        worker_config: WorkerConfig,
    ) -> SavableDataset:
        for part in parts_of(dataset):
            make_restorable(part)
        postencode = self.postencode_sample if self._is_overridden(self.postencode_sample) else None
        if packing_buffer_size is not None:
            settings_of_packing = {"packing_buffer_size": packing_buffer_size, "worker_config": worker_config}
            dataset = _build_batch(self, dataset, batch_size=None, **settings_of_packing)
            make_restorable(dataset)
            postencode = None  # energon's packing has applied it
        return LengthPoolDataset(
            dataset,
            settings=replace(settings, batch_size=batch_size),
            # As in energon: without a batch size a pack is the batch, and it is neither collated nor encoded.
            batch=None if batch_size is None and settings.max_tokens is None else self.batch,
            encode_batch=self.encode_batch if self._is_overridden(self.encode_batch) else None,
            postencode=postencode,
            failure_tolerance=self.__default_failure_tolerance__,
            skip_tolerance=skip_tolerance,
            snapshot_samples=snapshot_samples,
            worker_config=worker_config,
        )

    own = vars(task_encoder)  # past a __setattr__ that may forbid it
    tolerance = "__default_failure_tolerance__"
    before = {tolerance: own[tolerance]} if tolerance in own else {}
    TaskEncoder.build_batch = build_batch
    if failure_tolerance is not None:
        own[tolerance] = failure_tolerance
    try:
        yield
    finally:
        TaskEncoder.build_batch = _build_batch
        own.pop(tolerance, None)
        own.update(before)


def check_encoder(task_encoder: TaskEncoder) -> None:
    """Check that a task encoder can be combined with a length pool: a slot is exactly one batch on every rank."""
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


def require_length_pool(dataset: SavableDataset, task_encoder: TaskEncoder) -> LengthPoolDataset:
    """Return the length pool in which the data set ends that the encoder has built; an error if it does not."""
    if isinstance(dataset, LogSampleDataset):
        dataset = dataset.dataset
    if isinstance(dataset, LengthPoolDataset):
        return dataset
    owners = {name: _owner(task_encoder, name) for name in ("build_batch", "build_train_datasets")}
    methods = [_name(owner, name) for name, owner in owners.items() if owner is not TaskEncoder]
    raise ValueError(
        f"{' and '.join(methods)} cannot be combined with the length pool, which has to form the batches as the last "
        "thing that happens to the samples. End the method with 'return super().build_batch(dataset, ...)', or remove "
        "it: the pool forms the batches with the encoder's own batch() and encode_batch()."
    )


def methods_not_stateless(task_encoder: TaskEncoder) -> list[str]:
    """The names of the encoder's methods that energon cannot repeat when it restores a sample."""
    methods = [getattr(task_encoder, name) for name in _STATELESS_METHODS]
    methods = [method for method in methods if task_encoder._is_overridden(method)]
    methods += [cooker.cook for cooker in task_encoder.cookers]
    return [getattr(method, "__qualname__", repr(method)) for method in methods if not get_stateless(method)]


def packs_several(task_encoder: TaskEncoder) -> str | None:
    """The name of the method that makes several packs of one selection, which energon cannot repeat; None if not."""
    method = task_encoder.pack_selected_samples
    return method.__qualname__ if inspect.isgeneratorfunction(inspect.unwrap(method)) else None


def methods_with_seeds(task_encoder: TaskEncoder) -> list[str]:
    """The names of the encoder's methods that draw random numbers again as they were (`restore_seeds=True`)."""
    methods = [getattr(task_encoder, name) for name in _STATELESS_METHODS]
    methods += [cooker.cook for cooker in task_encoder.cookers]
    # energon leaves no other mark on a method: its wrapper remembers the worker's seed.
    seeded = [method for method in methods if "worker_seed" in getattr(method, "__code__", _NO_CODE).co_freevars]
    return [method.__qualname__ for method in seeded]


def warn_not_stateless(task_encoder: TaskEncoder) -> None:
    """Warn of each of the `methods_not_stateless`, and of a generator of packs."""
    if (name := packs_several(task_encoder)) is not None:
        warnings.warn(
            f"{name} is a generator, and energon does not save which of its packs were made: a resumed run may miss "
            "some. Let it return one pack.",
            stacklevel=2,
        )
    for name in methods_not_stateless(task_encoder):
        warnings.warn(
            f"{name} is not marked @stateless: a checkpoint cannot restore its samples. If its result depends on the "
            "sample alone, decorate it with @megatron.energon.stateless; if it draws random numbers, with "
            "@stateless(restore_seeds=True).",
            stacklevel=2,
        )


def _owner(task_encoder: TaskEncoder, method: str) -> type:
    """The class that defines a method; the encoder's own class if it was set on the object."""
    if method in vars(task_encoder):
        return type(task_encoder)
    return next(cls for cls in type(task_encoder).__mro__ if method in vars(cls))


def _name(cls: type, method: str) -> str:
    return f"{cls.__module__}.{cls.__qualname__}.{method}"
