"""Encoders and checks of runs that go on from a checkpoint."""

import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.energon import DefaultTaskEncoder, SkipSample, TextSample, edataclass, stateless

from helpers.datasets import LengthSample
from helpers.lengths import lognormal
from lightning_lengthpool import LengthPoolDataModule

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
    return LengthPoolDataModule(path, encoder, **(defaults | settings))


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def check_resume(make: Callable[[], LengthPoolDataModule], stops: list[int], batches: int = BATCHES) -> None:
    """Stop after each of `stops` and go on from there: all must be as in a run without a stop."""
    whole = make()
    loader = whole.train_dataloader()
    expected = [batch for _, batch in zip(range(batches), loader, strict=False)]
    whole.teardown("fit")
    state: dict[str, Any] = {}
    done = 0
    for stop in [*stops, batches]:
        part = make()
        part.load_state_dict(state)
        loader = part.train_dataloader()
        stream = iter(loader)
        got = [next(stream) for _ in range(stop - done)]
        assert got == expected[done:stop]
        done, state = stop, through_a_file(part.state_dict())
        part.teardown("fit")


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
