"""The page about the house names each file of the package once; the rooms keep their sizes."""

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_lengthpool"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")


def test_each_file_is_named_once() -> None:
    named = Counter(re.findall(r"`([\w/]+\.py)`", (ROOT / "docs" / "architecture.md").read_text()))
    assert named == Counter(str(path.relative_to(PACKAGE)) for path in FILES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_is_short_enough_to_be_read(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 320


def test_a_room_has_at_most_ten_files() -> None:
    assert max(Counter(path.parent for path in FILES).values()) <= 10
