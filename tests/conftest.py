"""Small energon data sets whose samples are their own lengths, and a file of step records."""

import gc
import io
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from megatron.energon import DefaultTaskEncoder, Sample, TextSample, edataclass, stateless
from megatron.energon.flavors.webdataset import BaseWebdatasetFactory

from lightning_lengthpool.runs.records import COLUMNS


@edataclass
class LengthSample(Sample):
    total_len: int


class LengthEncoder(DefaultTaskEncoder):
    """Each sample's text is its length."""

    @stateless
    def encode_sample(self, sample: TextSample) -> LengthSample:
        return LengthSample.derive_from(sample, total_len=int(sample.text))

    @stateless
    def batch(self, samples: list[LengthSample]) -> dict:
        return {"keys": [s.__key__ for s in samples], "lengths": [s.total_len for s in samples]}


def write_dataset(path: Path, lengths: Sequence[int], *, val: Sequence[int] = (), shards: int = 1) -> Path:
    """Write a prepared energon data set of texts: `lengths` as its train split, `val` as its val split."""
    path.mkdir(parents=True)
    names: dict[str, list[str]] = {"train": [], "val": []}
    for split, values in (("train", lengths), ("val", val)):
        per_shard = max(1, -(-len(values) // shards))
        for start in range(0, len(values), per_shard):
            name = f"{split}-{start:06d}.tar"
            names[split].append(name)
            with tarfile.open(path / name, "w") as tar:
                for index in range(start, min(start + per_shard, len(values))):
                    content = str(values[index]).encode()
                    member = tarfile.TarInfo(f"{split}{index:06d}.txt")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    BaseWebdatasetFactory.prepare_dataset(
        path,
        names["train"] + names["val"],
        split_parts_patterns=[(split, f"{split}-.*") for split in ("train", "val") if names[split]],
        tar_index_only=False,
        workers=1,
    )
    (path / ".nv-meta" / "dataset.yaml").write_text(
        "sample_type:\n  __module__: megatron.energon\n  __class__: TextSample\nfield_map:\n  text: txt\n"
    )
    return path


@pytest.fixture
def dataset(tmp_path: Path) -> Callable[..., Path]:
    """`dataset(lengths, val=..., shards=...) -> path` writes a data set of its own."""
    count = iter(range(1000))
    return lambda lengths, **kwargs: write_dataset(tmp_path / f"data{next(count)}", lengths, **kwargs)


def write_metadataset(path: Path, train: str) -> Path:
    """Write the YAML of a metadataset whose train split is `train`, as YAML says it."""
    path.write_text(f"__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train: {train}\n")
    return path


# two ranks; step 4 has two micro-batches, step 5 one, and in step 6 rank 1's compute is absent
STEP_ROWS = """\
4,0,2,8,5,10,0,0.5,1.0,2.0,4.0
4,1,2,10,5,10,0,0.7,3.0,0.1,4.0
4,0,1,6,6,6,0,0.0,2.0,0.0,2.0
4,1,1,4,4,4,0,0.1,1.0,1.0,2.0
5,0,1,9,9,9,0,0.0,2.0,2.0,5.0
5,1,1,12,12,12,0,0.2,4.0,0.0,6.0
6,0,2,2,1,2,0,0.0,1.0,0.0,4.0
6,1,2,3,2,4,0,0.0,,,3.0
"""


@pytest.fixture
def steps_csv(tmp_path: Path) -> Path:
    """A `steps.csv` of two ranks."""
    path = tmp_path / "steps.csv"
    path.write_text(f"{','.join(COLUMNS)}\n{STEP_ROWS}")
    return path


@pytest.fixture(autouse=True)
def quick_garbage_collection() -> None:
    """energon collects garbage whenever a loader starts; what is imported by now is none, and takes the longest."""
    gc.freeze()
