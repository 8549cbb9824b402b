"""Scans of lengths and plans for the advisor."""

from functools import partial

import numpy as np
import pytest

from lightning_lengthpool.advise import advisor
from lightning_lengthpool.advise.advisor import Plan
from lightning_lengthpool.advise.scan.scan import BatchCheck, Stream, Survey
from lightning_lengthpool.simulation.predict import predict

POOL = Plan(policy="pool", pool_size=1000, batch_size=1, num_workers=2, world_size=8, is_active=True)


OFF = Plan(policy="none", pool_size=0, batch_size=1, num_workers=2, world_size=8)


@pytest.fixture(scope="module", autouse=True)
def short_simulations():
    """Predictions by fewer steps: enough for settings that are far apart."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(advisor, "predict", partial(predict, steps=250))
        yield


def heavy(rng, count):
    """Heavy-tailed lengths, as of answers of a language model."""
    return np.minimum(rng.lognormal(6.5, 0.9, count), 16_000).round()


def surveyed(draw=heavy, ranks=8, workers=2, samples=300, seed=0, **changes):
    """A survey of clean data: `draw(rng, count)` gives each worker's stream."""
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
    return Survey(ranks=ranks, num_workers=workers, streams=tuple(streams), **(values | changes))
