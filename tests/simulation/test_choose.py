"""The one rule that chooses a setting, on predictions that are made up."""

from collections.abc import Callable

import pytest

from lightning_lengthpool.ordering.settings import PoolSettings
from lightning_lengthpool.simulation.cases import Case
from lightning_lengthpool.simulation.choose import Chooser, cases_to_try, sizes_to_try
from lightning_lengthpool.simulation.predict import Prediction
from lightning_lengthpool.simulation.uncertainty import Interval


def case(policy: str, pool_size: int) -> Case:
    return Case(PoolSettings(1, pool_size, policy), 8)


NONE = case("none", 0)
WASTE = {
    "pool": {100: 0.29, 300: 0.18, 1000: 0.11, 3000: 0.06, 10_000: 0.04},
    "stream": {100: 0.22, 300: 0.12, 1000: 0.075, 3000: 0.045, 10_000: 0.03},
}


def predict(of: Case) -> Prediction:
    idle = 0.5 if of.policy == "none" else WASTE[of.policy][of.pool_size] / (2 if of.has_reference else 1)
    return Prediction(of, Interval(idle, idle, idle), Interval(0, 0, 0), Interval(1 - idle, 1 - idle, 1 - idle))


def chooser(today: Case = NONE, **limits: int | Callable[[Case], bool]) -> Chooser:
    return Chooser(predict(today), predict(NONE), **limits)  # type: ignore[arg-type]


@pytest.mark.parametrize("may_refer", [False, True])
@pytest.mark.parametrize("rank_samples", [None, 50, 350, 5000])
@pytest.mark.parametrize("today", [NONE, case("pool", 1000), case("stream", 100), case("pool", 10_000)])
def test_a_search_says_what_a_prediction_of_all_cases_says(
    today: Case, rank_samples: int | None, may_refer: bool
) -> None:
    cases = cases_to_try(case, WASTE["pool"], needs_stream=False, may_refer=may_refer)
    asked: list[Case] = []

    def ask(of: Case) -> Prediction:
        asked.append(of)
        return predict(of)

    judge = chooser(today, **({} if rank_samples is None else {"rank_samples": rank_samples}))
    assert judge.search(cases, ask) == judge.choose([predict(of) for of in cases])
    assert len(asked) == len(set(asked)) < len(cases)


def test_each_change_must_save_two_points() -> None:
    cases = cases_to_try(case, WASTE["pool"], needs_stream=False, may_refer=False)
    assert chooser().search(cases, predict).case == case("stream", 3000)  # 0.045 + 4.1 changes, each worth 0.02
    assert chooser(case("pool", 3000)).search(cases, predict).case == case("pool", 3000)


def test_what_does_not_fit_is_not_chosen() -> None:
    cases = cases_to_try(case, WASTE["pool"], needs_stream=False, may_refer=False)
    assert chooser(fits=lambda of: of.pool_size <= 300).search(cases, predict).case == case("stream", 300)
    assert chooser(rank_samples=350, pools=2).search(cases, predict).case == case("stream", 100)
    assert chooser(rank_samples=50).search(cases, predict).case == NONE


def test_the_sizes_to_try() -> None:
    assert sizes_to_try((100, 300, 0), 8) == [100, 300]
    assert sizes_to_try((100, 300), 200) == [300]
    assert sizes_to_try((100, 300), 1000) == [10_000]
    assert sizes_to_try((100, 300), 8, pools=2, rank_samples=90) == [45, 100, 300]
    assert sizes_to_try((100, 300), 8, room=257) == [100, 250, 300]
