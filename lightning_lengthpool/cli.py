"""The command line: Lightning's own (`fit`, `validate`, `test`, `predict`), `compare` and `report`."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from jsonargparse import ArgumentParser
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from lightning_lengthpool import LengthPoolDataModule, SyncMonitor
from lightning_lengthpool.compare import compare
from lightning_lengthpool.order import POLICIES
from lightning_lengthpool.page import STEPS, report

DESCRIPTION = """Train with the same sample length on every rank at the same step.
There are two more subcommands than Lightning's: 'compare' runs the same training once per policy, and 'report' makes an
HTML page of what SyncMonitor wrote about a run. See 'compare --help' and 'report --help'."""


class _Parser(LightningArgumentParser):
    """Adds to a subcommand's help the settings of this package, which stand below 'init_args' in a YAML."""

    def format_help(self) -> str:
        text = super().format_help()
        if "--data.help" not in text:
            return text  # not one of the subcommands that take a data module
        for key, cls in (("data.init_args", LengthPoolDataModule), ("trainer.callbacks.init_args", SyncMonitor)):
            parser = ArgumentParser(usage=argparse.SUPPRESS, add_help=False)
            parser.add_class_arguments(cls, key)
            text += f"\n{key} with class_path {cls.__module__.split('.')[0]}.{cls.__name__}:\n{parser.format_help()}"
        return text


class LengthPoolCLI(LightningCLI):
    """`LightningCLI` for any model and data module; the command line of `train.py`."""

    def __init__(self, args: Sequence[str] | None = None, **kwargs: Any) -> None:
        super().__init__(
            args=None if args is None else list(args),
            parser_class=_Parser,
            parser_kwargs={"description": DESCRIPTION},
            save_config_kwargs={"overwrite": True},
            **kwargs,
        )


class _ConfigParser(LengthPoolCLI):
    """Parses a configuration without making anything of it."""

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        self.config = parser.parse_args(args)  # Lightning would warn that sys.argv is left aside

    def instantiate_classes(self) -> None: ...

    def _set_seed(self) -> None: ...

    def _run_subcommand(self, subcommand: str) -> None: ...


def parse_config(paths: Sequence[str]) -> Any:
    """Parse YAMLs as `fit` would, later ones over earlier ones, and return the whole configuration."""
    return _ConfigParser(args=["fit", *(part for path in paths for part in ("--config", str(path)))]).config["fit"]


def _compare_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train.py compare",
        description="Run the same training once per policy, each in fresh processes with the same seeds, and print the "
        "measured figures side by side. Writes compare.json and compare.png.",
    )
    parser.add_argument("-c", "--config", action="append", required=True, help="YAML as for fit; may be given again")
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES), help="what to compare")
    parser.add_argument(
        "--steps",
        type=int,
        help="optimizer steps of each run, at least two pools; rounded up to whole pools, so that all policies see the "
        "same samples (default: the config's max_steps)",
    )
    parser.add_argument(
        "--repeats", type=int, default=1, help="runs per policy, each with a seed of its own (default: 1)"
    )
    parser.add_argument("--out", default="runs/compare", help="folder for the results (default: %(default)s)")
    parser.add_argument(
        "--val_metric", help="logged name of the validation loss (default: the first with 'val' and 'loss' in it)"
    )
    return parser


def _report_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train.py report",
        description="Show where the time of a run goes, finished or still going: one HTML page that needs no network, "
        "with the causes of waiting in words and five figures, also written as PNGs beside it.",
    )
    parser.add_argument("run", help="a steps.csv, or a folder with one somewhere below it (runs/demo/version_0)")
    parser.add_argument("--baseline", metavar="RUN", help="the same of a run to compare with, say one without a pool")
    parser.add_argument("--out", metavar="DIR", help="folder for report.html (default: 'report' beside the steps.csv)")
    parser.add_argument(
        "--steps",
        type=int,
        default=STEPS,
        help="how many of the newest steps to show step by step (default: %(default)s)",
    )
    return parser


def main(args: Sequence[str] | None = None) -> None:
    """Entry point of `train.py` and of the console script."""
    if os.getcwd() not in sys.path:  # the console script should find the user's own modules, as 'python train.py' does
        sys.path.insert(0, os.getcwd())
    given = sys.argv[1:] if args is None else list(args)
    if given[:1] not in (["compare"], ["report"]):
        LengthPoolCLI(args)
        return
    parser = _compare_parser() if given[0] == "compare" else _report_parser()
    options = vars(parser.parse_args(given[1:]))
    try:
        if given[0] == "report":
            report(**options)
        else:
            configs = options.pop("config")
            compare(parse_config(configs), configs, **options)
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
