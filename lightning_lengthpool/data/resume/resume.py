"""How the data go on: exactly, or with a word about what is not exact, or not at all."""

import warnings
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_lengthpool.data.fit_progress import is_fitting
from lightning_lengthpool.data.pools.dataset import LengthPoolDataset
from lightning_lengthpool.data.resume.checkpoint import FRESH, IncompleteStateError, check_settings_fit
from lightning_lengthpool.data.resume.data_state import DataState
from lightning_lengthpool.data.resume.handover import Handover, trains_a_copy
from lightning_lengthpool.data.source import Source
from lightning_lengthpool.data.task_encoder import methods_not_stateless
from lightning_lengthpool.data.train_loader import RankState
from lightning_lengthpool.ordering.settings import check_one_of
from lightning_lengthpool.ranks.data_rank import Agreement, DataRank

RESUME = ("auto", "exact", "approximate", "fresh")


class Resume:
    """Decides where a data module's stream goes on, and says so where that is not what the user may believe.

    `mode` is one of `RESUME`, `name` the data module's class, under which Lightning keeps the state, and `seeded` the
    encoder's methods that draw random numbers again as they were.
    """

    def __init__(self, mode: str, name: str, seeded: list[str]) -> None:
        self.state = DataState()
        check_one_of("resume", mode, RESUME)
        self.mode, self._name, self._seeded = mode, name, seeded
        self._handover = Handover()
        self._has_arrived = False  # a checkpoint's state, in this fit

    # ---- from a checkpoint

    def begin_fit(self) -> None:
        """Expect a state, if the fit goes on from a checkpoint."""
        self._has_arrived = False

    def load(
        self, saved: Mapping[str, Any], settings: dict[str, Any], rank: int, *, accumulated: int, keep: bool
    ) -> None:
        """Take a rank's state out of a checkpoint, as `DataState.load`; with 'exact' it must not lack the state."""
        if not saved:
            return  # as if there were none
        self._has_arrived = True
        self.find_handover()  # which this state replaces
        if self.mode == "fresh":
            rank_zero_info("resume is 'fresh': the data start from the beginning, whatever the checkpoint holds")
            self.state.forget()
            return
        try:
            self.state.load(saved, settings, rank, accumulated=accumulated, keep=keep)
        except IncompleteStateError as error:
            self._start_over(str(error))
            self.state.forget()
        if self.state.own is not None:
            self._check_seeds(saved["settings"]["num_workers"], settings["num_workers"])

    def lacks_state(self, trainer: Trainer | None) -> bool:
        """Whether a fit resumes from a checkpoint without this module's state; says so once, or raises if 'exact'."""
        if trainer is None or not is_fitting(trainer) or not trainer.ckpt_path or self._has_arrived:
            return False
        self._has_arrived = True  # once is enough
        if self.mode != "fresh":
            self._start_over(
                f"the checkpoint {trainer.ckpt_path} has no data state under the name {self._name!r}, the class of "
                "this data module: it was saved without one, or with a data module of another class"
            )
        return True

    def _start_over(self, why: str) -> None:
        if self.mode == "exact":
            raise ValueError(f"resume is 'exact', but {why}. {FRESH}")
        rank_zero_warn(f"{why}. So the data start from the beginning: samples that the model has seen come again.")

    def _check_seeds(self, before: int, now: int) -> None:
        """The samples go on in another shape as well, but energon numbers them, and so seeds them, in another way."""
        if max(1, before) == max(1, now) or not self._seeded:
            return
        what = (
            f"the checkpoint was saved with num_workers {before}, and now it is {now}: the samples are those of the "
            f"uninterrupted run, but {', '.join(self._seeded)} would draw other random numbers"
        )
        if self.mode == "exact":
            raise ValueError(f"resume is 'exact', but {what}. Set num_workers as it was, or resume to 'auto'.")
        rank_zero_warn(f"the data do not go on exactly; {what}.")

    def go_on(
        self, pool: LengthPoolDataset, state: RankState | None, source: Source, trainer: Trainer | None
    ) -> RankState | None:
        """Tell a new pool how it goes on; returns the state from which it does, None for the beginning."""
        if self.lacks_state(trainer):
            state = None
        pool.is_exact = self.mode == "exact"
        if state is None or (self.mode != "approximate" and pool.dataset.can_restore_sample()):
            return state
        if source.packing_buffer_size is None:
            pool.lose_pool = True
            lost = f"up to {pool.settings.capacity - 1} samples of each worker's pool are lost"
        else:
            state = None
            lost = "the packing buffer cannot be restored either, and the data start from the beginning"
        methods = ", ".join(methods_not_stateless(source.task_encoder)) or "all methods of the encoder"
        warnings.warn(
            f"the data go on approximately (resume is {self.mode!r}): {lost}. To go on exactly, mark {methods} as "
            "@stateless and leave resume at 'auto'.",
            stacklevel=2,
        )
        return state

    # ---- from the fit before

    def prepare(self, settings: dict[str, Any], agreement: Agreement, data_rank: DataRank) -> None:
        """Make the state of the fit before fit this one, on all ranks alike."""
        if self.state.own is not None:
            before = self.state.settings
            try:
                for name in ("ranks", "num_workers"):
                    if before[name] != settings[name]:
                        raise ValueError(f"{name} was {before[name]} and is {settings[name]}")
                check_settings_fit(before, settings)
            except ValueError as error:  # as a Tuner changes them
                rank_zero_warn(f"the data start from the beginning, for their settings have changed: {error}")
                self.state.forget()
        if data_rank.world_size > 1:
            self.state.align(agreement)

    def find_handover(self) -> None:
        """See whether copies of this data module have left their state."""
        self.state.handed = self._handover.find() or self.state.handed

    def take_up_handover(
        self, settings: dict[str, Any], agreement: Agreement, data_rank: DataRank, *, keep: bool
    ) -> None:
        """Go on from where a trainer's copies of the data module have ended, on all ranks alike."""
        self.find_handover()
        handed = self.state.handed
        having = agreement.ranks_with(handed is not None)
        if not having:
            return
        try:
            if handed is None or having < data_rank.world_size:
                raise ValueError("not all machines have the state of the fit before, which trained in other processes")
            self.state.load(handed, settings, data_rank.rank, accumulated=1, keep=keep)
        except ValueError as error:
            self.state.forget()
            rank_zero_warn(f"the data start from the beginning: {error}")

    def end_fit(self, trainer: Trainer | None, data_rank: DataRank, *, is_writer: bool) -> None:
        """Keep all ranks' states for a checkpoint after the fit; a copy leaves them to its original."""
        self.state.finish(data_rank, is_writer=is_writer)
        if not trains_a_copy(trainer):
            return
        if is_writer:
            self._handover.leave(self.state.save(data_rank, is_writer=True))
        rank_zero_warn(
            "this strategy trains in processes of its own: the data module gets its data state back from them, but a "
            "checkpoint that trainer.save_checkpoint writes after this fit has none. Save during the fit, with "
            "ModelCheckpoint; 'resume: exact' refuses the other one."
        )
