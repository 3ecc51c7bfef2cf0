"""What a client counts: each thing as a total and as a rate, under the names that Kafka's have.

Counting is one addition; rates are worked out by whoever looks. A rate is that of the last half
minute or so, or of the time since the last look, if that is longer ago.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

_WINDOW_SECONDS = 30.0
# Looks in quick succession share a sample, so that there are not more than this.
_SAMPLES = 30

Readings = dict[str, dict[str, float]]


class Measured(Protocol):
    """Something with `metrics()`, as it is exported."""

    def metrics(self) -> Readings: ...


class Exported(Protocol):
    """A client whose metrics are being served."""

    port: int

    def close(self) -> None: ...


def export_if_asked(port: int | None, label: str | None, client: Measured) -> Exported | None:
    """Serve a client's metrics on a port, if one is given."""
    if port is None:
        return None
    from broker import exporter  # Most clients need neither the package nor the server.

    return exporter.export(port, label or "", client)


class Metrics:
    """The totals of one client. Added to by its own threads, read by any."""

    def __init__(
        self,
        group: str,
        counts: Iterable[str],
        latencies: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        group: the name under which they are reported.
        counts: what is counted.
        latencies: for each sum of seconds, the count that it is the sum over.
        """
        self._group = group
        self._latencies = dict(latencies or {})
        self._clock = clock
        self._mutex = threading.Lock()
        self.totals: dict[str, float] = dict.fromkeys([*counts, *self._latencies], 0)
        self._samples: deque[tuple[float, dict[str, float]]] = deque()
        self._samples.append((clock(), dict(self.totals)))

    def add(self, name: str, amount: float = 1) -> None:
        self.totals[name] += amount

    def read(self, **gauges: float) -> Readings:
        """Return the totals and rates, and what the caller knows of the moment."""
        with self._mutex:
            now, totals = self._clock(), dict(self.totals)
            then, before = self._sample(now, totals)
        readings: dict[str, float] = {}
        for name, total in totals.items():
            readings[f"{name}-total"] = total
            passed = now - then
            readings[f"{name}-rate"] = (total - before[name]) / passed if passed > 0 else 0.0
        for name, count in self._latencies.items():
            readings[f"{name}-avg"] = totals[name] / totals[count] if totals[count] else 0.0
        readings.update({name.replace("_", "-"): value for name, value in gauges.items()})
        return {self._group: readings}

    def _sample(self, now: float, totals: dict[str, float]) -> tuple[float, dict[str, float]]:
        """Return the sample that rates are counted from, and keep a new one."""
        samples = self._samples
        while len(samples) > 1 and now - samples[1][0] >= _WINDOW_SECONDS:
            samples.popleft()
        oldest = samples[0]
        if now - samples[-1][0] >= _WINDOW_SECONDS / _SAMPLES:
            samples.append((now, totals))
        return oldest
