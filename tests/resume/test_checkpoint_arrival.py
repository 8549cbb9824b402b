"""A checkpoint's data state comes late, or not at all: the run goes on exactly, or says that it does not."""

import copy
import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy

from helpers.resuming import through_a_file
from helpers.training import LENGTHS, Recorder, data, trainer
from lightning_lengthpool import LengthPoolDataModule
from lightning_lengthpool.data.resume import checkpoint

EPOCH = 10
RESUMABLE = "not resumable"  # Lightning's words


class Late(SingleDeviceStrategy):
    """Restores when the optimizers are set up, as FSDP, DeepSpeed and ModelParallel do."""

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True


class Scheduled(Recorder):
    """Asks for the number of steps, for which Lightning makes the training loader."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.0)
        steps = self.trainer.estimated_stepping_batches
        return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=int(steps))]


class OtherDataModule(LengthPoolDataModule):
    """Of another class name."""


def fit(folder: Path, module: LengthPoolDataModule, model: Recorder | None = None, **settings: Any) -> Any:
    model = model or Recorder()
    ckpt_path = settings.pop("ckpt_path", None)
    run = trainer(folder, **({"num_sanity_val_steps": 0, "max_epochs": -1} | settings))
    run.fit(model, module, ckpt_path=ckpt_path)
    return model.train_keys, run


def saved(folder: Path, module: LengthPoolDataModule, step: int, **settings: Any) -> Path:
    """A checkpoint of this step, in mid-epoch."""
    callback = ModelCheckpoint(folder / "saved", every_n_train_steps=1, save_top_k=-1, filename="{step}")
    fit(folder, module, max_steps=step, callbacks=[callback], enable_checkpointing=True, **settings)
    return folder / "saved" / f"step={step}.ckpt"


def strategy(late: bool) -> Any:
    return Late(device=torch.device("cpu")) if late else "auto"


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_loader_is_there_before_the_state(
    dataset: Callable[..., Path], tmp_path: Path, late: bool, num_workers: int
) -> None:
    settings = {"virtual_epoch_length": EPOCH, "num_workers": num_workers, "resume": "exact"}
    path = dataset(LENGTHS)
    whole, _ = fit(tmp_path, data(path, **settings), Scheduled(), max_steps=25)
    file = saved(tmp_path, data(path, **settings), 7, model=Scheduled(), strategy=strategy(late))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        again = {"max_steps": 25, "ckpt_path": file, "strategy": strategy(late)}
        assert fit(tmp_path, data(path, **settings), Scheduled(), **again)[0] == whole[7:]
    assert not [one for one in said if RESUMABLE in str(one.message)]


def test_a_loop_of_ones_own_may_load_at_any_moment(dataset: Callable[..., Path]) -> None:
    path = dataset(LENGTHS)
    part = data(path)
    stream = iter(part.train_dataloader())
    whole = [next(stream)["keys"] for _ in range(30)]
    other = data(path)
    running = iter(other.train_dataloader())
    state = None
    for number in range(12):
        next(running)
        state = through_a_file(other.state_dict()) if number == 6 else state
    part.load_state_dict(state)
    assert part.state_dict() == state
    assert [next(stream)["keys"] for _ in range(10)] == whole[7:17]  # the iterator that was running
    fresh = data(path)
    loader = fresh.train_dataloader()
    stream = iter(loader)
    fresh.load_state_dict(state)
    assert fresh.state_dict() == state
    assert [next(stream)["keys"] for _ in range(10)] == whole[7:17]


def another_class(path: Path, folder: Path) -> Path:
    return saved(folder, OtherDataModule(path, data(path).source.task_encoder, 2, pool_size=20, num_workers=0), 7)


def without_state(path: Path, folder: Path) -> Path:
    file = saved(folder, data(path), 7)
    contents = torch.load(file, weights_only=True)
    del contents["LengthPoolDataModule"]
    torch.save(contents, file)
    return file


def with_an_empty_state(path: Path, folder: Path) -> Path:
    file = saved(folder, data(path), 7)
    torch.save(torch.load(file, weights_only=True) | {"LengthPoolDataModule": {}}, file)
    return file


@pytest.mark.parametrize("make", [another_class, without_state, with_an_empty_state])
@pytest.mark.parametrize("late", [True, False])
def test_no_state_arrives(dataset: Callable[..., Path], tmp_path: Path, make: Any, late: bool) -> None:
    path = dataset(LENGTHS)
    file = make(path, tmp_path)
    whole, _ = fit(tmp_path, data(path), max_steps=5)

    def resumed(resume: str) -> list[list[str]]:
        settings = {"max_steps": 12, "ckpt_path": file, "strategy": strategy(late)}
        return fit(tmp_path, data(path, resume=resume), Scheduled(), **settings)[0]

    with pytest.raises(ValueError, match=r"resume is 'exact', but the checkpoint .*'LengthPoolDataModule'.*fresh"):
        resumed("exact")
    for resume in ("auto", "approximate"):
        with pytest.warns(UserWarning, match="has no data state .* the data start from the beginning") as said:
            assert resumed(resume) == whole
        assert len([one for one in said if "has no data state" in str(one.message)]) == 1
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*data state")
        assert resumed("fresh") == whole


def test_a_module_that_has_trained_does_not_go_on_from_a_checkpoint_without_a_state(
    dataset: Callable[..., Path], tmp_path: Path
) -> None:
    path = dataset(LENGTHS)
    file = without_state(path, tmp_path)
    module = data(path)
    whole, _ = fit(tmp_path, module, max_steps=9)
    with pytest.warns(UserWarning, match="the data start from the beginning"):
        assert fit(tmp_path, module, max_steps=12, ckpt_path=file)[0] == whole[:5]


def test_an_incomplete_state_is_refused_where_exact_is_asked(dataset: Callable[..., Path]) -> None:
    path = dataset(LENGTHS)
    part = data(path)
    next(iter(part.train_dataloader()))
    state = part.state_dict()
    with pytest.warns(UserWarning, match=r"lacks the data state of rank\(s\) \[0\]"):
        state = checkpoint.join(state["settings"], 1, [None])
    with pytest.raises(ValueError, match="resume is 'exact', but the checkpoint lacks the data state.*fresh"):
        data(path, resume="exact").load_state_dict(state)
    with pytest.warns(UserWarning, match="lacks the data state. So the data start from the beginning"):
        part.load_state_dict(state)
    assert part.state_dict() == checkpoint.beginning()


def test_an_evaluation_of_a_checkpoint_leaves_training_where_it_stands(
    dataset: Callable[..., Path], tmp_path: Path
) -> None:
    path = dataset(LENGTHS, val=[3] * 4)
    whole, _ = fit(tmp_path, data(path), max_steps=20)
    file = saved(tmp_path, data(path), 3)
    module, model = data(path), Recorder()
    fit(tmp_path, module, model, max_steps=12)
    trainer(tmp_path).validate(model, module, ckpt_path=file, verbose=False)
    other = data(dataset(LENGTHS[:50], val=[3] * 4))  # may be of other data, too
    trainer(tmp_path).validate(Recorder(), other, ckpt_path=file, verbose=False)
    fit(tmp_path, module, model, max_steps=8)
    assert model.train_keys == whole


def test_a_loop_of_ones_own_after_a_fit_counts_what_it_was_handed(dataset: Callable[..., Path], tmp_path: Path) -> None:
    path = dataset(LENGTHS, val=[3] * 4)
    whole, _ = fit(tmp_path, data(path), max_steps=30)
    for steps in (EPOCH, 7):
        module = data(path, virtual_epoch_length=EPOCH)
        fit(tmp_path, module, max_steps=steps)
        loader = module.train_dataloader()
        stream = iter(loader)
        assert [next(stream)["keys"] for _ in range(4)] == whole[steps : steps + 4]
        assert module.state_dict()["batches"] == steps + 4
        assert [batch["keys"] for batch in stream] == whole[steps + 4 : steps + EPOCH]
        module.teardown("fit")


def test_a_state_is_loaded_after_an_evaluation(dataset: Callable[..., Path], tmp_path: Path) -> None:
    path = dataset(LENGTHS, val=[3] * 4)
    whole, _ = fit(tmp_path, data(path), max_steps=20)
    other = data(path)
    fit(tmp_path, other, max_steps=5)
    state = through_a_file(other.state_dict())
    module = data(path, resume="exact")
    trainer(tmp_path).validate(Recorder(), module, verbose=False)
    module.load_state_dict(state)
    assert module.state_dict() == state
    assert next(iter(module.train_dataloader()))["keys"] == whole[5]
    module.teardown("fit")


@pytest.mark.parametrize("how", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_copy_stands_where_the_original_does(
    dataset: Callable[..., Path], tmp_path: Path, how: Any, num_workers: int
) -> None:
    path = dataset(LENGTHS, val=[3] * 4)
    whole, _ = fit(tmp_path, data(path), max_steps=20) if num_workers == 0 else (None, None)
    module = data(path, num_workers=num_workers)
    first, _ = fit(tmp_path, module, max_steps=9)
    one, two = how(module), how(module)
    second = fit(tmp_path, one, max_steps=11)[0]
    assert fit(tmp_path, two, max_steps=11)[0] == second == fit(tmp_path, module, max_steps=11)[0]
    assert whole is None or first + second == whole
    stream = iter(module.train_dataloader())
    next(stream)
    assert how(module).state_dict() == module.state_dict()  # with workers that run
    module.teardown("fit")


class Predictor(Recorder):
    def forward(self, batch: dict) -> list[str]:
        return batch["keys"]

    def predict_step(self, batch: dict) -> list[str]:
        return self(batch)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_predict_covers_each_sample_once(dataset: Callable[..., Path], tmp_path: Path, num_workers: int) -> None:
    module = data(dataset(LENGTHS, val=range(1, 14)), num_workers=num_workers, val_batch_size=3)
    for _ in range(2):
        batches = trainer(tmp_path).predict(Predictor(), module)
        assert sorted(key for batch in batches for key in batch) == [f"val{i:06d}" for i in range(13)]


def test_predict_without_a_split_says_what_is_missing(dataset: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nothing to predict.*no 'test' split.*no 'val' split"):
        trainer(tmp_path).predict(Predictor(), data(dataset(LENGTHS)))


def test_a_checkpoint_names_itself_in_the_message(dataset: Callable[..., Path], tmp_path: Path) -> None:
    path = dataset(LENGTHS)
    file = without_state(path, tmp_path)
    with pytest.warns(UserWarning, match=re.escape(str(file))):
        fit(tmp_path, data(path), max_steps=9, ckpt_path=file)
