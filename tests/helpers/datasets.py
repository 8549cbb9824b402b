"""Small energon data sets whose samples are their own lengths."""

import io
import tarfile
from collections.abc import Sequence
from pathlib import Path

from megatron.energon import DefaultTaskEncoder, Sample, TextSample, edataclass, stateless
from megatron.energon.flavors.webdataset import BaseWebdatasetFactory


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


def write_metadataset(path: Path, train: str) -> Path:
    """Write the YAML of a metadataset whose train split is `train`, as YAML says it."""
    path.write_text(f"__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train: {train}\n")
    return path
