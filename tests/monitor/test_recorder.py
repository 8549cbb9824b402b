"""The accumulator under a fake clock."""

from typing import Any

import numpy as np
import pytest

from lightning_lengthpool.monitor.recorder import CudaStepRecorder, StepRecorder
from lightning_lengthpool.runs.steps.columns import COLUMNS


class FakeClock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def play(*calls: tuple[Any, ...]) -> tuple[float, float]:
    """Open a micro-batch, make the calls (time, method, collectives), close it; its compute and wait seconds."""
    clock = FakeClock()
    recorder = StepRecorder(clock)
    recorder.begin(0, [1])
    for at, method, *collectives in calls:
        clock.now = at
        getattr(recorder, method)(*collectives)
    recorder.end()
    compute, wait = recorder.take(0)[0, 8:10]
    return float(compute), float(wait)


def run_micro_batch(recorder: StepRecorder, clock: FakeClock, step: int = 0, collectives: int = 4) -> None:
    """Fetched at +1 s, forward at +3, gradients at +6 and +7, reduced at +11, end at +12."""
    origin = clock.now
    clock.now = origin + 2
    recorder.begin(step, [3, 5], fetch_started=origin + 1, data_seconds=0.5)
    for at, call in [
        (3, lambda: recorder.start_compute(4)),
        (4, lambda: recorder.start_compute(9)),  # a second forward of the same micro-batch does not count
        (5, lambda: recorder.start_backward(collectives)),
        (6, lambda: recorder.mark_gradient(collectives)),
        (7, lambda: recorder.mark_gradient(collectives)),
        (11, lambda: recorder.end_backward(collectives + 1)),
        (12, recorder.end),
    ]:
        clock.now = origin + at
        call()


def test_recorder_gives_exact_seconds_and_drops_what_it_gave():
    clock = FakeClock()
    recorder = StepRecorder(clock)
    run_micro_batch(recorder, clock, step=7)
    assert recorder.take(rank=3).tolist() == [[7, 3, 2, 8, 5, 10, 0, 0.5, 4, 4, 11]]
    assert recorder.take(rank=3).shape == (0, 11)


STEP = [  # two gradients; the first one completes a reduction, whose launch takes 2 s; the second one completes another
    (1, "start_compute", 4),
    (2, "start_backward", 4),
    (4, "mark_gradient", 4),
    (6, "after_reduction", 5),
    (9, "mark_gradient", 5),
    (10, "after_reduction", 6),
    (20, "end_backward", 6),
]


def test_reductions_are_waiting_wherever_they_are_launched():
    assert play(*STEP) == (3 + 3, 2 + 11)


def test_gradients_after_which_no_reduction_is_launched_are_one_piece():
    calls = [(at, method, 4) for at, method, _ in STEP]  # as within `no_sync`
    assert play(*calls) == (8, 11)


def test_several_backward_passes_are_summed():
    second = [(at + 20, method, n + 2) for at, method, n in STEP[1:]]
    assert play(*STEP, *second) == (6 + (4 + 3), 13 + 13)


def test_a_backward_pass_without_gradients_of_parameters_is_compute_if_another_one_follows():
    adversarial = [(1.5, "start_backward", 4), (1.7, "end_backward", 4)]  # the gradient of the input, say
    assert play(STEP[0], *adversarial, *STEP[1:]) == (6, 13)
    assert play(*STEP, (21, "start_backward", 6), (22, "end_backward", 6)) == (6, 13)


@pytest.mark.parametrize("place", [1, 2, 4])  # in the hook on a gradient, 3 and 5, it is a reduction
def test_a_collective_of_the_users_hides_compute_wherever_it_is(place):
    late = [(at, method, n + 1) for at, method, n in STEP[place:]]
    assert np.isnan(play(*STEP[:place], *late)).all()


def test_a_collective_between_two_backward_passes_hides_compute():
    second = [(at + 20, method, n + 3) for at, method, n in STEP[1:]]
    assert np.isnan(play(*STEP, *second)).all()


@pytest.mark.parametrize("unseen", [STEP[-1:], STEP[-2:]])
def test_a_backward_pass_whose_return_is_not_seen_hides_compute(unseen):
    seen = STEP[: -len(unseen)]  # `loss.backward()` by hand
    assert np.isnan(play(*seen)).all()
    assert np.isnan(play(*seen, *[(at + 20, method, n + 2) for at, method, n in STEP[1:]])).all()


def test_an_unknown_number_of_collectives_hides_compute():
    assert np.isnan(play(*[(at, method, None) for at, method, _ in STEP])).all()


def test_only_compute_and_wait_are_left_out():
    clock = FakeClock()
    recorder = StepRecorder(clock)
    run_micro_batch(recorder, clock, collectives=5)
    (row,) = recorder.take(0)
    assert np.isnan(row[8:10]).all() and not np.isnan(np.delete(row, [8, 9])).any()


def test_a_micro_batch_begins_where_the_last_one_ended_unless_something_came_between():
    clock = FakeClock()
    recorder = StepRecorder(clock)
    seconds = []
    for fetched, interrupted in ((14.0, False), (5.0, True), (13.5, True)):
        run_micro_batch(recorder, clock)
        ended = clock.now
        if interrupted:
            recorder.interrupt()
        clock.now = ended + 2
        recorder.begin(1, [2], fetch_started=ended + fetched - 12, data_seconds=1.0)
        clock.now = ended + 3
        recorder.end()
        seconds.append(recorder.take(0)[1, -1])
    assert seconds == [3, 3, 1.5]


def test_compute_is_absent_where_a_step_needs_a_reduction_and_launched_none():
    clock = FakeClock()
    recorder = StepRecorder(clock)
    for reduced in (True, False, False, True, True):
        recorder.begin(0, [1])
        recorder.start_compute(0)
        recorder.start_backward(0)
        recorder.mark_gradient(0)
        recorder.after_reduction(1 if reduced else 0)
        recorder.end_backward(1 if reduced else 0)
        recorder.end(needs_reduction=True)
    assert np.isnan(recorder.take(0)[:, COLUMNS.index("compute_seconds")]).tolist() == [False, True, True, True, False]


def test_recorder_ignores_calls_between_micro_batches():
    clock = FakeClock()
    recorder = StepRecorder(clock)
    for method in {method for _, method, _ in STEP}:
        getattr(recorder, method)()
    recorder.end()
    assert len(recorder.take(0)) == 0
    recorder.begin(0, [])  # an empty batch, without a backward pass
    recorder.end()
    (row,) = recorder.take(0)
    assert row[2:7].tolist() == [0, 0, 0, 0, 0] and np.isnan(row[8:10]).all()


def test_cuda_recorder_reads_its_events_only_when_the_records_are_taken(monkeypatch):
    clock, read = FakeClock(), []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = clock()

        def synchronize(self) -> None:
            read.append(self)

        def elapsed_time(self, end: "Event") -> float:
            return (end.at - self.at) * 1000

    monkeypatch.setattr("torch.cuda.Event", Event)
    recorder = CudaStepRecorder(clock)
    recorder.begin(0, [1])
    for offset in (0, 20):
        for at, method, collectives in STEP:
            clock.now = offset + at
            getattr(recorder, method)(collectives + offset // 10)
    recorder.end()
    assert not read
    assert recorder.take(0)[0, 8:10].tolist() == [6 + (4 + 3), 13 + 13]
