"""The properties of a machine that affect the rounding of a training step."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from common.host.machine import cpu_units

_VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS")
_WORDS = {"cpu": "CPU", "units": "vector units", "capability": "kernels", "torch": "torch"}


def machine_facts(device: torch.device, cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, Any]:
    """Return the properties of this machine that affect rounding, as values for JSON."""
    lines = (
        cpuinfo.read_text(errors="replace", encoding="utf-8").splitlines()
        if cpuinfo.exists()
        else []
    )
    named = (line for line in lines if line.startswith("model name"))
    is_cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if is_cuda else device.type,
        "cpu": next(named, "").partition(":")[2].strip(),
        "units": " ".join(cpu_units()),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "num_threads": torch.get_num_threads(),
    } | {name: os.environ[name] for name in _VARIABLES if name in os.environ}


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return one sentence for each property that differs between two machines."""
    return [
        f"{_WORDS.get(name, name)}: was {was.get(name, 'not set')}, is {now.get(name, 'not set')}"
        for name in sorted(was.keys() | now.keys())
        if was.get(name) != now.get(name)
    ]
