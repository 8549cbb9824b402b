"""A function of the user's that fails for a sample costs that sample; what the settings refuse is an error at once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.energon import SkipSample, stateless

from helpers.datasets import LengthEncoder, LengthSample
from helpers.lengths import lognormal
from helpers.pools import batches, keys, pooled
from helpers.resuming import LENGTHS, NoisySample, check_resume, module, through_a_file
from lightning_lengthpool import LengthPoolDataModule
from lightning_lengthpool.cost_models import CostModel

POLICIES = ["none", "pool", "blocks", "stream"]
BAD = {3, 17, 18, 60, 117, 118, 119}  # the first pool, the second, and several in a row


class FailsAt(CostModel):
    """A cost that fails for some samples, or is none."""

    def __init__(self, bad: set[int], value: Any = None) -> None:
        self.bad, self.value = bad, value

    def of_length(self, length: float) -> float:
        return float(length)

    def cost(self, sample: Any, length: float) -> float:
        if int(sample["__key__"]) in self.bad:
            if self.value is None:
                raise KeyError("x")
            return self.value
        return float(length)


def failing(bad: set[int], error: type[BaseException] | Any = KeyError, good: Any = "total_len") -> Callable:
    def my_function(sample: dict) -> Any:
        if int(sample["__key__"]) in bad:
            if isinstance(error, type):
                raise error("x")
            return error
        return sample["total_len"] if good == "total_len" else good

    return my_function


def classes(**changes: Any) -> dict[str, Any]:
    return {"policy": "stream", "class_shares": {"a": 0.5, "b": 0.5}, **changes}


CASES: list[tuple[str, dict[str, Any]]] = [
    *((policy, {"length_fn": failing(BAD)}) for policy in POLICIES),
    *((policy, {"cost": FailsAt(BAD)}) for policy in POLICIES),
    ("stream", classes(class_fn=failing(BAD, good="a"))),
    ("pool", {"length_fn": failing(BAD, SkipSample)}),
    *(("pool", {"length_fn": failing(BAD, value)}) for value in (-1, float("nan"), "12", None, torch.ones(2))),
    ("blocks", {"cost": FailsAt(BAD, -1.0)}),
    ("stream", {"cost": FailsAt(BAD, float("inf"))}),
]


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize(("policy", "settings"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_failure_costs_one_sample_and_nothing_of_the_order(policy: str, settings: dict, batch_size: int) -> None:
    lengths = lognormal(200)
    left = [index for index in range(200) if index not in BAD]
    found = keys(pooled(lengths, pool_size=30, batch_size=batch_size, **{"policy": policy, **settings}))
    plain = {name: value for name, value in settings.items() if name not in ("length_fn", "cost", "class_fn")}
    if "class_fn" in settings:
        plain["class_fn"] = failing(set(), good="a")
    without = keys(
        pooled([lengths[i] for i in left], pool_size=30, batch_size=batch_size, **{"policy": policy, **plain})
    )
    assert found == [left[key] for key in without]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_sample_without_a_length_costs_itself(policy: str) -> None:
    lengths: list[Any] = lognormal(60)
    lengths[5], lengths[40] = -2, torch.ones(1, 2)
    assert sorted(keys(pooled(lengths, pool_size=20, policy=policy))) == [i for i in range(60) if i not in (5, 40)]


@pytest.mark.parametrize("policy", ["pool", "blocks", "stream"])
def test_a_rank_that_has_lost_samples_stays_with_the_others(policy: str) -> None:
    lengths, settings = lognormal(900), {"pool_size": 90, "batch_size": 3, "policy": policy}
    ours, theirs = (
        [np.log(sum(batch.lengths)) for batch in batches(pooled(lengths, **settings, **changes))][:260]
        for changes in ({"length_fn": failing({3, 100, 101, 555})}, {})
    )
    assert np.corrcoef(ours, theirs)[0, 1] > 0.95


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"length_fn": failing({7})}, "length_fn test_measure.failing.<locals>.my_function"),
        ({"cost": FailsAt({7})}, "cost FailsAt(bad={7}, value=None)"),
        (classes(class_fn=failing({7}, good="b")), "class_fn test_measure.failing.<locals>.my_function"),
    ],
)
def test_the_function_and_the_sample_are_named(settings: dict, name: str, capfd: pytest.CaptureFixture) -> None:
    keys(pooled(lognormal(30), pool_size=10, **settings))
    out, err = capfd.readouterr()
    assert f"Except 'x' in {name}" in out and "'7'" in out and "KeyError: 'x'" in err


@stateless(failure_tolerance=5)
def says_itself(sample: dict) -> float:
    raise KeyError("x")


@pytest.mark.parametrize(
    ("settings", "times"),
    [
        ({"length_fn": failing(set(range(40, 300)))}, 100),
        ({"length_fn": says_itself}, 5),
        ({"cost": FailsAt(set(range(40, 300)))}, 100),
        (classes(class_fn=failing(set(range(40, 300)), good="a")), 100),
    ],
)
def test_too_many_failures_in_a_row_end_it_with_the_error(settings: dict, times: int) -> None:
    words = rf"__key__: '\d+'.*failed {times} times in a row.*The last error was KeyError: 'x'"
    with pytest.raises(ValueError, match=words):
        batches(pooled(lognormal(300), pool_size=20, **settings))


def test_a_success_in_between_begins_the_count_again() -> None:
    bad = {index for index in range(1000) if index % 50}
    assert sorted(keys(pooled(lognormal(1000), pool_size=5, length_fn=failing(bad)))) == list(range(0, 1000, 50))


def test_an_error_that_no_sample_is_to_blame_for_ends_it_at_once() -> None:
    with pytest.raises(ValueError, match="length_fn .*my_function failed due to system exception: x"):
        batches(pooled(lognormal(30), pool_size=10, length_fn=failing({7}, NameError)))


# ---- the data module


def missing_field(sample: LengthSample) -> float:
    return {"y": 1}["x"]


def fails_once(sample: LengthSample) -> float:
    if sample.__key__.endswith("7"):
        raise KeyError("x")
    return sample.total_len


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_function_that_always_fails_shows_before_training(dataset: Callable[..., Path], num_workers: int) -> None:
    data = LengthPoolDataModule(dataset(LENGTHS), LengthEncoder(), 1, num_workers=num_workers, length_fn=missing_field)
    words = r"length_fn test_measure.missing_field failed 20 times in a row.*The last error was KeyError: 'x'"
    with pytest.raises(ValueError, match=words):
        data.setup("fit")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_function_that_fails_now_and_then_does_not_end_training(
    dataset: Callable[..., Path], num_workers: int
) -> None:
    data = LengthPoolDataModule(
        dataset(range(1, 51)), LengthEncoder(), 1, pool_size=9, num_workers=num_workers, length_fn=fails_once
    )
    data.setup("fit")
    loader = data.train_dataloader()
    found = {batch["keys"][0] for _ in range(2) for batch in loader}
    data.teardown("fit")
    assert found == {f"train{index:06d}" for index in range(50) if index % 10 != 7}


def by_rule(sample: NoisySample) -> float:
    if int(sample.__key__[-2:]) % 7 == 3:
        raise KeyError("x")
    return sample.total_len


def class_by_rule(sample: NoisySample) -> str:
    if int(sample.__key__[-2:]) % 7 == 3:
        raise KeyError("x")
    return "odd" if sample.total_len % 2 else "even"


RESUMED: list[dict[str, Any]] = [
    *({"policy": policy, "length_fn": by_rule} for policy in POLICIES),
    {"policy": "pool", "length_fn": by_rule, "batch_size": 1},
    {"policy": "pool", "length_fn": by_rule, "num_workers": 2},
    {"policy": "stream", "length_fn": by_rule, "num_workers": 2, "batch_size": 1},
    {"policy": "stream", "class_fn": class_by_rule, "class_shares": {"odd": 0.5, "even": 0.5}},
    {"policy": "stream", "length_fn": by_rule, "max_tokens": 200, "over_budget": "drop", "batch_size": None},
]


@pytest.mark.filterwarnings("ignore:.*over_budget is 'drop'")
@pytest.mark.parametrize("snapshot", [30, 10_000])
@pytest.mark.parametrize("settings", RESUMED, ids=lambda settings: settings["policy"])
def test_a_run_with_failures_resumes_exactly(dataset: Callable[..., Path], settings: dict, snapshot: int) -> None:
    path = dataset(LENGTHS, shards=3)
    check_resume(
        lambda: module(path, resume="exact", snapshot_samples=snapshot, **settings),
        [1, 4, 6, 7, 14, 27, 40],
        batches=50,
    )


class Flaky:
    """Fails with some of its calls, wherever the samples come from."""

    def __init__(self, fails: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        self.fails, self.calls = fails, 0

    def __call__(self, sample: NoisySample) -> float:
        self.calls += 1
        if self.calls in self.fails:
            raise OSError("planted")
        return sample.total_len


@pytest.mark.parametrize("snapshot", [30, 10_000])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_failure_that_does_not_come_again_stays_one(dataset: Callable[..., Path], policy: str, snapshot: int) -> None:
    path = dataset(LENGTHS)
    settings = {"policy": policy, "resume": "exact", "snapshot_samples": snapshot}
    for stop in (1, 3, 9, 14, 21):
        flaky = Flaky({5, 13, 14, 29, 41})
        whole = module(path, length_fn=flaky, **settings)
        stream = iter(whole.train_dataloader())
        for _ in range(stop):
            next(stream)
        state = through_a_file(whole.state_dict())
        flaky.fails = set()
        expected = [next(stream) for _ in range(20)]
        part = module(path, length_fn=Flaky(), **settings)
        part.load_state_dict(state)
        found = iter(part.train_dataloader())
        assert [next(found) for _ in range(20)] == expected


@pytest.mark.parametrize("policy", POLICIES)
def test_a_sample_that_cannot_be_measured_again_is_a_difference_that_is_told(
    dataset: Callable[..., Path], policy: str
) -> None:
    path = dataset(LENGTHS)
    first = module(path, policy=policy)
    stream = iter(first.train_dataloader())
    for _ in range(20):
        next(stream)
    state = through_a_file(first.state_dict())
    for failing_call in (1, 3, 20, 31):
        part = module(path, policy=policy, resume="exact", length_fn=Flaky({failing_call}))
        state["settings"]["length_fn"] = part.settings.identity()["length_fn"]
        part.load_state_dict(state)
        with pytest.raises(ValueError, match=r"cannot go on exactly \(resume is 'exact'\)"):
            next(iter(part.train_dataloader()))
        part = module(path, policy=policy, length_fn=Flaky({failing_call}))
        part.load_state_dict(state)
        with pytest.warns(UserWarning, match="the data do not go on exactly"):
            loader = iter(part.train_dataloader())
            assert len([next(loader) for _ in range(20)]) == 20
