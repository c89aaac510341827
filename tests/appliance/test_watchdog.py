"""The watchdog's judgement as a table; its action is in test_fault_injection.py."""

import sys

import pytest

from appliance import processes, watchdog
from appliance.watchdog import Look, Strikes, look_at

PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",reason="x"} 50.0
vllm:iteration_tokens_total_bucket{engine="0",le="1.0"} 70.0
vllm:iteration_tokens_total_count{engine="0"} 100.0
vllm:iteration_tokens_total_sum{engine="0"} 9000.0
vllm:generation_tokens_total{engine="0",model_name="m"} 1000.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 1e+04
vllm:request_success_total{finished_reason="stop"} 7.0
vllm:broken nonsense
"""


def test_a_look_adds_up_progress_and_load_of_all_engines():
    assert look_at(PAGE, 5) == Look(True, progress=11112.0, requests=6.0)
    assert look_at("", 5) == Look(True, 5.0, 0.0)


GONE = Look(False)


def idle(progress: float = 0) -> Look:
    return Look(True, progress, 0)


def busy(progress: float = 0) -> Look:
    return Look(True, progress, 2)


@pytest.mark.parametrize(
    ("looks", "counts"),
    [
        ([idle(), idle(), idle()], [0, 0, 0]),
        ([busy(), busy(), busy()], [1, 2, 3]),
        ([busy(1), busy(2), busy(3)], [0, 0, 0]),
        ([busy(), busy(), busy(1), busy(1), busy(1)], [1, 2, 0, 1, 2]),
        ([GONE, GONE, GONE], [1, 2, 3]),
        ([GONE, busy(), GONE], [1, 2, 3]),
        ([GONE, GONE, idle()], [1, 2, 0]),
        ([busy(), GONE, busy(1)], [1, 2, 0]),
    ],
)
def test_strikes_by_looks(looks, counts):
    strikes = Strikes(idle())
    seen = []
    for look in looks:
        assert strikes.judge(look, in_flight=0) is False
        seen.append(strikes.count)
    assert seen == counts


def test_a_client_that_waits_for_an_idle_engine_takes_a_probe():
    strikes = Strikes(idle())
    assert strikes.judge(idle(), in_flight=1) is True
    strikes.probed(False)
    strikes.probed(False)
    assert (strikes.count, strikes.why) == (2, "a request of one token was not answered")
    strikes.probed(True)
    assert strikes.count == 0


def test_the_first_look_may_have_failed():
    strikes = Strikes(GONE)
    strikes.judge(busy(7), 0)
    assert strikes.count == 0


def test_compilers_of_the_engine_are_found_by_name(tmp_path):
    """A just-in-time build is silent for minutes."""
    import subprocess

    compiler = tmp_path / "ptxas"
    compiler.symlink_to("/bin/sleep")
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import subprocess as s; p = s.Popen(['{compiler}', '600']); print(flush=True); p.wait()",
        ],
        stdout=subprocess.PIPE,
    )
    try:
        child.stdout.readline()
        below = processes.descendants(child.pid)
        assert processes.compilers(child.pid) == {"ptxas"}
        assert watchdog._processes(child.pid) == (below[0], {})
    finally:
        processes.signal_all([*processes.descendants(child.pid), child.pid], 9)
        child.communicate()
    assert processes.compilers(child.pid) == set()
