"""Which setting is best: the settings to predict, and the one rule that chooses among them.

`advise` chooses before training and `findings` after it, by this rule both.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lightning_lengthpool.ordering import efficiency
from lightning_lengthpool.ordering.stream.budget import batch_shares
from lightning_lengthpool.simulation.cases import Case
from lightning_lengthpool.simulation.predict import Prediction

POOL_SIZES = (100, 300, 1000, 3000, 10_000)
_FIRST_SIZE = 1000  # the one to begin a search with
_LARGE = 3000  # a larger pool hardly needs reference lengths


def waste(prediction: Prediction) -> float:
    return efficiency.waste(prediction.idle.mean, prediction.padding.mean)


def batch_samples(costs: NDArray[np.float64], batch_size: int | None, max_tokens: float | None) -> float:
    """Samples of a batch; with a token budget about as many as it has on average: `1 / mean batch share`."""
    if max_tokens is None:
        return float(batch_size or 1)
    return 1 / float(batch_shares(costs, max_tokens, batch_size).mean())


def samples_without_pool(costs: NDArray[np.float64], batch_size: int | None, max_tokens: float | None) -> int:
    """Samples of a batch without a pool: as many; with a token budget as many as always fit."""
    if max_tokens is None:
        return batch_size or 1
    fit = max(1, int(max_tokens // max(1.0, float(costs.max()))))
    return fit if batch_size is None else min(fit, batch_size)


def sizes_to_try(
    wanted: Iterable[int],
    batch: float,
    *,
    pools: int = 1,
    rank_samples: int | None = None,
    room: float | None = None,
) -> list[int]:
    """Pool sizes of at least a batch, ascending, one or more: those that are wanted, and the largest that is possible.

    Args:
        wanted: 0 for no pool is left out.
        batch: Samples of a batch.
        pools: Pools of a rank.
        rank_samples: Samples of the data set that fall to a rank; None if that is not known.
        room: Samples of a pool for which there is memory; None if that is not known.
    """
    least = max(1, math.ceil(batch))
    sizes = {size for size in wanted if size >= least}
    if room is not None and least <= room < max(sizes, default=math.inf):
        step = 10 ** max(0, math.floor(math.log10(room)) - 1)  # two digits
        sizes.add(max(least, int(room // step) * step))
    share = None if rank_samples is None else rank_samples // pools
    if share is not None and share >= least and not any(size <= share for size in sizes):
        sizes.add(share)
    return sorted(sizes) or [10 * least]


def cases_to_try(
    with_pool: Callable[[str, int], Case], sizes: Collection[int], *, needs_stream: bool, may_refer: bool
) -> list[Case]:
    """The settings to predict, policy by policy and by ascending pool size; `with_pool` makes each.

    Args:
        needs_stream: Whether other settings go with policy 'stream' alone.
        may_refer: Whether 'stream' is tried with reference lengths as well, if it has none.
    """
    stream = [with_pool("stream", size) for size in sorted(sizes)]
    cases = list(stream)
    if not needs_stream:
        # with one sample a batch 'blocks' is 'pool' by another name
        policies = ["pool"] if stream[0].settings.batch_size == 1 else ["pool", "blocks"]
        cases = [with_pool(policy, size) for policy in policies for size in sorted(sizes)] + stream
    if may_refer and not stream[0].has_reference:
        cases += [replace(case, has_reference=True) for case in stream if case.settings.pool_size <= _LARGE]
    return cases


@dataclass(frozen=True)
class Chooser:
    """The setting to choose, as seen from today's.

    A change must save at least `worth`: another policy, a file of reference lengths, and each tripling of the pool each
    count as one. The least of `waste + worth x changes` wins, of the settings that are possible; today's stays if they
    save less than that together. No pool is chosen if none saves two points.
    """

    today: Prediction
    baseline: Prediction  # without a pool
    needs_stream: bool = False  # whether other settings go with policy 'stream' alone
    pools: int = 1  # of a rank
    rank_samples: int | None = None  # samples of the data set that fall to a rank; None if that is not known
    fits: Callable[[Case], bool] = lambda case: True  # whether a setting's pools fit into memory, as far as is known

    @property
    def worth(self) -> float:
        """Two points of waste, or as much as today's prediction may be off, if that is more."""
        return max(efficiency.WORTH, (self.today.idle.high - self.today.idle.low) / 2)

    def is_within_share(self, case: Case) -> bool:
        """Whether a rank has enough samples to fill its pools."""
        return self.rank_samples is None or case.settings.pool_size * self.pools <= self.rank_samples

    def is_possible(self, case: Case) -> bool:
        """Whether a setting's pools fit into memory and into a rank's share of the data set."""
        return self.fits(case) and self.is_within_share(case)

    def choose(self, predictions: Sequence[Prediction]) -> Prediction:
        """The best of some predictions, of today's and of no pool."""
        today, possible = self.today, [prediction for prediction in predictions if self.is_possible(prediction.case)]
        least = min(map(waste, [*possible, self.baseline]))
        if waste(self.baseline) - least < efficiency.WORTH and not self.needs_stream:
            return self.baseline
        if not possible:
            return today if self.fits(today.case) else self.baseline
        smallest = min(prediction.case.settings.pool_size for prediction in possible)
        best = min(possible, key=lambda prediction: self._score(prediction, smallest))
        saves = waste(today) - waste(best) >= self.worth
        return best if saves or not self.is_possible(today.case) else today

    def search(self, cases: Sequence[Case], predict: Callable[[Case], Prediction]) -> Prediction:
        """What `choose` would say of all cases, without a prediction of those that cannot be the best.

        Of one policy a larger pool wastes no more than a smaller one, and of three times the size hardly less than half
        as much. So what was predicted bounds the rest.
        """
        possible = [case for case in cases if self.is_possible(case)]
        smallest = min((case.settings.pool_size for case in possible), default=1)
        first_size = max(self.today.case.settings.pool_size, _FIRST_SIZE)
        tried = {self.today.case: self.today} if self.today.case in possible else {}
        for policy in dict.fromkeys(map(_policy, possible)):
            sizes = [case for case in possible if _policy(case) == policy]
            if not any(case in tried for case in sizes):
                first = min(sizes, key=lambda case: abs(math.log(case.settings.pool_size / first_size)))
                tried[first] = predict(first)

        def bound(case: Case) -> float:
            alike = [prediction for prediction in tried.values() if _policy(prediction.case) == _policy(case)]
            halved = [
                math.log(max(1.0, case.settings.pool_size / prediction.case.settings.pool_size), 3)
                for prediction in alike
            ]
            least = max(waste(prediction) * 0.5**times for prediction, times in zip(alike, halved, strict=True))
            return float(least) + self._penalty(case, smallest)

        while True:
            best = min((self._score(prediction, smallest)[0] for prediction in tried.values()), default=0.0)
            left = [case for case in possible if case not in tried and bound(case) < best]
            if not left:
                return self.choose(list(tried.values()))
            case = min(left, key=bound)
            tried[case] = predict(case)

    def _score(self, prediction: Prediction, smallest: int) -> tuple[float, int]:
        score = waste(prediction) + self._penalty(prediction.case, smallest)
        return round(score, 3), prediction.case.settings.pool_size  # of settings that are as good the smallest pool

    def _penalty(self, case: Case, smallest: int) -> float:
        today = self.today.case
        changes = (case.settings.policy != today.settings.policy) + (case.has_reference != today.has_reference)
        tripled = math.log(case.settings.pool_size / max(today.settings.pool_size, smallest), 3)
        return self.worth * (changes + max(0.0, tripled))


def _policy(case: Case) -> tuple[str, bool]:
    return case.settings.policy, case.has_reference
