"""The board's readers over a tree of a Thor's shape, a laptop's, a damaged one and none at all."""

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from appliance.board import BoardReading, BoardSampler, Clock, Memory, read_board
from appliance.board.energy import LONGEST_GAP_SECONDS, EnergyMeter
from appliance.board.nvml import Nvml
from appliance.board.reading import Identity, PowerMode
from appliance.board.sampler import STALE_SECONDS
from tests.appliance.board_tree import LAPTOP, THOR, build


def test_every_figure_of_a_thor(tmp_path: Path):
    reading = read_board(build(tmp_path))
    assert reading == BoardReading(
        memory=Memory(128805896 << 10, 1048576 << 10, 41943040 << 10, 39845888 << 10),
        temperatures={"cpu-thermal": 51.25, "gpu-thermal": 63.5, "tj-thermal": 64.125},
        watts={"VDD_GPU": 42.0, "VDD_CPU_SOC_MSS": 14.98, "VIN": 97.5},
        clocks={
            "gpu-gpc-0": Clock(1_575_000_000, 315_000_000, 1_575_000_000),
            "bwmgr": Clock(4_266_000_000),
            "cpu0": Clock(242_000_000, 972_000_000, 2_601_000_000),
        },
        fan_rpm={"pwm_tach": 2310.0},
        fan_duty={"pwmfan": 0.4},
        overcurrent={"oc1": 0, "oc2": 7},
        power_mode=PowerMode(1, "120W"),
        identity=Identity("NVIDIA Jetson AGX Thor Developer Kit", "38.4.1", "7.1"),
    )


def test_a_laptop_shows_what_it_has(tmp_path: Path):
    reading = read_board(build(tmp_path, LAPTOP))
    assert reading == BoardReading(
        memory=Memory(total=16000000 << 10, free=1 << 10),
        temperatures={"acpitz": 48.0, "coretemp Package id 0": 55.0},
        energy={"package-0": (262000.0, 262143.0)},
        clocks={"cpu0": Clock(1_800_000_000)},
        fan_rpm={"thinkpad": 3201.0},
    )


def test_an_empty_tree_reads_as_nothing(tmp_path: Path):
    assert read_board(str(tmp_path)) == BoardReading()


@pytest.mark.parametrize("lost", sorted(THOR))
def test_any_file_may_be_missing(tmp_path: Path, lost: str):
    """Every other field is as before: at most one entry of one field goes, or a value is worked out otherwise."""
    whole = vars(read_board(build(tmp_path)))
    (tmp_path / lost).unlink()
    rest = vars(read_board(str(tmp_path)))
    assert sum(whole[field] != rest[field] for field in whole) <= 1 or lost.endswith("/name")


@pytest.mark.parametrize("text", ["", "\n", "nan", "-", "12 34", "0x10", "\x00\xff", "9" * 5000])
def test_nonsense_in_every_file_is_left_out(tmp_path: Path, text: str):
    build(tmp_path, dict.fromkeys(THOR, text))
    reading = read_board(str(tmp_path))
    assert (reading.watts, reading.clocks, reading.overcurrent, reading.memory) == ({}, {}, {}, Memory())


def test_folders_in_place_of_files_and_files_in_place_of_folders(tmp_path: Path):
    build(tmp_path, {"sys/class/hwmon": "a file", "sys/class/thermal/thermal_zone0/temp/x": "a folder"})
    assert read_board(str(tmp_path)) == BoardReading()


def test_without_its_power_register_the_board_input_is_voltage_times_current(tmp_path: Path):
    build(tmp_path)
    (tmp_path / "sys/class/hwmon/hwmon10/power1_input").unlink()
    assert read_board(str(tmp_path)).watts["VIN"] == 98.0


def test_zones_are_found_by_type_whatever_their_number(tmp_path: Path):
    build(tmp_path)
    thermal = tmp_path / "sys/class/thermal"
    (thermal / "thermal_zone0").rename(thermal / "thermal_zone7")
    assert read_board(str(tmp_path)).temperatures["cpu-thermal"] == 51.25


def test_one_look_costs_under_5_ms(tmp_path: Path):
    """Fourteen CPUs as on Thor; processor time, since the machine may be busy with other things."""
    files = THOR | {
        name.replace("cpu0", f"cpu{cpu}"): text for name, text in THOR.items() if "/cpu0/" in name for cpu in range(14)
    }
    root = build(tmp_path, files)
    best = float("inf")
    for _ in range(10):
        started = time.thread_time()
        assert len(read_board(root).clocks) == 16
        best = min(best, time.thread_time() - started)
    assert best < 0.005


# --- energy ------------------------------------------------------------------------------------------------


def test_power_is_integrated_by_trapezoids():
    meter = EnergyMeter()
    for at, watts in ((10.0, 20.0), (11.0, 40.0), (11.5, 40.0), (13.5, 0.0)):
        meter.feed(at, {"VIN": watts})
    assert meter.joules == {"VIN": 30.0 + 20.0 + 40.0}


def test_nothing_is_counted_over_a_gap():
    meter = EnergyMeter()
    meter.feed(0.0, {"VIN": 100.0})
    meter.feed(LONGEST_GAP_SECONDS + 1, {"VIN": 100.0})
    meter.feed(LONGEST_GAP_SECONDS + 2, {"VIN": 100.0})
    assert meter.joules == {"VIN": 100.0}


def test_a_negative_reading_takes_nothing_off():
    meter = EnergyMeter()
    for at, watts in ((0.0, 5.0), (1.0, 5.0), (2.0, -50.0), (3.0, -50.0)):
        meter.feed(at, {"rail": watts})
    assert meter.joules == {"rail": 5.0}


def test_hardware_counters_win_and_may_wrap():
    meter = EnergyMeter()
    for at, joules in ((0.0, 990.0), (1.0, 998.0), (2.0, 3.0)):
        meter.feed(at, {"package-0": 1e6, "other": 1.0}, {"package-0": (joules, 1000.0)})
    assert meter.joules == {"package-0": 8.0 + 5.0, "other": 2.0}


def test_a_counter_without_a_wrap_that_went_back_was_reset():
    meter = EnergyMeter()
    for joules in (500.0, 510.0, 4.0):
        meter.feed(0.0, {}, {"gpu0": (joules, None)})
    assert meter.joules == {"gpu0": 14.0}


# --- NVML --------------------------------------------------------------------------------------------------


class FakeNvml(SimpleNamespace):
    """A driver that knows one GPU; what is in ``unsupported`` raises as NVML does."""

    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, NVML_CLOCK_MEM = 0, 1, 2

    def __getattr__(self, name: str):
        values = {
            "nvmlInit": None,
            "nvmlDeviceGetCount": 1,
            "nvmlDeviceGetHandleByIndex": "handle",
            "nvmlDeviceGetTemperature": 41,
            "nvmlDeviceGetPowerUsage": 118_500,
            "nvmlDeviceGetTotalEnergyConsumption": 7_654_321,
            "nvmlDeviceGetClockInfo": 1980,
            "nvmlDeviceGetMaxClockInfo": 1980,
        }
        if name in self.unsupported or name not in values:
            raise RuntimeError("Not Supported")
        return lambda *_: values[name]


def test_nvml_adds_the_gpu():
    reading = Nvml(FakeNvml(unsupported=())).read()
    assert (reading.temperatures, reading.watts) == ({"gpu0": 41.0}, {"gpu0": 118.5})
    assert reading.energy == {"gpu0": (7654.321, None)}
    assert reading.clocks == {
        "gpu0 sm": Clock(1_980_000_000, None, 1_980_000_000),
        "gpu0 memory": Clock(1_980_000_000, None, 1_980_000_000),
    }


def test_nvml_as_on_jetpack_7_0_leaves_power_and_clocks_out():
    missing = ("nvmlDeviceGetPowerUsage", "nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetClockInfo")
    reading = Nvml(FakeNvml(unsupported=missing)).read()
    assert (reading.temperatures, reading.watts, reading.energy, reading.clocks) == ({"gpu0": 41.0}, {}, {}, {})


def test_without_a_driver_there_is_no_gpu_and_no_second_try():
    calls = []

    class Broken(FakeNvml):
        def nvmlInit(self):  # noqa: N802
            calls.append(1)
            raise RuntimeError("Driver Not Loaded")

    nvml = Nvml(Broken(unsupported=()))
    assert [nvml.read().temperatures for _ in range(3)] == [{}, {}, {}]
    assert calls == [1]


# --- the sampler -------------------------------------------------------------------------------------------


def test_the_sampler_samples_in_a_thread_of_its_own_and_ends_with_its_context(tmp_path: Path):
    threads = set()

    def read() -> BoardReading:
        threads.add(threading.current_thread().name)
        return BoardReading(watts={"VIN": 10.0})

    twice = threading.Event()

    class Sampler(BoardSampler):
        def sample(self) -> None:
            before = self.latest()
            super().sample()
            if before is not None:
                twice.set()

    with Sampler(read, period=0.001) as sampler:
        assert twice.wait(10)
        assert sampler.latest().joules["VIN"] > 0
    assert threads == {"board"}
    assert "board" not in [thread.name for thread in threading.enumerate()]


def test_a_stuck_sensor_holds_up_nobody_and_its_sample_grows_old():
    """The pipe stands for an I2C bus that does not answer."""
    readable, writable = os.pipe()
    now = [100.0]
    reads = []

    def read() -> BoardReading:
        reads.append(1)
        if len(reads) > 1:
            os.read(readable, 1)
        return BoardReading(watts={"VIN": 1.0})

    with BoardSampler(read, period=0.0, clock=lambda: now[0]) as sampler:
        assert sampler.wait(10)
        assert sampler.latest().reading.watts == {"VIN": 1.0}
        now[0] += STALE_SECONDS + 1
        assert sampler.latest() is None
        os.close(writable)  # lets the thread go
    os.close(readable)


def test_a_bug_in_a_reader_is_logged_and_sampling_goes_on(caplog: pytest.LogCaptureFixture):
    tries = []

    def read() -> BoardReading:
        tries.append(1)
        if len(tries) == 1:
            raise KeyError("oops")
        return BoardReading()

    with BoardSampler(read, period=0.0) as sampler:
        assert sampler.wait(10)
    assert "the board can't be read" in caplog.text


def test_this_machine_shows_its_memory():
    reading = read_board("/")
    assert reading.memory.total == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
