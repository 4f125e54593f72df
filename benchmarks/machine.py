"""What a measurement ran on."""

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any


def description() -> dict[str, Any]:
    """Cores, memory, kernel, versions; load averages of the last minutes, as others may have worked
    then."""
    model = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "cores": os.cpu_count(),
        "processor": model[0] if model else platform.processor(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average": os.getloadavg(),
        **{name: importlib.metadata.version(name) for name in ("torch", "deepspeed", "isal")},
    }
