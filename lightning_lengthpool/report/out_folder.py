"""The folder that a command writes its results to."""

import tempfile
from collections.abc import Iterable
from pathlib import Path


def make_out(out: str | Path, files: Iterable[str], setting: str = "--out") -> Path:
    """Make a folder, and see that each of the files can be written into it: before the work, not after it.

    What is there already is not changed. A `ValueError` names the `setting` if something is in the way.
    """
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):  # permissions do not tell of a read-only disk
            pass
        for path in (folder / name for name in files):
            if path.is_file():
                with path.open("ab"):
                    pass
            elif path.exists():
                raise ValueError(f"{setting} is {str(out)!r}, but {str(path)!r} is not a file: move it away")
    except OSError as error:
        raise ValueError(f"{setting} is {str(out)!r}, expected a folder that can be written to: {error}") from error
    return folder
