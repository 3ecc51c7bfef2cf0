"""This machine's boot: its id, and a clock that runs since then."""

from __future__ import annotations

import time
import uuid
from pathlib import Path

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def boot_seconds() -> float:
    """Return a clock that nobody sets, and that goes on while the machine sleeps."""
    return time.clock_gettime(_CLOCK)


def read_boot_id() -> str:
    """Return an id that changes with every boot of this machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        # Elsewhere the time of boot, to the minute, serves: wall clock less uptime.
        return f"{uuid.getnode():x}-{int(time.time() - time.monotonic()) // 60}"
