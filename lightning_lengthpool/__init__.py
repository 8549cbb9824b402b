"""Length-synchronised training data for PyTorch Lightning and megatron-energon.

Each data-parallel rank keeps a pool of encoded samples, orders it by length and draws from it with a random
sequence that all ranks share, so that at every step all ranks train on about the same length. The two names
that a training script needs are exported here; they are imported on first use, so that a pure module such as
`lightning_lengthpool.ordering.policies` loads neither torch nor Lightning.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_lengthpool.data.datamodule import LengthPoolDataModule
    from lightning_lengthpool.monitor.callback import SyncMonitor

__version__ = "0.1.0"
__all__ = ["LengthPoolDataModule", "SyncMonitor", "__version__"]

_EXPORTS = {
    "LengthPoolDataModule": "lightning_lengthpool.data.datamodule",
    "SyncMonitor": "lightning_lengthpool.monitor.callback",
}


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
