"""Checks before training, the same on all ranks: of the settings together, of the data, of the user's encoder.

A wrong encoder or a sample without a length shows here, not on one rank in the middle of training, when the others
would wait for it.
"""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lightning.pytorch import Trainer
from megatron.energon import WorkerConfig

from lightning_lengthpool.data.pools.arrivals import StarvedError
from lightning_lengthpool.data.pools.dataset import LengthPoolDataset
from lightning_lengthpool.data.reading.data_identity import data_fingerprint
from lightning_lengthpool.data.source import Source, Training
from lightning_lengthpool.data.task_encoder import methods_not_stateless, packs_several, warn_not_stateless
from lightning_lengthpool.data.workers import NothingCameError, Records, read_in_workers
from lightning_lengthpool.ordering.reference_lengths import ReferenceLengths
from lightning_lengthpool.ordering.settings import GOOD_SIZE, PoolSettings
from lightning_lengthpool.ranks.data_rank import Agreement, DataRank
from lightning_lengthpool.ranks.store import is_distributed

TRIAL_TOLERANCE = 20  # samples that may fail in a row: few enough to read their messages
_TRIAL_SAMPLES = 100  # from which the length of an epoch is estimated


def check_settings(settings: PoolSettings, source: Source) -> None:
    """Check what of pool and source goes together, and warn of what does not go well."""
    if settings.batch_size is None and source.packing_buffer_size is None and settings.max_tokens is None:
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


def check_same_on_all_ranks(
    agreement: Agreement,
    data_rank: DataRank,
    source: Source,
    file: ReferenceLengths | None,
    saved_settings: Mapping[str, Any],
) -> None:
    """Check that what the order depends on is the same on all ranks: all ask the same, and all raise or none."""
    rank, world_size = data_rank
    if is_distributed() and world_size > 1 and agreement.is_same(str(rank)):
        raise ValueError(
            f"rank is {rank} on all ranks, and world_size is {world_size}: all would train on the same samples. "
            "Give each process its own rank (not in a YAML that they share), or leave both out."
        )
    if not agreement.is_same(str(file)):
        raise ValueError(
            f"reference_lengths is {None if file is None else file.path!r}, but the file differs between the ranks "
            f"(here it has {file}): they would aim at different lengths. Give all ranks the same file."
        )
    settings = dict(saved_settings)
    if not agreement.is_same(data_fingerprint(settings.pop("path"))):
        raise ValueError(
            f"path is {str(source.path)!r}, where some ranks find other training data than others (old copies on local "
            "disks, say): samples would be lost and others come twice. Give all ranks the same data."
        )
    if not agreement.is_same(str(sorted(settings.items()))):
        raise ValueError(
            f"the data module's settings differ between the ranks, here they are {settings}: the ranks would train "
            "on different lengths at the same step. Give all ranks the same settings."
        )


def check_training(
    source: Source, settings: PoolSettings, *, ranks: int, resume: str, trainer: Trainer | None
) -> list[float] | None:
    """Check the training data and make one batch of them, before any loader or worker exists; returns as `try_encoder`.

    `settings` have what stands in reference_lengths; with `resume` 'exact' the encoder has to be able to do more.
    """
    if overfit_batches := getattr(trainer, "overfit_batches", 0):
        raise ValueError(
            f"overfit_batches is {overfit_batches}, which cannot be had from an endless stream. Train on a "
            "data set (or an energon subset of one) with that few samples instead."
        )
    source.require_samples(ranks)
    warn_not_stateless(source.task_encoder)
    return try_encoder(source, settings, resume=resume)


def try_encoder(source: Source, settings: PoolSettings, *, resume: str = "auto") -> list[float] | None:
    """Make one batch of the training data; with a token budget return the costs of about the first 100 samples.

    It is made in a forked worker, for energon's `@stateless(restore_seeds=True)` keeps the seed of the first worker
    that a process sees; and it stays there, for with `num_workers=0` a batch need not be of a kind that can be sent.
    What the encoder raises comes through as it is.
    """
    tolerance = TRIAL_TOLERANCE if source.failure_tolerance is None else source.failure_tolerance
    small = replace(source.small(), failure_tolerance=tolerance)
    training = small.training(_small(settings), WorkerConfig(rank=0, world_size=1, num_workers=1))
    if resume == "exact":
        _check_exact(source, training)
    complaint = f"{source.encoder_name} made no batch of the train split of {source.path}"
    trial = read_in_workers(_Trial(training.pool), prefetch_factor=1)
    try:
        costs = next(trial).costs
    except StarvedError as error:
        raise ValueError(
            f"{complaint}: it skips all samples (SkipSample), yields nothing for them or fails on them (skip_tolerance "
            f"is {source.skip_tolerance}). Correct it, or raise skip_tolerance; 0 sets no limit."
        ) from error
    except NothingCameError as error:
        raise ValueError(f"{complaint} {error}. Does it skip all samples (SkipSample)?") from error
    finally:
        trial.close()
    return None if settings.max_tokens is None else costs


def _check_exact(source: Source, training: Training) -> None:
    if not training.pool.dataset.can_restore_sample():
        raise ValueError(
            "resume is 'exact', but the encoder cannot restore its samples. Mark as @stateless: "
            f"{', '.join(methods_not_stateless(source.task_encoder))}. Or set resume to 'approximate'."
        )
    if source.packing_buffer_size is not None and (name := packs_several(source.task_encoder)) is not None:
        raise ValueError(
            f"resume is 'exact', but {name} is a generator, and energon does not save which of its packs were made. "
            "Let it return one pack. Or set resume to 'auto': a resumed run may then miss some packs."
        )


def _small(settings: PoolSettings) -> PoolSettings:
    """A pool that is soon full; with all that may fail."""
    if not settings.is_stream:
        return replace(settings, policy="none", warmup=None)
    few = settings.slot_size
    size = few if settings.max_tokens is None else min(settings.pool_size, max(_TRIAL_SAMPLES, few))
    return replace(settings, pool_size=size, reference=None)


@dataclass
class _TrialResult:
    costs: list[float]  # of the samples that the first batch could choose from
    __restore_key__: tuple[Any, ...] = field(default=())


class _Trial(Records[_TrialResult]):
    """Makes one batch, which stays in the worker."""

    def __init__(self, pool: LengthPoolDataset) -> None:
        super().__init__(pool, worker_config=pool.worker_config)
        self.pool = pool

    def __iter__(self) -> Iterator[_TrialResult]:
        for _ in self.pool:
            snapshot = self.pool.state().pool.snapshot
            yield _TrialResult([] if snapshot is None else snapshot.costs)
            return
