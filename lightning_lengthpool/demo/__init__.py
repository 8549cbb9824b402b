"""The embedded demo: a data set of real input, a task encoder and a small vision-language model."""

from lightning_lengthpool.demo.datamodule import DemoDataModule
from lightning_lengthpool.demo.model import OcrModel
from lightning_lengthpool.demo.task_encoder import OcrTaskEncoder

__all__ = ["DemoDataModule", "OcrModel", "OcrTaskEncoder"]
