"""The gradient that ranks with different numbers of samples and tokens have together, against that of one process."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from helpers.ranks import run_ranks
from lightning_lengthpool.loss import token_share

# lengths of the samples of each rank's first and second micro-batch
SIZES = [[[3, 4], [3]], [[], [12]], [[10, 20, 1], [5]]]
EXPECTED = 25.0
CLASSES = 5


def make_samples(rank: int, micro_batch: int) -> list[tuple[Tensor, Tensor]]:
    """Inputs `[tokens, 4]` and labels `[tokens]` of each sample."""
    generator = torch.Generator().manual_seed(10 * rank + micro_batch)
    return [
        (
            torch.randn(size, 4, generator=generator, dtype=torch.float64),
            torch.randint(CLASSES, (size,), generator=generator),
        )
        for size in SIZES[rank][micro_batch]
    ]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    wide = {"dtype": torch.float64}
    return nn.Sequential(nn.Linear(4, 8, **wide), nn.Tanh(), nn.Linear(8, CLASSES, **wide))


def sum_loss(model: nn.Module, samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The loss summed over tokens, and their number."""
    inputs = torch.cat([torch.zeros(0, 4, dtype=torch.float64), *(x for x, _ in samples)])
    labels = torch.cat([torch.zeros(0, dtype=torch.int64), *(y for _, y in samples)])
    return F.cross_entropy(model(inputs), labels, reduction="sum"), torch.tensor(len(labels))


def gradient(model: nn.Module) -> np.ndarray:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).numpy()


def train_step(micro_batches: list[int], group: Any, share: dict[str, Any] | None) -> tuple[np.ndarray, list[float]]:
    """One step of this rank as Lightning makes it; returns the gradient and the shares. `share=None`: without them."""
    model = DistributedDataParallel(make_model(), process_group=group)
    shares = []
    for index in micro_batches:
        samples = make_samples(dist.get_rank(), index)
        count = torch.tensor(sum(len(labels) for _, labels in samples))
        weight = torch.ones(()) if share is None else token_share(count, group=group, **share)
        shares.append(weight.item())
        model.require_backward_grad_sync = index == micro_batches[-1]
        total, count = sum_loss(model, samples)
        (weight * total / count.clamp(min=1) / len(micro_batches)).backward()
    return gradient(model.module), shares


def train_all() -> dict[str, Any]:
    """Runs on each of three ranks; "two" on the first and the last of them."""
    dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)  # that of shares
    pair = dist.new_group([0, 2])
    results = {
        "three": train_step([0], None, {}),
        "without": train_step([0], None, None),
        "accumulated": train_step([0, 1], None, {}),
        "expected": train_step([0, 1], None, {"expected": EXPECTED}),
        "nobody": token_share(torch.tensor(0)).item(),
    }
    if dist.get_rank() != 1:
        results["two"] = train_step([0], pair, {})
    dist.destroy_process_group()
    return results


@pytest.fixture(scope="module")
def trained() -> list[dict[str, Any]]:
    return run_ranks(train_all, 3)


def union_gradient(ranks: list[int], micro_batches: list[int]) -> tuple[np.ndarray, int]:
    """The gradient of the mean over all tokens of these, in one process, and their number."""
    model = make_model()
    samples = [sample for rank in ranks for index in micro_batches for sample in make_samples(rank, index)]
    total, count = sum_loss(model, samples)
    (total / count).backward()
    return gradient(model), int(count)


@pytest.mark.parametrize(("name", "ranks"), [("three", [0, 1, 2]), ("two", [0, 2])])
def test_ranks_have_the_gradient_of_one_process_on_the_union(trained, name: str, ranks: list[int]) -> None:
    expected, count = union_gradient(ranks, [0])
    for rank in ranks:
        found, shares = trained[rank][name]
        np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-14)
        assert shares == [pytest.approx(len(ranks) * sum(SIZES[rank][0]) / count, rel=1e-14)]


def test_without_the_share_they_do_not(trained) -> None:
    expected, _ = union_gradient([0, 1, 2], [0])
    assert np.abs(trained[0]["without"][0] - expected).max() > 0.1 * np.abs(expected).max()


def test_accumulated_micro_batches_are_averaged_as_they_are(trained) -> None:
    own = [union_gradient([0, 1, 2], [index])[0] for index in (0, 1)]
    np.testing.assert_allclose(trained[1]["accumulated"][0], (own[0] + own[1]) / 2, rtol=1e-10, atol=1e-14)


def test_with_an_expected_number_every_token_of_a_step_counts_the_same(trained) -> None:
    union, count = union_gradient([0, 1, 2], [0, 1])
    for result in trained:
        np.testing.assert_allclose(result["expected"][0], union * count / (2 * EXPECTED), rtol=1e-10, atol=1e-14)
    assert trained[2]["expected"][1] == pytest.approx([3 * 31 / EXPECTED, 3 * 5 / EXPECTED])


def test_where_nobody_has_tokens_the_share_is_zero(trained) -> None:
    assert [result["nobody"] for result in trained] == [0, 0, 0]


# ---- one process


@pytest.mark.parametrize("tokens", [torch.tensor(7), torch.tensor(7.0, requires_grad=True), torch.tensor([7])])
def test_one_rank_has_all_tokens(tokens: Tensor) -> None:
    share = token_share(tokens)
    assert share == 1 and share.dtype == torch.float32 and share.shape == tokens.shape and not share.requires_grad
    assert token_share(torch.zeros_like(tokens)) == 0
    assert token_share(tokens, expected=14) == 0.5


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(TypeError, match=r"tokens is 7, .*torch\.tensor\(tokens, device=self\.device\)"):
        token_share(7)
    with pytest.raises(ValueError, match="expected is 0, expected a positive number"):
        token_share(torch.tensor(7), expected=0)


def test_it_stays_on_the_device() -> None:
    """On "meta", which has no values, anything that looks at one fails, as it would wait for a GPU."""
    for expected in (None, 14):
        assert token_share(torch.tensor(7, device="meta"), expected=expected).device.type == "meta"


# ---- with the monitor


DELAY = 0.06
STEPS = 6


def fit_with_the_monitor(root: Path) -> list[float]:
    """Runs on each of two ranks, of which rank 1 is slow; returns its shares."""
    from helpers.monitored import Loader, Model, trainer
    from lightning_lengthpool.monitor.callback import SyncMonitor

    shares = []

    class Weighted(Model):
        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
            self.share = token_share(torch.tensor(10 * (self.global_rank + 1)))
            shares.append(self.share.item())

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.share * super().training_step(batch, batch_idx)

    runner = trainer(root, SyncMonitor(every_n_steps=4), devices=2, strategy="ddp", limit_val_batches=0)
    runner.fit(Weighted(slow="forward"), Loader(runner.global_rank, STEPS))
    return shares


def test_the_monitor_still_sees_each_rank_s_own_compute(tmp_path: Path) -> None:
    from lightning_lengthpool.runs.steps.records import by_step
    from lightning_lengthpool.runs.steps.steps_file import read_steps

    shares = run_ranks(fit_with_the_monitor, 2, root=tmp_path)
    assert shares == [[pytest.approx(2 / 3)] * STEPS, [pytest.approx(4 / 3)] * STEPS]
    compute = by_step(read_steps(tmp_path / "sync" / "steps.csv"))["compute_seconds"]
    assert compute.shape == (STEPS, 2) and np.isfinite(compute).all()
    fast, slow = np.median(compute, axis=0)
    assert fast < DELAY / 2 and DELAY <= slow < 2.5 * DELAY
