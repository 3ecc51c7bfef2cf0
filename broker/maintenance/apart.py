"""Maintenance in a process of its own, for writers that may end at any moment.

Spark commits a batch in a worker that it may end right after; a thread would not live to see the
end of a round, and a round must not hold up the batch.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading

from broker.errors import LogError
from broker.maintenance.keeping import is_round_due, last_round
from broker.storage import environment
from broker.topic import Topic

logger = logging.getLogger(__name__)


def start_if_due(topic: Topic) -> None:
    """Start a round for a topic that nobody has maintained for some minutes. Never raises."""
    try:
        settings = topic.state.settings
        if settings["maintenance.enabled"] and is_round_due(topic.storage, topic.name):
            # Others who commit meanwhile must not start one each.
            topic.storage.touch(last_round(topic.name))
            _start([sys.executable, "-m", "broker.cli", "--log", topic.storage.root, "maintain",
                    topic.name], environment(topic.storage.options))  # fmt: skip
    except (LogError, OSError) as error:
        logger.warning("could not start the maintenance of %s: %s", topic.name, error)


def _start(command: list[str], variables: dict[str, str]) -> None:
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, **variables},
    )
    # Somebody has to hear of its end.
    threading.Thread(target=process.wait, name="spark-log-apart", daemon=True).start()
