"""Maintenance beside a writer: a thread that looks after the topics it writes to.

Sealing follows the writing closely; what can wait is done every few minutes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from broker.errors import UnknownTopic
from broker.maintenance.keeping import Round, is_round_due
from broker.maintenance.sealing import Stopped
from broker.maintenance.units import Progress
from broker.topic import Topic

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
# Where looking is a request to a store.
_REMOTE_LOOK_SECONDS = 30.0
# After a failure, which is likely to come again.
_REST_SECONDS = 30.0


class Keeper:
    """Looks after topics from the moment they are shown to it until it is closed."""

    def __init__(self, make_round: Callable[[str, Progress], Round]) -> None:
        self._make_round = make_round
        self._topics: dict[str, Topic] = {}
        self._seen: dict[str, int] = {}
        self._looked: dict[str, float] = {}
        self._rest_until: dict[str, float] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def look_after(self, topic: Topic) -> None:
        """Begin with a topic that its writer has opened; the writer keeps it open."""
        self._topics[topic.name] = topic
        self._seen[topic.name] = topic.state.file_number
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="spark-log-keeper", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop, in the middle of a piece of work if need be; nothing is left half done."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def begin(self, what: str, total: int) -> None:
        """As a watcher of its own rounds: nothing to show."""

    def advance(self, count: int) -> None:
        if self._stop.is_set():
            raise Stopped

    def _run(self) -> None:
        while True:
            for topic in list(self._topics.values()):
                if not self._stop.is_set():
                    self._keep(topic)
            if self._stop.wait(_LOOK_SECONDS):
                return

    def _keep(self, topic: Topic) -> None:
        try:
            if time.monotonic() < self._rest_until.get(topic.name, 0.0):
                return
            if not topic.state.settings["maintenance.enabled"]:
                return
            number = topic.state.file_number
            if topic.storage.is_remote and number == self._seen[topic.name]:
                now = time.monotonic()
                if now - self._looked.get(topic.name, now - _REMOTE_LOOK_SECONDS) < (
                    _REMOTE_LOOK_SECONDS
                ):
                    return
                self._looked[topic.name] = now
            is_full = is_round_due(topic.storage, topic.name)
            # Only a complete file can be sealed: while none was added there is nothing to do.
            if is_full or number != self._seen[topic.name]:
                self._seen[topic.name] = number
                self._make_round(topic.name, self).run(only_seal=not is_full)
        except UnknownTopic:
            self._topics.pop(topic.name, None)
        except Exception as error:
            # The last frame of this thread: a failure that passes must not end all maintenance.
            logger.warning("could not maintain %s: %s", topic.name, error)
            self._rest_until[topic.name] = time.monotonic() + _REST_SECONDS
