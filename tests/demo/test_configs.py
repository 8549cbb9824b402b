"""Every YAML of configs/ goes through the real parser."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_lengthpool import LengthPoolDataModule, SyncMonitor
from lightning_lengthpool.cli import parse_config

CONFIGS = Path(__file__).parents[2] / "configs"
OVERLAYS = ["no_pool", "blend", "gpu_ddp", "gpu_fsdp"]
MY_PACKAGE = """
from lightning.pytorch import LightningModule as MyModel
from megatron.energon import DefaultTaskEncoder


class MyTaskEncoder(DefaultTaskEncoder):
    def __init__(self):
        super().__init__()
"""


def test_every_config_is_tested() -> None:
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == {"demo", "own_dataset", *OVERLAYS}


def test_the_demo_is_two_cpu_ranks_over_two_pools() -> None:
    config = parse_config([CONFIGS / "demo.yaml"])
    assert (config.trainer.devices, config.trainer.accelerator, config.trainer.strategy) == (2, "cpu", "ddp")
    assert config.trainer.accumulate_grad_batches == 1
    pool = config.data.init_args.pool_size
    assert (pool, config.data.init_args.policy) == (300, "pool") and config.trainer.max_steps >= 2 * pool
    assert any("SyncMonitor" in callback.class_path for callback in config.trainer.callbacks)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_changes_what_it_says_and_nothing_else(overlay: str) -> None:
    path = CONFIGS / f"{overlay}.yaml"
    base, config = parse_config([CONFIGS / "demo.yaml"]), parse_config([CONFIGS / "demo.yaml", path])
    written = leaves(yaml.safe_load(path.read_text()))
    changed = {key for key, value in config.items() if value != base.get(key)} - {"config"}
    assert changed and changed <= set(written)
    assert {key: config[key] for key in written} == written


def leaves(tree: dict, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def test_the_template_names_every_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_package.py").write_text(MY_PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    path = CONFIGS / "own_dataset.yaml"
    parse_config([path])
    written = yaml.safe_load(path.read_text())
    settings = set(inspect.signature(LengthPoolDataModule).parameters) - {"rank", "world_size"}  # no rank has its YAML
    assert set(written["data"]["init_args"]) == settings
    assert set(written["trainer"]["callbacks"][0]["init_args"]) < set(inspect.signature(SyncMonitor).parameters)
    lines = path.read_text().splitlines()
    for name in settings:  # each has a comment above it, or beside it
        (index,) = [i for i, line in enumerate(lines) if line.startswith(f"    {name}:")]
        assert lines[index - 1].lstrip().startswith("#") or "#" in lines[index] or name == "task_encoder"
