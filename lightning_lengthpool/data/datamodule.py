"""`LengthPoolDataModule`: its settings, what they mean, and what goes together; `hooks` does the work."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from megatron.energon import TaskEncoder

from lightning_lengthpool.classes import packed_class
from lightning_lengthpool.cost_models import CostModel
from lightning_lengthpool.data.checks import check_settings
from lightning_lengthpool.data.hooks import DataHooks
from lightning_lengthpool.data.source import DataPath, Source
from lightning_lengthpool.ordering.reference_lengths import check_reference
from lightning_lengthpool.ordering.settings import PoolSettings, PoolWarmup
from lightning_lengthpool.ranks.data_rank import check_data_rank


class LengthPoolDataModule(DataHooks):
    """Training data from an energon data set, with the same length on every rank at the same step.

    The ranks are the trainer's data-parallel ranks, whatever its strategy or launcher. Training reads one endless
    stream; an epoch is `virtual_epoch_length` batches of it, the same number on every rank. A validation or test run
    covers its split from the start, each sample once. Linux only: energon forks its workers.

    Args:
        path: A prepared energon data set (folder), or the YAML of an energon metadataset that blends several. `~` and
            `file:///...` are read, and energon's `msc://...`.
        task_encoder: Your energon task encoder; nothing in it has to change.
        batch_size: Samples of a micro-batch, at least 1; with max_tokens, at most. None only with max_tokens, or with
            packing: then each pack is a batch.
        pool_size: Samples that each worker holds; with policies 'pool' and 'blocks' the next pool comes in, sample
            by sample, as one is handed out. 10 to 100 times batch_size is a good start; 0 switches the pool off.
            'blocks' and 'stream' round it down to whole batches.
        policy: How samples leave the pool: 'pool' (sorted by length, shuffled alike on all ranks), 'blocks' (the sorted
            pool is cut into batches, and these are shuffled: almost no padding), 'stream' (one batch of neighbours
            leaves at a time, and as many samples come in: best synchronised) or 'none' (as they come).
        seed: Seed of the random sequence that all ranks share.
        length_fn: Import path of a function that takes an encoded sample and gives its length in tokens; by default a
            sample's `total_len`, else `len(tokens)`, else `len(input_ids)`.
        cost: What samples cost to train on, by which the pool sorts them: one of `cost_models`, or your own. By default
            a sample costs its length, and a batch its padded tokens.
        max_tokens: What a batch may cost, in tokens with padding, or what `cost` counts: a batch then has as many
            samples as fit; one that costs nothing counts one token. Only with policy 'stream'. None for batch_size
            samples a batch.
        over_budget: What happens to a sample that alone costs more than max_tokens: 'error', 'alone' (it is a batch of
            its own, whatever memory that takes) or 'drop' (it is left out, with a warning; `dropped` counts such
            samples).
        reference_lengths: A CSV file of lengths of the data set (column 'tokens', and 'class' with classes), the same
            on all ranks, which then aim at the same lengths. Some thousands are enough. Only with policy 'stream'.
        class_fn: Import path of a function that takes an encoded sample and names its class; a batch then holds one
            class, the same on (nearly) all ranks. By default none; with class_shares `classes.packed_class`: 'packed'
            or 'single'. Only with policy 'stream'.
        class_shares: Share of the batches that each class has, adding up to 1, say {packed: 0.3, single: 0.7}; by
            default, with class_fn, as in reference_lengths.
        pool_warmup: How the first pools grow, so that the first batch comes soon: {initial: 100, flushes: 5} begins
            with 100 samples, and the sixth pool has pool_size. Only with policies 'pool' and 'blocks'.
        num_workers: Worker processes of each rank, the same on all ranks; 0 loads in the training process.
        shuffle_buffer_size: Samples in energon's shuffle buffer before encoding; None for no buffer.
        packing_buffer_size: Samples that energon's packing chooses from; None for no packing. The pool then holds
            packs.
        max_samples_per_sequence: Samples that energon reads in a row from one shard; None for whole shards.
        virtual_epoch_length: Batches of an epoch on each rank; by default as many as one pass over the training split
            has: samples // (ranks * batch_size), where a metadataset's `subset` and `repetitions` count. With
            max_tokens that is an estimate, from reference_lengths or else from the first 100 samples.
        val_path: Data set of validation and test, if it is not `path`.
        val_batch_size: Samples of a validation or test batch; by default batch_size, or 1 where that is None without
            packing.
        failure_tolerance: Samples (or batches) that may fail in a row, in a method of the encoder, length_fn, cost or
            class_fn, before training ends with the error; one that fails is left out. 0 for no limit. By default what
            the encoder says (energon: 100; what `@stateless(restore_seeds=True, failure_tolerance=...)` says it
            forgets).
        skip_tolerance: Samples in a row that the encoder may skip before training ends with an error, on all ranks:
            they wait for the one that has nothing to train on. 0 for no limit.
        resume: How a run goes on from a checkpoint. 'exact': with the very batches of the uninterrupted run; refused if
            the encoder cannot restore its samples. 'approximate': what was left of each pool is lost. 'auto': exact
            where the encoder allows it, else approximate. 'fresh': the data start from the beginning.
        rank: Which of the ranks that share the data this process is, from 0. By default as the trainer says, or,
            without one, as the process group does. Processes that share a rank's batches (tensor parallelism) have the
            same number.
        world_size: Number of ranks that share the data; with `rank`.

    Raises:
        ValueError: If a setting is out of its range; the message names it, its value and what was expected.
        TypeError: If `task_encoder` is not an energon task encoder.
        RuntimeError: On another system than Linux.
    """

    def __init__(
        self,
        path: str | Path,
        task_encoder: TaskEncoder,
        batch_size: int | None,
        *,
        pool_size: int = 1000,
        policy: str = "pool",
        seed: int = 42,
        length_fn: Callable[[Any], float] | None = None,
        cost: CostModel | None = None,
        max_tokens: float | None = None,
        over_budget: Literal["error", "alone", "drop"] = "error",
        reference_lengths: str | Path | None = None,
        class_fn: Callable[[Any], str] | None = None,
        class_shares: dict[str, float] | None = None,
        pool_warmup: PoolWarmup | None = None,
        num_workers: int = 2,
        shuffle_buffer_size: int | None = None,
        packing_buffer_size: int | None = None,
        max_samples_per_sequence: int | None = None,
        virtual_epoch_length: int | None = None,
        val_path: str | Path | None = None,
        val_batch_size: int | None = None,
        failure_tolerance: int | None = None,
        skip_tolerance: int = 10_000,
        resume: Literal["auto", "exact", "approximate", "fresh"] = "auto",
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if (rank is None) != (world_size is None):
            raise ValueError(f"rank is {rank} and world_size is {world_size}: set both, or neither")
        if not sys.platform.startswith("linux"):
            raise RuntimeError(f"lightning_lengthpool runs on Linux only (energon forks), this is {sys.platform!r}")
        if class_fn is None and class_shares is not None:
            class_fn = packed_class
        settings = PoolSettings(
            batch_size=batch_size,
            pool_size=pool_size,
            policy=policy,
            seed=seed,
            length_fn=length_fn,
            cost=cost,
            warmup=pool_warmup,
            max_tokens=max_tokens,
            over_budget=over_budget,
            class_fn=None if class_shares is None else class_fn,  # else with the shares that the file tells
            class_shares=class_shares,
        )
        check_reference(settings, reference_lengths, class_fn)
        if val_batch_size is None:
            val_batch_size = 1 if batch_size is None and packing_buffer_size is None else batch_size
        source = Source(
            path=path,
            task_encoder=task_encoder,
            val_path=val_path,
            val_batch_size=val_batch_size,
            num_workers=num_workers,
            shuffle_buffer_size=shuffle_buffer_size,
            packing_buffer_size=packing_buffer_size,
            max_samples_per_sequence=max_samples_per_sequence,
            failure_tolerance=failure_tolerance,
            skip_tolerance=skip_tolerance,
        )
        check_settings(settings, source)
        super().__init__(
            source,
            settings,
            resume=resume,
            reference_lengths=reference_lengths,
            class_fn=class_fn,
            virtual_epoch_length=virtual_epoch_length,
            given_rank=None if rank is None or world_size is None else check_data_rank(rank, world_size),
        )

    @property
    def path(self) -> DataPath:
        """The data set. A derived class may set it as late as in its `setup`, before it calls this class's."""
        return self.source.path

    @path.setter
    def path(self, value: DataPath) -> None:
        self.source = replace(self.source, path=value)

    @property
    def val_path(self) -> DataPath:
        """The data set of validation and test; as `path`."""
        return self.source.eval_path

    @val_path.setter
    def val_path(self, value: DataPath) -> None:
        self.source = replace(self.source, val_path=value)

    @property
    def batch_size(self) -> int | None:
        """Samples of a micro-batch; Lightning's Tuner sets it."""
        return self.settings.batch_size

    @batch_size.setter
    def batch_size(self, value: int | None) -> None:
        self.settings = replace(self.settings, batch_size=value)

    def pool_settings(self) -> dict[str, Any]:
        """What `SyncMonitor` reports and bases its advice on, in plain numbers.

        Returns:
            `policy`, `batch_size`, `num_workers`, `pool_size`; `rank_samples`, how many samples of the training split
            fall to one rank (None if the data cannot be read); with a token budget `max_tokens`; `has_reference` and
            `has_classes`.
        """
        settings, budget = self.settings, self.settings.max_tokens
        try:
            rank_samples = self.source.training_samples() // self.data_rank.world_size
        except (OSError, ValueError):
            rank_samples = None
        return {
            "policy": settings.policy,
            "batch_size": settings.batch_size,
            "num_workers": self.source.num_workers,
            "pool_size": settings.pool_size,
            "rank_samples": rank_samples,
            "has_reference": self.reference_lengths is not None,
            "has_classes": self.class_fn is not None,
            **({} if budget is None else {"max_tokens": float(budget)}),
        }
