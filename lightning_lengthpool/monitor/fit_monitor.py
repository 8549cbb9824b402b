"""What `SyncMonitor` has of one fit, on each rank: the marks of its steps, and the exchange of records."""

import math
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_warn
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_lengthpool.monitor.compute_hooks import ComputeHooks
from lightning_lengthpool.monitor.fetch_timer import FetchTimer
from lightning_lengthpool.monitor.recorder import CudaStepRecorder, Reservoir, StepRecorder
from lightning_lengthpool.monitor.run_files import RunFiles
from lightning_lengthpool.monitor.run_log import RunLog
from lightning_lengthpool.monitor.run_writer import RunWriter
from lightning_lengthpool.ranks.store import ALONE_SECONDS, gather
from lightning_lengthpool.runs.run_json import About
from lightning_lengthpool.runs.steps.columns import COLUMNS

Array = NDArray[np.float64]
LengthsOf = Callable[[Any], Sequence[float]]

SAMPLED_LENGTHS = 1000  # of each rank: enough for the advice at the end

UNSUPPORTED = (
    "SyncMonitor: {strategy} communicates during the forward and backward pass, so a rank's own compute seconds "
    "cannot be measured; idle fractions come from padded tokens. A single device and DDP can be measured."
)
NO_LENGTHS = (
    "SyncMonitor does not know the samples' lengths: the train loader ({loader}) does not report them. Use "
    "LengthPoolDataModule, whose loader does, or pass SyncMonitor(length_fn=...), a function from a batch to a list "
    "with the length of each of its samples."
)


class BatchRecord(Protocol):
    """What a loader knows of a batch.

    It may also have `missed`: whether the batch is not of the class that its slot is meant for.
    """

    lengths: Sequence[float]  # of its samples, in tokens
    fetch_started: float  # on `time.perf_counter`
    data_seconds: float  # for which the training loop waited for it


@runtime_checkable
class ReportsBatches(Protocol):
    """A train loader that knows the lengths of its batches."""

    def pop_record(self) -> BatchRecord:
        """That of the batch that training begins with now."""


@runtime_checkable
class TellsSettings(Protocol):
    """A data module whose settings the monitor writes down and bases its advice on."""

    def pool_settings(self) -> Mapping[str, Any]:
        """Plain values, see `run_json.About`."""


class FitMonitor:
    """Record one rank's steps, from `on_train_start` on, and hand those of all ranks to rank zero.

    `files` is None on other ranks than zero. `log` makes a run log from the hosts of the data ranks.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        length_fn: LengthsOf | None,
        files: RunFiles | None,
        log: Callable[[Sequence[str]], RunLog],
    ) -> None:
        loader = trainer.train_dataloader
        if length_fn is None and not isinstance(loader, ReportsBatches):
            raise MisconfigurationException(NO_LENGTHS.format(loader=type(loader).__name__))
        self._trainer, self._length_fn = trainer, length_fn
        self.recorder = CudaStepRecorder() if module.device.type == "cuda" else StepRecorder()
        self._lengths = Reservoir(SAMPLED_LENGTHS)
        self._steps = 0
        self._finished = -1  # the last step whose micro-batches are all there
        self._rows: Array = np.empty((0, len(COLUMNS)))
        self._flushes = 0
        self._is_training = False
        # under tensor parallelism the global rank is not the data-parallel one; the sampler's is
        sampler = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
        self._rank, self._ranks = int(sampler.get("rank", 0)), int(sampler.get("num_replicas", 1))
        self._is_ddp = isinstance(trainer.strategy.model, DistributedDataParallel)
        measured = self._is_ddp or isinstance(trainer.strategy, SingleDeviceStrategy)
        if not measured:
            rank_zero_warn(UNSUPPORTED.format(strategy=type(trainer.strategy).__name__))
        self._fetches = FetchTimer(trainer)
        self._hooks = ComputeHooks(module, self.recorder, self._is_ddp) if measured else None
        self._settings = _settings(trainer)  # asked once: the data module counts its samples for it
        hosts, workers, self._name = self._agree(self._settings.get("num_workers"))
        self.writer: RunWriter | None = None  # on rank zero
        if files is not None:
            about = About(hosts=hosts, workers_by_rank=workers)
            self.writer = RunWriter(log(hosts), files, trainer.loggers, about, measured)

    def start_batch(self, batch: Any, batch_idx: int, run: str | None) -> None:
        """A micro-batch begins, in a fit that goes on from the checkpoint of `run`; None for none."""
        loader = self._trainer.train_dataloader  # a fit may have several
        record = loader.pop_record() if isinstance(loader, ReportsBatches) else None
        lengths: Sequence[float] = record.lengths if record is not None else ()
        if self._length_fn is not None:
            lengths = _checked(self._length_fn(batch), batch_idx)
        self._lengths.add(lengths)
        step = step_number(self._trainer)
        if not self._is_training:  # only now a resumed loop has counted the step that its checkpoint ends
            self._is_training = True
            if self.writer is not None:
                self.writer.start(step, run, self._settings)
        if record is not None:
            missed = getattr(record, "missed", False)
            self.recorder.begin(step, lengths, record.fetch_started, record.data_seconds, missed)
        else:
            self.recorder.begin(step, lengths, *(self._fetches.last() or ()))
        if self._hooks is not None:
            self._hooks.start_batch()

    def start_backward(self) -> None:
        if self._hooks is not None:
            self._hooks.start_backward()

    def end_backward(self) -> None:
        if self._hooks is not None:
            self._hooks.end_backward()

    def end_batch(self, every_n_steps: int, *, is_automatic: bool) -> float | None:
        """A micro-batch ends; after an exchange of records rank zero gets the idle fraction of its steps."""
        self.recorder.end(needs_reduction=self._is_ddp and not is_automatic)
        if self._trainer.fit_loop._should_accumulate():
            return None
        self._finished = step_number(self._trainer)
        self._steps += 1
        return self._exchange() if self._steps % every_n_steps == 0 else None

    def interrupt(self) -> None:
        """Something else comes between the last micro-batch and the next."""
        self.recorder.interrupt()

    def end(self) -> None:
        self.remove_hooks()
        self._exchange()
        sample = torch.from_numpy(np.append(self._rank, self._lengths.padded()))
        gathered = self._gather(sample).numpy()
        self._is_training = False
        if self.writer is not None:
            by_rank = {row[0]: row[1:] for row in gathered[::-1]}  # the first of each data rank
            self.writer.close([lengths[~np.isnan(lengths)] for _, lengths in sorted(by_rank.items())])

    def fail(self) -> None:
        self.remove_hooks()
        self.flush()
        self._is_training = False

    def remove_hooks(self) -> None:
        """Leave module and loop as they were."""
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None
        self._fetches.remove()

    def flush(self) -> None:
        """Let the log have the records before the next exchange, which still brings all of them.

        Without a collective, for this rank may be alone here, in an exception handler or by a call of the user's.
        """
        if not self._is_training:
            return
        rows = self._collect()
        last, self._flushes = f"{self._name}-{self._flushes}", self._flushes + 1
        if self.writer is not None and not len(rows):
            return  # rank zero does not wait; the others cannot know that, and leave what they have
        progress: Any = self._trainer.fit_loop.epoch_loop.batch_progress.total
        seconds = ALONE_SECONDS if progress.ready > progress.processed else None  # in a step others may be stuck
        name, plain = f"{self._name}-{self._flushes}", torch.from_numpy(rows)
        tensors = gather(plain, self._rank, self._ranks, name, last=last, seconds=seconds)
        parts = [tensor.numpy() for tensor in tensors if tensor is not None]
        if self.writer is not None and len(parts) == len(tensors):
            count = min(len(part) for part in parts)  # a rank that fails may be a step behind
            if count:
                self.writer.add(np.stack([part[:count] for part in parts]))

    def _collect(self) -> Array:
        """The records of whole steps since the last exchange, shape `[micro-batches, columns]`; they are kept."""
        self._rows = np.concatenate([self._rows, self.recorder.take(self._rank)])
        return self._rows[self._rows[:, 0] <= self._finished]

    def _exchange(self) -> float | None:
        """Gather the records of all ranks for rank zero; there it returns these steps' idle fraction."""
        rows = self._collect()
        if not len(rows):
            return None
        self._rows = self._rows[len(rows) :]
        gathered = self._gather(torch.from_numpy(rows))
        return None if self.writer is None else self.writer.add(gathered.numpy())

    def _gather(self, tensor: Tensor) -> Tensor:
        """Stack a tensor of all processes, on the CPU; the shape must be the same everywhere."""
        if self._trainer.world_size == 1:
            return tensor[None]
        # strategy.all_gather is the differentiable one, of which torch warns that it will go
        tensor = tensor.to(self._trainer.strategy.root_device)
        parts = [torch.empty_like(tensor) for _ in range(self._trainer.world_size)]
        torch.distributed.all_gather(parts, tensor)
        return torch.stack(parts).cpu()

    def _agree(self, num_workers: int | None) -> tuple[list[str], list[int | None], str]:
        """The host name and the number of workers of each data rank, and a name in the store that was never used."""
        host, name = socket.gethostname(), uuid.uuid4().hex
        if self._trainer.world_size == 1:
            return [host], [num_workers], name
        gathered: list[Any] = [None] * self._trainer.world_size
        torch.distributed.all_gather_object(gathered, (self._rank, host, num_workers, name))
        by_rank = {
            rank: (host, workers) for rank, host, workers, _ in reversed(gathered)
        }  # the first of each data rank
        hosts, workers = zip(*(by_rank[rank] for rank in sorted(by_rank)), strict=True)
        return list(hosts), list(workers), gathered[0][3]


def step_number(trainer: Trainer) -> int:
    """The number under which Lightning logs the current `training_step` (its own callbacks read it here too).

    It counts from 0 and goes up with each batch after which an optimizer may step; `trainer.global_step`
    would count each of several optimizers.
    """
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def _settings(trainer: Trainer) -> Mapping[str, Any]:
    """What is known of the data module, or else of the loader."""
    module = getattr(trainer, "datamodule", None)
    if isinstance(module, TellsSettings):
        return module.pool_settings()
    workers = getattr(trainer.train_dataloader, "num_workers", None)
    return {"num_workers": workers} if isinstance(workers, int) else {}


def _checked(lengths: Any, batch_idx: int) -> list[float]:
    """What `length_fn` returned, as numbers."""
    try:
        numbers = list(map(float, lengths))
    except TypeError:
        numbers = None
    if numbers is None or not all(0 <= number < math.inf for number in numbers):
        raise ValueError(
            f"length_fn gave {lengths if numbers is None else numbers} for batch {batch_idx}, expected the length in "
            "tokens of each of its samples: a list of finite numbers, none of them negative."
        )
    return numbers
