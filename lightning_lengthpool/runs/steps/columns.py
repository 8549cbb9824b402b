"""The columns of a step record, and of `steps.csv`: one row for each micro-batch on each rank.

A new column takes its name here, its value in `monitor.recorder` in the same position, and in `records.by_step` how the
micro-batches of a step are joined, if they are not added up. A file with other columns is refused.
"""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

COLUMNS = (
    "step",
    "rank",
    "samples",
    "tokens",
    "longest",
    "padded_tokens",
    "misses",
    "data_seconds",
    "compute_seconds",
    "wait_seconds",
    "step_seconds",
)
