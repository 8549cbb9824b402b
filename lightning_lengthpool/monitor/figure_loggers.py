"""Hand figures to the loggers that take some: TensorBoard, W&B and MLflow.

Tested against a real TensorBoard; against W&B and MLflow with stand-ins that derive from Lightning's loggers.
"""

import io
from collections.abc import Iterable, Mapping

from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_warn
from matplotlib.figure import Figure
from PIL import Image

from lightning_lengthpool.report import figures


def log_figures(loggers: Iterable[Logger], drawn: Mapping[str, Figure], step: int) -> None:
    """Log figures by name, say 'sync/causes', on global rank zero, where loggers have an experiment.

    Loggers that take none are passed over. One that fails does not end the training: a warning names it and the error.
    For MLflow, which keeps files, the step stands in the file's name.
    """
    for logger in loggers:
        try:
            for name, figure in drawn.items():
                _log(logger, name, figure, step)
        except Exception as error:
            kind = type(logger).__name__
            rank_zero_warn(f"{kind} did not take the figures of step {step}: {type(error).__name__}: {error}")


def _log(logger: Logger, name: str, figure: Figure, step: int) -> None:
    # Lightning's own classes, which can be imported where the packages behind them are not installed
    if isinstance(logger, TensorBoardLogger):
        logger.experiment.add_figure(name, figure, global_step=step)
    elif isinstance(logger, WandbLogger):
        logger.log_image(name, [Image.open(io.BytesIO(figures.png(figure)))], step=step)
    elif isinstance(logger, MLFlowLogger):
        logger.experiment.log_figure(logger.run_id, figure, f"{name}-{step:06d}.png")
