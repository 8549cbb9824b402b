"""Small energon data sets whose samples are their own lengths, and a file of step records."""

import gc
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.datasets import write_dataset
from lightning_lengthpool.runs.steps.columns import COLUMNS


@pytest.fixture
def dataset(tmp_path: Path) -> Callable[..., Path]:
    """`dataset(lengths, val=..., shards=...) -> path` writes a data set of its own."""
    count = iter(range(1000))
    return lambda lengths, **kwargs: write_dataset(tmp_path / f"data{next(count)}", lengths, **kwargs)


# two ranks; step 4 has two micro-batches, step 5 one, and in step 6 rank 1's compute is absent
STEP_ROWS = """\
4,0,2,8,5,10,0,0.5,1.0,2.0,4.0
4,1,2,10,5,10,0,0.7,3.0,0.1,4.0
4,0,1,6,6,6,0,0.0,2.0,0.0,2.0
4,1,1,4,4,4,0,0.1,1.0,1.0,2.0
5,0,1,9,9,9,0,0.0,2.0,2.0,5.0
5,1,1,12,12,12,0,0.2,4.0,0.0,6.0
6,0,2,2,1,2,0,0.0,1.0,0.0,4.0
6,1,2,3,2,4,0,0.0,,,3.0
"""


@pytest.fixture
def steps_csv(tmp_path: Path) -> Path:
    """A `steps.csv` of two ranks."""
    path = tmp_path / "steps.csv"
    path.write_text(f"{','.join(COLUMNS)}\n{STEP_ROWS}")
    return path


@pytest.fixture(autouse=True)
def quick_garbage_collection() -> None:
    """energon collects garbage whenever a loader starts; what is imported by now is none, and takes the longest."""
    gc.freeze()
