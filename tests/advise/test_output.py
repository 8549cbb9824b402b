"""How an advice is printed: plain where it is piped, in tables on a terminal."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from helpers.advising import OFF, POOL, changed_plan, scanned
from helpers.advising import advise_quickly as advise
from lightning_lengthpool.advise.advice import Advice
from lightning_lengthpool.advise.output import WIDTH, print_advice
from lightning_lengthpool.advise.scan.length_scan import BatchCheck
from lightning_lengthpool.simulation.predict import Interval

HEADINGS = [
    "1. Is the pool active?",
    "2. How lengths are distributed",
    "3. What is wasted (predicted)",
    "4. What it costs (memory, start, restore)",
    "5. pool_size, batch_size and num_workers",
    "6. Can synchronisation be the bottleneck?",
    "7. Checks",
    "8. Recommendation",
]


@pytest.fixture(scope="module")
def advice() -> Advice:
    off = BatchCheck("[red]shard.tar/7", 500.0, 900.0, "attention_mask")
    plan = changed_plan(POOL, batch_size=4, pool_size=100)
    return advise(scanned(batch_checks=(off,)), plan, world_sizes=[8, 64], pool_sizes=[1000])


def printed(advice: Advice, **options) -> str:
    file = io.StringIO()
    print_advice(advice, Console(file=file, **options))
    return file.getvalue()


def sections(text: str) -> dict[str, str]:
    places = [text.index(heading) for heading in HEADINGS]
    assert places == sorted(places)
    ends = [*places[1:], len(text)]
    return {heading: text[start:end] for heading, start, end in zip(HEADINGS, places, ends, strict=True)}


@pytest.mark.parametrize("width", [40, 80, 300])
def test_plain_text_has_neither_boxes_nor_colours_and_does_not_depend_on_the_width(advice, width):
    text = printed(advice, width=width)
    assert text == printed(advice) and text.isascii()
    assert "\x1b" not in text and max(map(len, text.splitlines())) <= WIDTH
    assert all(line == line.rstrip() for line in text.splitlines())


def test_the_standard_output_is_plain_where_it_is_no_terminal(advice, capsys):
    print_advice(advice)
    assert capsys.readouterr().out == printed(advice)


def test_a_terminal_gets_tables_in_colour(advice):
    text = printed(advice, force_terminal=True, width=100, color_system="standard")
    assert "\x1b[" in text and "─" in text and "█" in text
    sections(text)


@pytest.mark.parametrize("width", [80, 100])
def test_a_narrow_terminal_shows_all_figures(advice, width):
    text = printed(advice, force_terminal=True, width=width, color_system=None)
    assert "…" not in text and max(map(len, text.splitlines())) <= width
    low, high = (f"{100 * value:.1f}" for value in advice.recommendation.prediction.idle[1:])
    (row,) = [line for line in text.splitlines() if "<- use" in line]
    assert "stream + ref." in text and "<- today" in text and f"({low} to {high})" in row


def test_every_section_says_its_figures(advice):
    found = sections(printed(advice))
    assert "policy pool, pool_size 100" in found[HEADINGS[0]]
    distribution = found[HEADINGS[1]]
    for part in ("4,800 samples", "coefficient of variation", "high variance", "longest 5 %", "50 %", "####"):
        assert part in distribution
    bars = [line for line in distribution.splitlines() if " - " in line]
    assert len(bars) == len(advice.distribution.counts) and max(line.count("#") for line in bars) == 40
    waste = found[HEADINGS[2]]
    for part in ("8 ranks, predicted", "64 ranks, predicted", "no pool", "stream + reference", "90 % intervals"):
        assert part in waste
    assert waste.count("<- ") == 2 and "<- today\n" in waste and "<- recommended\n" in waste
    for part in ("memory of a rank's pools", "8.0 MB", "400 ms", "stop for a refill", "0 s", "restore"):
        assert part in found[HEADINGS[3]]
    assert "holds 25 batches" in found[HEADINGS[4]]
    assert "at most" in found[HEADINGS[5]]
    assert "In the YAML:" in found[HEADINGS[7]]
    assert advice.recommendation.yaml in found[HEADINGS[7]]


def test_each_setting_has_a_row_with_its_intervals(advice):
    rows = sections(printed(advice))[HEADINGS[2]].splitlines()
    today = next(line for line in rows if "<- today" in line).split()
    idle = [f"{100 * value:.1f}" for value in advice.today.idle]
    assert today[:6] == ["pool", "100", idle[0], "%", f"({idle[1]}", "to"] and today[6] == f"{idle[2]})"
    # 2 x (no pool, and 3 policies x 2 sizes), and 2 sizes with a reference
    assert sum("%" in line and ("(" in line) and line.startswith("  ") for line in rows) >= 2 * 7 + 2


def test_what_is_found_comes_before_what_passed(advice):
    checks = sections(printed(advice))[HEADINGS[6]]
    assert checks.index("! in 1 of 1 batches") < checks.index("what to do:") < checks.index("passed: the pool is on")
    assert checks.index("passed: the pool is on") < checks.index("not checked:")
    assert "'[red]shard.tar/7'" in " ".join(checks.split())  # brackets are no markup


def test_nothing_to_mend_is_said():
    advice = advise(scanned(), POOL, world_sizes=[8], pool_sizes=[1000])
    assert "nothing to fix was found" in printed(advice)


def test_what_was_not_measured_is_said(advice):
    scan = scanned(sample_bytes=None, encode_seconds=None, restore_seconds=None)
    text = printed(advise(scan, OFF, world_sizes=[8], pool_sizes=[1000]))
    assert "was not measured" in text and "memory of" not in text
    nothing = replace(advice.today, idle=Interval(float("nan"), float("nan"), float("nan")))
    assert "nan" not in printed(replace(advice, today=nothing, predictions=(nothing, *advice.predictions[1:])))


def test_a_recommendation_without_a_change_has_no_yaml():
    plan = changed_plan(POOL, policy="stream", pool_size=3000, has_reference=True)
    text = printed(advise(scanned(), plan, world_sizes=[8], pool_sizes=[3000]))
    assert "Change nothing" in text and "YAML" not in text and "<- today, recommended" in text
