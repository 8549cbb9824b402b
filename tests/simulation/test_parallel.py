"""Work that is spread over processes: its results and errors, and that no process is left behind."""

import os
import signal
import subprocess
import sys

import pytest

from lightning_lengthpool.simulation import parallel


def test_what_a_job_raises_is_raised_and_a_killed_process_is_told(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})

    def fails(job):
        if job == 3:
            raise ValueError("job 3")
        return job

    with pytest.raises(ValueError, match="job 3"):
        list(parallel.spread(fails, range(6), [1.0] * 6))
    assert dict(parallel.spread(lambda job: job + 1, range(6), [1.0] * 6)) == {n: n + 1 for n in range(6)}
    for end in (lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: os._exit(0)):
        with pytest.raises(RuntimeError, match="ended with exit code (-9|0)"):
            list(parallel.spread(lambda job, end=end: end(), range(2), [1.0] * 2))


SCRIPT = """
import os, signal, sys, time, numpy, torch
from lightning_lengthpool.simulation import parallel
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it, and so do its children
os.sched_getaffinity = lambda pid: {0, 1}
torch.set_num_threads(2)
torch.rand(500, 500) @ torch.rand(500, 500)  # threads of its own, which a fork does not have
print(sorted(parallel.spread(lambda job: float(numpy.sort(numpy.arange(job))[-1]), [3, 2], [9, 9])), flush=True)
def job(number):
    sys.stdout.write(f"{os.getpid()}\\n"), sys.stdout.flush(), time.sleep(600)
list(parallel.spread(job, [0, 1], [9, 9]))
"""


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "killed"])
def test_a_plain_script_with_threads_spreads_its_work_and_leaves_no_process_behind(end):
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout.readline() == "[(0, 2.0), (1, 1.0)]\n"
    children = [int(process.stdout.readline()) for _ in range(2)]
    if end == signal.SIGINT:
        os.killpg(process.pid, end)  # as a terminal does
    else:
        process.kill()
    _, errors = process.communicate(timeout=60)  # until the last of them has closed its output
    assert errors.count("KeyboardInterrupt") == (end == signal.SIGINT) and process.returncode != 0
    assert end == signal.SIGKILL or not any(os.path.exists(f"/proc/{child}") for child in children)
