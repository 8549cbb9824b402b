"""The figure of docs/policies.md: what three ranks train on under each policy.

    python benchmarks/policies_figure.py

Lengths are log-normal (mean of the logarithm 6, deviation 0.8; at most 3,000) and pools hold 400 of them. 40 steps in a
row are drawn; the fractions in the titles are of 1,000.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from lightning_lengthpool.ordering import efficiency
from lightning_lengthpool.ordering.policies import ORDERS
from lightning_lengthpool.ordering.reference_costs import ReferenceCosts
from lightning_lengthpool.ordering.settings import PoolSettings
from lightning_lengthpool.ordering.sorted_pool import SortedPool
from lightning_lengthpool.report.figures import WAIT, WORK, draw_ranks
from lightning_lengthpool.simulation.simulate import simulate

RANKS, POOL_SIZE, BATCH_SIZE, STEPS = 3, 400, 4, 1000
SHOWN = slice(500, 540)
PACKED = "#D55E00"


def lengths(rng: np.random.Generator, samples: int) -> np.ndarray:
    return np.minimum(rng.lognormal(6, 0.8, samples), 3000).round()


RNGS = [np.random.default_rng(rank) for rank in range(RANKS)]
OWN = [lengths(rng, STEPS * BATCH_SIZE) for rng in RNGS]
CLASSES = [(rng.random(STEPS * BATCH_SIZE) < 0.3).astype(int) for rng in RNGS]
SHARE = float(np.mean(CLASSES))
REFERENCE = ReferenceCosts({None: lengths(np.random.default_rng(RANKS), 5000)})
PANELS: list[tuple[str, dict[str, Any]]] = [
    ("none", {"policy": "none"}),
    ("pool", {"policy": "pool"}),
    ("blocks", {"policy": "blocks"}),
    ("stream", {"policy": "stream"}),
    ("stream, reference_lengths", {"policy": "stream", "reference": REFERENCE}),
    ("stream, max_tokens 6000", {"policy": "stream", "batch_size": None, "max_tokens": 6000}),
    ("stream, two classes", {"policy": "stream", "class_shares": {0: 1 - SHARE, 1: SHARE}}),
]


def first_rank(settings: PoolSettings) -> list[list[float]]:
    """The lengths in each batch of the first rank, for `simulate` tells their sums only."""
    own, size = OWN[0], settings.capacity
    if not settings.is_stream:
        order = ORDERS[settings.policy]
        pools = enumerate(own.reshape(-1, size).tolist())
        left = [pool[index] for i, pool in pools for index in order(pool, size, i * size, settings.seed, BATCH_SIZE)]
        return np.reshape(left, (-1, BATCH_SIZE)).tolist()
    pool = SortedPool(settings)
    batches, number = [], 0
    for slot in range(SHOWN.stop):
        while len(pool) < size:
            index = number % len(own)
            pool.add(number, own[index], None if settings.class_shares is None else int(CLASSES[0][index]))
            number += 1
        batches.append(pool.take(slot).costs)
    return batches


def draw_batches(axes: Axes, batches: list[list[float]], classes: np.ndarray) -> None:
    """Every sample of a batch, and what padding adds to it."""
    for step, (batch, class_) in enumerate(zip(batches, classes, strict=True)):
        axes.vlines(step, min(batch), max(batch), color=WAIT, linewidth=3.2)
        axes.plot([step] * len(batch), batch, "_", color=PACKED if class_ else WORK, markersize=4, markeredgewidth=1.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs" / "policies.png")
    options = parser.parse_args()
    figure = Figure(figsize=(9.6, 1.45 * len(PANELS)), dpi=150, layout="constrained")
    axes = figure.subplots(len(PANELS), 2, sharex=True, width_ratios=(1.15, 1))
    for (name, options_), (left, right) in zip(PANELS, axes, strict=True):
        settings = PoolSettings(**{"batch_size": BATCH_SIZE, "pool_size": POOL_SIZE, **options_})
        classes = None if settings.class_shares is None else CLASSES
        result = simulate(OWN, settings, STEPS, classes=classes, is_cycle=True)
        draw_ranks(left, np.arange(SHOWN.stop - SHOWN.start), result.padded[SHOWN])
        idle, padding = (
            efficiency.idle_fraction(result.padded),
            efficiency.padding_fraction(result.tokens, result.padded),
        )
        left.set_title(f"{name}: {100 * idle:.0f} % waiting", fontsize=9.5, loc="left", weight="bold")
        right.set_title(f"{100 * padding:.0f} % padding", fontsize=9.5, loc="left")
        batches = first_rank(settings)
        assert np.allclose([sum(batch) for batch in batches[SHOWN]], result.tokens[SHOWN, 0])
        draw_batches(right, batches[SHOWN], result.classes[SHOWN, 0])
        for axis in (left, right):
            axis.set_ylim(bottom=0)
            axis.spines[["top", "right"]].set_visible(False)
            axis.tick_params(labelsize=8)
    axes[-1][0].set_xlabel("step", fontsize=9)
    axes[-1][1].set_xlabel("step", fontsize=9)
    figure.supylabel("tokens", fontsize=9)
    handles, labels = axes[0][0].get_legend_handles_labels()
    handles += [Line2D([], [], color=colour, marker="_", linestyle="") for colour in (WORK, PACKED)]
    labels += ["a sample in a batch of the first rank", "one of the second class"]
    handles.append(Patch(color=WAIT))
    labels.append("padding")
    figure.legend(handles, labels, loc="outside upper center", ncols=3, fontsize=8.5, frameon=False)
    figure.savefig(options.out)


if __name__ == "__main__":
    main()
