"""What lies beside a run's `steps.csv`, whatever became of it."""

import json
import math

import pytest

from helpers.runs import write_run
from lightning_lengthpool.cli import main
from lightning_lengthpool.runs.run import load_run
from lightning_lengthpool.runs.run_json import About

_WRONG = [
    (3, "it holds 3, expected an object"),
    ([1], "it holds [1], expected an object"),
    (None, "it holds null, expected an object"),
    ("x", 'it holds "x", expected an object'),
    ({"run": 1}, "run is 1, expected a text"),
    ({"hosts": 3}, "hosts is 3, expected a list of texts"),
    ({"hosts": "abc"}, 'hosts is "abc", expected a list of texts'),
    ({"hosts": [1, 2, 3]}, "hosts is [1, 2, 3], expected a list of texts"),
    ({"workers_by_rank": 4}, "workers_by_rank is 4, expected a list of integers"),
    ({"workers_by_rank": {"0": 1}}, 'workers_by_rank is {"0": 1}, expected a list of integers'),
    ({"workers_by_rank": [1, "2"]}, 'workers_by_rank is [1, "2"], expected a list of integers'),
    ({"settings": [1]}, "settings is [1], expected an object"),
    ({"settings": "x"}, 'settings is "x", expected an object'),
    ({"settings": {"policy": 1}}, "settings.policy is 1, expected a text"),
    ({"settings": {"pool_size": "9"}}, 'settings.pool_size is "9", expected an integer of at least 0'),
    ({"settings": {"pool_size": None}}, "settings.pool_size is null, expected an integer of at least 0"),
    ({"settings": {"pool_size": math.nan}}, "settings.pool_size is NaN, expected an integer of at least 0"),
    ({"settings": {"batch_size": 0}}, "settings.batch_size is 0, expected an integer of at least 1"),
    ({"settings": {"num_workers": [2]}}, "settings.num_workers is [2], expected an integer of at least 0"),
    ({"settings": {"max_tokens": "x"}}, 'settings.max_tokens is "x", expected a positive number'),
]


@pytest.mark.parametrize("about", [*_WRONG, b"{", b"", b'{"hosts": "\xff"}', b"[" * 100_000])
@pytest.mark.parametrize("command", ["report", "advise"])
def test_a_run_json_that_cannot_be_used_is_one_sentence(tmp_path, capsys, command, about):
    path = write_run(tmp_path / "steps.csv")
    about, said = (about, "") if isinstance(about, bytes) else about
    path.with_name("run.json").write_bytes(about if isinstance(about, bytes) else json.dumps(about).encode())
    lengths = tmp_path / "in.csv"
    lengths.write_text("tokens\n5\n6\n")
    more = ["--lengths", str(lengths), "--world_size", "2", "--batch_size", "1", "--run"] if command == "advise" else []
    with pytest.raises(SystemExit) as ended:
        main([command, *more, str(path), "--out", str(tmp_path / "out")])
    *usage, line = capsys.readouterr().err.strip().splitlines()
    assert ended.value.code == 2 and all(not one.startswith("Traceback") for one in usage)
    assert f"{path.with_name('run.json')} cannot be used ({said}" in line and "move it away" in line


@pytest.mark.parametrize(
    "about", [{}, {"run": None, "hosts": None, "workers_by_rank": [None], "settings": {"more": 1}}]
)
def test_what_run_json_does_not_tell_is_not_missed(tmp_path, about):
    path = write_run(tmp_path / "steps.csv")
    path.with_name("run.json").write_text(json.dumps(about))
    assert load_run(path).about == About(
        workers_by_rank=about.get("workers_by_rank"), settings=about.get("settings", {})
    )


@pytest.mark.parametrize(
    "lengths", [b"rank,tokens\n0,\xff\n", b"rank,tokens\n0,nan\n", b"rank,tokens\n0,-1\n", b"a\n1\n"]
)
def test_lengths_that_cannot_be_used_are_one_sentence(tmp_path, lengths):
    path = write_run(tmp_path / "steps.csv")
    path.with_name("lengths.csv").write_bytes(lengths)
    with pytest.raises(ValueError, match=r"lengths\.csv cannot be read \(.*\), expected the columns .* move it away"):
        load_run(path)
