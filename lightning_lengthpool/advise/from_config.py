"""Today's settings, as the advisor takes them: from a parsed configuration, without training anything."""

import contextlib
import os
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jsonargparse import Namespace
from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import LightningArgumentParser

from lightning_lengthpool.advise.advice import Plan
from lightning_lengthpool.advise.scan.scan_worker import explained
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
    with explained(f"data.class_path is {path}, which cannot be made"):
        try:
            module = parser.instantiate_classes(Namespace(data=data)).data  # type: ignore[no-untyped-call]
        except ValueError as error:
            if error.__cause__ is None or not str(error).startswith("Does not validate"):
                raise
            raise error.__cause__ from None  # without jsonargparse's words, which have all settings in them
    if not isinstance(module, LengthPoolDataModule):
        raise ValueError(wrong)
    module.checks_data = False  # most checks of training the advice makes itself
    with explained(f"the data of {type(module).__qualname__} cannot be set up without a trainer"):
        module.prepare_data()
        module.setup("fit")
    return module


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
    trainer, file = config["trainer"], module.reference_lengths
    notes: list[str] = []
    if worlds:
        ranks, per_node = worlds[0], None
        with contextlib.suppress(ValueError):
            per_node = min(worlds[0], world_of(trainer).per_node)
    else:
        ranks, per_node, assumed = world_of(trainer)
        notes += assumed
    settings = module.settings
    if file is not None and Path(file).is_file():
        settings = module.complete_settings()
    elif file is not None:
        notes.append(
            f"reference_lengths is {str(file)!r}, and no file is there yet: the predictions take the lengths that are "
            "read now in its place"
        )
    plan = Plan(
        settings,
        num_workers=module.source.num_workers,
        world_size=ranks,
        accumulate=trainer.get("accumulate_grad_batches") or 1,
        has_reference=file is not None,
        max_length=limit(max_length, config.get("model")),
        workers_by_rank=workers_by_rank(run),
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


# ---- the ranks


class World(NamedTuple):
    """The ranks that a configuration asks for.

    Attributes:
        ranks: Data-parallel ranks.
        per_node: Those of one machine.
        notes: What had to be assumed, in sentences.
    """

    ranks: int
    per_node: int
    notes: tuple[str, ...]


def world_of(trainer: Any) -> World:
    """The ranks of a configuration's `trainer`: a mapping with `devices`, `num_nodes`, `accelerator` and `strategy`.

    Raises:
        ValueError: If `devices` or `num_nodes` is none that Lightning knows.
    """
    nodes = trainer.get("num_nodes")
    nodes = 1 if nodes is None else nodes
    if isinstance(nodes, bool) or not isinstance(nodes, int) or nodes < 1:
        raise ValueError(f"trainer.num_nodes is {nodes!r}, expected an integer of at least 1")
    devices, notes = _devices(trainer.get("devices"), trainer.get("accelerator"))
    strategy = trainer.get("strategy")
    name = strategy if isinstance(strategy, str) else str(_of(strategy, "class_path") or type(strategy).__name__)
    if name.endswith("ModelParallelStrategy"):
        settings = _of(strategy, "init_args")
        parallel = _of(settings, "data_parallel_size") or "auto"
        tensor = _of(settings, "tensor_parallel_size") or "auto"
        ranks = nodes if parallel == "auto" else int(parallel)
        note = (
            f"trainer.strategy is {name} with data_parallel_size {parallel!r} and tensor_parallel_size {tensor!r} on "
            f"{nodes} node(s) of {devices}: {ranks} data-parallel rank(s) are assumed. --world_size says otherwise."
        )
        return World(ranks, max(1, ranks // nodes), (*notes, note))
    if "." in name and not name.startswith(("lightning.", "pytorch_lightning.")):
        notes.append(
            f"trainer.strategy is {name}, of which it is assumed that each of the {devices * nodes} devices is a "
            "data-parallel rank. If several devices share a rank's batches, say how many ranks there are with "
            "--world_size."
        )
    return World(devices * nodes, devices, tuple(notes))


def _devices(devices: Any, accelerator: Any) -> tuple[int, list[str]]:
    """Devices of a node, as Lightning reads the setting."""
    wanted = devices
    if isinstance(devices, str) and devices not in ("auto", "-1"):
        parts = [part.strip() for part in devices.split(",") if part.strip()]
        if not parts or not all(part.isdecimal() for part in parts):
            raise ValueError(_wrong(wanted))
        devices = [int(part) for part in parts] if "," in devices else int(parts[0])
    if isinstance(devices, (list, tuple)) and devices:
        return len(devices), []
    if devices in (None, "auto", "-1", -1):
        return _all_devices(wanted, accelerator)
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise ValueError(_wrong(wanted))
    return devices, []


def _all_devices(devices: Any, accelerator: Any) -> tuple[int, list[str]]:
    setting = f"trainer.devices is {'auto' if devices is None else devices!r}"
    if accelerator == "cpu":
        return 1, [f"{setting} with accelerator 'cpu', which is one process. --world_size says otherwise."]
    if count := torch.cuda.device_count():
        return count, [f"{setting}: this machine's {count} GPU(s) a node are assumed. --world_size says otherwise."]
    return 1, [
        f"{setting}, and this machine has no GPU: one device a node is assumed. Say how many ranks there will be with "
        "--world_size."
    ]


def _wrong(devices: Any) -> str:
    return f"trainer.devices is {devices!r}, expected a number of at least 1, 'auto', -1, or a list of devices"


def _of(settings: Any, name: str) -> Any:
    return settings.get(name) if hasattr(settings, "get") else getattr(settings, name, None)
