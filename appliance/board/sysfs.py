"""Sensors under ``/sys``: thermal zones, hwmon, devfreq, cpufreq and RAPL.

Units are the kernel's (Documentation/hwmon/sysfs-interface): in mV, curr mA, power µW, temp m°C, energy µJ,
devfreq Hz, cpufreq kHz. Sensors are found by name: the numbers of hwmon and of thermal zones change from boot to
boot.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from appliance.board.files import names_in, number_of, text_of
from appliance.board.reading import Clock

# Power monitors. INA3221: three rails, each with its label. INA238: one, Thor's board input, which has no label.
MONITORS = {"ina3221": "", "ina238": "VIN", "ina237": "VIN"}

_TEMPERATURE = re.compile(r"temp(\d+)_input")
_OVERCURRENT = re.compile(r"(oc\d+)_event_cnt")
_CPU = re.compile(r"cpu\d+")
_INA_CHANNELS = (1, 2, 3)


@dataclass
class Sensors:
    """What hwmon shows; see ``BoardReading`` for the units."""

    temperatures: dict[str, float] = field(default_factory=dict)
    watts: dict[str, float] = field(default_factory=dict)
    fan_rpm: dict[str, float] = field(default_factory=dict)
    fan_duty: dict[str, float] = field(default_factory=dict)
    overcurrent: dict[str, int] = field(default_factory=dict)


def temperatures(root: str) -> dict[str, float]:
    """Degrees Celsius by zone type; of zones of one type the hottest."""
    found: dict[str, float] = {}
    folder = "sys/class/thermal"
    for zone in names_in(root, folder):
        if not zone.startswith("thermal_zone"):
            continue
        kind, value = text_of(root, folder, zone, "type"), number_of(root, folder, zone, "temp")
        if kind and value is not None:
            found[kind] = max(value / 1000, found.get(kind, float("-inf")))
    return found


def sensors(root: str) -> Sensors:
    """Everything of hwmon that is known here."""
    found = Sensors()
    folder = "sys/class/hwmon"
    for entry in names_in(root, folder):
        chip = f"{folder}/{entry}"
        name = text_of(root, chip, "name") or entry
        files = names_in(root, chip)
        if name in MONITORS:
            for rail, watts in _rails(root, chip, MONITORS[name]):
                found.watts[rail] = watts
        elif name == "coretemp" or name.startswith("k10temp"):
            found.temperatures.update(_labelled_temperatures(root, chip, name, files))
        _fan(root, chip, name, found)
        for file in files:
            match = _OVERCURRENT.fullmatch(file)
            count = number_of(root, chip, file) if match else None
            if match and count is not None:
                found.overcurrent[match[1]] = count
    return found


def _rails(root: str, chip: str, default: str) -> Iterator[tuple[str, float]]:
    """Rails of a power monitor: its own power register where it has one, else voltage times current."""
    for channel in _INA_CHANNELS:
        rail = text_of(root, chip, f"in{channel}_label") or (default if channel == 1 else "")
        if not rail or rail == "NC":  # not connected
            continue
        power = number_of(root, chip, f"power{channel}_input")
        if power is not None:
            yield rail, power / 1e6
            continue
        volts, amperes = number_of(root, chip, f"in{channel}_input"), number_of(root, chip, f"curr{channel}_input")
        if volts is not None and amperes is not None:
            yield rail, volts * amperes / 1e6


def _labelled_temperatures(root: str, chip: str, name: str, files: list[str]) -> Iterator[tuple[str, float]]:
    for file in files:
        match = _TEMPERATURE.fullmatch(file)
        value = number_of(root, chip, file) if match else None
        if match and value is not None:
            label = text_of(root, chip, f"temp{match[1]}_label") or f"temp{match[1]}"
            yield f"{name} {label}", value / 1000


def _fan(root: str, chip: str, name: str, found: Sensors) -> None:
    """Duty and speed. Jetson's tachometer is a chip of its own (``pwm_tach``) with a file ``rpm``."""
    duty = number_of(root, chip, "pwm1")
    if duty is not None:
        found.fan_duty[name] = duty / 255
    rpm = number_of(root, chip, "rpm")
    rpm = number_of(root, chip, "fan1_input") if rpm is None else rpm
    if rpm is not None:
        found.fan_rpm[name] = float(rpm)


def clocks(root: str) -> dict[str, Clock]:
    """Clocks of the GPU (``gpu-gpc-0``), of the memory (``bwmgr``) and of each CPU.

    A CPU's is ``cpuinfo_cur_freq``, what the hardware runs at: after an over-current event Thor's CPUs may crawl
    while ``scaling_cur_freq`` claims full speed. Only where the first can't be read does the second count.
    """
    found: dict[str, Clock] = {}
    for device in names_in(root, "sys/class/devfreq"):
        values = [number_of(root, "sys/class/devfreq", device, f"{what}_freq") for what in ("cur", "min", "max")]
        if values[0] is not None:
            found[device] = Clock(values[0], values[1], values[2])
    folder = "sys/devices/system/cpu"
    for cpu in names_in(root, folder):
        if not _CPU.fullmatch(cpu):
            continue
        policy = f"{folder}/{cpu}/cpufreq"
        current = number_of(root, policy, "cpuinfo_cur_freq")
        current = number_of(root, policy, "scaling_cur_freq") if current is None else current
        if current is not None:
            least, most = (number_of(root, policy, f"scaling_{what}_freq") for what in ("min", "max"))
            found[cpu] = Clock(current * 1000, least and least * 1000, most and most * 1000)
    return found


def energy(root: str) -> dict[str, tuple[float, float | None]]:
    """Joules of Intel's and AMD's RAPL packages, and where their counters wrap; readable by root alone."""
    found: dict[str, tuple[float, float | None]] = {}
    folder = "sys/class/powercap"
    for zone in names_in(root, folder):
        # intel-rapl:0 is a package; intel-rapl:0:1 is a part of it and would count twice.
        if not re.fullmatch(r"intel-rapl:\d+", zone):
            continue
        value, wrap = number_of(root, folder, zone, "energy_uj"), number_of(root, folder, zone, "max_energy_range_uj")
        if value is not None:
            name = text_of(root, folder, zone, "name") or zone
            found[name] = (value / 1e6, wrap / 1e6 if wrap else None)
    return found
