from pathlib import Path, PurePosixPath

import pytest
from megatron.energon.epathlib import EPath

from lightning_lengthpool.data.reading.paths import data_path
from lightning_lengthpool.ordering.local_paths import file_path


@pytest.mark.parametrize("read", [data_path, file_path])
@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/data/x", "/data/x"),
        ("data/x", "data/x"),
        (Path("/data/x"), Path("/data/x")),
        ("file:///data/x", "/data/x"),
        ("file://localhost/data/x", "/data/x"),
        ("file:/data/x", "/data/x"),
        ("FILE:///data/my%20set", "/data/my set"),
        ("~/x", "/home/me/x"),
        (Path("~/x"), Path("/home/me/x")),
        (PurePosixPath("/data/x"), "/data/x"),
        ("/data/a~b", "/data/a~b"),
    ],
)
def test_a_local_path_is_read(read, path, expected, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    found = read(path, "path")
    assert found == expected and type(found) is type(expected)
    assert read(found, "path") == found


@pytest.mark.parametrize("read", [data_path, file_path])
@pytest.mark.parametrize("path", [None, 3, 2.5, True, [], ["a"], {"a": 1}, b"/data/x", "", " "])
def test_what_is_no_path_is_named(read, path) -> None:
    with pytest.raises(ValueError, match="val_path is .*, expected"):
        read(path, "val_path")


@pytest.mark.parametrize("read", [data_path, file_path])
@pytest.mark.parametrize("path", ["s3://bucket/x", "gs://bucket/x", "https://host/x", "memory://x", "hf://datasets/x"])
def test_a_url_that_cannot_be_read_is_named(read, path: str) -> None:
    with pytest.raises(
        ValueError, match=f"path is '{path}', (but energon reads .*msc://PROFILE|expected a local file)"
    ):
        read(path, "path")


@pytest.mark.parametrize("path", ["file://data/x", "file://~/x", "file://"])
def test_a_file_url_without_a_full_path_is_named(path: str) -> None:
    with pytest.raises(ValueError, match="expected the full path after file://, say file:///data"):
        data_path(path)


def test_a_home_folder_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="path is '~nobody-of-this-name/x', but there is no such home folder"):
        data_path("~nobody-of-this-name/x")


@pytest.mark.parametrize("path", ["msc://profile/x", "rclone://profile/x", "dss://name@v1/x", EPath("/data/x")])
def test_what_energon_reads_stays_as_it_is(path) -> None:
    assert data_path(path) is path


def test_a_remote_file_of_lengths_is_named() -> None:
    with pytest.raises(ValueError, match="reference_lengths is 'msc://p/a.csv', expected a local file"):
        file_path("msc://p/a.csv", "reference_lengths")
