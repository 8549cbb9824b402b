"""A real TensorBoard; W&B and MLflow behind Lightning's loggers are stand-ins."""

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from matplotlib.figure import Figure
from PIL import Image

from lightning_lengthpool.monitor.figure_loggers import log_figures
from lightning_lengthpool.report.figures import correlation_figure


@pytest.fixture
def drawn() -> dict[str, Figure]:
    return {f"sync/{name}": correlation_figure({name: np.zeros(10)}, 0.1) for name in ("one", "two")}


class FakeWandb(WandbLogger):
    """Lightning's own `log_image`, with a run that keeps what it is given."""

    def __init__(self) -> None:
        self._prefix, self._wandb_init, self.logged = "", {}, []

    @property
    def experiment(self) -> Any:
        return types.SimpleNamespace(log=self.logged.append)


class FakeMLFlow(MLFlowLogger):
    run_id = "run"

    def __init__(self) -> None:
        self.logged: list[tuple] = []

    @property
    def experiment(self) -> Any:
        return types.SimpleNamespace(log_figure=lambda *args: self.logged.append(args))


class Broken(FakeMLFlow):
    @property
    def experiment(self) -> Any:
        raise ConnectionError("no route to host")


def test_tensorboard_takes_them(drawn: dict[str, Figure], tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path, name="", version="")
    log_figures([logger], drawn, 7)
    logger.finalize("success")
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert events.Tags()["images"] == ["sync/one", "sync/two"]
    (image,) = events.Images("sync/one")
    assert (image.step, image.width) == (7, 1440) and image.height > 300


def test_wandb_takes_images(drawn: dict[str, Figure], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(Image=lambda image: image))
    logger = FakeWandb()
    log_figures([logger], drawn, 7)
    assert [set(row) for row in logger.logged] == [{name, "trainer/global_step"} for name in drawn]
    (image,) = logger.logged[0]["sync/one"]
    assert isinstance(image, Image.Image) and image.width == 1440 and logger.logged[0]["trainer/global_step"] == 7


def test_mlflow_takes_files(drawn: dict[str, Figure]) -> None:
    logger = FakeMLFlow()
    log_figures([logger], drawn, 7)
    assert logger.logged == [("run", figure, f"{name}-000007.png") for name, figure in drawn.items()]


def test_others_are_passed_over_and_a_failure_is_a_warning(drawn: dict[str, Figure], tmp_path: Path) -> None:
    last = FakeMLFlow()
    with pytest.warns(
        UserWarning, match="Broken did not take the figures of step 7: ConnectionError: no route"
    ) as seen:
        log_figures([CSVLogger(tmp_path), Broken(), last], drawn, 7)
    assert len(seen) == 1 and len(last.logged) == 2 and not list(tmp_path.iterdir())
