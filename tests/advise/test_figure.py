"""The figure of an advice."""

from types import SimpleNamespace

import numpy as np
import pytest

from helpers.figures import drawn
from lightning_lengthpool.advise.advice import Advice
from lightning_lengthpool.advise.figure import advice_figure
from lightning_lengthpool.ordering.settings import PoolSettings
from lightning_lengthpool.simulation.predict import Case, Interval, Prediction


def forecast(idle: float, policy: str, pool_size: int, world_size: int, has_reference: bool = False) -> Prediction:
    case = Case(PoolSettings(4, pool_size, policy), world_size, has_reference=has_reference)
    value = Interval(idle, 0.9 * idle, 1.1 * idle)
    return Prediction(case, value, value, value)


def advice_of(worlds: tuple[int, ...], scale: float = 1.0, sizes: tuple[int, ...] = (100, 300, 400, 1000)) -> Advice:
    """Only what the figure looks at."""
    rows = []
    for world in worlds:
        rows.append(forecast(0.5 * scale, "none", 0, world))
        for policy, factor in (("pool", 2.0), ("stream", 1.5)):
            rows += [forecast(scale * factor / size, policy, size, world) for size in sizes]
    rows += [forecast(scale / size, "stream", size, worlds[0], True) for size in sizes]
    recommendation = SimpleNamespace(case=Case(PoolSettings(4, 1000, "stream"), worlds[0]))
    return SimpleNamespace(predictions=tuple(rows), today=rows[0], recommendation=recommendation)  # type: ignore[return-value]


@pytest.mark.parametrize("worlds", [(8,), (8, 64, 512), (2, 8, 64, 512)], ids=["1", "3", "4"])
def test_idle_against_pool_size_has_a_panel_for_each_world_size_and_a_line_for_each_policy(worlds):
    figure = drawn(advice_figure(advice_of(worlds)))
    panels = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title() for axes in panels] == [f"{world} ranks" for world in worlds]
    for axes in panels:
        lines = {line.get_label(): line for line in axes.get_lines()}
        assert axes.get_xscale() == axes.get_yscale() == "log"
        np.testing.assert_allclose(lines["pool"].get_xdata(), [100, 300, 400, 1000])
        np.testing.assert_allclose(lines["pool"].get_ydata(), [2, 2 / 3, 0.5, 0.2])
        np.testing.assert_allclose(lines["no pool"].get_ydata(), [50, 50])
        assert ("stream + reference" in lines) == (axes is panels[0])
        band = axes.collections[1].get_paths()[0].vertices[:, 1]  # of 'pool'
        assert (band.min(), band.max()) == (pytest.approx(0.18), pytest.approx(2.2))
        assert [label.get_text() for label in axes.get_xticklabels()] == ["100", "300", "1k"]
    (legend,) = figure.legends
    assert {text.get_text() for text in legend.get_texts()} == {
        *("no pool", "pool", "stream", "stream + reference", "today", "recommended"),
    }


def test_todays_setting_and_the_recommended_one_are_marked():
    figure = drawn(advice_figure(advice_of((8, 64))))
    first, second = (
        {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()} for axes in figure.axes
    )
    assert first["today"] == [[100, 50]]  # without a pool on the line of that, at its left end
    assert first["recommended"] == [[1000, pytest.approx(0.15)]]
    assert second["today"] == second["recommended"] == []


def test_lines_without_any_waiting_are_on_a_linear_axis():
    figure = drawn(advice_figure(advice_of((1,), scale=0.0)))
    assert figure.axes[0].get_yscale() == "linear" and figure.axes[0].get_title() == "1 rank"


def test_lines_of_policies_are_told_apart_without_colour():
    figure = drawn(advice_figure(advice_of((8,))))
    looks = [(line.get_marker(), line.get_linestyle()) for line in figure.axes[0].get_lines()]
    assert len(set(looks)) == len(looks)
