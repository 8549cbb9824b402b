"""How far Lightning's training loop has come, as its own counters tell."""

from lightning.pytorch import Trainer
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus


def is_fitting(trainer: Trainer | None) -> bool:
    """Whether a `fit` of this trainer is under way: what it did last stands in its state for ever."""
    return does(trainer) == TrainerFn.FITTING


def does(trainer: Trainer | None) -> TrainerFn | None:
    """What a trainer is doing now, None for nothing."""
    return trainer.state.fn if trainer is not None and trainer.state.status == TrainerStatus.RUNNING else None


class FitProgress:
    """What the loop says of the batches that it has had. Without a fit that is under way, it says nothing."""

    def __init__(self, trainer: Trainer | None = None) -> None:
        self._trainer = trainer if is_fitting(trainer) else None
        self._at_fetch: tuple[int, int] | None = None

    def position(self) -> int | None:
        """Batches that the loop has had of this epoch: 0 unless it was restarted in the middle; None without a fit."""
        loop = self._loop()
        return None if loop is None else int(loop.batch_progress.current.ready)

    def fetch(self) -> None:
        """Note that the next batch is about to be handed out."""
        self._at_fetch = self._counts()

    def has_trained(self) -> bool:
        """Whether the model has been trained on the batch that was handed out last.

        It has once the optimizer has stepped on it, or the loop has done with it in another way (a micro-batch that
        accumulates, a step that was skipped).
        """
        now = self._counts()
        return now is None or self._at_fetch is None or now != self._at_fetch

    def _counts(self) -> tuple[int, int] | None:
        loop = self._loop()
        return None if loop is None else (loop.batch_progress.total.processed, loop.global_step)  # type: ignore[attr-defined]

    def _loop(self) -> _TrainingEpochLoop | None:
        trainer = self._trainer  # while an exception is handled it is no longer running, but its counters hold
        if trainer is None or trainer.state.fn != TrainerFn.FITTING or trainer.state.status == TrainerStatus.FINISHED:
            return None
        return trainer.fit_loop.epoch_loop
