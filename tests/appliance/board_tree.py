"""A file tree in the shape of an AGX Thor's: names and units as the board's kernel writes them.

The shape is put together from NVIDIA's Jetson Linux guide, the kernel's hwmon documentation and boards' listings
in public threads; the figures are made up.
"""

from pathlib import Path

THOR = {
    "proc/device-tree/model": "NVIDIA Jetson AGX Thor Developer Kit\0",
    "proc/meminfo": (
        "MemTotal:       128805896 kB\nMemFree:         1048576 kB\nMemAvailable:   41943040 kB\n"
        "Buffers:          102400 kB\nCached:         39845888 kB\nHugePages_Total:       0\n"
    ),
    "etc/nv_tegra_release": "# R38 (release), REVISION: 4.1, GCID: 43443517, BOARD: generic, EABI: aarch64\n",
    "etc/nvpmodel.conf": (
        "# comment\n< POWER_MODEL ID=0 NAME=MAXN >\nCPU_ONLINE CORE_0 1\n< POWER_MODEL ID=1 NAME=120W >\n"
    ),
    "var/lib/nvpmodel/status": "pmode:0001\n",
    # Thermal zones: numbers carry no meaning, and there are 11 of them here so that 10 sorts after 9.
    "sys/class/thermal/thermal_zone0/type": "cpu-thermal\n",
    "sys/class/thermal/thermal_zone0/temp": "51250\n",
    "sys/class/thermal/thermal_zone1/type": "gpu-thermal\n",
    "sys/class/thermal/thermal_zone1/temp": "63500\n",
    "sys/class/thermal/thermal_zone10/type": "tj-thermal\n",
    "sys/class/thermal/thermal_zone10/temp": "64125\n",
    "sys/class/thermal/cooling_device0/type": "pwm-fan\n",
    # The board's power monitors.
    "sys/class/hwmon/hwmon3/name": "ina3221\n",
    "sys/class/hwmon/hwmon3/in1_label": "VDD_GPU\n",
    "sys/class/hwmon/hwmon3/in1_input": "12000\n",
    "sys/class/hwmon/hwmon3/curr1_input": "3500\n",
    "sys/class/hwmon/hwmon3/in2_label": "VDD_CPU_SOC_MSS\n",
    "sys/class/hwmon/hwmon3/in2_input": "11984\n",
    "sys/class/hwmon/hwmon3/curr2_input": "1250\n",
    "sys/class/hwmon/hwmon3/in3_label": "NC\n",
    "sys/class/hwmon/hwmon3/in3_input": "0\n",
    "sys/class/hwmon/hwmon3/curr3_input": "0\n",
    "sys/class/hwmon/hwmon3/in7_label": "sum of shunt voltages\n",
    "sys/class/hwmon/hwmon3/in7_input": "9\n",
    "sys/class/hwmon/hwmon10/name": "ina238\n",
    "sys/class/hwmon/hwmon10/in0_input": "5\n",
    "sys/class/hwmon/hwmon10/in1_input": "20000\n",
    "sys/class/hwmon/hwmon10/curr1_input": "4900\n",
    "sys/class/hwmon/hwmon10/power1_input": "97500000\n",
    "sys/class/hwmon/hwmon4/name": "pwmfan\n",
    "sys/class/hwmon/hwmon4/pwm1": "102\n",
    "sys/class/hwmon/hwmon5/name": "pwm_tach\n",
    "sys/class/hwmon/hwmon5/rpm": "2310\n",
    "sys/class/hwmon/hwmon6/name": "soctherm_oc\n",
    "sys/class/hwmon/hwmon6/oc1_event_cnt": "0\n",
    "sys/class/hwmon/hwmon6/oc2_event_cnt": "7\n",
    "sys/class/hwmon/hwmon6/oc2_throt_en": "1\n",
    "sys/class/devfreq/gpu-gpc-0/cur_freq": "1575000000\n",
    "sys/class/devfreq/gpu-gpc-0/min_freq": "315000000\n",
    "sys/class/devfreq/gpu-gpc-0/max_freq": "1575000000\n",
    "sys/class/devfreq/bwmgr/cur_freq": "4266000000\n",
    # A CPU that crawls after an over-current event while the governor claims 2.6 GHz.
    "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_cur_freq": "242000\n",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": "2601000\n",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_min_freq": "972000\n",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_max_freq": "2601000\n",
    "sys/devices/system/cpu/cpufreq/boost": "1\n",
}

LAPTOP = {
    "proc/meminfo": "MemTotal: 16000000 kB\nMemFree: 1 kB\n",
    "sys/class/thermal/thermal_zone0/type": "acpitz\n",
    "sys/class/thermal/thermal_zone0/temp": "48000\n",
    "sys/class/thermal/thermal_zone1/type": "acpitz\n",
    "sys/class/thermal/thermal_zone1/temp": "27800\n",
    "sys/class/hwmon/hwmon0/name": "coretemp\n",
    "sys/class/hwmon/hwmon0/temp1_label": "Package id 0\n",
    "sys/class/hwmon/hwmon0/temp1_input": "55000\n",
    "sys/class/hwmon/hwmon1/name": "thinkpad\n",
    "sys/class/hwmon/hwmon1/fan1_input": "3201\n",
    "sys/class/powercap/intel-rapl:0/name": "package-0\n",
    "sys/class/powercap/intel-rapl:0/energy_uj": "262000000000\n",
    "sys/class/powercap/intel-rapl:0/max_energy_range_uj": "262143000000\n",
    "sys/class/powercap/intel-rapl:0:0/name": "core\n",
    "sys/class/powercap/intel-rapl:0:0/energy_uj": "1000000\n",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": "1800000\n",
}


def build(root: Path, files: dict[str, str] = THOR) -> str:
    """Write the tree; the result is the root that readers take."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)
