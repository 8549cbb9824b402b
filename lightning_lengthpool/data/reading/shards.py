"""Where energon reads: a shard that cannot be read is named, each sample that is read is counted, and a batch tells it.

energon's readers say what is wrong with a tar ("empty header"), but not with which one.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from megatron.energon import SavableDataset, WorkerConfig
from megatron.energon.errors import FatalSampleError
from megatron.energon.flavors.webdataset.sample_loader import WebdatasetSampleLoaderDataset
from megatron.energon.wrappers.base import BaseWrapperDataset


class ShardError(FatalSampleError):
    """A file of the data set that cannot be read."""


class ReadCounter(Protocol):
    """Counts what is read."""

    def read(self, worker_config: WorkerConfig) -> None:
        """One more sample was read, in its turn in the stream."""


class _Source(WebdatasetSampleLoaderDataset):
    """energon's loader of samples, of all its data set flavors."""

    counter: ReadCounter | None

    def _get_sample(self, index: int) -> Any:
        if self.counter is not None:
            self.counter.read(self.worker_config)
        return self._named(index)

    def restore_sample(self, restore_key: Any) -> Any:
        _, index = restore_key
        return self._named(index)  # out of turn: not counted

    def _named(self, index: int) -> Any:
        try:
            return super()._get_sample(index)
        except Exception as error:
            shards = " or ".join(_shard(reader, index) for reader in self.join_readers)
            raise ShardError(
                f"{shards} cannot be read ({type(error).__name__}: {error}): the file is damaged, incomplete or gone. "
                "Restore it; or, if it was changed on purpose, run 'energon prepare' on its data set again."
            ) from error


_Source.__name__ = WebdatasetSampleLoaderDataset.__name__  # which stands in the iterator state


def watch_sources(dataset: SavableDataset, counter: ReadCounter | None = None) -> None:
    """Let a data set, as energon built it, name the shard that it cannot read, and count what it reads."""
    for part in parts_of(dataset):
        if type(part) is WebdatasetSampleLoaderDataset:
            part.__class__ = _Source
            part.counter = counter


def parts_of(dataset: SavableDataset) -> Iterator[Any]:
    """A data set and all that it is built of."""
    yield dataset
    if isinstance(dataset, BaseWrapperDataset):
        for inner in dataset.datasets:
            yield from parts_of(inner)


def _shard(reader: Any, index: int) -> str:
    """The path of the file in which a reader's sample lies."""
    if hasattr(reader, "jsonl_path"):
        return str(reader.jsonl_path)
    if hasattr(reader, "shard_infos"):
        return str(reader.shard_infos[bisect_right(reader.shard_count_cumsum, index) - 1].path)
    try:  # of joined data sets
        return str(reader.tar_filepaths[reader._get_itar_sample_pointer(index).tar_file_id])
    except Exception:
        return f"a shard of {reader.base_path}"


class Sources:
    """A batch's `__sources__`, in a wrapping that Lightning does not look into; iterate over it.

    Lightning takes a batch apart to move its tensors to the device, and refuses the frozen dataclasses with which
    energon tells where each sample was read.
    """

    def __init__(self, sources: Iterable[Any]) -> None:
        self._sources = tuple(sources)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._sources)

    def __repr__(self) -> str:
        return f"Sources{self._sources}"


def shield_sources(batch: Any) -> Any:
    """Wrap a batch's `__sources__`, or those of each sample of a list, as `Sources`; returns the batch."""
    if isinstance(batch, (list, tuple)):
        for sample in batch:
            shield_sources(sample)
    elif isinstance(batch, dict):
        if isinstance(batch.get("__sources__"), (list, tuple)):
            batch["__sources__"] = Sources(batch["__sources__"])
    elif isinstance(getattr(batch, "__sources__", None), (list, tuple)):
        batch.__sources__ = Sources(batch.__sources__)
    return batch
