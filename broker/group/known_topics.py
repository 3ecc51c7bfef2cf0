"""The topics that the members of a group want, and how many partitions each has now."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from broker.errors import UnknownTopic
from broker.group.state import KnownTopic, Member
from broker.topic import Topic


class KnownTopics:
    """Keeps the wanted topics open, so that a look costs little. For one thread at a time."""

    def __init__(
        self, topic_names: Callable[[], list[str]], open_topic: Callable[[str], Topic]
    ) -> None:
        self._topic_names = topic_names
        self._open_topic = open_topic
        self._open: dict[str, Topic] = {}

    def look(self, members: Iterable[Member]) -> dict[str, KnownTopic]:
        """Return the topics that exist now and that some member wants."""
        members = list(members)
        names: list[str] = []
        if any(member.pattern is not None for member in members):
            names = self._topic_names()
        wanted = {topic for member in members for topic in wanted_topics(member, names)}
        for name in self._open.keys() - wanted:
            self._open.pop(name).close()
        known = {name: self._known(name) for name in sorted(wanted)}
        return {name: topic for name, topic in known.items() if topic is not None}

    def close(self) -> None:
        for topic in self._open.values():
            topic.close()
        self._open.clear()

    def _known(self, name: str) -> KnownTopic | None:
        try:
            topic = self._open.get(name)
            if topic is None:
                topic = self._open[name] = self._open_topic(name)
            state = topic.refresh()
            if not state.is_deleted:
                return KnownTopic(state.incarnation, state.partition_count)
        except UnknownTopic:
            pass
        gone = self._open.pop(name, None)
        if gone is not None:
            gone.close()
            return self._known(name)  # It may have been made again.
        return None


def wanted_topics(member: Member, names: Iterable[str]) -> set[str]:
    """Return what a member wants: the topics it names, or those of `names` that fit its pattern."""
    if member.pattern is None:
        return set(member.topics)
    pattern = re.compile(member.pattern)
    return {name for name in names if pattern.fullmatch(name)}
