"""How far Lightning's training loop has come, as its own counters tell."""

from lightning.pytorch import Trainer
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer.states import TrainerFn


class FitProgress:
    """What the loop says of the batches that it has had. Without a trainer that fits, it says nothing.

    Args:
        trainer: The trainer, None for a loop of the user's own.
    """

    def __init__(self, trainer: Trainer | None = None) -> None:
        self._trainer = trainer
        self._at_fetch: tuple[int, int] | None = None

    def position(self) -> int | None:
        """Batches that the loop has had of the epoch that it is in: none unless it was restarted in the middle.

        None without a trainer that fits.
        """
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
        return None if loop is None else (loop.batch_progress.total.processed, loop.global_step)

    def _loop(self) -> _TrainingEpochLoop | None:
        if self._trainer is None or self._trainer.state.fn != TrainerFn.FITTING:
            return None
        return self._trainer.fit_loop.epoch_loop
