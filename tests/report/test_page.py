import base64
import io
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from helpers.runs import write_run
from lightning_lengthpool.ordering import efficiency
from lightning_lengthpool.report import page
from lightning_lengthpool.report.drawings import SEED, draw, newest
from lightning_lengthpool.runs.formatting import percent
from lightning_lengthpool.runs.run import find_steps, load_run
from lightning_lengthpool.runs.steps.columns import COLUMNS

FIGURES = ("compute", "lengths", "causes", "distribution", "correlation")


class Page(HTMLParser):
    """A page's text, images, tables and references."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.images: list[dict[str, Any]] = []
        self.references: list[str] = []
        self.text = ""
        self.rows: list[list[str]] = []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "img":
            self.images.append(dict(attrs))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data

    def row(self, heading: str) -> list[str]:
        return next([cell.strip() for cell in row[1:]] for row in self.rows if row[:1] == [heading])


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Page]:
    """`make(...)` writes a run, makes its page, and parses it."""

    def make(name: str = "run", **kwargs: Any) -> Page:
        return Page(page.report(write_run(tmp_path / name / "sync" / "steps.csv", **kwargs)))

    return make


def test_the_page_needs_nothing_else_and_the_pngs_lie_beside_it(make, tmp_path, capsys):
    made = make(slow=1.5)
    assert re.search(r"//|http|@import|url\(", re.sub(r"base64,[^\"]*", "", made.source)) is None
    assert all(reference.startswith(("data:image/png;base64,", "#")) for reference in made.references)
    assert not {"script", "link", "iframe", "object"} & set(made.tags)
    assert len(made.images) == 5
    folder = tmp_path / "run" / "sync" / "report"
    assert {path.name for path in folder.iterdir()} == {"report.html", *(f"{name}.png" for name in FIGURES)}
    for image, name in zip(made.images, FIGURES, strict=True):
        data = base64.b64decode(image["src"].partition("base64,")[2], validate=True)
        assert data == (folder / f"{name}.png").read_bytes()
        decoded = Image.open(io.BytesIO(data))
        decoded.load()
        assert decoded.format == "PNG" and decoded.width == 1440 and 400 < decoded.height < 1600
        assert len(image["alt"]) > 60 and re.search(r"\d", image["alt"])
    printed = capsys.readouterr().out
    assert str(folder / "report.html") in printed
    assert all(f"- {sentence}" in printed for sentence in load_run(tmp_path).findings)


def test_findings_stand_at_the_top_and_the_tables_say_what_the_run_was(make, tmp_path):
    made = make(slow=1.5)
    first, *_ = load_run(tmp_path).findings
    assert "rank 1" in first
    assert made.text.index("Findings") < made.text.index(first[1:]) < made.text.index("The whole run in numbers")
    assert "3 ranks" in made.text and "200 steps (0 to 199)" in made.text and "thinned" not in made.text
    assert made.row("idle by compute seconds")[1] == "compute: 200 of 200 steps"
    assert [row[0] for row in made.rows[-3:]] == ["0", "1", "2"]
    assert "simulated" in made.images[1]["alt"] and "prediction" in made.text


def test_a_baseline_stands_beside_the_run(tmp_path):
    write_run(tmp_path / "a" / "steps.csv")
    write_run(tmp_path / "b" / "steps.csv", spread=0.6)
    made = Page(page.report(tmp_path / "a", tmp_path / "b", tmp_path / "out"))
    baseline, run, _ = made.row("idle by tokens")
    assert float(baseline.split()[0]) > 25 > 8 > float(run.split()[0])
    assert "simulated" not in made.source and "Of the baseline" in made.text
    assert all("baseline" in made.images[i]["alt"] for i in (1, 4))
    assert (tmp_path / "out" / "report.html").is_file() and not (tmp_path / "a" / "report").exists()


def test_the_simulated_order_has_the_same_batches_of_each_rank(tmp_path):
    run = load_run(write_run(tmp_path / "steps.csv"))
    drawing = draw(run)[1]
    shuffled = np.random.default_rng(SEED).permuted(run.costs, axis=0)
    assert (np.sort(shuffled, axis=0) == np.sort(run.costs, axis=0)).all()
    assert percent(efficiency.idle_fraction(shuffled)) in drawing.alt
    assert drawing.figure.axes[0].get_title().startswith("simulated: the same batches in random order")


@pytest.mark.parametrize("shift", [0.0, 0.5])
def test_ranks_with_other_lengths_are_flagged_with_what_they_cost(make, shift):
    alt = make(shift=shift).images[3]["alt"]
    points = re.search(r"differ: ([\d.]+) points of idle time that no order can remove", alt)
    assert 5 < float(points[1]) < 40 if shift else "are alike" in alt


def test_names_of_folders_are_text(tmp_path):
    made = Page(page.report(write_run(tmp_path / "<b>&\"'$x$ {y} é" / "sync" / "steps.csv").parent))
    assert "<b>&\"'$x$ {y} é" in made.text and "b" not in made.tags


def test_many_ranks_show_both_ends(make):
    made = make(ranks=40, steps=60)
    assert "24 are not shown" in made.text and len(made.rows[-16:][0]) == 7


@pytest.mark.parametrize("kwargs", [{"measured": False}, {"ranks": 1}, {"steps": 2}, {"ranks": 1, "steps": 2}])
def test_runs_that_lack_something(make, kwargs):
    made = make(**kwargs)
    assert len(made.images) == 5 and not re.search(r"\bnan\b", made.text + "".join(i["alt"] for i in made.images))
    assert ("not measured in this run" in made.text) == ("measured" in kwargs)


def test_a_running_job_is_read_as_far_as_it_is_written(tmp_path):
    path = write_run(tmp_path / "steps.csv")
    path.write_bytes(path.read_bytes()[:-20])
    assert "199 steps (0 to 198)" in Page(page.report(path)).text


def test_a_thinned_file_says_so_and_shows_steps_in_a_row(tmp_path):
    path = write_run(tmp_path / "steps.csv", steps=830, max_rows=1500)
    run = load_run(path)
    assert run.every == 2
    rows = newest(run, 120)
    assert (np.diff(run.table["step"][rows]) == 1).all() and run.table["step"][rows][-1] == 699
    assert "thinned: one block of 100 steps in 2 was kept" in Page(page.report(path)).text


def test_what_the_monitor_says_about_the_run_enters_the_findings(tmp_path):
    path = write_run(tmp_path / "steps.csv", slow=1.5, spread=0.6)
    path.with_name("run.json").write_text(
        json.dumps({"hosts": ["n1", "n2", "n3"], "settings": {"policy": "none", "pool_size": 0, "batch_size": 1}})
    )
    rng = np.random.default_rng(0)
    rows = [f"{rank},{length:.0f}\n" for rank in range(3) for length in rng.lognormal(6, 0.7, 2000)]
    path.with_name("lengths.csv").write_text("rank,tokens\n" + "".join(rows) + "2,12")
    said = " ".join(load_run(path).findings)
    assert "n2" in said and "pool_size" in said and "predicted" in said


def test_where_it_looks_for_steps(tmp_path):
    with pytest.raises(ValueError, match="no file or folder .*nowhere"):
        find_steps(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=f"no steps.csv in {tmp_path} or any folder below"):
        find_steps(tmp_path)
    one = write_run(tmp_path / "a" / "version_0" / "sync" / "steps.csv", steps=2)
    assert find_steps(tmp_path) == find_steps(one.parent) == find_steps(one) == one
    two = write_run(tmp_path / "a" / "version_1" / "sync" / "steps.csv", steps=2)
    with pytest.raises(ValueError) as error:
        find_steps(tmp_path)
    assert "2 runs" in str(error.value) and str(one) in str(error.value) and str(two) in str(error.value)


def test_too_few_steps_and_other_mistakes_are_errors(tmp_path):
    path = tmp_path / "steps.csv"
    path.write_text(",".join(COLUMNS) + "\n")
    with pytest.raises(ValueError, match="has no steps yet"):
        page.report(path)
    with pytest.raises(ValueError, match="only one step yet"):
        page.report(write_run(path, steps=1))
    with pytest.raises(ValueError, match="steps is 1"):
        page.report(write_run(path), steps=1)
    path.write_text(path.read_text().replace("\n1,0,", "\n1,2,", 1))
    with pytest.raises(ValueError, match=rf"{path}: Every micro-batch needs one row for each of the"):
        load_run(path)
