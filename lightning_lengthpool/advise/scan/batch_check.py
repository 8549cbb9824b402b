"""Makes a few batches in a worker process, and compares their tokens with what the length function says."""

import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from megatron.energon import WorkerConfig

from lightning_lengthpool.advise.scan.length_scan import BatchCheck
from lightning_lengthpool.advise.scan.scan_worker import Failures, Part, Scanner
from lightning_lengthpool.data.pools.dataset import LengthPoolDataset, PooledBatch
from lightning_lengthpool.ordering.length import get_field

_NAMES_OF_TOKENS = ("tokens", "input_ids", "labels")


class BatchScanner(Scanner):
    """Makes a few batches.

    Args:
        pool: Makes the batches.
        count: How many.
        failures: Counts those.
        worker_config: The rank and its workers.
    """

    def __init__(self, pool: LengthPoolDataset, count: int, failures: Failures, worker_config: WorkerConfig) -> None:
        super().__init__(pool, failures, worker_config)
        self.count = count

    def parts(self, worker: int) -> Iterator[Part]:
        part, started, batches = Part(worker), time.perf_counter(), iter(self.dataset)
        for number in range(self.count):
            if (pooled := next(batches, None)) is None:
                break
            if number:
                part.batch_seconds.append(time.perf_counter() - started)
            if (check := check_tokens(pooled)) is not None:
                part.batch_checks.append(check)
            started = time.perf_counter()
        yield part


def check_tokens(pooled: PooledBatch) -> BatchCheck | None:
    """Count a batch's tokens by its own tensors; None if it has no field that tells."""
    lengths, key = pooled.lengths, pooled.__key__[0]
    total = math.fsum(lengths)
    mask = get_field(pooled.batch, "attention_mask")
    if _is_array(mask) and len(mask.shape) <= 2:
        ones = float(mask.sum())
        if 0 <= ones < math.inf:  # else it is one that is added to the scores
            return BatchCheck(key, total, ones, "sum of attention_mask")
    for name in _NAMES_OF_TOKENS:
        value = get_field(pooled.batch, name)
        if _is_array(value) and 1 <= len(value.shape) <= 2:
            size = float(math.prod(value.shape))
            if len(value.shape) == 2 and len(value) == len(lengths):
                return BatchCheck(key, len(lengths) * max(lengths), size, f"size of {name}, with padding")
            return BatchCheck(key, total, size, f"size of {name}")
        if isinstance(value, (list, tuple)) and value and all(_is_array(one) or isinstance(one, list) for one in value):
            return BatchCheck(key, total, float(sum(map(len, value))), f"lengths of {name}")
    return None


def _is_array(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray))
