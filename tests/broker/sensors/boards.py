"""The files of real machines, as their kernels lay them out, in a folder of a test."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")

PMIC = """\
 3V7_WL_SW_A current(0)=0.00000000A
   3V3_SYS_A current(1)=0.06245952A
   1V8_SYS_A current(2)=0.16102850A
  VDD_CORE_A current(7)=2.00000000A
 3V7_WL_SW_V volt(8)=3.79999600V
   3V3_SYS_V volt(9)=3.30632200V
   1V8_SYS_V volt(10)=1.79828900V
  VDD_CORE_V volt(15)=0.90000000V
     EXT5V_V volt(24)=5.06788000V
      BATT_V volt(25)=3.01110800V
"""
PMIC_WATTS = 0.06245952 * 3.306322 + 0.1610285 * 1.798289 + 2.0 * 0.9


def lay(root: Path, files: Mapping[str, str]) -> Path:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def process(root: Path, *, ticks: int = 150, pages: int = 1000, busy: int = 900) -> Path:
    """Any Linux: this process, the machine's processors and memory."""
    return lay(
        root,
        {
            "proc/self/stat": f"42 (an (odd) name) S 1 42 42 0 -1 4194304 9 9 9 9 {ticks - 50} 50 "
            "7 7 20 0 3 0 100 9 9 18446744073709551615\n",
            "proc/self/statm": f"9000 {pages} 500 1 0 700 0\n",
            "proc/stat": f"cpu  {busy - 100} 40 30 5000 600 0 20 10 3 0\n"
            "cpu0 1 2 3 4 5 6 7 8 9 0\nintr 1 2 3\n",
            "proc/meminfo": "MemTotal:        8000000 kB\nMemFree:          100000 kB\n"
            "MemAvailable:    6000000 kB\nHugePages_Total:       0\n",
        },
    )


def zones(root: Path, temperatures: Sequence[tuple[str, str]]) -> Path:
    for number, (kind, value) in enumerate(temperatures):
        zone = f"sys/class/thermal/thermal_zone{number}"
        lay(root, {f"{zone}/type": f"{kind}\n", f"{zone}/temp": value})
    return root


def ina3221(root: Path, chip: str, hwmon: int, rails: Sequence[tuple[str, int, int]]) -> Path:
    """JetPack 5 and 6; rails as name, mV, mA."""
    folder = f"sys/bus/i2c/drivers/ina3221/{chip}/hwmon/hwmon{hwmon}"
    lay(root, {f"{folder}/name": "ina3221\n", f"{folder}/in7_label": "sum of shunt voltages\n"})
    for number, (name, volts, amperes) in enumerate(rails, 1):
        lay(
            root,
            {
                f"{folder}/in{number}_label": f"{name}\n",
                f"{folder}/in{number}_input": f"{volts}\n",
                f"{folder}/in{number}_enable": "1\n",
                f"{folder}/curr{number}_input": f"{amperes}\n",
                f"{folder}/curr{number}_crit_alarm": "0\n",
            },
        )
    return root


def orin_nano(root: Path) -> Path:
    """Jetson Orin Nano, JetPack 6: VDD_IN carries the module."""
    process(root)
    rails = [("VDD_IN", 5000, 1000), ("VDD_CPU_GPU_CV", 5000, 300), ("VDD_SOC", 5000, 200)]
    ina3221(root, "1-0040", 3, rails)
    kinds = ["cpu-thermal", "gpu-thermal", "cv0-thermal", "soc0-thermal", "tj-thermal"]
    zones(root, [(kind, f"{50 + i}250\n") for i, kind in enumerate(kinds)])
    (root / "sys/class/thermal/thermal_zone2/temp").unlink()  # switched off: EAGAIN there
    return lay(
        root,
        {
            "proc/device-tree/model": "NVIDIA Jetson Orin Nano Developer Kit\0",
            "sys/class/thermal/cooling_device0/type": "pwm-fan\n",
            "sys/class/thermal/cooling_device0/cur_state": "2\n",
            "sys/class/thermal/cooling_device1/type": "cpu-throttle-alert\n",
            "sys/class/thermal/cooling_device1/cur_state": "0\n",
        },
    )


def agx_orin(root: Path) -> Path:
    """Jetson AGX Orin, JetPack 5: no rail carries all; one is fed from another."""
    process(root)
    first = [("VDD_GPU_SOC", 1000, 4000), ("VDD_CPU_CV", 1000, 2000), ("VIN_SYS_5V0", 5000, 1000)]
    ina3221(root, "1-0040", 3, first)
    return ina3221(root, "1-0041", 4, [("NC", 0, 0), ("VDDQ_VDD2_1V8AO", 5000, 300), ("NC", 0, 0)])


def jetson_nano(root: Path) -> Path:
    """Jetson Nano, JetPack 4: IIO devices of the driver ina3221x."""
    process(root)
    folder = "sys/bus/i2c/drivers/ina3221x/6-0040/iio:device0"
    for number, (name, power) in enumerate([("POM_5V_IN", 2500), ("POM_5V_GPU", 80)]):
        lay(
            root,
            {
                f"{folder}/rail_name_{number}": f"{name}\n",
                f"{folder}/in_power{number}_input": f"{power}\n",
                f"{folder}/in_voltage{number}_input": "5000\n",
                f"{folder}/in_current{number}_input": f"{power // 5}\n",
            },
        )
    return zones(root, [("AO-therm", "41000\n"), ("CPU-therm", "38500\n"), ("PMIC-Die", "100000")])


def raspberry_pi_5(root: Path) -> Path:
    process(root)
    zones(root, [("cpu-thermal", "61700\n")])
    word = "sys/devices/platform/soc@107c000000/soc@107c000000:firmware/get_throttled"
    return lay(
        root, {"proc/device-tree/model": "Raspberry Pi 5 Model B Rev 1.0\0", word: "50000\n"}
    )


def zone_of_rapl(root: Path, zone: str, name: str, energy: int, wrap: int) -> Path:
    folder = f"sys/class/powercap/{zone}"
    return lay(
        root,
        {
            f"{folder}/name": f"{name}\n",
            f"{folder}/energy_uj": f"{energy}\n",
            f"{folder}/max_energy_range_uj": f"{wrap}\n",
        },
    )


def xeon(root: Path, *, energy: int = 1_000_000, dram: int = 500_000) -> Path:
    """A server: two packages' worth of zones would be the same again."""
    process(root)
    wrap = 262_143_328_850
    zone_of_rapl(root, "intel-rapl:0", "package-0", energy, wrap)
    zone_of_rapl(root, "intel-rapl:0:0", "core", 900_000, wrap)
    zone_of_rapl(root, "intel-rapl:0:1", "dram", dram, 65_712_999_613)
    zone_of_rapl(root, "intel-rapl:1", "psys", 7_000_000, wrap)
    zones(root, [("acpitz", "27800\n"), ("x86_pkg_temp", "55000\n")])
    throttle = "sys/devices/system/cpu/cpu0/thermal_throttle"
    return lay(
        root,
        {
            "sys/class/dmi/id/sys_vendor": "Dell Inc.\n",
            "sys/class/dmi/id/product_name": "PowerEdge R750\n",
            f"{throttle}/core_throttle_count": "3\n",
            f"{throttle}/package_throttle_count": "4\n",
        },
    )


class Vcgencmd:
    """A Raspberry Pi's command; what it says can be changed, ``None`` takes it away."""

    def __init__(self, adc: str | None = PMIC, throttled: str | None = "throttled=0x0\n") -> None:
        self.adc = adc
        self.throttled = throttled
        self.fault: Exception | None = None
        self.calls: list[str] = []

    def __call__(self, argv: Sequence[str]) -> str | None:
        assert argv[0] == "vcgencmd"
        self.calls.append(argv[1])
        if self.fault is not None:
            raise self.fault
        return {"pmic_read_adc": self.adc, "get_throttled": self.throttled}[argv[1]]


def no_command(argv: Sequence[str]) -> str | None:
    return None
