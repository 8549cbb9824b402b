"""What stands at a path: the splits of an energon data set, and clear errors where there are none."""

import hashlib
import json
from pathlib import Path
from typing import Any

from megatron.energon import WorkerConfig
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.empty_dataset_error import EmptyDatasetError
from megatron.energon.flavors.webdataset.metadata import EnergonDatasetType, get_dataset_type
from megatron.energon.metadataset.loader import load_dataset


class NoSplitError(ValueError):
    """The data set has no such split, or an empty one."""


def split_size(path: str | Path, split: str) -> int:
    """Samples of a split over all ranks; raises what `load_split` raises."""
    return sum(map(len, load_split(path, split)))


def require_samples(path: str | Path, split: str, needed: int, for_whom: str, way_out: str) -> None:
    """Check that a split has a sample for everyone who needs one.

    Raises:
        ValueError: If it has not; the message names the counts. What `load_split` raises, too.
    """
    if (samples := split_size(path, split)) < needed:
        raise ValueError(
            f"the {split} split of {path} has {samples} samples for {for_whom}, and each needs one. Use fewer ranks, a "
            f"larger split, or {way_out}."
        )


def describe_split(path: str | Path, split: str) -> str:
    """A short text that differs if the split's samples or their order do, wherever the data set lies."""
    parts = load_split(path, split)
    shards = [[shard.name, shard.count] for part in parts for shard in getattr(part, "shards", [])]
    digest = hashlib.sha256(json.dumps([shards, list(map(len, parts))]).encode()).hexdigest()[:8]
    return f"{sum(map(len, parts))} samples in {len(shards)} shards of {len(parts)} data sets ({digest})"


def load_split(path: str | Path, split: str) -> list[Any]:
    """The data sets (energon's factories) that make up a split.

    Raises:
        FileNotFoundError: If there is nothing at `path`.
        ValueError: If it is not a prepared energon data set.
        NoSplitError: If the data set has no such split, or an empty one.
    """
    where = EPath(path)
    if not (where.is_file() or where.is_dir()):
        raise FileNotFoundError(f"path is {str(path)!r}, but nothing is there. Set it to an energon data set.")
    kind = get_dataset_type(where)
    if kind in (EnergonDatasetType.INVALID, EnergonDatasetType.FILESYSTEM):
        raise ValueError(
            f"path is {str(path)!r}, which is not a prepared energon data set: it is neither a folder with a "
            f"finished '.nv-meta' nor a metadataset YAML. Prepare a folder of tar shards with "
            f"'energon prepare {path}'."
        )
    missing = NoSplitError(
        f"{path} has no {split!r} split, or an empty one. Its splits stand in '.nv-meta/split.yaml' (in the YAML of a "
        "metadataset under 'splits')."
    )
    if kind is EnergonDatasetType.JSONL and split != "train":
        raise missing  # energon would give all samples as any split
    try:
        datasets = load_dataset(path).get_datasets(
            training=split == "train", split_part=split, worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0)
        )
    except (EmptyDatasetError, KeyError, AssertionError) as error:  # energon's three ways to say it
        if isinstance(error, EmptyDatasetError) or repr(split) in str(error):
            raise missing from error
        raise
    return [loaded.dataset for loaded in datasets.datasets]
