"""The doctor on a tree in the shape of a Thor's, and on an empty one."""

import socket
from pathlib import Path

import pytest

from appliance.host.doctor import Level, Place, board_findings
from appliance.host.doctor_docker import image_finding, runtime_finding
from tests.appliance.host_fake import FakeDaemon

MEMORY = "MemTotal: 128000000 kB\nMemFree: 2097152 kB\nMemAvailable: 104857600 kB\nCached: 99614720 kB\n"
THOR = {
    "etc/nv_tegra_release": "# R38 (release), REVISION: 2.0, GCID: 1, BOARD: generic, EABI: aarch64\n",
    "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.00  Release Build\n",
    "var/lib/nvpmodel/status": "pmode:0000 fmode:quiet",
    "etc/nvpmodel.conf": "< POWER_MODEL ID=0 NAME=MAXN >\n< POWER_MODEL ID=1 NAME=120W >\n",
    "sys/class/hwmon/hwmon1/name": "soctherm_oc",
    "sys/class/hwmon/hwmon1/oc1_event_cnt": "0",
    "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_cur_freq": "2601000",
    "proc/meminfo": MEMORY,
    "proc/swaps": "Filename Type Size Used Priority\n/dev/zram0 partition 1 0 5\n",
    "proc/77/cmdline": "VLLM::EngineCore\0",
    "proc/77/status": "Name: x\nPPid:\t70\n",
}


def found(root: Path, changes: dict[str, str] | None = None, **place: object) -> dict[str, tuple[Level, str]]:
    for name, text in (THOR | (changes or {})).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return {one.name: (one.level, one.seen) for one in board_findings(Place(str(root), now=1.8e9, **place))}


def test_a_thor_in_order(tmp_path):
    seen = found(tmp_path)
    assert seen["jetpack"] == (Level.OK, "Jetson, L4T 38.2.0, JetPack 7.0")
    assert seen["gpu driver"] == (Level.OK, "NVIDIA 580.00")
    assert seen["power mode"] == (Level.OK, "0 MAXN")
    assert seen["over-current"] == (Level.OK, "oc1: 0")
    assert seen["cpu clock"] == (Level.OK, "fastest of 1 at 2601 MHz")
    assert seen["memory"] == (Level.OK, "available 100.0 GiB, free 2.0 GiB, cached 95.0 GiB, of 122.1 GiB")
    assert seen["swap"] == (Level.OK, "/dev/zram0")
    assert seen["orphans"][0] is Level.OK


@pytest.mark.parametrize(
    ("name", "file", "text", "level", "seen"),
    [
        ("jetpack", "etc/nv_tegra_release", "# R36 (release), REVISION: 4.0\n", Level.FAIL, "L4T 36.4"),
        ("power mode", "var/lib/nvpmodel/status", "pmode:0001", Level.WARN, "1 120W"),
        ("over-current", "sys/class/hwmon/hwmon1/oc1_event_cnt", "3", Level.WARN, "oc1: 3"),
        ("cpu clock", "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_cur_freq", "242000", Level.WARN, "at 242 MHz"),
        ("memory", "proc/meminfo", MEMORY.replace("104857600", "1048576"), Level.WARN, "available 1.0 GiB"),
        ("swap", "proc/swaps", "Filename\n/dev/nvme0n1p2 partition 1 0 5\n", Level.WARN, "/dev/nvme0n1p2"),
        ("orphans", "proc/77/status", "PPid:\t1\n", Level.FAIL, "77 VLLM::EngineCore"),
    ],
)
def test_what_is_wrong_is_seen(tmp_path, name, file, text, level, seen):
    finding = found(tmp_path, {file: text})[name]
    assert finding[0] is level
    assert seen in finding[1]


def test_a_laptop_fails_in_nothing(tmp_path):
    findings = {one.name: one.level for one in board_findings(Place(str(tmp_path)))}
    assert Level.FAIL not in findings.values()
    assert findings["jetpack"] is findings["memory"] is Level.UNKNOWN


def test_a_taken_port_and_a_broken_model(tmp_path, model):
    (model / "model.safetensors").write_bytes(b"version https://git-lfs")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        seen = found(tmp_path / "root", port=taken.getsockname()[1], model=str(model))
    assert seen["port"][0] is Level.WARN
    assert seen["model"][0] is Level.FAIL
    assert "not a safetensors file" in seen["model"][1]


def test_runtime_and_image():
    daemon = FakeDaemon()
    daemon.add_image("app:1")
    assert runtime_finding(daemon).level is Level.WARN
    assert image_finding(daemon, "app:1", "x86_64").level is Level.OK
    assert image_finding(daemon, "app:1", "aarch64").level is Level.FAIL
    assert image_finding(daemon, "app:2", "aarch64").level is Level.WARN
