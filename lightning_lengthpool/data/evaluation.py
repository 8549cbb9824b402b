"""Validation, test and prediction: a split's loader, and the check that there is enough in it."""

import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info
from megatron.energon import WorkerConfig
from megatron.energon.savable_loader import BasicDataLoader
from torch.utils.data import DataLoader

from lightning_lengthpool.data.reading.shards import shield_sources
from lightning_lengthpool.data.reading.splits import NoSplitError, require_samples, split_size, workers_with_samples
from lightning_lengthpool.data.source import DataPath, Source
from lightning_lengthpool.data.workers import prepare_workers, stop_workers
from lightning_lengthpool.ranks.data_rank import Agreement, DataRank


class EvalLoader:
    """Runs over a whole evaluation set from its start each time, with the same number of batches on every rank.

    A rank that has no batch left, while another has, yields its last one again; `is_repeat` tells which ones to leave
    out of a metric. The ranks agree before each batch (one small reduction), because how many batches an encoder makes
    of a data set (skipped samples, packing, generators) is not known before.

    `ranks_with` takes whether this rank has something, and returns on how many of `world_size` ranks it is so; None if
    each rank goes on by itself, without repeats. `length` counts the batches of the longest rank, None if the encoder
    may make more of them than samples go in. `boundary` is called before each batch, equally often on all ranks.
    """

    def __init__(
        self,
        build: Callable[[], DataLoader[Any]],
        length: int | None,
        ranks_with: Callable[[bool], int] | None,
        world_size: int,
        name: str,
        boundary: Callable[[], None] = lambda: None,
    ) -> None:
        self._build = build
        self._length = length
        self._ranks_with = ranks_with
        self._world_size = world_size
        self._name = name
        self._boundary = boundary
        self._first_repeat = math.inf
        self._open: DataLoader[Any] | None = None

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"the number of {self._name} batches is not known before they are encoded")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        self.close()
        self._first_repeat = math.inf
        self._open = prepare_workers(self._build())
        stream = iter(self._open)
        if self._ranks_with is None:
            yield from map(shield_sources, stream)
            return
        fresh, batch = next(stream, None), None
        having = self._ranks_with(fresh is not None)
        if 0 < having < self._world_size:
            raise ValueError(
                f"{self._world_size - having} of {self._world_size} ranks got no {self._name} batch: all their samples "
                "were skipped, or there are too few. Use fewer ranks or a larger set."
            )
        for index in itertools.count():
            if having == 0:
                return
            self._boundary()
            if fresh is None:
                self._first_repeat = min(self._first_repeat, index)
            else:
                batch = shield_sources(fresh)
            # Looked for before this one is used: Lightning does not come back after the last, when the workers can go.
            fresh = next(stream, None)
            having = self._ranks_with(fresh is not None)
            if having == 0:
                self.close()
            yield batch

    def close(self) -> None:
        """Stop the worker processes."""
        if self._open is not None:
            stop_workers(self._open)
            self._open = None

    def is_repeat(self, batch_idx: int) -> bool:
        """Whether batch `batch_idx` of the run that is under way was yielded before."""
        return batch_idx >= self._first_repeat


def prediction_split(path: DataPath) -> str:
    """The split that predictions are made for: 'test', or 'val' where there is no 'test'; else a `NoSplitError`."""
    try:
        split_size(path, "test")
    except NoSplitError as error:
        try:
            split_size(path, "val")
        except NoSplitError:
            raise NoSplitError(f"there is nothing to predict: {error} It has no 'val' split either.") from error
        return "val"
    return "test"


def evaluation_loader(
    source: Source,
    split: str,
    data_rank: DataRank,
    agreement: Agreement,
    boundary: Callable[[], None] = lambda: None,
    *,
    repeats: bool = True,
) -> EvalLoader | None:
    """A loader that covers a split from its start at each run, None if there is no such split; on all ranks alike.

    With `repeats` a rank that has fewer batches than another repeats its last one, for collectives in the step.
    """
    rank, ranks = data_rank
    try:  # a worker without a sample would fail in energon
        num_workers = workers_with_samples(source.eval_path, split, ranks, source.num_workers)
    except NoSplitError:
        rank_zero_info(f"{source.eval_path} has no {split!r} split, or an empty one: no batches from it")
        return None
    workers, encoder = WorkerConfig(rank=rank, world_size=ranks, num_workers=num_workers), source.task_encoder
    methods = (encoder.encode_sample, encoder.preencode_sample, encoder.postencode_sample, encoder.encode_batch)
    multiplies = any(inspect.isgeneratorfunction(inspect.unwrap(method)) for method in methods)
    length = None if multiplies else source.evaluation(split, workers).len_rank()
    if repeats and length is not None:
        length = round(agreement.max(length))

    def build() -> DataLoader[Any]:
        # Without workers the collections would be the training process's.
        collect = {} if num_workers else {"gc_collect_every_n_steps": 0}
        return BasicDataLoader(source.evaluation(split, workers), **collect)

    return EvalLoader(build, length, agreement.ranks_with if repeats else None, ranks, split, boundary)


def check_evaluation(source: Source, split: str, ranks: int, trainer: Trainer | None, *, required: bool) -> None:
    """Check that a split to validate or test on has a sample for each rank; that it is there at all, if `required`."""
    if not required and trainer is not None and trainer.limit_val_batches == 0:
        return
    try:
        require_samples(source.eval_path, split, ranks, f"{ranks} ranks", "set limit_val_batches to 0")
    except NoSplitError:
        if required or source.eval_path != source.path:
            raise
