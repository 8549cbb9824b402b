"""The settings that a checkpoint holds beside the iterator states: a run goes on only with the same.

`checkpoint.check_settings_fit` compares them.
"""

from typing import Any

from lightning_lengthpool.data.reading.data_identity import Description
from lightning_lengthpool.data.source import Source
from lightning_lengthpool.ordering.reference_lengths import ReferenceLengths
from lightning_lengthpool.ordering.settings import PoolSettings

OF_SOURCE = ("num_workers", "shuffle_buffer_size", "packing_buffer_size", "max_samples_per_sequence")


def saved_settings(
    source: Source,
    settings: PoolSettings,
    *,
    ranks: int,
    data: list[Description],
    reference: ReferenceLengths | None,
) -> dict[str, Any]:
    """What an iterator state depends on, in plain containers.

    A setting that is added here is missing in older checkpoints, where it counts as None; if that is not what they were
    trained with, `checkpoint.VERSION` has to go up.
    """
    return {
        "path": data,
        "ranks": ranks,
        "reference_lengths": None if reference is None else str(reference),
        **{name: getattr(source, name) for name in OF_SOURCE},
        **settings.identity(),
    }
