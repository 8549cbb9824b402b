"""Where a data set lies: a local path, or one of the URLs that energon reads."""

from pathlib import Path
from typing import Any

from megatron.energon.epathlib import EPath

from lightning_lengthpool.ordering.local_paths import expand, url_scheme

REMOTE = ("msc", "rclone", "dss")  # what energon reads beside local files


def data_path(path: Any, setting: str = "path") -> str | Path | EPath:
    """Where a data set lies, as energon takes it; `setting` names the path in errors.

    A path may be local, also with `~` or as `file://` URL, or one of energon's URLs (`msc://...`).
    """
    if isinstance(path, EPath):
        return path
    local = expand(path, setting, "an energon data set: a folder, or the YAML of a metadataset")
    scheme = url_scheme(local)
    if scheme is None or scheme in REMOTE:
        return local
    raise ValueError(
        f"{setting} is {str(path)!r}, but energon reads local paths and msc:// only. Set up a profile for it in "
        "~/.msc_config.yaml (see multi-storage-client) and give msc://PROFILE/..., or mount the data."
    )
