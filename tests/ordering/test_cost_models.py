import copy
import math
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser

from lightning_lengthpool.cost_models import (
    CostModel,
    FittedCost,
    PackedCost,
    QuadraticCost,
    TokenCost,
    VisionCost,
)
from lightning_lengthpool.ordering.cost_model import sample_cost
from lightning_lengthpool.runs.steps.columns import COLUMNS
from lightning_lengthpool.runs.steps.steps_file import StepsFile

A, B, K = 0.02, 1e-5, 3000.0  # seconds of a micro-batch: A + B * padded * (1 + longest / K)


def write_steps(folder: Path, *, lengths: np.ndarray, a: float = A, b: float = B, noise: float = 0.02) -> Path:
    """Write `sync/steps.csv` of a run on `lengths`, `[steps, ranks]`; the last rank is twice as slow."""
    rng = np.random.default_rng(1)
    steps, ranks = lengths.shape
    samples = 1 + (np.arange(lengths.size) % 2).reshape(lengths.shape)
    slow = np.where(np.arange(ranks) == ranks - 1, 2.0, 1.0)
    seconds = slow * (a + b * samples * lengths * (1 + lengths / K)) * (1 + noise * rng.standard_normal(lengths.shape))
    columns = dict.fromkeys(COLUMNS, np.zeros(lengths.size)) | {
        "step": np.repeat(np.arange(steps), ranks),
        "rank": np.tile(np.arange(ranks), steps),
        "samples": samples.ravel(),
        "tokens": (samples * lengths).ravel(),
        "longest": lengths.ravel(),
        "padded_tokens": (samples * lengths).ravel(),
        "compute_seconds": seconds.ravel(),
        "step_seconds": seconds.ravel(),
    }
    file = StepsFile(folder / "sync" / "steps.csv")
    file.start(0)
    file.append({name: np.asarray(column, dtype=float) for name, column in columns.items()})
    return folder


def drawn_lengths(steps: int = 400, ranks: int = 4) -> np.ndarray:
    return np.random.default_rng(0).lognormal(6.5, 0.9, (steps, ranks)).round()


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_steps(tmp_path_factory.mktemp("run"), lengths=drawn_lengths())


def transformer_flops(h: int, s: int) -> tuple[int, int]:
    """Forward FLOPs of one layer on one sequence, a multiplication and an addition each: its weights, attention."""
    shapes = [(h, h)] * 4 + [(h, 4 * h), (4 * h, h)]
    return sum(2 * s * rows * columns for rows, columns in shapes), 2 * (2 * s * s * h)


# ---- values


@pytest.mark.parametrize("hidden_size", [64, 4096])
def test_k_is_where_attention_costs_as_much_as_all_else(hidden_size: int) -> None:
    model = QuadraticCost(hidden_size=hidden_size)
    weights, attention = transformer_flops(hidden_size, 6 * hidden_size)
    assert weights == attention
    for length in (100, 10_000):
        weights, attention = transformer_flops(hidden_size, length)
        assert model.of_length(length) / length == pytest.approx((weights + attention) / weights)
    assert QuadraticCost(hidden_size=hidden_size, causal=True) == QuadraticCost(k=12 * hidden_size)


def test_k_of_llama_3_8b_as_documented() -> None:
    parameters = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    assert parameters / (2 * 32 * 128) == 26624


def test_a_pack_of_one_costs_as_much_as_the_sample_and_a_split_one_less() -> None:
    packed, whole = PackedCost(hidden_size=100), QuadraticCost(hidden_size=100)
    assert packed.cost({"cu_lengths": [0, 900]}, 900) == whole.of_length(900)
    assert packed.cost({"cu_lengths": [0, 300, 300, 900]}, 900) == 900 + (300**2 + 600**2) / 600


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor, lambda values: torch.tensor(values).int()])
def test_numbers_come_in_any_form(kind) -> None:
    sample = SimpleNamespace(cu=kind([0, 10, 40]), patches=kind([100, 50]))
    assert PackedCost(k=100, field="cu").cost(sample, 40) == 40 + 10
    assert VisionCost(0.5, field="patches", encoder_k=1000).cost(sample, 40) == 40 + 0.5 * (150 + 12.5)


def test_vision_patches_are_weighted_apart() -> None:
    plain = VisionCost(encoder_weight=0.1)
    assert plain.cost({"num_patches": 500}, 200) == plain.cost({"num_patches": [300, 200]}, 200) == 250
    assert plain.cost({"num_patches": []}, 200) == plain.cost({"num_patches": 0}, 200) == 200
    packed = VisionCost(0.1, language=PackedCost(k=100))
    assert packed.cost({"num_patches": torch.tensor(500), "cu_lengths": [0, 100, 200]}, 200) == 400 + 50


def test_a_batch_costs_by_padding_or_by_its_sum() -> None:
    assert TokenCost().of_batch([3, 5, 4]) == 15
    assert PackedCost(k=1).of_batch([3, 5, 4]) == 12
    assert [VisionCost(1, language=inner).is_padded for inner in (None, PackedCost(k=1))] == [True, False]
    assert TokenCost().of_batch([]) == 0


# ---- identity


def models(folder: Path) -> list[CostModel]:
    return [
        TokenCost(),
        QuadraticCost(hidden_size=64),
        QuadraticCost(hidden_size=64, causal=True),
        PackedCost(k=384),
        PackedCost(k=384, field="cu"),
        VisionCost(0.1),
        VisionCost(0.1, encoder_k=1000),
        VisionCost(0.1, language=QuadraticCost(k=384)),
        FittedCost(folder),
    ]


def test_models_are_values(run_folder: Path) -> None:
    one, other = models(run_folder), models(run_folder)
    assert one == other == [pickle.loads(pickle.dumps(model)) for model in one] == copy.deepcopy(one)
    assert len(set(one + other)) == len({model.fingerprint() for model in one + other}) == len(one)
    assert TokenCost() != "TokenCost()"


def test_the_representation_shows_the_settings() -> None:
    model = VisionCost(1, language=QuadraticCost(hidden_size=100))
    shown = "VisionCost(encoder_weight=1.0, language=QuadraticCost(k=600.0), field='num_patches', encoder_k=inf)"
    assert repr(model) == shown
    assert model.fingerprint() == f"lightning_lengthpool.cost_models.{shown}"


def test_yaml_names_them_by_class_path() -> None:
    parser = ArgumentParser()
    parser.add_argument("--cost_model", type=CostModel | None)
    parser.add_argument("--config", action="config")
    module = "lightning_lengthpool.cost_models"
    config = f"""\
cost_model:
  class_path: {module}.VisionCost
  init_args:
    encoder_weight: 0.04
    language:
      class_path: {module}.PackedCost
      init_args: {{hidden_size: 4096, causal: true}}
"""
    made = parser.instantiate_classes(parser.parse_args(["--config", config])).cost_model
    assert made == VisionCost(0.04, language=PackedCost(k=12 * 4096))


def test_it_needs_numpy_only(run_folder: Path) -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'lightning', 'megatron', 'rich', 'matplotlib'): sys.modules[name] = None\n"
        "from lightning_lengthpool.cost_models import FittedCost\n"
        f"print(FittedCost({str(run_folder)!r}).fingerprint())"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    assert done.stdout.strip() == FittedCost(run_folder).fingerprint()


# ---- fitted


def test_a_fit_finds_what_was_planted(run_folder: Path) -> None:
    model = FittedCost(run_folder)
    assert model.k == pytest.approx(K, rel=0.05)
    assert model.per_batch == pytest.approx(A / B, rel=0.05)
    assert model.is_padded
    for length in (100.0, 2000.0):
        seconds = [A + B * count * length * (1 + length / K) for count in (1, 3)]
        cost = [model.of_batch([model.of_length(length)] * count) for count in (1, 3)]
        assert cost[1] / cost[0] == pytest.approx(seconds[1] / seconds[0], rel=0.03)


def test_a_fit_depends_on_the_file_and_not_on_where_it_lies(run_folder: Path, tmp_path: Path) -> None:
    moved = tmp_path / "steps.csv"
    moved.write_bytes((run_folder / "sync" / "steps.csv").read_bytes())
    assert FittedCost(moved) == FittedCost(str(run_folder))
    assert FittedCost(write_steps(tmp_path / "other", lengths=drawn_lengths(), a=2 * A)) != FittedCost(moved)


def test_a_fit_without_attention_or_overhead_is_the_token_cost(tmp_path: Path) -> None:
    lengths = drawn_lengths() / 1000  # far below K
    model = FittedCost(write_steps(tmp_path, lengths=lengths, a=0.0, b=1.0, noise=0.001))
    assert model.k == math.inf and model.per_batch < 0.01
    assert model.of_length(7) == 7


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"b": math.nan}, "no compute seconds were measured.*SyncMonitor"),
        ({"lengths": drawn_lengths(4)}, "has 16 measured micro-batches, expected at least 20"),
        ({"lengths": drawn_lengths(1, 32)}, "one step only"),
        ({"lengths": np.full((50, 4), 700.0)}, "hardly grows with its tokens.*policy 'none'"),
        ({"b": 0.0}, "hardly grows with its tokens"),
    ],
)
def test_what_cannot_be_fitted_is_named(tmp_path: Path, settings: dict, message: str) -> None:
    folder = write_steps(tmp_path, **{"lengths": drawn_lengths()} | settings)
    with pytest.raises(ValueError, match=rf"FittedCost: .*steps\.csv.*{message}"):
        FittedCost(folder)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no steps\.csv in"):
        FittedCost(tmp_path)


# ---- errors


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ([], r"\[\]"),
        ([5, 10], r"\[5.0, 10.0\]"),
        ([0, 7, 6, 10], r"\[0.0, 7.0, 6.0, 10.0\]"),
        ([0, math.nan, 10], r"\[0.0, nan, 10.0\]"),
        (list(range(0, 100, 2)), r"\[0.0, 2.0, .*\.\.\.\] \(up to 98\)"),
    ],
)
def test_malformed_cumulative_lengths_are_named(value: list, shown: str) -> None:
    with pytest.raises(ValueError, match=rf"sample 'a/1' has cu_lengths = {shown}.*end with its length, 10"):
        PackedCost(k=100).cost({"__key__": "a/1", "cu_lengths": value}, 10)


@pytest.mark.parametrize("model", [PackedCost(k=100, field="parts"), VisionCost(1, field="parts")])
def test_a_field_that_is_missing_or_no_number_is_named(model: CostModel) -> None:
    with pytest.raises(ValueError, match=r"sample 'a/1' \(dict\) has no 'parts', only '__key__', 'tokens'\. "):
        model.cost({"__key__": "a/1", "tokens": [1]}, 1)
    for wrong in ("many", [0, "x"], [[0], [1, 2]]):
        with pytest.raises(ValueError, match=r"sample 'a/1' has parts = .*expected a number or numbers"):
            model.cost({"__key__": "a/1", "parts": wrong}, 1)
    with pytest.raises(ValueError, match=r"parts='?.*lengths alone do not tell|'parts'\): lengths alone do not tell"):
        model.of_length(1)


@pytest.mark.parametrize("value", [-1, [3, math.nan], math.inf])
def test_a_number_of_patches_that_is_none_is_named(value) -> None:
    with pytest.raises(ValueError, match=r"sample 'a/1' has num_patches = \[.*\], expected finite numbers"):
        VisionCost(1).cost({"__key__": "a/1", "num_patches": value}, 1)


@pytest.mark.parametrize("kind", [QuadraticCost, PackedCost])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "takes either hidden_size or k, got hidden_size=None and k=None"),
        ({"hidden_size": 8, "k": 48}, "takes either hidden_size or k, got hidden_size=8 and k=48"),
        ({"hidden_size": 0}, "hidden_size is 0, expected a positive number"),
        ({"k": -1}, "k is -1, expected a positive number"),
        ({"k": math.nan}, "k is nan, expected a positive number"),
        ({"k": "48"}, "k is '48', expected a positive number"),
        ({"k": 48, "causal": True}, "causal goes with hidden_size only.*k=96"),
    ],
)
def test_wrong_settings_are_named(kind: type, settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=rf"{kind.__name__}.*{message}"):
        kind(**settings)


@pytest.mark.parametrize("settings", [{"encoder_weight": -0.1}, {"encoder_weight": math.nan}, {"encoder_k": 0}])
def test_wrong_weights_are_named(settings: dict) -> None:
    name, value = next(iter(settings.items()))
    with pytest.raises(ValueError, match=f"VisionCost: {name} is {value}"):
        VisionCost(**{"encoder_weight": 1} | settings)


class Odd(CostModel):
    """Somebody's own model, which gives whatever it was given."""

    def __init__(self, value) -> None:
        self.value = value

    def of_length(self, length: float):
        return self.value


@pytest.mark.parametrize("value", [math.nan, -1.0, math.inf, None, "3", True])
def test_a_cost_that_is_none_is_named(value) -> None:
    with pytest.raises(ValueError, match=r"sample 'a/1' costs .* by Odd\(value=.*\), expected a finite number"):
        sample_cost({"__key__": "a/1"}, 1, Odd(value))


@pytest.mark.parametrize("value", [3, np.float32(3), 3.0])
def test_a_cost_that_is_one_comes_back_as_a_float(value) -> None:
    assert repr(sample_cost({}, 1, Odd(value))) == "3.0"
