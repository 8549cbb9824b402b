"""What the data-parallel ranks agree on before training: small reductions, to be called on all ranks alike."""

import hashlib

import torch
from lightning.pytorch import Trainer


class Agreement:
    """The ranks of a trainer; a single one without a trainer.

    Args:
        trainer: Whose ranks.
        ranks: Number of data-parallel ranks.
    """

    def __init__(self, trainer: Trainer | None, ranks: int) -> None:
        self._trainer = trainer
        self._ranks = ranks

    def ranks_with(self, something: bool) -> int:
        """On how many data-parallel ranks something is so."""
        # A mean, for under tensor parallelism several processes share a data rank.
        return round(self._reduce(something, "mean") * self._ranks)

    def max(self, value: float) -> float:
        """The largest value of all ranks."""
        return self._reduce(value, "max")

    def is_same(self, text: str) -> bool:
        """Whether all ranks have the same text; the answer is the same on all ranks."""
        number = int(hashlib.sha256(text.encode()).hexdigest()[:12], 16)  # 48 bits: exact as a float
        return self._reduce(number, "max") == -self._reduce(-number, "max")

    def _reduce(self, value: float, reduce_op: str) -> float:
        if self._trainer is None:
            return value
        strategy = self._trainer.strategy
        tensor = torch.tensor(float(value), device=strategy.root_device, dtype=torch.float64)
        return float(strategy.reduce(tensor, reduce_op=reduce_op))
