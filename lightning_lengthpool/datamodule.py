"""`LengthPoolDataModule`: from Lightning's trainer to energon's loaders, one stream per data-parallel rank."""

import inspect
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from megatron.energon import (
    TaskEncoder,
    WorkerConfig,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
)

from lightning_lengthpool.dataset import PoolSettings, check_integer
from lightning_lengthpool.loader import EvalLoader, TrainLoader
from lightning_lengthpool.splits import NoSplitError, split_size
from lightning_lengthpool.task_encoder import require_length_pool, warn_not_stateless, with_length_pool

_FIRST_BATCH_TIMEOUT = 600.0  # seconds until energon's watchdog speaks up: the first batch waits for a whole pool


class LengthPoolDataModule(LightningDataModule):
    """Training data from an energon data set, with the same length on every rank at the same step.

    The ranks are the trainer's data-parallel ranks, whatever its strategy or launcher. Training reads one endless
    stream; an epoch is `virtual_epoch_length` batches of it, the same number on every rank. A validation or test run
    covers its split from the start, each sample once. Linux only: energon forks its workers.

    Args:
        path: A prepared energon data set (folder), or the YAML of an energon metadataset that blends several.
        task_encoder: Your energon task encoder; nothing in it has to change.
        batch_size: Samples of a micro-batch, at least 1; None only with packing: then each pack is a batch.
        pool_size: Samples that each worker holds to choose from; while they are handed out as many again come in. 10 to
            100 times batch_size is a good start; 0 switches the pool off.
        policy: How samples leave the pool: 'pool' (sorted by length, shuffled alike on all ranks) or 'none' (as they
            come).
        seed: Seed of the random sequence that all ranks share.
        length_fn: Import path of a function that takes an encoded sample and gives its length in tokens; by default a
            sample's `total_len`, else `len(tokens)`.
        num_workers: Worker processes of each rank, the same on all ranks; 0 loads in the training process.
        shuffle_buffer_size: Samples in energon's shuffle buffer before encoding; None for no buffer.
        packing_buffer_size: Samples that energon's packing chooses from; None for no packing. The pool then holds
            packs.
        max_samples_per_sequence: Samples that energon reads in a row from one shard; None for whole shards.
        virtual_epoch_length: Batches of an epoch on each rank; by default as many as one pass over the training split
            has: samples // (ranks * batch_size).
        val_path: Data set of validation and test, if it is not `path`.
        val_batch_size: Samples of a validation or test batch; by default batch_size.

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
        num_workers: int = 2,
        shuffle_buffer_size: int | None = None,
        packing_buffer_size: int | None = None,
        max_samples_per_sequence: int | None = None,
        virtual_epoch_length: int | None = None,
        val_path: str | Path | None = None,
        val_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        if not sys.platform.startswith("linux"):
            raise RuntimeError(f"lightning_lengthpool runs on Linux only (energon forks), this is {sys.platform!r}")
        self.settings = PoolSettings(pool_size=pool_size, policy=policy, seed=seed, length_fn=length_fn)
        check_integer("num_workers", num_workers, minimum=0)
        optional = {
            "batch_size": batch_size,
            "shuffle_buffer_size": shuffle_buffer_size,
            "packing_buffer_size": packing_buffer_size,
            "max_samples_per_sequence": max_samples_per_sequence,
            "virtual_epoch_length": virtual_epoch_length,
            "val_batch_size": val_batch_size,
        }
        for name, value in optional.items():
            if value is not None:
                check_integer(name, value, minimum=1)
        if batch_size is None and packing_buffer_size is None:
            raise ValueError(
                "batch_size is None, which works only with packing, where each pack is a batch. Set batch_size, or "
                "packing_buffer_size and an encoder that packs."
            )
        if policy != "none" and 0 < pool_size < (batch_size or 1):
            warnings.warn(
                f"pool_size {pool_size} is smaller than batch_size {batch_size}: one batch spans several pools, so its "
                "samples are hardly ordered by length and the ranks wait for each other. 10 to 100 times batch_size is "
                "a good start.",
                stacklevel=2,
            )
        self.path, self.val_path = path, path if val_path is None else val_path
        self.task_encoder = task_encoder
        self._pooled_encoder = with_length_pool(task_encoder, self.settings)  # checks the encoder early
        self.batch_size, self.val_batch_size = batch_size, val_batch_size or batch_size
        self.num_workers = num_workers
        self.shuffle_buffer_size = shuffle_buffer_size
        self.packing_buffer_size = packing_buffer_size
        self.max_samples_per_sequence = max_samples_per_sequence
        self.virtual_epoch_length = virtual_epoch_length
        self._train_loader: TrainLoader | None = None
        self._eval_loader: EvalLoader | None = None

    def setup(self, stage: str) -> None:
        """Check the data on all ranks alike, before any loader or worker exists.

        Raises:
            FileNotFoundError, ValueError: See the message: it names the setting or the sample, and the way out. Where
                only other ranks fail, this one raises as well, so that none of them waits for ever.
        """
        error: Exception | None = None
        try:
            if stage == "fit":
                self._check_training()
            elif stage in ("validate", "test"):
                split_size(self.val_path, "val" if stage == "validate" else "test")
        except Exception as caught:
            error = caught
        failed = self._ranks_with(error is not None)
        if error is not None:
            raise error
        if failed:
            raise ValueError(f"the data could not be set up on {failed} other rank(s): see their messages")

    def train_dataloader(self) -> TrainLoader:
        """This rank's endless stream, cut into epochs of `virtual_epoch_length` batches."""
        worker_config = self._worker_config(self.num_workers)
        dataset = self._train_dataset(worker_config)
        # Without workers a collection every few batches would be the training process's; and in a worker it walks the
        # whole pool, so it comes about once per pool.
        pool_batches = self.settings.places // (self.batch_size or 1)
        loader = get_savable_loader(
            dataset,
            gc_collect_every_n_steps=max(10, pool_batches) if self.num_workers else 0,
            watchdog_initial_timeout_seconds=_FIRST_BATCH_TIMEOUT,
        )
        self._train_loader = TrainLoader(loader, self._epoch_length(worker_config.world_size))
        return self._train_loader

    def val_dataloader(self) -> EvalLoader | list[Any]:
        """The `val` split from its start at each run; no loader if the data set has no such split."""
        return self._evaluation("val")

    def test_dataloader(self) -> EvalLoader | list[Any]:
        """The `test` split, as `val_dataloader`."""
        return self._evaluation("test")

    def is_repeat(self, batch_idx: int) -> bool:
        """Whether a validation or test batch is one that this rank has seen before in this run.

        A rank that has fewer batches than another repeats its last one, so that all ranks take equally many steps. A
        `validation_step` leaves such a batch out of its metrics: with a torchmetrics metric it skips `update`.
        """
        return self._eval_loader is not None and self._eval_loader.is_repeat(batch_idx)

    def teardown(self, stage: str) -> None:
        """Stop the workers of training."""
        if self._train_loader is not None and stage == "fit":
            self._train_loader.close()
            self._train_loader = None

    # ---- what the two kinds of loaders are made of

    def _worker_config(self, num_workers: int) -> WorkerConfig:
        trainer = self.trainer
        ranks = (trainer.distributed_sampler_kwargs if trainer is not None else None) or {
            "rank": 0,
            "num_replicas": 1,
        }
        return WorkerConfig(rank=ranks["rank"], world_size=ranks["num_replicas"], num_workers=num_workers)

    def _train_dataset(self, worker_config: WorkerConfig, **changes: Any) -> Any:
        settings = {
            "batch_size": self.batch_size,
            "shuffle_buffer_size": self.shuffle_buffer_size,
            "packing_buffer_size": self.packing_buffer_size,
            "task_encoder": self._pooled_encoder,
            **changes,
        }
        dataset = get_train_dataset(
            self.path,
            worker_config=worker_config,
            max_samples_per_sequence=self.max_samples_per_sequence,
            **settings,
        )
        require_length_pool(dataset, self.task_encoder)
        return dataset

    def _epoch_length(self, world_size: int) -> int:
        if self.virtual_epoch_length is not None:
            return self.virtual_epoch_length
        return max(1, split_size(self.path, "train") // (world_size * (self.batch_size or 1)))

    def _evaluation(self, split: str) -> EvalLoader | list[Any]:
        try:
            samples = split_size(self.val_path, split)
        except NoSplitError:
            return []
        world_size = self._worker_config(0).world_size
        if samples < world_size:
            raise ValueError(
                f"the {split} split of {self.val_path} has {samples} samples for {world_size} ranks, and each rank "
                "needs one. Use fewer ranks, a larger split, or set limit_val_batches to 0."
            )
        # A worker without a sample would fail in energon.
        worker_config = self._worker_config(min(self.num_workers, samples // world_size))

        def dataset() -> Any:
            return get_val_dataset(
                self.val_path,
                split_part=split,
                worker_config=worker_config,
                batch_size=self.val_batch_size,
                packing_buffer_size=self.packing_buffer_size,
                task_encoder=self.task_encoder,
            )

        encoder = self.task_encoder
        methods = (
            encoder.encode_sample,
            encoder.preencode_sample,
            encoder.postencode_sample,
            encoder.encode_batch,
        )
        multiplies = any(inspect.isgeneratorfunction(inspect.unwrap(method)) for method in methods)
        length = None if multiplies else self._max_over_ranks(dataset().len_rank())
        self._eval_loader = EvalLoader(lambda: get_loader(dataset()), length, self._ranks_with, world_size, split)
        return self._eval_loader

    # ---- checks

    def _check_training(self) -> None:
        worker_config = self._worker_config(self.num_workers)
        samples = split_size(self.path, "train")
        workers = worker_config.world_size * max(1, self.num_workers)
        if samples < workers:
            raise ValueError(
                f"the train split of {self.path} has {samples} samples for {worker_config.world_size} ranks x "
                f"{max(1, self.num_workers)} workers, and each worker needs one. Use fewer "
                "ranks or set num_workers lower."
            )
        warn_not_stateless(self.task_encoder)
        self._probe()

    def _probe(self) -> None:
        """Make one batch of the first sample, the same one on all ranks.

        A wrong encoder or a sample without a length shows here, not on one rank in the middle of training. It runs in a
        forked worker, for energon's `@stateless(restore_seeds=True)` keeps the seed of the first worker it sees.
        """
        encoder = with_length_pool(self.task_encoder, replace(self.settings, policy="none"))
        encoder.__default_failure_tolerance__ = 3
        dataset = self._train_dataset(
            WorkerConfig(rank=0, world_size=1, num_workers=1),
            batch_size=None if self.batch_size is None else 1,
            shuffle_buffer_size=None,
            packing_buffer_size=None if self.packing_buffer_size is None else min(self.packing_buffer_size, 16),
            task_encoder=encoder,
        )
        probe = TrainLoader(get_savable_loader(dataset, prefetch_factor=1), length=1)
        try:
            next(iter(probe))
        finally:
            probe.close()

    # ---- agreement between the ranks

    def _reduce(self, value: float, reduce_op: str) -> float:
        if self.trainer is None:
            return value
        strategy = self.trainer.strategy
        tensor = torch.tensor(float(value), device=strategy.root_device)
        return float(strategy.reduce(tensor, reduce_op=reduce_op))

    def _ranks_with(self, something: bool) -> int:
        # A mean, for under tensor parallelism several processes share a data rank.
        return round(self._reduce(something, "mean") * self._worker_config(0).world_size)

    def _max_over_ranks(self, value: int) -> int:
        return round(self._reduce(value, "max"))
