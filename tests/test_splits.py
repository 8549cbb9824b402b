from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_lengthpool.splits import NoSplitError, split_size


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
    from megatron.energon.flavors.jsonl.crude_jsonl_dataset import CrudeJsonlDatasetFactory

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
