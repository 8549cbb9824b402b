"""The metrics against the formulas of `efficiency.py`: in one process, over real ranks, and in Lightning."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from helpers.ranks import run_ranks
from lightning_lengthpool.metrics import IdleFraction, PaddingFraction, RankSpread, UsefulFraction
from lightning_lengthpool.ordering import efficiency

ALL = (IdleFraction, PaddingFraction, UsefulFraction, RankSpread)


def numbers(steps: int = 30, ranks: int = 4) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(7)
    padded = rng.lognormal(6, 1.5, (steps, ranks))
    return padded * rng.uniform(0.2, 1, (steps, ranks)), padded


def reference_spread(values: np.ndarray) -> dict[str, float]:
    if not len(values):
        return dict.fromkeys(("mean", "min", "max", "variance"), np.nan)
    kinds = {"mean": values.mean(1), "min": values.min(1), "max": values.max(1), "variance": values.var(1)}
    return {kind: per_step.mean() for kind, per_step in kinds.items()}


def reference(tokens: np.ndarray, padded: np.ndarray) -> dict[str, Any]:
    """What each metric must give for these tables of steps and ranks."""
    return {
        "IdleFraction": efficiency.idle_fraction(padded),
        "PaddingFraction": efficiency.padding_fraction(tokens, padded),
        "UsefulFraction": efficiency.useful_fraction(tokens, padded),
        **reference_spread(padded),
    }


def fresh(**kwargs: Any) -> dict[str, Metric]:
    return {kind.__name__: kind(**kwargs) for kind in ALL}


def update(metrics: dict[str, Metric], tokens: Any, padded: Any) -> None:
    for metric in metrics.values():
        args = (padded,) if isinstance(metric, IdleFraction | RankSpread) else (tokens, padded)
        metric.update(*args)


def computed(metrics: dict[str, Metric]) -> dict[str, float]:
    results: dict[str, Tensor] = {}
    for name, metric in metrics.items():
        value = metric.compute()
        results |= value if isinstance(value, dict) else {name: value}
    assert all(value.dtype == torch.float64 and value.ndim == 0 for value in results.values())
    return {name: value.item() for name, value in results.items()}


def close(expected: dict[str, float]) -> Any:
    return pytest.approx(expected, rel=1e-12, nan_ok=True)


def test_gathered_numbers_over_several_updates():
    tokens, padded = numbers()
    metrics = fresh(sync_on_compute=False)
    for part in np.array_split(np.arange(len(tokens)), 7):
        update(metrics, torch.from_numpy(tokens[part]), torch.from_numpy(padded[part]))
    assert computed(metrics) == close(reference(tokens, padded))


@pytest.mark.parametrize("kind", [float, np.float64, np.asarray, list, torch.from_numpy])
def test_numbers_of_one_rank_may_come_one_by_one_or_together(kind: Callable[..., Any]):
    tokens, padded = numbers(6, 1)
    metrics = fresh()
    if kind in (float, np.float64):
        for t, p in zip(tokens[:, 0], padded[:, 0], strict=True):
            update(metrics, kind(t), kind(p))
    else:
        update(metrics, kind(tokens[:2, 0]), kind(padded[:2, 0]))
        update(metrics, kind(tokens[2:, 0]), kind(padded[2:, 0]))
    assert computed(metrics) == close(reference(tokens, padded))


def test_calling_a_metric_gives_the_rows_just_given_and_keeps_the_total():
    tokens, padded = numbers()
    idle, padding, spread = IdleFraction(), PaddingFraction(), RankSpread()
    for t, p in zip(tokens[:, None], padded[:, None], strict=True):
        assert idle(torch.from_numpy(p)).item() == pytest.approx(efficiency.idle_fraction(p))
        assert padding(torch.from_numpy(t), torch.from_numpy(p)).item() == pytest.approx(
            efficiency.padding_fraction(t, p)
        )
        assert spread(torch.from_numpy(p))["max"].item() == p.max()
    expected = reference(tokens, padded)
    assert idle.compute().item() == pytest.approx(expected["IdleFraction"], rel=1e-12)
    assert padding.compute().item() == pytest.approx(expected["PaddingFraction"], rel=1e-12)
    assert spread.compute()["variance"].item() == pytest.approx(expected["variance"], rel=1e-12)


def test_steps_with_a_missing_number_are_left_out():
    tokens, padded = numbers()
    holes_t, holes_p = tokens.copy(), padded.copy()
    holes_t[3, 1] = holes_p[5, 0] = holes_p[5, 2] = np.nan
    metrics = fresh()
    update(metrics, torch.from_numpy(holes_t), torch.from_numpy(holes_p))
    without_5 = np.delete(padded, 5, axis=0)
    left = np.delete(np.arange(len(tokens)), [3, 5])
    pairs = ~np.isnan(holes_t + holes_p)  # a ratio of sums: only the number itself goes
    assert computed(metrics) == close(
        {
            "IdleFraction": efficiency.idle_fraction(without_5),
            "PaddingFraction": efficiency.padding_fraction(tokens[pairs], padded[pairs]),
            "UsefulFraction": efficiency.useful_fraction(tokens[left], padded[left]),
            **reference_spread(without_5),
        }
    )


@pytest.mark.parametrize("rows", [torch.full((1, 2), torch.nan), torch.zeros(0, 2), [], torch.nan])
def test_a_figure_of_nothing_is_nan(rows: Any):
    metrics = fresh()
    update(metrics, rows, rows)
    assert np.isnan(list(computed(metrics).values())).all()


def test_costs_of_zero_have_no_fraction():
    assert IdleFraction()(torch.zeros(1, 2)).isnan()
    assert PaddingFraction()(0, 0).isnan()
    assert UsefulFraction()(0, 0).isnan()


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_reset_forgets_everything():
    tokens, padded = numbers()
    metrics = fresh()
    update(metrics, torch.from_numpy(padded), torch.from_numpy(padded))
    for metric in metrics.values():
        metric.reset()
    assert np.isnan(list(computed(metrics).values())).all()
    update(metrics, torch.from_numpy(tokens[:, :2]), torch.from_numpy(padded[:, :2]))
    assert computed(metrics) == close(reference(tokens[:, :2], padded[:, :2]))


@pytest.mark.parametrize("copied", [lambda m: pickle.loads(pickle.dumps(m)), copy.deepcopy, lambda m: m.clone()])
def test_a_copy_goes_on_by_itself(copied: Callable[[Any], Any]):
    tokens, padded = numbers()
    metrics = fresh()
    update(metrics, torch.from_numpy(tokens[:20]), torch.from_numpy(padded[:20]))
    copies = (
        copied(torch.nn.ModuleDict(metrics)) if copied is copy.deepcopy else {k: copied(m) for k, m in metrics.items()}
    )
    update(dict(copies.items()), torch.from_numpy(tokens[20:]), torch.from_numpy(padded[20:]))
    assert computed(dict(copies.items())) == close(reference(tokens, padded))
    assert computed(metrics) == close(reference(tokens[:20], padded[:20]))


def test_two_metrics_are_merged_as_later_steps():
    tokens, padded = numbers()
    metrics, later = fresh(), fresh()
    update(metrics, torch.from_numpy(tokens[:20]), torch.from_numpy(padded[:20]))
    update(later, torch.from_numpy(tokens[20:]), torch.from_numpy(padded[20:]))
    for name, metric in metrics.items():
        metric.merge_state(later[name])
    assert computed(metrics) == close(reference(tokens, padded))


@pytest.mark.parametrize(
    "turn",
    [lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.to("cpu", torch.float16), lambda m: m.float()],
)
def test_a_module_in_half_precision_keeps_its_metrics_in_float64(turn: Callable[[Any], Any]):
    tokens, padded = numbers()
    module = torch.nn.ModuleDict(fresh())
    update(dict(module.items()), torch.from_numpy(tokens[:20]), torch.from_numpy(padded[:20]))
    turn(module)
    update(dict(module.items()), torch.from_numpy(tokens[20:]), torch.from_numpy(padded[20:]))
    assert computed(dict(module.items())) == close(reference(tokens, padded))
    module["PaddingFraction"].reset()
    assert module["PaddingFraction"].sums.dtype == torch.float64


def test_metrics_move_with_their_module():
    module = torch.nn.ModuleDict(fresh())
    update(dict(module.items()), 1.0, 2.0)
    module.to("meta")  # the one other device that every machine has
    assert module["IdleFraction"].costs[0].is_meta and module["PaddingFraction"].sums.is_meta
    assert all(metric.device.type == "meta" for metric in module.values())


def test_sums_are_exact_beyond_float32():
    metric = PaddingFraction()
    for _ in range(10):
        metric.update(2.0**30 + 1, 2**30 + 2)
    assert metric.sums.tolist() == [10 * (2**30 + 1), 10 * (2**30 + 2)]
    spread = RankSpread()
    spread.update([2.0**30 + 1])
    assert spread.compute()["mean"].item() == 2**30 + 1


def test_no_graph_is_kept():
    losses = torch.ones(3, requires_grad=True) * 2
    idle = IdleFraction()
    assert not idle(losses).requires_grad and not idle.costs[0].requires_grad


def test_wrong_arguments():
    shapes = r"one shape throughout, \[steps\] or \[steps, ranks\]; got "
    with pytest.raises(ValueError, match=shapes + r"{'costs': \[3, 1, 1\]}"):
        IdleFraction().update(torch.ones(3, 1, 1))
    with pytest.raises(ValueError, match=shapes):
        RankSpread().update(torch.ones(3, 0))
    with pytest.raises(ValueError, match=shapes + r"{'tokens': \[2\], 'padded': \[2, 1\]}"):
        UsefulFraction().update(torch.ones(2), torch.ones(2, 1))
    with pytest.raises(ValueError, match="padded must be finite and not negative"):
        PaddingFraction().update(torch.ones(1, 2), -torch.ones(1, 2))
    with pytest.raises(ValueError, match="costs must be finite"):
        IdleFraction().update(torch.inf)
    mixed = IdleFraction()
    mixed.update(torch.ones(1, 2))
    mixed.update(1.0)
    with pytest.raises(ValueError, match=r"one number of ranks, got \[2, 1\]"):
        mixed.compute()


def test_a_collection_keeps_metrics_apart_whose_first_numbers_agree():
    collection = MetricCollection({"idle": IdleFraction(), "tokens": RankSpread(), "useful": UsefulFraction()})
    for tokens, padded in (([[1.0, 3.0]], [[1.0, 3.0]]), ([[1.0, 1.0]], [[2.0, 2.0]])):
        t, p = torch.tensor(tokens), torch.tensor(padded)
        collection.update(costs=p, values=t, tokens=t, padded=p)
    result = {name: value.item() for name, value in collection.compute().items()}
    assert result["idle"] == pytest.approx(1 - 4 / 5)
    assert result["useful"] == pytest.approx(6 / 10)
    assert result["mean"] == 1.5 and result["max"] == 2


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_logged_as_objects_in_lightning(precision: str):
    import lightning.pytorch as lightning  # here, for the ranks below import this file and need no Lightning

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.idle, self.spread = IdleFraction(), RankSpread()
            self.pair = MetricCollection({"padding": PaddingFraction(), "useful": UsefulFraction()})

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            costs = torch.tensor([[1.0, 3.0 + self.current_epoch]])
            self.idle(costs)
            self.log("idle", self.idle, on_step=True, on_epoch=True)
            self.pair.update(tokens=costs, padded=costs + batch_idx)
            self.log_dict(self.pair, on_step=False, on_epoch=True)
            self.spread.update(costs)
            return self.layer(batch).sum()

        def on_train_epoch_end(self) -> None:
            self.log_dict({f"tokens_{name}": value for name, value in self.spread.compute().items()})
            self.spread.reset()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    model = Model()
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=2, precision=precision, **off)
    trainer.fit(model, torch.utils.data.DataLoader(torch.ones(2, 1)))
    costs = np.array([[1.0, 4.0], [1.0, 4.0]])  # of the second epoch alone
    padded = costs + np.array([[0.0], [1.0]])
    assert {name: float(value) for name, value in trainer.callback_metrics.items()} == pytest.approx(
        {
            "idle": efficiency.idle_fraction(costs),
            "idle_step": efficiency.idle_fraction(costs[:1]),
            "idle_epoch": efficiency.idle_fraction(costs),
            "padding": efficiency.padding_fraction(costs, padded),
            "useful": efficiency.useful_fraction(costs, padded),
            **{f"tokens_{name}": value for name, value in reference_spread(costs).items()},
        }
    )
    assert model.idle.costs == [] and model.pair["useful"].tokens_and_padded == []


COUNTS = {"equal": (20, 20, 20), "unequal": (30, 20, 25), "none_on_one": (30, 0, 12), "none": (0, 0, 0)}


def collectives() -> int:
    groups = torch.distributed.distributed_c10d._world.pg_map
    return sum(group._get_sequence_number_for_group() for group in groups)


def on_three_ranks() -> dict[str, Any]:
    """Each rank feeds only its own numbers; returns the figures and how many collectives they took."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    tokens, padded = (table[:, rank] for table in numbers(ranks=3))
    results: dict[str, Any] = {}
    for case, counts in COUNTS.items():
        metrics, before = fresh(), collectives()
        for t, p in zip(tokens[: counts[rank] // 2], padded[: counts[rank] // 2], strict=True):
            update(metrics, t, p)
        if counts[rank]:
            rest = slice(counts[rank] // 2, counts[rank])
            update(metrics, tokens[rest], padded[rest])
        results[f"{case}_updates"] = collectives() - before
        results[case] = computed(metrics)
        results[f"{case}_computes"] = collectives() - before
        results[f"{case}_unsynced"] = sum(table.shape[1] for table in metrics["IdleFraction"].costs)

    # the window goes on, and only the last rank has a new step
    if rank == 2:
        update(metrics, tokens[0], padded[0])
    results["one_more"] = computed(metrics)

    # called instead of updated, with a number missing on one rank, and in one collection
    holes = np.where((np.arange(30) == 4) & (rank == 1), np.nan, padded)
    metrics = fresh()
    collection = MetricCollection(metrics)
    for t, p in zip(tokens, holes, strict=True):
        collection(costs=p, values=p, tokens=t, padded=p)
    results["hole"] = {name: value.item() for name, value in collection.compute().items()}

    every_step = IdleFraction(dist_sync_on_step=True)
    results["on_step"] = [every_step(p).item() for p in padded[:3]]
    results["on_step_total"] = every_step.compute().item()

    # all ranks have the numbers of all
    same, alone = fresh(), fresh(sync_on_compute=False)
    for metrics in (same, alone):
        update(metrics, *map(torch.from_numpy, numbers(ranks=3)))
    results["same"] = computed(same)
    before = collectives()
    results["alone"] = computed(alone)
    results["alone_computes"] = collectives() - before
    torch.distributed.destroy_process_group()
    return results


def test_over_ranks():
    tokens, padded = numbers(ranks=3)
    all_ranks = run_ranks(on_three_ranks, world_size=3, timeout=60)
    for rank, results in enumerate(all_ranks):
        for case, counts in COUNTS.items():
            has = np.arange(max(counts))[:, None] < np.array(counts)
            t, p = np.where(has, tokens[: max(counts)], 0), np.where(has, padded[: max(counts)], 0)
            expected = reference(t, p) | reference_spread(padded[: min(counts)])
            assert results[case] == close(expected), case
            assert results[f"{case}_updates"] == 0
            assert results[f"{case}_computes"] <= 3 * len(ALL)  # a barrier, the shapes, the numbers
            assert results[f"{case}_unsynced"] == counts[rank]
        step = np.array([[0, 0, 1]])
        one_more = reference(tokens[:1] * step, padded[:1] * step) | reference_spread(padded[:0])
        assert results["one_more"] == close(one_more)

        complete = np.arange(30) != 4
        pairs = complete[:, None] | (np.arange(3) != 1)
        hole = reference(tokens[complete], padded[complete])
        hole["PaddingFraction"] = efficiency.padding_fraction(tokens[pairs], padded[pairs])
        assert results["hole"] == close(hole)
        assert results["on_step"] == pytest.approx([efficiency.idle_fraction(row[None]) for row in padded[:3]])
        assert results["on_step_total"] == pytest.approx(efficiency.idle_fraction(padded[:3]))
        assert results["same"] == close(reference(tokens, padded))
        assert results["alone"] == close(reference(tokens, padded))
        assert results["alone_computes"] == 0
