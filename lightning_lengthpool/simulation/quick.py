"""A prediction in a fraction of a second, without an interval: of many ranks, in the process that trains."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lightning_lengthpool.ordering import efficiency
from lightning_lengthpool.ordering.reference_costs import ReferenceCosts
from lightning_lengthpool.ordering.stream.blocks import even_slots
from lightning_lengthpool.simulation.cases import Case
from lightning_lengthpool.simulation.predict import Prediction
from lightning_lengthpool.simulation.simulate import simulate
from lightning_lengthpool.simulation.uncertainty import Interval, Seconds, costs_of

Array = NDArray[np.float64]

_FEW_STEPS = 70  # of many ranks: with even slots as good as 200 others
_FEW_SLOTS = 1000
_REFERENCE = 5000  # lengths of a reference


def predict_quickly(lengths: Sequence[Array], case: Case, batch: float, seconds: Seconds | None = None) -> Prediction:
    """Predict what a case would waste, by a short simulation; its intervals are of no width.

    For each rank `lengths` are those from which its samples are drawn; `batch` is about how many samples a batch has.
    """
    ranks, micro_batches, slots = len(lengths), case.accumulate, None
    samples_per_step = max(1, round(batch)) * micro_batches
    if case.settings.is_stream:  # slower to simulate, and no pools that would have to be whole
        samples = max(300, min(12_000, 40_000 // ranks))
        steps = max(1, min(samples // samples_per_step, max(_FEW_STEPS, 40_000 // ranks)))
        if steps * micro_batches <= _FEW_SLOTS:
            slots = even_slots(case.settings.seed, steps * micro_batches)
    else:
        # whole pools; of few ranks more samples, for they leave more to chance
        samples, pool = max(3000, min(12_000, 200_000 // ranks)), max(1, case.settings.pool_size)
        steps = max(1, -(-samples // pool) * pool // samples_per_step)
    settings = case.settings
    if case.has_reference:
        settings = replace(settings, reference=ReferenceCosts({None: _few(lengths)}))
    result = simulate(lengths, settings, steps * micro_batches, slots=slots)

    def by_step(values: Array) -> Array:
        total: Array = values.reshape(steps, micro_batches, -1).sum(axis=1)
        return total

    figures = (
        efficiency.idle_fraction(by_step(costs_of(seconds, result.padded, result.longest))),
        efficiency.padding_fraction(result.tokens, result.padded),
        efficiency.useful_fraction(by_step(result.tokens), by_step(result.padded)),
    )
    return Prediction(case, *(Interval(figure, figure, figure) for figure in figures))


def _few(lengths: Sequence[Array]) -> Array:
    """A few thousand evenly spaced quantiles, which each rank's pool sorts again."""
    is_one = all(of_rank is lengths[0] for of_rank in lengths)
    pooled = np.sort(lengths[0] if is_one else np.concatenate(lengths))
    return pooled[:: max(1, len(pooled) // _REFERENCE)]
