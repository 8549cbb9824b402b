"""The command line: Lightning's own (`fit`, `validate`, `test`, `predict`), `advise`, `compare` and `report`."""

import argparse
import inspect
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from jsonargparse import ArgumentParser, DefaultHelpFormatter
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from lightning_lengthpool import LengthPoolDataModule, SyncMonitor
from lightning_lengthpool.ordering.local_paths import local_path
from lightning_lengthpool.ordering.policies import POLICIES

DESCRIPTION = """Train with the same sample length on every rank at the same step.
There are three more subcommands than Lightning's: 'advise' says before training what a pool would bring for a config's
data, 'compare' runs the same training once per policy, and 'report' makes an HTML page of what SyncMonitor wrote about
a run. See 'advise --help', 'compare --help' and 'report --help'."""

ADVISE = """Is the pool on? Would it help my data? Which pool_size? What does it cost in memory and start-up? Is waiting
for the slowest rank the bottleneck at all? Takes the YAML of 'fit', reads some samples of its training data with its
own task encoder and workers, and says so. No model is built, no GPU is needed, and only the samples' lengths are kept.
Ctrl-C while it reads ends the reading; the advice is then on what was read."""

OVERRIDES = "Any other option of fit goes over the YAMLs: --data.init_args.batch_size 4 --trainer.devices 2."

ADVISE_MORE = f"""examples:
  train.py advise --config my.yaml
  train.py advise --config my.yaml --data.init_args.batch_size 4 --trainer.devices 8
  train.py advise --config my.yaml --world_size 64,512 --run runs/demo/version_0
  train.py advise --lengths lengths.csv --world_size 64 --batch_size 4

{OVERRIDES}

The report goes through: the pool's settings; how the lengths are distributed; idle, padding and useful fraction, as
predicted for today's settings and for other pool sizes, policies and world sizes, with 90 % intervals; memory, start-up
and restore; pool_size, batch_size and num_workers together; whether synchronisation can be the bottleneck; checks;
one recommendation with the YAML to paste.

Written into --out: advice.json (all of it), advice.png (idle against pool_size), and lengths.csv (the lengths that were
read, which serves as data.init_args.reference_lengths).

The number of ranks is trainer.devices x trainer.num_nodes, unless --world_size says otherwise; what had to be assumed
is said. A callback or a model that fails does not matter. Exit status: 0, or 2 and one line if an input is wrong."""

LENGTHS = """in place of a config: a CSV file with a column 'tokens', and if there are any, 'class' and 'rank' (the
lengths.csv of SyncMonitor has them)"""

COMPARE = """Run the same training once per policy, each in fresh processes with the same seeds, and print the measured
figures side by side. Writes compare.json and compare.png."""

REPORT = """Show where the time of a run goes, finished or still going: one HTML page that needs no network, with the
causes of waiting in words and five figures, also written as PNGs beside it."""


class _Parser(LightningArgumentParser):
    """Adds to a subcommand's help the settings of this package, which stand below 'init_args' in a YAML."""

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        text = super().format_help(*args, **kwargs)
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
        raise ValueError(_in_one_line(error)) from error


# ---- the commands beside Lightning's


def _advise(args: Sequence[str]) -> None:
    from lightning_lengthpool.advise.command import advise_config, advise_lengths  # training has no need of it

    parser = _parser("advise", ADVISE, ADVISE_MORE)
    parser.add_argument("-c", "--config", action="append", help="YAML as for fit; may be given again")
    parser.add_argument("--lengths", metavar="FILE", help=LENGTHS)
    parser.add_function_arguments(advise_config, skip={"config"})
    parser.add_function_arguments(advise_lengths, skip=set(parser.get_defaults().keys()))
    own, overrides = _split(parser, args)
    options = _parse(parser, own)
    if (options["config"] is None) == (options["lengths"] is None):
        raise ValueError("expected either --config or --lengths")
    source, other = ("config", "lengths") if options["lengths"] is None else ("lengths", "config")
    functions: dict[str, Callable[..., Any]] = {"config": advise_config, "lengths": advise_lengths}
    function = functions[source]
    taken = {name: value for name, value in options.items() if name in inspect.signature(function).parameters}
    for name in (option.partition("=")[0].removeprefix("--") for option in own if option.startswith("--")):
        if name not in taken:
            raise ValueError(f"--{name} goes with --{other}, not with --{source}")
    if source == "config":
        taken["config"] = parse_config(taken["config"], overrides)
    elif overrides:
        raise ValueError(f"{' '.join(overrides)} goes with --config, not with --lengths")
    function(**taken)


def _compare(args: Sequence[str]) -> None:
    from lightning_lengthpool.report.compare import compare

    parser = _parser("compare", COMPARE, f"{OVERRIDES} compare sets the policy, the logger and the length of each run.")
    parser.add_argument(
        "-c", "--config", dest="configs", action="append", required=True, help="YAML as for fit; may be given again"
    )
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES), help="what to compare")
    parser.add_function_arguments(compare, skip={"config", "configs", "policies", "overrides"})
    own, overrides = _split(parser, args)
    options = _parse(parser, own)
    compare(parse_config(options["configs"], overrides), **options, overrides=overrides)


def _report(args: Sequence[str]) -> None:
    from lightning_lengthpool.report.page import report

    parser = _parser("report", REPORT)
    parser.add_function_arguments(report, as_positional=True)
    report(**_parse(parser, args))


def _parser(command: str, description: str, more: str = "") -> ArgumentParser:
    return ArgumentParser(
        prog=f"train.py {command}",
        description=description,
        epilog=more,
        formatter_class=_Formatter,
        allow_abbrev=False,
        exit_on_error=False,
    )


class _Formatter(DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Leaves the line breaks of a description."""


def _split(parser: ArgumentParser, args: Sequence[str]) -> tuple[list[str], list[str]]:
    """A command's own arguments, and those that are left for `fit`: each option with the values behind it."""
    names = {"c", "config", "h", "help", *parser.get_defaults().keys()}
    own: list[str] = []
    left: list[str] = []
    target = own
    for arg in args:
        if re.match("-[^0-9.]", arg):  # no negative number
            target = own if arg.lstrip("-").partition("=")[0] in names else left
        target.append(arg)
    return own, left


def _parse(parser: ArgumentParser, args: Sequence[str]) -> dict[str, Any]:
    try:
        options: dict[str, Any] = parser.parse_args(args).as_dict()
    except argparse.ArgumentError as error:
        raise ValueError(_in_one_line(error)) from error
    for name in {"lengths", "out"} & {name for name, value in options.items() if value is not None}:
        options[name] = str(local_path(options[name], f"--{name}"))
    return options


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())


_COMMANDS = {"advise": _advise, "compare": _compare, "report": _report}


def main(args: Sequence[str] | None = None) -> None:
    """Entry point of `train.py` and of the console script."""
    if os.getcwd() not in sys.path:  # the console script should find the user's own modules, as 'python train.py' does
        sys.path.insert(0, os.getcwd())
    if isinstance(sys.stdout, io.TextIOWrapper):  # a path may hold bytes that are no text
        sys.stdout.reconfigure(errors="backslashreplace")
    name, *rest = (sys.argv[1:] if args is None else args) or [""]
    if name not in _COMMANDS:
        LengthPoolCLI(args)
        return
    try:
        _COMMANDS[name](rest)
    except (ValueError, OSError) as error:
        # a run that failed in compare is shown with the end of its output
        print(f"train.py {name}: error: {error if name == 'compare' else _in_one_line(error)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        if name != "advise":
            raise
        print(f"train.py {name}: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
