import numpy as np
import pytest
import torch
from ranks import run_ranks

from lightning_lengthpool import cost
from lightning_lengthpool.metrics import IdleFraction, PaddingFraction, RankSpread, UsefulFraction


def numbers(steps: int = 30, ranks: int = 4) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(7)
    padded = rng.lognormal(6, 1.5, (steps, ranks))
    return padded * rng.uniform(0.2, 1, (steps, ranks)), padded


def reference_spread(values: np.ndarray) -> dict[str, float]:
    kinds = {"mean": values.mean(1), "min": values.min(1), "max": values.max(1), "variance": values.var(1)}
    return {kind: per_step.mean() for kind, per_step in kinds.items()}


def test_equal_to_the_formulas_over_several_updates():
    tokens, padded = numbers()
    idle, padding, useful, spread = IdleFraction(), PaddingFraction(), UsefulFraction(), RankSpread()
    for part in np.array_split(np.arange(len(tokens)), 7):
        t, p = torch.from_numpy(tokens[part]), torch.from_numpy(padded[part])
        idle.update(p)
        padding.update(t, p)
        useful.update(t, p)
        spread.update(p)
    assert idle.compute().item() == pytest.approx(cost.idle_fraction(padded), rel=1e-12)
    assert padding.compute().item() == pytest.approx(cost.padding_fraction(tokens, padded), rel=1e-12)
    assert useful.compute().item() == pytest.approx(cost.useful_fraction(tokens, padded), rel=1e-12)
    result = {kind: value.item() for kind, value in spread.compute().items()}
    assert result == pytest.approx(reference_spread(padded), rel=1e-12)


def test_calling_a_metric_gives_the_rows_just_given_and_keeps_the_total():
    _, padded = numbers()
    metric = IdleFraction()
    for row in padded:
        assert metric(torch.from_numpy(row[None])).item() == pytest.approx(cost.idle_fraction(row[None]))
    assert metric.compute().item() == pytest.approx(cost.idle_fraction(padded))


def test_steps_with_a_missing_number_are_left_out():
    tokens, padded = numbers()
    holes_t, holes_p = tokens.copy(), padded.copy()
    holes_t[3, 1] = holes_p[5, 0] = holes_p[5, 2] = np.nan
    left = np.delete(np.arange(len(tokens)), [3, 5])
    idle, padding, useful, spread = IdleFraction(), PaddingFraction(), UsefulFraction(), RankSpread()
    t, p = torch.from_numpy(holes_t), torch.from_numpy(holes_p)
    idle.update(p)
    spread.update(p)
    padding.update(t, p)
    useful.update(t, p)
    assert idle.compute().item() == pytest.approx(cost.idle_fraction(np.delete(padded, 5, axis=0)))
    assert spread.compute()["max"].item() == pytest.approx(np.delete(padded, 5, axis=0).max(1).mean())
    assert padding.compute().item() == pytest.approx(cost.padding_fraction(tokens[left], padded[left]))
    assert useful.compute().item() == pytest.approx(cost.useful_fraction(tokens[left], padded[left]))


@pytest.mark.parametrize("rows", [torch.full((1, 2), torch.nan), torch.zeros(1, 2), torch.zeros(0, 2)])
def test_a_figure_of_nothing_is_nan(rows):
    assert IdleFraction()(rows).isnan()
    assert PaddingFraction()(rows, rows).isnan()
    assert UsefulFraction()(rows, rows).isnan()


def test_sums_are_exact_beyond_float32():
    metric = PaddingFraction()
    for _ in range(10):
        metric.update(torch.tensor([[2.0**30 + 1]], dtype=torch.float64), torch.tensor([[2.0**30 + 2]]).double())
    assert metric.tokens.item() == 10 * (2**30 + 1)


def test_wrong_arguments():
    with pytest.raises(ValueError, match=r"\[steps, ranks\], got {'costs': \[3\]}"):
        IdleFraction().update(torch.ones(3))
    with pytest.raises(ValueError, match="same shape"):
        UsefulFraction().update(torch.ones(1, 2), torch.ones(2, 2))
    with pytest.raises(ValueError, match="padded must be finite and not negative"):
        PaddingFraction().update(torch.ones(1, 2), -torch.ones(1, 2))


def synced() -> dict[str, float]:
    """On two ranks: each metric fed with half of the steps, and one fed with all of them on both."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    tokens, padded = (torch.from_numpy(table) for table in numbers())
    halves, same = UsefulFraction(), IdleFraction()
    halves.update(tokens[rank::2], padded[rank::2])
    same.update(padded)
    result = {"halves": halves.compute().item(), "same": same.compute().item()}
    torch.distributed.destroy_process_group()
    return result


def test_synchronisation_by_torchmetrics():
    tokens, padded = numbers()
    expected = {"halves": cost.useful_fraction(tokens, padded), "same": cost.idle_fraction(padded)}
    for result in run_ranks(synced, world_size=2, timeout=60):
        assert result == pytest.approx(expected, rel=1e-12)
