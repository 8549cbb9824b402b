import io
import itertools
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock
from megatron.energon import OCRSample, WorkerConfig, get_loader, get_train_dataset, get_val_dataset
from PIL import Image

from lightning_lengthpool.demo import build
from lightning_lengthpool.demo.build import SHARDS, ensure_dataset, render
from lightning_lengthpool.demo.task_encoder import BOS, IGNORED, IMAGE, OcrTaskEncoder

SAMPLES = 60
WORKER_CONFIG = WorkerConfig(rank=0, world_size=1, num_workers=0)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def dataset(cache: Path) -> Path:
    return ensure_dataset("code", cache, SAMPLES)


def shard_bytes(dataset: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(dataset.glob("*.tar"))}


def batches(dataset: Path, split: str, encoder: OcrTaskEncoder | None = None, batch_size: int = 1) -> list:
    return list(
        get_loader(
            get_val_dataset(
                dataset,
                split_part=split,
                worker_config=WORKER_CONFIG,
                batch_size=batch_size,
                task_encoder=encoder or OcrTaskEncoder(),
            )
        )
    )


def members(dataset: Path) -> dict[str, bytes]:
    found = {}
    for path in dataset.glob("*.tar"):
        with tarfile.open(path) as tar:
            found.update({member.name: tar.extractfile(member).read() for member in tar})
    return found


def fail_after(calls: int, failure):
    """Returns a `render` that calls `failure` once it has been called `calls` times."""
    count = itertools.count()

    def failing(text: str) -> bytes:
        return render(text) if next(count) < calls else failure()

    return failing


def test_processes_that_start_together_build_once_and_the_same_bytes(dataset: Path, tmp_path: Path):
    script = (
        "import sys; from pathlib import Path; from lightning_lengthpool.demo.build import ensure_dataset\n"
        f"print('ready', flush=True); print(ensure_dataset('code', Path({str(tmp_path)!r}), {SAMPLES}))"
    )
    target = tmp_path / dataset.name
    with FileLock(f"{target}.lock"):  # held until both have seen that there is no data set
        processes = [
            subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        assert [process.stdout.readline() for process in processes] == ["ready\n", "ready\n"]
        time.sleep(0.5)
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [out for out, _ in outputs] == [f"{target}\n"] * 2, outputs
    assert sum("Rendering" in err for _, err in outputs) == 1
    assert len(shard_bytes(target)) == SHARDS
    assert shard_bytes(target) == shard_bytes(dataset)


def test_an_interrupted_build_is_no_data_set(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupt():
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(build, "render", fail_after(30, interrupt))
        with pytest.raises(KeyboardInterrupt):
            ensure_dataset("code", tmp_path, SAMPLES)
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".lock"] == []
    assert shard_bytes(ensure_dataset("code", tmp_path, SAMPLES)) == shard_bytes(dataset)


def test_a_killed_build_is_built_anew(dataset: Path, tmp_path: Path):
    pid = os.fork()
    if pid == 0:
        try:
            build.render = fail_after(30, lambda: os._exit(9))
            ensure_dataset("code", tmp_path, SAMPLES)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    target = tmp_path / dataset.name
    partial = tmp_path / f"{dataset.name}.partial"
    assert partial.exists() and not target.exists()

    assert ensure_dataset("code", tmp_path, SAMPLES) == target
    assert shard_bytes(target) == shard_bytes(dataset)
    assert not partial.exists()


def test_a_finished_data_set_is_not_built_again(dataset: Path, cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(build, "_write_dataset", lambda *_: pytest.fail("built again"))
    assert ensure_dataset("code", cache, SAMPLES) == dataset


def test_other_contents_get_other_folders(cache: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch):
    names = {dataset.name, ensure_dataset("prose", cache, SAMPLES).name}
    names.add(ensure_dataset("code", cache, SAMPLES + 1).name)
    monkeypatch.setattr(build, "SEED", 7)
    other_seed = ensure_dataset("code", cache, SAMPLES)
    assert len(names | {other_seed.name}) == 4
    assert shard_bytes(other_seed) != shard_bytes(dataset)


def test_every_sample_is_in_one_split_and_whole(dataset: Path):
    stored = members(dataset)
    train = [batch.__key__[0].split("/")[-1] for batch in batches(dataset, "train")]
    val = [batch.__key__[0].split("/")[-1] for batch in batches(dataset, "val")]
    assert len(train) == SAMPLES * 18 // SHARDS and len(val) == SAMPLES * 2 // SHARDS
    assert {f"{key}.{ext}" for key in train + val for ext in ("png", "txt")} == set(stored)
    texts = [data for name, data in stored.items() if name.endswith(".txt")]
    assert len(set(texts)) == SAMPLES
    assert all(text.split(maxsplit=1)[0] in (b"def", b"async") for text in texts)


def test_prose_is_text_of_the_same_sample_type(cache: Path):
    prose = ensure_dataset("prose", cache, SAMPLES)
    texts = [data for name, data in members(prose).items() if name.endswith(".txt")]
    assert len(set(texts)) == SAMPLES
    assert not any(text.startswith(b"def ") for text in texts)
    config = (prose / ".nv-meta" / "dataset.yaml").read_text()
    assert config == (ensure_dataset("code", cache, SAMPLES) / ".nv-meta" / "dataset.yaml").read_text()


def test_lengths_are_what_a_batch_holds(dataset: Path):
    for max_length in (4096, 300):
        encoder = OcrTaskEncoder(patch=32, max_length=max_length)
        # two at a time, so that some are padded
        for batch in batches(dataset, "train", encoder, batch_size=2):
            patches = (batch.tokens == IMAGE).sum(1)
            assert (batch.labels != IGNORED).sum(1).add(patches).tolist() == batch.total_len.tolist()
            assert len(batch.patches) == patches.sum()
            assert batch.tokens.shape[1] == batch.total_len.max() <= max_length
    assert any(  # the smaller limit did cut
        batch.total_len.max() > 300 for batch in batches(dataset, "train", OcrTaskEncoder(patch=32))
    )


def ocr_sample(image: bytes, text: bytes) -> OCRSample:
    return OCRSample(__key__="page", __restore_key__=(), image=image, text=text)


def test_the_largest_page_is_cut_to_the_most_tokens():
    page = build._page("\n".join(["x" * 200] * 200))
    assert [len(line) for line in page.split("\n")] == [build.COLUMNS] * build.LINES
    encoder = OcrTaskEncoder()
    pooled = encoder.preencode_sample(ocr_sample(render(page), page.encode()))
    encoded = encoder.postencode_sample(pooled)
    assert pooled.total_len == len(encoded.tokens) == 4096
    assert len(encoded.patches) == 1800
    assert pooled.png == render(page)  # still compressed in the pool


def test_the_layout_of_a_sequence():
    encoder = OcrTaskEncoder(patch=10)
    encoded = encoder.postencode_sample(encoder.preencode_sample(ocr_sample(render("ab\nc"), b"ab\nc")))
    assert encoded.tokens.tolist() == [IMAGE] * 6 + [BOS, *b"ab\n"]
    assert encoded.labels.tolist() == [IGNORED] * 6 + [*b"ab\nc"]
    # 12 x 22 pixels: 3 rows of 2 patches; then line and column of each byte
    grid = [[0, 0], [0, 1], [1, 0], [1, 1], [2, 0], [2, 1]]
    assert encoded.positions.tolist() == grid + [[0, 0], [0, 1], [0, 2], [1, 0]]
    ink = 1 - np.array(Image.open(io.BytesIO(render("ab\nc")))) / 255.0
    assert encoded.patches[1].reshape(10, 10)[:, :2].numpy() == pytest.approx(ink[:10, 10:])
    assert encoded.patches.sum().item() == pytest.approx(ink.sum()) and ink.sum() > 0


def test_the_encoder_names_a_sample_that_it_cannot_use():
    encoder = OcrTaskEncoder(max_length=20)
    with pytest.raises(ValueError, match="'page' has 21 patches, .* raise max_length .now 20."):
        encoder.preencode_sample(ocr_sample(render("x" * 56), b"x"))
    with pytest.raises(ValueError, match="'page': its image is not a PNG"):
        encoder.preencode_sample(ocr_sample(b"GIF89a", b"x"))
    with pytest.raises(ValueError, match="max_length=1 at least 2"):
        OcrTaskEncoder(max_length=1)


def test_the_blend_loads(cache: Path):
    blend = ensure_dataset("blend", cache, SAMPLES)
    loader = get_loader(
        get_train_dataset(
            blend,
            worker_config=WORKER_CONFIG,
            batch_size=1,
            shuffle_buffer_size=None,
            max_samples_per_sequence=None,
            task_encoder=OcrTaskEncoder(),
        )
    )
    keys = [batch.__key__[0].split("/")[-1] for batch in itertools.islice(loader, 200)]
    code = sum(key.startswith("code-") for key in keys)
    assert code + sum(key.startswith("prose-") for key in keys) == 200
    assert 110 < code < 170  # 140 expected, standard deviation 6.5
    val = [batch.__key__[0].split("/")[-1] for batch in batches(blend, "val")]
    assert sorted(key.split("-")[0] for key in val) == ["code"] * 6 + ["prose"] * 6


def test_the_cache_folder_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("LENGTHPOOL_CACHE", str(tmp_path / "own"))
    assert ensure_dataset("code", samples=SHARDS).parent == tmp_path / "own"
    monkeypatch.delenv("LENGTHPOOL_CACHE")
    assert build.default_cache_dir() == tmp_path / "xdg" / "lightning_lengthpool"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert build.default_cache_dir() == Path.home() / ".cache" / "lightning_lengthpool"


def test_errors_name_the_setting_and_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match="name='cod' is not a demo data set: use 'code'"):
        ensure_dataset("cod", tmp_path)
    with pytest.raises(ValueError, match="samples=5 .* at least 20"):
        ensure_dataset("code", tmp_path, 5)
    with pytest.raises(ValueError, match="samples=1000000, but .* holds only .* fewer samples"):
        ensure_dataset("code", tmp_path, 1_000_000)
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeError, match="Cannot write .* Set LENGTHPOOL_CACHE"):
        ensure_dataset("code", tmp_path / "file" / "cache", SAMPLES)
    monkeypatch.setattr(build, "LOCK_TIMEOUT", 0.1)
    target = tmp_path / f"code-{build._content_hash('code', SAMPLES)}"
    with FileLock(f"{target}.lock"), pytest.raises(RuntimeError, match="Another process has held .*lock"):
        ensure_dataset("code", tmp_path, SAMPLES)
