"""Other samplers of published packages on the same lengths, for `sync_efficiency.py`.

    pip install 'lightning_lengthpool[bench]'

Each runs the package's own code, in one process for all ranks, and gives the lengths in each batch. What each needs to
know differs, and stands with it: those of Hugging Face deal out ONE list of samples, whose lengths are all known before
training; the others, as ours, read a stream on each rank.
"""

import itertools
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

Step = Sequence[Sequence[float]]  # the lengths in each rank's batch


class Case(NamedTuple):
    """What is simulated: for each rank its lengths, which come around and around."""

    lengths: list[np.ndarray]
    pool_size: int
    batch_size: int | None
    max_tokens: float | None
    steps: int


class Peer(NamedTuple):
    """A peer.

    Attributes:
        package: Where it comes from, as pip knows it.
        run: Gives the steps of a case.
        budget: Whether it fills a token budget; else it makes batches of a number of samples. None for both.
        streams: Whether it has a pool of a size that can be chosen; else one of its own.
        least: Samples of a batch that it needs.
        most_ranks: Up to how many ranks it takes minutes; on more it runs only if it is asked for by name.
    """

    package: str
    run: Callable[[Case], Iterator[Step]]
    budget: bool | None
    streams: bool
    least: int = 1
    most_ranks: int = 64

    def fits(self, batch_size: int | None) -> bool:
        """Whether it makes batches of so many samples, or (None) by a token budget."""
        return self.budget in (None, batch_size is None) and (batch_size is None or batch_size >= self.least)

    def version(self) -> str | None:
        """None if it is not installed."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            return None


def hf_grouped(case: Case) -> Iterator[Step]:
    """`LengthGroupedSampler`, as `Trainer` uses it for `train_sampling_strategy="group_by_length"`.

    It sorts mega-batches of 50 batches, over all samples of all ranks; accelerate then deals out batch i to rank i %
    ranks.
    """
    import torch
    from transformers.trainer_pt_utils import LengthGroupedSampler

    lengths = np.concatenate(case.lengths)
    sampler = LengthGroupedSampler(
        case.batch_size, lengths=lengths.tolist(), generator=torch.Generator().manual_seed(0)
    )
    for step in lengths[list(sampler)].reshape(-1, len(case.lengths), case.batch_size):
        yield step.tolist()


def hf_rebalance(case: Case) -> Iterator[Step]:
    """`BatchRebalanceSampler`, `train_sampling_strategy="batch_rebalance"`.

    Each step's samples, of all ranks, are drawn at random and dealt out so that the ranks' batches, which differ in
    size, cost about the same. Its cost has a quadratic term, which is set to 0 here, for padded tokens are what counts.
    With one sample a rank there is nothing to choose.
    """
    from transformers.trainer_pt_utils import BatchRebalanceSampler

    class AllRanks(BatchRebalanceSampler):  # each rank computes all ranks' batches and keeps its own; here all are kept
        QUADRATIC_COST_COEF = 0.0

        def _yield_global_batch(self, batch_indices: list[int]) -> Iterator[list[list[int]]]:
            lengths = [self.lengths[i] for i in batch_indices]
            yield [batches[0] for batches in self._assign(batch_indices, lengths)]

    lengths = np.concatenate(case.lengths).tolist()
    ranks = len(case.lengths)
    for step in AllRanks(lengths, effective_batch_size=ranks * case.batch_size, dp_size=ranks, grad_accum=1, seed=0):
        yield [[lengths[i] for i in batch] for batch in step]


def lhotse(case: Case) -> Iterator[Step]:
    """`DynamicBucketingSampler` as its documentation has it for data that are split over the ranks: a sampler on each.

    All have the same 10 buckets (its default) of equal duration, which is a sample's length in tokens, `sync_buckets`,
    and a `buffer_size` of the pool size.
    """
    yield from _bucketed(case, _equal_duration(case, 10))


def lhotse_tuned(case: Case) -> Iterator[Step]:
    """The same with the number of buckets that does best on this very case.

    Each bucket is named with the same probability. So with batches of a number of samples, buckets of equal duration
    use up the long ones first; here they hold equally many samples then.
    """
    yield from _best(case, is_shared=False)


def lhotse_shared(case: Case) -> Iterator[Step]:
    """The same for a list of cuts that all ranks read: `world_size` batches of one bucket, of which each takes its own.

    The pool holds `pool_size` samples for each rank.
    """
    yield from _best(case, is_shared=True)


def _best(case: Case, is_shared: bool) -> list[Step]:
    tried = []
    for buckets in (10, 30, 100):
        if case.max_tokens is None:
            places = np.linspace(0, 1, buckets + 1)[1:-1]
            bins = np.unique(np.quantile(np.concatenate(case.lengths), places)).tolist()
        else:
            bins = _equal_duration(case, buckets)
        steps = list(_bucketed(case, bins, is_shared))
        slowest = sum(max(len(batch) * max(batch) for batch in step) for step in steps)
        tried.append((sum(sum(map(sum, step)) for step in steps) / slowest, buckets, steps))
    return max(tried)[2]


def _equal_duration(case: Case, buckets: int) -> list[float]:
    from lhotse.dataset.sampling.dynamic_bucketing import estimate_duration_buckets

    return estimate_duration_buckets(_cuts(np.concatenate(case.lengths)), buckets)


def _cuts(lengths: Iterable[float]) -> Iterator[Any]:
    from lhotse.cut import MonoCut

    return (MonoCut(id=str(i), start=0.0, duration=float(length), channel=0) for i, length in enumerate(lengths))


def _bucketed(case: Case, bins: list[float], is_shared: bool = False) -> Iterator[Step]:
    from lhotse.dataset.sampling.dynamic_bucketing import DynamicBucketingSampler

    world_size = len(case.lengths) if is_shared else 1
    streams = [np.stack(case.lengths).T.ravel()] if is_shared else case.lengths
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the pool might be too small for the budget
        samplers = [
            iter(
                DynamicBucketingSampler(
                    _cuts(itertools.cycle(own.tolist())),
                    max_duration=case.max_tokens,
                    max_cuts=case.batch_size,
                    shuffle=True,
                    duration_bins=bins,
                    buffer_size=case.pool_size * world_size,
                    world_size=world_size,
                    rank=0,
                    seed=0,
                    sync_buckets=True,
                )
            )
            for own in streams
        ]
    for _ in range(case.steps):
        # `next` of a sampler would make its `world_size` batches as well, and keep one of them
        batches = [sampler._next_batch() for sampler in samplers for _ in range(world_size)]
        yield [[cut.duration for cut in batch] for batch in batches]


def odb(case: Case) -> Iterator[Step]:
    """`grouping_data` of online-dynamic-batching, in the loop of its collate process, with `buffer_size` = pool size.

    The one thing that is replaced is the all_gather between ranks, which are all here: a first call of each rank tells
    what it would send, a second one receives that of all.
    """
    import torch
    from odb import grouping

    class Sent(Exception):
        pass

    class Ranks:
        """Stands in for `torch.distributed`; a rank's number is its process group."""

        sent: list[torch.Tensor] = []

        def get_world_size(self, group: int) -> int:
            return len(case.lengths)

        def get_rank(self, group: int) -> int:
            return group

        def all_gather_into_tensor(self, received: torch.Tensor, local: torch.Tensor, group: int) -> None:
            if len(self.sent) < len(case.lengths):
                raise Sent(local)
            received.copy_(torch.cat(self.sent))

    def group(rank: int) -> tuple[list[list[dict]], list[dict]]:
        groups, overflow, _, _ = grouping.grouping_data(
            buffers[rank],
            int(case.max_tokens),
            rank,
            idx_budget=case.pool_size,
            join_mode=True,
            max_groups=case.pool_size,
        )
        return groups, overflow

    streams = [itertools.cycle(own.tolist()) for own in case.lengths]
    buffers: list[list[list[dict]]] = [[] for _ in streams]
    shuffles = [random.Random(67108) for _ in streams]  # its own seed, the same on all ranks
    done = 0
    with (
        patch.object(grouping, "dist", Ranks()) as ranks,
        patch.object(grouping, "get_input_length", lambda sample: sample["length"]),
    ):
        while done < case.steps:
            ranks.sent = []
            for rank, stream in enumerate(streams):
                buffers[rank] += [[{"length": next(stream)}] for _ in range(case.pool_size)]
                try:
                    group(rank)
                except Sent as sent:
                    ranks.sent.append(sent.args[0])
            emitted = []
            for rank, shuffle in enumerate(shuffles):
                groups, overflow = group(rank)
                buffers[rank] = [[sample] for sample in overflow]
                shuffle.shuffle(groups)
                emitted.append(groups)
            for step in zip(*emitted, strict=True):
                yield [[sample["length"] for sample in batch] for batch in step]
            done += len(emitted[0])


PEERS = {
    "hf_grouped": Peer("transformers", hf_grouped, budget=False, streams=False),
    "hf_rebalance": Peer("transformers", hf_rebalance, budget=False, streams=False, least=2),
    "lhotse": Peer("lhotse", lhotse, budget=None, streams=True, most_ranks=8),
    "lhotse_tuned": Peer("lhotse", lhotse_tuned, budget=None, streams=True, most_ranks=8),
    "lhotse_shared": Peer("lhotse", lhotse_shared, budget=None, streams=True, most_ranks=8),
    "odb": Peer("online-dynamic-batching", odb, budget=True, streams=True),
}
