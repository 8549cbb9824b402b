"""What a checkpoint knows of its training data, so that a run which resumes with others says what differs.

The same data mounted or copied elsewhere are the same data, and so are data whose index was made a second time. Looking
at every sample would take too long: of each data set some evenly spaced shards are looked at, each with its index (the
sizes of its samples) and the contents of some of its samples. For what lies between there is the number that
`energon prepare` gives to an index: if it differs, and nothing else, the run goes on with a warning.
"""

import hashlib
import io
import json
import math
import struct
import tarfile
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron.energon.epathlib import EPath
from megatron.energon.flavors.jsonl.ijsonl import IJSONL_SUFFIX
from megatron.energon.flavors.webdataset.config import INDEX_UUID_FILENAME, MAIN_FOLDER_NAME
from megatron.energon.flavors.webdataset.indexing import JoinIndexReader
from megatron.energon.flavors.webdataset.itar import ITAR_SUFFIX
from megatron.energon.flavors.webdataset.structs import DatasetSubset
from megatron.energon.metadataset.loader_interface import LoadedDataset

from lightning_lengthpool.data.reading.splits import load_split, name_of

LOOKS = 64  # samples that are looked at, of all data sets together; at least _LEAST of each
_LEAST = 4
_BYTES = 1 << 16  # of such a sample at most, and of what follows it
_MOST_SHOWN = 3  # differences in one error

Description = dict[str, Any]


def describe_data(path: str | Path, split: str) -> list[Description]:
    """What the samples of a split and their order depend on, wherever the data lie; for each data set of a blend.

    Plain containers, whose size does not depend on the number of shards.
    """
    loaded = load_split(path, split)
    looks = max(_LEAST, LOOKS // len(loaded))
    return [_describe(one, looks, is_blended=len(loaded) > 1) for one in loaded]


def check_same_data(before: Any, now: Sequence[Description], way_out: str) -> None:
    """Compare what a checkpoint knows of its data with the data now; warn if they are only probably the same.

    Errors end with the sentence `way_out`.
    """
    try:
        differences = list(_differences(before, now))
        remade = [repr(a["name"]) for a, b in zip(now, before, strict=False) if a["index"] != b["index"]]
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"the checkpoint's description of its data cannot be read ({error!r}). {way_out}") from error
    if differences:
        more = f"; and {len(differences) - _MOST_SHOWN} more" if len(differences) > _MOST_SHOWN else ""
        raise ValueError(
            f"the training data are not those of the checkpoint: {'; '.join(differences[:_MOST_SHOWN])}{more}. Its "
            f"state has no meaning for other data. Give the run the data as they were to go on exactly. {way_out}"
        )
    if remade:
        warnings.warn(
            f"the index of data set {', '.join(remade[:_MOST_SHOWN])} or of what belongs to it was made again since "
            "the checkpoint was saved ('energon prepare'). The samples that were looked at are the same: the run goes "
            "on; if others have changed, it is not the uninterrupted run.",
            stacklevel=2,
        )


def data_fingerprint(data: Sequence[Description]) -> str:
    """A text that is the same for the same data wherever they lie, and whenever their index was made."""
    return json.dumps([{**one, "name": "", "index": ""} for one in data])


# ---- the description


def _describe(one: LoadedDataset, looks: int, *, is_blended: bool) -> Description:
    factory = one.dataset
    sources = getattr(factory, "inner_datasets", [factory])  # several where samples are joined
    contents: dict[str, str | None] = {}
    for number, source in enumerate(sources, 1):  # by number: a copy's folder may have another name
        which = f" ({number} of {len(sources)})" if len(sources) > 1 else ""
        contents |= {f"{name}{which}": digest for name, digest in _contents(source, looks).items()}
    indices = [source.path for source in sources] + [EPath(aux.get_path()) for aux in (one.aux or {}).values()]
    return {
        "name": name_of(factory),
        "samples": _count(factory),
        "shards": sum(len(getattr(source, "shards", [source])) for source in sources),
        "blend weight": _rounded(one.weight) if is_blended else None,  # energon makes them add up to 1
        "repetitions": _rounded(one.repetitions),
        "subset": _subset_text(factory.subset),
        "shuffle_over_epochs": factory.shuffle_over_epochs,
        "parallel_shard_iters": factory.parallel_shard_iters,
        "names": _digest(_names(sources)),
        "contents": contents,
        "index": " ".join(map(_index_number, indices)),
    }


def _count(factory: Any) -> int:
    """Samples without the subset; of joined ones those that have a partner, where the others are skipped."""
    if not hasattr(factory, "join_index"):
        return len(factory)
    with JoinIndexReader(factory.join_index) as index:
        return len(index)


def _names(sources: Sequence[Any]) -> Iterator[bytes]:
    """What the index tells without a look at it: names, order and counts of the shards, and what is left out."""
    for source in sources:
        for shard in getattr(source, "shards", []):
            yield f"{shard.name}\0{shard.count}".encode()
        yield from sorted(key.encode() for key in getattr(source, "sample_excludes", ()))


def _contents(source: Any, looks: int) -> dict[str, str | None]:
    """Digests of the shards that are looked at; None for one that cannot be read."""
    if not hasattr(source, "shards"):
        numbers = _spaced(len(source), looks)
        return {"the file": _shard_digest(source.path, IJSONL_SUFFIX, numbers)}
    of_shard: dict[int, list[int]] = defaultdict(list)
    index, start = 0, 0
    for number in _spaced(sum(shard.count for shard in source.shards), looks):
        while number >= start + source.shards[index].count:
            start += source.shards[index].count
            index += 1
        of_shard[index].append(number - start)
    return {
        source.shards[index].name: _shard_digest(source.shards[index].path, ITAR_SUFFIX, numbers)
        for index, numbers in of_shard.items()
    }


def _shard_digest(path: EPath, suffix: str, numbers: Sequence[int]) -> str | None:
    """Of a shard's index and the contents of these of its samples."""
    try:
        index = path.with_suffix(suffix).read_bytes()
        starts = [struct.unpack_from("<Q", index, 8 * number)[0] for number in numbers]
        parts = [index]
        with path.open("rb") as file:
            for start, end in zip(starts, [*starts[1:], math.inf], strict=True):
                file.seek(start)
                piece = file.read(min(end - start, _BYTES))
                parts += [piece] if suffix == IJSONL_SUFFIX else _members(piece)
    except (OSError, struct.error):
        return None
    return _digest(parts)


def _members(piece: bytes) -> Iterator[bytes]:
    """Names and contents, not dates and owners, of the files in a piece of a tar file, which may end within one."""
    try:
        with tarfile.open(fileobj=io.BytesIO(piece), mode="r:") as tar:
            for member in tar:
                yield member.name.encode()
                yield piece[member.offset_data : member.offset_data + member.size]
    except tarfile.TarError:
        return


def _index_number(path: EPath) -> str:
    try:
        return (path / MAIN_FOLDER_NAME / INDEX_UUID_FILENAME).read_text().strip()
    except OSError:  # an older index has none, nor has a JSONL file
        return ""


def _spaced(count: int, most: int) -> list[int]:
    return [index * count // most for index in range(most)] if count > most else list(range(count))


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


def _rounded(number: float | None) -> float | None:
    return None if number is None else float(f"{number:.6g}")  # the same weights in other units are the same


def _subset_text(subset: DatasetSubset | None) -> str:
    """A subset as a YAML says it."""
    if subset is None:
        return "all"
    parts = []
    if subset.absolute_range is not None:
        start, end = subset.absolute_range
        parts.append(f"[{start}, {'end' if end is None else end}]")
    if subset.range is not None and (tuple(subset.range) != (0, 1) or not parts):
        start, end = subset.range
        parts.append(f"[{100 * start:.10g}%, {'end' if end is None else f'{100 * end:.10g}%'}]")
    return " and of these ".join(parts)


# ---- the comparison


def _differences(before: Sequence[Description], now: Sequence[Description]) -> Iterator[str]:
    old, new = ([one["name"] for one in ones] for ones in (before, now))
    if len(old) != len(new):
        yield f"there were {len(old)} data sets ({_listed(old)}), and now there are {len(new)} ({_listed(new)})"
        return
    if old != new and sorted(old) == sorted(new):
        yield f"the data sets were in the order {_listed(old)}, and now are in the order {_listed(new)}"
        return
    for a, b in zip(before, now, strict=True):
        yield from _differences_of_one(a, b)


def _differences_of_one(before: Description, now: Description) -> Iterator[str]:
    whose = f"data set {now['name']!r}"
    counts = ("samples", "shards")
    if any(before[key] != now[key] for key in counts):
        was, has = (f"{one['samples']} samples in {one['shards']} shards" for one in (before, now))
        yield f"{whose} had {was}, and now has {has}"
    elif before["names"] != now["names"]:
        yield f"the shards of {whose} have other names, counts or another order, or other samples are excluded"
    else:
        for shard, digest in now["contents"].items():
            if before["contents"].get(shard, digest) != digest:
                has = "cannot be read now" if digest is None else "has other contents than it had"
                yield f"{shard!r} of {whose} {has}"
    for key in ("blend weight", "repetitions", "subset", "shuffle_over_epochs", "parallel_shard_iters"):
        if before[key] != now[key]:
            yield f"{whose} had {key} {before[key]}, and now has {now[key]}"


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MOST_SHOWN])
    return f"{shown}, ..." if len(names) > _MOST_SHOWN else shown
