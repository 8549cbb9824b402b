"""Today's settings, as the advisor takes them: from a parsed configuration, without training anything."""

import contextlib
import os
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import LightningArgumentParser

from lightning_lengthpool.advise.advisor import Plan
from lightning_lengthpool.advise.scan.scan_worker import named
from lightning_lengthpool.advise.world import world_of
from lightning_lengthpool.data.datamodule import LengthPoolDataModule
from lightning_lengthpool.ordering.settings import check_integer
from lightning_lengthpool.runs.run import Run

# What models call the most tokens of a sequence that they take.
_LIMITS = (
    "max_length",
    "max_seq_len",
    "max_seq_length",
    "max_sequence_length",
    "max_position_embeddings",
    "seq_length",
    "context_length",
    "block_size",
    "n_positions",
)


def make_data(config: Any) -> LengthPoolDataModule:
    """Make a parsed configuration's data module, and nothing else of it, and let it prepare its data.

    Raises:
        ValueError: If it is no `LengthPoolDataModule`, or fails; the message says why.
    """
    data = config.get("data")
    path = None if data is None else data.get("class_path")
    if not path:
        raise ValueError(
            "the config has no 'data', and advise reads a LengthPoolDataModule's data. Set data.class_path, or give a "
            "file of lengths with --lengths."
        )
    wrong = (
        f"data.class_path is {path}, expected LengthPoolDataModule or a class derived from it. For other data give a "
        "file of lengths with --lengths."
    )
    cls = pkgutil.resolve_name(path)
    if isinstance(cls, type) and not issubclass(cls, LengthPoolDataModule):
        raise ValueError(wrong)
    parser = LightningArgumentParser()
    parser.add_lightning_class_args(LightningDataModule, "data", subclass_mode=True)
    with named(f"data.class_path is {path}, which cannot be made"):
        try:
            module = parser.instantiate_classes(Namespace(data=data)).data
        except ValueError as error:
            if error.__cause__ is None or not str(error).startswith("Does not validate"):
                raise
            raise error.__cause__ from None  # without jsonargparse's words, which have all settings in them
    if not isinstance(module, LengthPoolDataModule):
        raise ValueError(wrong)
    _prepare(module)
    return module


def _prepare(module: LengthPoolDataModule) -> None:
    """Let a derived module find its data; the checks of training are not made, for most of them the advice makes."""
    module.checks_data = False
    with named(f"the data of {type(module).__qualname__} cannot be set up without a trainer"):
        module.prepare_data()
        module.setup("fit")


def plan_of(
    module: LengthPoolDataModule, config: Any, worlds: Sequence[int], max_length: int | None, run: Run | None
) -> tuple[Plan, list[str]]:
    """Today's settings, and what had to be assumed, in sentences.

    Args:
        module: The configuration's data module.
        config: The configuration, parsed.
        worlds: Numbers of data-parallel ranks, the first one that of the run; empty for the configuration's.
        max_length: As for `limit`.
        run: A measured run of it, if there is one.

    Raises:
        ValueError: If a setting is wrong.
    """
    trainer = config["trainer"]
    notes: list[str] = []
    if worlds:
        ranks, per_node = worlds[0], None
        with contextlib.suppress(ValueError):
            per_node = min(worlds[0], world_of(trainer).per_node)
    else:
        ranks, per_node, said = world_of(trainer)
        notes += said
    settings, file = module.settings, module.reference_lengths
    if file is not None and Path(file).is_file():
        settings = module.complete_settings()
    elif file is not None:
        notes.append(
            f"reference_lengths is {str(file)!r}, and no file is there yet: the predictions take the lengths that are "
            "read now in its place"
        )
    plan = Plan(
        policy=settings.policy,
        pool_size=settings.pool_size,
        batch_size=module.batch_size,
        max_tokens=settings.max_tokens,
        num_workers=module.source.num_workers,
        world_size=ranks,
        accumulate=trainer.get("accumulate_grad_batches") or 1,
        seed=settings.seed,
        has_reference=file is not None,
        class_shares=settings.class_shares,
        max_length=limit(max_length, config.get("model")),
        is_active=settings.policy != "none" and settings.pool_size > 0,
        workers_by_rank=workers_by_rank(run),
        cost=None if settings.cost is None else repr(settings.cost),
        is_padded=settings.cost is None or settings.cost.is_padded,
        warmup=None if settings.warmup is None else (settings.warmup.initial, settings.warmup.flushes),
        ranks_per_node=per_node,
    )
    return plan, notes


def limit(max_length: int | None, model: Any) -> tuple[str, int] | None:
    """The most tokens that the model takes, and what says so; None if nothing does.

    Args:
        max_length: As given on the command line.
        model: The model's settings.
    """
    if max_length is not None:
        return "--max_length", check_integer("--max_length", max_length, minimum=1)
    return next(_limits(model, "model"), None)


def _limits(settings: Any, name: str) -> Iterator[tuple[str, int]]:
    plain = vars(settings) if isinstance(settings, Namespace) else settings
    if not isinstance(plain, Mapping):
        return
    for key, value in plain.items():
        if key in _LIMITS and isinstance(value, int) and not isinstance(value, bool) and value > 0:
            yield f"{name}.{key}", value
    for key, value in plain.items():
        yield from _limits(value, f"{name}.{key}")


def workers_by_rank(run: Run | None) -> tuple[int, ...] | None:
    """The `num_workers` of each rank of a run, if its `run.json` tells them."""
    told = () if run is None else run.about.workers_by_rank or ()
    known = tuple(workers for workers in told if workers is not None)
    return known if known and len(known) == len(told) else None


def machine_bytes() -> int | None:
    """Memory of this machine, or of the container in which this process runs; None where it cannot be told."""
    known: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        known.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # 'max' for no limit
            known.append(int(Path(file).read_text()))
    return min(known, default=None)
