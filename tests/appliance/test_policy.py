"""What follows a loss: the table, the limits, the measures. Times are given, nothing waits."""

import pytest

from appliance.faults import Cause, Fault, Stage
from appliance.policy import POLICIES, Action, History, Limits

LIMITS = Limits(failed_starts=5, crashes=3, window=100.0, pause=1.0, cap=60.0)


class Run:
    """A history that is told losses; every measure is possible unless said otherwise."""

    def __init__(self, limits: Limits = LIMITS, degrade: bool = True, rotate: bool = True) -> None:
        self.history = History(limits)
        self.degrade, self.rotate = degrade, rotate

    def start_fails(self, cause: Cause, times: int = 1) -> list[Action]:
        return [self._lost(Fault(cause, "x"), 0.0).action for _ in range(times)]

    def crashes(self, cause: Cause, served: float = 1.0) -> Action:
        self.history.became_ready()
        return self._lost(Fault(cause, "x", Stage.READY), served).action

    def pauses(self, cause: Cause, times: int) -> list[float]:
        return [self._lost(Fault(cause, "x"), 0.0).pause for _ in range(times)]

    def _lost(self, fault: Fault, served: float):
        return self.history.lost(fault, served, can_degrade=self.degrade, can_rotate=self.rotate)


R, D, C, S = Action.RETRY, Action.DEGRADE, Action.ROTATE, Action.STOP


@pytest.mark.parametrize(
    ("cause", "actions"),
    [
        (Cause.OUT_OF_MEMORY, [R, R, R, R, S]),
        (Cause.PROFILING_RACE, [R, R, R, R, S]),
        (Cause.DISK_FULL, [R, R, R, R, S]),
        (Cause.KERNEL_IMAGE, [D, D, D]),
        (Cause.BAD_FLAG, [S]),
        (Cause.BAD_MODEL, [S]),
        (Cause.POISONED_CACHE, [R, C, R, R, S]),
        (Cause.UNKNOWN, [R, R, C, R, S]),
        (Cause.CUDA_ERROR, [R, D, R, D, R, D]),
        (Cause.HANG, [R, D, R, D]),
        (Cause.SELF_TEST, [D, D, D]),
    ],
)
def test_first_starts_that_fail_alike(cause, actions):
    assert Run().start_fails(cause, len(actions)) == actions


def test_every_class_has_a_policy_with_advice():
    assert set(POLICIES) == set(Cause)
    assert all(policy.advice for policy in POLICIES.values())


@pytest.mark.parametrize(
    ("cause", "actions"),
    [
        (Cause.KERNEL_IMAGE, [S]),  # another start would fail alike
        (Cause.CUDA_ERROR, [R, R, R, R, S]),
        (Cause.SELF_TEST, [R, R, R, R, S]),
    ],
)
def test_at_the_end_of_the_ladder(cause, actions):
    assert Run(degrade=False).start_fails(cause, len(actions)) == actions


def test_without_caches_nothing_is_put_aside():
    assert Run(rotate=False).start_fails(Cause.POISONED_CACHE, 5) == [R, R, R, R, S]


def test_settings_that_worked_once_are_tried_again():
    """A model folder on a network drive may come back."""
    run = Run()
    assert run.crashes(Cause.UNKNOWN) is R
    assert run.start_fails(Cause.BAD_MODEL, 5) == [R, R, R, R, S]


def test_unlike_failures_take_no_measure():
    run = Run()
    assert run.start_fails(Cause.CUDA_ERROR) == [R]
    assert run.start_fails(Cause.OUT_OF_MEMORY) == [R]
    assert run.start_fails(Cause.CUDA_ERROR) == [D]


def test_losses_of_ready_engines_within_the_window_are_limited():
    run = Run()
    assert [run.crashes(Cause.UNKNOWN, served=30.0) for _ in range(3)] == [R, R, S]


def test_the_reason_of_the_last_word_names_the_limit():
    run = Run(degrade=False)
    for _ in range(2):
        run.crashes(Cause.UNKNOWN)
    run.history.became_ready()
    last = run.history.lost(Fault(Cause.UNKNOWN, "x", Stage.READY), 1.0, can_degrade=False, can_rotate=False)
    assert (last.action, last.reason) == (S, "3 crashes within 100 s of serving")
    run = Run(Limits(failed_starts=2))
    run.start_fails(Cause.UNKNOWN)
    last = run.history.lost(Fault(Cause.UNKNOWN, "x"), 0.0, can_degrade=False, can_rotate=False)
    assert (last.action, last.reason) == (S, "2 failed starts")


def test_a_limit_of_one_start_needs_no_reason():
    last = History(Limits(failed_starts=1)).lost(Fault(Cause.UNKNOWN, "x"), 0.0, can_degrade=True, can_rotate=True)
    assert (last.action, last.reason) == (S, "")


def test_an_engine_that_serves_for_long_clears_the_record():
    run = Run()
    assert [run.crashes(Cause.UNKNOWN, served=60.0) for _ in range(20)] == [R] * 20  # never three within 100 s
    assert run.crashes(Cause.UNKNOWN, served=150.0) is R
    assert [run.crashes(Cause.UNKNOWN, served=1.0) for _ in range(2)] == [R, S]


def test_failed_starts_do_not_thin_out_the_window():
    """A window of wall time would never see three crashes of an engine that starts for half an hour."""
    run = Run()
    assert run.crashes(Cause.UNKNOWN) is R
    assert run.start_fails(Cause.OUT_OF_MEMORY, 2) == [R, R]
    assert run.crashes(Cause.UNKNOWN) is R
    assert run.crashes(Cause.UNKNOWN) is S


def test_a_rung_down_begins_the_counts_anew():
    run = Run()
    assert [run.crashes(Cause.CUDA_ERROR) for _ in range(4)] == [R, D, R, D]
    run.degrade = False
    assert [run.crashes(Cause.CUDA_ERROR) for _ in range(3)] == [R, R, S]


def test_caches_are_put_aside_once_until_an_engine_got_ready():
    run = Run(Limits(failed_starts=9))
    assert run.start_fails(Cause.POISONED_CACHE, 4) == [R, C, R, R]
    run.history.became_ready()
    assert run.start_fails(Cause.POISONED_CACHE, 1) == [C]


def test_a_crash_of_unknown_cause_puts_no_caches_aside():
    run = Run(Limits(crashes=9))
    assert [run.crashes(Cause.UNKNOWN) for _ in range(5)] == [R] * 5


def test_pauses_double_up_to_the_cap_and_memory_gets_more_patience():
    limits = Limits(failed_starts=99, pause=1.0, cap=10.0)
    assert Run(limits).pauses(Cause.UNKNOWN, 6) == [1, 2, 4, 8, 10, 10]
    assert Run(limits).pauses(Cause.PROFILING_RACE, 4) == [2, 4, 8, 10]
    assert Run(limits).pauses(Cause.OUT_OF_MEMORY, 3) == [4, 8, 10]


def test_failed_starts_in_a_row_are_told_over_rungs():
    run = Run()
    run.start_fails(Cause.SELF_TEST, 3)
    assert run.history.failed_starts == 3
    run.history.became_ready()
    assert run.history.failed_starts == 0
