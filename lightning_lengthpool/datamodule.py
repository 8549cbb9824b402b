"""`LengthPoolDataModule`: from Lightning's trainer to energon's loaders, one stream per data-parallel rank."""

import inspect
import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info
from megatron.energon import (
    TaskEncoder,
    WorkerConfig,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
)

from lightning_lengthpool.checkpoint import gather, join, split
from lightning_lengthpool.dataset import LengthPoolDataset
from lightning_lengthpool.loader import EvalLoader, TrainLoader
from lightning_lengthpool.pool import PoolSettings, check_integer
from lightning_lengthpool.probe import PROBE_TOLERANCE, probe
from lightning_lengthpool.splits import NoSplitError, describe_split, require_samples, split_size
from lightning_lengthpool.task_encoder import (
    check_encoder,
    length_pool,
    methods_not_stateless,
    require_length_pool,
    warn_not_stateless,
)

_RESUME = ("auto", "exact", "approximate", "fresh")
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
        failure_tolerance: Samples (or batches) that may fail in a row before training ends with the error; 0 for no
            limit. By default what the encoder says (energon: 100).
        resume: How a run goes on from a checkpoint. 'exact': with the very batches of the uninterrupted run; refused if
            the encoder cannot restore its samples. 'approximate': what was left of each pool is lost. 'auto': exact
            where the encoder allows it, else approximate. 'fresh': the data start afresh.

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
        failure_tolerance: int | None = None,
        resume: Literal["auto", "exact", "approximate", "fresh"] = "auto",
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
        if failure_tolerance is not None:
            check_integer("failure_tolerance", failure_tolerance, minimum=0, hint="0 for no limit")
        if resume not in _RESUME:
            raise ValueError(f"resume is {resume!r}, expected one of: {', '.join(_RESUME)}")
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
        check_encoder(task_encoder)
        self.failure_tolerance = failure_tolerance
        self.resume = resume
        self.batch_size, self.val_batch_size = batch_size, val_batch_size or batch_size
        self.num_workers = num_workers
        self.shuffle_buffer_size = shuffle_buffer_size
        self.packing_buffer_size = packing_buffer_size
        self.max_samples_per_sequence = max_samples_per_sequence
        self.virtual_epoch_length = virtual_epoch_length
        self._train_loader: TrainLoader | None = None
        self._eval_loader: EvalLoader | None = None
        self._state: dict[str, Any] | None = None  # the place from which the next loader goes on
        self._loaders = 0  # made so far
        self._gathered = ""  # the name of the last collection of places

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
            if stage in ("fit", "validate", "test"):
                self._check_evaluation("test" if stage == "test" else "val", required=stage != "fit")
        except Exception as caught:
            error = caught
        failed = self._ranks_with(error is not None)
        if error is not None:
            raise error
        if failed:
            raise ValueError(f"the data could not be set up on {failed} other rank(s): see their messages")

    def train_dataloader(self) -> TrainLoader:
        """This rank's endless stream, cut into epochs of `virtual_epoch_length` batches.

        It goes on from the checkpoint that is resumed, or from where the last one stood if there was one before.
        """
        self._keep_place()
        worker_config = self._worker_config(self.num_workers)
        dataset, pool = self._train_dataset(worker_config, self.settings, self.failure_tolerance)
        if self._state is not None and (self.resume == "approximate" or not pool.dataset.can_restore_sample()):
            self._approximate(pool)
        # Without workers a collection every few batches would be the training process's; and in a worker it walks the
        # whole pool, so it comes about once per pool.
        pool_batches = self.settings.places // (self.batch_size or 1)
        loader = get_savable_loader(
            dataset,
            checkpoint_every_sec=math.inf,  # the place travels with the batches
            gc_collect_every_n_steps=max(10, pool_batches) if self.num_workers else 0,
            watchdog_initial_timeout_seconds=_FIRST_BATCH_TIMEOUT,
        )
        self._loaders += 1
        self._train_loader = TrainLoader(loader, pool, self._epoch_length(worker_config.world_size), self._state)
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

    def pool_settings(self) -> dict[str, Any]:
        """What `SyncMonitor` reports and bases its advice on, in plain numbers."""
        numbers = {name: getattr(self, name) for name in ("batch_size", "num_workers")}
        numbers["pool_size"] = self.settings.pool_size
        plain = {name: None if value is None else int(value) for name, value in numbers.items()}
        return {"policy": self.settings.policy, **plain}

    def teardown(self, stage: str) -> None:
        """Stop the workers; their place in the training data is kept, for a checkpoint or another `fit`."""
        self._close()

    def on_exception(self, exception: BaseException) -> None:
        """Stop the workers where Lightning does not get to `teardown`."""
        self._close()

    # ---- the place in the data

    def state_dict(self) -> dict[str, Any]:
        """All ranks' places in the data, in plain containers, on global rank zero, which writes the checkpoint."""
        state = self._state if self._train_loader is None else self._train_loader.state()
        if state is None:
            return {}
        config = self._worker_config(self.num_workers)
        name = f"{self._loaders}-{state['batches']}"
        ranks = gather(state, config.rank, config.world_size, name, last=self._gathered)
        self._gathered = name
        is_writer = self.trainer is None or self.trainer.is_global_zero
        return join(self._saved_settings(config), ranks) if is_writer else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's place out of a checkpoint.

        Raises:
            ValueError: If it does not fit the settings: the message names what was saved, what is now and the way out.
        """
        self._state = None
        if self.resume == "fresh" or not state_dict:
            return
        config = self._worker_config(self.num_workers)
        accumulated = 1 if self.trainer is None else self.trainer.accumulate_grad_batches
        self._state = split(state_dict, self._saved_settings(config), config.rank, accumulated=accumulated)

    def _saved_settings(self, config: WorkerConfig) -> dict[str, Any]:
        """What the place in the data depends on."""
        numbers = {
            "ranks": config.world_size,
            "num_workers": self.num_workers,
            "batch_size": self.batch_size,
            "pool_size": self.settings.pool_size,
            "seed": self.settings.seed,
            "shuffle_buffer_size": self.shuffle_buffer_size,
            "packing_buffer_size": self.packing_buffer_size,
            "max_samples_per_sequence": self.max_samples_per_sequence,
        }
        plain = {
            name: None if value is None else int(value) for name, value in numbers.items()
        }  # NumPy's would not load
        return {"path": describe_split(self.path, "train"), "policy": self.settings.policy, **plain}

    def _close(self) -> None:
        self._keep_place()
        if self._eval_loader is not None:
            self._eval_loader.close()

    def _keep_place(self) -> None:
        if self._train_loader is not None:
            self._state = self._train_loader.state()
            self._train_loader.close()
            self._train_loader = None

    def _approximate(self, pool: LengthPoolDataset) -> None:
        """Go on without the samples that the pool held."""
        if self.packing_buffer_size is None:
            pool.lose_pool = True
            lost = f"up to {self.settings.places - 1} samples of each worker's pool are lost"
        else:
            self._state = None
            lost = "the packing buffer cannot be restored either, and the data start afresh"
        warnings.warn(
            f"the data go on approximately (resume is {self.resume!r}): {lost}. To go on exactly, mark "
            f"{', '.join(methods_not_stateless(self.task_encoder)) or 'all methods of the encoder'} as @stateless and "
            "leave resume at 'auto'.",
            stacklevel=2,
        )

    # ---- what the two kinds of loaders are made of

    def _worker_config(self, num_workers: int) -> WorkerConfig:
        trainer = self.trainer
        ranks = (trainer.distributed_sampler_kwargs if trainer is not None else None) or {
            "rank": 0,
            "num_replicas": 1,
        }
        return WorkerConfig(rank=ranks["rank"], world_size=ranks["num_replicas"], num_workers=num_workers)

    def _train_dataset(
        self, worker_config: WorkerConfig, settings: PoolSettings, failure_tolerance: int | None, **changes: Any
    ) -> tuple[Any, LengthPoolDataset]:
        arguments = {
            "batch_size": self.batch_size,
            "shuffle_buffer_size": self.shuffle_buffer_size,
            "packing_buffer_size": self.packing_buffer_size,
            **changes,
        }
        with length_pool(self.task_encoder, settings, failure_tolerance):
            dataset = get_train_dataset(
                self.path,
                worker_config=worker_config,
                max_samples_per_sequence=self.max_samples_per_sequence,
                task_encoder=self.task_encoder,
                **arguments,
            )
        return dataset, require_length_pool(dataset, self.task_encoder)

    def _epoch_length(self, world_size: int) -> int:
        if self.virtual_epoch_length is not None:
            return self.virtual_epoch_length
        return max(1, split_size(self.path, "train") // (world_size * (self.batch_size or 1)))

    def _evaluation(self, split: str) -> EvalLoader | list[Any]:
        try:
            samples = split_size(self.val_path, split)
        except NoSplitError:
            rank_zero_info(f"{self.val_path} has no {split!r} split, or an empty one: no batches from it")
            return []
        world_size = self._worker_config(0).world_size
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
        if self.trainer is not None and self.trainer.overfit_batches > 0:
            raise ValueError(
                f"overfit_batches is {self.trainer.overfit_batches}, which cannot be had from an endless stream. Train "
                "on a data set (or an energon subset of one) with that few samples instead."
            )
        workers = max(1, self.num_workers)
        ranks = self._worker_config(0).world_size
        require_samples(
            self.path, "train", ranks * workers, f"{ranks} ranks x {workers} workers", "set num_workers lower"
        )
        warn_not_stateless(self.task_encoder)
        dataset, pool = self._train_dataset(
            WorkerConfig(rank=0, world_size=1, num_workers=1),
            replace(self.settings, policy="none"),
            PROBE_TOLERANCE if self.failure_tolerance is None else self.failure_tolerance,
            shuffle_buffer_size=None,
            packing_buffer_size=None if self.packing_buffer_size is None else min(self.packing_buffer_size, 16),
        )
        if self.resume == "exact" and not pool.dataset.can_restore_sample():
            raise ValueError(
                "resume is 'exact', but the encoder cannot restore its samples. Mark as @stateless: "
                f"{', '.join(methods_not_stateless(self.task_encoder))}. Or set resume to 'approximate'."
            )
        probe(dataset, pool, f"{type(self.task_encoder).__qualname__} made no batch of the train split of {self.path}")

    def _check_evaluation(self, split: str, *, required: bool) -> None:
        if not required and self.trainer is not None and self.trainer.limit_val_batches == 0:
            return
        ranks = self._worker_config(0).world_size
        try:
            require_samples(self.val_path, split, ranks, f"{ranks} ranks", "set limit_val_batches to 0")
        except NoSplitError:
            if required or self.val_path != self.path:
                raise

    # ---- agreement between the ranks

    def _reduce(self, value: float, reduce_op: str) -> float:
        if self.trainer is None:
            return value
        strategy = self.trainer.strategy
        tensor = torch.tensor(float(value), device=strategy.root_device, dtype=torch.float64)
        return float(strategy.reduce(tensor, reduce_op=reduce_op))

    def _ranks_with(self, something: bool) -> int:
        # A mean, for under tensor parallelism several processes share a data rank.
        return round(self._reduce(something, "mean") * self._worker_config(0).world_size)

    def _max_over_ranks(self, value: int) -> int:
        return round(self._reduce(value, "max"))
