"""A resumed run that meets other samples than were recorded says so, or refuses."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from megatron.energon import DefaultTaskEncoder, SkipSample, TextSample, stateless

from helpers.datasets import LengthEncoder, LengthSample
from helpers.pools import take
from helpers.resuming import LENGTHS
from lightning_lengthpool import LengthPoolDataModule

DIFFERENT = "the data do not go on exactly; rank 0, worker 0: "
REFUSED = r"the data cannot go on exactly \(resume is 'exact'\); rank 0, worker 0: "
POLICIES = ["none", "pool", "blocks", "stream"]


class Flaky(LengthEncoder):
    """Fails with one of the samples that it reads, or with one key."""

    def __init__(self, fails_at: int | None = None, bad_key: str | None = None) -> None:
        super().__init__()
        self.fails_at, self.bad_key = fails_at, bad_key
        self.read = 0

    @stateless
    def encode_sample(self, sample: TextSample) -> LengthSample:
        self.read += 1
        if self.read == self.fails_at or sample.__key__ == self.bad_key:
            raise OSError("planted")
        return super().encode_sample(sample)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_read_that_failed_once_is_no_silent_difference(
    dataset: Callable[..., Path], policy: str, num_workers: int
) -> None:
    path, settings = dataset(LENGTHS), {"policy": policy, "num_workers": num_workers}
    _, state, _ = take(path, Flaky(fails_at=15), 8, **settings)
    with pytest.raises(ValueError, match=REFUSED + "the samples that had come in since .*(?s:.*)'auto'"):
        take(path, Flaky(), 1, state, resume="exact", **settings)
    keys, state, warned = take(path, Flaky(), 5, state, **settings)
    assert len(keys) == 5 and len(warned) == 1 and warned[0].startswith(DIFFERENT)
    # said once: what goes on from here is exact again
    assert take(path, Flaky(), 5, state, resume="exact", **settings)[2] == []


@pytest.mark.parametrize("policy", ["pool", "blocks", "stream"])
def test_a_sample_that_cannot_be_read_again_is_named_and_is_all_that_is_lost(
    dataset: Callable[..., Path], policy: str
) -> None:
    path = dataset(LENGTHS)
    first, _, _ = take(path, LengthEncoder(), 6, policy="none")
    _, state, _ = take(path, Flaky(), 2, policy=policy)
    expected, _, _ = take(path, Flaky(), 5, state, policy=policy)
    bad = next(key for batch in expected for key in batch if any(key in held for held in first))
    refused = REFUSED + "the sample with the restore key .* cannot be read again .OSError.'planted'"
    with pytest.raises(ValueError, match=refused):
        take(path, Flaky(bad_key=bad), 1, state, policy=policy, resume="exact")
    keys, _, warned = take(path, Flaky(bad_key=bad), 5, state, policy=policy)
    assert len(warned) == 1 and "OSError('planted')" in warned[0]
    if policy == "stream":
        assert all(bad not in batch for batch in keys) and len(keys) == 5
    else:  # its slot is smaller, and the order stays
        assert keys == [[key for key in batch if key != bad] for batch in expected]


class Longer(LengthEncoder):
    @stateless
    def encode_sample(self, sample: TextSample) -> LengthSample:
        return LengthSample.derive_from(sample, total_len=int(sample.text) + 1)


@pytest.mark.parametrize("batches", [2, 20])  # from the snapshot's samples, and from what came in since
@pytest.mark.parametrize("policy", POLICIES)
def test_a_sample_of_another_length_is_a_difference(dataset: Callable[..., Path], policy: str, batches: int) -> None:
    path = dataset(LENGTHS)
    _, state, _ = take(path, LengthEncoder(), batches, policy=policy)
    with pytest.raises(ValueError, match=REFUSED + ".*(has a cost of|of other lengths)"):
        take(path, Longer(), 1, state, policy=policy, resume="exact")
    assert len(take(path, Longer(), 3, state, policy=policy)[2]) == 1


def test_what_is_lost_on_purpose_is_no_difference(dataset: Callable[..., Path]) -> None:
    path = dataset(LENGTHS)
    _, state, _ = take(path, Flaky(fails_at=15), 8)
    _, _, warned = take(path, Flaky(), 3, state, resume="approximate")
    assert len(warned) == 1 and "approximately" in warned[0]


# ---- encoders that are generators


class Several(LengthEncoder):
    """Yields none to three samples of each, with random numbers."""

    @stateless(restore_seeds=True)
    def encode_sample(self, sample: TextSample) -> Iterator[LengthSample]:
        if int(sample.__key__[-2:]) == 13:
            raise SkipSample
        for part in range(int(sample.__key__[-1]) % 4):
            key = f"{sample.__key__}.{part}.{random.random()}"
            yield LengthSample.derive_from(sample, __key__=key, total_len=int(sample.text) + random.randrange(9))


class SeveralBefore(Several):
    """The same with the other of energon's two methods."""

    encode_sample = DefaultTaskEncoder.encode_sample
    preencode_sample = Several.encode_sample


@pytest.mark.parametrize("encoder", [Several, SeveralBefore])
@pytest.mark.parametrize(("policy", "num_workers"), [("none", 0), ("pool", 0), ("pool", 2), ("stream", 0)])
def test_a_generator_resumes_with_its_random_numbers(
    dataset: Callable[..., Path], encoder: type, policy: str, num_workers: int
) -> None:
    path, settings = dataset(LENGTHS), {"policy": policy, "num_workers": num_workers, "resume": "exact"}
    settings |= {"pool_size": 5, "snapshot_samples": 7}
    expected, _, _ = take(path, encoder(), 30, **settings)
    state: dict[str, Any] = {}
    found: list[Any] = []
    for batches in [1] * 12 if num_workers == 0 else [5, 4, 9]:
        keys, state, _ = take(path, encoder(), batches, state, **settings)
        found += keys
    assert found == expected[: len(found)]


class SeveralPacks(LengthEncoder):
    def select_samples_to_pack(self, samples: list[LengthSample]) -> list[list[LengthSample]]:
        return [samples]

    @stateless
    def pack_selected_samples(self, samples: list[LengthSample]) -> Iterator[LengthSample]:
        yield from samples


def test_a_generator_of_packs_is_named(dataset: Callable[..., Path]) -> None:
    path = dataset(LENGTHS)
    settings = {"num_workers": 0, "packing_buffer_size": 4, "pool_size": 5}
    with pytest.raises(ValueError, match=r"resume is 'exact', but SeveralPacks.pack_selected_samples is a generator"):
        LengthPoolDataModule(path, SeveralPacks(), 1, resume="exact", **settings).setup("fit")
    with pytest.warns(UserWarning, match=r"SeveralPacks.pack_selected_samples is a generator.*may miss some"):
        LengthPoolDataModule(path, SeveralPacks(), 1, **settings).setup("fit")
