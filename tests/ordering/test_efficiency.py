import math

import numpy as np
import pytest

from lightning_lengthpool.ordering import efficiency


def test_padded_tokens_is_samples_times_longest():
    assert efficiency.padded_tokens([3, 5, 4]) == 15
    assert efficiency.padded_tokens([7]) == 7
    assert efficiency.padded_tokens([]) == 0


def test_formulas_on_numbers_worked_out_by_hand():
    costs = [[1, 3], [2, 2], [4, 0]]  # means 2, 2, 2; slowest 3, 2, 4
    assert efficiency.sync_efficiency(costs) == pytest.approx(6 / 9)
    assert efficiency.idle_fraction(costs) == pytest.approx(3 / 9)
    assert efficiency.rank_idle_fractions([7, 5], 9) == pytest.approx([2 / 9, 4 / 9])
    assert efficiency.padding_fraction([[3, 5]], [[4, 6]]) == pytest.approx(0.2)
    assert efficiency.useful_fraction([[3, 5], [2, 2]], [[4, 6], [2, 4]]) == pytest.approx(12 / (2 * 10))


def test_equal_ranks_are_never_idle_and_one_rank_alone_neither():
    assert efficiency.idle_fraction([[5, 5, 5], [1, 1, 1]]) == 0
    assert efficiency.idle_fraction([[5], [1]]) == 0


def test_the_useful_fraction_is_both_efficiencies_multiplied():
    rng = np.random.default_rng(0)
    padded = rng.uniform(1, 9, (20, 4))
    tokens = padded * rng.uniform(0, 1, (20, 4))
    expected = efficiency.sync_efficiency(padded) * (1 - efficiency.padding_fraction(tokens, padded))
    assert efficiency.useful_fraction(tokens, padded) == pytest.approx(expected)


@pytest.mark.parametrize("nothing", [np.zeros((0, 4)), np.zeros((3, 2)), np.zeros((0, 0)), np.zeros((3, 0))])
def test_a_fraction_of_nothing_is_nan(nothing):
    assert math.isnan(efficiency.idle_fraction(nothing))
    assert math.isnan(efficiency.sync_efficiency(nothing))
    assert math.isnan(efficiency.padding_fraction(nothing, nothing))
    assert math.isnan(efficiency.useful_fraction(nothing, nothing))
    assert np.isnan(efficiency.rank_idle_fractions([0, 0], 0)).all()


@pytest.mark.parametrize("costs", [[1, 2], 3, [[[1]]]])
def test_costs_need_two_dimensions(costs):
    for function in (efficiency.idle_fraction, efficiency.sync_efficiency, lambda c: efficiency.useful_fraction(c, c)):
        with pytest.raises(ValueError, match=r"\[steps, ranks\], got shape"):
            function(costs)


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_bad_numbers_are_named(bad):
    for call in (
        lambda: efficiency.padded_tokens([1, bad]),
        lambda: efficiency.idle_fraction([[1, bad]]),
        lambda: efficiency.padding_fraction([1, 1], [2, bad]),
        lambda: efficiency.useful_fraction([[bad, 1]], [[2, 2]]),
    ):
        with pytest.raises(ValueError, match=f"finite and not negative, got {bad}"):
            call()


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"one shape, got \[2\] and \[1\]"):
        efficiency.padding_fraction([1, 2], [3])
