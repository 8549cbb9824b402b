"""The data module's checks: of its settings at once, of the training data when they are set up."""

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron.energon import WorkerConfig

from lightning_lengthpool.data.reading.splits import require_samples
from lightning_lengthpool.data.resume.resume import RESUME
from lightning_lengthpool.data.task_encoder import methods_not_stateless, packs_several, warn_not_stateless
from lightning_lengthpool.data.trial_run import PROBE_TOLERANCE, probe
from lightning_lengthpool.ordering.settings import GOOD_SIZE, PoolSettings, check_integer

if TYPE_CHECKING:
    from lightning_lengthpool.data.datamodule import LengthPoolDataModule

_PROBED = 100  # samples from which the length of an epoch is estimated


def check_numbers(**optional: int | None) -> None:
    """Raise a `ValueError` that names the first setting which is neither None nor an integer of at least 1."""
    for name, value in optional.items():
        if value is not None:
            check_integer(name, value, minimum=1)


def check_settings(
    settings: PoolSettings,
    *,
    packing_buffer_size: int | None,
    num_workers: int,
    failure_tolerance: int | None,
    resume: str,
) -> None:
    """Check what goes together, and warn of what does not go well.

    Raises:
        ValueError: If a setting is out of its range; the message names it, its value and what was expected.
    """
    check_integer("num_workers", num_workers, minimum=0)
    if failure_tolerance is not None:
        check_integer("failure_tolerance", failure_tolerance, minimum=0, hint="0 for no limit")
    if resume not in RESUME:
        raise ValueError(f"resume is {resume!r}, expected one of: {', '.join(RESUME)}")
    if settings.batch_size is None and packing_buffer_size is None and settings.max_tokens is None:
        raise ValueError(
            "batch_size is None, which works only with packing, where each pack is a batch, or with max_tokens, where "
            "a batch has as many samples as fit. Set batch_size, or max_tokens, or packing_buffer_size and an encoder "
            "that packs."
        )
    if not settings.is_off and settings.pool_size < settings.slot_size:
        warnings.warn(
            f"pool_size {settings.pool_size} is smaller than batch_size {settings.batch_size}: one batch spans several "
            "pools, so its samples are hardly ordered by length and the ranks wait for each other. " + GOOD_SIZE,
            stacklevel=3,
        )


def check_training(module: "LengthPoolDataModule", settings: PoolSettings) -> list[float] | None:
    """Check the training data and make one batch of them, before any loader or worker exists.

    Args:
        module: Whose data.
        settings: Its pool, complete.

    Returns:
        With a token budget the costs of the first samples, about 100, else None.

    Raises:
        FileNotFoundError, ValueError: See the message: it names the setting or the sample, and the way out.
    """
    if module.trainer is not None and module.trainer.overfit_batches > 0:
        raise ValueError(
            f"overfit_batches is {module.trainer.overfit_batches}, which cannot be had from an endless stream. Train "
            "on a data set (or an energon subset of one) with that few samples instead."
        )
    workers = max(1, module.num_workers)
    ranks = module._worker_config(0).world_size
    require_samples(
        module.path, "train", ranks * workers, f"{ranks} ranks x {workers} workers", "set num_workers lower"
    )
    warn_not_stateless(module.task_encoder)
    return try_encoder(module, settings)


def try_encoder(module: "LengthPoolDataModule", settings: PoolSettings) -> list[float] | None:
    """Make one batch of the training data, the same on all ranks; as `check_training`."""
    tolerance, packing = module.failure_tolerance, module.packing_buffer_size
    dataset, pool = module._train_dataset(
        WorkerConfig(rank=0, world_size=1, num_workers=1),
        _small(settings),
        PROBE_TOLERANCE if tolerance is None else tolerance,
        shuffle_buffer_size=None,
        packing_buffer_size=None if packing is None else min(packing, 16),
    )
    encoder = module.task_encoder
    if module.resume == "exact" and not pool.dataset.can_restore_sample():
        raise ValueError(
            "resume is 'exact', but the encoder cannot restore its samples. Mark as @stateless: "
            f"{', '.join(methods_not_stateless(encoder))}. Or set resume to 'approximate'."
        )
    if module.resume == "exact" and packing is not None and (name := packs_several(encoder)) is not None:
        raise ValueError(
            f"resume is 'exact', but {name} is a generator, and energon does not save which of its packs were made. "
            "Let it return one pack. Or set resume to 'auto': a resumed run may then miss some packs."
        )
    snapshot = probe(dataset, pool, f"{type(encoder).__qualname__} made no batch of the train split of {module.path}")
    return None if settings.max_tokens is None else snapshot["costs"]


def _small(settings: PoolSettings) -> PoolSettings:
    """A pool that is soon full; with all that may fail."""
    if not settings.is_stream:
        return replace(settings, policy="none", warmup=None)
    few = settings.slot_size
    size = few if settings.max_tokens is None else min(settings.pool_size, max(_PROBED, few))
    return replace(settings, pool_size=size, reference=None)
