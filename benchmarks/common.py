"""What every benchmark records beside its numbers: the machine, the commit, the load, the settings."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """CPU model, cores that this process may use, and how busy they are already."""
    return {
        "cpu": _cpu_model(),
        "cores": _cores(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "own code": _own_code(),
        "load_average": [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else None,
    }


def _cores() -> int | None:
    try:
        from duodecoding.backends.llamacpp import physical_cores
    except ImportError:  # a machine that runs torch only
        return os.cpu_count()
    return physical_cores()


def _own_code() -> str | None:
    try:
        from duodecoding.cli.machine import own_code
    except ImportError:
        return None
    return own_code()


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def commit() -> str:
    """Of the working tree; `+` where it has changes of its own. A machine that got no history with it is told (offline.sh)."""
    if told := os.environ.get("BENCHMARK_COMMIT"):
        return told
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--exclude=*"]
    done = subprocess.run(git, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def spread(values: Sequence[float], digits: int = 4) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {name: round(value, digits) for name, value in (("q1", low), ("median", middle), ("q3", high))}


def write(name: str, settings: dict[str, Any], results: dict[str, Any]) -> Path:
    record = {
        "benchmark": name,
        "when": time.strftime("%Y-%m-%d %H:%M:%S"),
        "commit": commit(),
        "machine": machine(),
        "settings": settings,
        "results": results,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(results, indent=2))
    print(f"written to {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")
    return path


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="name or path of the target")
    parser.add_argument("--threads", type=int, default=0, help="0: all physical cores")
    return parser
