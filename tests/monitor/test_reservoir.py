import random

import numpy as np

from lightning_lengthpool.monitor.recorder import Reservoir


def test_keeps_all_while_there_is_room():
    reservoir = Reservoir(4)
    reservoir.add([3, 1])
    np.testing.assert_array_equal(reservoir.padded(), [3, 1, np.nan, np.nan])


def test_every_number_is_as_likely_to_stay():
    counts = np.zeros(20)
    for seed in range(4000):
        reservoir = Reservoir(5, seed)
        for number in range(20):
            reservoir.add([number])
        kept = reservoir.padded().astype(int)
        assert len(set(kept)) == 5
        counts[kept] += 1
    # 1,000 expected of each, standard deviation 27
    assert abs(counts - 1000).max() < 5 * 27


def test_touches_no_other_random_sequence():
    random.seed(1)
    before = random.getstate()
    Reservoir(1).add([1, 2, 3])
    assert random.getstate() == before
