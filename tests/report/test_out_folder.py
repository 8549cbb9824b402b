"""Where results go: what is in the way is said in one sentence before any work, and any path will do."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.runs import config
from lightning_lengthpool.advise import command
from lightning_lengthpool.cli import main
from lightning_lengthpool.report import page
from lightning_lengthpool.report.compare import compare
from lightning_lengthpool.report.drawings import DRAWINGS, draw
from lightning_lengthpool.report.out_folder import make_out
from lightning_lengthpool.runs.run import find_steps, load_run


def file(path: Path) -> Path:
    path.write_text("mine")
    return path


def blocked(out: Path, name: str) -> Path:
    (out / name).mkdir(parents=True)
    return out


IN_THE_WAY: dict[str, Callable[[Path, str], Path]] = {
    "a file": lambda path, name: file(path),
    "below a file": lambda path, name: file(path) / "deeper",
    "a folder of that name": blocked,
    "nowhere to write": lambda path, name: Path("/proc/results"),
}


def never(*_: Any, **__: Any) -> None:
    raise AssertionError("the work was begun")


def check(out: Path, capsys: pytest.CaptureFixture[str], args: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*args, "--out", str(out)])
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert ended.value.code == 2 and f"error: --out is {str(out)!r}, " in said


@pytest.mark.parametrize("way", IN_THE_WAY)
@pytest.mark.parametrize("name", ["advice.json", "advice.png", "lengths.csv"])
def test_advise_says_so_before_it_simulates(
    way: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "advise", never)
    (tmp_path / "in.csv").write_text("tokens\n5\n9\n")
    args = ["advise", "--lengths", str(tmp_path / "in.csv"), "--world_size", "2", "--batch_size", "1"]
    check(IN_THE_WAY[way](tmp_path / "out", name), capsys, args)


@pytest.mark.parametrize("way", IN_THE_WAY)
@pytest.mark.parametrize("name", ["report.html", "causes.png"])
def test_report_says_so_before_it_loads_the_run(
    way: str,
    name: str,
    tmp_path: Path,
    steps_csv: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(page, "load_run", never)
    check(IN_THE_WAY[way](tmp_path / "out", name), capsys, ["report", str(steps_csv)])


@pytest.mark.parametrize("way", IN_THE_WAY)
@pytest.mark.parametrize("name", ["compare.json", "compare.png", "pool-1/output.txt", "none-0/sync/steps.csv"])
def test_compare_says_so_before_it_trains(way: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_lengthpool.report.compare._run", never)
    with pytest.raises(ValueError, match="^--out is "):
        compare(config(), ["x.yaml"], ["none", "pool"], repeats=2, out=str(IN_THE_WAY[way](tmp_path / "out", name)))


def test_what_is_there_is_left_as_it_is(tmp_path: Path) -> None:
    kept = file(tmp_path / "old.csv")
    assert make_out(tmp_path, ["old.csv", "new.csv"]) == tmp_path
    assert kept.read_text() == "mine" and list(tmp_path.iterdir()) == [kept]


def test_lengths_of_before_do_not_stand_in_for_a_reference_that_is_not_there(tmp_path: Path) -> None:
    file(tmp_path / "lengths.csv")
    assert not command._is_in_use(str(tmp_path), tmp_path / "to_come.csv")
    assert command._is_in_use(str(tmp_path), tmp_path / "lengths.csv")


def test_the_figures_are_those_that_were_made_room_for(steps_csv: Path) -> None:
    assert tuple(drawing.name for drawing in draw(load_run(steps_csv))) == DRAWINGS


@pytest.mark.parametrize(
    "name", [b"caf\xe9", b"two\nlines", b"100%s 'n' \"q\"", b"$x_{$", b"<b>{style}&amp;"], ids=repr
)
def test_a_run_folder_may_have_any_name(
    name: bytes, tmp_path: Path, steps_csv: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), name)))
    (folder / "sync").mkdir(parents=True)
    steps_csv.rename(folder / "sync" / "steps.csv")
    main(["report", str(folder), "--baseline", str(folder), "--out", str(folder / "page")])
    assert "Written: " in capsys.readouterr().out
    assert "<h2>Findings</h2>" in (folder / "page" / "report.html").read_text(encoding="utf-8")
    lengths = tmp_path / "in.csv"
    lengths.write_text("tokens\n" + "5\n9\n7\n" * 40)
    args = ["--lengths", str(lengths), "--world_size", "2", "--batch_size", "1", "--run", str(folder)]
    main(["advise", *args, "--out", str(folder / "advice")])
    assert "Recommendation" in capsys.readouterr().out and (folder / "advice" / "advice.json").is_file()


def test_a_folder_without_permission_is_not_taken_for_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as root everything is permitted
    with pytest.raises(ValueError, match="cannot be read: permission denied"):
        find_steps(tmp_path)
