"""The accumulator under a fake clock."""

import numpy as np

from lightning_lengthpool.recorder import StepRecorder


class FakeClock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def run_micro_batch(recorder: StepRecorder, clock: FakeClock, step: int = 0, collectives: int = 4) -> None:
    """Fetched at +1 s, forward at +3, gradients at +6 and +7, reduced at +11, end at +12."""
    origin = clock.now
    clock.now = origin + 2
    recorder.begin(step, [3, 5], fetch_started=origin + 1, data_seconds=0.5)
    for at, call in [
        (3, lambda: recorder.start_compute(4)),
        (4, lambda: recorder.start_compute(9)),  # a second forward of the same micro-batch does not count
        (5, lambda: recorder.start_backward(collectives)),
        (6, recorder.mark_gradient),
        (7, recorder.mark_gradient),
        (11, recorder.end_backward),
        (12, recorder.end),
    ]:
        clock.now = origin + at
        call()


def test_recorder_gives_exact_seconds_and_drops_what_it_gave():
    clock = FakeClock()
    recorder = StepRecorder(clock)
    run_micro_batch(recorder, clock, step=7)
    assert recorder.take(rank=3).tolist() == [[7, 3, 2, 8, 5, 10, 0.5, 4, 4, 11]]
    assert recorder.take(rank=3).shape == (0, 10)


def test_recorder_leaves_compute_out_where_a_collective_ran_inside():
    clock = FakeClock()
    for collectives in (5, None):
        recorder = StepRecorder(clock)
        run_micro_batch(recorder, clock, collectives=collectives)
        (row,) = recorder.take(0)
        assert np.isnan(row[7:9]).all() and not np.isnan(np.delete(row, [7, 8])).any()


def test_recorder_begins_a_prefetched_batch_after_the_previous_one():
    clock = FakeClock()
    recorder = StepRecorder(clock)
    run_micro_batch(recorder, clock)  # ends at 12
    clock.now = 13
    recorder.begin(1, [2], fetch_started=5.0, data_seconds=1.0)
    clock.now = 15
    recorder.end()
    assert recorder.take(0)[1, -1] == 3


def test_recorder_ignores_calls_between_micro_batches():
    clock = FakeClock()
    recorder = StepRecorder(clock)
    for call in (recorder.start_compute, recorder.start_backward, recorder.mark_gradient, recorder.end_backward):
        call()
    recorder.end()
    assert len(recorder.take(0)) == 0
    recorder.begin(0, [])  # an empty batch, without a backward pass
    recorder.end()
    (row,) = recorder.take(0)
    assert row[2:6].tolist() == [0, 0, 0, 0] and np.isnan(row[7:9]).all()
