"""The demo's data: the embedded data sets under `LengthPoolDataModule`."""

from typing import Any, Literal

import torch

from lightning_lengthpool.data.datamodule import LengthPoolDataModule
from lightning_lengthpool.demo.build import dataset_path, ensure_dataset
from lightning_lengthpool.demo.task_encoder import OcrTaskEncoder


class DemoDataModule(LengthPoolDataModule):
    """Pictures of the Python standard library's own functions, to be read and written down as text.

    The data set is built on first use, from the source files on this machine, into a cache folder
    (`$LENGTHPOOL_CACHE`, else `~/.cache/lightning_lengthpool`).

    Args:
        dataset: 'code' for 4,000 functions, 'blend' for a metadataset of these and of docstrings.
        batch_size: Samples of a micro-batch.
        **kwargs: Settings of `LengthPoolDataModule`, but for `path` and `task_encoder`.
    """

    def __init__(self, dataset: Literal["code", "blend"] = "code", batch_size: int = 1, **kwargs: Any) -> None:
        super().__init__(dataset_path(dataset), OcrTaskEncoder(), batch_size, **kwargs)
        self.dataset = dataset

    def prepare_data(self) -> None:
        """Build the data set if it is not there yet; Lightning calls this once on each machine."""
        ensure_dataset(self.dataset)

    def setup(self, stage: str) -> None:
        """As `prepare_data`, and give each of the ranks that share this machine's CPUs one thread."""
        self.prepare_data()
        if self.trainer is not None and self.trainer.strategy.root_device.type == "cpu":
            torch.set_num_threads(1)
        super().setup(stage)
