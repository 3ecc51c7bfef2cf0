"""One topic as one producer sees it."""

from __future__ import annotations

import hashlib
import itertools
import os

from broker.commit import NO_PRODUCER, Author
from broker.config import ProducerOptions
from broker.partitioner import PartitionChooser
from broker.topic import Topic


class TopicWriter:
    """An open topic, its settings, and the producer's identity there."""

    def __init__(self, topic: Topic, options: ProducerOptions) -> None:
        self.topic = topic
        self.name = topic.name
        self.chooser = PartitionChooser(options.partitioner)
        self._options = options
        self._tokens = itertools.count()
        self._token_prefix = os.urandom(8)
        self._producer_id = NO_PRODUCER
        self._sequence = 0
        self._epoch = 0
        self._new_identity()
        self._read_settings()

    def refresh(self) -> int:
        """Read the topic's settings again; return its partition count."""
        self.topic.refresh()
        self._read_settings()
        return self.partition_count

    def author(self) -> Author:
        """Return the identity of the next commit; kept for every attempt at it."""
        if self._options.transactional_id is not None and self._producer_id == NO_PRODUCER:
            self._take_over(self._options.transactional_id)
        token = self._token_prefix + next(self._tokens).to_bytes(8, "little")
        is_transactional = self._options.transactional_id is not None
        return Author(token, self._producer_id, self._sequence, self._epoch, is_transactional)

    def committed(self) -> None:
        self._sequence += 1
        if self.topic.state.settings is not self._settings:
            self._read_settings()

    def forget_identity(self) -> None:
        """After an outcome that stays unknown: what this identity has committed is not known."""
        self._new_identity()

    def _new_identity(self) -> None:
        self._sequence = self._epoch = 0
        if self._options.transactional_id is not None:
            self._producer_id = NO_PRODUCER
        else:
            self._producer_id = int.from_bytes(os.urandom(8), "little") >> 1 or 1

    def _take_over(self, transactional_id: str) -> None:
        digest = hashlib.sha256(transactional_id.encode()).digest()
        producer_id = int.from_bytes(digest[:8], "little") >> 1 or 1
        author = self.topic.fence(producer_id, timeout_ms=self._options.request_timeout_ms)
        self._producer_id, self._epoch, self._sequence = producer_id, author.epoch, 1

    def _read_settings(self) -> None:
        state = self.topic.state
        self._settings = settings = state.settings
        self.partition_count = state.partition_count
        self.message_bytes_max: int = settings["max.message.bytes"]
        self.needs_key = "compact" in settings["cleanup.policy"]
        self.is_log_append = settings["message.timestamp.type"] == "LogAppendTime"
        codec = settings["compression.type"]
        self.codec: str = (
            (self._options.compression_type or "none") if codec == "producer" else codec
        )
