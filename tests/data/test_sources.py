"""Shards that cannot be read are named, and a rank whose samples are all skipped ends the run on all ranks."""

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from megatron.energon import Cooker, SkipSample, TextSample, WorkerConfig, basic_sample_keys, stateless
from megatron.energon.flavors.jsonl.crude_jsonl_dataset import CrudeJsonlDatasetFactory

from helpers.datasets import LengthEncoder, LengthSample
from helpers.pools import take
from helpers.ranks import run_ranks
from helpers.scanning import scan_module
from helpers.training import LENGTHS, Recorder, data, trainer
from lightning_lengthpool import LengthPoolDataModule

WAY_OUT = "cannot be read .*damaged, incomplete or gone.*energon prepare"


def damage(shard: Path, how: str) -> None:
    if how == "noise":
        shard.write_bytes(random.Random(0).randbytes(shard.stat().st_size))
    elif how == "truncated":
        os.truncate(shard, 700)
    elif how == "empty":
        os.truncate(shard, 0)
    else:
        shard.unlink()


def shards_of(path: Path, split: str) -> list[Path]:
    return sorted(path.glob(f"{split}-*.tar"))


HOW = ["noise", "truncated", "empty", "gone"]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("how", HOW)
def test_a_damaged_shard_is_named_in_training_and_validation(
    dataset: Callable[..., Path], how: str, num_workers: int
) -> None:
    path = dataset(LENGTHS, val=range(1, 60), shards=4)
    train, val = shards_of(path, "train")[2], shards_of(path, "val")[1]
    damage(train, how)
    damage(val, how)
    module = data(path, num_workers=num_workers)
    with pytest.raises(ValueError, match=f"{train} {WAY_OUT}"):
        for _ in module.train_dataloader():
            pass
    with pytest.raises(ValueError, match=f"{val} {WAY_OUT}"):
        for _ in module.val_dataloader():
            pass
    module.teardown("fit")


@pytest.mark.parametrize("how", HOW)
def test_a_damaged_shard_is_named_in_the_trial_the_scan_and_on_restoring(
    dataset: Callable[..., Path], how: str
) -> None:
    path = dataset(LENGTHS)
    _, state, _ = take(path, LengthEncoder(), 2)
    (shard,) = shards_of(path, "train")
    damage(shard, how)
    with pytest.raises(ValueError, match=f"'{shard.name}' .*(has other contents|cannot be read now).*as they were"):
        take(path, LengthEncoder(), 2, state)  # not even looked for: the checkpoint's data are no longer there
    with pytest.raises(ValueError, match=f"{shard} {WAY_OUT}"):
        data(path).setup("fit")
    with pytest.raises(ValueError, match=f"{shard} {WAY_OUT}"):
        scan_module(data(path), 1, 1000)


@pytest.mark.parametrize("how", ["truncated", "empty", "gone"])
def test_a_shard_without_its_index_is_named(dataset: Callable[..., Path], how: str) -> None:
    path = dataset(LENGTHS)
    (shard,) = shards_of(path, "train")
    damage(shard.with_suffix(".tar.idx"), how)
    with pytest.raises(ValueError, match=f"{shard} {WAY_OUT}"):
        take(path, LengthEncoder(), 60)


# ---- a rank that has nothing to train on


class Skipping(LengthEncoder):
    """Gives nothing on one rank after some samples, in one of the ways there are."""

    def __init__(self, how: str, rank: int = 0, after: int = 5) -> None:
        super().__init__()
        self.how, self.rank, self.after = how, rank, after
        if how == "skip after the pool":
            self.batch = self.skip_batch

    def is_due(self) -> bool:
        config = WorkerConfig.active_worker_config
        return config.world_size > self.rank == config.rank and self.current_sample_index >= self.after

    @stateless(failure_tolerance=0)
    def encode_sample(self, sample: TextSample) -> LengthSample:
        if self.how in ("skip", "fail") and self.is_due():
            raise SkipSample if self.how == "skip" else OSError("planted")
        return super().encode_sample(sample)

    @stateless
    def skip_batch(self, samples: list[LengthSample]) -> Any:
        if self.is_due():
            raise SkipSample
        return super().batch(samples)


class YieldingNothing(Skipping):
    @stateless
    def encode_sample(self, sample: TextSample) -> Iterator[LengthSample]:
        if not self.is_due():
            yield super().encode_sample(sample)


@pytest.mark.parametrize("policy", ["pool", "stream"])
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("skip", "200 samples were read in a row and none came into the pool"),
        ("yield nothing", "200 samples were read in a row and none came into the pool"),
        ("fail", "200 samples were read in a row and none came into the pool"),
        ("skip after the pool", r"20\d samples in a row left the pool and none made a batch"),
    ],
)
def test_an_encoder_that_skips_everything_is_an_error_that_says_so(
    dataset: Callable[..., Path], policy: str, how: str, said: str
) -> None:
    path = dataset(LENGTHS)
    encoder = (YieldingNothing if how == "yield nothing" else Skipping)(how)
    module = LengthPoolDataModule(path, encoder, 2, pool_size=8, policy=policy, num_workers=0, skip_tolerance=200)
    with pytest.raises(ValueError, match=f"rank 0, worker 0: {said} .skip_tolerance is 200.*0 sets no limit"):
        for _ in range(3):
            for _ in module.train_dataloader():
                pass


@pytest.mark.parametrize("buffers", [{"shuffle_buffer_size": 60}, {"skip_tolerance": 0}, {}])
def test_what_a_buffer_holds_is_not_skipped(dataset: Callable[..., Path], buffers: dict) -> None:
    settings = {"skip_tolerance": 3, "pool_size": 50} | buffers
    _, state, _ = take(dataset(LENGTHS), LengthEncoder(), 40, **settings)
    assert take(dataset(LENGTHS), LengthEncoder(), 5, state, **settings)[2] == []


def two_ranks_one_skips(path: str, folder: str) -> None:
    encoder = Skipping("skip", rank=1, after=60)
    module = LengthPoolDataModule(path, encoder, 1, pool_size=9, num_workers=1, skip_tolerance=500)
    trainer(Path(folder), devices=2, strategy="ddp", max_steps=1000, max_epochs=-1).fit(Recorder(), module)


def test_a_rank_that_skips_everything_ends_both(dataset: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank 1 failed") as ended:
        run_ranks(two_ranks_one_skips, 2, timeout=60, path=str(dataset(LENGTHS)), folder=str(tmp_path))
    assert "rank 0 failed" in str(ended.value) and "hung" not in str(ended.value)
    assert "rank 1, worker 0: 500 samples were read in a row" in str(ended.value)


class SkipsItsShare(LengthEncoder):
    @stateless
    def encode_sample(self, sample: TextSample) -> LengthSample:
        if sample.__key__.startswith("val") and WorkerConfig.active_worker_config.rank == 1:
            raise SkipSample
        return super().encode_sample(sample)


def two_ranks_one_skips_validation(path: str, folder: str) -> None:
    module = LengthPoolDataModule(path, SkipsItsShare(), 1, pool_size=9, num_workers=1)
    settings = dict(devices=2, strategy="ddp", max_steps=1000, max_epochs=-1)
    trainer(Path(folder), **settings).fit(Recorder(), module)


def test_a_rank_that_skips_its_share_of_validation_ends_both(dataset: Callable[..., Path], tmp_path: Path) -> None:
    path = dataset(LENGTHS, val=range(1, 30))
    with pytest.raises(AssertionError) as ended:
        run_ranks(two_ranks_one_skips_validation, 2, timeout=60, path=str(path), folder=str(tmp_path))
    assert "hung" not in str(ended.value)
    assert str(ended.value).count("1 of 2 ranks got no val batch") >= 2


def test_a_wrong_bound_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="skip_tolerance is -1, expected an integer of at least 0"):
        data(tmp_path, skip_tolerance=-1)


def test_a_damaged_jsonl_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(f'{{"text": "{length}"}}\n' for length in LENGTHS))
    CrudeJsonlDatasetFactory.prepare_dataset(path)
    module = LengthPoolDataModule(path, Crude(), 2, pool_size=8, num_workers=0)
    loader = module.train_dataloader()
    stream = loader._open()
    path.unlink()
    with pytest.raises(ValueError, match=f"{path} {WAY_OUT}"):
        next(stream)


@stateless
def cook(sample: dict) -> TextSample:
    return TextSample(**basic_sample_keys(sample), text=sample["json"]["text"])


class Crude(LengthEncoder):
    cookers = (Cooker(cook),)
