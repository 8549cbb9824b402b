"""Which of the data-parallel ranks this process is, and what the ranks agree on: to be called on all ranks alike."""

import hashlib
import os
import secrets
from typing import NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer

from lightning_lengthpool.ordering.settings import check_integer

# How launchers tell a process that it is one of several.
_LAUNCHED = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


class DataRank(NamedTuple):
    """One of the ranks that share the data; `rank` counts from 0."""

    rank: int
    world_size: int


def check_data_rank(rank: int, world_size: int) -> DataRank:
    """A rank as the user says."""
    world_size = check_integer("world_size", world_size, minimum=1)
    rank = check_integer("rank", rank, minimum=0)
    if rank >= world_size:
        raise ValueError(f"rank is {rank}, expected less than world_size, which is {world_size}")
    return DataRank(rank, world_size)


def find_data_rank(trainer: Trainer | None, given: DataRank | None) -> DataRank:
    """Which data-parallel rank this process is: as given, else as the trainer says, else as the process group does.

    Raises if a launcher has started several processes, but nothing tells which of them this is.
    """
    if given is not None:
        return given
    if trainer is not None:
        sampler = trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
        return DataRank(sampler["rank"], sampler["num_replicas"])
    if dist.is_available() and dist.is_initialized():
        return DataRank(dist.get_rank(), dist.get_world_size())
    for name in _LAUNCHED:
        if os.environ.get(name, "1") != "1":
            raise ValueError(
                f"{name} is {os.environ[name]!r}, so this is one of several processes, but there is no trainer and no "
                "process group yet to tell which one: every rank would train on the samples of rank 0. Hand the data "
                "module to the Trainer first, or call torch.distributed.init_process_group first, or pass rank and "
                "world_size to LengthPoolDataModule."
            )
    return DataRank(0, 1)


class Agreement:
    """Small reductions over all processes: of a trainer, else of the process group, else of this one alone."""

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

    def token(self) -> str:
        """A name that was never used before, the same on all ranks."""
        return f"{int(self.max(secrets.randbits(48))):012x}"

    def _reduce(self, value: float, reduce_op: str) -> float:
        if self._trainer is not None:
            strategy = self._trainer.strategy
            tensor = torch.tensor(float(value), device=strategy.root_device, dtype=torch.float64)
            return float(strategy.reduce(tensor, reduce_op=reduce_op))
        if not (dist.is_available() and dist.is_initialized()):
            return value
        device = "cuda" if "nccl" in dist.get_backend() else "cpu"  # untested on a GPU
        tensor = torch.tensor(float(value), device=device, dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX if reduce_op == "max" else dist.ReduceOp.SUM)
        return float(tensor) / (dist.get_world_size() if reduce_op == "mean" else 1)
