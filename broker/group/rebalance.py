"""When an assignment is needed, and who makes it.

Everybody may; the first to commit one has done it for all. So that members who come together are
assigned together, and not everybody tries at once, each waits until the group has been quiet for a
while, a little longer the later it joined, but not for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from broker.group.assignment import Strategy, Subscriber, check, common_strategy
from broker.group.group import Group
from broker.group.known_topics import KnownTopics, wanted_topics
from broker.group.lease import Clock
from broker.group.state import GroupState, KnownTopic, format_places
from broker.records import TopicPartition

_QUIET_SECONDS = 0.03
_QUIET_SECONDS_PER_MEMBER = 0.005
_TURN_SECONDS = 0.02
# How many quiet times a group that is never quiet waits.
_PATIENCE = 10


class Rebalancer:
    """Makes assignments on behalf of one member."""

    def __init__(
        self,
        group: Group,
        topics: KnownTopics,
        strategies: Mapping[str, Strategy],
        clock: Clock,
        *,
        max_age: float,
        lock_wait: float,
    ) -> None:
        self._group = group
        self._topics = topics
        self._strategies = strategies
        self._clock = clock
        self._max_age = max_age
        self._lock_wait_ms = round(lock_wait * 1000)
        self._mutex = threading.Lock()
        self._known: dict[str, KnownTopic] = {}
        self._looked = float("-inf")
        self._looked_members: frozenset[str] = frozenset()
        self._seen: tuple[int, dict[str, KnownTopic]] | None = None
        self._changed = 0.0
        self._first_changed: float | None = None

    def assign_if_due(self, member_id: str) -> float | None:
        """Assign if it is needed and this member's turn.

        Returns:
            In how many seconds to ask again, if an assignment is needed; otherwise None.
        """
        if not self._mutex.acquire(blocking=False):
            return _TURN_SECONDS  # The other thread is at it.
        try:
            return self._assign_if_due(member_id)
        finally:
            self._mutex.release()

    def close(self) -> None:
        with self._mutex:
            self._topics.close()

    def _assign_if_due(self, member_id: str) -> float | None:
        now = self._clock()
        version, is_unsettled, ids, topics = self._group.glance(
            lambda state: (state.version, state.is_unsettled, list(state.members), state.topics),
            now,
        )
        if member_id not in ids:
            return None
        # Not when a static member is back, which wants what it wanted: a look takes the longer the
        # more was written since the last. But before the assignment of another is undone, who may
        # have looked later.
        is_as_known = self._known == topics and (
            not is_unsettled or self._looked_members == frozenset(ids)
        )
        if not is_as_known or now - self._looked >= self._max_age:
            self._look_at_topics(now)
        if not is_unsettled and self._known == topics:
            self._first_changed = None
            return None
        self._note_change(version, now)
        wait = self._due(ids.index(member_id), len(ids)) - now
        if wait > 0:
            return wait
        self._group.assign(self._make, self._lock_wait_ms)
        return _TURN_SECONDS

    def _look_at_topics(self, now: float) -> None:
        members = self._group.glance(lambda state: list(state.members.values()), now)
        self._known = self._topics.look(members)
        self._looked = now
        self._looked_members = frozenset(member.member_id for member in members)

    def _note_change(self, version: int, now: float) -> None:
        if self._seen != (version, self._known) or self._first_changed is None:
            self._changed = now
        if self._first_changed is None:
            self._first_changed = now
        self._seen = (version, self._known)

    def _due(self, rank: int, member_count: int) -> float:
        assert self._first_changed is not None
        quiet = _QUIET_SECONDS + _QUIET_SECONDS_PER_MEMBER * member_count
        patience = self._first_changed + _PATIENCE * quiet
        return min(self._changed + quiet, patience) + _TURN_SECONDS * rank

    def _make(self, state: GroupState) -> tuple[dict[str, KnownTopic], dict[str, Any]] | None:
        """Under the lock: the assignment for this state; None if another has made it."""
        if not self._looked_members.issuperset(state.members):
            return None  # What they want is to be looked at first.
        wanted = {
            topic
            for member in state.members.values()
            for topic in wanted_topics(member, self._known)
        }
        known = {name: topic for name, topic in self._known.items() if name in wanted}
        if not state.is_unsettled and state.topics == known:
            return None
        return known, make_assignment(state, known, self._strategies)


def make_assignment(
    state: GroupState, topics: Mapping[str, KnownTopic], strategies: Mapping[str, Strategy]
) -> dict[str, dict[str, list[int]]]:
    """Return {member: {topic: [partition]}} for the members of a state."""
    name = common_strategy([member.strategies for member in state.members.values()])
    assert name is not None, "join refuses a member that has no strategy in common"
    subscribers = [
        Subscriber(
            member_id,
            frozenset(wanted_topics(member, topics)),
            frozenset(state.owned_by(member_id)),
            member.instance_id,
        )
        for member_id, member in state.members.items()
    ]
    counts = {topic: known.partition_count for topic, known in topics.items()}
    owners = check(strategies[name](subscribers, counts), subscribers, counts)
    by_member: dict[str, list[TopicPartition]] = {member_id: [] for member_id in state.members}
    for place, member_id in owners.items():
        by_member[member_id].append(place)
    return {member_id: format_places(places) for member_id, places in by_member.items()}
