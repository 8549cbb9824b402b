"""What a checkpoint knows of its data: each case changes one thing."""

import json
import shutil
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from megatron.energon import TextSample
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.jsonl.crude_jsonl_dataset import CrudeJsonlDatasetFactory
from megatron.energon.metadataset.loader import prepare_metadataset

from helpers.datasets import write_dataset, write_metadataset
from lightning_lengthpool.data.reading import data_identity
from lightning_lengthpool.data.reading.data_identity import check_same_data, describe_data
from lightning_lengthpool.data.reading.splits import split_size

WAY_OUT = "This is the way out."


def check(before: Path, now: Path) -> None:
    """Compare two data sets; a warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_same_data(json.loads(json.dumps(describe_data(before, "train"))), describe_data(now, "train"), WAY_OUT)


@pytest.fixture
def yaml(tmp_path: Path) -> Callable[[str], Path]:
    """`yaml(train) -> path` writes a metadataset beside three data sets a, b and c."""
    write_dataset(tmp_path / "a", range(30), val=range(30), shards=3)
    write_dataset(tmp_path / "b", range(30, 60), shards=3)
    write_dataset(tmp_path / "c", range(60, 90), shards=3)
    count = iter(range(100))
    return lambda train: write_metadataset(tmp_path / f"{next(count)}.yaml", train)


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        (
            "{blend: [{path: a, weight: 0.7}, {path: b, weight: 0.3}]}",
            "{blend: [{path: a, weight: 0.5}, {path: b, weight: 0.5}]}",
            "data set 'a' had blend weight 0.7, and now has 0.5; data set 'b' had blend weight 0.3",
        ),
        (
            "{blend: [{path: a, weight: 0.5}, {path: b, weight: 0.5}]}",
            "{blend: [{path: b, weight: 0.5}, {path: a, weight: 0.5}]}",
            "the data sets were in the order a, b, and now are in the order b, a",
        ),
        (
            "{blend: [{path: a}, {path: b}]}",
            "{blend: [{path: a}, {path: b}, {path: c}]}",
            r"there were 2 data sets \(a, b\), and now there are 3 \(a, b, c\)",
        ),
        ("{path: a}", "{blend: [{path: a}, {path: b}]}", r"there were 1 data sets \(a\), and now there are 2"),
        (
            "{path: a, subset: {range: [0%, 50%]}}",
            "{path: a, subset: {range: [50%, 100%]}}",
            r"data set 'a' had subset \[0%, 50%\], and now has \[50%, 100%\]",
        ),
        (
            "{path: a, subset: {range: [0, 10]}}",
            "{path: a, subset: {range: [10, end]}}",
            r"data set 'a' had subset \[0, 10\], and now has \[10, end\]",
        ),
        (
            "{path: a}",
            "{path: a, subset: {range: [0%, 50%]}}",
            r"data set 'a' had subset all, and now has \[0%, 50%\]",
        ),
        (
            "{blend: [{path: a, subset: {range: [0, 10]}}], subset: {range: [0%, 50%]}}",
            "{blend: [{path: a, subset: {range: [0, 10]}}], subset: {range: [0%, 60%]}}",
            r"had subset \[0, 10\] and of these \[0%, 50%\], and now has \[0, 10\] and of these \[0%, 60%\]",
        ),
        (
            "{blend_epochized: [{path: a, repetitions: 2}, {path: b}]}",
            "{blend_epochized: [{path: a, repetitions: 3}, {path: b}]}",
            "data set 'a' had repetitions 2.0, and now has 3.0",
        ),
        (
            "{blend: [{path: a}, {path: b}]}",
            "{blend_epochized: [{path: a}, {path: b}]}",
            "data set 'a' had blend weight 0.5, and now has None",
        ),
        (
            "{path: a}",
            "{path: a, shuffle_over_epochs_multiplier: 3}",
            "data set 'a' had shuffle_over_epochs 1, and now has 3",
        ),
        ("{path: a}", "{path: a, split_part: val}", "the shards of data set 'a' have other names"),
        ("{path: a}", "{path: b}", r"'train-0000\d0.tar' of data set 'b' has other contents than it had"),
    ],
)
def test_what_differs_in_a_metadataset_is_said(yaml, before: str, now: str, message: str) -> None:
    old, new = yaml(before), yaml(now)
    check(old, old)
    check(new, new)
    with pytest.raises(ValueError, match=f"not those of the checkpoint: .*{message}.*as they were.*This is the way"):
        check(old, new)


def test_a_nested_metadataset_is_looked_into(yaml) -> None:
    inner = [yaml(f"{{blend: [{{path: a, weight: {weight}}}, {{path: b, weight: 1}}]}}") for weight in (1, 3)]
    outer = [yaml(f"{{blend: [{{path: {one.name}, weight: 2}}, {{path: c, weight: 2}}]}}") for one in inner]
    with pytest.raises(
        ValueError, match="data set 'a' had blend weight 0.25, and now has 0.375; .*'b' had blend weight 0.25.*0.125"
    ):
        check(*outer)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (
            "{blend: [{path: a, weight: 0.7}, {path: b, weight: 0.3}]}",
            "{blend: [{path: a, weight: 70}, {path: b, weight: 30}]}",
        ),
        ("{path: a}", "{blend: [{path: a, weight: 0.3}]}"),
    ],
    ids=["units", "one"],
)
def test_the_same_said_otherwise_is_the_same(yaml, before: str, now: str) -> None:
    check(yaml(before), yaml(now))


def test_many_differences_are_counted(tmp_path: Path) -> None:
    for name in "abcde":
        write_dataset(tmp_path / name, [1] * 4)
    blends = [
        "{blend: ["
        + ", ".join(f"{{path: {name}, weight: {w}}}" for name, w in zip("abcde", weights, strict=True))
        + "]}"
        for weights in ([1, 2, 3, 4, 5], [5, 1, 2, 3, 4])
    ]
    with pytest.raises(ValueError, match="'a' had.*'b' had.*'c' had [^;]*; and 2 more. Its state"):
        check(*(write_metadataset(tmp_path / f"{i}.yaml", blend) for i, blend in enumerate(blends)))


def test_the_same_data_elsewhere_are_the_same(tmp_path: Path) -> None:
    path = write_dataset(tmp_path / "a", range(300), shards=7)
    shutil.copytree(path, tmp_path / "elsewhere" / "with_another_name")
    check(path, tmp_path / "elsewhere" / "with_another_name")


def test_an_index_made_again_is_the_same_with_a_warning(tmp_path: Path) -> None:
    paths = [write_dataset(tmp_path / name, range(300), shards=7) for name in "ab"]
    with pytest.raises(
        UserWarning,
        match="index of data set 'b' or of what belongs to it was made again since .* if others have changed",
    ):
        check(*paths)
    later = tmp_path / "later"
    shutil.copytree(paths[0], later)
    for shard in later.glob("*.tar"):  # written again, later
        with tarfile.open(shard) as tar:
            members = [(member, tar.extractfile(member)) for member in tar]
            with tarfile.open(f"{shard}.new", "w") as new:
                for member, content in members:
                    member.mtime = 10**9
                    new.addfile(member, content)
        Path(f"{shard}.new").replace(shard)
    check(paths[0], later)


@pytest.mark.parametrize("shards", [1, 7])
def test_other_contents_under_the_same_names_are_noticed(tmp_path: Path, shards: int) -> None:
    values = [10 + i % 80 for i in range(300)]
    changed = [*values[:150], 99 - values[150] // 100, *values[151:]]
    a, b = (write_dataset(tmp_path / name, own, shards=shards) for name, own in (("a", values), ("b", changed)))
    assert [shard.stat().st_size for shard in sorted(a.glob("*.tar"))] == [
        shard.stat().st_size for shard in sorted(b.glob("*.tar"))
    ]
    with pytest.raises(ValueError, match=r"'train-000\d+.tar' of data set 'b' has other contents than it had\. Its"):
        check(a, b)


def test_other_sizes_are_noticed_where_no_sample_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_identity, "LOOKS", 4)
    monkeypatch.setattr(data_identity, "_BYTES", 1024)
    a, b = (
        write_dataset(tmp_path / name, [*range(10, 20), value, *range(10, 90)])
        for name, value in (("a", 10), ("b", 10**600))
    )
    with pytest.raises(ValueError, match="other contents"):
        check(a, b)


def test_a_shard_that_is_gone_is_named(tmp_path: Path) -> None:
    path = write_dataset(tmp_path / "a", range(30), shards=3)
    before = describe_data(path, "train")
    (path / "train-000010.tar").unlink()
    with pytest.raises(ValueError, match="'train-000010.tar' of data set 'a' cannot be read now. Its"):
        check_same_data(before, describe_data(path, "train"), WAY_OUT)


def test_excluded_samples_are_noticed(tmp_path: Path) -> None:
    path = write_dataset(tmp_path / "a", range(30), shards=3)
    before = describe_data(path, "train")
    split = path / ".nv-meta" / "split.yaml"
    split.write_text(split.read_text().replace("exclude: []", "exclude: [train-000000.tar/train000003]"))
    with pytest.raises(ValueError, match="or other samples are excluded"):
        check_same_data(before, describe_data(path, "train"), WAY_OUT)


def test_a_jsonl_file_is_known_by_its_lines(tmp_path: Path) -> None:
    def write(name: str, texts: list[str]) -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        CrudeJsonlDatasetFactory.prepare_dataset(path)
        return path

    texts = [f"line {i:03d}" for i in range(200)]
    first = write("a.jsonl", texts)
    check(first, write("copy.jsonl", texts))
    with pytest.raises(ValueError, match="'the file' of data set 'b.jsonl' has other contents"):
        check(first, write("b.jsonl", [*texts[:77], "line xxx", *texts[78:]]))
    with pytest.raises(ValueError, match="had 200 samples in 1 shards, and now has 199 samples in 1 shards"):
        check(first, write("b.jsonl", texts[1:]))


class Pair(TextSample):
    """Of two data sets."""

    @classmethod
    def from_joined(cls, first: TextSample, second: TextSample | None) -> "Pair":
        return cls.derive_from(first, text=first.text + ("" if second is None else second.text))


def test_joined_data_sets_are_looked_into(tmp_path: Path) -> None:
    write_dataset(tmp_path / "a", range(12), shards=2)
    write_dataset(tmp_path / "b", range(10), shards=2)

    def joined(nonmatch: str) -> Path:
        join = f"join: [{{path: a}}, {{path: b, nonmatch: {nonmatch}}}]"
        joiner = f"joiner: {{__module__: {__name__}, __class__: Pair}}"
        path = write_metadataset(tmp_path / f"{nonmatch}.yaml", f"{{{join}, {joiner}, subset: {{range: [0%, 50%]}}}}")
        prepare_metadataset(EPath(path))
        return path

    skip, none = joined("skip"), joined("none")
    assert [split_size(path, "train") for path in (skip, none)] == [5, 6]
    before = describe_data(skip, "train")
    with pytest.raises(ValueError, match=r"'a \+ b' had 10 samples in 4 shards, and now has 12 samples"):
        check(skip, none)
    shutil.rmtree(tmp_path / "b")
    write_dataset(tmp_path / "b", [*range(9), 3], shards=2)
    joined("skip")
    with pytest.raises(ValueError, match=r"'train-000005.tar \(2 of 2\)' of data set 'a \+ b' has other contents"):
        check_same_data(before, describe_data(skip, "train"), WAY_OUT)


def test_auxiliary_data_made_again_get_a_warning(tmp_path: Path) -> None:
    for name in "ab":
        write_dataset(tmp_path / name, range(12))
    crude = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
    (tmp_path / "a" / ".nv-meta" / "dataset.yaml").write_text(crude)
    path = write_metadataset(tmp_path / "metadataset.yaml", "{path: a, aux: {pictures: b}}")
    before = describe_data(path, "train")
    check(path, path)
    shutil.rmtree(tmp_path / "b")
    write_dataset(tmp_path / "b", range(12))
    with pytest.warns(UserWarning, match="index of data set 'a' or of what belongs to it was made again"):
        check_same_data(before, describe_data(path, "train"), WAY_OUT)


def test_a_description_stays_small(tmp_path: Path) -> None:
    few, many = (write_dataset(tmp_path / f"{n}", range(400), shards=n) for n in (100, 200))
    sizes = [len(json.dumps(describe_data(path, "train"))) for path in (few, many)]
    assert sizes[1] < 1.1 * sizes[0] < 5000


@pytest.mark.parametrize("before", ["150 samples", None, [], [3], [{"name": "a"}], {"name": "a"}], ids=repr)
def test_a_malformed_description_is_an_error_that_says_so(tmp_path: Path, before) -> None:
    now = describe_data(write_dataset(tmp_path / "a", range(3)), "train")
    with pytest.raises(ValueError, match="the checkpoint.*This is the way out"):
        check_same_data(before, now, WAY_OUT)
