"""The reference algorithm's order, and a list of lengths for golden orders."""

import random

GOLDEN_LENGTHS = [31, 4, 15, 92, 65, 35, 89, 79, 4, 15]


def reference_stream(lengths: list[int], pool_size: int, seed: int = 42) -> list[int]:
    """The reference algorithm on a stream, full pools only; gives positions in the stream."""
    pool: list[tuple[int, int]] = []
    out: list[int] = []
    for i, length in enumerate(lengths):
        pool.append((i, length))
        if len(pool) == pool_size:
            pool.sort(key=lambda entry: entry[1])
            random.Random(seed + i).shuffle(pool)
            out += [position for position, _ in pool]
            pool = []
    return out
