"""Validation and test: the loader of a split, and the check that there is enough in it."""

import inspect
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities import rank_zero_info
from megatron.energon import get_loader, get_val_dataset

from lightning_lengthpool.loader import EvalLoader
from lightning_lengthpool.sources import watch_sources
from lightning_lengthpool.splits import NoSplitError, require_samples, split_size

if TYPE_CHECKING:
    from lightning_lengthpool.datamodule import LengthPoolDataModule


def evaluation_loader(module: "LengthPoolDataModule", split: str) -> EvalLoader | None:
    """A loader that covers a split from its start at each run, None if there is no such split; on all ranks alike."""
    try:
        samples = split_size(module.val_path, split)
    except NoSplitError:
        rank_zero_info(f"{module.val_path} has no {split!r} split, or an empty one: no batches from it")
        return None
    world_size = module._worker_config(0).world_size
    # A worker without a sample would fail in energon.
    worker_config = module._worker_config(min(module.num_workers, samples // world_size))
    encoder = module.task_encoder

    def dataset() -> Any:
        data = get_val_dataset(
            module.val_path,
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
    length = None if multiplies else round(agreement.max(dataset().len_rank()))
    return EvalLoader(lambda: get_loader(dataset()), length, agreement.ranks_with, world_size, split)


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
