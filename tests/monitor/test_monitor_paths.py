"""On every path that training takes, a rank's compute seconds are its own, or absent with one warning.

All scenarios run in one launch of two ranks (`fit_all`), each a `fit` of its own. Rank 1 is made slow by `DELAY`, so
rank 0 waits for it somewhere: none of that may count as rank 0's compute.
"""

import contextlib
import copy
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed._composable.fsdp import fully_shard
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.utils.checkpoint import checkpoint

from helpers.monitored import Loader, SlowBackward, trainer
from helpers.ranks import run_ranks
from lightning_lengthpool.monitor.callback import SyncMonitor
from lightning_lengthpool.ordering import efficiency
from lightning_lengthpool.runs.steps.records import by_step
from lightning_lengthpool.runs.steps.steps_file import read_steps

DELAY = 0.08
STEPS = 5


def reduce() -> None:
    dist.all_reduce(torch.ones(1))


class ReduceInBackward(torch.autograd.Function):
    """All ranks meet in the backward pass, and with `forward_too` in the forward pass, as in SyncBatchNorm."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_too: bool) -> Tensor:
        if forward_too:
            reduce()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        reduce()
        return grad, None


class Plain(LightningModule):
    """Rank 1 is slow between two layers of the forward pass; what follows the second one is `after`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

    @torch.compiler.disable
    def work(self) -> None:
        time.sleep(DELAY * self.global_rank)

    def between(self, x: Tensor) -> Tensor:
        self.work()
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x))).mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        return self(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class SyncNorm(Plain):
    def between(self, x: Tensor) -> Tensor:
        self.work()
        return ReduceInBackward.apply(x, True)


class BetweenGradients(Plain):
    def between(self, x: Tensor) -> Tensor:
        self.work()
        return ReduceInBackward.apply(x, False)


class BeforeGradients(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return ReduceInBackward.apply(super().forward(x), False)


class InTrainingStep(Plain):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self(batch)
        reduce()
        return loss


class PointToPoint(Plain):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self(batch)
        dist.send(torch.ones(1), 0) if self.global_rank else dist.recv(torch.ones(1), 1)
        return loss


class InBeforeBackward(Plain):
    def on_before_backward(self, loss: Tensor) -> None:
        reduce()


class BeforeForward(Plain):
    """Rank 1 waits for rank 0 before the forward pass, which is none of its compute."""

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        time.sleep(0 if self.global_rank else 4 * DELAY)
        reduce()


class Unused(Plain):
    """The ranks use different parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def between(self, x: Tensor) -> Tensor:
        return self.spare[self.global_rank](super().between(x))


class Adversarial(Plain):
    """Two optimizers, so two backward passes; before each one that accumulates no gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            torch.autograd.grad(self(batch), [param for param in self.parameters() if param.requires_grad])
            optimizer.zero_grad()
            self.manual_backward(self(batch))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(layer.parameters()) for layer in (self.first, self.last)], []


class ByHand(Plain):
    """A backward pass of which Lightning knows nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.manual_backward(self(batch))
        self(batch).backward()


class AccumulatesByHand(Plain):
    """Two micro-batches a step, which Lightning takes for two steps."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        strategy = self.trainer.strategy
        with strategy.block_backward_sync() if batch_idx % 2 == 0 else contextlib.nullcontext():
            self.manual_backward(self(batch))
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()


class Closures(Plain):
    """The optimizer calls for several forward and backward passes in one step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.01, max_iter=2)


class Thawing(Plain):
    """`first`, behind a slow backward pass, is trained from step 2 on; the switch is thrown within the step."""

    def on_train_start(self) -> None:
        self.first.requires_grad_(False)

    def between(self, x: Tensor) -> Tensor:
        return SlowBackward.apply(x, DELAY * self.global_rank)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 2:
            self.first.requires_grad_(True)
        return self(batch)


class Checkpointed(Plain):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x.requires_grad_(), use_reentrant=self.use_reentrant)


class TakingTurns(Plain):
    """Either rank is slow in one of two accumulated micro-batches."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(2 * DELAY * ((batch_idx + self.global_rank) % 2))
        return self.last(self.first(batch)).mean()


class Hooked(Plain):
    """A communication hook, registered by hand: `DDPStrategy(ddp_comm_hook=...)` ignores it where there is no GPU."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        super().__init__()
        self.hook = hook

    def on_train_start(self) -> None:
        self.trainer.strategy.model.register_comm_hook(None, self.hook)


class Skipping(Plain):
    """No backward pass in every other step. On several ranks Lightning permits that under manual optimization only."""

    def __init__(self, manual: bool) -> None:
        super().__init__()
        self.automatic_optimization = not manual

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        loss = self(batch)
        if batch_idx % 2:
            return None
        if not self.automatic_optimization:
            self.manual_backward(loss)
        return loss


class Sharded(Plain):
    def configure_model(self) -> None:
        for layer in (self.first, self.last):
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])
        fully_shard(self, mesh=self.device_mesh["data_parallel"])


hooked: list[int] = []


def counting_hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    hooked.append(bucket.index())
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def blocking_hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    reduced: torch.futures.Future[Tensor] = torch.futures.Future()
    dist.all_reduce(bucket.buffer().div_(dist.get_world_size()))
    reduced.set_result(bucket.buffer())
    return reduced


def compiled() -> Any:
    return torch.compile(Plain(), backend="aot_eager")


def compiled_in_place() -> Plain:
    module = Plain()
    module.compile(backend="aot_eager")
    return module


UNUSED = "ddp_find_unused_parameters_true"
EACH_ITS_BUCKET = {"bucket_cap_mb": 1e-5}
# name -> (module, trainer settings); of the first ones every step is measured
MEASURED: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "plain": (Plain, {}),
    "many_buckets": (Plain, {"strategy": DDPStrategy(**EACH_ITS_BUCKET)}),
    "before_forward": (BeforeForward, {}),
    "bfloat16": (Plain, {"precision": "bf16-mixed"}),
    "compiled": (compiled, {}),
    "compiled_in_place": (compiled_in_place, {}),
    "unused": (Unused, {"strategy": UNUSED}),
    "static_graph": (Plain, {"strategy": DDPStrategy(static_graph=True)}),
    "fp16_hook": (lambda: Hooked(fp16_compress_hook), {}),
    "counting_hook": (lambda: Hooked(counting_hook), {"strategy": DDPStrategy(**EACH_ITS_BUCKET)}),
    "blocking_hook": (lambda: Hooked(blocking_hook), {"strategy": DDPStrategy(**EACH_ITS_BUCKET)}),
    "checkpoint": (lambda: Checkpointed(use_reentrant=False), {}),
    "checkpoint_reentrant": (lambda: Checkpointed(use_reentrant=True), {}),
}
HIDDEN: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "sync_norm": (SyncNorm, {}),
    "between_gradients": (BetweenGradients, {"strategy": DDPStrategy(**EACH_ITS_BUCKET)}),
    "before_gradients": (BeforeGradients, {}),
    "in_training_step": (InTrainingStep, {}),
    "in_before_backward": (InBeforeBackward, {}),
    "point_to_point": (PointToPoint, {}),
    "by_hand": (ByHand, {}),
    "accumulates_by_hand": (AccumulatesByHand, {}),
    "sharded": (Sharded, {"strategy": ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)}),
}
OTHERS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "adversarial": (Adversarial, {"strategy": UNUSED}),
    "closures": (Closures, {}),
    "thawing": (Thawing, {"strategy": UNUSED}),
    "taking_turns": (TakingTurns, {"accumulate_grad_batches": 2, "limit_train_batches": 4}),
    "skipping": (lambda: Skipping(manual=True), {}),
}


def fit(root: Path, name: str, with_monitor: bool = True) -> tuple[list[str], list[Tensor]]:
    """Returns the monitor's warnings on this rank, and the trained weights."""
    make, settings = copy.deepcopy((MEASURED | HIDDEN | OTHERS)[name])  # a strategy serves one trainer
    torch.manual_seed(0)
    runner = trainer(root / name, SyncMonitor(every_n_steps=3), devices=2, **{"strategy": "ddp"} | settings)
    if not with_monitor:
        runner.callbacks = [callback for callback in runner.callbacks if not isinstance(callback, SyncMonitor)]
    module = make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runner.fit(module, Loader(runner.global_rank, STEPS))
    weights = [param.detach().clone() for param in module.parameters()] if name in MEASURED else []
    return [str(w.message) for w in caught if "SyncMonitor" in str(w.message)], weights


def fit_all(root: Path) -> dict[str, Any]:
    warned, weights = {}, {}
    for name in MEASURED | HIDDEN | OTHERS:
        warned[name], weights[name] = fit(root, name)
        torch.compiler.reset()
    calls = len(hooked)
    without = {name: fit(root / "without", name, with_monitor=False)[1] for name in ("plain", "counting_hook")}
    return {"warned": warned, "weights": weights, "without": without, "calls": [calls, len(hooked) - calls]}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    root = tmp_path_factory.mktemp("paths")
    return root, run_ranks(fit_all, world_size=2, timeout=240, root=root)


def records(two_ranks: tuple[Path, Any], name: str) -> dict[str, np.ndarray]:
    return by_step(read_steps(two_ranks[0] / name / "sync" / "steps.csv"))


def check_times(table: dict[str, np.ndarray], steps: slice = slice(None)) -> None:
    compute, wait = table["compute_seconds"][steps], table["wait_seconds"][steps]
    assert (compute[:, 1] >= DELAY).all()
    assert np.median(compute[:, 0]) < DELAY / 2 < np.median(wait[:, 0])
    assert np.median(wait[:, 1]) < DELAY / 2


@pytest.mark.parametrize("name", MEASURED)
def test_compute_is_the_ranks_own(two_ranks, name):
    check_times(records(two_ranks, name))
    assert [result["warned"][name] for result in two_ranks[1]] == [[], []]


@pytest.mark.parametrize("name", HIDDEN)
def test_compute_is_absent_with_one_warning(two_ranks, name):
    table = records(two_ranks, name)
    assert table["tokens"].shape == (STEPS, 2)
    assert np.isnan(table["compute_seconds"]).any(axis=1).all()
    assert [len(result["warned"][name]) for result in two_ranks[1]] == [1, 0]


def test_time_before_the_forward_pass_is_not_compute(two_ranks):
    assert np.median(records(two_ranks, "before_forward")["compute_seconds"][:, 1]) < 3 * DELAY


def test_the_recomputed_forward_pass_counts(two_ranks):
    for name in ("checkpoint", "checkpoint_reentrant"):
        assert (records(two_ranks, name)["compute_seconds"][:, 1] >= 2 * DELAY).all()


@pytest.mark.parametrize(("name", "first"), [("adversarial", 0), ("closures", 1)])
def test_several_backward_passes_are_summed(two_ranks, name, first):
    table = records(two_ranks, name)
    check_times(table, slice(first, None))
    assert (table["compute_seconds"][first:, 1] >= 2 * DELAY).all()
    # after the very first backward pass DDP forms its buckets anew, unless it looks for unused parameters
    assert np.isnan(table["compute_seconds"][:first]).all()
    assert len(two_ranks[1][0]["warned"][name]) == first


def test_a_parameter_counts_from_the_step_on_in_which_it_thaws(two_ranks):
    table = records(two_ranks, "thawing")
    assert np.median(table["compute_seconds"][:2]) < DELAY
    check_times(table, slice(2, None))
    assert two_ranks[1][0]["warned"]["thawing"] == []


def test_idle_time_is_counted_per_reduction(two_ranks):
    compute = records(two_ranks, "taking_turns")["compute_seconds"]
    assert compute.shape == (2, 2) and (compute >= 2 * DELAY).all()
    assert efficiency.idle_fraction(compute) < 0.25  # of single micro-batches it would be 0.5


def test_a_skipped_batch_has_a_record_without_compute(two_ranks, tmp_path):
    with pytest.warns(UserWarning, match="a step without a backward pass"):
        trainer(tmp_path, SyncMonitor(), devices=1).fit(Skipping(manual=False), Loader(0, STEPS))
    for table in (records(two_ranks, "skipping"), by_step(read_steps(tmp_path / "sync" / "steps.csv"))):
        skipped = [[step % 2 == 1] * len(table["rank"]) for step in range(STEPS)]
        assert np.isnan(table["compute_seconds"]).tolist() == skipped
        assert not np.isnan(table["step_seconds"]).any()
    assert len(two_ranks[1][0]["warned"]["skipping"]) == 1


def test_training_is_not_changed(two_ranks):
    for result in two_ranks[1]:
        with_monitor, without = result["calls"]  # of the communication hook
        assert with_monitor == without > STEPS
        for name, weights in result["without"].items():
            assert weights and all(map(torch.equal, weights, result["weights"][name]))
