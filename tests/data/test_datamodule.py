"""The data module under a real trainer: one process, and two gloo ranks where a collective runs."""

import multiprocessing
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.energon import DefaultTaskEncoder, SkipSample, TextSample, stateless

from helpers.datasets import LengthEncoder, LengthSample, write_dataset, write_metadataset
from helpers.ranks import run_ranks
from helpers.training import LENGTHS, Recorder, data, trainer
from lightning_lengthpool import LengthPoolDataModule, SyncMonitor
from lightning_lengthpool.classes import packed_class
from lightning_lengthpool.cli import parse_config
from lightning_lengthpool.cost_models import PackedCost, QuadraticCost
from lightning_lengthpool.ordering.settings import PoolWarmup

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("num_workers", [0, 2])
def test_epochs_are_pieces_of_one_endless_stream(
    dataset: Callable[..., Path], tmp_path: Path, num_workers: int
) -> None:
    path = dataset(LENGTHS)
    runs = []
    # Epochs cut by their own length, by the trainer, and not at all.
    for settings, limit in (({}, 1.0), ({"virtual_epoch_length": 17}, 1.0), ({}, 11)):
        model = Recorder()
        module = data(path, num_workers=num_workers, **settings)
        trainer(tmp_path, max_steps=150, limit_train_batches=limit, max_epochs=-1).fit(model, module)
        runs.append(model.train_keys)
    assert len(runs[0]) == 150 and runs[0] == runs[1] == runs[2]
    assert {key for batch in runs[0] for key in batch} == {f"train{i:06d}" for i in range(120)}
    assert multiprocessing.active_children() == []


def test_an_epoch_is_one_pass_over_the_ranks_share_by_default(dataset: Callable[..., Path]) -> None:
    assert len(data(dataset(LENGTHS), batch_size=7).train_dataloader()) == 120 // 7
    assert len(data(dataset([5] * 3), batch_size=7).train_dataloader()) == 1


@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_validation_run_covers_the_set_from_its_start(
    dataset: Callable[..., Path], tmp_path: Path, num_workers: int
) -> None:
    model = Recorder()
    module = data(dataset(LENGTHS, val=range(1, 14)), num_workers=num_workers, val_batch_size=3)
    trainer(tmp_path, max_steps=30, val_check_interval=10, max_epochs=-1).fit(model, module)
    sanity, *runs = model.val_runs
    everything = [f"val{i:06d}" for i in range(13)]
    assert len(sanity) < 13 and len(runs) == 3
    assert all(sorted(run) == everything for run in runs)
    assert runs[0] == runs[1] == runs[2] and runs[0][: len(sanity)] == sanity


def test_a_limited_validation_run_starts_at_the_beginning_each_time(
    dataset: Callable[..., Path], tmp_path: Path
) -> None:
    model = Recorder()
    settings = dict(max_steps=4, val_check_interval=2, max_epochs=-1, num_sanity_val_steps=0, limit_val_batches=2)
    trainer(tmp_path, **settings).fit(model, data(dataset(LENGTHS, val=range(1, 14))))
    assert model.val_runs == [[f"val{i:06d}" for i in range(4)]] * 2


def test_without_a_val_split_there_is_no_val_loader(dataset: Callable[..., Path], tmp_path: Path) -> None:
    model = Recorder()
    trainer(tmp_path, max_steps=4).fit(model, data(dataset(LENGTHS)))
    assert len(model.train_keys) == 4 and model.val_runs == []


def test_validation_may_come_from_another_data_set(dataset: Callable[..., Path], tmp_path: Path) -> None:
    model = Recorder()
    module = data(dataset(LENGTHS), val_path=dataset(LENGTHS[:9], val=[4, 5, 6]))
    assert trainer(tmp_path).validate(model, module, verbose=False)[0]["val_length"] == pytest.approx(5)


def test_validating_a_data_set_without_the_split_is_an_error(dataset: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no 'val' split"):
        trainer(tmp_path).validate(Recorder(), data(dataset(LENGTHS)))


def test_a_metadataset_blends_several(dataset: Callable[..., Path], tmp_path: Path) -> None:
    one, two = dataset([1] * 60, val=[10] * 5), dataset([2] * 60, val=[20] * 5)
    blend = tmp_path / "blend.yaml"
    entry = "      - path: {}\n        weight: 0.5\n"
    blend.write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n"
        f"  train:\n    blend:\n{entry.format(one.name)}{entry.format(two.name)}"
        f"  val:\n    blend:\n{entry.format(one.name)}{entry.format(two.name)}"
    )
    module = data(blend)
    module.setup("fit")
    lengths = [length for batch in module.train_dataloader() for length in batch["lengths"]]
    assert set(lengths) == {1, 2} and len(lengths) == 120
    assert sorted(length for batch in module.val_dataloader() for length in batch["lengths"]) == [10] * 5 + [20] * 5


def test_the_record_of_each_batch_comes_in_step(dataset: Callable[..., Path]) -> None:
    loader = data(dataset(LENGTHS), num_workers=1).train_dataloader()
    batches = [(batch["lengths"], loader.pop_record()) for batch in loader]
    assert all(tuple(lengths) == record.lengths and record.data_seconds >= 0 for lengths, record in batches)
    # A reader that runs ahead of the training loop shifts nothing: records wait in order.
    ahead = [batch["lengths"] for batch in loader]
    assert [loader.pop_record().lengths for _ in ahead] == [tuple(lengths) for lengths in ahead]
    loader.close()


class PlainEncoder(DefaultTaskEncoder):
    """Leaves the batch to energon, which puts the sources of its samples in."""

    @stateless
    def encode_sample(self, sample: TextSample) -> LengthSample:
        return LengthSample.derive_from(sample, total_len=int(sample.text))


class SourceReader(Recorder):
    sources: list[str] = []

    def training_step(self, batch: LengthSample) -> torch.Tensor:
        self.sources = [source.shard_name for (source,) in batch.__sources__]
        return self.weight * 1.0

    def validation_step(self, batch: LengthSample, batch_idx: int) -> None:
        assert [source.index for (source,) in batch.__sources__]


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_a_batch_keeps_its_sources_through_lightnings_transfer(
    dataset: Callable[..., Path], tmp_path: Path, precision: Any
) -> None:
    model, path = SourceReader(), dataset(LENGTHS, val=[5] * 4)
    module = LengthPoolDataModule(path, PlainEncoder(), 2, pool_size=4, num_workers=0)
    trainer(tmp_path, max_steps=2, precision=precision).fit(model, module)
    assert model.sources == ["train-000000.tar"] * 2


class ReachesTheEnd(Recorder):
    """Notes how many worker processes live at each epoch's end."""

    def __init__(self) -> None:
        super().__init__()
        self.workers: list[int] = []

    def on_train_epoch_end(self) -> None:
        self.workers.append(len(multiprocessing.active_children()))


def test_reloading_the_loader_goes_on_and_leaves_no_worker_behind(dataset: Callable[..., Path], tmp_path: Path) -> None:
    path = dataset(LENGTHS, val=[5] * 4)
    whole, model = Recorder(), ReachesTheEnd()
    trainer(tmp_path, max_steps=40, max_epochs=-1).fit(whole, data(path))
    settings = dict(max_epochs=4, reload_dataloaders_every_n_epochs=1, callbacks=[SyncMonitor()])
    trainer(tmp_path, **settings).fit(model, data(path, virtual_epoch_length=10, num_workers=1))
    assert model.train_keys == whole.train_keys
    assert model.workers == [1] * 4 and multiprocessing.active_children() == []


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_leaves_no_worker_behind(
    dataset: Callable[..., Path], tmp_path: Path, error: type[BaseException]
) -> None:
    class Fails(Recorder):
        def training_step(self, batch: dict) -> torch.Tensor:
            raise error("planted")

    with pytest.raises((RuntimeError, SystemExit)):
        trainer(tmp_path, max_steps=4).fit(Fails(), data(dataset(LENGTHS, val=[5] * 9), num_workers=2))
    assert multiprocessing.active_children() == []


def test_a_full_validation_leaves_no_worker_behind(dataset: Callable[..., Path], tmp_path: Path) -> None:
    model = ReachesTheEnd()
    run = trainer(tmp_path, max_epochs=2, num_sanity_val_steps=0)
    run.fit(model, data(dataset(LENGTHS, val=[5] * 9), virtual_epoch_length=4, num_workers=1))
    assert model.workers == [1, 1] and len(model.val_runs) == 2


def test_overfit_batches_is_named(dataset: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="overfit_batches is 3"):
        trainer(tmp_path, overfit_batches=3).fit(Recorder(), data(dataset(LENGTHS)))


# ---- policy stream


def test_a_token_budget_fills_batches_and_an_epoch_is_about_one_pass(dataset: Callable[..., Path]) -> None:
    path = dataset(LENGTHS * 3, val=[5] * 3)
    for settings in ({}, {"batch_size": 4}):
        module = data(path, **({"batch_size": None} | settings), policy="stream", pool_size=80, max_tokens=1500)
        module.setup("fit")
        batches = [batch["lengths"] for batch in module.train_dataloader()]
        assert all(len(lengths) * max(lengths) <= 1500 for lengths in batches)
        assert sum(map(len, batches)) == pytest.approx(3 * len(LENGTHS), rel=0.15)
        assert max(map(len, batches)) <= settings.get("batch_size", 99)
    assert [len(batch["lengths"]) for batch in data(path, None, policy="stream", max_tokens=1500).val_dataloader()] == [
        1
    ] * 3


def test_an_epoch_is_estimated_from_the_reference_if_there_is_one(dataset: Callable[..., Path], tmp_path: Path) -> None:
    path, file = dataset(LENGTHS), tmp_path / "reference.csv"
    file.write_text("tokens\n400\n400\n900\n")
    module = data(path, None, policy="stream", max_tokens=1000, reference_lengths=file, over_budget="alone")
    module.setup("fit")
    assert len(module.train_dataloader()) == 120 * 2 // 3


def test_samples_that_are_dropped_are_counted_with_a_warning(dataset: Callable[..., Path]) -> None:
    path = dataset([10] * 95 + [99] * 5)
    module = data(path, None, policy="stream", max_tokens=50, over_budget="drop", num_workers=1)
    with pytest.warns(UserWarning, match="costs more than max_tokens was left out.*'dropped'"):
        for _, _ in zip(range(30), module.train_dataloader(), strict=False):
            pass
    assert 0 < module.dropped <= 10
    state = module.state_dict()
    with pytest.warns(UserWarning, match=rf"^{module.dropped} samples of rank 0 cost more than max_tokens \(50\)"):
        module.teardown("fit")
    again = data(path, None, policy="stream", max_tokens=50, over_budget="drop", num_workers=1)
    again.load_state_dict(state)
    assert again.dropped == module.dropped


def test_a_sample_over_the_budget_in_a_worker_is_named(dataset: Callable[..., Path]) -> None:
    module = data(dataset([10] * 110 + [99]), 2, policy="stream", max_tokens=50, num_workers=1, virtual_epoch_length=99)
    module.setup("fit")
    with pytest.raises(
        ValueError, match=r"sample 'train000110' costs 99, more than a whole batch may .max_tokens is 50"
    ):
        list(module.train_dataloader())
    module.teardown("fit")
    with pytest.raises(ValueError, match=r"sample 'train000003' costs 99"):
        data(dataset([10, 10, 10, 99]), 2, policy="stream", max_tokens=50).setup("fit")  # at once, on all ranks


def parity(sample: LengthSample) -> str:
    return "odd" if sample.total_len % 2 else "even"


def test_a_batch_holds_one_class_and_its_record_tells_a_miss(dataset: Callable[..., Path], tmp_path: Path) -> None:
    lengths = [length - length % 2 + (index % 10 == 0) for index, length in enumerate(LENGTHS)]
    file = tmp_path / "reference.csv"
    file.write_text("tokens,class\n" + "".join(f"{n},{'odd' if n % 2 else 'even'}\n" for n in lengths))
    missed = []
    for settings in ({"class_shares": {"odd": 0.5, "even": 0.5}}, {"reference_lengths": file}):
        module = data(dataset(lengths), 4, policy="stream", class_fn=parity, **settings)
        module.setup("fit")
        loader = module.train_dataloader()
        for batch in loader:
            assert len({length % 2 for length in batch["lengths"]}) == 1
            missed.append(loader.pop_record().missed)
    assert sum(missed[:30]) > sum(missed[30:]) and not all(missed)  # the file knows that one in ten is odd


def test_an_unknown_class_shows_before_training(dataset: Callable[..., Path]) -> None:
    module = data(dataset(LENGTHS), 2, policy="stream", class_fn=parity, class_shares={"odd": 1.0})
    with pytest.raises(ValueError, match=r"sample 'train\d+' is of class 'even', which has no share: expected .*'odd'"):
        module.setup("fit")


def test_packs_and_single_samples_are_told_apart() -> None:
    bounds = {"single": [None, [0, 5], torch.tensor([0, 5, 5])], "packed": [[0, 2, 5], torch.tensor([0, 2, 5, 5])]}
    for kind, examples in bounds.items():
        assert [packed_class({"cu_lengths": own}) for own in examples] == [kind] * len(examples)
    module = data(Path("anywhere"), policy="stream", class_shares={"packed": 0.5, "single": 0.5})
    assert module.settings.class_fn is packed_class and packed_class({}) == "single"


def test_a_pool_that_is_not_like_its_reference_warns_in_the_main_process(
    dataset: Callable[..., Path], tmp_path: Path
) -> None:
    file = tmp_path / "reference.csv"
    file.write_text("tokens\n" + "\n".join(str(10 * length) for length in LENGTHS))
    module = data(dataset(LENGTHS), policy="stream", reference_lengths=file, pool_size=60, num_workers=1)
    with pytest.warns(UserWarning, match="pool of rank 0, worker 0, holds other lengths than reference_lengths says"):
        next(iter(module.train_dataloader()))
    module.teardown("fit")


def test_a_reference_file_is_read_and_priced_once_and_follows_the_batch_size(
    dataset: Callable[..., Path], tmp_path: Path
) -> None:
    file = tmp_path / "reference.csv"
    file.write_text("tokens\n5\n9\n")
    module = data(dataset(LENGTHS), policy="stream", reference_lengths=file, pool_size=60)
    complete = module.complete_settings()
    assert complete.reference is not None and module.complete_settings() is complete
    module.batch_size = 6  # as Lightning's Tuner does
    assert module.complete_settings().batch_size == 6 and module.complete_settings().reference is not None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "reference_lengths is '.*', but no file is there"),
        ("", "has no column 'tokens'"),
        ("length\n5\n", "has no column 'tokens'.*is 'length'"),
        ("tokens\n", "has no lengths below its first line"),
        ("tokens\n5\nfive\n", "line 3 of reference_lengths '.*' has the length 'five', expected a number"),
        ("tokens\n5\n6\n-7\n", "line 4 of .* has the length -7, expected a finite number of at least 0"),
        ("class,tokens\na\n", "line 2 of .* has the length None"),
        ("tokens,class\n5,\n", "line 2 of .* names no class"),
    ],
)
def test_a_wrong_file_of_lengths_is_named_with_the_line(
    dataset: Callable[..., Path], tmp_path: Path, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "reference.csv").write_text(content)
    module = data(dataset(LENGTHS), policy="stream", reference_lengths=tmp_path / "reference.csv")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        module.setup("fit")


def test_classes_and_costs_that_the_file_cannot_tell_are_named(dataset: Callable[..., Path], tmp_path: Path) -> None:
    path, file = dataset(LENGTHS), tmp_path / "reference.csv"

    def check(content: str, message: str, **settings: Any) -> None:
        file.write_text(content)
        with pytest.raises(ValueError, match=message):
            data(path, policy="stream", reference_lengths=file, **settings).setup("fit")

    check("tokens\n5\n", "has no column 'class', but a batch is to hold one class", class_fn=parity)
    shares = {"class_fn": parity, "class_shares": {"odd": 0.5, "even": 0.5}}
    check("tokens,class\n5,odd\n", "class_shares names the classes even, odd, but .* has odd", **shares)
    check("tokens\n5\n", "whose lengths have no cost by PackedCost.* Leave reference_lengths out", cost=PackedCost(k=9))


def test_every_setting_can_be_had_from_yaml(tmp_path: Path) -> None:
    (tmp_path / "more.yaml").write_text(
        "data:\n  init_args:\n    policy: stream\n    max_tokens: 3000\n    batch_size: null\n    over_budget: drop\n"
        "    cost:\n      class_path: lightning_lengthpool.cost_models.QuadraticCost\n      init_args: {k: 500}\n"
        "    class_fn: lightning_lengthpool.classes.packed_class\n    class_shares: {packed: 0.25, single: 0.75}\n"
        "    reference_lengths: lengths.csv\n    pool_warmup: {initial: 10, flushes: 3}\n"
    )
    config = parse_config([CONFIGS / "demo.yaml", tmp_path / "more.yaml"])
    settings = config.data.init_args
    assert settings.cost.class_path == "lightning_lengthpool.cost_models.QuadraticCost"
    assert settings.class_shares == {"packed": 0.25, "single": 0.75} and settings.max_tokens == 3000
    assert settings.pool_warmup.initial == 10


# ---- two ranks


def fit_two_ranks(path: str, folder: str, **settings: Any) -> dict[str, Any]:
    """Train and validate on two gloo ranks; runs in each rank's process."""
    model, module = Recorder(), data(Path(path), pool_size=10, **settings)
    settings = dict(devices=2, strategy="ddp", max_steps=8, val_check_interval=4, num_sanity_val_steps=0)
    run = trainer(Path(folder), **settings)
    run.fit(model, module)
    metrics = run.validate(model, module, verbose=False)[0]
    return {"train": model.train_keys, "val": model.val_runs, "repeats": model.repeats, "metrics": metrics}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_ranks_take_equal_steps_and_validation_counts_each_sample_once(
    dataset: Callable[..., Path], tmp_path: Path, num_workers: int
) -> None:
    lengths = list(range(1, 12))
    path = dataset(LENGTHS, val=lengths)  # 11 samples over 2 ranks: 6 and 5
    ranks = run_ranks(fit_two_ranks, 2, path=str(path), folder=str(tmp_path), batch_size=1, num_workers=num_workers)
    assert [len(rank["train"]) for rank in ranks] == [8, 8]
    assert not {k for b in ranks[0]["train"] for k in b} & {k for b in ranks[1]["train"] for k in b}
    for run in range(3):
        assert sorted(ranks[0]["val"][run] + ranks[1]["val"][run]) == [f"val{i:06d}" for i in range(11)]
    assert sum(rank["repeats"] for rank in ranks) == 3  # one in each run, on the short rank
    assert all(rank["metrics"]["val_length"] == pytest.approx(sum(lengths) / 11) for rank in ranks)


class SkippingEncoder(LengthEncoder):
    """Skips every sample whose length is odd."""

    @stateless
    def encode_sample(self, sample: TextSample) -> LengthSample:
        if int(sample.text) % 2:
            raise SkipSample
        return super().encode_sample(sample)


def validate_skipping(path: str, folder: str) -> list[list[str]]:
    model = Recorder()
    module = LengthPoolDataModule(path, SkippingEncoder(), 1, num_workers=0)
    trainer(Path(folder), devices=2, strategy="ddp").validate(model, module, verbose=False)
    return model.val_runs


def test_a_rank_that_skips_many_samples_of_validation_holds_nobody_up(
    dataset: Callable[..., Path], tmp_path: Path
) -> None:
    path = dataset(LENGTHS, val=[2, 4, 6, 8, 2, 1, 1, 1])  # rank 1 keeps one of its four
    ranks = run_ranks(validate_skipping, 2, path=str(path), folder=str(tmp_path))
    assert sorted(ranks[0][0] + ranks[1][0]) == [f"val{i:06d}" for i in range(5)]


def setup_fails_on_rank_one(path: str, folder: str, setting: str) -> str:
    settings = {"path": Path(path)}
    if os.environ["RANK"] == "1":
        settings[setting] = Path(path) / "gone"
    module = data(**settings)
    try:
        trainer(Path(folder), devices=2, strategy="ddp", max_steps=1).fit(Recorder(), module)
    except (ValueError, FileNotFoundError) as error:
        return str(error)
    return "no error"


def fit_with_own_reference(path: str, folder: str) -> str:
    """Rank 1 has another file."""
    file = Path(folder) / f"reference{os.environ['RANK']}.csv"
    file.write_text("tokens\n" + "\n".join(map(str, LENGTHS[int(os.environ["RANK"]) :])))
    module = data(Path(path), policy="stream", reference_lengths=file)
    try:
        trainer(Path(folder), devices=2, strategy="ddp", max_steps=1).fit(Recorder(), module)
    except ValueError as error:
        return str(error)
    return "no error"


def test_a_reference_that_differs_on_one_rank_is_an_error_on_all(dataset: Callable[..., Path], tmp_path: Path) -> None:
    messages = run_ranks(fit_with_own_reference, 2, path=str(dataset(LENGTHS)), folder=str(tmp_path))
    assert all("reference_lengths is" in message and "differs between the ranks" in message for message in messages)
    assert "120 lengths" in messages[0] and "119 lengths" in messages[1]


def fit_with_own_settings(path: str, folder: str) -> list[str]:
    """Rank 1 has other settings."""
    messages, other = [], os.environ["RANK"] == "1"
    for settings in ({"cost": QuadraticCost(k=50.0) if other else None}, {"seed": int(other)}):
        module = data(Path(path), **settings)
        try:
            trainer(Path(folder), devices=2, strategy="ddp", max_steps=1).fit(Recorder(), module)
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_settings_that_differ_on_one_rank_are_an_error_on_all(dataset: Callable[..., Path], tmp_path: Path) -> None:
    for messages in run_ranks(fit_with_own_settings, 2, path=str(dataset(LENGTHS)), folder=str(tmp_path)):
        assert len(messages) == 2
        assert all("settings differ between the ranks" in message for message in messages)


def fit_with_own_data(paths: list[str], folder: str) -> str:
    """Each rank has data of its own."""
    try:
        trainer(Path(folder), devices=2, strategy="ddp", max_steps=1).fit(
            Recorder(), data(Path(paths[int(os.environ["RANK"])]))
        )
    except ValueError as error:
        return str(error)
    return "no error"


def test_data_that_differ_on_one_rank_are_an_error_on_all(dataset: Callable[..., Path], tmp_path: Path) -> None:
    first, copy, other = dataset(LENGTHS), dataset(LENGTHS), dataset(LENGTHS[::-1])
    messages = run_ranks(fit_with_own_data, 2, paths=[str(first), str(other)], folder=str(tmp_path))
    assert all("some ranks find other training data than others" in message for message in messages)
    assert run_ranks(fit_with_own_data, 2, paths=[str(first), str(copy)], folder=str(tmp_path)) == ["no error"] * 2


def test_two_ranks_train_on_a_budget(dataset: Callable[..., Path], tmp_path: Path) -> None:
    settings = {"batch_size": None, "policy": "stream", "max_tokens": 2500, "num_workers": 1}
    path = dataset(LENGTHS, val=[5] * 4)
    ranks = run_ranks(fit_two_ranks, 2, path=str(path), folder=str(tmp_path), **settings)
    assert [len(rank["train"]) for rank in ranks] == [8, 8]


@pytest.mark.parametrize("setting", ["path", "val_path"])
def test_a_rank_that_cannot_be_set_up_ends_the_others_too(
    dataset: Callable[..., Path], tmp_path: Path, setting: str
) -> None:
    path = dataset(LENGTHS, val=[5] * 4)
    messages = run_ranks(setup_fails_on_rank_one, 2, path=str(path), folder=str(tmp_path), setting=setting)
    assert "1 other rank" in messages[0] and "gone" in messages[1]


# ---- errors


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pool_size": -1}, "pool_size is -1, expected an integer of at least 0"),
        ({"pool_size": 1.5}, "pool_size is 1.5, expected an integer"),
        ({"policy": "sorted"}, "policy is 'sorted', expected one of: none, pool"),
        ({"batch_size": 0}, "batch_size is 0, expected an integer of at least 1"),
        ({"batch_size": True}, "batch_size is True, expected an integer"),
        ({"batch_size": None}, "batch_size is None, which works only with packing.*or with max_tokens"),
        ({"policy": "blocks", "max_tokens": 9}, "max_tokens is 9 with policy 'blocks'.*Set policy to 'stream'"),
        ({"reference_lengths": "a.csv"}, "reference_lengths is 'a.csv' with policy 'pool'.*Set policy to 'stream'"),
        ({"class_fn": len}, "class_fn is .* with policy 'pool'"),
        ({"class_shares": {"a": 1}}, "class_shares is .* with policy 'pool'"),
        ({"policy": "stream", "class_shares": {0: 1}}, "class_shares is {0: 1}, expected the share of each class by"),
        ({"policy": "stream", "class_fn": len}, "class_fn is set, but nothing tells how many batches each class has"),
        ({"policy": "blocks", "pool_size": 1}, "pool_size is 1, less than batch_size 2"),
        ({"pool_warmup": PoolWarmup(99, 2)}, "pool_warmup is PoolWarmup.*initial is at most pool_size"),
        ({"num_workers": -2}, "num_workers is -2, expected an integer of at least 0"),
        ({"val_batch_size": 0}, "val_batch_size is 0"),
        ({"virtual_epoch_length": 0}, "virtual_epoch_length is 0"),
        ({"shuffle_buffer_size": 0}, "shuffle_buffer_size is 0"),
        ({"packing_buffer_size": -1}, "packing_buffer_size is -1"),
        ({"max_samples_per_sequence": 0}, "max_samples_per_sequence is 0"),
        ({"seed": "x"}, "seed is 'x', expected an integer"),
    ],
)
def test_a_wrong_setting_is_named_at_once(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        data(Path("anywhere"), **settings)


def test_a_pool_smaller_than_a_batch_gets_a_warning() -> None:
    with pytest.warns(UserWarning, match="pool_size 3 is smaller than batch_size 4"):
        data(Path("anywhere"), batch_size=4, pool_size=3)


@pytest.mark.filterwarnings("error:pool_size")
@pytest.mark.parametrize("settings", [{"pool_size": 0}, {"pool_size": 3, "policy": "none"}])
def test_a_pool_that_is_off_gets_no_warning(settings: dict) -> None:
    data(Path("anywhere"), batch_size=4, **settings)


@pytest.mark.parametrize("setting", ["path", "val_path", "reference_lengths"])
@pytest.mark.parametrize("value", [3, ["a"], "", "s3://bucket/x", "file://x"])
def test_a_path_that_cannot_be_is_named_at_once(setting: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{setting} is {re.escape(repr(value))}, (expected|but energon reads)"):
        data(**{"path": Path("x"), "policy": "stream", setting: value})


def test_no_path_is_named_at_once() -> None:
    with pytest.raises(ValueError, match="^path is None, expected an energon data set"):
        data(None)


@pytest.mark.parametrize("form", ["~/{}", "file://{home}/{}"])
def test_a_home_folder_and_a_file_url_are_paths(
    dataset: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path, val_path = dataset(LENGTHS), dataset(LENGTHS, val=[5] * 4)
    (tmp_path / "lengths.csv").write_text("tokens\n5\n50\n")
    where = [form.format(name, home=tmp_path) for name in (path.name, val_path.name, "lengths.csv")]
    module = data(where[0], val_path=where[1], reference_lengths=where[2], policy="stream")
    recorder = Recorder()
    trainer(tmp_path, max_steps=2, val_check_interval=2).fit(recorder, module)
    assert len(recorder.train_keys) == 2 and len(recorder.val_runs[-1]) == 4
    # A subclass that finds its data in `setup` may say it in the same way.
    module.path = form.format(path.name, home=tmp_path)
    assert next(iter(module.train_dataloader()))["keys"]


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="path is '.*nowhere', but nothing is there"):
        data(tmp_path / "nowhere").setup("fit")


def test_a_folder_that_is_not_prepared_is_named_with_the_command(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"not a prepared energon data set.*energon prepare {tmp_path}"):
        data(tmp_path).setup("fit")


def test_fewer_samples_than_workers_is_an_error(dataset: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match=r"has 3 samples for 1 ranks x 4 workers.*set num_workers lower"):
        data(dataset([1, 2, 3]), num_workers=4).setup("fit")


def test_validation_has_as_many_workers_as_its_subset_has_samples(tmp_path: Path) -> None:
    write_dataset(tmp_path / "a", LENGTHS, val=[5] * 12)
    path = write_metadataset(tmp_path / "metadataset.yaml", "{path: a}\n  val: {path: a, subset: {range: [3, 6]}}")
    module = data(path, num_workers=8)
    loader = module.val_dataloader()
    assert sorted(key for batch in loader for key in batch["keys"]) == [f"val{i:06d}" for i in (3, 4, 5)]
    module.teardown("validate")
    module = data(path, num_workers=8, rank=0, world_size=4)
    with pytest.raises(ValueError, match="val split of .* has 3 samples for 4 ranks"):
        module.setup("validate")


def test_fewer_validation_samples_than_ranks_is_an_error(dataset: Callable[..., Path]) -> None:
    module = data(dataset(LENGTHS, val=[5, 5]), rank=0, world_size=3)
    with pytest.raises(ValueError, match="val split of .* has 2 samples for 3 ranks"):
        module.setup("fit")


class Lengthless(LengthEncoder):
    @stateless
    def encode_sample(self, sample: TextSample) -> TextSample:
        return sample

    @stateless
    def batch(self, samples: list[TextSample]) -> list[str]:
        return [sample.__key__ for sample in samples]


class Broken(LengthEncoder):
    @stateless
    def encode_sample(self, sample: TextSample) -> LengthSample:
        raise KeyError("caption")


def text_length(sample: TextSample) -> int:
    return len(sample.text)


def test_a_sample_without_a_length_shows_before_training(dataset: Callable[..., Path]) -> None:
    path = dataset(LENGTHS)
    with pytest.raises(ValueError, match=r"sample 'train\d+' .*neither 'total_len' nor 'tokens'.*length_fn"):
        LengthPoolDataModule(path, Lengthless(), 1, num_workers=0).setup("fit")
    LengthPoolDataModule(path, Lengthless(), 1, num_workers=0, length_fn=text_length).setup("fit")


def test_a_broken_encoder_shows_before_training(dataset: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="failed 20 times in a row"):
        LengthPoolDataModule(dataset(LENGTHS), Broken(), 1, num_workers=0).setup("fit")


class SkipsAll(LengthEncoder):
    @stateless
    def encode_sample(self, sample: TextSample) -> LengthSample:
        raise SkipSample


def test_an_encoder_that_skips_everything_shows_before_training(
    dataset: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_lengthpool.data.workers.TIMEOUT", 3.0)
    path = dataset(LENGTHS)
    with pytest.raises(ValueError, match=r"SkipsAll made no batch .*: it skips all samples.*skip_tolerance is 50\)"):
        LengthPoolDataModule(path, SkipsAll(), 1, num_workers=0, skip_tolerance=50).setup("fit")
    with pytest.raises(ValueError, match="SkipsAll made no batch .* within 3 s. Does it skip all samples"):
        LengthPoolDataModule(path, SkipsAll(), 1, num_workers=0, skip_tolerance=0).setup("fit")


class Particular(LengthEncoder):
    """Wants full batches, and makes ones that cannot be sent to another process."""

    @stateless
    def batch(self, samples: list[LengthSample]) -> dict:
        assert len(samples) == 4
        return {**super().batch(samples), "undo": lambda: samples}


def test_the_trial_batch_is_like_the_real_ones_and_stays_where_it_is(dataset: Callable[..., Path]) -> None:
    module = LengthPoolDataModule(dataset(LENGTHS), Particular(), 4, num_workers=0, pool_size=8)
    module.setup("fit")
    assert len(next(iter(module.train_dataloader()))["keys"]) == 4


def test_a_few_bad_samples_at_the_start_are_let_pass(dataset: Callable[..., Path]) -> None:
    class Fails(LengthEncoder):
        @stateless
        def encode_sample(self, sample: TextSample) -> LengthSample:
            if int(sample.text) == 13:
                raise ValueError("planted")
            return super().encode_sample(sample)

    path = dataset([13] * 10 + [5] * 50)
    LengthPoolDataModule(path, Fails(), 2, num_workers=0, max_samples_per_sequence=None).setup("fit")


def test_another_system_than_linux_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(RuntimeError, match="Linux only.*'darwin'"):
        data(Path("anywhere"))
