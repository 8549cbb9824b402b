"""The pool goes into any task encoder: plain, split, packing, cooking, with a build_batch of its own."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from megatron.energon import (
    Cooker,
    CrudeSample,
    SavableDataset,
    TaskEncoder,
    TextSample,
    WorkerConfig,
    basic_sample_keys,
    get_train_dataset,
    stateless,
)
from megatron.energon.wrappers import BatchDataset, MapDataset

from helpers.datasets import LengthEncoder, LengthSample
from helpers.orders import reference_stream
from lightning_lengthpool.data.source import Training
from lightning_lengthpool.data.task_encoder import check_encoder, length_pool, require_length_pool, warn_not_stateless
from lightning_lengthpool.data.train_loader import TrainLoader
from lightning_lengthpool.ordering.settings import PoolSettings

ENERGONS = TaskEncoder.build_batch
LENGTHS = [(7 * i * i + 3 * i) % 101 + 1 for i in range(60)]


class PackingEncoder(LengthEncoder):
    """Packs neighbours in twos: a pack's length is the sum of its samples'."""

    def select_samples_to_pack(self, samples: list[LengthSample]) -> list[list[LengthSample]]:
        return [samples[i : i + 2] for i in range(0, len(samples), 2)]

    @stateless
    def pack_selected_samples(self, samples: list[LengthSample]) -> LengthSample:
        return LengthSample.derive_from(
            samples[0], __key__="+".join(s.__key__ for s in samples), total_len=sum(s.total_len for s in samples)
        )


def run(
    path: Path, encoder: TaskEncoder, batches: int, *, policy: str = "pool", pool_size: int = 20, **kwargs: Any
) -> Any:
    check_encoder(encoder)
    settings = PoolSettings(kwargs.get("batch_size", 4), pool_size, policy)
    with length_pool(encoder, settings, kwargs.pop("failure_tolerance", None)):
        dataset = get_train_dataset(
            path,
            worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
            max_samples_per_sequence=None,
            task_encoder=encoder,
            **{"batch_size": 4, "shuffle_buffer_size": None, **kwargs},
        )
    pool = require_length_pool(dataset, encoder)
    return list(TrainLoader(lambda state: (Training(dataset, pool), state), batches))


def test_without_a_change_to_the_encoder(dataset: Callable[..., Path]) -> None:
    encoder = LengthEncoder()
    path = dataset(LENGTHS)
    plain = [b["lengths"][0] for b in run(path, encoder, 60, policy="none", batch_size=1)]
    mixed = [length for b in run(path, encoder, 15) for length in b["lengths"]]
    assert mixed == [plain[i] for i in reference_stream(plain, 20)]
    assert vars(encoder) == vars(LengthEncoder()) and TaskEncoder.build_batch is ENERGONS


def test_an_error_on_the_way_leaves_energon_as_it_was(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="nowhere"):
        run(tmp_path / "nowhere", LengthEncoder(), 1, failure_tolerance=3)
    assert TaskEncoder.build_batch is ENERGONS


class Delegating(LengthEncoder):
    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@dataclasses.dataclass(frozen=True)
class Frozen(TaskEncoder):
    scale: int = 1

    @stateless
    def encode_sample(self, sample: TextSample) -> LengthSample:
        return LengthSample.derive_from(sample, total_len=self.scale * int(sample.text))

    @stateless
    def batch(self, samples: list[LengthSample]) -> dict:
        assert type(self) is Frozen
        return {"keys": [s.__key__ for s in samples], "lengths": [s.total_len for s in samples]}


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots(Frozen):
    @stateless
    def batch(self, samples: list[LengthSample]) -> dict:
        return {"keys": [s.__key__ for s in samples], "lengths": [s.total_len for s in samples]}


class Registered(LengthEncoder):
    seen: list[str] = []

    def __init_subclass__(cls, *, tag: str) -> None:
        assert tag not in Registered.seen
        Registered.seen.append(tag)


class Tagged(Registered, tag="one"):
    pass


@pytest.mark.parametrize("encoder", [Delegating(), Frozen(), FrozenSlots(), Tagged()], ids=lambda e: type(e).__name__)
def test_whatever_the_encoders_class_looks_like(dataset: Callable[..., Path], encoder: TaskEncoder) -> None:
    path = dataset(LENGTHS)
    plain = run(path, LengthEncoder(), 15)
    assert run(path, encoder, 15, failure_tolerance=7) == plain


def test_the_pool_holds_samples_that_are_not_postencoded_yet(dataset: Callable[..., Path]) -> None:
    events: list[str] = []

    class SplitEncoder(TaskEncoder):
        decoder = None

        @stateless
        def preencode_sample(self, sample: TextSample) -> LengthSample:
            events.append("pre")
            return LengthSample.derive_from(sample, total_len=len(sample.text))

        @stateless
        def postencode_sample(self, sample: LengthSample) -> LengthSample:
            events.append("post")
            return sample

        @stateless
        def batch(self, samples: list[LengthSample]) -> list[str]:
            return [sample.__key__ for sample in samples]

        @stateless
        def encode_batch(self, batch: list[str]) -> tuple[str, ...]:
            return tuple(batch)

    out = run(dataset(LENGTHS), SplitEncoder(), 1)
    assert isinstance(out[0], tuple) and len(out[0]) == 4
    assert events[:20] == ["pre"] * 20 and events.count("post") == 4


def test_with_packing_it_holds_packs(dataset: Callable[..., Path]) -> None:
    path = dataset(LENGTHS)
    plain = run(path, PackingEncoder(), 30, policy="none", packing_buffer_size=6, batch_size=1)
    assert all(len(batch["keys"]) == 1 and batch["keys"][0].count("+") == 1 for batch in plain)
    lengths = [batch["lengths"][0] for batch in plain]
    mixed = run(path, PackingEncoder(), 30, pool_size=10, packing_buffer_size=6, batch_size=1)
    assert [batch["lengths"][0] for batch in mixed] == [lengths[i] for i in reference_stream(lengths, 10)]


def test_with_packing_and_no_batch_size_a_pack_is_the_batch(dataset: Callable[..., Path]) -> None:
    out = run(dataset(LENGTHS), PackingEncoder(), 10, pool_size=10, packing_buffer_size=6, batch_size=None)
    assert all(isinstance(pack, LengthSample) for pack in out)


def test_with_cookers(dataset: Callable[..., Path]) -> None:
    @stateless
    def cook(sample: CrudeSample) -> TextSample:
        return TextSample(**basic_sample_keys(sample), text=sample["txt"])

    class CookingEncoder(LengthEncoder):
        cookers = [Cooker(cook)]

    path = dataset(LENGTHS)
    (path / ".nv-meta" / "dataset.yaml").write_text(
        "__module__: megatron.energon\n__class__: CrudeWebdataset\nsubflavors: {}\n"
    )
    plain = [b["lengths"][0] for b in run(path, CookingEncoder(), 60, policy="none", batch_size=1)]
    mixed = [length for b in run(path, CookingEncoder(), 15) for length in b["lengths"]]
    assert mixed == [plain[i] for i in reference_stream(plain, 20)]


def test_a_build_batch_that_calls_super_is_combined(dataset: Callable[..., Path]) -> None:
    class Doubling(LengthEncoder):
        def build_batch(self, dataset: SavableDataset, *, worker_config: WorkerConfig, **kwargs: Any) -> SavableDataset:
            doubled = MapDataset(dataset, self.double, worker_config=worker_config, stateless_map_fn=True)
            return super().build_batch(doubled, worker_config=worker_config, **kwargs)

        @stateless
        def double(self, sample: LengthSample) -> LengthSample:
            return LengthSample.derive_from(sample, total_len=2 * sample.total_len)

    path = dataset(LENGTHS)
    plain = [length for b in run(path, LengthEncoder(), 15) for length in b["lengths"]]
    assert [length for b in run(path, Doubling(), 15) for length in b["lengths"]] == [2 * n for n in plain]


def test_a_build_batch_that_cannot_be_combined_is_named(dataset: Callable[..., Path]) -> None:
    class OwnBatches(LengthEncoder):
        def build_batch(self, dataset: SavableDataset, *, worker_config: WorkerConfig, **kwargs: Any) -> SavableDataset:
            return BatchDataset(dataset, 4, self.batch, worker_config=worker_config)

    class AfterTheBatch(LengthEncoder):
        def build_batch(self, dataset: SavableDataset, *, worker_config: WorkerConfig, **kwargs: Any) -> SavableDataset:
            batches = super().build_batch(dataset, worker_config=worker_config, **kwargs)
            return MapDataset(batches, lambda batch: batch, worker_config=worker_config)

    path = dataset(LENGTHS)
    for encoder in (OwnBatches(), AfterTheBatch()):
        with pytest.raises(ValueError, match=rf"{type(encoder).__name__}\.build_batch cannot be combined.*super"):
            run(path, encoder, 1)


def test_a_group_criterion_is_named() -> None:
    class Grouping(LengthEncoder):
        def batch_group_criterion(self, sample: LengthSample) -> tuple[int, int]:
            return sample.total_len // 10, 4

    with pytest.raises(ValueError, match=r"Grouping\.batch_group_criterion"):
        check_encoder(Grouping())


def test_a_generator_of_batches_is_named() -> None:
    class Several(LengthEncoder):
        @stateless(restore_seeds=True)
        def encode_batch(self, batch: dict) -> Any:
            yield batch
            yield batch

    with pytest.raises(ValueError, match=r"Several\.encode_batch is a generator"):
        check_encoder(Several())


@pytest.mark.parametrize("wrong", [LengthEncoder, "LengthEncoder", None])
def test_what_is_no_task_encoder_is_named(wrong: Any) -> None:
    with pytest.raises(TypeError, match="task_encoder is .*LengthEncoder|task_encoder is None"):
        check_encoder(wrong)


def test_a_method_that_is_not_stateless_is_named() -> None:
    class Careless(LengthEncoder):
        def encode_sample(self, sample: TextSample) -> LengthSample:
            return LengthSample.derive_from(sample, total_len=1)

    with pytest.warns(UserWarning, match=r"Careless\.encode_sample is not marked @stateless.*restore_seeds") as caught:
        warn_not_stateless(Careless())
    assert len(caught) == 1


@pytest.mark.filterwarnings("error")
def test_a_careful_encoder_gets_no_warning() -> None:
    warn_not_stateless(LengthEncoder())
