"""Paths as people give them: on this machine, `file://` URLs, and URLs of storage elsewhere."""

import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::|://)")  # s3://, memory://, simplecache::s3://


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a URL of anything but this machine's files."""
    return _REMOTE.match(_without_scheme(path)) is not None


def local_path(path: str | os.PathLike[str], setting: str) -> Path:
    """Return a path on this machine, of a path or a `file://` URL; raise `ValueError` for storage elsewhere."""
    if is_remote(path):
        raise ValueError(
            f"{setting} is {os.fspath(path)!r}, expected a path on this machine, not a URL of storage elsewhere. Use a "
            "local folder, and copy the files from or to the URL."
        )
    return Path(_without_scheme(path)).expanduser()


def stand_in(url: str | os.PathLike[str]) -> Path:
    """The local folder for what would belong at a URL: `lightning_logs/s3/bucket/x` for `s3://bucket/x`."""
    parts = [part for part in re.split("[:/]+", os.fspath(url)) if part not in ("", ".", "..")]
    return Path("lightning_logs", *parts).absolute()


def _without_scheme(path: str | os.PathLike[str]) -> str:
    text = os.fspath(path)
    for scheme in ("file://", "local://"):
        if text.startswith(scheme):
            return text[len(scheme) :]
    return text[5:] if text.startswith("file:/") else text  # what Lightning makes of 'file:///x' as default_root_dir


def file_path(path: Any, setting: str) -> str | Path:
    """Where a local file lies, of a path (also with `~`) or a `file://` URL; raise `ValueError` for any other URL."""
    local = expand(path, setting, "the path of a CSV file")
    if url_scheme(local) is None:
        return local
    raise ValueError(f"{setting} is {str(path)!r}, expected a local file: copy it here")


def expand(path: Any, setting: str, expected: str) -> str | Path:
    """The path with `~` and `file://` resolved; any other URL stays as it is."""
    if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str) or not str(path).strip():
        raise ValueError(f"{setting} is {path!r}, expected {expected}")
    text = os.fspath(path)
    if url := re.match(r"file:(?://(?:localhost)?)?(/[^/].*)", text, re.IGNORECASE):
        return unquote(url[1])
    if text.lower().startswith("file:"):
        raise ValueError(f"{setting} is {text!r}, expected the full path after file://, say file:///data/my_dataset")
    if text.startswith("~"):
        try:
            text = str(Path(text).expanduser())
        except RuntimeError:
            raise ValueError(f"{setting} is {text!r}, but there is no such home folder. Write the full path.") from None
    return Path(text) if isinstance(path, Path) else text


def url_scheme(path: str | Path) -> str | None:
    """The scheme of a URL, in lower case; None of a path."""
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", path) if isinstance(path, str) else None
    return None if scheme is None else scheme[1].lower()
