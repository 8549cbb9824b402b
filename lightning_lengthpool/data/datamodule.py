"""`LengthPoolDataModule`: from Lightning's trainer to energon's loaders, one stream per data-parallel rank."""

import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from lightning.pytorch import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn
from megatron.energon import TaskEncoder, WorkerConfig

from lightning_lengthpool.classes import packed_class
from lightning_lengthpool.cost_models import CostModel
from lightning_lengthpool.data.checks import check_same_on_all_ranks, check_settings, check_training, try_encoder
from lightning_lengthpool.data.evaluation import EvalLoader, check_evaluation, evaluation_loader, prediction_split
from lightning_lengthpool.data.fit_progress import FitProgress, does
from lightning_lengthpool.data.reading.data_identity import Description, describe_data
from lightning_lengthpool.data.resume.data_state import DataState
from lightning_lengthpool.data.resume.resume import Resume
from lightning_lengthpool.data.source import DataPath, Source, Training
from lightning_lengthpool.data.task_encoder import methods_with_seeds
from lightning_lengthpool.data.train_loader import RankState, TrainLoader
from lightning_lengthpool.ordering.local_paths import file_path
from lightning_lengthpool.ordering.reference_lengths import (
    ReferenceLengths,
    batches_of,
    check_reference,
    read_reference_lengths,
    with_reference,
)
from lightning_lengthpool.ordering.settings import PoolSettings, PoolWarmup, check_integer
from lightning_lengthpool.ranks.data_rank import Agreement, DataRank, check_data_rank, find_data_rank
from lightning_lengthpool.ranks.store import is_rank_zero


class LengthPoolDataModule(LightningDataModule):
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
        super().__init__()
        if (rank is None) != (world_size is None):
            raise ValueError(f"rank is {rank} and world_size is {world_size}: set both, or neither")
        if not sys.platform.startswith("linux"):
            raise RuntimeError(f"lightning_lengthpool runs on Linux only (energon forks), this is {sys.platform!r}")
        self.class_fn = packed_class if class_fn is None and class_shares is not None else class_fn
        #: The pool as it is set; `complete_settings` adds what stands in the file of reference lengths.
        self.settings = PoolSettings(
            batch_size=batch_size,
            pool_size=pool_size,
            policy=policy,
            seed=seed,
            length_fn=length_fn,
            cost=cost,
            warmup=pool_warmup,
            max_tokens=max_tokens,
            over_budget=over_budget,
            class_fn=None if class_shares is None else self.class_fn,  # else with the shares that the file tells
            class_shares=class_shares,
        )
        check_reference(self.settings, reference_lengths, self.class_fn)
        if val_batch_size is None:
            val_batch_size = 1 if batch_size is None and packing_buffer_size is None else batch_size
        #: Where samples come from.
        self.source = Source(
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
        check_settings(self.settings, self.source)
        #: Whether `setup` checks the data; turn it off where they are only read and nothing is trained.
        self.checks_data = True
        self.reference_lengths = (
            None if reference_lengths is None else file_path(reference_lengths, "reference_lengths")
        )
        self.virtual_epoch_length = (
            None
            if virtual_epoch_length is None
            else check_integer("virtual_epoch_length", virtual_epoch_length, minimum=1)
        )
        self._given_rank = None if rank is None or world_size is None else check_data_rank(rank, world_size)
        self._resume = Resume(resume, type(self).__qualname__, methods_with_seeds(task_encoder))
        self._eval_loader: EvalLoader | None = None
        self._reference: ReferenceLengths | None = None  # once the file is read
        self._data: list[Description] | None = None  # once the data are looked at
        self._first_costs: list[float] | None = None  # with a token budget, once the encoder is tried

    # ---- settings

    @property
    def path(self) -> DataPath:
        """The data set. A derived class may set it as late as in its `setup`, before it calls this class's."""
        return self.source.path

    @path.setter
    def path(self, value: DataPath) -> None:
        self.source, self._data = replace(self.source, path=value), None

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

    @property
    def data_rank(self) -> DataRank:
        """Which of the data-parallel ranks this process is."""
        return find_data_rank(self.trainer, self._given_rank)

    def complete_settings(self) -> PoolSettings:
        """The pool's settings with what stands in the file of reference lengths, which is read once.

        Raises:
            FileNotFoundError, ValueError: If the file cannot be read, or does not fit the settings.
        """
        if self.reference_lengths is None:
            return self.settings
        self._reference = self._reference or read_reference_lengths(self.reference_lengths)
        return with_reference(self.settings, self._reference, self.class_fn)

    def pool_settings(self) -> dict[str, Any]:
        """What `SyncMonitor` reports and bases its advice on, in plain numbers.

        Returns:
            `policy`, `batch_size`, `num_workers`, `pool_size`; `rank_samples`, how many samples of the training split
            fall to one rank (None if the data cannot be read); with a token budget `max_tokens`.
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
            **({} if budget is None else {"max_tokens": float(budget)}),
        }

    # ---- Lightning's hooks

    def setup(self, stage: str) -> None:
        """Check the data on all ranks alike, before any loader or worker exists.

        Raises:
            FileNotFoundError, ValueError: See the message: it names the setting or the sample, and the way out. Where
                only other ranks fail, this one raises as well, so that none of them waits for ever.
        """
        if not self.checks_data:
            return
        error: Exception | None = None
        try:
            self._check_data(stage)
        except Exception as caught:
            error = caught
        agreement = self._agreement()
        failed = agreement.ranks_with(error is not None)
        if error is not None:
            raise error
        if failed:
            raise ValueError(f"the data could not be set up on {failed} other rank(s): see their messages")
        if stage == "fit":
            settings = self._saved_settings()
            check_same_on_all_ranks(agreement, self.data_rank, self.source, self._reference, settings)
            self._resume.begin_fit()
            self._resume.take_up_handover(settings, agreement, self.data_rank, keep=self._is_writer())

    def _check_data(self, stage: str) -> None:
        source, ranks, trainer = self.source, self.data_rank.world_size, self.trainer
        if stage == "fit":
            self._first_costs = check_training(
                source, self.complete_settings(), ranks=ranks, resume=self._resume.mode, trainer=trainer
            )
            self._data = describe_data(source.path, "train")
        if stage == "predict":
            check_evaluation(source, prediction_split(source.eval_path), ranks, trainer, required=True)
        elif stage in ("fit", "validate", "test"):
            split = "test" if stage == "test" else "val"
            check_evaluation(source, split, ranks, trainer, required=stage != "fit")

    def train_dataloader(self) -> TrainLoader:
        """This rank's endless stream, cut into epochs of `virtual_epoch_length` batches.

        It goes on from the checkpoint that is resumed, or from where the last one stood if there was one before. To be
        called on all ranks alike.
        """
        self._state.close()
        data_rank, agreement = self.data_rank, self._agreement()
        settings = self._saved_settings()
        self._resume.take_up_handover(settings, agreement, data_rank, keep=self._is_writer())
        self._resume.prepare(settings, agreement, data_rank)
        length, progress = self._epoch_length(agreement), FitProgress(self.trainer)
        own, is_resumed = self._state.own, self._state.is_loaded
        loader = TrainLoader(self._build, length, own, progress, self.boundary, is_resumed=is_resumed)
        self._state.attach(loader, settings, data_rank, agreement, self.trainer)
        return loader

    def _build(self, state: RankState | None) -> tuple[Training, RankState | None]:
        """The training data, when the first batch is asked for: by then a checkpoint's state has come."""
        rank, world_size = self.data_rank
        workers = WorkerConfig(rank=rank, world_size=world_size, num_workers=self.source.num_workers)
        training = self.source.training(self.complete_settings(), workers)
        return training, self._resume.go_on(training.pool, state, self.source, self.trainer)

    def val_dataloader(self) -> EvalLoader | list[Any]:
        """The `val` split from its start at each run; no loader if the data set has no such split."""
        return self._evaluation("val")

    def test_dataloader(self) -> EvalLoader | list[Any]:
        """The `test` split, as `val_dataloader`."""
        return self._evaluation("test")

    def predict_dataloader(self) -> EvalLoader | list[Any]:
        """The `test` split, or `val` where there is no `test`, each sample once: ranks may have unequal counts."""
        return self._evaluation(prediction_split(self.val_path), repeats=False)

    def _evaluation(self, split: str, *, repeats: bool = True) -> EvalLoader | list[Any]:
        agreement = self._agreement()
        loader = evaluation_loader(self.source, split, self.data_rank, agreement, self.boundary, repeats=repeats)
        if loader is None:
            return []
        self._eval_loader = loader
        return loader

    def is_repeat(self, batch_idx: int) -> bool:
        """Whether a validation or test batch is one that this rank has seen before in this run.

        A rank that has fewer batches than another repeats its last one, so that all ranks take equally many steps. A
        `validation_step` leaves such a batch out of its metrics: with a torchmetrics metric it skips `update`.
        """
        return self._eval_loader is not None and self._eval_loader.is_repeat(batch_idx)

    def boundary(self) -> None:
        """Called by the loaders before each batch, equally often on all ranks: a SLURM signal is handled here."""
        self._state.boundary()

    def teardown(self, stage: str) -> None:
        """Stop the workers; where they stand in the training data is kept, for a checkpoint or another `fit`."""
        self._close()
        if stage == "fit":
            self._resume.end_fit(self.trainer, self.data_rank, is_writer=self._is_writer())
        if stage == "fit" and self.dropped:
            warnings.warn(
                f"{self.dropped} samples of rank {self.data_rank.rank} cost more than max_tokens "
                f"({self.settings.max_tokens:g}) and were left out (over_budget is 'drop')",
                stacklevel=2,
            )

    def on_exception(self, exception: BaseException) -> None:
        """Stop the workers where Lightning does not get to `teardown`."""
        self._close()

    def _close(self) -> None:
        self._state.close()
        if self._eval_loader is not None:
            self._eval_loader.close()

    # ---- the state of the data

    def state_dict(self) -> dict[str, Any]:
        """All ranks' states, in plain containers, on global rank zero, which writes the checkpoint.

        They are the states after the last batch that was trained on, also in the middle of a step. Without a trainer
        that is the last batch that the loader has handed out.
        """
        self._resume.find_handover()
        return self._state.save(self.data_rank, is_writer=self._is_writer())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take this rank's state out of a checkpoint, before or after the loader was made.

        Raises:
            ValueError: If it is malformed, lacks the state, or does not fit the settings: the message names what was
                saved, what is now and the way out.
        """
        trainer = self.trainer
        if does(trainer) not in (None, TrainerFn.FITTING):
            return  # an evaluation of the checkpoint's weights: training goes on from where it stands
        accumulated = 1 if trainer is None else trainer.accumulate_grad_batches
        arguments = {"accumulated": accumulated, "keep": self._is_writer()}
        self._resume.load(state_dict, self._saved_settings(), self.data_rank.rank, **arguments)

    @property
    def dropped(self) -> int:
        """Samples of this rank that were left out so far, because they cost more than max_tokens."""
        return self._state.dropped

    @property
    def _state(self) -> DataState:
        return self._resume.state

    def _saved_settings(self) -> dict[str, Any]:
        """What an iterator state depends on, plain: another run goes on from it only with the same."""
        settings = self.complete_settings()
        self._data = self._data or describe_data(self.path, "train")
        return {
            "path": self._data,
            "ranks": self.data_rank.world_size,
            "reference_lengths": None if self._reference is None else str(self._reference),
            **self.source.identity(),
            **settings.identity(),
        }

    def __getstate__(self) -> dict[str, Any]:
        """A copy (`copy.deepcopy`, `pickle`) stands where this one stands in the data, without trainer and loaders."""
        self._resume.find_handover()
        return vars(self) | {"trainer": None, "_eval_loader": None}

    # ---- ranks and epochs

    def _is_writer(self) -> bool:
        return self.trainer.is_global_zero if self.trainer is not None else is_rank_zero()

    def _agreement(self) -> Agreement:
        return Agreement(self.trainer, self.data_rank.world_size)

    def _epoch_length(self, agreement: Agreement) -> int:
        if self.virtual_epoch_length is not None:
            return self.virtual_epoch_length
        samples, ranks, settings = self.source.training_samples(), self.data_rank.world_size, self.complete_settings()
        if settings.max_tokens is None:
            return max(1, samples // (ranks * settings.slot_size))
        if settings.reference is not None:
            costs = np.concatenate([*settings.reference.costs.values()])
        else:
            self._first_costs = self._first_costs or try_encoder(self.source, settings)
            costs = np.array(self._first_costs)
        return max(1, int(samples / ranks * agreement.max(batches_of(costs, settings))))
