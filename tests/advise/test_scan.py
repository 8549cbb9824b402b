"""What a length scan reads is what training reads, and what it measures is so."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.energon import Sample, SkipSample, TextSample, edataclass, stateless

from helpers.datasets import LengthEncoder, LengthSample, write_dataset, write_metadataset
from helpers.scanning import scan_module
from lightning_lengthpool import LengthPoolDataModule
from lightning_lengthpool.advise.scan.length_scan import scan_of_lengths
from lightning_lengthpool.advise.scan.sample_bytes import Scales, bytes_of
from lightning_lengthpool.advise.scan.scan import spread

LENGTHS = [(7 * i) % 101 + 1 for i in range(120)]


class Packs(LengthEncoder):
    """Packs of samples of up to 200 tokens together."""

    def select_samples_to_pack(self, samples: list[LengthSample]) -> list[list[LengthSample]]:
        packs: list[list[LengthSample]] = []
        for sample in samples:
            if not packs or sum(one.total_len for one in packs[-1]) + sample.total_len > 200:
                packs.append([])
            packs[-1].append(sample)
        return packs

    @stateless
    def pack_selected_samples(self, samples: list[LengthSample]) -> LengthSample:
        return LengthSample.derive_from(samples[0], total_len=sum(one.total_len for one in samples))


class Draws(LengthEncoder):
    """Lengths with an augmentation."""

    @stateless(restore_seeds=True)
    def encode_sample(self, sample: TextSample) -> LengthSample:
        return LengthSample.derive_from(sample, total_len=int(sample.text) + random.randrange(1000))


class Repeats(LengthEncoder):
    """Some samples become several."""

    @stateless
    def encode_sample(self, sample: TextSample) -> Any:
        for _ in range(int(sample.text) % 3):
            yield LengthSample.derive_from(sample, total_len=int(sample.text))


def trained(module: LengthPoolDataModule, samples: int) -> list[float]:
    """The lengths in the order in which they come to training without a pool."""
    loader = module.train_dataloader()
    lengths: list[float] = []
    for _ in range(samples):
        if not (len(lengths) % len(loader)):
            batches = iter(loader)
        next(batches)
        lengths += loader.pop_record().lengths
    loader.close()
    return lengths


@pytest.mark.parametrize(
    ("encoder", "settings"),
    [
        (LengthEncoder, {"num_workers": 0}),
        (LengthEncoder, {"num_workers": 2, "shuffle_buffer_size": 10, "max_samples_per_sequence": 5}),
        (Packs, {"num_workers": 1, "packing_buffer_size": 12}),
        (Repeats, {"num_workers": 2, "shuffle_buffer_size": 5}),
        (Draws, {"num_workers": 1}),
    ],
    ids=["in_process", "shuffled", "packed", "generator", "seeded"],
)
def test_the_streams_are_those_of_training(
    dataset: Callable[..., Path], encoder: type[LengthEncoder], settings: dict[str, Any]
) -> None:
    path = dataset(LENGTHS, shards=4)
    found = scan_module(LengthPoolDataModule(path, encoder(), 4, pool_size=50, **settings), 2, 48)
    assert found.restore_seconds is not None
    workers = max(1, settings["num_workers"])
    assert [(own.rank, own.worker) for own in found.streams] == [(r, w) for r in range(2) for w in range(workers)]
    for rank in range(2):
        alone = {"policy": "none", "virtual_epoch_length": 1000, "rank": rank, "world_size": 2}
        expected = trained(LengthPoolDataModule(path, encoder(), 1, **alone, **settings), 40 * workers)
        for stream in found.streams[rank * workers : (rank + 1) * workers]:
            assert len(stream.lengths) >= 5 and stream.lengths.tolist() == stream.costs.tolist()
            assert stream.lengths.tolist() == expected[stream.worker :: workers][: len(stream.lengths)]
    own = [stream.lengths.tolist() for stream in found.streams if stream.rank == 1]
    assert found.lengths_by_rank()[1].tolist() == [length for lengths in own for length in lengths]


def test_each_rank_has_its_own_samples_and_count(dataset: Callable[..., Path]) -> None:
    found = scan_module(LengthPoolDataModule(dataset(range(1, 24)), LengthEncoder(), 1, num_workers=2), 3, 1000)
    assert sorted(found.lengths) == list(range(1, 24))  # the whole set, once
    assert found.rank_samples == tuple(map(len, found.lengths_by_rank()))
    assert sorted(found.rank_samples) == [7, 8, 8]
    assert (found.ranks, found.num_workers, found.asked, found.is_complete) == (3, 2, 1000, True)
    assert (found.failed, found.over_budget, found.classes) == (0, 0, None)


def test_of_many_ranks_some_are_read(dataset: Callable[..., Path]) -> None:
    found = scan_module(LengthPoolDataModule(dataset(LENGTHS), LengthEncoder(), 1, num_workers=0), 7, 9, most_ranks=3)
    assert found.ranks_read() == [0, 2, 4] and found.ranks == 7
    assert [len(own) for own in found.lengths_by_rank()] == [3, 3, 3] and len(found.rank_samples) == 3


def test_spread_takes_all_or_evenly() -> None:
    assert spread(64, 64) == list(range(64))
    assert spread(512, 64) == list(range(0, 512, 8))


class SkipsMost(LengthEncoder):
    @stateless
    def encode_sample(self, sample: TextSample) -> LengthSample:
        if int(sample.text) % 10:
            raise SkipSample
        return super().encode_sample(sample)


def test_a_share_of_which_most_is_skipped_is_not_read_for_ever(dataset: Callable[..., Path]) -> None:
    found = scan_module(LengthPoolDataModule(dataset(range(100)), SkipsMost(), 1, num_workers=0), 1, 1000)
    assert set(found.lengths) == set(range(0, 100, 10)) and len(found.lengths) <= 22


@pytest.mark.parametrize("share", [1, 3])
def test_a_few_samples_are_read_about_once(dataset: Callable[..., Path], share: int) -> None:
    found = scan_module(LengthPoolDataModule(dataset([5] * 2 * share), Draws(), 1, num_workers=0), 2, 1000)
    assert len(found.lengths) == 2 * share


def test_a_split_too_small_for_the_ranks_is_named(dataset: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="3 samples for 2 ranks x 2 workers"):
        scan_module(LengthPoolDataModule(dataset([1, 2, 3]), LengthEncoder(), 1, num_workers=2), 2, 10)


def test_a_subset_counts_as_the_data(tmp_path: Path) -> None:
    write_dataset(tmp_path / "a", LENGTHS)
    path = tmp_path / "metadataset.yaml"
    module = LengthPoolDataModule(
        write_metadataset(path, "{path: a, subset: {range: [0, 30]}}"), LengthEncoder(), 2, num_workers=1
    )
    assert scan_module(module, ranks=2, samples=10_000).rank_samples == (15, 15)
    write_metadataset(path, "{path: a, subset: {range: [0, 1]}}")
    with pytest.raises(ValueError, match="has 1 samples for 2 ranks x 1 workers, and each needs one"):
        scan_module(module, ranks=2, samples=100)


class SkipsAll(LengthEncoder):
    @stateless
    def encode_sample(self, sample: TextSample) -> LengthSample:
        raise SkipSample


def test_an_encoder_that_skips_everything_does_not_hang(
    dataset: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_lengthpool.data.workers.TIMEOUT", 2.0)
    with pytest.raises(ValueError, match="SkipsAll made no sample .* within 2 s. Does it skip all samples"):
        scan_module(LengthPoolDataModule(dataset(LENGTHS), SkipsAll(), 1, num_workers=0), 1, 10)


class FailsAt(LengthEncoder):
    def __init__(self, bad: range) -> None:
        super().__init__()
        self.bad = bad

    @stateless
    def encode_sample(self, sample: TextSample) -> LengthSample:
        if int(sample.text) in self.bad:
            raise ValueError("planted")
        return super().encode_sample(sample)


def test_samples_that_fail_are_counted_and_named_once(
    dataset: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    found = scan_module(LengthPoolDataModule(dataset(range(40)), FailsAt(range(5, 8)), 1, num_workers=0), 1, 30)
    assert found.failed == 3 and found.failed_key == "'train000005' (ValueError: planted)"
    assert found.lengths.tolist() == [*range(5), *range(8, 33)]
    said = capfd.readouterr()
    assert "planted" not in said.out + said.err


def test_too_many_failures_in_a_row_end_it_with_the_first_ones_key(dataset: Callable[..., Path]) -> None:
    module = LengthPoolDataModule(dataset(range(40)), FailsAt(range(5, 30)), 1, num_workers=0, failure_tolerance=6)
    with pytest.raises(ValueError, match=r"6 samples failed, the first one 'train000005' \(ValueError: planted\)"):
        scan_module(module, 1, 30)


class Unfinished(LengthEncoder):
    @stateless
    def encode_sample(self, sample: TextSample) -> LengthSample:
        return tokenizer.encode(sample.text)  # noqa: F821


class Builds(LengthEncoder):
    def build_batch(self, *args: Any, **kwargs: Any) -> Any:
        raise AttributeError("no buffer")


@pytest.mark.parametrize(
    ("encoder", "said"),
    [
        (Unfinished, "read with Unfinished: .*'train000000'.*name 'tokenizer' is not defined"),
        (Builds, "set up with Builds: AttributeError: no buffer"),
    ],
    ids=["encoding", "building"],
)
def test_an_encoder_with_a_mistake_ends_it_with_the_mistake(
    dataset: Callable[..., Path], encoder: type[LengthEncoder], said: str
) -> None:
    with pytest.raises(ValueError, match=f"the train split of .* cannot be {said}"):
        scan_module(LengthPoolDataModule(dataset(LENGTHS), encoder(), 1, num_workers=0), 1, 30)


class Nothing(LengthEncoder):
    @stateless
    def encode_sample(self, sample: TextSample) -> TextSample:
        return sample


@pytest.mark.parametrize(
    ("encoder", "length_fn", "said"),
    [
        (Nothing, None, "sample 'train000000' .* has no length"),
        (LengthEncoder, lambda sample: -1, "sample 'train000000' has the length -1"),
        (LengthEncoder, lambda sample: {}["size"], r"sample 'train000000' \(KeyError: 'size'\)"),
    ],
    ids=["none", "negative", "raises"],
)
def test_a_sample_without_a_length_is_named(
    dataset: Callable[..., Path], encoder: type[LengthEncoder], length_fn: Any, said: str
) -> None:
    module = LengthPoolDataModule(dataset(LENGTHS), encoder(), 1, num_workers=0, length_fn=length_fn)
    with pytest.raises(ValueError, match=said):
        scan_module(module, 1, 10)


def no_seven(sample: LengthSample) -> float:
    if sample.total_len % 10 == 7:
        raise KeyError("size")
    return sample.total_len


def no_class_of_seven(sample: LengthSample) -> str:
    return parity(sample) if no_seven(sample) else "even"


def test_a_sample_that_cannot_be_measured_is_left_out_and_counted_as_fit_does(dataset: Callable[..., Path]) -> None:
    module = LengthPoolDataModule(dataset(range(40)), LengthEncoder(), 1, num_workers=0, length_fn=no_seven)
    found = scan_module(module, 1, 30)
    assert found.failed == 3 and found.failed_key == "'train000007' (KeyError: 'size')"
    assert found.lengths.tolist() == [length for length in range(30) if length % 10 != 7]
    module = with_classes(dataset(range(40)), {"odd": 0.5, "even": 0.5}, class_fn=no_class_of_seven)
    found = scan_module(module, 1, 30)
    assert found.failed == 3 and len(found.classes or ()) == len(found.lengths) == 27


def test_a_function_that_fails_too_often_ends_it_with_the_error(dataset: Callable[..., Path]) -> None:
    module = LengthPoolDataModule(
        dataset(range(40)), LengthEncoder(), 1, num_workers=0, length_fn=lambda sample: {}["size"], failure_tolerance=6
    )
    with pytest.raises(ValueError, match=r"error was KeyError: 'size' \(6 samples failed, the first one 'train"):
        scan_module(module, 1, 30)


@pytest.mark.parametrize(("over_budget", "read"), [("error", 20), ("alone", 20), ("drop", 15)])
def test_samples_over_the_budget_are_counted(dataset: Callable[..., Path], over_budget: str, read: int) -> None:
    module = LengthPoolDataModule(
        dataset([10, 20, 30, 1000] * 5),
        LengthEncoder(),
        None,
        num_workers=0,
        policy="stream",
        pool_size=8,
        max_tokens=100,
        over_budget=over_budget,
    )
    found = scan_module(module, 1, 20)
    assert found.over_budget == 5 and len(found.lengths) == read


def test_a_budget_that_drops_everything_is_named(dataset: Callable[..., Path]) -> None:
    module = LengthPoolDataModule(
        dataset([10] * 9), LengthEncoder(), 2, policy="stream", pool_size=8, max_tokens=5, over_budget="drop"
    )
    with pytest.raises(ValueError, match=r"all 9 samples .* max_tokens \(5\)"):
        scan_module(module, 1, 20)


def parity(sample: LengthSample) -> str:
    return "odd" if sample.total_len % 2 else "even"


def with_classes(path: Path, shares: dict[str, float], class_fn: Any = parity) -> LengthPoolDataModule:
    return LengthPoolDataModule(
        path,
        LengthEncoder(),
        2,
        num_workers=1,
        policy="stream",
        pool_size=8,
        class_fn=class_fn,
        class_shares=shares,
    )


def test_classes_come_with_the_lengths(dataset: Callable[..., Path]) -> None:
    found = scan_module(with_classes(dataset(LENGTHS), {"odd": 0.5, "even": 0.5}), 2, 20)
    assert found.classes == tuple("odd" if length % 2 else "even" for length in found.lengths)
    assert [len(kinds) for kinds in found.classes_by_rank() or []] == [10, 10]


def test_a_class_without_a_share_is_named(dataset: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="sample 'train000001' is of class 'even', expected one of .*'odd'"):
        scan_module(with_classes(dataset([1, 2, 3]), {"odd": 1.0}), 1, 20)


@edataclass
class Heavy(Sample):
    total_len: int
    pixels: torch.Tensor
    undo: Any = None


class Draft(LengthEncoder):
    """Samples that cannot be sent to another process, and are a small part of what they hold on to."""

    @stateless
    def encode_sample(self, sample: TextSample) -> Heavy:
        pixels = torch.zeros(100_000, dtype=torch.uint8)[:10]
        return Heavy.derive_from(sample, total_len=int(sample.text), pixels=pixels, undo=lambda: sample)


def test_bytes_and_seconds_are_measured_and_content_stays_in_the_worker(dataset: Callable[..., Path]) -> None:
    found = scan_module(LengthPoolDataModule(dataset(LENGTHS), Draft(), 1, num_workers=1), 1, 30)
    assert len(found.lengths) == 30
    assert found.sample_bytes is not None and 100_000 <= found.sample_bytes < 103_000
    assert found.encode_seconds is not None and 0 < found.encode_seconds < 5
    assert found.restore_seconds is not None and 0 < found.restore_seconds < 5
    assert found.batch_seconds is not None and 0 < found.batch_seconds < 5


class Stateful(LengthEncoder):
    def encode_sample(self, sample: TextSample) -> LengthSample:
        return LengthSample.derive_from(sample, total_len=int(sample.text))


def test_an_encoder_that_cannot_restore_has_no_time_for_it(dataset: Callable[..., Path]) -> None:
    found = scan_module(LengthPoolDataModule(dataset(LENGTHS), Stateful(), 1, num_workers=0), 1, 10)
    assert found.restore_seconds is None and len(found.lengths) == 10


@dataclass
class Box:
    content: Any
    more: dict[str, Any] = field(default_factory=dict)


class Slotted:
    __slots__ = ("content",)

    def __init__(self, content: Any) -> None:
        self.content = content


LARGE = 1_000_000


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (lambda: torch.zeros(LARGE, dtype=torch.uint8), 1),
        (lambda: torch.zeros(LARGE, dtype=torch.uint8)[:3], 1),
        (lambda: (lambda whole: [whole, whole[5:], whole.view(10, -1)])(torch.zeros(LARGE // 4)), 1),
        (lambda: np.zeros(LARGE, dtype=np.uint8), 1),
        (lambda: np.zeros((2, LARGE // 2), dtype=np.uint8)[1][:3], 1),
        (lambda: np.frombuffer(bytes(LARGE), dtype=np.uint8)[:3], 1),
        (lambda: torch.from_numpy(np.zeros(LARGE, dtype=np.uint8)), 1),
        (lambda: torch.zeros(LARGE, dtype=torch.uint8).numpy()[:3], 1),
        (lambda: bytes(LARGE), 1),
        (lambda: "x" * LARGE, 1),
        (lambda: memoryview(bytes(LARGE))[:3], 1),
        (lambda: {"a": [bytes(LARGE)], "b": ({"c": bytearray(LARGE)},)}, 2),
        (lambda: Box(bytes(LARGE), {"text": "x" * LARGE}), 2),
        (lambda: Slotted(bytes(LARGE)), 1),
        (lambda: (lambda one: [one, one])(bytes(LARGE)), 1),
        (lambda: np.array([bytes(LARGE), None], dtype=object), 1),
    ],
    ids=[
        "tensor",
        "view",
        "views",
        "array",
        "array_view",
        "array_of_bytes",
        "tensor_of_array",
        "array_of_tensor",
        "bytes",
        "text",
        "memoryview",
        "nested",
        "dataclass",
        "slots",
        "same_twice",
        "objects",
    ],
)
def test_bytes_are_those_that_a_sample_keeps_in_memory(make: Callable[[], Any], count: int) -> None:
    assert count * LARGE <= bytes_of(make(), set()) < count * LARGE + 3000


def test_what_samples_share_counts_once() -> None:
    shared = bytes(LARGE)
    scales = Scales()
    assert scales.weigh(Box(shared)) >= LARGE
    assert scales.weigh(Box(shared)) < 3000


class Collates(LengthEncoder):
    def __init__(self, make: Callable[[Sequence[int]], Any]) -> None:
        super().__init__()
        self.make = make

    @stateless
    def batch(self, samples: list[LengthSample]) -> Any:
        return self.make([sample.total_len for sample in samples])


def padded(lengths: Sequence[int]) -> torch.Tensor:
    return torch.zeros(len(lengths), max(lengths))


@pytest.mark.parametrize(
    ("make", "expected", "found", "name"),
    [
        (lambda n: {"tokens": padded(n)}, 60, 60, "size of tokens, with padding"),
        (lambda n: {"labels": padded(n), "input_ids": padded(n)}, 60, 60, "size of input_ids, with padding"),
        (lambda n: {"labels": torch.zeros(len(n), 8)}, 60, 16, "size of labels, with padding"),
        (
            lambda n: {"tokens": padded(n), "attention_mask": torch.arange(max(n)) < torch.tensor(n)[:, None]},
            40,
            40,
            "sum of attention_mask",
        ),
        (lambda n: {"tokens": torch.zeros(sum(n))}, 40, 40, "size of tokens"),
        (lambda n: {"tokens": torch.zeros(1, sum(n) + 5)}, 40, 45, "size of tokens"),
        (lambda n: {"tokens": [[0] * one for one in n]}, 40, 40, "lengths of tokens"),
        (lambda n: Box(None) if n else None, None, None, None),
    ],
    ids=["padded", "input_ids", "wrong", "mask", "packed", "packed_row", "lists", "nothing"],
)
def test_tokens_of_real_batches_are_counted(
    dataset: Callable[..., Path], make: Any, expected: float | None, found: float | None, name: str | None
) -> None:
    checks = scan_module(
        LengthPoolDataModule(dataset([10, 30] * 20), Collates(make), 2, num_workers=0), 1, 5
    ).batch_checks
    if expected is None:
        assert checks == ()
        return
    assert len(checks) == 4 and checks[0].key == "train000000"
    assert {(check.expected, check.counted, check.field) for check in checks} == {(expected, found, name)}


def test_a_batch_that_cannot_be_made_is_said_and_the_lengths_count(dataset: Callable[..., Path]) -> None:
    module = LengthPoolDataModule(dataset(LENGTHS), Collates(lambda n: {}["x"]), 2, num_workers=0, failure_tolerance=3)
    with pytest.warns(UserWarning, match=r"no batch was compared with its lengths: .*KeyError: 'x'"):
        found = scan_module(module, 1, 10)
    assert len(found.lengths) == 10 and found.batch_checks == ()


def test_progress_counts_the_samples(dataset: Callable[..., Path]) -> None:
    came: list[int] = []
    scan_module(LengthPoolDataModule(dataset(LENGTHS), LengthEncoder(), 1, num_workers=1), 2, 20, progress=came.append)
    assert sum(came) == 20


def test_a_scan_of_lengths_alone() -> None:
    found = scan_of_lengths([3, 1, 2], ranks=8)
    assert found.lengths.tolist() == [3, 1, 2] and not found.has_ranks and found.ranks == 8
    assert found.encode_seconds is found.rank_samples is found.sample_bytes is found.restore_seconds is None
    told = scan_of_lengths([3, 1, 2], ranks=2, rank_of=[1, 0, 1], classes=["a", "b", "c"])
    assert [own.tolist() for own in told.lengths_by_rank()] == [[1], [3, 2]]
    assert told.classes_by_rank() == [("b",), ("a", "c")] and told.has_ranks
