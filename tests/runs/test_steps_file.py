"""The file of step records: cut off anywhere, continued, thinned."""

import os
import resource
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_lengthpool.runs.steps.columns import COLUMNS
from lightning_lengthpool.runs.steps.records import by_step
from lightning_lengthpool.runs.steps.steps_file import BLOCK, StepsFile, TakenError, read_steps, thinned

HEADER = ",".join(COLUMNS) + "\n"


def records(steps: np.ndarray | range, ranks: int = 2, micro_batches: int = 1) -> dict[str, np.ndarray]:
    """Records of these steps, whose numbers depend on step, micro-batch and rank alone."""
    rows = [
        (s, r, 2, 10 * s + r, 7, 12 * s + m, 0, 0.25, 1.5 if r else np.nan, np.nan if s % 3 else 0.125, 12.375 + m)
        for s in map(int, steps)
        for m in range(micro_batches)
        for r in range(ranks)
    ]
    return dict(zip(COLUMNS, np.array(rows, dtype=float).reshape(-1, len(COLUMNS)).T, strict=True))


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert tuple(found) == COLUMNS
    for name in COLUMNS:
        np.testing.assert_array_equal(found[name], expected[name])


def select(steps: dict[str, np.ndarray], rows: np.ndarray | slice) -> dict[str, np.ndarray]:
    return {name: column[rows] for name, column in steps.items()}


def write(path, steps: dict[str, np.ndarray], start: int = 0, max_rows: int | None = None) -> StepsFile:
    file = StepsFile(path, max_rows)
    file.start(start)
    file.append(steps)
    return file


def test_reading_and_appending_are_inverse(steps_csv, tmp_path):
    steps = read_steps(steps_csv)
    assert steps["rank"].tolist() == [0, 1] * 4
    assert steps["longest"].tolist() == [5, 5, 6, 4, 9, 12, 1, 2]
    assert np.isnan(steps["compute_seconds"]).tolist() == [False] * 7 + [True]
    copy = tmp_path / "new" / "steps.csv"
    file = StepsFile(copy)
    file.start(0)
    assert_same(read_steps(copy), select(steps, slice(0)))
    for part in (slice(0, 4), slice(4, 4), slice(4, 8)):
        file.append(select(steps, part))
    assert_same(read_steps(copy), steps)
    assert copy.read_text().splitlines()[-1] == "6,1,2,3,2,4,0,0.000000,,,3.000000"
    assert copy.read_text().count(HEADER) == 1
    assert [path.name for path in copy.parent.iterdir()] == ["steps.csv"]


@pytest.mark.parametrize("tail", [b"", b"\0" * 9])
def test_a_file_cut_off_at_any_byte_is_read_and_continued(tmp_path, tail, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # slow, and hundreds of them
    path, ranks = tmp_path / "steps.csv", 3
    steps = records(range(1, 3), ranks, micro_batches=2)
    write(path, steps)
    whole = path.read_bytes()
    ends = np.cumsum([len(line) for line in whole.splitlines(keepends=True)])  # of the header and each row
    for cut in range(len(whole)):
        rows = int(np.count_nonzero(ends[1:] <= cut))
        path.write_bytes(whole[:cut] + tail)
        batches = rows // ranks
        # within the first micro-batch nothing tells the number of ranks
        assert_same(read_steps(path), select(steps, slice(batches * ranks if batches else rows)))
        done = 1 + batches // 2  # the first step that is not wholly there
        for resumed in (done, done + 1) if batches else (done,):
            path.write_bytes(whole[:cut] + tail)
            write(path, select(steps, steps["step"] >= resumed), start=resumed)
            before = np.arange(len(steps["step"])) < batches * ranks
            expected = (before & (steps["step"] < resumed)) | (steps["step"] >= resumed)
            assert_same(read_steps(path), select(steps, expected))
            if resumed == done:
                assert path.read_bytes() == whole


def test_the_first_rows_appear_at_once(tmp_path):
    file = StepsFile(tmp_path / "steps.csv")
    file.start(0)
    with file.path.open() as begun:
        file.append(records(range(2)))
        assert begun.read() == HEADER  # replaced, not written to, so no reader meets half a micro-batch
    with file.path.open() as begun:
        begun.read()
        file.append(records(range(2, 4)))
        assert len(begun.readlines()) == 4


def test_start_keeps_the_steps_that_are_not_repeated(tmp_path):
    path = tmp_path / "steps.csv"
    write(path, records(range(8)))
    write(path, records(range(5, 6)), start=5)
    assert_same(read_steps(path), records(range(6)))
    write(path, records(range(1)))
    assert_same(read_steps(path), records(range(1)))


def test_a_corrupt_line_is_named_and_the_file_is_left_alone(tmp_path):
    path = tmp_path / "steps.csv"
    write(path, records(range(4)))
    whole = path.read_text()
    fourth = whole.splitlines(keepends=True)[4]
    for bad in (
        "\0" * 20 + "\n",
        "1,1,2,11,7\n",
        fourth.replace("\n", ",5\n"),
        fourth.replace("7", "x"),
        fourth.replace("1,1,", "1,,", 1),
        fourth.replace("1,1,", ",1,", 1),
        "1,1\n1,1,2,11,7,12,0.25,1.5,,12.375\n",  # a part of a line that was not taken out
    ):
        path.write_text(whole.replace(fourth, bad))
        for failing in (lambda: read_steps(path), lambda: StepsFile(path).start(2)):
            with pytest.raises(ValueError, match=r"steps\.csv, line 5 is no step record: .* move the file away"):
                failing()
        assert path.read_text() == whole.replace(fourth, bad) and len(list(tmp_path.iterdir())) == 1
    path.write_text(HEADER + "1,0,2\n1,1,2\n")
    with pytest.raises(ValueError, match=r"steps\.csv, line 2 is no step record"):
        read_steps(path)


@pytest.mark.parametrize("content", ["step,loss\n1,2\n", "step,loss", "\n", HEADER[1:], "\0\0\n1,2\n", "\x89PNG\n\xff"])
def test_another_file_is_refused(tmp_path, content):
    path = tmp_path / "other.csv"
    path.write_bytes(content.encode("latin-1"))
    for failing in (lambda: read_steps(path), lambda: StepsFile(path).start(1)):
        with pytest.raises(ValueError, match=r"other\.csv is not a step record file: .* move this one away"):
            failing()
    assert path.read_bytes() == content.encode("latin-1")


@pytest.mark.parametrize("other", [records(range(3)), records(range(3), ranks=3), records(range(3, 6), ranks=3)])
def test_a_file_with_the_rows_of_two_runs_is_refused(tmp_path, other):
    path = tmp_path / "steps.csv"
    write(path, records(range(6)))
    write(tmp_path / "other.csv", other)
    with path.open("a") as file:
        file.write((tmp_path / "other.csv").read_text().removeprefix(HEADER))
    whole = path.read_text()
    for failing in (lambda: read_steps(path), lambda: StepsFile(path).start(6)):
        with pytest.raises(ValueError, match=r"steps\.csv, line 14: step \d comes after step 5, .* more than one run"):
            failing()
    assert path.read_text() == whole


@pytest.mark.parametrize("max_rows", [None, 450])
def test_a_file_that_another_run_continues_gets_no_rows_of_the_first(tmp_path, max_rows):
    path = tmp_path / "steps.csv"
    first = write(path, records(range(300)), max_rows=max_rows)
    second = StepsFile(path, max_rows)
    second.start(150)
    for _ in range(2):
        assert first.is_taken() and not second.is_taken()
        with pytest.raises(TakenError, match=r"another run writes .*steps\.csv"):
            first.append(records(range(300, 600)))
        second.append(records(range(150, 200)))
        second.start(150)
    assert set(read_steps(path)["step"]) <= set(range(150)) and len(list(tmp_path.iterdir())) == 1
    first.move(tmp_path / "moved.csv")
    first.append(records(range(300, 400)))
    alone = write(tmp_path / "alone.csv", records(range(300)), max_rows=max_rows)
    alone.append(records(range(300, 400)))
    assert first.path.read_bytes() == alone.path.read_bytes() and not first.is_taken()


def test_ranks_may_change_at_a_resume(tmp_path):
    path = tmp_path / "steps.csv"
    write(path, records(range(3), ranks=2))
    write(path, records(range(3, 4), ranks=3), start=3)
    assert read_steps(path)["rank"].tolist() == [0, 1] * 3 + [0, 1, 2]


def test_a_failed_write_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "steps.csv"
    file = write(path, records(range(20)))
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 30, limits[1]))  # the system takes 30 bytes, then none
    try:
        with pytest.raises(OSError):
            file.append(records(range(20, 30)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    file.append(records(range(20, 30)))
    assert_same(read_steps(path), records(range(30)))


def test_a_file_removed_during_the_run_is_begun_again(tmp_path):
    file = write(tmp_path / "logs" / "steps.csv", records(range(3)), max_rows=8)
    for steps in (records(range(3, 5)), records(range(5, 11))):  # the second is too long
        file.path.unlink()
        file.path.parent.rmdir()
        file.append(steps)
        assert_same(read_steps(file.path), select(steps, slice(8)))


def test_wrong_use_is_refused(tmp_path):
    with pytest.raises(ValueError, match="max_rows must be at least 1, or None for no limit, got 0"):
        StepsFile(tmp_path / "steps.csv", max_rows=0)
    with pytest.raises(RuntimeError, match="call start"):
        StepsFile(tmp_path / "steps.csv").append(records(range(3)))


def kept_steps(path) -> np.ndarray:
    return by_step(read_steps(path))["step"]


def test_a_file_is_thinned_by_blocks(tmp_path):
    file = StepsFile(tmp_path / "steps.csv", max_rows=2 * 4 * BLOCK)
    file.start(0)
    for step in range(0, 2000, 50):
        file.append(records(range(step, step + 50)))
        assert len(read_steps(file.path)["step"]) <= file.max_rows
        every = 1 if step < 400 else 2 if step < 800 else 4 if step < 1600 else 8
        expected = [s for s in range(step + 50) if s // BLOCK % every == 0]
        assert kept_steps(file.path).tolist() == expected
        assert thinned(read_steps(file.path)) == every
    assert_same(read_steps(file.path), records(np.array(expected)))


def test_one_long_append_is_thinned_at_once(tmp_path):
    write(tmp_path / "steps.csv", records(range(50, 1750)), max_rows=2 * 4 * BLOCK + 1)
    assert sorted({s // BLOCK for s in kept_steps(tmp_path / "steps.csv")}) == [0, 8, 16]


@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_a_run_that_is_resumed_is_thinned_as_one_that_is_not(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("runs")
    ranks, micro_batches = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    max_rows = ranks * micro_batches * data.draw(st.integers(4 * BLOCK, 6 * BLOCK))
    total, chunk = data.draw(st.integers(500, 1500)), data.draw(st.integers(1, 400))
    plain, resumed = StepsFile(folder / "plain.csv", max_rows), StepsFile(folder / "resumed.csv", max_rows)
    plain.start(0)
    resumed.start(0)
    step = 0
    while step < total:
        steps = records(range(step, min(step + chunk, total)), ranks, micro_batches)
        step += chunk
        plain.append(steps)
        resumed.append(steps)
        assert len(read_steps(resumed.path)["step"]) <= max_rows
        if step < total and data.draw(st.booleans()):
            back = max(step - data.draw(st.integers(0, BLOCK)), 1)
            resumed = StepsFile(resumed.path, max_rows)
            resumed.start(back)
            resumed.append(records(range(back, step), ranks, micro_batches))
    assert resumed.path.read_bytes() == plain.path.read_bytes()


def test_a_limit_below_one_block_keeps_the_first_whole_steps(tmp_path):
    file = StepsFile(tmp_path / "steps.csv", max_rows=50)
    file.start(0)
    for step in range(0, 1000, 10):
        file.append(records(range(step, step + 10), micro_batches=2))
    assert_same(read_steps(file.path), records(range(12), micro_batches=2))


def test_without_a_limit_a_file_thinned_before_stays_so(tmp_path):
    path = tmp_path / "steps.csv"
    write(path, records(range(1000), ranks=1), max_rows=500)
    write(path, records(range(1000, 1200), ranks=1), start=1000)
    assert sorted({s // BLOCK for s in kept_steps(path)}) == [0, 2, 4, 6, 8, 10]


@pytest.mark.parametrize(
    ("blocks", "every"),
    [
        ([], 1),
        ([0], 1),
        ([7], 1),  # one block tells nothing
        ([0, 1, 2], 1),
        ([0, 1, 4], 1),  # a thinned file would have no block 1: rows were lost otherwise
        ([0, 2, 4], 2),
        ([6, 8], 2),  # a run that began in the middle
        ([0, 4, 12], 4),
        ([0, 64], 64),
    ],
)
def test_thinning_is_told_from_the_records(blocks, every):
    assert thinned(records(np.array([block * BLOCK + 5 for block in blocks]))) == every


def test_thinning_and_resuming_stream_the_file(tmp_path):
    file = write(tmp_path / "steps.csv", records(range(30_000), ranks=1), max_rows=30_000)
    size = file.path.stat().st_size
    tail = records(range(30_000, 30_001), ranks=1)
    tracemalloc.start()
    try:
        resumed = StepsFile(file.path, file.max_rows)
        resumed.start(30_000)
        resumed.append(tail)
        assert tracemalloc.get_traced_memory()[1] < size / 5
    finally:
        tracemalloc.stop()
    assert len(kept_steps(file.path)) == 15_001


def test_a_file_of_another_number_of_ranks_is_moved_aside(steps_csv):
    before = steps_csv.read_bytes()
    file = StepsFile(steps_csv)
    file.start(7, ranks=2)
    assert steps_csv.read_bytes() == before
    file.start(7, ranks=3)
    assert steps_csv.with_name("steps.before-7.csv").read_bytes() == before
    assert read_steps(steps_csv)["step"].tolist() == []


def test_counts_are_written_as_all_numbers_are(tmp_path):
    rng = np.random.default_rng(0)
    rows = {name: rng.integers(0, 10**6, 40).astype(float) for name in COLUMNS}
    rows |= {"step": np.repeat(np.arange(20.0), 2), "rank": np.tile([0.0, 1.0], 20), "misses": np.zeros(40)}
    rows |= {name: rng.lognormal(-3, 2, 40) for name in COLUMNS if name.endswith("seconds")}
    rows["compute_seconds"][3:9] = np.nan
    rows["longest"][0], rows["padded_tokens"][1], rows["tokens"][2] = -0.0, 1e15, 0.1 + 0.2
    rows["samples"][5] = 123456789012345.0
    file = StepsFile(tmp_path / "steps.csv")
    file.start(0)
    file.append(rows)
    written = [line.split(",") for line in (tmp_path / "steps.csv").read_text().splitlines()[1:]]
    for name, cells in zip(COLUMNS, zip(*written, strict=True), strict=True):
        form = "%.6f" if name.endswith("seconds") else "%.15g"
        assert list(cells) == ["" if np.isnan(value) else form % value for value in rows[name]]
