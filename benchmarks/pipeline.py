"""The check of `sync_efficiency.py --pipeline`: does training see what is simulated?

The lengths are written as an energon data set, one sample each, and read by the data module's loaders, those of all
ranks in one process. What each rank reads without a pool is its stream; with a pool, its batches must be the ones that
`simulate` makes of that stream: as many samples, as long, one batch after the other.
"""

import io
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
from megatron.energon import DefaultTaskEncoder, Sample, TextSample, edataclass, stateless
from megatron.energon.flavors.webdataset import BaseWebdatasetFactory
from rich.console import Console
from rich.table import Table

from lightning_lengthpool import LengthPoolDataModule
from lightning_lengthpool.ordering import efficiency
from lightning_lengthpool.ordering.lengths_file import write_lengths
from lightning_lengthpool.ordering.reference_costs import ReferenceCosts
from lightning_lengthpool.ordering.settings import PoolSettings
from lightning_lengthpool.simulation.simulate import simulate

POOL_SIZE, SAMPLES = 300, 1500  # samples that each rank trains on


@edataclass
class Encoded(Sample):
    total_len: int


class Encoder(DefaultTaskEncoder):
    """A sample's text is its length; a batch is the lengths of its samples."""

    @stateless
    def encode_sample(self, sample: TextSample) -> Encoded:
        return Encoded.derive_from(sample, total_len=int(sample.text))

    @stateless
    def batch(self, samples: list[Encoded]) -> list[int]:
        return [sample.total_len for sample in samples]


def write_dataset(path: Path, lengths: np.ndarray) -> Path:
    path.mkdir()
    with tarfile.open(path / "data.tar", "w") as tar:
        for index, length in enumerate(lengths):
            content = str(int(length)).encode()
            member = tarfile.TarInfo(f"{index:06d}.txt")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        BaseWebdatasetFactory.prepare_dataset(path, ["data.tar"], split_parts_ratio=[("train", 1.0)], workers=1)
    (path / ".nv-meta" / "dataset.yaml").write_text(
        "sample_type:\n  __module__: megatron.energon\n  __class__: TextSample\nfield_map:\n  text: txt\n"
    )
    return path


def batches(path: Path, rank: int, ranks: int, count: int, **settings: Any) -> list[list[int]]:
    """The first batches of a rank: the lengths in each."""
    settings = {"num_workers": 0, "virtual_epoch_length": 10**9, **settings}
    module = LengthPoolDataModule(path, Encoder(), settings.pop("batch_size"), rank=rank, world_size=ranks, **settings)
    stream = iter(module.train_dataloader())
    found = [next(stream) for _ in range(count)]
    module.teardown("fit")
    return found


def cases(max_tokens: float, reference: Path) -> Iterator[dict[str, Any]]:
    for batch_size in (1, 4):
        for policy in ("pool", "blocks", "stream"):
            yield {"policy": policy, "batch_size": batch_size}
    yield {"policy": "stream", "batch_size": 4, "reference_lengths": reference}
    yield {"policy": "stream", "batch_size": None, "max_tokens": max_tokens}
    yield {"policy": "stream", "batch_size": None, "max_tokens": max_tokens, "reference_lengths": reference}


def compare(traces: Mapping[str, tuple[list[np.ndarray], np.ndarray]], console: Console) -> None:
    """Print, for each case, how many of the ranks' batches agree.

    Args:
        traces: By name the lengths of each rank, and those of the reference file.
        console: Where to.
    """
    title = f"Pipeline and simulation, pool_size {POOL_SIZE}"
    table = Table("trace", "ranks", "policy", "batch", "reference", "batches that agree", "sync", "useful", title=title)
    for trace, (own, reference) in traces.items():
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "lengths.csv"
            write_lengths(file, reference)
            lengths, ranks = np.concatenate(own), range(len(own))
            path = write_dataset(Path(folder) / "data", lengths)
            count = SAMPLES + POOL_SIZE + 200  # more than any policy reads: batches with a budget differ in size
            none = {"policy": "none", "batch_size": 1}
            streams = [np.ravel(batches(path, rank, len(own), count, **none)) for rank in ranks]
            for case in cases(2 * float(lengths.max()), file):
                budget, aim = case.get("max_tokens"), reference if "reference_lengths" in case else None
                steps = SAMPLES // case["batch_size"] if budget is None else int(SAMPLES * lengths.mean() / budget)
                trained = [batches(path, rank, len(own), steps, pool_size=POOL_SIZE, **case) for rank in ranks]
                settings = PoolSettings(
                    case["batch_size"],
                    POOL_SIZE,
                    case["policy"],
                    max_tokens=budget,
                    reference=None if aim is None else ReferenceCosts({None: aim}),
                )
                expected = simulate(streams, settings, steps, is_cycle=True)
                tokens, longest, samples = (
                    np.array([[of(batch) for batch in rank] for rank in trained]).T for of in (sum, max, len)
                )
                agree = (samples == expected.samples) & (longest == expected.longest) & (tokens == expected.tokens)
                table.add_row(
                    trace,
                    str(len(own)),
                    case["policy"],
                    "budget" if budget else str(case["batch_size"]),
                    "no" if aim is None else "yes",
                    f"{agree.sum():,} of {agree.size:,}",
                    f"{efficiency.sync_efficiency(samples * longest):.3f}",
                    f"{efficiency.useful_fraction(tokens, samples * longest):.3f}",
                )
    console.print(table)
