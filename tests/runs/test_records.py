"""Step records: their sums by step, the figures of a run."""

import math

import numpy as np
import pytest

from lightning_lengthpool.ordering import efficiency
from lightning_lengthpool.runs.steps import records
from lightning_lengthpool.runs.steps.steps_file import read_steps


def test_micro_batches_are_summed_by_step(steps_csv):
    table = records.by_step(read_steps(steps_csv))
    assert table["step"].tolist() == [4, 5, 6] and table["rank"].tolist() == [0, 1]
    assert table["tokens"].tolist() == [[14, 14], [9, 12], [2, 3]]
    assert table["compute_seconds"][:2].tolist() == [[3, 4], [2, 4]]
    assert np.isnan(table["compute_seconds"][2]).tolist() == [False, True]


def test_gaps_are_named(steps_csv):
    steps = {name: np.delete(column, 3) for name, column in read_steps(steps_csv).items()}
    with pytest.raises(ValueError, match="one row for each of the 2 ranks"):
        records.by_step(steps)


def test_summary_worked_out_by_hand(steps_csv):
    summary = records.summarize(read_steps(steps_csv))
    ranks = summary.pop("ranks")
    assert summary == pytest.approx(
        {
            "steps": 3,
            "compute_steps": 2,
            "idle_fraction_compute": efficiency.idle_fraction([[3, 4], [2, 4]]),
            "idle_fraction_tokens": efficiency.idle_fraction([[16, 14], [9, 12], [2, 4]]),
            "padding_fraction": 1 - 54 / 57,
            "useful_fraction": 54 / (2 * (16 + 12 + 4)),
            "tokens_per_second": (9 + 12 + 2 + 3) / (6 + 4),  # without the first step
            "seconds_per_step": (6 + 4) / 2,
            "seconds_to_first_batch": 0.7,
            "data_wait_seconds": 0.8 + 0.2 + 0.0,
            "misses": 0,
        }
    )
    assert ranks[0] == pytest.approx(
        {
            "rank": 0,
            "samples": 6,
            "tokens": 25,
            "compute_seconds": 5,  # of the two complete steps, as the wait
            "wait_seconds": 4,
            "data_seconds": 0.5,
            "idle_fraction": 1 - 5 / 8,
        }
    )
    assert ranks[1]["idle_fraction"] == 0


def test_adding_in_chunks_gives_the_same_summary(steps_csv):
    steps = read_steps(steps_csv)
    totals = records.RunTotals()
    for part in (slice(0, 4), slice(4, 4), slice(4, 8)):
        totals.add({name: column[part] for name, column in steps.items()})
    assert totals.summary() == records.summarize(steps)


def test_one_step_has_no_speed_and_no_steps_have_nothing(steps_csv):
    steps = read_steps(steps_csv)
    first = records.summarize({name: column[:4] for name, column in steps.items()})
    assert math.isnan(first["tokens_per_second"]) and math.isnan(first["seconds_per_step"])
    nothing = records.summarize({name: column[:0] for name, column in steps.items()})
    assert nothing["steps"] == 0 and math.isnan(nothing["idle_fraction_tokens"])
    assert nothing.keys() == first.keys()
