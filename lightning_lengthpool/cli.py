"""The command line: Lightning's own (`fit`, `validate`, `test`, `predict`), `advise`, `compare` and `report`."""

import argparse
import io
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from jsonargparse import ArgumentParser
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from lightning_lengthpool import LengthPoolDataModule, SyncMonitor
from lightning_lengthpool.ordering.local_paths import local_path
from lightning_lengthpool.ordering.settings import POLICIES
from lightning_lengthpool.report.compare import compare
from lightning_lengthpool.report.page import STEPS, report

DESCRIPTION = """Train with the same sample length on every rank at the same step.
There are three more subcommands than Lightning's: 'advise' says before training what a pool would bring for a config's
data, 'compare' runs the same training once per policy, and 'report' makes an HTML page of what SyncMonitor wrote about
a run. See 'advise --help', 'compare --help' and 'report --help'."""

ADVISE = """Is the pool on? Would it help my data? Which pool_size? What does it cost in memory and start-up? Is waiting
for the slowest rank the bottleneck at all? Takes the YAML of 'fit', reads some samples of its training data with its
own task encoder and workers, and says so. No model is built, no GPU is needed, and only the samples' lengths are kept.
Ctrl-C while it reads ends the reading; the advice is then on what was read."""

OVERRIDES = "Any other option of fit goes over the YAMLs: --data.init_args.batch_size 4 --trainer.devices 2."

ADVISE_MORE = """examples:
  train.py advise --config my.yaml
  train.py advise --config my.yaml --data.init_args.batch_size 4 --trainer.devices 8
  train.py advise --config my.yaml --world_size 64,512 --run runs/demo/version_0
  train.py advise --lengths lengths.csv --world_size 64 --batch_size 4

The report goes through: the pool's settings; how the lengths are distributed; idle, padding and useful fraction, as
predicted for today's settings and for other pool sizes, policies and world sizes, with 90 % intervals; memory, start-up
and restore; pool_size, batch_size and num_workers together; whether synchronisation can be the bottleneck; checks;
one recommendation with the YAML to paste.

Written into --out: advice.json (all of it), advice.png (idle against pool_size), and lengths.csv (the lengths that were
read, which serves as data.init_args.reference_lengths).

The number of ranks is trainer.devices x trainer.num_nodes, unless --world_size says otherwise; what had to be assumed
is said. A callback or a model that fails does not matter. Exit status: 0, or 2 and one line if an input is wrong."""


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

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        return super().init_parser(exit_on_error=False, **kwargs)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        self.config = parser.parse_args(args)  # Lightning would warn that sys.argv is left aside

    def instantiate_classes(self) -> None: ...

    def _set_seed(self) -> None: ...

    def _run_subcommand(self, subcommand: str) -> None: ...


def parse_config(paths: Sequence[str], overrides: Sequence[str] = ()) -> Any:
    """Parse YAMLs as `fit` would, later ones over earlier ones, with more options over them.

    Returns:
        The whole configuration.

    Raises:
        ValueError: If `fit` would not take them.
    """
    args = ["fit", *(part for path in paths for part in ("--config", str(path))), *overrides]
    try:
        return _ConfigParser(args=args).config["fit"]
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from error


def _compare_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train.py compare",
        usage="%(prog)s --config YAML [--config YAML ...] [--policies NAME ...] [--steps N] [--repeats N] [--out DIR] "
        "[--val_metric NAME] [options of fit]",
        description="Run the same training once per policy, each in fresh processes with the same seeds, and print the "
        "measured figures side by side. Writes compare.json and compare.png.",
        epilog=f"{OVERRIDES} compare sets the policy, the logger and the length of each run itself.",
        allow_abbrev=False,
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


class _OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def _advise_parser() -> argparse.ArgumentParser:
    parser = _OneLineParser(
        prog="train.py advise",
        description=ADVISE,
        epilog=ADVISE_MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("-c", "--config", action="append", help="YAML as for fit; may be given again")
    source.add_argument(
        "--lengths",
        metavar="FILE",
        help="in place of a config: a CSV file with a column 'tokens', and if there are any, 'class' and 'rank' (as in "
        "the lengths.csv of SyncMonitor); of more than 200,000 lengths as many are drawn at random, which is said",
    )
    parser.add_argument(
        "--world_size",
        metavar="N[,N...]",
        help="data-parallel ranks to predict for; the first is that of the run (default: the config's, or as many as "
        "the column 'rank' names)",
    )
    parser.add_argument("--run", metavar="DIR", help="a steps.csv, or a folder with one below it: what a run measured")
    parser.add_argument(
        "--max_length",
        type=int,
        metavar="N",
        help="the most tokens that the model takes (default: the model's setting)",
    )
    parser.add_argument(
        "--out", metavar="DIR", default="runs/advise", help="folder for the results (default: %(default)s)"
    )
    config = parser.add_argument_group("with --config", "any option of fit goes over the YAMLs")
    config.add_argument(
        "--samples", type=int, metavar="N", help="samples to read, over all ranks, about (default: 5000)"
    )
    lengths = parser.add_argument_group("with --lengths (a config has its own)")
    lengths.add_argument(
        "--batch_size", type=int, metavar="N", help="samples of a micro-batch; with --max_tokens at most"
    )
    lengths.add_argument("--pool_size", type=int, metavar="N", help="samples of today's pool (default: there is none)")
    lengths.add_argument("--max_tokens", type=float, metavar="N", help="what a batch may cost, in padded tokens")
    return parser


_WITH = {"config": ("samples",), "lengths": ("batch_size", "pool_size", "max_tokens")}


def _advise(parser: argparse.ArgumentParser, options: dict[str, Any], overrides: Sequence[str]) -> None:
    from lightning_lengthpool.advise.command import advise_config, advise_lengths  # training has no need of it

    given = {name: value for name, value in options.items() if value is not None}
    source, other = ("config", "lengths") if "config" in given else ("lengths", "config")
    for name in _WITH[other]:
        if name in given:
            parser.error(f"--{name} goes with --{other}, not with --{source}")
    if source == "config":
        advise_config(parse_config(given.pop("config"), overrides), **given)
    elif overrides:
        parser.error(f"{' '.join(overrides)} goes with --config, not with --lengths")
    else:
        advise_lengths(**given)


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
    if isinstance(sys.stdout, io.TextIOWrapper):  # a path may hold bytes that are no text
        sys.stdout.reconfigure(errors="backslashreplace")
    given = sys.argv[1:] if args is None else list(args)
    if given[:1] not in (["advise"], ["compare"], ["report"]):
        LengthPoolCLI(args)
        return
    parsers = {"advise": _advise_parser, "compare": _compare_parser, "report": _report_parser}
    parser = parsers[given[0]]()
    known, overrides = parser.parse_known_args(given[1:])
    options = vars(known)
    try:
        for name in {"lengths", "out"} & {name for name, value in options.items() if value is not None}:
            options[name] = str(local_path(options[name], f"--{name}"))
        if given[0] == "advise":
            _advise(parser, options, overrides)
        elif given[0] == "compare":
            configs = options.pop("config")
            compare(parse_config(configs, overrides), configs, **options, overrides=overrides)
        elif overrides:
            parser.error(f"unrecognized arguments: {' '.join(overrides)}")
        else:
            report(**options)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        if given[0] != "advise":
            raise
        parser.exit(130, f"{parser.prog}: interrupted\n")


if __name__ == "__main__":
    main()
