"""Length scans, plans and cases for the advisor."""

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np

from helpers.lengths import heavy_tailed
from lightning_lengthpool.advise.advice import Plan
from lightning_lengthpool.advise.advisor import advise
from lightning_lengthpool.advise.scan.length_scan import BatchCheck, LengthScan, Stream
from lightning_lengthpool.ordering.settings import PoolSettings
from lightning_lengthpool.simulation.cases import Case

POOL = Plan(PoolSettings(pool_size=1000, batch_size=1), num_workers=2, world_size=8)
OFF = Plan(PoolSettings(policy="none", pool_size=0, batch_size=1), num_workers=2, world_size=8)

advise_quickly = partial(advise, steps=250)  # enough for settings that are far apart


def changed_plan(plan: Plan, **changes: Any) -> Plan:
    """The plan with other values, the pool's settings among them."""
    names = {field.name for field in fields(PoolSettings)}
    settings = replace(plan.settings, **{name: value for name, value in changes.items() if name in names})
    return replace(plan, settings=settings, **{name: value for name, value in changes.items() if name not in names})


def case_of(policy: str, pool_size: int, world_size: int, batch_size: int | None, **changes: Any) -> Case:
    """A case by its numbers."""
    budget = changes.pop("max_tokens", None)
    return Case(PoolSettings(batch_size, pool_size, policy, max_tokens=budget), world_size, **changes)


def changed_case(case: Case, **changes: Any) -> Case:
    """The case with other settings of its pool."""
    return replace(case, settings=replace(case.settings, **changes))


def scanned(
    draw: Callable[..., Any] = heavy_tailed,
    ranks: int = 8,
    workers: int = 2,
    samples: int = 300,
    seed: int = 0,
    **changes: Any,
) -> LengthScan:
    """A length scan of clean data: `draw(rng, count)` gives each worker's stream."""
    rng = np.random.default_rng(seed)
    streams = []
    for rank in range(ranks):
        for worker in range(workers):
            lengths = draw(rng, samples)
            streams.append(Stream(rank, worker, lengths, lengths))
    values = {
        "rank_samples": (50_000,) * ranks,
        "sample_bytes": 40_000.0,
        "encode_seconds": 0.004,
        "restore_seconds": 0.003,
        "batch_checks": (BatchCheck("shard.tar/1", 800.0, 801.0, "input_ids"),),
        "asked": ranks * workers * samples,
    }
    return LengthScan(ranks=ranks, num_workers=workers, streams=tuple(streams), **(values | changes))
