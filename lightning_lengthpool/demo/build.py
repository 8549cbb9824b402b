"""Builds the demo data sets from the Python standard library's own source files, on first use.

Every sample is a picture of some text and that text: read the picture, write the text. The texts are
functions (`code`) or their docstrings (`prose`), so their lengths are those of real input, with a heavy tail.
Nothing is downloaded. A data set is an ordinary energon WebDataset of `OCRSample`; the same Python and Pillow
versions give the same shard bytes.
"""

import ast
import hashlib
import io
import json
import os
import platform
import random
import shutil
import sys
import sysconfig
import tarfile
import textwrap
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import lru_cache
from pathlib import Path
from typing import Literal

import PIL
import yaml
from filelock import FileLock, Timeout
from megatron.energon.flavors import BaseWebdatasetFactory
from PIL import Image, ImageDraw, ImageFont
from tqdm import tqdm

DatasetName = Literal["code", "prose", "blend"]

FORMAT = 2  # raise it when a change here changes the content of a data set
SEED = 42
DEFAULT_SAMPLES = {"code": 4000, "prose": 1000}
BLEND_WEIGHTS: dict[DatasetName, float] = {"code": 0.7, "prose": 0.3}
SHARDS = 20  # energon splits by whole shards: 18 to train, 2 to val
MIN_LINES = {"code": 6, "prose": 1}  # a getter of two lines is hardly a page to read
COLUMNS, LINES = 96, 72  # the page; what lies beyond it is in neither the picture nor the text
CELL = (6, 11)  # pixels of one character in Pillow's bitmap font: width, height
LOCK_TIMEOUT = 600.0  # seconds; a build takes less than 60

_SKIPPED_DIRS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def ensure_dataset(name: DatasetName = "code", cache_dir: Path | None = None, samples: int | None = None) -> Path:
    """Returns the folder of a demo data set, building it first if the cache (`default_cache_dir`) does not hold it.

    For `blend`, which trains on 0.7 `code` and 0.3 `prose`, it returns the path of a metadataset v2 YAML file.
    `samples` counts train and val together (for `blend`: of each of the two).

    Safe to call from all ranks at once: one builds, the others wait. An interrupted build leaves nothing that
    could be taken for a data set.

    Raises:
        RuntimeError: The cache folder cannot be written, or another process holds its lock for 10 minutes.
    """
    target = dataset_path(name, cache_dir, samples)
    if name == "blend":
        parts = {part: ensure_dataset(part, target.parent, samples) for part in BLEND_WEIGHTS}
        return _build_once(target, lambda partial: _write_blend(partial, parts))
    count = DEFAULT_SAMPLES[name] if samples is None else samples
    return _build_once(target, lambda partial: _write_dataset(partial, name, count))


def dataset_path(name: DatasetName = "code", cache_dir: Path | None = None, samples: int | None = None) -> Path:
    """Returns the path at which `ensure_dataset` builds a demo data set; arguments and errors are the same."""
    if name not in ("code", "prose", "blend"):
        raise ValueError(f"name={name!r} is not a demo data set: use 'code', 'prose' or 'blend'.")
    if samples is not None and samples < SHARDS:
        raise ValueError(f"samples={samples} does not fill {SHARDS} shards: use at least {SHARDS}.")
    folder = (default_cache_dir() if cache_dir is None else Path(cache_dir)).absolute()
    if name == "blend":
        return folder / f"blend-{_content_hash('blend', samples)}.yaml"
    return folder / f"{name}-{_content_hash(name, DEFAULT_SAMPLES[name] if samples is None else samples)}"


def default_cache_dir() -> Path:
    """Returns `LENGTHPOOL_CACHE`, or else `lightning_lengthpool` below `XDG_CACHE_HOME` or `~/.cache`."""
    if cache := os.environ.get("LENGTHPOOL_CACHE"):
        return Path(cache).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lightning_lengthpool"


def render(text: str) -> bytes:
    """Returns `text` (printable ASCII and newlines) as a greyscale PNG, black on white."""
    lines = text.split("\n")
    size = CELL[0] * max(map(len, lines)), CELL[1] * len(lines)
    image = Image.new("L", size, color=255)
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default_imagefont()
    for row, line in enumerate(lines):
        draw.text((0, CELL[1] * row), line, fill=0, font=font)
    png = io.BytesIO()
    image.save(png, format="PNG")
    return png.getvalue()


def _content_hash(name: str, samples: int | None) -> str:
    versions = [platform.python_implementation(), platform.python_version(), PIL.__version__]
    content = [FORMAT, name, samples, SEED, *versions]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]


def _build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Unless `target` exists, calls `build` on a path beside it and renames that path to `target`."""
    if target.exists():
        return target
    partial = target.with_name(f"{target.name}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock", timeout=LOCK_TIMEOUT):
            if not target.exists():  # nobody built it while we waited
                shutil.rmtree(partial, ignore_errors=True)  # left by a build that was killed
                try:
                    build(partial)
                    partial.rename(target)
                finally:
                    shutil.rmtree(partial, ignore_errors=True)
    except Timeout as error:
        raise RuntimeError(
            f"Another process has held {error.lock_file} for {LOCK_TIMEOUT:.0f} s. "
            "If none is building the demo data set, delete that file."
        ) from error
    except OSError as error:
        raise RuntimeError(
            f"Cannot write the demo data set to the cache folder {target.parent}: {error}. "
            "Set LENGTHPOOL_CACHE (or pass cache_dir) to a folder that you can write to, with 50 MB free."
        ) from error
    return target


def _write_dataset(folder: Path, name: str, samples: int) -> None:
    texts = _texts(name)
    if len(texts) < samples:
        raise ValueError(
            f"samples={samples}, but {sysconfig.get_paths()['stdlib']} holds only {len(texts)} texts for "
            f"{name!r}: install the sources of Python's standard library, or ask for fewer samples."
        )
    texts = random.Random(SEED).sample(texts, samples)
    folder.mkdir()
    shards = [f"shard-{i:02d}.tar" for i in range(SHARDS)]
    with tqdm(total=samples, desc=f"Rendering demo data set {name!r}", unit=" samples", file=sys.stderr) as bar:
        for i, shard in enumerate(shards):
            # tarfile, for webdataset's writer stamps the time: the same data would have other bytes each time
            with tarfile.open(folder / shard, "w", format=tarfile.USTAR_FORMAT) as tar:
                for index in range(samples * i // SHARDS, samples * (i + 1) // SHARDS):
                    key = f"{name}-{index:05d}"
                    _add_member(tar, f"{key}.png", render(texts[index]))
                    _add_member(tar, f"{key}.txt", texts[index].encode("ascii"))
                    bar.update()
    with redirect_stdout(sys.stderr):  # energon prints
        BaseWebdatasetFactory.prepare_dataset(
            folder, shards, split_parts_ratio=[("train", 0.9), ("val", 0.1)], shuffle_seed=SEED, workers=1
        )
    config = {
        "sample_type": {"__module__": "megatron.energon", "__class__": "OCRSample"},
        "field_map": {"image": "png", "text": "txt"},
    }
    (folder / ".nv-meta" / "dataset.yaml").write_text(yaml.safe_dump(config, sort_keys=False))


def _add_member(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)  # no time, no owner
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def _write_blend(file: Path, parts: dict[DatasetName, Path]) -> None:
    train = [{"weight": BLEND_WEIGHTS[name], "path": path.name} for name, path in parts.items()]
    val = [{"path": path.name} for path in parts.values()]
    config = {
        "__module__": "megatron.energon",
        "__class__": "MetadatasetV2",
        "splits": {"train": {"blend": train}, "val": {"blend": val}},
    }
    file.write_text(yaml.safe_dump(config, sort_keys=False))


def _texts(name: str) -> list[str]:
    """Returns the different pages of one kind, in a fixed order."""
    pages = (_page(code if name == "code" else doc) for code, doc in _functions())
    return list(dict.fromkeys(page for page in pages if page and page.count("\n") + 1 >= MIN_LINES[name]))


def _page(text: str) -> str:
    """Cuts a text to the page; returns "" for one with characters that the bitmap font does not have."""
    lines = text.expandtabs(4).split("\n")[:LINES]
    page = "\n".join(line[:COLUMNS].rstrip() for line in lines).strip("\n")
    return page if page.isascii() and page.replace("\n", "").isprintable() else ""


@lru_cache(maxsize=1)  # the two parts of the blend read the same files
def _functions() -> tuple[tuple[str, str], ...]:
    """Returns (source, docstring or "") of the functions that lie in no other, by file and position."""
    found = []
    files = list(_source_files())
    for path in tqdm(files, desc="Reading the standard library", unit=" files", file=sys.stderr):
        try:
            source = path.read_text(encoding="utf-8")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # invalid escapes in old modules
                tree = ast.parse(source)
        except (OSError, SyntaxError, ValueError):  # unreadable, templates, other encodings
            continue
        lines = source.split("\n")  # unlike splitlines(), counts lines as the parser does
        for node in _function_nodes(tree):
            code = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
            found.append((code, ast.get_docstring(node) or ""))
    return tuple(found)


def _source_files() -> Iterator[Path]:
    for folder, dirs, files in os.walk(sysconfig.get_paths()["stdlib"]):
        dirs[:] = sorted(set(dirs) - _SKIPPED_DIRS)
        yield from (Path(folder, file) for file in sorted(files) if file.endswith(".py"))


def _function_nodes(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        elif isinstance(child, ast.stmt | ast.ExceptHandler):
            yield from _function_nodes(child)
