"""`LengthPoolDataModule`: from Lightning's trainer to energon's loaders, one stream per data-parallel rank."""

import math
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn
from megatron.energon import SavableDataLoader, TaskEncoder, WorkerConfig, get_savable_loader, get_train_dataset

from lightning_lengthpool.classes import packed_class
from lightning_lengthpool.cost_models import CostModel
from lightning_lengthpool.data.checks import check_numbers, check_settings, check_training, try_encoder
from lightning_lengthpool.data.evaluation import check_evaluation, evaluation_loader, prediction_split
from lightning_lengthpool.data.fit_progress import FitProgress, does
from lightning_lengthpool.data.loaders import EvalLoader, State, TrainLoader
from lightning_lengthpool.data.pools.dataset import LengthPoolDataset
from lightning_lengthpool.data.reading.data_identity import Description, data_fingerprint, describe_data
from lightning_lengthpool.data.reading.paths import data_path
from lightning_lengthpool.data.reading.splits import split_size
from lightning_lengthpool.data.resume.data_state import DataState
from lightning_lengthpool.data.resume.resume import Resume
from lightning_lengthpool.data.task_encoder import (
    check_encoder,
    length_pool,
    methods_not_stateless,
    methods_with_seeds,
    require_length_pool,
)
from lightning_lengthpool.ordering.local_paths import file_path
from lightning_lengthpool.ordering.reference_lengths import (
    ReferenceLengths,
    batches_of,
    read_reference_lengths,
    with_reference,
)
from lightning_lengthpool.ordering.settings import PoolSettings, PoolWarmup, check_integer, require_stream
from lightning_lengthpool.ranks.data_rank import Agreement, DataRank, check_data_rank, find_data_rank
from lightning_lengthpool.ranks.store import is_distributed, is_rank_zero

_FIRST_BATCH_TIMEOUT = 600.0  # seconds until energon's watchdog speaks up: the first batch waits for a whole pool


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
        if class_shares is not None and class_fn is None:
            class_fn = packed_class
        for name, value in (
            ("class_shares", class_shares),
            ("reference_lengths", reference_lengths),
            ("class_fn", class_fn),
        ):
            if value is not None:
                require_stream(policy, pool_size, name, repr(value))
        if class_fn is not None and class_shares is None and reference_lengths is None:
            raise ValueError(
                "class_fn is set, but nothing tells how many batches each class has. Set class_shares, say {packed: "
                "0.3, single: 0.7}, or reference_lengths with a column 'class'."
            )
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
            class_fn=None if class_shares is None else class_fn,  # else with the shares that the file tells
            class_shares=class_shares,
        )
        check_numbers(
            shuffle_buffer_size=shuffle_buffer_size,
            packing_buffer_size=packing_buffer_size,
            max_samples_per_sequence=max_samples_per_sequence,
            virtual_epoch_length=virtual_epoch_length,
            val_batch_size=val_batch_size,
        )
        check_settings(
            self.settings,
            packing_buffer_size=packing_buffer_size,
            num_workers=num_workers,
            failure_tolerance=failure_tolerance,
            resume=resume,
        )
        self._given_rank = None if rank is None or world_size is None else check_data_rank(rank, world_size)
        self.skip_tolerance = check_integer("skip_tolerance", skip_tolerance, minimum=0, hint="0 for no limit")
        self.path = data_path(path)
        self.val_path = self.path if val_path is None else data_path(val_path, "val_path")
        self.task_encoder = task_encoder
        check_encoder(task_encoder)
        self.failure_tolerance = failure_tolerance
        self.resume = resume
        self.val_batch_size = val_batch_size or batch_size or (1 if packing_buffer_size is None else None)
        self.class_fn = class_fn
        self.reference_lengths = (
            None if reference_lengths is None else file_path(reference_lengths, "reference_lengths")
        )
        self.num_workers = num_workers
        self.shuffle_buffer_size = shuffle_buffer_size
        self.packing_buffer_size = packing_buffer_size
        self.max_samples_per_sequence = max_samples_per_sequence
        self.virtual_epoch_length = virtual_epoch_length
        self._data: list[Description] | None = None  # once it is looked at
        self._reference: ReferenceLengths | None = None
        self._batches_of_a_sample: float | None = None  # with a token budget, once it is estimated
        self._eval_loader: EvalLoader | None = None
        self._resume = Resume(resume, type(self).__qualname__, methods_with_seeds(task_encoder))

    def setup(self, stage: str) -> None:
        """Check the data on all ranks alike, before any loader or worker exists.

        Raises:
            FileNotFoundError, ValueError: See the message: it names the setting or the sample, and the way out. Where
                only other ranks fail, this one raises as well, so that none of them waits for ever.
        """
        error: Exception | None = None
        try:
            if stage == "fit":
                self._estimate(check_training(self, self._pool_settings()))
                self._data = describe_data(self.path, "train")
            if stage == "predict":
                check_evaluation(self, prediction_split(self.val_path), required=True)
            elif stage in ("fit", "validate", "test"):
                check_evaluation(self, "test" if stage == "test" else "val", required=stage != "fit")
        except Exception as caught:
            error = caught
        agreement = self._agreement()
        failed = agreement.ranks_with(error is not None)
        if error is not None:
            raise error
        if failed:
            raise ValueError(f"the data could not be set up on {failed} other rank(s): see their messages")
        if stage == "fit":
            self._agree(agreement)
            self._resume.begin_fit()
            settings = self._saved_settings()
            self._resume.take_up_handover(settings, agreement, self.data_rank, keep=self._is_writer())

    def _agree(self, agreement: Agreement) -> None:
        """Check that what the order depends on is the same on all ranks; each rank asks the same questions."""
        rank, world_size = self.data_rank
        if is_distributed() and world_size > 1 and agreement.is_same(str(rank)):
            raise ValueError(
                f"rank is {rank} on all ranks, and world_size is {world_size}: all would train on the same samples. "
                "Give each process its own rank (not in a YAML that they share), or leave both out."
            )
        if not agreement.is_same(str(self._reference)):
            raise ValueError(
                f"reference_lengths is {str(self.reference_lengths)!r}, but the file differs between the ranks (here "
                f"it has {self._reference}): they would aim at different lengths. Give all ranks the same file."
            )
        settings = self._saved_settings()
        if not agreement.is_same(data_fingerprint(settings.pop("path"))):
            raise ValueError(
                f"path is {str(self.path)!r}, where some ranks find other training data than others (old copies on "
                "local disks, say): samples would be lost and others come twice. Give all ranks the same data."
            )
        if not agreement.is_same(str(sorted(settings.items()))):
            raise ValueError(
                f"the data module's settings differ between the ranks, here they are {settings}: the ranks would train "
                "on different lengths at the same step. Give all ranks the same settings."
            )

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
        length, progress = self._epoch_length(data_rank.world_size), FitProgress(self.trainer)
        own, is_resumed = self._state.own, self._state.is_loaded
        loader = TrainLoader(self._build, length, own, progress, self.boundary, is_resumed=is_resumed)
        self._state.attach(loader, settings, data_rank, agreement, self.trainer)
        return loader

    def _build(self, state: State | None) -> tuple[SavableDataLoader, LengthPoolDataset, State | None]:
        """Make energon's loader, when the first batch is asked for: by then a checkpoint's state has come."""
        if self._resume.lacks_state(self.trainer):
            state = None
        worker_config = self._worker_config(self.num_workers)
        dataset, pool = self._train_dataset(worker_config, self._pool_settings(), self.failure_tolerance)
        if state is not None and (self.resume == "approximate" or not pool.dataset.can_restore_sample()):
            state = self._approximate(pool, state)
        pool.is_exact = self.resume == "exact"
        # Without workers a collection every few batches would be the training process's; and in a worker it walks the
        # whole pool, so it comes about once per pool.
        pool_batches = self.settings.capacity // self.settings.slot_size
        loader = get_savable_loader(
            dataset,
            checkpoint_every_sec=math.inf,  # the state travels with the batches
            gc_collect_every_n_steps=max(10, pool_batches) if self.num_workers else 0,
            watchdog_initial_timeout_seconds=_FIRST_BATCH_TIMEOUT,
        )
        return loader, pool, state

    def val_dataloader(self) -> EvalLoader | list[Any]:
        """The `val` split from its start at each run; no loader if the data set has no such split."""
        return self._evaluation("val")

    def test_dataloader(self) -> EvalLoader | list[Any]:
        """The `test` split, as `val_dataloader`."""
        return self._evaluation("test")

    def predict_dataloader(self) -> EvalLoader:
        """The `test` split, or `val` where there is no `test`, each sample once: ranks may have unequal counts."""
        loader = self._evaluation(prediction_split(self.val_path), repeats=False)
        assert isinstance(loader, EvalLoader)
        return loader

    def _evaluation(self, split: str, *, repeats: bool = True) -> EvalLoader | list[Any]:
        loader = evaluation_loader(self, split, repeats=repeats)
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

    @property
    def batch_size(self) -> int | None:
        """Samples of a micro-batch; Lightning's Tuner sets it."""
        return self.settings.batch_size

    @batch_size.setter
    def batch_size(self, value: int | None) -> None:
        self.settings = replace(self.settings, batch_size=value)

    def pool_settings(self) -> dict[str, Any]:
        """What `SyncMonitor` reports and bases its advice on, in plain numbers."""
        numbers = {name: getattr(self, name) for name in ("batch_size", "num_workers")}
        numbers["pool_size"] = self.settings.pool_size
        plain = {name: None if value is None else int(value) for name, value in numbers.items()}
        budget = self.settings.max_tokens
        return {"policy": self.settings.policy, **plain, **({} if budget is None else {"max_tokens": float(budget)})}

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

    def boundary(self) -> None:
        """Called by the loaders before each batch, equally often on all ranks: a SLURM signal is handled here."""
        self._state.boundary()

    @property
    def dropped(self) -> int:
        """Samples of this rank that were left out so far, for they cost more than max_tokens."""
        return self._state.dropped

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
    def _state(self) -> DataState:
        return self._resume.state

    def _is_writer(self) -> bool:
        return self.trainer.is_global_zero if self.trainer is not None else is_rank_zero()

    def _saved_settings(self) -> dict[str, Any]:
        """What the state of the data depends on."""
        settings = self._pool_settings()
        self._data = self._data or describe_data(self.path, "train")
        numbers = {
            "ranks": self.data_rank.world_size,
            "num_workers": self.num_workers,
            "batch_size": self.batch_size,
            "pool_size": settings.pool_size,
            "seed": settings.seed,
            "shuffle_buffer_size": self.shuffle_buffer_size,
            "packing_buffer_size": self.packing_buffer_size,
            "max_samples_per_sequence": self.max_samples_per_sequence,
        }
        plain = {
            name: None if value is None else int(value) for name, value in numbers.items()
        }  # NumPy's would not load
        shares = settings.class_shares
        return {
            "path": self._data,
            "policy": settings.policy,
            "length_fn": _function_name(settings.length_fn),
            "class_fn": _function_name(settings.class_fn),
            "cost": None if settings.cost is None else settings.cost.fingerprint(),
            "pool_warmup": None if settings.warmup is None else str(settings.warmup),
            "max_tokens": None if settings.max_tokens is None else float(settings.max_tokens),
            "over_budget": None if settings.max_tokens is None else settings.over_budget,
            "reference_lengths": None if self._reference is None else str(self._reference),
            "class_shares": None if shares is None else {name: float(share) for name, share in shares.items()},
            **plain,
        }

    def _approximate(self, pool: LengthPoolDataset, state: State) -> State | None:
        """Go on without the samples that the pool held."""
        if self.packing_buffer_size is None:
            pool.lose_pool = True
            lost = f"up to {self.settings.capacity - 1} samples of each worker's pool are lost"
        else:
            state = None
            lost = "the packing buffer cannot be restored either, and the data start from the beginning"
        warnings.warn(
            f"the data go on approximately (resume is {self.resume!r}): {lost}. To go on exactly, mark "
            f"{', '.join(methods_not_stateless(self.task_encoder)) or 'all methods of the encoder'} as @stateless and "
            "leave resume at 'auto'.",
            stacklevel=2,
        )
        return state

    # ---- the pool

    def _pool_settings(self) -> PoolSettings:
        """The pool's settings with what stands in the file of reference lengths, which is read once."""
        if self.reference_lengths is not None and self._reference is None:
            file = read_reference_lengths(self.reference_lengths)
            self.settings = with_reference(self.settings, file, self.class_fn)
            self._reference = file
        return self.settings

    def _batches_per_sample(self) -> float:
        """How many batches a sample makes on average; with a token budget estimated, and the same on all ranks."""
        if self.settings.max_tokens is None:
            return 1 / self.settings.slot_size
        if self._batches_of_a_sample is None:
            self._estimate(try_encoder(self, self._pool_settings()))
        return self._agreement().max(self._batches_of_a_sample)

    def _estimate(self, costs: list[float] | None) -> None:
        """Estimate how many batches a sample makes, from these costs if there is no reference."""
        if costs is None:
            return
        reference = self._pool_settings().reference
        known = costs if reference is None else [cost for own in reference.costs.values() for cost in own]
        self._batches_of_a_sample = batches_of(known, self.settings)

    def _agreement(self) -> Agreement:
        return Agreement(self.trainer, self.data_rank.world_size)

    # ---- copies

    def __getstate__(self) -> dict[str, Any]:
        """A copy (`copy.deepcopy`, `pickle`) stands where this one stands in the data, without trainer and loaders."""
        self._resume.find_handover()
        return vars(self) | {"trainer": None, "_eval_loader": None}

    # ---- what the two kinds of loaders are made of

    @property
    def data_rank(self) -> DataRank:
        """Which of the data-parallel ranks this process is."""
        return find_data_rank(self.trainer, self._given_rank)

    def _worker_config(self, num_workers: int) -> WorkerConfig:
        rank, world_size = self.data_rank
        return WorkerConfig(rank=rank, world_size=world_size, num_workers=num_workers)

    def _train_dataset(
        self, worker_config: WorkerConfig, settings: PoolSettings, failure_tolerance: int | None, **changes: Any
    ) -> tuple[Any, LengthPoolDataset]:
        arguments = {
            "batch_size": self.batch_size,
            "shuffle_buffer_size": self.shuffle_buffer_size,
            "packing_buffer_size": self.packing_buffer_size,
            **changes,
        }
        with length_pool(self.task_encoder, settings, failure_tolerance, self.skip_tolerance):
            dataset = get_train_dataset(
                data_path(self.path),
                worker_config=worker_config,
                max_samples_per_sequence=self.max_samples_per_sequence,
                task_encoder=self.task_encoder,
                **arguments,
            )
        return dataset, require_length_pool(dataset, self.task_encoder)

    def _epoch_length(self, world_size: int) -> int:
        if self.virtual_epoch_length is not None:
            return self.virtual_epoch_length
        samples = split_size(self.path, "train")
        if self.settings.max_tokens is None:
            return max(1, samples // (world_size * self.settings.slot_size))
        return max(1, int(samples / world_size * self._batches_per_sample()))


def _function_name(function: Callable[..., Any] | None) -> str | None:
    """What a checkpoint knows of a function: another one of the same name is not noticed."""
    return None if function is None else getattr(function, "__qualname__", type(function).__qualname__)
