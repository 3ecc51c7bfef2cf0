"""What a consumer reads: topics by name or pattern, or given partitions; and the open readers."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from broker.errors import UnknownPartition, UnknownTopic
from broker.reader import TopicReader
from broker.records import TopicPartition
from broker.storage import Storage

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Catalog:
    """What a consumer needs of the log: its files, its topics, and readers for them."""

    storage: Storage
    topic_names: Callable[[], list[str]]
    open_reader: Callable[[str], TopicReader]


class Subscription:
    """Keeps one reader for each topic, and notices topics and partitions that appear."""

    def __init__(self, catalog: Catalog, max_age_ms: int) -> None:
        self._catalog = catalog
        self._max_age = max_age_ms / 1000
        self._readers: dict[str, TopicReader] = {}
        self._topics: list[str] = []
        self._pattern: re.Pattern[str] | None = None
        self._partitions: list[TopicPartition] | None = None
        self._is_begun = False
        self._listed = 0.0

    def use_topics(self, topics: list[str]) -> None:
        self._start_over()
        for topic in topics:
            self.reader(topic)
        self._topics = topics

    def use_pattern(self, pattern: re.Pattern[str]) -> None:
        self._start_over()
        self._pattern = pattern

    def use_partitions(self, partitions: list[TopicPartition]) -> None:
        self._start_over()
        for place in partitions:
            count = self.reader(place.topic).refresh().partition_count
            if not 0 <= place.partition < count:
                raise UnknownPartition(place.topic, place.partition, count)
        self._partitions = partitions

    def keep_partitions(self, partitions: list[TopicPartition]) -> None:
        """Read exactly these from now on; readers that are still needed stay open."""
        self._topics, self._pattern, self._partitions = [], None, partitions
        needed = {place.topic for place in partitions}
        for topic in self._readers.keys() - needed:
            self._readers.pop(topic).close()

    def topics(self) -> set[str]:
        if self._partitions is not None:
            return {place.topic for place in self._partitions}
        return set(self._topics)

    def reader(self, topic: str) -> TopicReader:
        """Return the reader of a topic, opening it first if need be."""
        reader = self._readers.get(topic)
        if reader is None:
            reader = self._readers[topic] = self._catalog.open_reader(topic)
        return reader

    def opened(self, topic: str) -> TopicReader | None:
        """Return the reader of a topic if it is open."""
        return self._readers.get(topic)

    def directories(self) -> set[str]:
        """Return the directories in which news would show."""
        watched = {f"{self.reader(topic).topic.directory}/journal" for topic in self.topics()}
        if self._pattern is not None:
            watched.add("topics")
        return watched

    def refresh(
        self, known: Collection[TopicPartition]
    ) -> tuple[list[TopicPartition], list[tuple[TopicPartition, bool]]]:
        """Read what is new in every topic.

        Returns:
            The partitions that are gone, and those that are new, each with whether it appeared
            only after the subscription.
        """
        gone: list[TopicPartition] = []
        late_topics = self._new_topics()
        for topic in list(self.topics()):
            try:
                self.reader(topic).refresh()
            except UnknownTopic:
                if self._pattern is None:
                    raise
                logger.warning("topic %r was deleted; no longer reading it", topic)
                gone += [place for place in known if place.topic == topic]
                self._drop(topic)
        if gone:
            late_topics |= self._match_topics()  # Another may have taken the name already.
        is_first, self._is_begun = not self._is_begun, True
        added = [
            (place, not is_first or place.topic in late_topics)
            for place in self._wanted()
            if place not in known or place in gone
        ]
        return gone, added

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()

    def _wanted(self) -> list[TopicPartition]:
        if self._partitions is not None:
            return self._partitions
        return [
            TopicPartition(topic, partition)
            for topic in self._topics
            for partition in range(self.reader(topic).state.partition_count)
        ]

    def _new_topics(self) -> set[str]:
        """Return the topics that fit the pattern and are new, if it is time to look for them."""
        is_fresh = self._is_begun and time.monotonic() - self._listed < self._max_age
        return set() if self._pattern is None or is_fresh else self._match_topics()

    def _match_topics(self) -> set[str]:
        """Look for topics that fit the pattern; return those that are new."""
        assert self._pattern is not None
        self._listed = time.monotonic()
        found: set[str] = set()
        for topic in self._catalog.topic_names():
            if self._pattern.fullmatch(topic) and topic not in self._topics:
                try:
                    self.reader(topic)
                except UnknownTopic:
                    continue  # Deleted between the listing and here.
                self._topics.append(topic)
                found.add(topic)
        return found if self._is_begun else set()

    def _drop(self, topic: str) -> None:
        self._topics.remove(topic)
        self._readers.pop(topic).close()

    def _start_over(self) -> None:
        self._topics, self._pattern, self._partitions = [], None, None
        self._is_begun = False
        self.close()
