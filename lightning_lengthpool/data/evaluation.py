"""Validation and test: the loader of a split, and the check that there is enough in it."""

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities import rank_zero_info
from megatron.energon import get_val_dataset
from megatron.energon.savable_loader import BasicDataLoader

from lightning_lengthpool.data.loaders import EvalLoader
from lightning_lengthpool.data.reading.paths import data_path
from lightning_lengthpool.data.reading.shards import watch_sources
from lightning_lengthpool.data.reading.splits import NoSplitError, require_samples, split_size, workers_with_samples

if TYPE_CHECKING:
    from lightning_lengthpool.data.datamodule import LengthPoolDataModule


def prediction_split(path: str | Path) -> str:
    """The split that predictions are made for: 'test', or 'val' where there is no 'test'.

    Raises:
        NoSplitError: If there is neither. What `splits.load_split` raises, too.
    """
    try:
        split_size(path, "test")
    except NoSplitError as error:
        try:
            split_size(path, "val")
        except NoSplitError:
            raise NoSplitError(f"there is nothing to predict: {error} It has no 'val' split either.") from error
        return "val"
    return "test"


def evaluation_loader(module: "LengthPoolDataModule", split: str, *, repeats: bool = True) -> EvalLoader | None:
    """A loader that covers a split from its start at each run, None if there is no such split; on all ranks alike.

    Args:
        module: Whose data.
        split: The split's name.
        repeats: Whether a rank that has fewer batches than another repeats its last one, for collectives in the step.
    """
    world_size = module._worker_config(0).world_size
    try:  # a worker without a sample would fail in energon
        workers = workers_with_samples(module.val_path, split, world_size, module.num_workers)
    except NoSplitError:
        rank_zero_info(f"{module.val_path} has no {split!r} split, or an empty one: no batches from it")
        return None
    worker_config = module._worker_config(workers)
    encoder = module.task_encoder

    def dataset() -> Any:
        data = get_val_dataset(
            data_path(module.val_path),
            split_part=split,
            worker_config=worker_config,
            batch_size=module.val_batch_size,
            packing_buffer_size=module.packing_buffer_size,
            task_encoder=encoder,
        )
        watch_sources(data)
        return data

    methods = (encoder.encode_sample, encoder.preencode_sample, encoder.postencode_sample, encoder.encode_batch)
    multiplies = any(inspect.isgeneratorfunction(inspect.unwrap(method)) for method in methods)
    agreement = module._agreement()
    length = None if multiplies else dataset().len_rank()
    if repeats and length is not None:
        length = round(agreement.max(length))

    def loader() -> Any:
        # Without workers the collections would be the training process's.
        return BasicDataLoader(dataset(), **({} if worker_config.num_workers else {"gc_collect_every_n_steps": 0}))

    return EvalLoader(loader, length, agreement.ranks_with if repeats else None, world_size, split, module.boundary)


def check_evaluation(module: "LengthPoolDataModule", split: str, *, required: bool) -> None:
    """Check that a split to validate or test on has a sample for each rank; that it is there at all, if `required`.

    Raises:
        FileNotFoundError, ValueError: As `checks.check_training`.
    """
    trainer: Any = module.trainer
    if not required and trainer is not None and trainer.limit_val_batches == 0:
        return
    ranks = module._worker_config(0).world_size
    try:
        require_samples(module.val_path, split, ranks, f"{ranks} ranks", "set limit_val_batches to 0")
    except NoSplitError:
        if required or module.val_path != module.path:
            raise
