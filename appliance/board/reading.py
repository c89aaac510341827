"""What one look at the board gives. Pure data."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Memory:
    """The board's memory, bytes: CPU and GPU share it on Thor.

    Attributes:
        total: ``MemTotal``.
        free: ``MemFree``: touched by nobody. CUDA's "free" on Thor is near this and ignores the page cache.
        available: ``MemAvailable``: what can be had without swapping, page cache included.
        cached: ``Cached``: the page cache, which holds the model's files after a start.
    """

    total: int | None = None
    free: int | None = None
    available: int | None = None
    cached: int | None = None


@dataclass(frozen=True)
class Clock:
    """A clock and the limits that its governor keeps to, Hz."""

    current: int
    least: int | None = None
    most: int | None = None


@dataclass(frozen=True)
class PowerMode:
    """The mode of nvpmodel: its number (``-m 0``), and its name where the configuration tells it."""

    number: int
    name: str = ""


@dataclass(frozen=True)
class Identity:
    """Which board and which software: device tree's model, L4T (``38.2.0``), JetPack (``7.0``); empty if unknown."""

    model: str = ""
    l4t: str = ""
    jetpack: str = ""


@dataclass(frozen=True)
class BoardReading:
    """One look at the board; a field that could not be read is None or has no entry.

    Attributes:
        temperatures: degrees Celsius by the type of the thermal zone or the label of the sensor.
        watts: by rail.
        energy: joules by rail, from hardware that counts energy itself, with the value at which the hardware's
            counter starts again from 0 (None: never).
        clocks: by the kernel's name of the device (``gpu-gpc-0``, ``bwmgr``, ``cpu0``).
        fan_rpm: revolutions a minute by fan.
        fan_duty: duty cycle by fan, 0 to 1.
        overcurrent: events since boot by counter.
    """

    memory: Memory = field(default_factory=Memory)
    temperatures: Mapping[str, float] = field(default_factory=dict)
    watts: Mapping[str, float] = field(default_factory=dict)
    energy: Mapping[str, tuple[float, float | None]] = field(default_factory=dict)
    clocks: Mapping[str, Clock] = field(default_factory=dict)
    fan_rpm: Mapping[str, float] = field(default_factory=dict)
    fan_duty: Mapping[str, float] = field(default_factory=dict)
    overcurrent: Mapping[str, int] = field(default_factory=dict)
    power_mode: PowerMode | None = None
    identity: Identity = field(default_factory=Identity)
