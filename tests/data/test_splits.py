import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from megatron.energon import WorkerConfig
from megatron.energon.flavors.jsonl.crude_jsonl_dataset import CrudeJsonlDatasetFactory

from helpers.datasets import LengthEncoder, write_dataset, write_metadataset
from lightning_lengthpool import LengthPoolDataModule
from lightning_lengthpool.data.reading.splits import (
    NoSplitError,
    require_samples,
    split_size,
    worker_samples,
    workers_with_samples,
)
from lightning_lengthpool.data.source import Source
from lightning_lengthpool.ordering.settings import PoolSettings


def test_the_samples_of_a_split_are_counted_over_all_shards(dataset: Callable[..., Path]) -> None:
    path = dataset([1] * 30, val=[1] * 7, shards=4)
    assert (split_size(path, "train"), split_size(path, "val")) == (30, 7)


@pytest.mark.parametrize("split", ["val", "test"])
def test_a_split_that_is_not_there_is_named(dataset: Callable[..., Path], split: str) -> None:
    with pytest.raises(NoSplitError, match=f"has no '{split}' split"):
        split_size(dataset([1] * 5), split)


def test_a_metadataset_without_the_split_is_named(dataset: Callable[..., Path]) -> None:
    path = dataset([1] * 5)
    blend = path.parent / "blend.yaml"
    blend.write_text(
        f"__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    path: {path.name}\n"
    )
    assert split_size(blend, "train") == 5
    with pytest.raises(NoSplitError, match="has no 'val' split"):
        split_size(blend, "val")


def test_a_jsonl_file_is_all_training(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "a"}\n{"text": "b"}\n')
    CrudeJsonlDatasetFactory.prepare_dataset(path)
    assert split_size(path, "train") == 2
    with pytest.raises(NoSplitError, match="has no 'val' split"):
        split_size(path, "val")


def test_what_is_no_data_set_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing is there"):
        split_size(tmp_path / "gone", "train")
    with pytest.raises(ValueError, match="energon prepare"):
        split_size(tmp_path, "train")


@pytest.fixture
def yaml(tmp_path: Path) -> Callable[[str], Path]:
    """`yaml(train) -> path` writes a metadataset beside the data sets a and b of 12 samples each."""
    for name in "ab":
        write_dataset(tmp_path / name, range(12), shards=2)
    return lambda train: write_metadataset(tmp_path / "metadataset.yaml", train)


COUNTED = [
    ("{path: a, subset: {range: [0%, 25%]}}", 3),
    ("{path: a, subset: {range: [5, 8]}}", 3),
    ("{path: a, subset: {range: [5, end]}}", 7),
    ("{blend: [{path: a, weight: 0.9}, {path: b, weight: 0.1, subset: {range: [0, 4]}}]}", 16),
    ("{blend: [{path: a, subset: {range: [2, 10]}}, {path: b}], subset: {range: [50%, 100%]}}", 10),
    ("{blend_epochized: [{path: a, repetitions: 3}, {path: b, repetitions: 0.5}]}", 42),
    ("{blend_epochized: [{path: a, repetitions: 2, subset: {range: [0%, 50%]}}, {path: b}]}", 24),
]


@pytest.mark.parametrize(("train", "samples"), COUNTED)
def test_subset_and_repetitions_count(yaml: Callable[[str], Path], train: str, samples: int) -> None:
    path = yaml(train)
    assert split_size(path, "train") == samples
    assert len(LengthPoolDataModule(path, LengthEncoder(), 1, rank=1, world_size=2).train_dataloader()) == samples // 2


@pytest.mark.parametrize("train", [train for train, _ in COUNTED])
def test_workers_have_what_energon_gives_them(yaml: Callable[[str], Path], train: str) -> None:
    path, source = yaml(train), Source(yaml(train), LengthEncoder())
    settings = PoolSettings(policy="none")
    dealt = []
    for rank in range(2):
        config = WorkerConfig(rank=rank, world_size=2, num_workers=2)
        pool = source.training(settings, config).pool
        dealt += [pool.dataset.len_worker(worker) for worker in range(2)]
    assert worker_samples(path, "train", 4).sum(axis=0).tolist() == dealt


@pytest.mark.parametrize("train", ["{path: a, subset: {range: [0%, 25%]}}", "{path: a, subset: {range: [5, 8]}}"])
def test_samples_outside_a_subset_are_no_samples_for_a_worker(yaml: Callable[[str], Path], train: str) -> None:
    with pytest.raises(ValueError, match="has 3 samples for 4 ranks x 2 workers, and each needs one. .* set it lower"):
        require_samples(yaml(train), "train", 8, "4 ranks x 2 workers", "set it lower")


def test_a_worker_that_gets_nothing_of_enough_samples_is_noticed(yaml: Callable[[str], Path]) -> None:
    part = "subset: {range: [0, 2]}"
    path = yaml(f"{{blend: [{{path: a, {part}}}, {{path: b, {part}}}]}}")  # of both the same two workers get one
    with pytest.raises(ValueError, match="has 4 samples for 4 ranks, of which 2 would get none, and each needs one"):
        require_samples(path, "train", 4, "4 ranks", "")
    require_samples(path, "train", 2, "2 ranks", "")
    assert [workers_with_samples(path, "train", ranks, 8) for ranks in (1, 2, 4)] == [2, 1, 0]


def test_a_data_set_that_not_all_workers_have_is_named(yaml: Callable[[str], Path]) -> None:
    path = yaml("{blend: [{path: a}, {path: b, subset: {range: [0, 3]}}]}")
    with pytest.warns(
        UserWarning, match="data set 'b' of .* has samples for 3 of 4 only .4 ranks.: the others"
    ) as warned:
        require_samples(path, "train", 4, "4 ranks", "")
    assert len(warned) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        require_samples(path, "train", 3, "3 ranks", "")


def test_a_repetition_of_less_than_a_sample_is_none(yaml: Callable[[str], Path]) -> None:
    path = yaml("{blend_epochized: [{path: a, repetitions: 0.1}, {path: b, repetitions: 0.1}]}")
    with pytest.raises(ValueError, match="has 0 samples for 2 ranks, and each needs one"):
        require_samples(path, "train", 2, "2 ranks", "")


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ("{path: a, subset: {range: [0, 99]}}", "end_samples=99 > total_samples=12"),
        ("{path: a, subset: {range: [50%, end]}}", "NoneType"),
        ("{path: a, subset: {range: [80%, 50%]}}", "Start must be less than end"),
    ],
)
def test_a_subset_that_cannot_be_is_an_error_that_names_the_yaml(
    yaml: Callable[[str], Path], train: str, message: str
) -> None:
    with pytest.raises(ValueError, match=f"metadataset.yaml cannot be read as its YAML says: .*{message}.* Correct"):
        require_samples(yaml(train), "train", 1, "1 rank", "")


def test_counting_prints_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "a"}\n' * 8)
    CrudeJsonlDatasetFactory.prepare_dataset(path)
    assert worker_samples(path, "train", 8).tolist() == [[1] * 8]
    assert capsys.readouterr().out == ""
