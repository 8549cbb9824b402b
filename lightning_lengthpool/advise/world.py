"""How many data-parallel ranks a trainer's settings make, without making a trainer."""

from typing import Any, NamedTuple

import torch


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
    said = f"trainer.devices is {'auto' if devices is None else devices!r}"
    if accelerator == "cpu":
        return 1, [f"{said} with accelerator 'cpu', which is one process. --world_size says otherwise."]
    if count := torch.cuda.device_count():
        return count, [f"{said}: this machine's {count} GPU(s) a node are assumed. --world_size says otherwise."]
    return 1, [
        f"{said}, and this machine has no GPU: one device a node is assumed. Say how many ranks there will be with "
        "--world_size."
    ]


def _wrong(devices: Any) -> str:
    return f"trainer.devices is {devices!r}, expected a number of at least 1, 'auto', -1, or a list of devices"


def _of(settings: Any, name: str) -> Any:
    return settings.get(name) if hasattr(settings, "get") else getattr(settings, name, None)
