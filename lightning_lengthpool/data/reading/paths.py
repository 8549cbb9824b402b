"""How a setting that names a file or a folder is read: `~` and `file://` work, and what cannot work is named."""

import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from megatron.energon.epathlib import EPath

REMOTE = ("msc", "rclone", "dss")  # what energon reads beside local files


def data_path(path: Any, setting: str = "path") -> str | Path | EPath:
    """Where a data set lies, as energon takes it.

    Args:
        path: A local path, also with `~` or as `file://` URL; or one of energon's URLs (`msc://...`).
        setting: What names it, for messages.

    Raises:
        ValueError: If it is no path, or a URL that energon cannot read; the message names the setting and the value.
    """
    if isinstance(path, EPath):
        return path
    local = _local(path, setting, "an energon data set: a folder, or the YAML of a metadataset")
    scheme = _scheme(local)
    if scheme is None or scheme in REMOTE:
        return local
    raise ValueError(
        f"{setting} is {str(path)!r}, but energon reads local paths and msc:// only. Set up a profile for it in "
        "~/.msc_config.yaml (see multi-storage-client) and give msc://PROFILE/..., or mount the data."
    )


def file_path(path: Any, setting: str) -> str | Path:
    """Where a local file lies.

    Args:
        path: A local path, also with `~` or as `file://` URL.
        setting: What names it, for messages.

    Raises:
        ValueError: If it is no local path; the message names the setting and the value.
    """
    local = _local(path, setting, "the path of a CSV file")
    if _scheme(local) is None:
        return local
    raise ValueError(f"{setting} is {str(path)!r}, expected a local file: copy it here")


def _local(path: Any, setting: str, expected: str) -> str | Path:
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


def _scheme(path: str | Path) -> str | None:
    found = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", path) if isinstance(path, str) else None
    return None if found is None else found[1].lower()
