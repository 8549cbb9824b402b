"""What Lightning asks of a data module, from the check of the data to the state in a checkpoint."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn
from megatron.energon import WorkerConfig

from lightning_lengthpool.data.checks import check_same_on_all_ranks, check_training, try_encoder
from lightning_lengthpool.data.evaluation import EvalLoader, check_evaluation, evaluation_loader, prediction_split
from lightning_lengthpool.data.fit_progress import FitProgress, does
from lightning_lengthpool.data.reading.data_identity import Description, describe_data
from lightning_lengthpool.data.resume.data_state import DataState
from lightning_lengthpool.data.resume.resume import Resume
from lightning_lengthpool.data.resume.saved_settings import saved_settings
from lightning_lengthpool.data.source import DataPath, Source, Training
from lightning_lengthpool.data.task_encoder import methods_with_seeds
from lightning_lengthpool.data.train_loader import RankState, TrainLoader
from lightning_lengthpool.ordering.local_paths import file_path
from lightning_lengthpool.ordering.reference_lengths import (
    ReferenceLengths,
    batches_of,
    read_reference_lengths,
    with_reference,
)
from lightning_lengthpool.ordering.settings import ClassFn, PoolSettings, check_integer
from lightning_lengthpool.ranks.data_rank import Agreement, DataRank, find_data_rank
from lightning_lengthpool.ranks.store import is_rank_zero


class DataHooks(LightningDataModule):
    """Loaders and state of a source of data; `LengthPoolDataModule` says what is set.

    `class_fn` names a sample's class also where only the file of reference lengths tells the shares.

    Attributes:
        checks_data: Whether `setup` checks the data; turn it off where they are only read and nothing is trained.
    """

    def __init__(
        self,
        source: Source,
        settings: PoolSettings,
        *,
        resume: str,
        reference_lengths: str | Path | None,
        class_fn: ClassFn | None,
        virtual_epoch_length: int | None,
        given_rank: DataRank | None,  # as the user says; None for what the trainer or the process group says
    ) -> None:
        super().__init__()
        self.source, self.settings, self.class_fn = source, settings, class_fn
        self.checks_data = True
        self.reference_lengths = (
            None if reference_lengths is None else file_path(reference_lengths, "reference_lengths")
        )
        if virtual_epoch_length is not None:
            virtual_epoch_length = check_integer("virtual_epoch_length", virtual_epoch_length, minimum=1)
        self.virtual_epoch_length = virtual_epoch_length
        self._given_rank = given_rank
        self._resume = Resume(resume, type(self).__qualname__, methods_with_seeds(source.task_encoder))
        self._eval_loader: EvalLoader | None = None
        self._reference: ReferenceLengths | None = None  # once the file is read
        self._complete: tuple[PoolSettings, PoolSettings] | None = None  # the settings, and these with the file
        self._described: tuple[DataPath, list[Description]] | None = None  # once the data are looked at
        self._first_costs: list[float] | None = None  # with a token budget, once the encoder is tried

    @property
    def data_rank(self) -> DataRank:
        """Which of the data-parallel ranks this process is."""
        return find_data_rank(self.trainer, self._given_rank)

    def complete_settings(self) -> PoolSettings:
        """The pool's settings with what stands in the file of reference lengths, which is read once."""
        if self.reference_lengths is None:
            return self.settings
        self._reference = self._reference or read_reference_lengths(self.reference_lengths)
        if self._complete is None or self._complete[0] is not self.settings:  # the Tuner may set batch_size
            self._complete = self.settings, with_reference(self.settings, self._reference, self.class_fn)
        return self._complete[1]

    # ---- loaders

    def setup(self, stage: str) -> None:
        """Check the data on all ranks alike, before any loader or worker exists.

        Where only other ranks fail, this one raises as well, so that none of them waits for ever.
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
            self._describe()
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
        return self._evaluation(prediction_split(self.source.eval_path), repeats=False)

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

        Raises `ValueError` if it is malformed, lacks the state, or does not fit the settings.
        """
        trainer = self.trainer
        if does(trainer) not in (None, TrainerFn.FITTING):
            return  # an evaluation of the checkpoint's weights: training goes on from where it stands
        accumulated = 1 if trainer is None else trainer.accumulate_grad_batches
        settings, rank = self._saved_settings(), self.data_rank.rank
        self._resume.load(state_dict, settings, rank, accumulated=accumulated, keep=self._is_writer())

    @property
    def dropped(self) -> int:
        """Samples of this rank that were left out so far, because they cost more than max_tokens."""
        return self._state.dropped

    @property
    def _state(self) -> DataState:
        return self._resume.state

    def _saved_settings(self) -> dict[str, Any]:
        settings, ranks = self.complete_settings(), self.data_rank.world_size
        return saved_settings(self.source, settings, ranks=ranks, data=self._describe(), reference=self._reference)

    def _describe(self) -> list[Description]:
        """What the training data are, looked at once for each path."""
        path = self.source.path
        if self._described is None or self._described[0] != path:
            self._described = path, describe_data(path, "train")
        return self._described[1]

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
            self._first_costs = self._first_costs or try_encoder(self.source, settings, resume=self._resume.mode)
            costs = np.array(self._first_costs)
        return max(1, int(samples / ranks * agreement.max(batches_of(costs, settings))))
