"""What a sample costs to train on: the models by which pools sort samples and fill batches.

All costs are in tokens: one unit is the work of one token of the model's linear layers, attention left out. A model is
named in a config by `class_path` and `init_args`, say

    cost:
      class_path: lightning_lengthpool.cost_models.QuadraticCost
      init_args: {hidden_size: 4096, causal: true}

What is wasted, given the costs, is in `ordering/efficiency.py`. Neither imports torch.
"""

import math
import reprlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_lengthpool.ordering.cost_model import CostModel, as_float
from lightning_lengthpool.ordering.length import field_names, get_field

__all__ = ["CostModel", "FittedCost", "PackedCost", "QuadraticCost", "TokenCost", "VisionCost"]


class TokenCost(CostModel):
    """The length: right while attention costs little beside the linear layers, and the default.

    Example:
        >>> TokenCost().of_length(300)
        300.0
        >>> TokenCost().of_batch([100, 300])
        600.0
    """

    def of_length(self, length: float) -> float:
        return float(length)


class QuadraticCost(CostModel):
    """Linear layers and attention: `tokens + tokens**2 / k`.

    `k` is the length at which attention costs as much as all else. In a standard transformer of width h, the forward
    FLOPs of one layer per token are 8 h**2 (query, key, value, output), 16 h**2 (an MLP of width 4 h) and, in a
    sequence of s tokens, 4 s h (scores and weighted values): `24 h**2 + 4 s h = 24 h**2 (1 + s / (6 h))`, so `k = 6 h`.
    The backward pass has twice the FLOPs of each. It is the `1 + s / (6 h)` in the FLOPs of Narayanan et al. (2021),
    "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (arXiv:2104.04473), without the
    output layer, which would make `k` a little longer.

    FLOPs are not seconds: attention mostly runs at a lower rate, which makes `k` shorter. `FittedCost` measures it.

    Args:
        hidden_size: h, for the `k` above.
        causal: Whether the attention kernel skips the half of the scores that a causal mask hides, as FlashAttention
            does: then `k = 12 h`.
        k: In tokens, in place of `hidden_size`, for layers of another shape (grouped queries, gated MLPs, experts):
            `a layer's active parameters / (2 x heads x head size)`, twice that if causal. Llama 3 8B has 218.1 million
            a layer and 32 heads of 128, so `k` is 26624, or 53248 if causal.

    Raises:
        ValueError: If not exactly one of `hidden_size` and `k` is given, or it is not positive.

    Example:
        >>> QuadraticCost(hidden_size=1000, causal=True)
        QuadraticCost(k=12000.0)
        >>> QuadraticCost(k=4000).of_length(2000)
        3000.0
    """

    def __init__(self, hidden_size: int | None = None, causal: bool = False, k: float | None = None) -> None:
        self.k = _attention_k(type(self).__name__, hidden_size, causal, k)

    def of_length(self, length: float) -> float:
        return length + length**2 / self.k


class PackedCost(CostModel):
    """A sample that packs several sub-sequences, each of which attends to itself only: `tokens + sum of l_i**2 / k`.

    A batch costs the sum of its samples.

    Args:
        hidden_size: See `QuadraticCost`.
        causal: See `QuadraticCost`.
        k: See `QuadraticCost`.
        field: Where a sample has its cumulative lengths, from 0 to its length: a tensor, array or list, as
            `cu_seqlens` of FlashAttention.

    Raises:
        ValueError: As `QuadraticCost`.

    Example:
        >>> PackedCost(k=1000).cost({"cu_lengths": [0, 300, 400]}, 400)
        500.0
    """

    def __init__(
        self,
        hidden_size: int | None = None,
        causal: bool = False,
        k: float | None = None,
        field: str = "cu_lengths",
    ) -> None:
        self.k = _attention_k(type(self).__name__, hidden_size, causal, k)
        self.field = field

    @property
    def is_padded(self) -> bool:
        return False

    def of_length(self, length: float) -> float:
        raise ValueError(
            f"{self!r} needs each sample's sub-sequences ({self.field!r}): lengths alone do not tell what a pack "
            "costs. Use QuadraticCost or TokenCost where only lengths are known."
        )

    def cost(self, sample: Any, length: float) -> float:
        ends = _numbers(sample, self.field)
        if not len(ends) or ends[0] != 0 or not (np.diff(ends) >= 0).all() or ends[-1] != length:
            raise ValueError(
                f"sample {get_field(sample, '__key__')!r} has {self.field} = {reprlib.repr(ends.tolist())} (up to "
                f"{ends[-1:].max(initial=0.0):g}), expected cumulative lengths that start with 0, ascend, and end with "
                f"its length, {length:g}"
            )
        return float(length + (np.diff(ends) ** 2).sum() / self.k)


class VisionCost(CostModel):
    """Tokens in the language model and patches in an image encoder, weighted apart.

    `language cost + encoder_weight x sum over images of (p_i + p_i**2 / encoder_k)`, with p_i an image's patches.

    Args:
        encoder_weight: What a patch costs in the encoder, in tokens of the language model: about the encoder's
            parameters divided by the language model's (0.3 / 7 = 0.043), a third of that if the encoder is frozen and
            runs no backward pass.
        language: The cost of the language model, by a sample's length, which includes the vision tokens that enter it.
            It also decides whether a batch is padded. Default: `TokenCost()`.
        field: Where a sample has its patches as the encoder sees them, before any merging: a number, or one for each
            image. A sample without images has 0 or an empty list.
        encoder_k: Where the encoder attends within each image, its `k`: 6 x its hidden size, see `QuadraticCost`. A
            single number in `field` then counts as one image. Default: no such term.

    Raises:
        ValueError: If `encoder_weight` is negative or `encoder_k` not positive.

    Example:
        >>> model = VisionCost(encoder_weight=0.1, language=QuadraticCost(k=4000), encoder_k=1000)
        >>> model.cost({"num_patches": [1000, 500]}, 2000)  # 3000 + 0.1 * (2000 + 750)
        3275.0
    """

    def __init__(
        self,
        encoder_weight: float,
        language: CostModel | None = None,
        field: str = "num_patches",
        encoder_k: float = math.inf,
    ) -> None:
        self.encoder_weight = as_float(encoder_weight)
        if not 0 <= self.encoder_weight < math.inf:
            raise ValueError(f"VisionCost: encoder_weight is {encoder_weight!r}, expected a finite number, at least 0")
        self.language = language or TokenCost()
        self.field = field
        self.encoder_k = _positive("VisionCost", "encoder_k", encoder_k)

    @property
    def is_padded(self) -> bool:
        return self.language.is_padded

    def of_length(self, length: float) -> float:
        raise ValueError(
            f"{self!r} needs each sample's patches ({self.field!r}): lengths alone do not tell what the encoder costs. "
            "Use QuadraticCost or TokenCost where only lengths are known."
        )

    def cost(self, sample: Any, length: float) -> float:
        patches = _numbers(sample, self.field)
        if not (np.isfinite(patches) & (patches >= 0)).all():
            raise ValueError(
                f"sample {get_field(sample, '__key__')!r} has {self.field} = {reprlib.repr(patches.tolist())}, "
                "expected finite numbers of at least 0"
            )
        encoder = float((patches + patches**2 / self.encoder_k).sum())
        return self.language.cost(sample, length) + self.encoder_weight * encoder


class FittedCost(CostModel):
    """A model fitted to a run's own measurements, those of `SyncMonitor`: `tokens + tokens**2 / k`.

    `causes.CauseTracker` fits a micro-batch's seconds as `a + b (padded + padded x longest / k)`; of the typical rank
    this model takes `k` and `per_batch = a / b` (in tokens; what launching kernels takes, for instance), 0 if `a` is
    negative. Both are rounded to six digits, so that machines that round differently agree.

    The file is read once, here. Give a finished run's, the same on all ranks: one that is still written, or is
    overwritten by this run, makes another model of it the next time.

    Args:
        path: A `steps.csv`, or a folder with one somewhere below it.

    Raises:
        ValueError: If there is not exactly one such file, its run has no measured compute, fewer than 20 measured
            micro-batches, or a time that hardly grows with tokens, as when all batches are of one size.
    """

    def __init__(self, path: str | Path) -> None:
        from lightning_lengthpool.runs.run import fit_of

        fit = fit_of(path, "FittedCost")
        self.k = float(f"{fit.k:.6g}")
        self.per_batch = float(f"{max(fit.a, 0.0) / fit.b:.6g}")

    def of_length(self, length: float) -> float:
        return length + length**2 / self.k


def _attention_k(name: str, hidden_size: int | None, causal: bool, k: float | None) -> float:
    if (hidden_size is None) == (k is None):
        raise ValueError(f"{name} takes either hidden_size or k, got hidden_size={hidden_size} and k={k}")
    if k is None:
        return (12.0 if causal else 6.0) * _positive(name, "hidden_size", hidden_size)
    if causal:
        raise ValueError(f"{name}: causal goes with hidden_size only; it doubles k, so give k={2 * k:g} instead")
    return _positive(name, "k", k)


def _positive(name: str, setting: str, value: Any) -> float:
    number = as_float(value)
    if not number > 0:
        raise ValueError(f"{name}: {setting} is {value!r}, expected a positive number")
    return number


def _numbers(sample: Any, field: str) -> NDArray[np.float64]:
    """A sample's field as numbers in one dimension: of a number, list, array or tensor (on any device)."""
    value = get_field(sample, field)
    if value is None:
        raise ValueError(
            f"sample {get_field(sample, '__key__')!r} ({type(sample).__name__}) has no {field!r}, only "
            f"{field_names(sample)}. Let the encoder set it, or name another field in the cost model."
        )
    if hasattr(value, "tolist"):  # a tensor or array
        value = value.tolist()
    try:
        return np.atleast_1d(np.asarray(value, dtype=np.float64)).ravel()
    except (TypeError, ValueError):
        raise ValueError(
            f"sample {get_field(sample, '__key__')!r} has {field} = {reprlib.repr(value)}, expected a number or numbers"
        ) from None
