"""Begin again beside an attempt that takes unusually long, and take what is done first.

For work that may be done twice: nobody sees it until its caller gives it a name.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Generic, TypeVar

from broker.workers import Workers

Result = TypeVar("Result")

_DELAY_MIN_SECONDS = 0.1
# An attempt is late when it has taken so many times what is usual.
_LATE = 3.0
_WEIGHT = 0.1
# Where many are late, all of them wait for the same, and more attempts make it worse.
_SHARE = 0.05
_SAVED_MAX = 2.0
_THREADS = 64


class Hedge(Generic[Result]):
    """One kind of work, and how long it usually takes."""

    def __init__(self, name: str) -> None:
        self._workers = Workers(_THREADS, name)
        self._usual_seconds = 0.0
        # How many second attempts may be made: each first one earns a share of one.
        self._saved = 1.0
        self.late_count = 0

    def first(self, attempt: Callable[[], Result], undo: Callable[[Result], object]) -> Result:
        """Return the result of one attempt, or of a second one if the first is late.

        Raises what the first raised, if no attempt succeeds.

        Args:
            undo: what is done with the result of an attempt that came too late.
        """
        futures = [self._begin(attempt)]
        done, _ = wait(futures, max(_DELAY_MIN_SECONDS, _LATE * self._usual_seconds))
        self._saved = min(self._saved + _SHARE, _SAVED_MAX)
        if not done and self._saved >= 1:
            self._saved -= 1
            self.late_count += 1
            futures.append(self._begin(attempt))
        winner = _winner(futures)
        for other in futures:
            if other is not winner:
                other.add_done_callback(lambda late: _undo(late, undo))
        result, seconds = winner.result()
        self._usual_seconds += _WEIGHT * (seconds - self._usual_seconds)
        return result

    def _begin(self, attempt: Callable[[], Result]) -> Future[tuple[Result, float]]:
        def timed() -> tuple[Result, float]:
            begun = time.monotonic()
            return attempt(), time.monotonic() - begun

        return self._workers.submit(timed)


def _undo(late: Future[tuple[Result, float]], undo: Callable[[Result], object]) -> None:
    if late.exception() is None:
        undo(late.result()[0])


def _winner(futures: list[Future[Result]]) -> Future[Result]:
    """Return the first that succeeds; if none does, the one that was begun first."""
    waiting = set(futures)
    while waiting:
        done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
        for future in done:
            if future.exception() is None:
                return future
    return futures[0]
