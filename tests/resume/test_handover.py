"""ddp_spawn and ddp_fork train copies of the data module: a second fit goes on, and no checkpoint is silent."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.training import LENGTHS

SCRIPT = """
import sys
from pathlib import Path

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from helpers.training import Recorder, data, trainer

path, folder, strategy = sys.argv[1:]


class Writer(Recorder):
    def training_step(self, batch):
        with open(f"{folder}/{self.trainer.global_rank}.txt", "a") as file:
            print(*batch["keys"], file=file)
        return super().training_step(batch)


def fit(module, steps, settings={}, **kwargs):
    settings = dict(devices=2, strategy=strategy, max_steps=steps, max_epochs=-1, num_sanity_val_steps=0) | settings
    run = trainer(Path(folder), **settings)
    run.fit(Writer(), module, **kwargs)
    return run


if __name__ == "__main__":
    module = data(path, num_workers=1)
    run = fit(module, 5)
    assert module.state_dict()["batches"] == 5 and len(module.state_dict()["ranks"]) == 2
    run.save_checkpoint(f"{folder}/after.ckpt")
    save = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1)
    fit(module, 4, settings={"callbacks": [save], "enable_checkpointing": True, "limit_train_batches": 3,
        "reload_dataloaders_every_n_epochs": 1})
    saved = torch.load(f"{folder}/step=4.ckpt", weights_only=True)["LengthPoolDataModule"]
    assert saved["batches"] == 9, saved["batches"]
    assert module.state_dict()["batches"] == 9
    if strategy == "ddp_fork":  # the same code, and a spawned process takes seconds to import torch
        one = data(path, num_workers=0)
        fit(one, 2, settings={"devices": 1})
        first = one.state_dict()
        fit(one, 2, settings={"devices": 1})
        one.load_state_dict(first)
        assert one.state_dict()["batches"] == 2  # what is loaded counts, not what the last fit has left
    try:
        fit(data(path, num_workers=1, resume="exact"), 12, ckpt_path=f"{folder}/after.ckpt")
    except BaseException as error:
        print(str(error))
"""


@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_fork"])
def test_a_second_fit_goes_on_and_a_checkpoint_without_a_state_is_refused(
    dataset: Callable[..., Path], tmp_path: Path, strategy: str
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(tmp_path / "script.py"), str(dataset(LENGTHS)), str(tmp_path), strategy]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "trainer.save_checkpoint writes after this fit has none" in run.stderr
    assert "resume is 'exact', but the checkpoint" in run.stdout + run.stderr
    for rank in range(2):
        keys = (tmp_path / f"{rank}.txt").read_text().split()[:18]
        assert len(keys) == 18 == len(set(keys))  # nine batches of two, none twice
