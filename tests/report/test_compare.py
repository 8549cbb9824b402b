from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filelock import FileLock

from helpers.runs import config
from lightning_lengthpool.report.compare import compare, last_logged, steps_per_pool


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, 300),
        ({"num_workers": 1}, 300),
        ({"num_workers": 3}, 900),
        ({"batch_size": 4}, 75),
        ({"batch_size": 7}, 300),  # 2,100 samples: seven pools, 300 batches
        ({"batch_size": 4, "accumulate": 2}, 75),  # 75 micro-batches end in the middle of a step
        ({"batch_size": 4, "accumulate": 3}, 25),
        ({"pool_size": 0}, 1),
        ({"batch_size": None}, 300),
    ],
)
def test_runs_cover_whole_pools_of_every_worker(settings: dict, steps: int) -> None:
    assert steps_per_pool(config(**settings)) == steps


@pytest.mark.parametrize("data", [None, SimpleNamespace(get=lambda key: {"path": "x"})])
def test_a_config_without_a_pool_is_named(data: Any) -> None:
    with pytest.raises(ValueError, match="'data' is not a LengthPoolDataModule"):
        steps_per_pool({"trainer": {}, "data": data})


def test_under_torchrun_it_says_how_to_start_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="not under torchrun"):
        compare(config(), ["x.yaml"], ["none"])


@pytest.mark.parametrize("numbers", [{"repeats": 0}, {"steps": 0}])
def test_a_number_out_of_range_is_named(numbers: dict) -> None:
    with pytest.raises(ValueError, match="expected integers of at least 1"):
        compare(config(), ["x.yaml"], ["none"], **numbers)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("--data.init_args.policy", "compare sets data.policy itself: name the policies with --policies"),
        ("--data.policy=pool", "compare sets data.policy itself"),
        ("--data.init_args.virtual_epoch_length=9", "compare sets data.virtual_epoch_length itself"),
        ("--trainer.logger=false", "compare sets trainer.logger itself: the logs of each run lie in --out"),
        ("--trainer.logger.init_args.save_dir=x", "compare sets trainer.logger itself"),
        ("--trainer.logger+=lightning.pytorch.loggers.CSVLogger", "compare sets trainer.logger itself"),
        (
            "--trainer.max_epochs=3",
            "compare sets trainer.max_epochs itself: it is 1 in every run. Leave --trainer.max_",
        ),
        ("--trainer.max_ep=3", "compare sets trainer.max_epochs itself"),  # which fit understands
        ("--trainer.max_steps=3", "compare sets trainer.max_steps itself: --steps is given"),
        ("--ckpt_path=x.ckpt", "compare sets ckpt_path itself: every run starts from the beginning"),
    ],
)
def test_an_option_that_contradicts_compare_is_refused(override, said, tmp_path):
    given = config()
    given["trainer"]["max_epochs"] = 3
    with pytest.raises(ValueError, match=said):
        compare(
            given, [], ["none"], steps=5, overrides=["--data.init_args.batch_size", "4", override], out=str(tmp_path)
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "of"), [("ckpt_path", ""), ("fast_dev_run", "trainer")])
def test_a_config_that_cannot_be_compared_is_refused(name, of, tmp_path):
    given = config()
    (given[of] if of else given)[name] = "x"
    with pytest.raises(ValueError, match=f"{name}.* out"):
        compare(given, [], ["none"], out=str(tmp_path))


def test_two_comparisons_never_write_into_one_folder(tmp_path):
    with FileLock(tmp_path / "compare.lock"), pytest.raises(ValueError, match=r"another compare writes into .*--out"):
        compare(config(), [], ["none"], out=str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["compare.lock"]


def test_the_last_logged_value_of_the_validation_loss_counts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    assert last_logged(path, None) is None
    path.write_text("step,train/loss,val/loss,val/accuracy\n1,5.0,,\n2,,3.5,0.5\n3,4.0,,\n4,,2.5,0.75\n5,3.0,,\n")
    assert last_logged(path, None) == 2.5
    assert last_logged(path, "val/accuracy") == 0.75
    assert last_logged(path, "val/other") is None


def test_blocks_rounds_its_pools_and_the_number_of_steps_fits_both() -> None:
    assert steps_per_pool(config(pool_size=10, batch_size=4), ["none", "blocks"]) == 10  # pools of 10 and of 8


@pytest.mark.parametrize(
    ("settings", "policies", "name"),
    [
        ({"max_tokens": 100}, ["stream", "none"], "policy 'none' does not go with max_tokens"),
        (
            {"pool_warmup": {"initial": 1, "flushes": 2}},
            ["pool", "stream"],
            "policy 'stream' does not go with pool_warmup",
        ),
    ],
)
def test_a_policy_that_does_not_go_with_the_config_is_refused_before_any_run(
    settings, policies, name, tmp_path
) -> None:
    with pytest.raises(ValueError, match=name):
        compare(config(**settings), [], policies, out=str(tmp_path))
    assert not list(tmp_path.iterdir())
