"""Encoders and checks of runs that go on from a checkpoint."""

import io
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.energon import DefaultTaskEncoder, SkipSample, TextSample, edataclass, stateless

from helpers.datasets import LengthSample
from helpers.lengths import lognormal
from helpers.save_load import check_save_and_load
from lightning_lengthpool import LengthPoolDataModule
from lightning_lengthpool.ordering.sorted_pool import SNAPSHOT_SAMPLES

LENGTHS = lognormal(150, seed=2, mu=4)
BATCHES = 60


@edataclass
class NoisySample(LengthSample):
    noise: tuple[float, ...]


class NoisyEncoder(DefaultTaskEncoder):
    """Draws random numbers at every stage; some samples fail before the pool and some after it."""

    def __init__(self, bad: bool = True) -> None:
        super().__init__()
        self.bad = bad

    @stateless(restore_seeds=True)
    def preencode_sample(self, sample: TextSample) -> NoisySample:
        if self.bad and int(sample.__key__[-2:]) == 13:
            raise SkipSample
        return NoisySample.derive_from(
            sample, total_len=int(sample.text), noise=(random.random(), float(torch.rand(1)))
        )

    @stateless(restore_seeds=True)
    def postencode_sample(self, sample: NoisySample) -> NoisySample:
        if self.bad and int(sample.__key__[-2:]) % 17 == 5:
            raise SkipSample
        return NoisySample.extend(sample, noise=(*sample.noise, random.random()))

    @stateless(restore_seeds=True)
    def batch(self, samples: list[NoisySample]) -> list[Any]:
        return [random.random(), *((sample.__key__, sample.noise) for sample in samples)]

    @stateless(restore_seeds=True)
    def encode_batch(self, batch: list[Any]) -> list[Any]:
        return [random.random(), self.current_batch_index, *batch]


def module(path: Path, **settings: Any) -> LengthPoolDataModule:
    defaults = {"batch_size": 2, "pool_size": 12, "num_workers": 0, "virtual_epoch_length": 1000}
    encoder = settings.pop("encoder", None) or NoisyEncoder()
    snapshot_samples = settings.pop("snapshot_samples", SNAPSHOT_SAMPLES)
    made = LengthPoolDataModule(path, encoder, **(defaults | settings))
    made.source = replace(made.source, snapshot_samples=snapshot_samples)
    return made


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def check_resume(make: Callable[[], LengthPoolDataModule], stops: list[int], batches: int = BATCHES) -> None:
    """Stop a data module after each of `stops`, through a checkpoint: all must be as in a run without a stop."""
    made: list[LengthPoolDataModule] = []

    def start(state: dict[str, Any] | None) -> tuple[Iterator[Any], Callable[[], dict[str, Any]]]:
        for before in made:
            before.teardown("fit")
        made[:] = [make()]
        made[0].load_state_dict(state or {})
        return iter(made[0].train_dataloader()), made[0].state_dict

    check_save_and_load(start, batches, stops, through_a_file)
    made[0].teardown("fit")


class PackingEncoder(NoisyEncoder):
    def select_samples_to_pack(self, samples: list[NoisySample]) -> list[list[NoisySample]]:
        return [samples[i : i + 3] for i in range(0, len(samples), 3)]

    @stateless(restore_seeds=True)
    def pack_selected_samples(self, samples: list[NoisySample]) -> NoisySample:
        noise = (random.random(), *(number for sample in samples for number in sample.noise))
        return NoisySample.extend(
            samples[0],
            __key__="+".join(sample.__key__ for sample in samples),
            total_len=sum(sample.total_len for sample in samples),
            noise=noise,
        )
