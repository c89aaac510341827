"""The board's part of /metrics: what the sampler saw last; a scrape reads no file of the board.

Joules per output token are derived, over whatever window is asked for (the rail is VIN on Thor, the package or GPU
elsewhere)::

    sum(rate(appliance_joules_total{rail="VIN"}[5m])) / sum(rate(vllm:generation_tokens_total[5m]))

and the share of the time at which the GPU ran under its highest allowed clock::

    appliance_clock_hertz{name="gpu-gpc-0"} / appliance_clock_limit_hertz{name="gpu-gpc-0",limit="max"}
"""

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from appliance.board import BoardReading, BoardSampler, Sample


def register_board(registry: CollectorRegistry, sampler: BoardSampler) -> None:
    """Add the board's metrics to a registry; the caller runs the sampler (``with sampler:``)."""
    registry.register(BoardCollector(sampler))


class BoardCollector(Collector):
    """Shows the last sample; a family without a single value is left out."""

    def __init__(self, sampler: BoardSampler) -> None:
        self._sampler = sampler

    def describe(self) -> Iterator[Metric]:
        """Nothing: which families exist depends on the board."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Families with values."""
        sample = self._sampler.latest()
        if sample is not None:
            yield from (family for family in _families(sample) if family.samples)


def _families(sample: Sample) -> Iterator[Metric]:
    reading = sample.reading
    yield from _memory(reading)
    gauges = (
        ("appliance_temperature_celsius", "Temperature by zone.", "zone", reading.temperatures),
        ("appliance_power_watts", "Power by rail.", "rail", reading.watts),
        ("appliance_fan_rpm", "Fan speed, revolutions a minute.", "fan", reading.fan_rpm),
        ("appliance_fan_duty_ratio", "Duty cycle of the fan, 0 to 1.", "fan", reading.fan_duty),
    )
    for name, text, label, values in gauges:
        yield _gauges(name, text, label, values)
    yield from _clocks(reading)
    yield _counters(
        "appliance_overcurrent_events",
        "Over-current events since boot; after one the clocks may stay low.",
        "name",
        reading.overcurrent,
    )
    yield _counters("appliance_joules", "Energy since the appliance's start by rail.", "rail", sample.joules)
    yield from _infos(reading)
    yield GaugeMetricFamily(
        "appliance_board_read_seconds", "Time that the last look at the board took.", value=sample.seconds
    )


def _memory(reading: BoardReading) -> Iterator[Metric]:
    texts = {
        "total": "Memory of the board, shared by CPU and GPU on Thor.",
        "free": "Memory that nobody has touched; the page cache is not in it.",
        "available": "Memory that can be had without swapping, page cache included.",
        "cached": "Page cache.",
    }
    for field, text in texts.items():
        value = getattr(reading.memory, field)
        if value is not None:
            yield GaugeMetricFamily(f"appliance_memory_{field}_bytes", text, value=value)


def _clocks(reading: BoardReading) -> Iterator[Metric]:
    current = {name: clock.current for name, clock in reading.clocks.items()}
    yield _gauges("appliance_clock_hertz", "Clock that the hardware runs at.", "name", current)
    limits = GaugeMetricFamily(
        "appliance_clock_limit_hertz", "Limits that the clock's governor keeps to.", labels=["name", "limit"]
    )
    for name, clock in reading.clocks.items():
        for limit, value in (("min", clock.least), ("max", clock.most)):
            if value is not None:
                limits.add_metric([name, limit], value)
    yield limits


def _infos(reading: BoardReading) -> Iterator[Metric]:
    mode = GaugeMetricFamily("appliance_power_mode_info", "Mode of nvpmodel.", labels=["id", "name"])
    if reading.power_mode is not None:
        mode.add_metric([str(reading.power_mode.number), reading.power_mode.name], 1)
    yield mode
    board = GaugeMetricFamily("appliance_board_info", "Board and release.", labels=["model", "l4t", "jetpack"])
    identity = reading.identity
    if identity.model or identity.l4t:
        board.add_metric([identity.model, identity.l4t, identity.jetpack], 1)
    yield board


def _gauges(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family


def _counters(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family
