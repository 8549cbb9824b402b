"""What stands at a path: the splits of an energon data set, and clear errors where there are none."""

import contextlib
import io
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn
from megatron.energon import WorkerConfig
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.empty_dataset_error import EmptyDatasetError
from megatron.energon.flavors.webdataset.metadata import EnergonDatasetType, get_dataset_type
from megatron.energon.metadataset.loader import load_dataset
from megatron.energon.metadataset.loader_interface import LoadedDataset
from numpy.typing import NDArray

from lightning_lengthpool.data.reading.paths import data_path


class NoSplitError(ValueError):
    """The data set has no such split, or an empty one."""


def split_size(path: str | Path, split: str) -> int:
    """Samples of a pass over a split on all ranks together; raises what `load_split` raises.

    `subset` and `repetitions` of a metadataset count, as energon reads them; the weights of a blend do not.
    """
    return int(worker_samples(path, split, 1).sum())


def require_samples(path: str | Path, split: str, needed: int, for_whom: str, way_out: str) -> None:
    """Check that a split has a sample for everyone who needs one."""
    by_worker = worker_samples(path, split, needed)
    samples, without = int(by_worker.sum()), int((by_worker.sum(axis=0) <= 0).sum())
    if without:
        some = "" if samples < needed else f", of which {without} would get none"
        raise ValueError(
            f"the {split} split of {path} has {samples} samples for {for_whom}{some}, and each needs one. Use fewer "
            f"ranks, a larger split, or {way_out}."
        )
    if split == "train" and (by_worker <= 0).any():
        for one, has in zip(load_split(path, split), (by_worker > 0).sum(axis=1), strict=True):
            if has < needed:
                rank_zero_warn(
                    f"the data set {name_of(one.dataset)!r} of {path} has samples for {has} of {needed} only "
                    f"({for_whom}): the others draw from the rest of the blend, so it comes less often than it should"
                )


def workers_with_samples(path: str | Path, split: str, ranks: int, most: int) -> int:
    """The most workers of a rank, up to `most`, of which each has a sample; 0 if there is no such number."""
    most = min(most, split_size(path, split) // ranks)
    possible = (n for n in range(most, 0, -1) if worker_samples(path, split, ranks * n).sum(axis=0).all())
    return next(possible, 0)


def worker_samples(path: str | Path, split: str, workers: int) -> NDArray[np.int64]:
    """Samples of a pass for each worker of all ranks, as energon deals them: `[data sets of the split, workers]`."""
    loaded = load_split(path, split, workers)
    rows, before = [], 0
    for one in loaded:
        try:
            with _quiet():
                dataset = one.dataset.build(worker_rotation_offset=before % workers)
        except AssertionError as error:  # a subset that the data set has not
            raise _wrong_yaml(path, split, error) from error
        repetitions = 1 if one.repetitions is None or split != "train" else one.repetitions  # energon validates once
        rows.append([int(dataset.len_worker(worker) * repetitions) for worker in range(workers)])
        before += len(one.dataset)
    return np.array(rows, dtype=np.int64)


def load_split(path: str | Path, split: str, workers: int = 1) -> list[LoadedDataset]:
    """The data sets that make up a split, each with its weight or repetitions, dealt out to so many workers.

    Raises `FileNotFoundError` if there is nothing at `path`, `NoSplitError` if the data set has no such split or an
    empty one, and `ValueError` if it is not a prepared energon data set.
    """
    path = data_path(path)
    where = EPath(path)
    if not (where.is_file() or where.is_dir()):
        raise FileNotFoundError(f"path is {str(path)!r}, but nothing is there. Set it to an energon data set.")
    dataset_type = get_dataset_type(where)
    if dataset_type in (EnergonDatasetType.INVALID, EnergonDatasetType.FILESYSTEM):
        raise ValueError(
            f"path is {str(path)!r}, which is not a prepared energon data set: it is neither a folder with a "
            f"finished '.nv-meta' nor a metadataset YAML. Prepare a folder of tar shards with "
            f"'energon prepare {path}'."
        )
    missing = NoSplitError(
        f"{path} has no {split!r} split, or an empty one. Its splits stand in '.nv-meta/split.yaml' (in the YAML of a "
        "metadataset under 'splits')."
    )
    if dataset_type is EnergonDatasetType.JSONL and split != "train":
        raise missing  # energon would give all samples as any split
    try:
        config = WorkerConfig(rank=0, world_size=1, num_workers=workers)
        with _quiet():
            loaded = load_dataset(path).get_datasets(training=split == "train", split_part=split, worker_config=config)
    except (EmptyDatasetError, KeyError, AssertionError, TypeError) as error:
        if isinstance(error, EmptyDatasetError) or repr(split) in str(error):  # energon's ways to say it
            raise missing from error
        if not isinstance(error, KeyError):
            raise _wrong_yaml(path, split, error) from error
        raise
    return loaded.datasets


def name_of(factory: Any) -> str:
    """The name of a data set for messages; of joined ones, all names."""
    return " + ".join(source.name for source in getattr(factory, "inner_datasets", [factory]))


def _wrong_yaml(path: object, split: str, error: Exception) -> ValueError:
    return ValueError(f"the {split} split of {path} cannot be read as its YAML says: {error}. Correct the YAML.")


def _quiet() -> contextlib.AbstractContextManager[object]:
    """energon prints a line for each worker of a JSONL file, and for each joined data set."""
    return contextlib.redirect_stdout(io.StringIO())
