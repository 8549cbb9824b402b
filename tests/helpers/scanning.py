"""Length scans of a data module's training data."""

from typing import Any

from lightning_lengthpool import LengthPoolDataModule
from lightning_lengthpool.advise.scan.length_scan import LengthScan
from lightning_lengthpool.advise.scan.scan import scan_lengths


def scan_module(module: LengthPoolDataModule, ranks: int, samples: int, **options: Any) -> LengthScan:
    """The length scan of a data module's training data."""
    return scan_lengths(module.source, module.settings, ranks, samples, class_fn=module.class_fn, **options)
