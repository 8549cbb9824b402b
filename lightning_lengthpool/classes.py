"""Which class a sample is of, for batches that hold one class."""

from typing import Any

import numpy as np

from lightning_lengthpool.ordering.length import get_field


def packed_class(sample: Any) -> str:
    """Tell packs from single samples, which attention treats differently.

    Args:
        sample: An encoded sample: an object with attributes, or a dict.

    Returns:
        'packed' if the sample's `cu_lengths` (where each sub-sequence begins, and the last one ends) mark more than one
        sub-sequence that is not empty, else 'single'.
    """
    bounds = get_field(sample, "cu_lengths")
    return "single" if bounds is None or np.count_nonzero(np.diff(np.asarray(bounds))) < 2 else "packed"
