"""A trial of the user's encoder before training, the same on all ranks.

A wrong encoder or a sample without a length shows here, not on one rank in the middle of training, when the others
would wait for it.
"""

from typing import Any

from megatron.energon import get_savable_loader

from lightning_lengthpool.data.loaders import TrainLoader
from lightning_lengthpool.data.pools.arrivals import StarvedError
from lightning_lengthpool.data.pools.dataset import LengthPoolDataset

PROBE_TOLERANCE = 20  # samples that may fail in a row: few enough to read their messages
TIMEOUT = 600.0  # seconds; energon lets an encoder skip samples for ever


def probe(dataset: Any, pool: LengthPoolDataset, complaint: str) -> dict[str, Any]:
    """Make one batch.

    It is made in a forked worker, for energon's `@stateless(restore_seeds=True)` keeps the seed of the first worker
    that a process sees; and it stays there, for with `num_workers=0` a batch need not be of a kind that can be sent.

    Args:
        dataset: As energon built it, for one worker.
        pool: The length pool in it.
        complaint: The beginning of the error if no batch comes.

    Returns:
        The pool's snapshot.

    Raises:
        ValueError: If there is no batch in time. What the encoder raises comes through as it is.
    """
    pool.drop_batches = True
    loader = get_savable_loader(dataset, prefetch_factor=1, watchdog_timeout_seconds=None, gc_collect_every_n_steps=0)
    loader.timeout = TIMEOUT
    trial = TrainLoader(lambda state: (loader, pool, state), length=1)
    try:
        next(iter(trial))
        return trial.state()["workers"][0]["snapshot"]
    except StarvedError as error:
        raise ValueError(
            f"{complaint}: it skips all samples (SkipSample), yields nothing for them or fails on them (skip_tolerance "
            f"is {pool.skip_tolerance}). Correct it, or raise skip_tolerance; 0 sets no limit."
        ) from error
    except RuntimeError as error:
        if "timed out" not in str(error):
            raise
        raise ValueError(f"{complaint} within {TIMEOUT:.0f} s. Does it skip all samples (SkipSample)?") from error
    finally:
        trial.close()
