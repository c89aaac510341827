"""The board on the metrics page, and when a low share of T5 is an alert."""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from appliance.board import BoardReading, BoardSampler, read_board
from appliance.board_metrics import register_board
from appliance.t5share import Limits, Verdict, judge
from tests.appliance.board_tree import build


def page_of(sampler: BoardSampler) -> dict[str, float]:
    registry = CollectorRegistry()
    register_board(registry, sampler)
    text = generate_latest(registry).decode()
    names = [family.name for family in text_string_to_metric_families(text)]
    assert len(names) == len(set(names))
    lines = [line for line in text.splitlines() if line[0] != "#"]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_the_page_of_a_thor(tmp_path: Path):
    now = [0.0]
    sampler = BoardSampler(lambda: read_board(build(tmp_path)), clock=lambda: now[0])
    sampler.sample()
    now[0] = 2.0
    sampler.sample()
    page = page_of(sampler)
    assert page == {
        "appliance_memory_total_bytes": 128805896 * 1024,
        "appliance_memory_free_bytes": 2**30,
        "appliance_memory_available_bytes": 40 * 2**30,
        "appliance_memory_cached_bytes": 38 * 2**30,
        'appliance_temperature_celsius{zone="cpu-thermal"}': 51.25,
        'appliance_temperature_celsius{zone="gpu-thermal"}': 63.5,
        'appliance_temperature_celsius{zone="tj-thermal"}': 64.125,
        'appliance_power_watts{rail="VDD_GPU"}': 42.0,
        'appliance_power_watts{rail="VDD_CPU_SOC_MSS"}': 14.98,
        'appliance_power_watts{rail="VIN"}': 97.5,
        'appliance_fan_rpm{fan="pwm_tach"}': 2310,
        'appliance_fan_duty_ratio{fan="pwmfan"}': 0.4,
        'appliance_clock_hertz{name="gpu-gpc-0"}': 1.575e9,
        'appliance_clock_hertz{name="bwmgr"}': 4.266e9,
        'appliance_clock_hertz{name="cpu0"}': 242e6,
        'appliance_clock_limit_hertz{limit="min",name="gpu-gpc-0"}': 315e6,
        'appliance_clock_limit_hertz{limit="max",name="gpu-gpc-0"}': 1.575e9,
        'appliance_clock_limit_hertz{limit="min",name="cpu0"}': 972e6,
        'appliance_clock_limit_hertz{limit="max",name="cpu0"}': 2.601e9,
        'appliance_overcurrent_events_total{name="oc1"}': 0,
        'appliance_overcurrent_events_total{name="oc2"}': 7,
        'appliance_joules_total{rail="VDD_GPU"}': 84.0,
        'appliance_joules_total{rail="VDD_CPU_SOC_MSS"}': 29.96,
        'appliance_joules_total{rail="VIN"}': 195.0,
        'appliance_power_mode_info{id="1",name="120W"}': 1,
        'appliance_board_info{jetpack="7.1",l4t="38.4.1",model="NVIDIA Jetson AGX Thor Developer Kit"}': 1,
        "appliance_board_read_seconds": 0,
    }


def test_without_a_sample_or_without_sensors_the_page_is_short():
    sampler = BoardSampler(BoardReading)
    assert page_of(sampler) == {}
    sampler.sample()
    assert list(page_of(sampler)) == ["appliance_board_read_seconds"]


def test_a_scrape_reads_no_file_of_the_board(tmp_path: Path):
    reads = []
    sampler = BoardSampler(lambda: reads.append(1) or BoardReading(watts={"VIN": 3.0}))
    sampler.sample()
    for _ in range(5):
        assert page_of(sampler)['appliance_power_watts{rail="VIN"}'] == 3.0
    assert reads == [1]


# --- the alert ---------------------------------------------------------------------------------------------

LIMITS = Limits(window=100, raise_below=0.9, clear_above=0.95, least_steps=50)


def grown(t5: int, missed: int, prefill: int = 0, at: float = 100.0) -> list[tuple[float, dict[str, int]]]:
    """Totals at the start and at the end of a window in which the counters grew so far."""
    before = {"t5:decode": 5, "fallback:q_len": 1000, "fallback:prefill": 3}
    after = {
        "t5:decode": 5 + t5,
        "fallback:q_len": 1000 + missed,
        "fallback:prefill": 3 + prefill,
        "fallback:mixed": prefill,
    }
    return [(0.0, before), (at, after)]


@pytest.mark.parametrize(
    ("t5", "missed", "before", "expected"),
    [
        (100, 0, False, Verdict(False, 1.0, 100, "")),
        (90, 10, False, Verdict(False, 0.9, 100, "q_len")),
        (89, 11, False, Verdict(True, 0.89, 100, "q_len")),
        (94, 6, True, Verdict(True, 0.94, 100, "q_len")),  # between the limits: as before
        (94, 6, False, Verdict(False, 0.94, 100, "q_len")),
        (95, 5, True, Verdict(False, 0.95, 100, "q_len")),
        (0, 49, False, Verdict(False, 0.0, 49, "q_len")),  # too few steps to raise
        (49, 0, True, Verdict(True, 1.0, 49, "")),  # and to clear
        (0, 50, False, Verdict(True, 0.0, 50, "q_len")),
        (0, 0, True, Verdict(False, None, 0, "")),  # nothing decodes
    ],
)
def test_the_alert_with_hysteresis(t5, missed, before, expected):
    assert judge(grown(t5, missed), before, LIMITS) == expected


def test_steps_with_prompts_do_not_count_against_t5():
    assert judge(grown(100, 0, prefill=10_000), False, LIMITS) == Verdict(False, 1.0, 100, "")


def test_only_the_window_counts():
    points = [(0.0, {"fallback:disabled": 0}), (50.0, {"fallback:disabled": 900}), (150.0, {"fallback:disabled": 900})]
    assert judge(points, True, LIMITS) == Verdict()
    assert judge(points[:2], False, LIMITS) == Verdict(True, 0.0, 900, "disabled")


def test_without_points_the_alert_stays():
    assert judge([], True, LIMITS) == Verdict(True)
