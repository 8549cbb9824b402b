"""Where samples come from: the data set, the encoder, and how energon batches, buffers and loads them.

Whatever reads the data does it through one `Source`: training, its trial run, evaluation and the advisor's length scan.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

from megatron.energon import SavableDataset, TaskEncoder, WorkerConfig, get_train_dataset, get_val_dataset
from megatron.energon.epathlib import EPath

from lightning_lengthpool.data.pools.dataset import LengthPoolDataset
from lightning_lengthpool.data.reading.paths import data_path
from lightning_lengthpool.data.reading.shards import watch_sources
from lightning_lengthpool.data.reading.splits import require_samples, split_size
from lightning_lengthpool.data.task_encoder import check_encoder, length_pool, require_length_pool
from lightning_lengthpool.ordering.settings import PoolSettings, check_integer
from lightning_lengthpool.ordering.sorted_pool import SNAPSHOT_SAMPLES

DataPath: TypeAlias = str | Path | EPath

_FEW_SAMPLES = 16  # that a trial packs from


class Training(NamedTuple):
    """Training data as energon reads them."""

    dataset: SavableDataset  # for a loader; it yields `PooledBatch`es
    pool: LengthPoolDataset  # the length pool in it; its `dataset` gives the encoded samples as they come to the pool


@dataclass(frozen=True)
class Source:
    """Where samples come from: settings of `LengthPoolDataModule`, but that `val_batch_size` is None only for packs."""

    path: DataPath
    task_encoder: TaskEncoder
    val_path: DataPath | None = None
    val_batch_size: int | None = None
    num_workers: int = 2
    shuffle_buffer_size: int | None = None
    packing_buffer_size: int | None = None
    max_samples_per_sequence: int | None = None
    failure_tolerance: int | None = None
    skip_tolerance: int = 10_000
    snapshot_samples: int = SNAPSHOT_SAMPLES  # that come in at least between two snapshots of a worker's pool

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", data_path(self.path))
        if self.val_path is not None:
            object.__setattr__(self, "val_path", data_path(self.val_path, "val_path"))
        for name in ("shuffle_buffer_size", "packing_buffer_size", "max_samples_per_sequence", "val_batch_size"):
            self._set_integer(name, 1, optional=True)
        self._set_integer("num_workers", 0)
        self._set_integer("failure_tolerance", 0, "0 for no limit", optional=True)
        self._set_integer("skip_tolerance", 0, "0 for no limit")
        check_encoder(self.task_encoder)

    def _set_integer(self, name: str, minimum: int, hint: str = "", *, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is not None or not optional:  # NumPy's integers would not load from a checkpoint
            object.__setattr__(self, name, check_integer(name, value, minimum=minimum, hint=hint))

    @property
    def eval_path(self) -> DataPath:
        """The data set of validation and test."""
        return self.path if self.val_path is None else self.val_path

    @property
    def encoder_name(self) -> str:
        """The encoder's class, for messages."""
        return type(self.task_encoder).__qualname__

    def small(self) -> "Source":
        """The same for a few batches that come soon: without a shuffle buffer, packed from a few samples."""
        packing = self.packing_buffer_size
        few = None if packing is None else min(packing, _FEW_SAMPLES)
        return replace(self, shuffle_buffer_size=None, packing_buffer_size=few)

    def training(self, settings: PoolSettings, workers: WorkerConfig) -> Training:
        """The endless stream of training batches of one rank."""
        with length_pool(
            self.task_encoder, settings, self.failure_tolerance, self.skip_tolerance, self.snapshot_samples
        ):
            dataset = get_train_dataset(
                self.path,
                worker_config=workers,
                batch_size=settings.batch_size,
                shuffle_buffer_size=self.shuffle_buffer_size,
                packing_buffer_size=self.packing_buffer_size,
                max_samples_per_sequence=self.max_samples_per_sequence,
                task_encoder=self.task_encoder,
            )
        return Training(dataset, require_length_pool(dataset, self.task_encoder))

    def evaluation(self, split: str, workers: WorkerConfig) -> SavableDataset:
        """A split of the evaluation data, once, in batches of `val_batch_size`."""
        dataset = get_val_dataset(
            self.eval_path,
            split_part=split,
            worker_config=workers,
            batch_size=self.val_batch_size,
            packing_buffer_size=self.packing_buffer_size,
            task_encoder=self.task_encoder,
        )
        watch_sources(dataset)
        return dataset

    def training_samples(self) -> int:
        """Samples of a pass over the training split, of all ranks together; raises as `splits.split_size`."""
        return split_size(self.path, "train")

    def require_samples(self, ranks: int) -> None:
        """Check that each worker of so many ranks has a sample of the training split; raises as `require_samples`."""
        workers = max(1, self.num_workers)
        require_samples(
            self.path, "train", ranks * workers, f"{ranks} ranks x {workers} workers", "set num_workers lower"
        )
