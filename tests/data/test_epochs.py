"""Lightning begins an epoch: it gets the whole length, from where the data stand. Only a restart gets what remains."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.tuner import Tuner

from helpers.training import LENGTHS, Recorder, data, trainer

EPOCH = 10


class EpochRecorder(Recorder):
    """Remembers the batches of each epoch, and in which epochs it was validated."""

    def __init__(self, skip_from: int | None = None) -> None:
        super().__init__()
        self.lengths: Counter[int] = Counter()
        self.validated: list[int] = []
        self.skip_from = skip_from

    @property
    def epochs(self) -> list[int]:
        """Batches of each epoch."""
        return [self.lengths[epoch] for epoch in sorted(self.lengths)]

    def on_train_batch_start(self, batch: dict, batch_idx: int) -> int | None:
        return -1 if batch_idx == self.skip_from else None

    def training_step(self, batch: dict) -> Any:
        self.lengths[self.current_epoch] += 1
        return super().training_step(batch)

    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        self.validated.append(self.current_epoch)


def fit(path: Path, folder: Path, *, skip_from: int | None = None, ckpt_path: Any = None, **settings: Any) -> Any:
    model = EpochRecorder(skip_from)
    run = trainer(folder, **({"num_sanity_val_steps": 0} | settings))
    run.fit(model, data(path, virtual_epoch_length=EPOCH), ckpt_path=ckpt_path)
    return model, run


@pytest.mark.parametrize("limit", [7, 0.7, 0.75])
@pytest.mark.parametrize("every", [1, 2])
def test_limited_epochs_are_equally_long_and_validated(
    dataset: Callable[..., Path], tmp_path: Path, limit: float, every: int
) -> None:
    path = dataset(LENGTHS, val=[3] * 4)
    whole = fit(path, tmp_path, max_steps=42, max_epochs=-1)[0].train_keys
    settings = {"limit_train_batches": limit, "max_epochs": 6, "check_val_every_n_epoch": every}
    model, _ = fit(path, tmp_path, **settings)
    assert model.epochs == [7] * 6 and model.validated == list(range(6))[every - 1 :: every]
    assert model.train_keys == whole


def test_an_epoch_that_the_user_ends_is_followed_by_a_whole_one(dataset: Callable[..., Path], tmp_path: Path) -> None:
    path = dataset(LENGTHS, val=[3] * 4)
    whole = fit(path, tmp_path, max_steps=20, max_epochs=-1)[0].train_keys
    model, _ = fit(path, tmp_path, skip_from=4, max_epochs=3)
    assert model.epochs == [4] * 3
    assert model.train_keys == [*whole[0:4], *whole[5:9], *whole[10:14]]  # the fifth batch is the one passed over


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.should_stop = True


@pytest.mark.parametrize("stop", [{"callbacks": [StopAt(7)], "max_epochs": -1}, {"max_steps": 7, "max_epochs": -1}])
def test_a_second_fit_begins_a_whole_epoch_where_the_first_ended(
    dataset: Callable[..., Path], tmp_path: Path, stop: dict
) -> None:
    path = dataset(LENGTHS, val=[3] * 4)
    whole = fit(path, tmp_path, max_steps=27, max_epochs=-1)[0].train_keys
    module, first, second = data(path, virtual_epoch_length=EPOCH), EpochRecorder(), EpochRecorder()
    trainer(tmp_path, num_sanity_val_steps=0, **stop).fit(first, module)
    trainer(tmp_path, num_sanity_val_steps=0, max_epochs=2).fit(second, module)
    assert first.train_keys == whole[:7] and second.train_keys == whole[7:]
    assert second.epochs == [10, 10] and second.validated == [0, 1]


def test_going_on_from_a_finished_run_begins_whole_epochs(dataset: Callable[..., Path], tmp_path: Path) -> None:
    path = dataset(LENGTHS, val=[3] * 4)
    whole = fit(path, tmp_path, max_steps=40, max_epochs=-1)[0].train_keys
    _, run = fit(path, tmp_path, max_epochs=2)
    run.save_checkpoint(tmp_path / "end.ckpt")
    model, _ = fit(path, tmp_path, ckpt_path=tmp_path / "end.ckpt", max_epochs=4)
    assert model.epochs == [10, 10] and model.validated == [2, 3]
    assert model.train_keys == whole[20:]


@pytest.mark.parametrize("limit", [1.0, 7])
def test_a_restart_in_mid_epoch_gets_what_remains_and_then_whole_epochs(
    dataset: Callable[..., Path], tmp_path: Path, limit: float
) -> None:
    path = dataset(LENGTHS, val=[3] * 4)
    length = limit if limit == 7 else EPOCH
    whole = fit(path, tmp_path, max_steps=4 * length, max_epochs=-1)[0].train_keys
    save = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=1, save_top_k=-1, filename="{step}")
    settings = {"limit_train_batches": limit, "max_epochs": 4}
    fit(path, tmp_path, callbacks=[save], enable_checkpointing=True, **settings)
    for step in (1, length - 1, length, length + 1, 2 * length):
        model, _ = fit(path, tmp_path, ckpt_path=tmp_path / "saved" / f"step={step}.ckpt", **settings)
        assert model.train_keys == whole[step:], step
        assert set(model.epochs[1:]) == {length} and model.validated[-1] == 3, step


class Tuned(EpochRecorder):
    """Has what the tuner changes."""

    lr = 0.01


@pytest.mark.parametrize("what", ["lr_find", "scale_batch_size"])
def test_after_the_tuner_training_begins_at_the_start(dataset: Callable[..., Path], tmp_path: Path, what: str) -> None:
    path = dataset(LENGTHS, val=[3] * 4)
    module, model = data(path, batch_size=4, virtual_epoch_length=EPOCH), Tuned()
    run = trainer(tmp_path, max_epochs=2, num_sanity_val_steps=0, enable_checkpointing=True)
    tuner = Tuner(run)
    if what == "lr_find":
        tuner.lr_find(model, datamodule=module, num_training=5)
    else:
        assert tuner.scale_batch_size(model, datamodule=module, max_trials=2, init_val=1, steps_per_trial=2) == 2
    model.train_keys.clear()
    model.lengths.clear()
    run.fit(model, module)
    expected = EpochRecorder()
    fresh = data(path, batch_size=module.batch_size, virtual_epoch_length=EPOCH)
    trainer(tmp_path, max_epochs=2, num_sanity_val_steps=0).fit(expected, fresh)
    assert model.train_keys == expected.train_keys and model.epochs == [10, 10]
