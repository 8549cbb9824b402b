"""Files of lengths of any size: what is read, what is drawn of it, and what does not depend on how it is read."""

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from lightning_lengthpool.cli import main
from lightning_lengthpool.cost_models import QuadraticCost
from lightning_lengthpool.ordering.lengths_file import read_lengths
from lightning_lengthpool.ordering.reference_lengths import read_reference_lengths


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_all_columns_are_read_in_order(tmp_path: Path) -> None:
    text = '\ufeffrank, tokens,class,other\n3,5,"b, c",x\n\n0, 7.5 ,a\n3,9,"b, c","two\nlines"\n'
    rows = read_lengths(write(tmp_path / "in.csv", text), "file", has_ranks=True)
    assert len(rows) == 3 and rows.tokens.tolist() == [5, 7.5, 9]
    assert rows.labels() == ["b, c", "a", "b, c"] and rows.names == ("b, c", "a")
    assert rows.ranks is not None and rows.ranks.tolist() == [3, 0, 3]
    assert {kind: own.tolist() for kind, own in rows.by_class().items()} == {"b, c": [5, 9], "a": [7.5]}


@pytest.mark.parametrize("rank", ["-1", "1.5", "", "9" * 30])
def test_a_wrong_rank_is_named(tmp_path: Path, rank: str) -> None:
    path = write(tmp_path / "in.csv", f"tokens,rank\n5,0\n5,{rank}\n")
    with pytest.raises(ValueError, match=f"line 3 of file .* has the rank '{rank}', expected an integer"):
        read_lengths(path, "file", has_ranks=True)
    assert read_lengths(path, "file").ranks is None


def test_a_sample_is_the_same_each_time_and_keeps_the_order(tmp_path: Path) -> None:
    lines = "".join(f"{n},{'ab'[n % 2]},{n % 3}\n" for n in range(1000))
    rows = read_lengths(write(tmp_path / "in.csv", f"tokens,class,rank\n{lines}"), "file", has_ranks=True)
    few = rows.sample(100)
    numbers = few.tokens.astype(int)
    assert len(few) == 100 and (np.diff(numbers) > 0).all() and numbers.max() > 800
    assert few.labels() == ["ab"[n % 2] for n in numbers] and few.ranks is not None
    assert few.ranks.tolist() == [n % 3 for n in numbers]
    assert rows.sample(100).tokens.tolist() == few.tokens.tolist() and rows.sample(1000) is rows


def test_the_digest_stays_what_checkpoints_have(tmp_path: Path) -> None:
    """Golden: of `class:length` in sorted lines, as written since the first version."""
    plain = read_reference_lengths(write(tmp_path / "a.csv", "tokens\n5\n7.5\n10\n5\n-0\n0\n1e20\n"))
    assert str(plain) == "7 lengths (ea531f6c4236)"
    classes = read_reference_lengths(write(tmp_path / "b.csv", "tokens,class\n5,b\n7,a\n5,b\n5,a\n"))
    assert str(classes) == "4 lengths (1afc0b533a6a)"
    again = read_reference_lengths(write(tmp_path / "c.csv", "class,tokens\nb,5\na,5\nb,5.0\na,7\n"))
    assert again.digest == classes.digest


def test_costs_of_a_reference_are_those_of_its_lengths(tmp_path: Path) -> None:
    file = read_reference_lengths(write(tmp_path / "in.csv", "tokens,class\n5,b\n7,a\n5,b\n4,a\n"))
    model = QuadraticCost(10)
    assert file.costs(model, by_class=False).costs[None].tolist() == [model.of_length(n) for n in (4, 5, 5, 7)]
    by_class = file.costs(None, by_class=True).costs
    assert [(kind, own.tolist()) for kind, own in by_class.items()] == [("b", [5, 5]), ("a", [4, 7])]


def test_a_large_file_takes_little_memory(tmp_path: Path) -> None:
    path = write(tmp_path / "in.csv", "tokens\n" + "123\n" * 300_000)
    tracemalloc.start()
    try:
        assert len(read_lengths(path, "file")) == 300_000
        assert tracemalloc.get_traced_memory()[1] < 300_000 * 16
    finally:
        tracemalloc.stop()


def test_advice_on_many_lengths_says_how_many_were_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = np.random.default_rng(0).lognormal(6, 1, 1000).round()
    lengths[500] = 123_456
    lines = "".join(f"{length:g},{number % 4}\n" for number, length in enumerate(lengths))
    path = write(tmp_path / "in.csv", f"tokens,rank\n{lines}")
    args = ["advise", "--lengths", str(path), "--batch_size", "2", "--out", str(tmp_path / "out")]
    main([*args, "--max_length", "200000", "--most_lengths", "300", "--pool_sizes", "20"])
    said = " ".join(capsys.readouterr().out.split())
    assert "1,000 lengths, of which 300 drawn at random were used" in said
    assert "the longest of all 1,000 lengths has 123,456 tokens" in said and "the longest of those drawn has" in said
    advice = json.loads((tmp_path / "out" / "advice.json").read_text())
    assert (advice["distribution"]["count"], advice["distribution"]["drawn_from"]) == (300, 1000)
    assert advice["plan"]["world_size"] == 4
    assert len(read_lengths(tmp_path / "out" / "lengths.csv", "file")) == 300
