"""A step of a job: a streaming query that is started, waited for, stopped between two batches.

Spark gives the Python worker of a source ten seconds to start, whatever the machine is busy with.
A query that ended for that has done nothing wrong, and goes on from its checkpoint like any other:
it is started again, a few times.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from pyspark.errors import StreamingQueryException

from pipelines.failure import explain

_WORKER_LATE = "Python worker failed to connect back"
_ATTEMPTS_MAX = 4
_STOP_SECONDS = 30
_POLL_SECONDS = 0.02


class Step:
    """One step; `read_count` and `late_count` are complete when it is finished."""

    def __init__(self, name: str, start: Callable[[], Any]) -> None:
        self.name = name
        self.read_count = 0
        self.late_count = 0
        self._start = start
        self._attempt_count = 1
        with explain(name):
            self._query = start()

    def is_running(self) -> bool:
        """Return whether it runs; one that may be started again is, and does."""
        if not self._query.isActive:
            self._restart_if(self._query.exception())
        return bool(self._query.isActive)

    def finish(self) -> None:
        """Wait for its end.

        Raises:
            JobFailed: it failed; the text is why.
        """
        with explain(self.name):
            while not self._is_over():
                pass
        self._count()

    def stop(self) -> None:
        """Stop it between two batches, if it comes to that soon."""
        query = self._query
        end = time.monotonic() + _STOP_SECONDS
        while query.isActive and query.status["isTriggerActive"] and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        if query.isActive:
            query.stop()

    def _is_over(self) -> bool:
        try:
            self._query.awaitTermination()
            return True
        except StreamingQueryException as error:
            if not self._restart_if(error):
                raise
            return False

    def _restart_if(self, error: Any) -> bool:
        is_harmless = error is not None and _WORKER_LATE in str(error)
        if not is_harmless or self._attempt_count == _ATTEMPTS_MAX:
            return False
        self._count()
        self._attempt_count += 1
        with explain(self.name):
            self._query = self._start()
        return True

    def _count(self) -> None:
        for one in self._query.recentProgress:
            self.read_count += one["numInputRows"]
            self.late_count += sum(
                operator["numRowsDroppedByWatermark"] for operator in one["stateOperators"]
            )
