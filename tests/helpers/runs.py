"""Files of a run, and configurations."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from lightning_lengthpool.runs.steps.columns import COLUMNS
from lightning_lengthpool.runs.steps.steps_file import StepsFile


def write_run(
    path: Path,
    ranks: int = 3,
    steps: int = 200,
    *,
    spread: float = 0.05,
    slow: float = 1.0,
    measured: bool = True,
    shift: float = 0.0,
    max_rows: int | None = None,
    first: int = 0,
) -> Path:
    """Made-up records: lengths that differ between ranks by `spread`, on rank 1 by `shift`; rank 1 is `slow`."""
    rng = np.random.default_rng(0)
    longest = np.round(rng.lognormal(6, 0.7, (steps, 1)) * rng.lognormal(0, spread, (steps, ranks))) + 1
    compute = (0.02 + 1e-4 * longest) * rng.lognormal(0, 0.01, longest.shape)
    if ranks > 1:
        longest[:, 1] = np.round(longest[:, 1] * np.exp(shift))
        compute[:, 1] *= slow
    slowest = compute.max(axis=1, keepdims=True)
    grid = {name: np.ones((steps, ranks)) for name in COLUMNS} | {
        "step": np.repeat(np.arange(float(first), first + steps)[:, None], ranks, axis=1),
        "rank": np.tile(np.arange(float(ranks)), (steps, 1)),
        "tokens": longest,
        "longest": longest,
        "padded_tokens": longest,
        "data_seconds": np.full((steps, ranks), 1e-4),
        "compute_seconds": compute if measured else np.full((steps, ranks), np.nan),
        "wait_seconds": slowest - compute if measured else np.full((steps, ranks), np.nan),
        "step_seconds": np.tile(slowest, ranks) + 1e-4,
    }
    file = StepsFile(path, max_rows)
    file.start(first)
    file.append({name: values.ravel() for name, values in grid.items()})
    return path


def config(accumulate: int = 1, max_steps: int = -1, **data: Any) -> dict[str, Any]:
    settings = {"pool_size": 300, "batch_size": 1, "num_workers": 0, **data}
    return {
        "seed_everything": 1,
        "trainer": {"accumulate_grad_batches": accumulate, "max_steps": max_steps},
        "data": SimpleNamespace(get=lambda key: settings if key == "init_args" else None),
    }
